"""The structured record of a sample, from which prompts are made (RAS, sections 3.4 and C.3).

Records are stored as one JSON object per line, with the same keys in every row, so that Arrow reads any shard:

    {"id", "question_id", "task", "question", "steps": [{"query", "triples": [[s, p, o]], "text"}],
     "action", "subquery", "answers", "source"}

`core.data.rendering` turns it into text, for training and for inference alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from tripletune.core.data.fields import checked
from tripletune.core.data.triples import Triple, triples_from_json
from tripletune.core.rows import rows_of_split

Task = Literal["planning", "answering"]
# The label of tokens that are not learned.
IGNORED = -100
TASKS: tuple[Task, ...] = ("planning", "answering")
_TEXTS = ("id", "question_id", "task", "question", "action", "subquery?", "source?", "rejected?")
_LAYOUT = dict.fromkeys(_TEXTS, str) | {"answers?": [str], "steps?": [{}]}
# Counts of the steps of records, by whether they have the evidence that prompts shall show.
STEPS = "steps"
WITHOUT_TEXT = "steps_without_text"
WITHOUT_TRIPLES = "steps_without_triples"
ONLY_TRIPLES = "steps_with_only_triples"
# The beginning of the names of counts of steps by their number of triples.
STEPS_BY_TRIPLES = "steps_by_triples_"


class Action(StrEnum):
    """The planner's three decisions; the values are the interface strings of the paper."""

    SUBQ = "[SUBQ]"
    SUFFICIENT = "[SUFFICIENT]"
    NO_RETRIEVAL = "[NO_RETRIEVAL]"


def one_line(text: str) -> str:
    """Replace line breaks by spaces, so that a text stays on one line of a prompt."""
    if text.splitlines() in ([text], []):
        return text
    return " ".join(text.split())


@dataclass(frozen=True, slots=True)
class Step:
    """One round of retrieval: the sub-query q_i, the triples g_i and the text that the triples come from."""

    query: str
    triples: tuple[Triple, ...] = ()
    text: str = ""

    def to_json(self) -> dict[str, Any]:
        """The step as it is stored inside of a record; `from_json` reads it back."""
        return {"query": self.query, "triples": [triple.as_list() for triple in self.triples], "text": self.text}

    @classmethod
    def from_json(cls, row: dict[str, Any], where: str = "step") -> Step:
        """Read a stored step; `where` opens every error message.

        Raises:
            ValueError: The query is missing, or a triple is malformed.
        """
        fields = checked(row, where, {"query": str, "triples?": list, "text?": str})
        return cls(fields["query"], triples_from_json(fields.get("triples", ()), where), fields.get("text", ""))


@dataclass(frozen=True, slots=True)
class ModelInput:
    """Everything the model may see: task, main question and the history of steps.

    Attributes:
        graph_of: Other steps whose graph replaces the graph of the history, as a control of the graph token.
        begun: The beginning of the reply, which the model continues; the reply has it, too.
    """

    task: Task
    question: str
    steps: tuple[Step, ...] = ()
    graph_of: tuple[Step, ...] | None = None
    begun: str = ""


