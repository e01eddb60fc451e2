"""Read the `results.jsonl` of `tripletune eval run`, one question and its `Trace` per row.

The rows are written by `eval`, which runs the systems of this folder. They are read by `eval` and by the builders of
training data. What an older revision or another program did not note is absent, never guessed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tripletune.core.data.answers import mentions, normalize_answer
from tripletune.core.data.fields import checked
from tripletune.core.data.jsonl import read_jsonl
from tripletune.core.rows import Row
from tripletune.rag import Trace, TraceAction, TraceStep

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

RESULTS = "results.jsonl"
# Layouts for `core.data.fields.checked`: a name with "?" may be missing or null, and "" stands for any name.
_DETAILS = {
    "granularity?": str,
    "ranking?": [str],
    "core_passages?": [str],
    "unknown?": [str],
    "calls?": {"": [str]},
    "tokens?": {"": [int]},
    "index?": {"": [int]},
    "index_unreadable?": {"": int},
    "read?": {"": [list]},
    "unreadable?": {"": [str]},
}
_TRACE = {
    "question": str,
    "steps": [{"query": str, "passages": [{"id": str}], "triples": list}],
    "actions": [{"action?": str, "subquery": str}],
    "stop_reason": str,
    "malformed": int,
    "unexpected": int,
    "calls": int,
    "prompt_tokens": int,
    "completion_tokens": int,
    "seconds": float,
    "structuring_seconds?": float,
    "tallies": {"": int},
    "details": _DETAILS,
    "cached?": {"": [int]},
    "confidence?": {"": float},
    "withheld?": str,
    "shown?": [str],
}
_ROW = {
    "id": str,
    "question": str,
    "prediction": str,
    "error": str,
    "type": str,
    "answers": [str],
    "short_answers?": [[str]],
    "scores": {"": float},
    "trace": _TRACE,
    "supporting?": [str],
    "supporting_recall?": float,
}
# The fields of a trace that a file holds; the others are only known while its question is answered.
_STORED = [item.name for item in fields(Trace) if item.name not in ("found", "origins")]


@dataclass(slots=True)
class StoredTrace(Trace):
    """A trace as a file holds it.

    Attributes:
        not_noted: Fields that the file lacks; their values here are only defaults.
    """

    not_noted: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        """Do nothing, where a new `Trace` becomes the one that notes the calls of the current question."""

    @classmethod
    def of(cls, trace: Trace) -> StoredTrace:
        """What a file will hold of a new trace; nested values are shared, not copied."""
        return cls(**{name: getattr(trace, name) for name in _STORED})

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> StoredTrace:
        """Read a trace from the values of `Trace.to_json`.

        Traces of older versions, and of other programs, lack some fields: `not_noted` names them, so that no figure
        takes a default for a measurement.
        """
        noted = non_null_fields(Trace, values)
        not_noted = frozenset(_STORED) - noted.keys()
        noted.setdefault("question", "")
        noted["steps"] = list(map(_stored_step, noted.get("steps", ())))
        noted["actions"] = list(map(_stored_action, noted.get("actions", ())))
        return cls(**noted, not_noted=not_noted)

    def to_json(self) -> dict[str, Any]:
        """The values of `from_json`, without fields that were not noted."""
        values = fields_as_json(self)
        for name in ("not_noted", "found", "origins", *self.not_noted):
            del values[name]
        if "steps" in values:
            values["steps"] = list(map(fields_as_json, values["steps"]))
        if "actions" in values:
            values["actions"] = [action.to_json() for action in values["actions"]]
        return values

    @property
    def unknown(self) -> frozenset[str]:
        """What is not known: fields of a trace (also "answer"), "passages", or a ranking such as "shown"."""
        return frozenset(self.details.get("unknown") or ())

    @property
    def passage_rounds(self) -> list[list[str]]:
        """Ids of the passages that each round found, best first."""
        rounds = []
        for step in self.steps:
            rounds.append([passage["id"] for passage in step.passages])
        return rounds

    @property
    def ranking(self) -> list[str] | None:
        """Ids of passages in a system's final ranking (GEAR, PageRank, TH-RAG), best first; None for other systems."""
        return self.details.get("ranking")

    @property
    def core_passages(self) -> list[str] | None:
        """Ids of the passages of CIRAG's core triples; None for other systems."""
        return self.details.get("core_passages")

    @property
    def granularity(self) -> str | None:
        """The level of CIRAG's cascade that answered; None for other systems."""
        return self.details.get("granularity")

    @property
    def tokens(self) -> Mapping[str, list[int]]:
        """Tokens by role: read, written, and if not 0 those read from and written into the provider's cache."""
        return self.details.get("tokens") or {}

    @property
    def index(self) -> Mapping[str, list[int]]:
        """Calls and `tokens` by role that made the corpus's one graph; each question of a run has the same numbers."""
        return self.details.get("index") or {}

    @property
    def index_unreadable(self) -> Mapping[str, int]:
        """By role, how many of the replies to the calls of `index` could not be read; empty in older runs."""
        return self.details.get("index_unreadable") or {}

    @property
    def unreadable(self) -> Mapping[str, list[str]]:
        """By role, reason and beginning of the first reply that could not be read, of the question or of `index`."""
        return self.details.get("unreadable") or {}

    @property
    def reading(self) -> Mapping[str, list[list[Any]]]:
        """The calls that read passages, by role: the call's key in the ledger, then its `tokens`; empty in older runs.

        The key is "" if the ledger does not share the call's reply.
        """
        return self.details.get("read") or {}


