"""Scores a student's decisions, each with the teacher's history: what CIRAG's trajectory distillation teaches (3.5).

No retrieval runs: a prompt is a trajectory's chat up to a round's candidates, and the teacher's decision on them is
what is right. Training watches these numbers too. Replies are read by the loop's own parser, so whatever the loop
recovers from counts here as it would there. Intervals draw whole questions, because the rounds of one share most of
their text.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tripletune.eval.metrics import f1
from tripletune.eval.statistics import RESAMPLES, bootstrap_mean
from tripletune.models.data.passages import Passage
from tripletune.models.data.trajectories import Trajectory
from tripletune.models.data.triples import Triple
from tripletune.models.llm.client import Message
from tripletune.rag.systems.cirag.integration import INTEGRATE_ROLE, Decision, read_decision, shown_candidates
from tripletune.rag.triples.sentences import Fact

SCORES = {
    "core_f1": "overlap of the core triples with the teacher's; both without any counts as equal",
    "query_f1": "overlap of the next query with the teacher's in words, where there is one; stopping scores 0",
    "stop_accuracy": "the reply goes on where the teacher goes on, and stops where it stops",
    "malformed": "replies that don't say whether to go on, even after the parser's recoveries",
}
STOP, GO_ON, UNREADABLE = "stop", "go_on", "malformed"
_NOWHERE = Passage("", "", "-")


@dataclass(frozen=True, slots=True)
class Case:
    """One decision of a teacher.

    Attributes:
        id: Of the trajectory, with the number of the round.
        question_id: The question.
        round: 1 for the first.
        teacher: The teacher, as the ledger calls it.
        messages: The chat up to the round's candidates.
        candidates: The round's candidates.
        earlier: Candidates of the rounds before.
        gold: The teacher's decision.
    """

    id: str
    question_id: str
    round: int
    teacher: str
    messages: tuple[Message, ...]
    candidates: tuple[Fact, ...]
    earlier: tuple[Triple, ...]
    gold: Decision


def decision_cases(trajectories: Iterable[Trajectory]) -> Iterator[Case]:
    """The learned decisions of trajectories, in their order.

    Raises:
        ValueError: a trajectory is of another role, or a decision or its candidates can't be read.
    """
    for trajectory in trajectories:
        if trajectory.role != INTEGRATE_ROLE:
            raise ValueError(
                f"trajectory {trajectory.id!r} is of the role {trajectory.role}: what is scored here are decisions of "
                f"{INTEGRATE_ROLE}"
            )
        earlier: list[Triple] = []
        number = 0
        for place, turn in enumerate(trajectory.messages):
            if turn["role"] != "assistant" or not place:
                continue
            number += 1
            shown = _candidates(trajectory, place - 1)
            candidates = tuple(Fact(triple, _NOWHERE, "") for triple in shown)
            gold = read_decision(turn["content"], candidates, earlier)
            if trajectory.learned[place]:
                if gold.query is None:
                    raise ValueError(f"trajectory {trajectory.id!r}: its decision {number} can't be read")
                yield Case(
                    f"{trajectory.id}@{number}",
                    trajectory.question_id,
                    number,
                    trajectory.model,
                    trajectory.messages[:place],
                    candidates,
                    tuple(earlier),
                    gold,
                )
            earlier += shown


def score_reply(case: Case, reply: str, error: str = "") -> dict[str, Any]:
    """One row: the teacher's decision, the reply as the loop would read it, and its scores.

    Args:
        case: What was asked.
        reply: The student's reply.
        error: Why there is none; it scores 0 like an empty one.
    """
    found = read_decision(reply, case.candidates, case.earlier)
    gold = case.gold
    scores = {
        "core_f1": _set_f1(found, gold) if found.query is not None or found.core else 0.0,
        "stop_accuracy": float(found.query is not None and bool(found.query) == bool(gold.query)),
        "malformed": float(found.query is None),
    }
    if gold.query:
        scores["query_f1"] = f1(found.query or "", (gold.query,))
    return {
        "id": case.id,
        "question_id": case.question_id,
        "round": case.round,
        "teacher": case.teacher,
        "gold": {"core_triples": _rows(gold), "next_query": gold.query, "decision": _kind(gold)},
        "found": {"core_triples": _rows(found), "next_query": found.query, "decision": _kind(found)},
        "faults": list(found.faults),
        "reply": reply,
        "error": error,
        "scores": scores,
    }


def summarise(rows: Iterable[Mapping[str, Any]], resamples: int = RESAMPLES) -> dict[str, Any]:
    """Metrics of scored rows.

    Args:
        rows: Rows of `score_reply`, streamed.
        resamples: Bootstrap samples of the intervals.

    Returns:
        `decisions` and `questions` (counts), `metrics` (each of `SCORES`), `by_round` and `by_teacher` (the same for
        each), `confusion` (the teacher's decision -> the student's -> count), `faults` (by name) and `errors`. Scores
        are `{"mean", "low", "high", "n"}`, with None where there is nothing to score.
    """
    values: dict[tuple[str, str, str], list[tuple[str, float]]] = defaultdict(list)
    confusion = {gold: dict.fromkeys((STOP, GO_ON, UNREADABLE), 0) for gold in (STOP, GO_ON)}
    faults: Counter[str] = Counter()
    questions, errors = set(), 0
    for row in rows:
        questions.add(row["question_id"])
        errors += bool(row["error"])
        faults.update(row["faults"])
        confusion[row["gold"]["decision"]][row["found"]["decision"]] += 1
        for name, score in row["scores"].items():
            for group in (("", ""), ("round", str(row["round"])), ("teacher", row["teacher"])):
                values[*group, name].append((row["question_id"], score))

    def family(kind: str, key: str) -> dict[str, Any]:
        found = {}
        for name in SCORES:
            scored = values.get((kind, key, name), [])
            clusters = [question for question, _ in scored]
            found[name] = bootstrap_mean([score for _, score in scored], clusters, resamples).to_json()
        return found

    def families(kind: str) -> dict[str, Any]:
        keys = sorted({key for one, key, _ in values if one == kind}, key=lambda key: (len(key), key))
        return {key: family(kind, key) for key in keys}

    return {
        "decisions": sum(sum(row.values()) for row in confusion.values()),
        "questions": len(questions),
        "metrics": family("", ""),
        "by_round": families("round"),
        "by_teacher": families("teacher"),
        "confusion": confusion,
        "faults": dict(sorted(faults.items())),
        "errors": errors,
    }


def means(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """The mean of each score alone, which is what a training log records."""
    scores: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        for name, score in row["scores"].items():
            scores[name].append(score)
    return {name: sum(scores[name]) / len(scores[name]) for name in SCORES if scores[name]}


def _candidates(trajectory: Trajectory, place: int) -> Sequence[Triple]:
    turn = trajectory.messages[place]
    try:
        shown = shown_candidates(turn["content"]) if turn["role"] == "user" else None
    except ValueError as error:
        raise ValueError(f"trajectory {trajectory.id!r}: {error}") from None
    if shown is None:
        raise ValueError(f"trajectory {trajectory.id!r}: turn {place + 1} shows no candidates to decide on")
    return shown


def _set_f1(found: Decision, gold: Decision) -> float:
    one, other = ({fact.triple for fact in decision.core} for decision in (found, gold))
    if not one and not other:
        return 1.0
    return 2 * len(one & other) / (len(one) + len(other))


def _kind(decision: Decision) -> str:
    return {None: UNREADABLE, "": STOP}.get(decision.query, GO_ON)


def _rows(decision: Decision) -> list[list[str]]:
    return [fact.triple.as_list() for fact in decision.core]
