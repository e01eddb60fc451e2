"""The runs of a teacher, each with the rows to learn from it: chats from the ledger, or records of a Graph-LLM.

A run is one row of a results file. Its calls in the ledger become chats whose assistant turns are the teacher's
decisions; the actions of a Graph-LLM, which has no chats, become planning and answering records.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from enum import StrEnum
from itertools import count
from pathlib import Path
from typing import NamedTuple

from tripletune.core.calls import Message
from tripletune.core.data.pairs import Trajectory
from tripletune.core.data.passages import passage_id
from tripletune.core.data.questions import DropReason
from tripletune.core.data.records import Action, Record, Step
from tripletune.core.files import read_json, read_prompt
from tripletune.core.program import progress
from tripletune.data_builders.datasets.lookup import SeenTable
from tripletune.data_builders.datasets.split import split_of
from tripletune.data_builders.trajectories.filters import ResultRow, RunFilter, failed_filter
from tripletune.data_builders.trajectories.ledger_chats import Chat, RoleCalls
from tripletune.data_builders.trajectories.options import TrajectoryOptions
from tripletune.llm.ledger import canonical
from tripletune.llm.replies import REPAIR_ROLE
from tripletune.rag.results import read_result_rows

logger = logging.getLogger(__name__)

RUN_SETTINGS = "run.json"


class RunDrop(StrEnum):
    """Why a run or a chat is left out without a filter; the card shows the values."""

    FAILED = "the question failed"
    NO_CHAT = "the ledger has no chat of this run"
    UNREADABLE_DECISION = "the last decision cannot be read or was cut off"
    REPEATED_CHAT = "repeated chat"
    UNREADABLE_PLAN = "a plan was unreadable or out of place"
    CUT_PLAN = "a plan was cut off"
    NO_TRIPLES = "no triples in any step"
    NOT_SHORTEST = "other runs of the question are shorter"


class QuestionRun(NamedTuple):
    """What one run of a question gives.

    Attributes:
        question_id: The question's id in the results, or "corpus:…" for a call that read a passage.
        size: Turns of all chats of the run, or steps of its records; the smallest runs are the shortest.
        rows: The rows to write. For pairs, one row per reply.
        split: The split of the question.
        good: Whether the run passed all filters. Only pairs have runs that did not.
    """

    question_id: str
    size: int
    rows: Sequence[Trajectory | Record]
    split: str
    good: bool = True


class RoleChat(NamedTuple):
    """A chat of a run, and the role that held it."""

    role: str
    chat: Chat


class ChatRuns:
    """Reads the runs of chat models from results and ledgers.

    Args:
        filters: Conditions of a run.
        drops: Counts the chats that are left out, by reason.
    """

    def __init__(self, options: TrajectoryOptions, filters: Sequence[RunFilter], drops: Counter[str]) -> None:
        self._options = options
        self._filters = filters
        self._drops = drops
        self._student_prompt: Message | None = None
        if options.prompt:
            self._student_prompt = {"role": "system", "content": read_prompt(options.prompt)}

    def read(self, results: Sequence[Path], ledgers: Sequence[Path]) -> Iterator[QuestionRun]:
        """Stream the runs of results files with their ledgers: first the questions, then calls that read a corpus."""
        with SeenTable() as seen:
            for file, ledger in zip(results, ledgers, strict=True):
                with ExitStack() as stack:
                    roles = []
                    for role in self._options.roles_in(ledger):
                        roles.append(stack.enter_context(RoleCalls(ledger, role, self._options.model)))
                    yield from self._question_runs(file, roles, seen)
                    yield from self._corpus_runs(roles, seen)

    def _question_runs(self, results: Path, roles: Sequence[RoleCalls], seen: SeenTable) -> Iterator[QuestionRun]:
        """The runs of a results file, with the chats that pass all filters; for pairs, each chat is a run.

        Args:
            results: The results file.
            roles: The ledger's calls of each role.
            seen: Chats and ids of earlier files, so that a chat is passed on once and no id repeats.
        """
        for row in _results_rows(results):
            chats = self._readable_chats(row, roles)
            size = sum(len(chat.messages) for _, chat in chats)
            kept = []
            for role_chat in chats:
                reason = failed_filter(self._filters, row, role_chat.chat.faults)
                if self._options.pairs:
                    # A pair needs bad replies too, so each chat is passed on with whether it is good.
                    yield from self._run_of([role_chat], row["id"], row["question"], size, seen, good=reason is None)
                elif reason is None:
                    kept.append(role_chat)
                else:
                    self._drops[reason] += 1
            if not self._options.pairs:
                yield from self._run_of(kept, row["id"], row["question"], size, seen)

    def _corpus_runs(self, roles: Sequence[RoleCalls], seen: SeenTable) -> Iterator[QuestionRun]:
        """The calls without a question, such as TH-RAG's extraction: no result says whether they are good."""
        for calls in roles:
            for chat in calls.corpus_chats():
                request = chat.messages[-2]["content"]
                question_id = f"corpus:{passage_id('', request)}"
                chats = [RoleChat(calls.role, chat)]
                yield from self._run_of(chats, question_id, request, len(chat.messages), seen)

    def _readable_chats(self, row: ResultRow, roles: Sequence[RoleCalls]) -> list[RoleChat]:
        """The chats of a row's run whose last decision can be read; others are counted.

        Repairs have a role of their own, but belong to the chat whose reply they repair.
        """
        if row.get("error"):
            self._drops[RunDrop.FAILED] += 1
            return []
        # The results name the calls of their run, since a ledger may hold several runs of a question.
        call_keys = row["trace"]["details"].get("calls", {})
        chats = []
        for calls in roles:
            keys = [*call_keys.get(calls.role, ()), *call_keys.get(calls.role + REPAIR_ROLE, ())]
            for chat in calls.chats(row["id"], keys):
                chats.append(RoleChat(calls.role, chat))
        if not chats:
            self._drops[RunDrop.NO_CHAT] += 1
        readable = [role_chat for role_chat in chats if role_chat.chat.readable]
        self._drops[RunDrop.UNREADABLE_DECISION] += len(chats) - len(readable)
        return readable

    def _run_of(
        self, chats: Sequence[RoleChat], question_id: str, text: str, size: int, seen: SeenTable, good: bool = True
    ) -> Iterator[QuestionRun]:
        """The run of these chats, or nothing if all its chats stand in earlier runs; they are added to `seen`.

        A run with one new chat is passed on with all its chats, so that `--shortest` and `--limit` count it as a whole.
        Pairs need every chat: the share of good runs after a reply is taken over repeated chats too.
        """
        new_chats = 0
        for _, chat in chats:
            if seen.add_if_new("chat", canonical(list(chat.messages))):
                new_chats += 1
        if not new_chats and not self._options.pairs:
            self._drops[RunDrop.REPEATED_CHAT] += len(chats)
            return
        rows: list[Trajectory] = []
        for role, chat in chats:
            identity = _take_free_id(question_id, seen)
            messages = self._for_student(chat.messages)
            trajectory = Trajectory(identity, question_id, role, chat.model, messages, chat.learned)
            if self._options.pairs:
                rows += _one_per_reply(trajectory)
            else:
                rows.append(trajectory)
        split = split_of(text, self._options.seed, self._options.validation_fraction)
        yield QuestionRun(question_id, size, rows, split, good)

    def _for_student(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """The messages with the student's system prompt, where one is given, in place of the teacher's."""
        if self._student_prompt is None:
            return tuple(messages)
        turns = []
        for message in messages:
            turns.append(self._student_prompt if message["role"] == "system" else message)
        return tuple(turns)


def _take_free_id(question_id: str, seen: SeenTable) -> str:
    """Take the first unused "QUESTION:NUMBER": several runs, roles, or a chat per round give several trajectories.

    The id is added to `seen`, so the next trajectory of the question gets another one.
    """
    for number in count():
        identity = f"{question_id}:{number}"
        if seen.add_if_new("id", identity):
            break
    return identity


def _one_per_reply(trajectory: Trajectory) -> list[Trajectory]:
    """Return, for each reply of the model, the trajectory up to it, with only this reply learned."""
    rows = []
    for place, message in enumerate(trajectory.messages):
        if trajectory.learned[place] and message["role"] == "assistant":
            messages = trajectory.messages[: place + 1]
            learned = (*[False] * place, True)
            rows.append(replace(trajectory, id=f"{trajectory.id}:{place}", messages=messages, learned=learned))
    return rows


def record_runs(
    results: Sequence[Path], options: TrajectoryOptions, filters: Sequence[RunFilter], drops: Counter[str]
) -> Iterator[QuestionRun]:
    """The runs of a Graph-LLM as records: each plan after its history, and the gold answer after all steps.

    `drops` counts the runs that are left out, by `RunDrop` or the reason of a filter. For pairs, runs that fail a
    filter are passed on as not good, and the answering records are left out, since the gold answer is not a reply of
    the model.
    """
    for sample, file in enumerate(results):
        for row in _results_rows(file):
            steps = tuple(map(Step.from_json, row["trace"]["steps"]))
            reason: str | None = _why_no_records(row, steps)
            good = False
            if reason is None:
                reason = failed_filter(filters, row)
                good = reason is None
                if options.pairs:
                    # The reply of a run that is not good may be the worse one of a pair.
                    reason = None
            if reason is not None:
                drops[reason] += 1
                continue
            name = f"{row['id']}:{sample}"
            records = []
            if not options.pairs:
                records.append(_answer_record(row, name, steps, options.system))
            records += _plan_records(row, name, steps, options.system)
            split = split_of(row["question"], options.seed, options.validation_fraction)
            yield QuestionRun(row["id"], len(steps), records, split, good)


def _why_no_records(row: ResultRow, steps: Sequence[Step]) -> RunDrop | DropReason | None:
    """Why no records can be made of a run, or None.

    A run with an unreadable plan is left out whole, since the plans after it follow from a history that no loop should
    have.
    """
    trace = row["trace"]
    if row.get("error"):
        return RunDrop.FAILED
    if not any(answer.strip() for answer in row["answers"]):
        return DropReason.NO_ANSWER
    if trace["malformed"] + trace["unexpected"] > 0:
        return RunDrop.UNREADABLE_PLAN
    if trace["tallies"].get("cut_off.ras.plan"):
        return RunDrop.CUT_PLAN
    if steps and not any(step.triples for step in steps):
        return RunDrop.NO_TRIPLES
    return None


def _answer_record(row: ResultRow, name: str, steps: tuple[Step, ...], system: str) -> Record:
    """The record of the gold answer after all steps of a run, instead of the model's own answer, which may be wrong."""
    return Record(
        id=f"{name}:answer",
        question_id=row["id"],
        task="answering",
        # The question as the model read it, with the words that the task adds.
        question=row["trace"]["question"],
        action=Action.SUFFICIENT if steps else Action.NO_RETRIEVAL,
        steps=steps,
        answers=tuple(row["answers"]),
        source=system,
    )


def _plan_records(row: ResultRow, name: str, steps: tuple[Step, ...], system: str) -> Iterator[Record]:
    """A record per action of a run, each with the steps before it.

    Args:
        row: A row of results whose plans can all be read.
        name: The beginning of the ids.
        steps: The steps of the run.
        system: The system, which is the source of the records.
    """
    for number, plan in enumerate(row["trace"]["actions"]):
        action = Action(plan["action"])
        if action is Action.SUBQ and number >= len(steps):
            # A repeated sub-query was not searched, so it has no step and is not learned.
            continue
        yield Record(
            id=f"{name}:{number}",
            question_id=row["id"],
            task="planning",
            question=row["trace"]["question"],
            action=action,
            steps=steps[:number],
            subquery=plan["subquery"],
            source=system,
        )


def _results_rows(results: Path) -> Iterator[ResultRow]:
    """Yield the rows of a results file, and warn if the run did not end, by the number of questions in its settings."""
    rows = 0
    runs = read_result_rows(results, "question", "scores", "trace", partial=True)
    for _, row in progress(runs, str(results)):
        rows += 1
        yield row
    settings = results.parent / RUN_SETTINGS
    if not settings.is_file():
        return
    expected = read_json(settings).get("questions", 0)
    if rows < expected:
        logger.warning("%s is of a run that did not end: it has %d of %d questions", results, rows, expected)
