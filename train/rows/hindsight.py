"""Rows and batches of self-distillation with hindsight: where a taught sub-query lies, and what its teacher reads.

The teacher is the student's own model when it reads what later searches found (`train.rows.hindsight_prompts`). Only
the tokens of sub-queries are taught (SD-Search, Ma et al., 2026, whose hindsight is instead what a group of runs
found).

Shapes: B rows of a batch, T tokens of the longest row.

Tested in `tests/train/test_self_distillation.py` and `tests/train/test_cirag_hindsight.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from tripletune.core.data.records import IGNORED
from tripletune.models.graph_llm.graphs import SampleGraph
from tripletune.train.rows.batches import TextCollator
from tripletune.train.rows.cache import TEACHER_IDS, Row

if TYPE_CHECKING:
    from datasets import Dataset


class TaughtQuery(NamedTuple):
    """A sub-query of a row that has a teacher.

    Attributes:
        row: Index of the row in the batch.
        start: Index of the first token before the sub-query that is the model's own: of a plan's action marker, or of
            a decision.
        query: Index of the sub-query's first token that is taught.
        end: Index after the last token, which ends the sequence.
        teacher_ids: The teacher's prompt with the same label.
        graphs: Columns of `SampleGraph` with the graphs that both prompts read; empty without graphs.
    """

    row: int
    start: int
    query: int
    end: int
    teacher_ids: list[int]
    graphs: Row

    @property
    def teacher_prompt(self) -> list[int]:
        """The teacher's tokens before the sub-query, with those of the model's own before it."""
        return self.teacher_ids[: self.query - self.end]

    def teacher_row(self) -> Row:
        """The row that the teacher reads, with labels at the sub-query's tokens."""
        prompt = self.teacher_prompt
        labels = [IGNORED] * len(prompt) + self.teacher_ids[len(prompt) :]
        return {"input_ids": self.teacher_ids, "labels": labels, **self.graphs}

    def own_row(self, prompt: list[int], sampled: list[int]) -> Row:
        """A row of the student with a sub-query that it sampled, and with the teacher's tokens for it.

        Args:
            prompt: The student's tokens before the sub-query.
            sampled: Tokens of the sampled sub-query.
        """
        marker = self.query - self.start
        ids = [*prompt, *sampled]
        return {
            "input_ids": ids,
            "labels": [IGNORED] * len(prompt) + sampled,
            "spans": [[len(prompt) - marker, len(ids), marker]],
            TEACHER_IDS: [[*self.teacher_prompt, *sampled]],
            **self.graphs,
        }


def taught_queries(rows: Sequence[Row], graph_token_id: int | None) -> Iterator[TaughtQuery]:
    """Yield the sub-queries of rows that have a teacher, in the order of their tokens, which is that of the logits.

    The spans of a chain stand from its last reply to its first. A row that fills the batch of another process has no
    labels, and teaches nothing.

    Args:
        rows: Rows with `TEACHER_IDS`; the others teach nothing, such as validation rows.
        graph_token_id: The placeholder of a graph. A prompt in a chain reads only the first graphs of its row.
    """
    for index, row in enumerate(rows):
        spans = zip(row["spans"], row.get(TEACHER_IDS) or [], strict=False)
        for (start, end, marker), teacher_ids in sorted(spans):
            if not teacher_ids or row["labels"][end - 1] == IGNORED:
                continue
            placeholders = teacher_ids.count(graph_token_id)
            graphs = {name: row[name][:placeholders] for name in SampleGraph._fields if name in row}
            yield TaughtQuery(index, start, start + marker, end, teacher_ids, graphs)


@dataclass(eq=False)
class BatchRows:
    """The rows of a batch, as an object, since lists and dictionaries of a batch are moved to the device item by item.

    Attributes:
        rows: The rows as the collator got them.
    """

    rows: Sequence[dict[str, Any]]


