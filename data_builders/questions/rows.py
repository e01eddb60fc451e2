"""The rows of `build questions`: questions in the plain format that `data_builders/readers/qa.py` reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

from tripletune.core.data.passages import Passage
from tripletune.core.data.triples import Triple
from tripletune.core.rows import Row
from tripletune.core.tables import Table
from tripletune.data_builders.datasets import Numbers, Statistics, WrittenKind
from tripletune.data_builders.datasets.writer import BuildFacts
from tripletune.data_builders.questions import QUESTION_KINDS, QuestionKind


@dataclass(frozen=True, slots=True)
class StepRow:
    """A step of a question: its sub-query, the passage that answers it, and the triples of this passage."""

    subquery: str
    passage: Passage
    answer: str
    triples: Sequence[Triple]

    def to_json(self) -> Row:
        """The step as stored, in the plain format of `data_builders/readers/qa.py`."""
        return {
            "question": self.subquery,
            "passage": self.passage.id,
            "answer": self.answer,
            "triples": [triple.as_list() for triple in self.triples],
        }


@dataclass(frozen=True, slots=True)
class QuestionRow:
    """A finished question.

    Attributes:
        context: The passages of the steps and distractors, in random order.
    """

    id: str
    question: str
    answer: str
    kind: QuestionKind
    steps: Sequence[StepRow]
    context: Sequence[Passage]

    def to_json(self) -> Row:
        """The row as stored, in the plain format that `data_builders/readers/qa.py` reads."""
        return {
            "id": self.id,
            "question": self.question,
            "answers": [self.answer],
            "type": self.kind,
            "supporting": [step.passage.id for step in self.steps],
            "steps": [step.to_json() for step in self.steps],
            "context": [{"id": shown.id, "title": shown.title, "text": shown.text} for shown in self.context],
        }


class _Questions(WrittenKind[QuestionRow]):
    """Questions of a corpus, one file per split, since users pass these files on: `--source qa:DIR/train.jsonl`."""

    plural = "questions"
    layout = MappingProxyType({
        "id": "string",
        "question": "string",
        "answers": ["string"],
        "type": "string",
        "supporting": ["string"],
        "steps": [{"question": "string", "passage": "string", "answer": "string", "triples": [["string"]]}],
        "context": [{"id": "string", "title": "string", "text": "string"}],
    })  # fmt: skip
    hub_task = "question-answering"
    sharded = False

    def count(self, row: QuestionRow, split: str, statistics: Statistics[QuestionRow]) -> None:
        """Count a question by its split and kind; `tables` reads these counts."""
        statistics.count("kinds", split, row.kind)

    def tables(self, numbers: Numbers, facts: BuildFacts) -> list[Table]:
        """The number of questions of each kind and split."""
        counts_of_splits = numbers["kinds"]
        rows = []
        for kind in QUESTION_KINDS:
            rows.append([kind, *(counts.get(kind, 0) for counts in counts_of_splits.values())])
        return [Table(["kind", *counts_of_splits], rows, "Kinds")]


QUESTIONS = _Questions()
