"""Rows and figures of `tripletune eval records`: how a reply to a record is scored, and what is said of all scores.

With q_0 = Q all searches without history have the label `[SUBQ] Q`, so planning is also scored on records with at least
one step. Intervals draw whole questions, because the records of one question share most of their text.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tripletune.core.data.records import Action, Record, Task
from tripletune.core.data.rendering import parse_plan
from tripletune.eval import find_metrics, score_answer
from tripletune.eval.controls import ControlTable
from tripletune.eval.statistics import Interval, bootstrap_pairs
from tripletune.eval.suites import QuestionScore, SuiteMetrics, SuiteRow

MALFORMED = "malformed"
ANSWER_METRICS = {name: find_metrics()[name] for name in ("exact_match", "f1", "f1_hotpotqa")}
EXPLANATIONS = {
    "action_accuracy": "the predicted action is the gold one",
    "action_accuracy_with_history": "the same, for records with at least one step of history",
    "subquery_f1": "token overlap with the gold sub-query, if there is one; another action scores 0",
    "subquery_f1_with_history": "the same, for records with at least one step of history",
    MALFORMED: "replies that do not start with an action",
    **{name: metric.explanation for name, metric in ANSWER_METRICS.items()},
}
_PLANNING_SCORES = [name for name in EXPLANATIONS if name not in ANSWER_METRICS]
_ACTIONS = [action.value for action in Action]


@dataclass(frozen=True, slots=True)
class ControlReply:
    """The reply under a control (`eval/controls.py`), and its scores."""

    reply: str
    scores: dict[str, float]


@dataclass(kw_only=True)
class RecordRow(SuiteRow):
    """A reply to a record, and its scores.

    Attributes:
        history: Number of steps before the reply.
        gold: The record's label; `gold_action` and `action` are those of a planning record, also "malformed".
        controls: By name, the replies under controls.
        truncated_triples: Triples that the prompt had no room for; likewise `truncated_words`.
    """

    id: str
    question_id: str
    task: Task
    history: int
    gold: str
    reply: str
    gold_action: str | None = None
    action: str | None = None
    scores: dict[str, float]
    controls: dict[str, ControlReply] | None = None
    error: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    truncated_triples: int = 0
    truncated_words: int = 0
    seconds: float = 0.0

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RecordRow:
        """Read a line, with the replies under controls."""
        row = super().from_json(values)
        if row.controls is not None:
            row.controls = {name: ControlReply(**reply) for name, reply in values["controls"].items()}
        return row


@dataclass(slots=True, kw_only=True)
class PlanningMetrics:
    """Scores of the planning records.

    Attributes:
        scores: By name, each of `EXPLANATIONS` that is for plans.
        by_label: Accuracy of the action for each gold action; `by_history` for each number of earlier steps.
        confusion: For each gold action, how often each action was predicted.
    """

    records: int
    scores: dict[str, Interval]
    by_label: dict[str, Interval]
    by_history: dict[str, Interval]
    confusion: dict[str, dict[str, int]]

    def to_json(self) -> dict[str, Any]:
        """The scores as JSON values, under the names that `metrics.json` of earlier versions has."""
        return {
            "records": self.records,
            **self.scores,
            "action_accuracy_by_label": self.by_label,
            "action_accuracy_by_history": self.by_history,
            "confusion": self.confusion,
        }


@dataclass(slots=True, kw_only=True)
class AnsweringMetrics:
    """Scores of the answering records, by the names of `ANSWER_METRICS`."""

    records: int
    scores: dict[str, Interval]

    def to_json(self) -> dict[str, Any]:
        """The scores as JSON values, beside the number of records."""
        return {"records": self.records, **self.scores}


class RecordScores(NamedTuple):
    """Figures of scored records."""

    planning: PlanningMetrics
    answering: AnsweringMetrics

    def to_json(self) -> dict[str, Any]:
        """The figures as JSON values."""
        return {"planning": self.planning.to_json(), "answering": self.answering.to_json()}


@dataclass(slots=True, kw_only=True)
class RecordMetrics(SuiteMetrics):
    """Figures of the evaluation.

    Attributes:
        controls: Scores of each control and its difference from the model; see `eval.controls.compare_controls`.
        control_table: The controls as a table, which the report and the model card also use.
    """

    model: str
    data: str
    split: str
    scores: RecordScores
    controls: dict[str, Any] | None = None
    control_table: ControlTable | None = None

    def to_json(self) -> dict[str, Any]:
        """The figures as JSON values; controls only if they were asked for."""
        values = {"model": self.model, "data": self.data, "split": self.split, **self.scores.to_json()}
        if self.controls is not None:
            values |= {"controls": self.controls, "control_table": self.control_table}
        return values


def score_record(record: Record, reply: str) -> RecordRow:
    """One row with the record, the reply, and its scores.

    An unreadable plan is wrong as an action and as a sub-query. The sub-query is scored only where the gold plan has
    one, so that a model that always stops has no undefined scores.
    """
    row = RecordRow(
        id=record.id,
        question_id=record.question_id,
        task=record.task,
        history=len(record.steps),
        gold=record.label,
        reply=reply,
        scores={},
    )
    if record.task == "answering":
        row.scores = score_answer(reply.strip(), record.answers, ANSWER_METRICS)
        return row
    plan = parse_plan(reply)
    row.gold_action = record.action.value
    row.action = plan.action.value if plan.action else MALFORMED
    row.scores = {"action_accuracy": float(plan.action is record.action), MALFORMED: float(plan.action is None)}
    if record.action is Action.SUBQ:
        row.scores["subquery_f1"] = 0.0
        if plan.action is Action.SUBQ:
            row.scores["subquery_f1"] = ANSWER_METRICS["f1"].score(plan.subquery, (record.subquery,))
    return row


def summarise_records(rows: Iterable[RecordRow]) -> RecordScores:
    """Figures of scored rows; intervals draw whole questions.

    Scores "with history" leave out the first plan of each question, whose label is always the question itself (q_0 =
    Q).
    """
    planning: dict[str, list[QuestionScore]] = defaultdict(list)
    answering: dict[str, list[QuestionScore]] = defaultdict(list)
    by_label: dict[str, list[QuestionScore]] = defaultdict(list)
    by_history: dict[str, list[QuestionScore]] = defaultdict(list)
    confusion = {gold: dict.fromkeys([*_ACTIONS, MALFORMED], 0) for gold in _ACTIONS}
    records = Counter[str]()
    for row in rows:
        records[row.task] += 1
        if row.task == "answering":
            for name, score in row.scores.items():
                answering[name].append((row.question_id, score))
            continue
        confusion[str(row.gold_action)][str(row.action)] += 1
        for name, score in row.scores.items():
            scored = (row.question_id, score)
            planning[name].append(scored)
            if row.history and name != MALFORMED:
                planning[f"{name}_with_history"].append(scored)
            if name == "action_accuracy":
                by_label[str(row.gold_action)].append(scored)
                by_history[str(row.history)].append(scored)
    return RecordScores(
        PlanningMetrics(
            records=records["planning"],
            scores=_interval_per_name(_PLANNING_SCORES, planning),
            by_label=_interval_per_name(sorted(by_label), by_label),
            by_history=_interval_per_name(sorted(by_history), by_history),
            confusion=confusion,
        ),
        AnsweringMetrics(records=records["answering"], scores=_interval_per_name(ANSWER_METRICS, answering)),
    )


def _interval_per_name(names: Iterable[str], scores: Mapping[str, Sequence[QuestionScore]]) -> dict[str, Interval]:
    """The interval of each named score; one without values if no record has it, so that tables keep its row."""
    return {name: bootstrap_pairs(scores.get(name, ())) for name in names}
