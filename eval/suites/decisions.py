"""Compare a student's decisions with its teacher's (`tripletune eval decisions`), as CIRAG distils them (3.5).

No retrieval runs: a prompt is a trajectory's chat up to a round's candidates, and the teacher's decision is the gold
answer. Training also logs these scores.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from tripletune.core.calls import Completion, Sampling
from tripletune.core.data.pairs import Trajectory, read_trajectories
from tripletune.core.data.triples import Triple
from tripletune.core.options import setting
from tripletune.eval.result_log import ResultLog
from tripletune.eval.suites import (
    Failure,
    Suite,
    SuiteMetrics,
    SuiteOptions,
    interval_cells,
    named_numbers,
    show_table,
)
from tripletune.eval.suites._decision_scores import (
    SCORES,
    DecisionCase,
    DecisionRow,
    DecisionScores,
    score_reply,
    summarise_decisions,
)
from tripletune.eval.suites._run_settings import shard_digests
from tripletune.models.fingerprints import model_fingerprint
from tripletune.models.specs import DTYPE_HELP, resolve, usual_dtype
from tripletune.rag.systems.cirag import CiragOptions
from tripletune.rag.systems.cirag.integration import INTEGRATE_ROLE, read_decision
from tripletune.rag.systems.cirag.shortening import leave_out_candidates, shown_candidates


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


@dataclass(kw_only=True)
class DecisionMetrics(SuiteMetrics):
    """Figures of the evaluation, with what was evaluated."""

    model: str
    data: str
    split: str
    scores: DecisionScores

    def to_json(self) -> dict[str, Any]:
        """The figures as JSON values, the scores beside what was evaluated."""
        return {"model": self.model, "data": self.data, "split": self.split, **asdict(self.scores)}


class DecisionReply(NamedTuple):
    """The reply to a case's prompt, and the number of candidates that were left out to make the prompt fit."""

    completion: Completion
    left_out: int


class DecisionSuite(Suite[DecisionOptions, DecisionCase, DecisionReply, DecisionMetrics]):
    """A student's decisions; see the module."""

    unit = "decision"
    options_class = DecisionOptions
    example = "--data runs/cirag/trajectories --model runs/student --output runs/cirag/decisions"

    def __init__(self, options: DecisionOptions) -> None:
        resolve(options.model)
        # Twice as many items as run at once, so that a batch can have prompts of similar length.
        self.concurrency = 2 * options.batch_size
        self.sampling = Sampling(max_tokens=options.max_reply_tokens)
        # Last, since it reads all trajectories: a model that does not exist is found before.
        super().__init__(options)

    def items(self) -> Iterator[DecisionCase]:
        """The learned decisions of the trajectories; `--split` is for folders, since a file has no splits."""
        split = self.options.split if Path(self.options.data).is_dir() else None
        return islice(decision_cases(read_trajectories(self.options.data, split)), self.options.limit)

    def settings(self) -> dict[str, Any]:
        """What a row depends on; the batch size is not part of it.

        The same command continues a stopped run only if these are equal.
        """
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
        """Load the student, which reads chats without retrieval."""
        from tripletune.llm.backends.hf import HFBackend

        self.backend = HFBackend(self.options.model, self.options.batch_size, self.options.dtype)
        self.clients = [self.backend]

    async def ask(self, batch: list[DecisionCase]) -> list[DecisionReply]:
        """The student's reply to a case, whose oldest candidates are left out if the prompt is longer than allowed."""
        # `batches` yields one item at a time.
        (case,) = batch
        messages = list(case.messages)
        left_out = 0
        if self.options.max_prompt_tokens is not None:
            messages, left_out = leave_out_candidates(
                messages, self.backend.count_tokens, self.options.max_prompt_tokens
            )
        return [DecisionReply(await self.backend.complete(messages, self.sampling), left_out)]

    def score(self, item: DecisionCase, reply: DecisionReply | Failure) -> DecisionRow:
        """The row of a decision; a failed one scores like an empty reply."""
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
        """The scores of all decisions, with what was evaluated."""
        options = self.options
        scores = summarise_decisions(DecisionRow.from_json(values) for values in log.rows())
        return DecisionMetrics(model=options.model, data=options.data, split=options.split, scores=scores)

    def show(self, metrics: DecisionMetrics, console: Console) -> None:
        """Print all scores, then those by round, since later rounds have longer chats.

        The history is the teacher's, so a decision is scored alone, whatever the student decided before it.
        """
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
        console.print(f"errors {scores.errors}, faults of the replies: {named_numbers(scores.faults)}")


SUITE = DecisionSuite


def decision_cases(trajectories: Iterable[Trajectory]) -> Iterator[DecisionCase]:
    """The learned decisions of trajectories, in order.

    Decisions that are not learned only count as history: their candidates may be chosen again in later rounds.
    """
    for trajectory in trajectories:
        if trajectory.role != INTEGRATE_ROLE:
            raise ValueError(
                f"trajectory {trajectory.id!r} has role {trajectory.role}, but only decisions of {INTEGRATE_ROLE} are "
                "scored here (other chats: docs/guide/own_data.md#use-the-model)"
            )
        earlier: list[Triple] = []
        number = 0
        for place, turn in enumerate(trajectory.messages):
            if turn["role"] != "assistant" or not place:
                continue
            number += 1
            candidates = _candidates_of_turn(trajectory, place - 1)
            gold = read_decision(turn["content"], candidates, earlier)
            if trajectory.learned[place]:
                if gold.query is None:
                    raise ValueError(f"trajectory {trajectory.id!r}: decision {number} cannot be read")
                yield DecisionCase(
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


def _candidates_of_turn(trajectory: Trajectory, place: int) -> Sequence[Triple]:
    """The candidates that a turn of a trajectory shows, from which the student may choose.

    Raises:
        ValueError: The turn is no prompt of CIRAG's integrator.
    """
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
