"""Compare a student's decisions with its teacher's (`tripletune eval decisions`), as CIRAG distils them (3.5).

No retrieval runs: a prompt is a trajectory's chat up to a round's candidates, and the teacher's decision is the gold
answer. Training also logs these scores. The parser of the loop reads the replies. Intervals draw whole questions,
because the rounds of a question share most of their text.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from tripletune.core.calls import Completion, Message, Sampling
from tripletune.core.data.pairs import Trajectory, read_trajectories
from tripletune.core.data.triples import Triple
from tripletune.core.options import setting
from tripletune.eval.metrics import f1
from tripletune.eval.result_log import ResultLog
from tripletune.eval.statistics import Interval, bootstrap_pairs
from tripletune.eval.suites import (
    Failure,
    Scored,
    Suite,
    SuiteMetrics,
    SuiteOptions,
    SuiteRow,
    interval_cells,
    listed_numbers,
    show_table,
)
from tripletune.eval.suites._run_settings import shard_digests
from tripletune.models.fingerprints import model_fingerprint
from tripletune.models.specs import DTYPE_HELP, resolve, usual_dtype
from tripletune.rag.systems.cirag import CiragOptions
from tripletune.rag.systems.cirag.integration import INTEGRATE_ROLE, Decision, read_decision
from tripletune.rag.systems.cirag.shortening import shorten, shown_candidates

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
class Case:
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


@dataclass(kw_only=True)
class DecisionOptions(SuiteOptions):
    """Options of `tripletune eval decisions`."""

    data: str = setting(dataclasses.MISSING, "folder or file of trajectories (`build trajectories`)")
    model: str = setting(
        dataclasses.MISSING, "the student: run, adapter or model folder, owner/name[@revision] or pypi:<package>"
    )
    split: str = setting("validation", "split of the folder")
    batch_size: int = setting(16, "prompts per forward pass", at_least=1)
    dtype: str | None = setting(None, DTYPE_HELP)
    max_prompt_tokens: int | None = setting(
        None,
        "maximum tokens of a prompt; the oldest candidates are dropped first (default: no limit)",
        at_least=1,
    )
    max_reply_tokens: int = setting(CiragOptions().max_integration_tokens, "maximum tokens of a reply", at_least=1)


class ShownDecision(NamedTuple):
    """A decision as a row shows it; `decision` is `STOP`, `GO_ON` or `UNREADABLE`."""

    core_triples: list[list[str]]
    next_query: str | None
    decision: str

    @classmethod
    def of(cls, decision: Decision) -> ShownDecision:
        """The decision with its kind."""
        if decision.query is None:
            kind = UNREADABLE
        elif decision.query:
            kind = GO_ON
        else:
            kind = STOP
        return cls([triple.as_list() for triple in decision.core], decision.query, kind)


@dataclass(kw_only=True)
class DecisionRow(SuiteRow):
    """A student's reply to a `Case`, and its scores.

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
        values = super().to_json()
        return values | {"gold": self.gold._asdict(), "found": self.found._asdict()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> DecisionRow:
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


@dataclass(kw_only=True)
class DecisionMetrics(SuiteMetrics):
    """Figures of the evaluation, with what was evaluated."""

    model: str
    data: str
    split: str
    scores: DecisionScores

    def to_json(self) -> dict[str, Any]:
        return {"model": self.model, "data": self.data, "split": self.split, **asdict(self.scores)}


class Reply(NamedTuple):
    """The reply to a case's prompt, and the number of candidates that were left out to make the prompt fit."""

    completion: Completion
    left_out: int


class DecisionSuite(Suite):
    """A student's decisions; see the module."""

    unit = "decision"
    options_class = DecisionOptions
    example = "--data runs/cirag/trajectories --model runs/student --output runs/cirag/decisions"

    def __init__(self, options: DecisionOptions) -> None:
        resolve(options.model)
        # Twice as many items as run at once, so that a batch can have prompts of similar length.
        self.concurrency = 2 * options.batch_size
        self.sampling = Sampling(max_tokens=options.max_reply_tokens)
        super().__init__(options)

    def items(self) -> Iterator[Case]:
        split = self.options.split if Path(self.options.data).is_dir() else None
        return islice(decision_cases(read_trajectories(self.options.data, split)), self.options.limit)

    def settings(self) -> dict[str, Any]:
        options = self.options
        return {
            "data": shard_digests(options.data, options.split),
            "model": options.model,
            "weights": model_fingerprint(options.model),
            "dtype": usual_dtype(options.dtype),
            "limit": options.limit,
            "max_prompt_tokens": options.max_prompt_tokens,
            "max_reply_tokens": options.max_reply_tokens,
        }

    def open(self) -> None:
        from tripletune.llm.backends.hf import HFBackend

        self.backend = HFBackend(self.options.model, self.options.batch_size, self.options.dtype)
        self.clients = [self.backend]

    async def ask(self, batch: list[Case]) -> list[Reply]:
        (case,) = batch
        messages = list(case.messages)
        left_out = 0
        if self.options.max_prompt_tokens is not None:
            messages, left_out = shorten(messages, self.backend.count_tokens, self.options.max_prompt_tokens)
        return [Reply(await self.backend.complete(messages, self.sampling), left_out)]

    def score(self, item: Case, reply: Reply | Failure) -> DecisionRow:
        if isinstance(reply, Failure):
            return score_reply(item, "", reply.error)
        completion = reply.completion
        row = score_reply(item, completion.text)
        row.prompt_tokens = completion.prompt_tokens
        row.completion_tokens = completion.completion_tokens
        row.cut_off = not completion.is_whole
        row.candidates_left_out = reply.left_out
        row.seconds = completion.seconds
        return row

    def summarise(self, log: ResultLog) -> DecisionMetrics:
        options = self.options
        scores = summarise_decisions(DecisionRow.from_json(values) for values in log.rows())
        return DecisionMetrics(model=options.model, data=options.data, split=options.split, scores=scores)

    def show(self, metrics: DecisionMetrics, console: Console) -> None:
        scores = metrics.scores
        rows = []
        for name, explanation in SCORES.items():
            interval = scores.metrics[name]
            rows.append(("all", name, *interval_cells(interval), str(interval["n"]), explanation))
        for number, of_round in scores.by_round.items():
            for name in ("core_f1", "query_f1", "stop_accuracy"):
                interval = of_round[name]
                rows.append((number, name, *interval_cells(interval), str(interval["n"]), ""))
        title = f"{scores.decisions} decisions on {scores.questions} questions, with the teacher's history"
        heads = ("round", "score", "mean", "95 % interval", "decisions", "what it says")
        show_table(console, title, heads, rows, "questions", metrics.failed)
        console.print(f"errors {scores.errors}, faults of the replies: {listed_numbers(scores.faults)}")


SUITE = DecisionSuite


def decision_cases(trajectories: Iterable[Trajectory]) -> Iterator[Case]:
    """The learned decisions of trajectories, in order."""
    for trajectory in trajectories:
        if trajectory.role != INTEGRATE_ROLE:
            raise ValueError(
                f"trajectory {trajectory.id!r} has role {trajectory.role}, but only decisions of {INTEGRATE_ROLE} are "
                "scored here"
            )
        earlier: list[Triple] = []
        number = 0
        for place, turn in enumerate(trajectory.messages):
            if turn["role"] != "assistant" or not place:
                continue
            number += 1
            candidates = _candidates(trajectory, place - 1)
            gold = read_decision(turn["content"], candidates, earlier)
            if trajectory.learned[place]:
                if gold.query is None:
                    raise ValueError(f"trajectory {trajectory.id!r}: decision {number} cannot be read")
                yield Case(
                    id=f"{trajectory.id}@{number}",
                    question_id=trajectory.question_id,
                    round=number,
                    teacher=trajectory.model,
                    messages=trajectory.messages[:place],
                    candidates=tuple(candidates),
                    earlier=tuple(earlier),
                    gold=gold,
                )
            earlier += candidates


def _candidates(trajectory: Trajectory, place: int) -> Sequence[Triple]:
    """The candidates that a turn of a trajectory shows."""
    turn = trajectory.messages[place]
    candidates = None
    if turn["role"] == "user":
        try:
            candidates = shown_candidates(turn["content"])
        except ValueError as error:
            raise ValueError(f"trajectory {trajectory.id!r}: {error}") from None
    if candidates is None:
        raise ValueError(f"trajectory {trajectory.id!r}: turn {place + 1} shows no candidates to decide on")
    return candidates


def score_reply(case: Case, reply: str, error: str = "") -> DecisionRow:
    """One row with the teacher's decision, the parsed reply, and its scores; an empty reply scores 0."""
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
    """F1 of two sets of triples; 1 if both are empty."""
    predicted_set = set(predicted)
    gold_set = set(gold)
    if not predicted_set and not gold_set:
        return 1.0
    return 2 * len(predicted_set & gold_set) / (len(predicted_set) + len(gold_set))


def summarise_decisions(rows: Iterable[DecisionRow]) -> DecisionScores:
    """Figures of scored rows; intervals draw whole questions."""
    scores: dict[str, list[Scored]] = defaultdict(list)
    by_round: dict[str, dict[str, list[Scored]]] = defaultdict(lambda: defaultdict(list))
    by_teacher: dict[str, dict[str, list[Scored]]] = defaultdict(lambda: defaultdict(list))
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
        metrics=_intervals(scores),
        by_round=_by_part(by_round),
        by_teacher=_by_part(by_teacher),
        confusion=confusion,
        faults=dict(sorted(faults.items())),
        errors=errors,
    )


def _intervals(scores: Mapping[str, Sequence[Scored]]) -> dict[str, Interval]:
    return {name: bootstrap_pairs(scores.get(name, ())) for name in SCORES}


def _by_part(parts: Mapping[str, Mapping[str, Sequence[Scored]]]) -> dict[str, dict[str, Interval]]:
    """The scores of each part of the rows, in the order of their names, numbers by their size."""
    names = sorted(parts, key=lambda name: (len(name), name))
    return {name: _intervals(parts[name]) for name in names}
