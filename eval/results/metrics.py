"""`metrics.json`: the scores, counts and costs of a finished `tripletune eval run`, and what all evaluations have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tripletune.eval.results.unreadable import UnreadableReplies
from tripletune.eval.statistics import Interval
from tripletune.rag.results import fields_as_json, non_null_fields


@dataclass(slots=True)
class SessionSpeed:
    """How fast the last session that answered something was; `items` were answered in `seconds`."""

    items: int
    seconds: float
    per_second: float

    @classmethod
    def from_json(cls, values: Mapping[str, Any], units: str = "questions") -> SessionSpeed | None:
        """Read the value of `to_json` with the same `units`; None if there is none."""
        if units not in values:
            return None
        return cls(values[units], values["seconds"], values[f"{units}_per_second"])

    def to_json(self, units: str) -> dict[str, Any]:
        """The speed as JSON values, whose names say what was answered, for example "questions"."""
        return {units: self.items, "seconds": self.seconds, f"{units}_per_second": self.per_second}


@dataclass(slots=True, kw_only=True)
class RunCounts:
    """Counts over all questions of a run.

    Attributes:
        without_gold: Questions without a gold answer, which have no scores.
        errors: Failed questions, whose scores are 0.
        refusals: Answers that refuse to answer, without abstentions.
        abstentions: Answers that were replaced by "I don't know", since they were not sure enough (option `abstain`).
        malformed_plans: Planning replies without a readable action.
        unexpected_plans: `[SUFFICIENT]` before any search, or `[NO_RETRIEVAL]` after one.
        without_search: Questions that were answered without a search, and whose recall is 0 therefore; those without
            known supporting passages have no recall.
        rounds: Searches.
        passages: Found passages, each as often as it was found; `passages_without_triples` are not in the store.
        triples: Triples shown to the model, each as often as it was shown.
        stop_reasons: By why planning ended; "error" for failed questions.
        actions: By action of the planner; "malformed" for unreadable ones.
        tallies: Counts that are specific to the system.
    """

    without_gold: int = 0
    errors: int = 0
    refusals: int = 0
    abstentions: int = 0
    malformed_plans: int = 0
    unexpected_plans: int = 0
    without_search: int = 0
    rounds: int = 0
    passages: int = 0
    passages_without_triples: int = 0
    triples: int = 0
    stop_reasons: dict[str, int] = field(default_factory=dict)
    actions: dict[str, int] = field(default_factory=dict)
    tallies: dict[str, int] = field(default_factory=dict)

    def numbers(self) -> dict[str, int]:
        """The counts that are one number, by name; those that few runs have only if they are not 0."""
        numbers = fields_as_json(self)
        for family in ("stop_reasons", "actions", "tallies"):
            del numbers[family]
        for name in ("without_gold", "without_search", "abstentions"):
            if not numbers[name]:
                del numbers[name]
        return numbers

    def to_json(self) -> dict[str, Any]:
        """The counts as JSON values, sorted by name, so that equal runs give equal bytes."""
        return {
            **self.numbers(),
            "stop_reasons": dict(sorted(self.stop_reasons.items())),
            "actions": dict(sorted(self.actions.items())),
            "tallies": dict(sorted(self.tallies.items())),
        }


@dataclass(slots=True, kw_only=True)
class RunMetrics:
    """`metrics.json` of `eval run`.

    Costs have the names "calls", "prompt_tokens", "completion_tokens", "weighted_tokens" and with prices "dollars";
    the prefix "cached_" marks the part that was not sent. What another program's answers do not say is left out.

    Attributes:
        primary: The score that stands for the others, which is the task's first metric.
        metrics: The scores of all questions.
        by_type: The primary score by the benchmark's kind of question; "all" for questions without one.
        recall: Means of `recalls_of`; empty if nothing was searched.
        answered: The scores of the questions whose answer was given; empty if none was withheld.
        cost: Sums over the questions, without `indexing`, and the numbers of words and triples that were cut off.
        cost_per_question: `cost` and seconds per question.
        indexing: What it cost to read the corpus into triples, once.
        roles: Roles that calls had.
        unreadable: The roles of which more than 5 % of the replies could not be read.
        failed: Number of failed questions; `run_suites` adds it and `session` for every kind of evaluation.
    """

    system: str
    task: str
    primary: str
    questions: int
    metrics: dict[str, Interval] = field(default_factory=dict)
    by_type: dict[str, Interval] = field(default_factory=dict)
    recall: dict[str, Interval] = field(default_factory=dict)
    answered: dict[str, Interval] = field(default_factory=dict)
    counts: RunCounts = field(default_factory=RunCounts)
    cost: dict[str, float] = field(default_factory=dict)
    cost_per_question: dict[str, float] = field(default_factory=dict)
    indexing: dict[str, float] = field(default_factory=dict)
    roles: list[str] = field(default_factory=list)
    unreadable: list[UnreadableReplies] = field(default_factory=list)
    failed: int = 0
    session: SessionSpeed | None = None

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RunMetrics:
        """Read `metrics.json`; figures that an older run lacks are empty."""
        arguments: dict[str, Any] = {"system": "", "task": "", "primary": "", "questions": 0}
        arguments |= non_null_fields(cls, values)
        arguments["counts"] = RunCounts(**non_null_fields(RunCounts, arguments.get("counts", {})))
        arguments["unreadable"] = [UnreadableReplies(**replies) for replies in arguments.get("unreadable", ())]
        arguments["session"] = SessionSpeed.from_json(arguments.get("session", {}))
        return cls(**arguments)

    def to_json(self) -> dict[str, Any]:
        """The metrics as JSON values, without `failed` and `session`, which the suite runner adds for all suites."""
        values = fields_as_json(self)
        del values["failed"]
        del values["session"]
        if not self.answered:
            del values["answered"]
        values["counts"] = self.counts.to_json()
        values["unreadable"] = [fields_as_json(replies) for replies in self.unreadable]
        return values


@dataclass(frozen=True, slots=True)
class MetricsHead:
    """The part of `metrics.json` that `eval compare` reads of every evaluation.

    Attributes:
        evaluation: "extraction", "judge", or "" for the others.
        task: The task of `eval run`; "" for other evaluations.
        name: The system, or the model of an evaluation without systems.
        primary: The score that stands for the others; None if an evaluation has none.
        failed: Number of failed items.
        cost: Cost per item.
    """

    evaluation: str
    task: str
    name: str
    primary: str | None
    failed: int
    cost: Mapping[str, float]

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> MetricsHead:
        """Read the metrics of any evaluation: each kind names its cost, and what was evaluated, in its own words."""
        # Older runs have the failed items only among their counts.
        failed = values.get("failed", values.get("counts", {}).get("errors", 0))
        cost = values.get("cost_per_question") or values.get("cost_per_text") or {}
        name = values.get("system") or values.get("model") or ""
        return cls(values.get("evaluation", ""), values.get("task", ""), name, values.get("primary"), failed, cost)