class HindsightCollator(Protocol):
    """What makes the batches of self-distillation."""

    @property
    def graph_token_id(self) -> int | None:
        """The placeholder of a graph; None if no prompt has graphs."""

    def __call__(self, rows: Sequence[Row], own_rows: Sequence[Row] = ()) -> dict[str, Any]:
        """Make a batch of rows; `own_rows` are of `TaughtQuery.own_row`, and taught instead of those of `rows`."""

    def graph_arguments(self, graphs: Sequence[SampleGraph]) -> dict[str, Any]:
        """The argument of the model's forward pass that holds the graphs of prompts; {} without graphs."""


def add_teacher(
    batch: dict[str, Any],
    rows: Sequence[Row],
    gold_rows: int,
    hindsight_weight: float,
    graph_token_id: int | None,
    collate: Callable[[Sequence[Row]], dict[str, Any]],
) -> None:
    """Divide the weights of taught sub-queries between label and teacher, and add what the teacher reads.

    A batch gets `taught_weights` (B, T), the weights of the divergence; `teacher`, if a sub-query is taught, the batch
    of the taught sub-queries; and `batch_rows`, from which `TaughtQuery` and later another batch can be made.

    Args:
        batch: Changed in place; it has `label_weights` (B, T).
        rows: All rows of the batch.
        gold_rows: Number of rows before those with sub-queries of the student's own.
        hindsight_weight: Share of the weight of a sub-query's tokens that goes to the divergence from the teacher.
        graph_token_id: See `HindsightCollator`.
        collate: Makes the inputs of the model from rows of the teacher.
    """
    weights = batch["label_weights"]
    taught = torch.zeros_like(weights)
    teacher_rows = []
    teaches_own = len(rows) > gold_rows
    for query in taught_queries(rows, graph_token_id):
        places = (query.row, slice(query.query, query.end))
        is_gold = query.row < gold_rows
        if is_gold != teaches_own:
            taught[places] = hindsight_weight * weights[places]
            teacher_rows.append(query.teacher_row())
        weights[places] *= 1 - hindsight_weight if is_gold else 0
    batch["taught_weights"] = taught
    batch["batch_rows"] = BatchRows(rows)
    if teacher_rows:
        batch["teacher"] = collate(teacher_rows)


@dataclass(frozen=True)
class HindsightTextCollator(TextCollator):
    """Pads rows of a decoder, and adds what a teacher with hindsight reads (`train.rows.hindsight`).

    Attributes:
        hindsight_weight: Share of the weight of a sub-query's tokens that goes to the divergence from the teacher.
    """

    hindsight_weight: float = 0.0

    @property
    def graph_token_id(self) -> int | None:
        """None, since chats have no graphs."""
        return None

    def __call__(self, rows: Sequence[Row], own_rows: Sequence[Row] = ()) -> dict[str, Any]:
        """A batch of `TextCollator`; for rows with a teacher also `label_weights` (B, T) and what `add_teacher` adds.

        Args:
            rows: Rows.
            own_rows: Rows of `TaughtQuery.own_row`, whose sub-queries are taught instead of those of `rows`.
        """
        all_rows = [*rows, *own_rows]
        batch: dict[str, Any] = super().__call__(all_rows)
        if TEACHER_IDS in rows[0]:
            batch["label_weights"] = torch.ones(batch["labels"].shape)
            collate = super().__call__
            add_teacher(batch, all_rows, len(rows), self.hindsight_weight, self.graph_token_id, collate)
        return batch

    def graph_arguments(self, graphs: Sequence[SampleGraph]) -> dict[str, Any]:
        """Nothing, since chats have no graphs."""
        return {}


def teacher_example(rows: Dataset, graph_token_id: int | None) -> dict[str, tuple[list[int], list[int]]]:
    """Tokens and labels that the teacher reads for the first sub-query that is taught, by heading; empty for none."""
    for row in rows:
        for query in taught_queries([row], graph_token_id):
            shown = query.teacher_row()
            return {"first sub-query as the teacher reads it": (shown["input_ids"], shown["labels"])}
    return {}
