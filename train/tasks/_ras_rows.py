"""What the rows of a RAS training tell: how much the answers weigh in the loss, and the options of the loop.

A model is run as it was trained, so the options that follow from its data are measured here and saved with it
(`rag.trained` reads them).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tripletune.core.data.records import Action, Record, most_triples
from tripletune.train.tasks._ras_settings import GraphConfig, GraphTrainSection

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset


class LabelSpans(NamedTuple):
    """The labels of all rows; arrays of shape (labels,). `train.rows.records.encode_rows` writes them.

    Attributes:
        starts: Index of the first label token in its row.
        ends: Index after the last one.
        markers: Number of tokens of the action marker; 0 for an answer, which has none.
    """

    starts: np.ndarray
    ends: np.ndarray
    markers: np.ndarray

    @property
    def tokens(self) -> np.ndarray:
        """Number of label tokens."""
        return self.ends - self.starts

    @property
    def is_answer(self) -> np.ndarray:
        """Whether the label is an answer, and not a plan."""
        return self.markers == 0


class AnswerShares(NamedTuple):
    """The share of answering records among all records, and of their weights among all weights of the loss."""

    of_records: float
    of_weights: float


def label_spans(rows: Dataset) -> LabelSpans:
    """The labels of all rows, one row after another; a row of the interleaved order has several."""
    import pyarrow.compute as pc

    flat = pc.list_flatten(pc.list_flatten(rows.data.column("spans"))).to_numpy()
    return LabelSpans(*flat.reshape(-1, 3).T)


def answer_shares(rows: Dataset, train: GraphTrainSection) -> AnswerShares:
    """The share of answering records among the training records, and their share of the loss weights.

    A weight belongs to a record, or to a label token (`loss_per`), so long answers may weigh more than their number
    says.
    """
    import numpy as np

    spans = label_spans(rows)
    if train.loss_per == "record":
        weights = np.where(spans.is_answer, train.answer_weight, 1.0)
    else:
        weights_of_plans = spans.tokens - spans.markers + spans.markers * train.action_weight
        weights = np.where(spans.is_answer, spans.tokens * train.answer_weight, weights_of_plans)
    of_weights = float(weights[spans.is_answer].sum() / weights.sum())
    return AnswerShares(float(spans.is_answer.mean()), of_weights)


def loop_of_rows(rows: Dataset, config: GraphConfig, paths: Iterable[str]) -> dict[str, Any]:
    """The options of the loop (`rag.systems.LoopOptions`) by name, as the training data have them.

    The limits of plans and answers hold the longest label. A first search in the data that mostly differs from the
    question was written by a planner. A search finds as many passages, and a step shows at most as many triples, as the
    steps of the data.

    Args:
        rows: The training rows.
        paths: The files and folders of the training data.
    """
    from tripletune.rag.systems import LoopOptions
    from tripletune.train.rows.cache import rows_meta

    data = config.data
    options: dict[str, Any] = {"stop": data.stop}
    if data.searches is not None:
        options["max_rounds"] = data.searches
    counts = rows_meta(rows)
    if counts.get("first_searches"):
        is_question = 2 * counts.get("first_searches_of_question", 0) >= counts["first_searches"]
        options["first_query"] = "main_question" if is_question else "generated"
    passages = _passages_per_step(paths)
    if passages is not None:
        options["top_k"] = passages
    if data.evidence != "text" and most_triples(counts):
        options["triples_per_step"] = most_triples(counts)
    if config.train.preference:
        # The labels of a pair have no spans.
        return options
    spans = label_spans(rows)
    usual = LoopOptions()
    for name, chosen in (("max_plan_tokens", ~spans.is_answer), ("max_answer_tokens", spans.is_answer)):
        lengths = spans.tokens[chosen]
        if len(lengths):
            options[name] = max(int(lengths.max()), getattr(usual, name))
    return options


def _passages_per_step(paths: Iterable[str]) -> int | None:
    """How many passages a step of the records shows, as `build subq` noted; None if it did not make all of them.

    Of data with different numbers it is the largest.
    """
    from tripletune.data_builders.datasets.inspect import stored_statistics

    numbers = []
    for path in paths:
        stored = stored_statistics(path) if Path(path).is_dir() else None
        options = (stored.facts.get("options") or {}) if stored else {}
        if "distractors" not in options:
            return None
        numbers.append(options["top_k"] if options.get("retriever") else 1 + options["distractors"])
    return max(numbers, default=None)


def keys_of_question(record: Record) -> list[str]:
    """The question of a record. Its id would not do, since ids of two files may be numbers from 0."""
    from tripletune.data_builders.datasets.split import question_key

    return [question_key(record.question)]


def searches_or_has_read(record: Record) -> bool:
    """Whether a loop that searches a fixed number of times learns from a record: no stop, and no answer unread.

    Records with more steps than that number stay. The loop never meets them, but they teach sub-queries and answers:
    among records of real searches, where some searches fail, most answers may follow more than two searches.
    """
    if record.task == "answering":
        return bool(record.steps)
    return record.action is Action.SUBQ


def records_of_row(row: dict[str, Any], where: str) -> Record | list[Record]:
    """Return a stored record, or make the records of a stored question with steps.

    So files of questions with annotated steps can be trained on without a build of records.
    """
    from tripletune.data_builders.subq.annotations import plain_records

    if "task" in row:
        return Record.from_json(row, where)
    if "question" not in row:
        raise ValueError(f"{where}: neither a record nor a question with answers and steps; it has {', '.join(row)}")
    return plain_records(row, where)
