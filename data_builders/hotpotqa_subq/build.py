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
import logging
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import aclosing
from typing import Any

from tripletune.data_builders.datasets.card import write_card
from tripletune.data_builders.datasets.inspect import why_empty
from tripletune.data_builders.datasets.lookup import SeenTable
from tripletune.data_builders.datasets.progress import progress
from tripletune.data_builders.datasets.writer import MADE
from tripletune.data_builders.hotpotqa_subq.annotations import KnowsDirectAnswers, TripleFile
from tripletune.data_builders.hotpotqa_subq.direct_answer import (
    DirectAnswerTest,
    is_correct,
    read_answers,
    store_answers,
)
from tripletune.data_builders.hotpotqa_subq.facts import build_facts
from tripletune.data_builders.hotpotqa_subq.in_order import in_order
from tripletune.data_builders.hotpotqa_subq.labelling import LabelOptions, label_question
from tripletune.data_builders.hotpotqa_subq.options import BuildOptions, OnCallError, answers_file
from tripletune.data_builders.hotpotqa_subq.output import ORDER, SubqOutput
from tripletune.data_builders.hotpotqa_subq.questions import Dropped, DropReason, Question, UnlabelledQuestion
from tripletune.data_builders.hotpotqa_subq.sources import OpenSource, Source, open_sources
from tripletune.data_builders.hotpotqa_subq.teacher import LLMTeacher, Prompts, StoredTriples
from tripletune.data_builders.text_to_triples.mixing import PartTeacher
from tripletune.models.data.records import Record
from tripletune.models.files import check_folder, new_folder
from tripletune.models.llm.client import CallError, LLMClient, RepliesPending, Sampling, SetupError
from tripletune.models.llm.ledger_client import RetriesExhausted

__all__ = ["BuildOptions", "BuildPending", "NothingLabelled", "Source", "build", "main"]
logger = logging.getLogger(__name__)


class BuildPending(Exception):
    """The build went as far as it could: some calls wait in a request file."""


class NothingLabelled(Exception):
    """The build is done and its folder written, with a card and without records: every question was left out."""


def build(
    sources: list[Source],
    options: BuildOptions,
    open_client: Callable[[], LLMClient] | None = None,
    sampling: Sampling | None = None,
) -> dict[str, Any]:
    """Build the data set folder.

    Args:
        sources: Benchmark files, each with its annotations.
        options: Options of the build.
        open_client: Opens the client of the teacher LLM, which labels the sources without annotations.
        sampling: Temperature, top_p and seed of its calls; None: greedy.

    Returns:
        The statistics that are also in `statistics.json`.

    Raises:
        FileNotFoundError: an input file is missing.
        FileExistsError: the output folder is taken.
        ValueError: an input file is malformed, or no question at all could be labelled and no teacher LLM was asked.
        NothingLabelled: a teacher LLM was asked, and not one question could be labelled.
        CallError: a call of the teacher can't be answered. What was answered is in its ledger.
        BuildPending: calls of the teacher wait in a request file.
    """
    check_folder(options.output, (*MADE, ORDER), options.overwrite)
    return asyncio.run(_build(sources, options, open_client, sampling or Sampling()))


async def _build(
    sources: list[Source], options: BuildOptions, open_client: Callable[[], LLMClient] | None, sampling: Sampling
) -> dict[str, Any]:
    prompts = Prompts.load(options.prompts)
    client = open_client() if open_client and any(source.needs_teacher for source in sources) else None
    try:
        opened = open_teachers(sources, options, client, prompts, sampling)
        answers = await _direct_answers(opened, options)
        with new_folder(options.output, (*MADE, ORDER), options.overwrite) as folder:
            output = SubqOutput(folder, options)
            try:
                await _write_records(opened, answers, options, output)
            except BuildPending as error:
                raise BuildPending(_pending_message(client) or str(error)) from None
            facts = build_facts(opened, options, client, prompts, sampling, output.examples())
            # A shard without records is part of a build that may have some.
            empty = not output.statistics.records and options.shard is None
            if empty and not facts.calls:
                found = [f"{o.source.name}: {n} x {reason}" for o in opened for reason, n in o.ordered_drops().items()]
                raise ValueError(f"no question could be labelled ({'; '.join(found) or 'the input files hold none'})")
            write_card(folder, facts, output.statistics, options.format)
    finally:
        if client is not None:
            await client.close()
    for one in opened:
        reasons = "; ".join(f"{count} x {reason}" for reason, count in one.ordered_drops().items())
        left_out = f"{one.drops.total()} left out{f' ({reasons})' if reasons else ''}"
        logger.info("%s: %d questions labelled, %s", one.source.name, one.labelled, left_out)
    if empty:
        raise NothingLabelled(why_empty(options.output) or "no question could be labelled")
    return output.statistics.to_json()


def _pending_message(client: LLMClient | None) -> str | None:
    """How many calls wait and where, from a client over the `batch` backend."""
    ask: Callable[[], str | None] | None = getattr(getattr(client, "backend", None), "pending_message", None)
    return ask() if ask is not None else None