@dataclass(frozen=True, slots=True)
class Record:
    """A training or evaluation sample.

    Attributes:
        question_id: Shared by all records of one question, which are always in the same split.
        steps: The history (q_0, g_0), ..., (q_i, g_i).
        action: In a planning record, the action to learn. In an answering record, `NO_RETRIEVAL` if the question is
            answered without retrieval, else `SUFFICIENT`.
        subquery: The text after `[SUBQ]` of a planning label, else empty.
        answers: The gold answer, which is learned, then its aliases.
        rejected: In a preference pair, the worse label.
    """

    id: str
    question_id: str
    task: Task
    question: str
    action: Action
    steps: tuple[Step, ...] = ()
    subquery: str = ""
    answers: tuple[str, ...] = field(default=())
    source: str = ""
    rejected: str = ""

    def __post_init__(self) -> None:
        """Refuse a record whose label could not be written, so that training and scoring need not check it again."""
        if self.task not in TASKS:
            raise ValueError(f"record {self.id!r}: task {self.task!r} is not one of {', '.join(TASKS)}")
        if not self.question.strip():
            raise ValueError(f"record {self.id!r}: the question is empty")
        asks = self.action is Action.SUBQ
        has_subquery = bool(self.subquery.strip())
        if self.task == "planning" and asks != has_subquery:
            raise ValueError(
                f"record {self.id!r}: action {self.action.value} with sub-query {self.subquery!r}: "
                "a [SUBQ] label needs a sub-query; any other label must have an empty sub-query"
            )
        has_answer = bool(self.answers) and bool(self.answers[0].strip())
        if self.task == "answering" and not has_answer:
            raise ValueError(f"record {self.id!r}: an answering record needs a gold answer")

    @property
    def input(self) -> ModelInput:
        """The part of the record that the model may see."""
        return ModelInput(self.task, self.question, self.steps)

    @property
    def label(self) -> str:
        """The text to be learned."""
        if self.task == "answering":
            return self.answers[0]
        return one_line(f"{self.action.value} {self.subquery}".strip())

    def to_json(self) -> dict[str, Any]:
        """The row as it is stored; `from_json` reads it back. A rejected reply is only there for preference pairs."""
        row = {
            "id": self.id,
            "question_id": self.question_id,
            "task": self.task,
            "question": self.question,
            "steps": [step.to_json() for step in self.steps],
            "action": self.action.value,
            "subquery": self.subquery,
            "answers": list(self.answers),
            "source": self.source,
        }
        if self.rejected:
            row["rejected"] = self.rejected
        return row

    @classmethod
    def from_json(cls, row: dict[str, Any], where: str = "record") -> Record:
        """Read a stored row; `where` (file and line) opens every error message.

        Raises:
            ValueError: A field is missing or of another type, or the record could not be learned from
                (`__post_init__`).
        """
        fields = checked(row, where, _LAYOUT)
        action = fields.pop("action")
        if action not in list(Action):
            raise ValueError(f"{where}: action {action!r} is not one of {', '.join(Action)}")
        rows = enumerate(fields.pop("steps", ()), 1)
        steps = tuple(Step.from_json(step, f"{where}: step {number}") for number, step in rows)
        answers = tuple(fields.pop("answers", ()))
        try:
            return cls(action=Action(action), steps=steps, answers=answers, **fields)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None


def read_records(path: str | Path, split: str | None = None) -> Iterator[Record]:
    """Stream the records of a file, or of one split of a folder; see `core.rows.rows_of_split`."""
    for where, row in rows_of_split(path, split):
        yield Record.from_json(row, where)


def count_steps(steps: Iterable[Step], counts: Counter[str]) -> None:
    """Add to the counts of steps, of steps without text or triples, and of steps that have triples but no text."""
    for step in steps:
        has_text = bool(step.text.strip())
        counts[STEPS] += 1
        counts[WITHOUT_TEXT] += not has_text
        counts[WITHOUT_TRIPLES] += not step.triples
        counts[ONLY_TRIPLES] += bool(step.triples) and not has_text


def most_triples(counts: Mapping[str, int]) -> int:
    """The number of triples of the step that has most."""
    sizes = [name.removeprefix(STEPS_BY_TRIPLES) for name in counts if name.startswith(STEPS_BY_TRIPLES)]
    return max(map(int, sizes), default=0)


def check_evidence(option: str, evidence: str, counts: Mapping[str, int], data: str) -> None:
    """Refuse rows whose steps lack what the prompts shall show.

    A passage may state no fact, so steps without triples are an error only if no step has any.

    Args:
        option: The option that chooses the evidence, for the error.
        counts: Those of `count_steps`.
    """
    steps = counts.get(STEPS, 0)
    if not steps:
        return
    if evidence == "text":
        missing = counts.get(ONLY_TRIPLES, 0)
        if counts.get(WITHOUT_TEXT, 0) == steps:
            missing = steps
        if missing:
            raise ValueError(
                f"{option} text: {missing:,} of {steps:,} steps in {data} have no text, so their prompts would show "
                "nothing. Build the records again from questions with passages (`build subq`; the released data have "
                f"none), or take {option} triples"
            )
    elif counts.get(WITHOUT_TRIPLES, 0) == steps:
        raise ValueError(
            f"{option} {evidence}: none of the {steps:,} steps in {data} has triples. Build the records with triples "
            f"(`build subq --triple-file`), or take {option} text"
        )
