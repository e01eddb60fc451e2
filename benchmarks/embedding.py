"""Measure how fast passages are embedded on one thread: SentenceTransformer as it comes, and ours."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks import ENCODER, Options, Result, Way, hide_progress_of_libraries, take_turns
from benchmarks.wikipedia import made_passages
from tripletune.core.options import setting
from tripletune.models.specs import source_of
from tripletune.rag.search.embedding import open_embedder, to_length_one


@dataclass(frozen=True)
class EmbeddingOptions(Options):
    """Options of `embedding`."""

    texts: str = setting("", "file with a real text per line; texts of 15 to 105 words are made of them")
    count: int = setting(512, "texts per pass", at_least=1)


def embedding(options: EmbeddingOptions) -> Result:
    """Compare texts per second on one thread: SentenceTransformer.encode as it comes, in bfloat16, and ours."""
    import torch
    from sentence_transformers import SentenceTransformer

    hide_progress_of_libraries()
    torch.set_num_threads(1)
    texts = _texts_to_embed(Path(options.texts).read_text(encoding="utf-8").splitlines(), options)
    place = source_of(ENCODER).place
    plain = SentenceTransformer(place, device="cpu")
    theirs = SentenceTransformer(place, device="cpu", model_kwargs={"dtype": torch.bfloat16})
    ours = open_embedder(ENCODER, dtype="auto")
    vectors: dict[str, np.ndarray] = {}

    def way(name: str, encode: Callable[[], np.ndarray]) -> Way:
        """A way to embed, timed by the seconds of this process, since other processes share the cores."""

        def work() -> float:
            """Embed all texts, and keep their vectors to compare them with those of the first way."""
            start = time.process_time()
            vectors[name] = encode()
            return time.process_time() - start

        return Way(name, work, warm_up=False)

    ways = [way("encode", lambda: plain.encode(texts))]
    for size in (8, 32, 128):
        ways.append(way(f"encode, bfloat16, batches of {size}", partial(theirs.encode, texts, batch_size=size)))
    ways.append(way("ours, encoder_dtype=auto", lambda: ours.encode(texts)))
    take_turns(ways, options.repeats)
    expected = to_length_one(vectors["encode"])
    rows = []
    for measured in ways:
        row = measured.row("texts", texts=len(texts), least_cosine=_least_cosine(vectors[measured.name], expected))
        rows.append(row)
    return Result("embedding", "name texts_per_second least_cosine", rows, ["Seconds are those of the processor."])


def _texts_to_embed(real_texts: Sequence[str], options: EmbeddingOptions) -> list[str]:
    """The beginnings of made passages, of 15 to 105 words: texts of one length would need no batches by length."""
    draw = random.Random(options.seed)
    texts = []
    for passage in made_passages(real_texts, options.count):
        texts.append(" ".join(passage.split()[: draw.randint(15, 105)]))
    return texts


def _least_cosine(vectors: np.ndarray, expected: np.ndarray) -> float:
    """The smallest cosine between a text's vector and the expected one, which has length one; shapes (texts, width)."""
    cosines = (to_length_one(vectors.astype(np.float32)) * expected).sum(1)
    return float(cosines.min())