@dataclass(slots=True, kw_only=True)
class ResultRow:
    """A question with its answer and scores: one line of `results.jsonl`.

    Attributes:
        type: The benchmark's kind of question; "" if it has none.
        answers: Gold answers; without one there are no scores.
        short_answers: ASQA's gold answers, for each reading of the question in several spellings.
        scores: By metric, from 0 to 1; those of a failed question are 0.
        supporting: Ids of the gold passages; empty if they are not known.
        supporting_recall: Share of the gold passages that were found; None if not known, or if nothing was searched.
        error: Why the question failed; "" if it has an answer.
    """

    id: str
    question: str = ""
    type: str = ""
    answers: list[str] = field(default_factory=list)
    short_answers: list[list[str]] = field(default_factory=list)
    prediction: str = ""
    scores: dict[str, float] = field(default_factory=dict)
    supporting: list[str] = field(default_factory=list)
    supporting_recall: float | None = None
    error: str = ""
    trace: StoredTrace = field(default_factory=lambda: StoredTrace(""))

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ResultRow:
        """Read a row; fields that it lacks have their defaults, so that results of older versions can be read."""
        stored = non_null_fields(cls, values)
        stored["trace"] = StoredTrace.from_json(stored.get("trace", {}))
        return cls(**stored)

    def to_json(self) -> dict[str, Any]:
        """The row as JSON values; `short_answers` only for questions that have some."""
        values = fields_as_json(self)
        values["trace"] = self.trace.to_json()
        if not self.short_answers:
            del values["short_answers"]
        return values


class KeptFacts(NamedTuple):
    """How many facts CIRAG kept for a question, and whether one of them names a gold answer."""

    number: int
    name_answer: bool


def read_result_rows(path: str | Path, *needed: str, partial: bool = False) -> Iterator[tuple[str, Row]]:
    """Stream the rows as `("file:line", row)` and check their types; `needed` (default: all) fields are required.

    A caller that reads little names what it needs, so that files of older versions, which lack other fields, can be
    read.

    Args:
        partial: Skip a last line without a line break, which a killed run leaves.
    """
    layout: dict[str, Any] = {}
    for name, kind in _ROW.items():
        if needed and name not in ("id", *needed):
            name = f"{name.removesuffix('?')}?"
        layout[name] = kind
    for where, row in read_jsonl(path, partial):
        checked(row, where, layout)
        for name, score in row.get("scores", {}).items():
            if not 0 <= score <= 1:
                raise ValueError(f"{where}: score {name} is {score}, but scores are from 0 to 1")
        yield where, row


def kept_facts(row: ResultRow) -> KeptFacts | None:
    """The facts that CIRAG kept for a question.

    None for other systems and failed questions, and if an answer is yes or no, which no fact names.
    """
    rounds = row.trace.details.get("rounds")
    if rounds is None or row.error or not row.answers:
        return None
    for answer in row.answers:
        if normalize_answer(answer) in ("yes", "no", "noanswer"):
            return None
    number = 0
    name_answer = False
    for decided in rounds:
        for triple in decided.get("core_triples", ()):
            number += 1
            fact = " ".join(triple)
            name_answer = name_answer or any(mentions(fact, answer) for answer in row.answers)
    return KeptFacts(number, name_answer)


def non_null_fields(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON values that a dataclass has fields for and that are not null, by name.

    A file of another revision may lack some fields, and have others.
    """
    return {item.name: values[item.name] for item in fields(kind) if values.get(item.name) is not None}


def present_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that say something: not None, and no empty mapping."""
    return {name: value for name, value in values.items() if value not in (None, {})}


def fields_as_json(item_of_row: DataclassInstance) -> dict[str, Any]:
    """The fields of a dataclass by name; `dataclasses.asdict` would copy every nested value, which is slow."""
    return {item.name: getattr(item_of_row, item.name) for item in fields(item_of_row)}


def _stored_step(values: Mapping[str, Any]) -> TraceStep:
    """A round of an older or newer version: only its passages are required."""
    without_triples = values.get("passages_without_triples", 0)
    return TraceStep(values.get("query", ""), values["passages"], values.get("triples", []), without_triples)


def _stored_action(values: Mapping[str, Any]) -> TraceAction:
    """A plan of an older or newer version; without an action it counts as malformed."""
    return TraceAction(
        reply=values.get("reply", ""),
        action=values.get("action"),
        subquery=values.get("subquery", ""),
        unexpected=values.get("unexpected", False),
        note=values.get("note", ""),
    )
