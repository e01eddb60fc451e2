"""HotpotQA-SUBQ: benchmark questions and a teacher become planning and answering records (RAS, Algorithm 1).

With recorded replies and gold annotations:

    tripletune build subq \\
        --source hotpotqa:hotpot_train.jsonl:teacher.jsonl \\
        --source musique:musique_train.jsonl:triples.jsonl \\
        --source two_wiki:2wiki_train.json --output data/subq

With a teacher LLM, which labels every source without annotations; first what it will cost, then the build:

    tripletune build subq --source hotpotqa:hotpot_train_v1.1.json --output data/subq \\
        --teacher openai --teacher-model MODEL --dry-run

All its calls are kept in a ledger beside the output, so the command can be killed at any moment and run again. The
result is a folder for `datasets.load_dataset`, with a card that puts its numbers beside the paper's table 4.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter, defaultdict, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing
from dataclasses import asdict
from functools import partial
from typing import IO, Any, TypeVar

from tripletune.data_builders.datasets.inspect import why_empty
from tripletune.data_builders.datasets.kinds import RECORDS
from tripletune.data_builders.datasets.lookup import SeenTable, progress
from tripletune.data_builders.datasets.rows import SmallestHashes
from tripletune.data_builders.datasets.writer import DROPPED, NO_RECORDS, BuildFacts, DatasetWriter, new_dataset
from tripletune.data_builders.hotpotqa_subq.annotations import RecordedTeacher, TripleFile
from tripletune.data_builders.hotpotqa_subq.labelling import LabelOptions, PartTeacher, label_question
from tripletune.data_builders.hotpotqa_subq.options import BuildOptions, OpenSource, Source, open_sources
from tripletune.data_builders.hotpotqa_subq.questions import Dropped, DropReason, Question, UnlabelledQuestion
from tripletune.data_builders.hotpotqa_subq.teacher import (
    TRIPLES_ROLE,
    BaseModelAnswers,
    LLMTeacher,
    StoredAnswers,
    is_correct,
    load_subq_prompts,
    prompt_digests,
)
from tripletune.models.data.records import Record, whole_characters
from tripletune.models.llm import CallError, LLMClient, RepliesPending, Sampling, SetupError
from tripletune.models.llm.ledger_client import LedgerClient, RetriesExhausted
from tripletune.models.llm.replies import repair_digest

logger = logging.getLogger(__name__)
T = TypeVar("T")
R = TypeVar("R")
_Labelled = list[Record] | UnlabelledQuestion | RepliesPending
# Results that are done but wait for a slower one before them, for each one at work. Beyond that the work waits too.
_WAITING = 4
# Of a reply in dropped.ndjson, in characters; and examples per reason in the card.
LONGEST_REPLY, EXAMPLES = 200, 3
_KEPT = "What was answered is in the ledger: run the same command again to continue"


class BuildPending(Exception):
    """The build went as far as it could: some calls wait in a request file."""

    exit_code = 3


class NothingLabelled(Exception):
    """The build is done and its folder written, with a card and without records: every question was left out."""

    exit_code = NO_RECORDS


def build(
    sources: list[Source],
    options: BuildOptions,
    open_client: Callable[[], LLMClient] | None = None,
    sampling: Sampling | None = None,
    open_base_model: Callable[[], LLMClient] | None = None,
) -> dict[str, Any]:
    """Build the data set folder; with `options.shard`, make the calls of one shard and write no folder.

    Args:
        sources: Benchmark files, each with its annotations.
        options: What is asked for.
        open_client: Opens the client of the teacher LLM, which labels the sources without annotations.
        sampling: Temperature, top_p and seed of its calls; None: greedy.
        open_base_model: Opens the model of the direct-answer test.

    Returns:
        The statistics that are also in `statistics.json`; nothing for a shard.

    Raises:
        FileNotFoundError: an input file is missing.
        FileExistsError: the output folder is taken.
        ValueError: an input file is malformed, another program writes the folder, or no question at all could be
            labelled and no teacher LLM was asked.
        NothingLabelled: a teacher LLM was asked, and not one question could be labelled.
        CallError: a call of the teacher can't be answered. What was answered is in its ledger.
        BuildPending: calls of the teacher wait in a request file.
    """
    job = _Build(options, sampling or Sampling())
    inputs = options.inputs(sources)
    if options.shard is not None:
        asyncio.run(job.run(sources, open_client, open_base_model))
        return {}
    with new_dataset(options, RECORDS, inputs) as dataset:
        with SubqOutput(dataset, options) as output:
            opened = asyncio.run(job.run(sources, open_client, open_base_model, output))
        facts = _facts(job, opened, output.examples)
        records = dataset.statistics.records
        if not records and not facts.calls:
            found = [f"{one.source.name}: {n} x {why}" for one in opened for why, n in one.ordered_drops().items()]
            raise ValueError(f"no question could be labelled ({'; '.join(found) or 'the input files hold none'})")
        numbers = dataset.finish(facts, may_be_empty=True)
    if not records:
        raise NothingLabelled(why_empty(options.output) or "no question could be labelled")
    return numbers


class _Build:
    """One pass over the questions.

    Attributes:
        prompts: The prompts of the teacher LLM.
        sampling: How its replies are drawn.
        client: Its client, once it is open.
    """

    def __init__(self, options: BuildOptions, sampling: Sampling) -> None:
        self.options, self.sampling = options, sampling
        self.prompts = load_subq_prompts(options.prompts)
        self.client: LLMClient | None = None
        triples = TripleFile(options.triple_file) if options.distractors and options.triple_file else None
        self._labels = LabelOptions(options.first_subquery, options.distractors, triples, options.seed)
        self._direct: BaseModelAnswers | StoredAnswers | None = None
        if options.direct_answers:
            self._direct = StoredAnswers(options.direct_answers)

    async def run(
        self,
        sources: list[Source],
        open_client: Callable[[], LLMClient] | None,
        open_base_model: Callable[[], LLMClient] | None,
        output: SubqOutput | None = None,
    ) -> list[OpenSource]:
        """Label all questions; without an output only their calls are made."""
        base_model: LLMClient | None = None
        try:
            opened = open_sources(sources, self.options, self._teacher_maker(open_client))
            if open_base_model is not None:
                base_model = open_base_model()
                self._direct = BaseModelAnswers(base_model, self.options.max_new_tokens)
            pending = await self._label_all(opened, output)
            if pending:
                # A client over the `batch` backend knows how many calls wait, and where.
                told = self.client.pending_message() if isinstance(self.client, LedgerClient) else None
                raise BuildPending(told or pending)
        finally:
            for client in (self.client, base_model):
                if client is not None:
                    await client.close()
        for one in opened:
            reasons = "; ".join(f"{count} x {reason}" for reason, count in one.ordered_drops().items())
            left_out = f"{one.drops.total()} left out{f' ({reasons})' if reasons else ''}"
            logger.info("%s: %d questions labelled, %s", one.source.name, one.labelled, left_out)
        return opened

    def _teacher_maker(
        self, open_client: Callable[[], LLMClient] | None
    ) -> Callable[[Counter[str]], LLMTeacher] | None:
        if open_client is None:
            return None
        options = self.options
        stored = TripleFile(options.triples_from) if options.triples_from != "teacher" else None

        def make(issues: Counter[str]) -> LLMTeacher:
            if self.client is None:
                # One file for all sources: what is wrong with it is told once, with the first that reads it.
                issues.update(stored.issues if stored is not None else ())
                self.client = open_client()
            shown, first = options.show_documents, options.first_subquery
            return LLMTeacher(self.client, self.prompts, stored, shown, first, self.sampling, options.json_schema)

        return make

    async def _label_all(self, opened: list[OpenSource], output: SubqOutput | None) -> str:
        """Label the questions of all sources; what is said of those that wait for replies, if any do."""
        waiting, message = 0, ""
        with SeenTable() as seen:
            for one in opened:
                rows = progress(one.source.questions(one.count, one.issues), one.source.name)
                questions = usable_questions(rows, one, seen, self.options)
                async with aclosing(
                    in_order(questions, partial(self._label, one), self.options.concurrency)
                ) as results:
                    async for (position, question), found in results:
                        if isinstance(found, RepliesPending):
                            waiting, message = waiting + 1, str(found)
                        elif isinstance(found, UnlabelledQuestion):
                            one.drops[found.reason.value] += 1
                            if output is not None and isinstance(one.teacher, LLMTeacher):
                                output.drop(one.source.name, position, question, found)
                        else:
                            one.labelled += 1
                            if output is not None and not waiting:
                                output.write(question, found)
        return f"{waiting:,} questions wait for replies of the teacher: {message}" if waiting else ""

    async def _label(self, one: OpenSource, item: tuple[int, Question]) -> _Labelled:
        question = item[1]
        try:
            if isinstance(one.teacher, PartTeacher):
                return one.teacher.records(question)
            return await label_question(question, one.teacher, await self._is_direct(question, one), self._labels)
        except UnlabelledQuestion as error:
            logger.debug("%s %s left out: %s", question.source, question.id, error)
            # Without the frames it came through, which would be held until its turn.
            return error.with_traceback(None)
        except RepliesPending as error:
            return error
        except Exception as error:
            # An error that would meet every other question too stops the build, whatever --on-call-error says.
            of_one = isinstance(error, CallError) and not isinstance(error, (SetupError, RetriesExhausted))
            if of_one and self.options.on_call_error == "drop":
                logger.warning("%s %s left out: %s", question.source, question.id, error)
                return UnlabelledQuestion(DropReason.CALL_REFUSED)
            if isinstance(self.client, LedgerClient):
                self.client.stop(error)
            if not isinstance(error, CallError):
                raise
            drop = ". To leave such questions out, add --on-call-error drop" if of_one else ""
            again = "" if "again to continue" in str(error) else f"{drop}. {_KEPT}"
            raise CallError(f"{question.source} {question.id}: {error}{again}") from error

    async def _is_direct(self, question: Question, one: OpenSource) -> bool:
        """Whether a question counts as answered without retrieval (Algorithm 1, lines 3-4)."""
        if isinstance(one.teacher, RecordedTeacher) and one.teacher.answers_directly(question):
            return True
        return self._direct is not None and is_correct(await self._direct.answer(question), question.answers)


def usable_questions(
    rows: Iterator[Question | Dropped], one: OpenSource, seen: SeenTable, options: BuildOptions
) -> Iterator[tuple[int, Question]]:
    """The questions that this process labels, each with its place in the source; what can't be used is counted.

    A process of several looks at every row, so that all of them take the same rows for repeated.
    """
    for position, row in enumerate(rows):
        mine = options.is_mine(position)
        reason = row.reason if isinstance(row, Dropped) else None
        if reason is None and seen.first("id", row.id) is not None:
            reason = DropReason.REPEATED_ID
        if mine and reason is not None:
            one.drops[reason.value] += 1
        elif mine and isinstance(row, Question):
            yield position, row


async def in_order(
    items: Iterator[T], work: Callable[[T], Awaitable[R]], concurrency: int
) -> AsyncGenerator[tuple[T, R], None]:
    """Run `work` on every item and yield the results in the order of the items, in memory that does not grow.

    A sliding window: a slow item holds back the results after it, not the work on them. Items are taken from the
    iterator only when there is room, so a fast reader does not run ahead of a slow teacher. An exception of `work`
    is raised at its item's turn; whatever happens, nothing is left running.

    Yields:
        Pairs of item and result.
    """
    room = asyncio.Semaphore(concurrency)
    window: deque[tuple[T, asyncio.Future[R]]] = deque()
    try:
        for item in items:
            await room.acquire()
            task = asyncio.ensure_future(work(item))
            task.add_done_callback(lambda _: room.release())
            window.append((item, task))
            # A turn of the event loop: work that never waits would otherwise only start when the window is full.
            await asyncio.sleep(0)
            while window and (window[0][1].done() or len(window) > _WAITING * concurrency):
                yield window[0][0], await window[0][1]
                window.popleft()
        while window:
            yield window[0][0], await window[0][1]
            window.popleft()
    finally:
        for _, running in window:
            running.cancel()
        await asyncio.gather(*(running for _, running in window), return_exceptions=True)


class SubqOutput:
    """Writes questions in the order of the input; a context manager.

    A question that a teacher LLM could not label is a line of `dropped.ndjson`: the stage and the reason, what was
    wrong, and the beginning of the reply that stayed unusable after its repair turn. The whole reply is in the ledger.

    Attributes:
        examples: By reason, some of the questions that were left out, picked by a hash of their ids.
    """

    def __init__(self, dataset: DatasetWriter[Record], options: BuildOptions) -> None:
        self.examples: dict[str, SmallestHashes] = defaultdict(partial(SmallestHashes, EXAMPLES))
        self._dataset, self._options = dataset, options
        self._dropped: IO[str] | None = None

    def __enter__(self) -> SubqOutput:
        return self

    def __exit__(self, *_: object) -> None:
        if self._dropped is not None:
            self._dropped.close()

    def write(self, question: Question, records: list[Record]) -> None:
        """Write the records of one question."""
        split = self._options.split_of(question.question)
        for record in records:
            self._dataset.write(record, split)

    def drop(self, source: str, position: int, question: Question, error: UnlabelledQuestion) -> None:
        """Write down that a teacher could not label the question at a place of its source, counted from 0."""
        line = {
            "source": source,
            "row": position,
            "question_id": question.id,
            "question": question.question,
            "stage": error.stage,
            "reason": error.reason.value,
            "detail": whole_characters(error.detail),
            "reply": whole_characters(error.reply[:LONGEST_REPLY]),
        }
        if self._dropped is None:
            self._dropped = (self._dataset.folder / DROPPED).open("w", encoding="utf-8")
        self._dropped.write(json.dumps(line, ensure_ascii=False) + "\n")
        self.examples[error.reason.value].add(f"{source}\n{question.id}", line)


def _facts(job: _Build, opened: list[OpenSource], examples: dict[str, SmallestHashes]) -> BuildFacts:
    """The facts of a build whose records are written; `opened` are the sources with what was counted."""
    options, client = job.options, job.client
    notes = [told for one in opened if (told := one.shortage())]
    for note in notes:
        logger.warning("%s", note)
    if options.direct_answer_model is None and options.direct_answers is None:
        notes.append(
            "The direct-answer test was not run (no `--direct-answer-model`): only questions that their annotation "
            "marks as direct are labelled [NO_RETRIEVAL]."
        )
    models = {}
    if client is not None:
        models["teacher"] = f"{client.model}{_drawn(client, job.sampling)}"
    if options.direct_answer_model is not None:
        models["direct answers"] = options.direct_answer_model
    llm = {one.source.name: one.teacher for one in opened if isinstance(one.teacher, LLMTeacher)}
    return BuildFacts(
        title="HotpotQA-SUBQ records",
        summary="Planning and answering records for triple-based iterative retrieval, labelled as in RAS, appendix C.",
        teachers={one.source.name: one.teacher.name for one in opened},
        drops={one.source.name: one.ordered_drops() for one in opened if one.drops},
        questions={one.source.name: one.labelled for one in opened},
        repairs=_by_source(llm, "repairs"),
        refused=_by_source(llm, "refused"),
        recovered=_by_source(llm, "recovered"),
        examples={reason: examples[reason].items() for reason in sorted(examples)},
        issues={f"{one.source.name}: {what}": n for one in opened for what, n in one.issues.items() if n},
        options={"sources": [one.source.text for one in opened], **asdict(options)},
        prompts=prompt_digests(job.prompts) | repair_digest() if llm else {},
        models=models,
        calls=_calls(list(llm.values())),
        notes=notes,
    )


def _drawn(client: LLMClient, sampling: Sampling) -> str:
    if not getattr(getattr(client, "backend", None), "send_temperature", True):
        return " (temperature and top_p are the provider's own: none was sent)"
    return f" (temperature {sampling.temperature:g}, top_p {sampling.top_p:g}, seed {sampling.seed})"


def _by_source(teachers: dict[str, LLMTeacher], name: str) -> dict[str, dict[str, int]]:
    """A counter of every teacher that counted something in it, in alphabetical order: the same in every build."""
    counters: dict[str, Counter[str]] = {source: getattr(teacher, name) for source, teacher in teachers.items()}
    return {source: dict(sorted(counter.items())) for source, counter in counters.items() if counter}


def _calls(teachers: list[LLMTeacher]) -> dict[str, dict[str, float]]:
    calls: Counter[str] = sum((teacher.calls for teacher in teachers), Counter())
    found: dict[str, dict[str, float]] = {stage: {"calls": count} for stage, count in sorted(calls.items())}
    if TRIPLES_ROLE in found:
        found[TRIPLES_ROLE]["malformed_triples"] = sum(teacher.malformed for teacher in teachers)
    return found
