"""Rows and figures of `tripletune eval decisions`: how a decision is scored, and what is said of all scores.

The parser of the loop reads the replies. Intervals draw whole questions, because the rounds of a question share most of
their text.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tripletune.core.calls import Message
from tripletune.core.data.triples import Triple
from tripletune.eval.metrics import f1
from tripletune.eval.statistics import Interval, bootstrap_pairs
from tripletune.eval.suites import QuestionScore, SuiteRow
from tripletune.rag.systems.cirag.integration import Decision, read_decision

SCORES = {
    "core_f1": "overlap of the core triples with the teacher's; two empty sets count as equal",
    "query_f1": "word overlap of the next query with the teacher's query, if the teacher continues; stopping scores 0",
    "stop_accuracy": "the reply continues or stops as the teacher does",
    "malformed": "replies without a readable decision, after the parser's repairs",
}
# Kinds of decisions.
STOP = "stop"
GO_ON = "go_on"
UNREADABLE = "malformed"


@dataclass(frozen=True, slots=True)
class DecisionCase:
    """One decision of a teacher.

    Attributes:
        id: The trajectory's id with the number of the round.
        round: The number of the decision in its trajectory, from 1.
        teacher: Name of the model that decided.
        messages: The chat up to the round's candidates.
        candidates: The triples that the round shows; `earlier` are those of the rounds before.
        gold: The teacher's decision.
    """

    id: str
    question_id: str
    round: int
    teacher: str
    messages: tuple[Message, ...]
    candidates: tuple[Triple, ...]
    earlier: tuple[Triple, ...]
    gold: Decision


class ShownDecision(NamedTuple):
    """A decision as a row shows it; `decision` is `STOP`, `GO_ON` or `UNREADABLE`."""

    core_triples: list[list[str]]
    next_query: str | None
    decision: str

    @classmethod
    def of(cls, decision: Decision) -> ShownDecision:
        """The decision with its kind: without a query it could not be read, and with an empty query it stops."""
        if decision.query is None:
            kind = UNREADABLE
        elif decision.query:
            kind = GO_ON
        else:
            kind = STOP
        return cls([triple.as_list() for triple in decision.core], decision.query, kind)


@dataclass(kw_only=True)
class DecisionRow(SuiteRow):
    """A student's reply to a `DecisionCase`, and its scores.

    Attributes:
        gold: The teacher's decision; `found` is the student's.
        faults: What was wrong with the reply, by the names of `rag.systems.cirag.integration.Decision`.
        scores: The `SCORES` that the case has; no "query_f1" if the teacher stops.
        cut_off: The reply reached its maximum length.
        candidates_left_out: Triples that were dropped to make the prompt fit.
    """

    id: str
    question_id: str
    round: int
    teacher: str
    gold: ShownDecision
    found: ShownDecision
    faults: list[str]
    reply: str
    error: str = ""
    scores: dict[str, float]
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cut_off: bool = False
    candidates_left_out: int = 0
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """The line as JSON values, with the decisions as objects: JSON writes a NamedTuple as a list."""
        values = super().to_json()
        return values | {"gold": self.gold._asdict(), "found": self.found._asdict()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> DecisionRow:
        """Read a line, with its two decisions."""
        row = super().from_json(values)
        row.gold = ShownDecision(**values["gold"])
        row.found = ShownDecision(**values["found"])
        return row


@dataclass(slots=True, kw_only=True)
class DecisionScores:
    """Figures of scored decisions.

    Attributes:
        metrics: By the names of `SCORES`.
        by_round: The same for each number of a round; `by_teacher` for each model that decided.
        confusion: For each kind of the teacher's decisions, how often the student's were of each kind.
        faults: How often replies had each fault.
    """

    decisions: int
    questions: int
    metrics: dict[str, Interval]
    by_round: dict[str, dict[str, Interval]]
    by_teacher: dict[str, dict[str, Interval]]
    confusion: dict[str, dict[str, int]]
    faults: dict[str, int]
    errors: int


def score_reply(case: DecisionCase, reply: str, error: str = "") -> DecisionRow:
    """One row with the teacher's decision, the parsed reply, and its scores; an empty reply scores 0.

    "query_f1" exists only if the teacher asks on. If the student then stops, it scores 0, not nothing.
    """
    decision = read_decision(reply, case.candidates, case.earlier)
    gold = case.gold
    is_readable = decision.query is not None
    scores = {
        # Core triples count even without a readable query.
        "core_f1": _set_f1(decision.core, gold.core) if is_readable or decision.core else 0.0,
        "stop_accuracy": float(is_readable and bool(decision.query) == bool(gold.query)),
        "malformed": float(not is_readable),
    }
    if gold.query:
        scores["query_f1"] = f1(decision.query or "", (gold.query,))
    return DecisionRow(
        id=case.id,
        question_id=case.question_id,
        round=case.round,
        teacher=case.teacher,
        gold=ShownDecision.of(gold),
        found=ShownDecision.of(decision),
        faults=list(decision.faults),
        reply=reply,
        error=error,
        scores=scores,
    )


def _set_f1(predicted: Iterable[Triple], gold: Iterable[Triple]) -> float:
    """F1 of two sets of triples; 1 if both are empty, since selecting nothing was then right."""
    predicted_set = set(predicted)
    gold_set = set(gold)
    if not predicted_set and not gold_set:
        return 1.0
    return 2 * len(predicted_set & gold_set) / (len(predicted_set) + len(gold_set))


def summarise_decisions(rows: Iterable[DecisionRow]) -> DecisionScores:
    """Figures of scored rows; intervals draw whole questions, since rounds depend on the rounds before them.

    The rows are read once, so scores are collected with their question in all three tables at the same time. A failed
    decision is a row, too, with an empty reply.
    """
    scores: dict[str, list[QuestionScore]] = defaultdict(list)
    by_round: dict[str, dict[str, list[QuestionScore]]] = defaultdict(lambda: defaultdict(list))
    by_teacher: dict[str, dict[str, list[QuestionScore]]] = defaultdict(lambda: defaultdict(list))
    confusion = {gold: dict.fromkeys((STOP, GO_ON, UNREADABLE), 0) for gold in (STOP, GO_ON)}
    faults: Counter[str] = Counter()
    questions: set[str] = set()
    decisions = 0
    errors = 0
    for row in rows:
        decisions += 1
        questions.add(row.question_id)
        errors += bool(row.error)
        faults.update(row.faults)
        confusion[row.gold.decision][row.found.decision] += 1
        for name, score in row.scores.items():
            scored = (row.question_id, score)
            for table in (scores, by_round[str(row.round)], by_teacher[row.teacher]):
                table[name].append(scored)
    return DecisionScores(
        decisions=decisions,
        questions=len(questions),
        metrics=_interval_per_score(scores),
        by_round=_intervals_by_part(by_round),
        by_teacher=_intervals_by_part(by_teacher),
        confusion=confusion,
        faults=dict(sorted(faults.items())),
        errors=errors,
    )


def _interval_per_score(scores: Mapping[str, Sequence[QuestionScore]]) -> dict[str, Interval]:
    """The interval of each of `SCORES`; one without values if no decision has the score."""
    return {name: bootstrap_pairs(scores.get(name, ())) for name in SCORES}


def _intervals_by_part(parts: Mapping[str, Mapping[str, Sequence[QuestionScore]]]) -> dict[str, dict[str, Interval]]:
    """The intervals of each part of the rows, the shorter names first, so that round 2 is before round 10."""
    names = sorted(parts, key=lambda name: (len(name), name))
    return {name: _interval_per_score(parts[name]) for name in names}
