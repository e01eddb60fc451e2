"""Evaluation of an extractor while it trains: the triples it writes for some validation texts (RAS, D.1 and figure 15).

Scored by `eval.triples`, as `tripletune eval extraction` does, so the two can't disagree.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from tripletune.eval.statistics import flatten_means
from tripletune.eval.triples import Prediction, score_extractions
from tripletune.models.data.pairs import ExtractionPair
from tripletune.models.local.grammar import Repetition
from tripletune.train.extraction_rows import PairEncoder
from tripletune.train.text_evaluation import generate_replies


def choose_pairs(pairs: Iterable[ExtractionPair], count: int) -> list[ExtractionPair]:
    """The pairs whose texts have the smallest hashes: the same ones in any order of the data, in memory for them alone.

    Args:
        pairs: Validation pairs, streamed.
        count: How many.
    """
    keyed = ((hashlib.sha256(pair.source_text.encode(errors="replace")).digest(), pair.id, pair) for pair in pairs)
    return [pair for _, _, pair in heapq.nsmallest(count, keyed, key=lambda item: item[:2])]


class ExtractionScorer:
    """Scores a model on pairs; see `train.text_evaluation.Scorer`.

    Args:
        pairs: The pairs; at least one.
        encoder: Makes the prompts.
        batch_size: Texts in a batch.
        max_new_tokens: Longest reply.
        embedder: Sentence encoder of the soft scores; None leaves them out.
    """

    def __init__(
        self,
        pairs: Sequence[ExtractionPair],
        encoder: PairEncoder,
        batch_size: int,
        max_new_tokens: int,
        embedder: str | None = None,
    ) -> None:
        self.pairs, self.tokenizer = list(pairs), encoder.tokenizer
        self.batch_size, self.max_new_tokens, self.embedder = batch_size, max_new_tokens, embedder
        # A cut text has not all its facts any more, but the model was trained on cut ones, and use cuts it too.
        sources = encoder.cut_sources([pair.source_text for pair in self.pairs], Counter())
        self.prompts = encoder.prompts(sources)

    def __call__(self, model: Any, process_index: int = 0, num_processes: int = 1) -> dict[str, float]:
        """Means by name, such as `rougeL`, `normalised/micro/f1` and `malformed_output`."""
        replies = generate_replies(
            model,
            self.tokenizer,
            self.prompts,
            self.batch_size,
            self.max_new_tokens,
            process_index,
            num_processes,
            # As extraction does at use: a small model now and then repeats itself up to the limit.
            Repetition(self.tokenizer).found,
        )
        embed = None
        if self.embedder is not None:
            from tripletune.rag.retrieval.retrievers import load_embedder

            embed = load_embedder(self.embedder)
        summary = score_extractions((Prediction.of(*both) for both in zip(self.pairs, replies)), embed)
        return flatten_means(summary)