def open_teachers(
    sources: list[Source],
    options: BuildOptions,
    client: LLMClient | None,
    prompts: Prompts,
    sampling: Sampling | None = None,
) -> list[OpenSource]:
    """Open the sources; those without annotations are labelled by a teacher LLM behind `client`.

    Raises:
        FileNotFoundError: an annotation or triple file is missing.
        ValueError: see `data_builders.sources.open_sources`.
    """
    issues: Counter[str] = Counter()
    stored = None if options.triples_from == "teacher" else StoredTriples(options.triples_from, issues)

    def make_teacher(_: Source) -> LLMTeacher:
        if client is None:
            raise ValueError("a source without annotations needs a teacher LLM, and there is no client for one")
        return LLMTeacher(client, prompts, stored, options.show_documents, options.first_subquery, sampling)

    opened = open_sources(sources, options.limit, options.part_counts(), make_teacher if client is not None else None)
    # One file for all sources: what is wrong with it is told once, with the first source that reads it.
    for one in [one for one in opened if isinstance(one.teacher, LLMTeacher)][:1]:
        one.issues.update(issues)
    return opened


async def _direct_answers(opened: list[OpenSource], options: BuildOptions) -> Mapping[str, str] | None:
    """Stored answers of the base model by question id, completed by a pass over the questions; None without a test."""
    path = answers_file(options)
    if path is None:
        return None
    if options.direct_answer_model is None:
        return read_answers(path)
    test = DirectAnswerTest(options.direct_answer_model, options.batch_size, options.max_new_tokens)
    stop = threading.Event()
    questions = _asked_directly(opened, options, stop)
    # In a thread: this pass takes long and never waits, so that Ctrl-C would only be heard at its end.
    try:
        written = await asyncio.to_thread(store_answers, progress(questions, "direct answers"), test, path)
    finally:
        stop.set()
    logger.info("%d new direct answers in %s", written, path)
    return read_answers(path, options.direct_answer_model)


def _asked_directly(
    opened: list[OpenSource], options: BuildOptions, stop: threading.Event
) -> Iterator[tuple[str, str]]:
    """Ids and texts of the questions for the direct-answer test, until `stop` is set."""
    for one in opened:
        if one.is_part:
            continue
        for position, question in enumerate(one.questions()):
            if stop.is_set():
                return
            if isinstance(question, Question) and options.is_mine(position):
                yield question.id, question.question


async def _write_records(
    opened: list[OpenSource], answers: Mapping[str, str] | None, options: BuildOptions, output: SubqOutput
) -> None:
    triple_file = TripleFile(options.triple_file) if options.distractors and options.triple_file else None
    label_options = LabelOptions(options.first_subquery, options.distractors, triple_file, options.seed)
    waiting, message = 0, ""
    with SeenTable() as seen, output:
        for number, one in enumerate(opened):
            rows = progress(one.questions(one.issues), one.source.name)
            questions = usable_questions(rows, one, seen, options)

            async def label(item: tuple[int, Question], one: OpenSource = one) -> _Labelled:
                return await _label(item[1], one, answers, label_options, options.on_call_error)

            async with aclosing(in_order(questions, label, options.concurrency)) as results:
                async for (position, question), found in results:
                    if isinstance(found, UnlabelledQuestion):
                        one.drops[found.reason.value] += 1
                        if isinstance(one.teacher, LLMTeacher):
                            output.drop(one.source.name, position, question, found)
                    elif isinstance(found, RepliesPending):
                        waiting, message = waiting + 1, str(found)
                    elif not waiting:
                        one.labelled += 1
                        output.write(number, position, question, found)
    if waiting:
        raise BuildPending(f"{waiting:,} questions wait for replies of the teacher: {message}")


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


_Labelled = list[Record] | UnlabelledQuestion | RepliesPending


async def _label(
    question: Question,
    one: OpenSource,
    answers: Mapping[str, str] | None,
    options: LabelOptions,
    on_call_error: OnCallError,
) -> _Labelled:
    try:
        if isinstance(one.teacher, PartTeacher):
            return await one.teacher.records(question)
        direct = answered_directly(question, one, answers)
        return await label_question(question, one.teacher, direct, options)
    except UnlabelledQuestion as error:
        logger.debug("%s %s left out: %s", question.source, question.id, error)
        # Without the frames it came through, which would be held until its turn.
        return error.with_traceback(None)
    except RepliesPending as error:
        return error
    except CallError as error:
        where = f"{question.source} {question.id}"
        # These would meet every other question too: to leave them all out would not be what was meant.
        if isinstance(error, (SetupError, RetriesExhausted)):
            raise CallError(f"{where}: {error}") from error
        if on_call_error == "drop":
            logger.warning("%s left out: %s", where, error)
            return UnlabelledQuestion(DropReason.CALL_REFUSED)
        raise CallError(f"{where}: {error}. To leave such questions out, add --on-call-error drop") from error


def answered_directly(question: Question, one: OpenSource, answers: Mapping[str, str] | None) -> bool:
    """Whether a question counts as answered without retrieval.

    Raises:
        ValueError: there is a file of direct answers, and it has none for the question.
    """
    if isinstance(one.teacher, KnowsDirectAnswers) and one.teacher.answers_directly(question):
        return True
    if answers is None:
        return False
    if question.id not in answers:
        raise ValueError(
            f"the stored direct answers have none for question {question.id!r} of {question.source}; "
            "add --direct-answer-model to complete the file"
        )
    return is_correct(answers[question.id], question.answers)


def main(arguments: list[str] | None = None) -> None:
    """The command line, in `data_builders.subq_cli`; what goes wrong ends it with one line and an exit code."""
    from tripletune.data_builders.hotpotqa_subq.cli import run

    if code := run(arguments):
        sys.exit(code)
