"""HotpotQA-SUBQ: benchmark questions and a teacher become planning and answering records (RAS, Algorithm 1).

A ledger beside the output keeps all teacher calls, so a killed build can be continued.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import aclosing
from functools import partial
from pathlib import Path

from tripletune.core.calls import CallError, LLMClient, RepliesPending, Sampling, SetupError
from tripletune.core.concurrency import in_order
from tripletune.core.data.answers import normalize_answer
from tripletune.core.data.questions import DropReason, Question, Teacher, TripleFile, UnlabelledQuestion
from tripletune.core.data.records import ONLY_TRIPLES, Record, count_steps
from tripletune.core.files import json_line
from tripletune.data_builders.datasets import Numbers, add_to_sample
from tripletune.data_builders.datasets.inspect import why_empty
from tripletune.data_builders.datasets.kinds import RECORDS
from tripletune.data_builders.datasets.lookup import SeenTable
from tripletune.data_builders.datasets.writer import DROPPED, BuildFacts, DatasetWriter, new_dataset
from tripletune.data_builders.readers import get_reader
from tripletune.data_builders.subq import AGAIN, label_question
from tripletune.data_builders.subq.annotations import TripleLookup, open_teacher
from tripletune.data_builders.subq.card import Examples, build_facts
from tripletune.data_builders.subq.checks import missing_facts
from tripletune.data_builders.subq.opened import OpenSource
from tripletune.data_builders.subq.options import BuildOptions, Source, check_names, usable_questions
from tripletune.data_builders.subq.searches import FailedSearches, GoldSearches, RealSearches
from tripletune.data_builders.subq.teacher import (
    BaseModelAnswers,
    LLMTeacher,
    StoredAnswers,
    load_subq_prompts,
)
from tripletune.llm.ledger_client import LedgerClient, RetriesExhausted
from tripletune.rag.search.embedding import open_embedder
from tripletune.rag.search.retrievers import open_retriever

logger = logging.getLogger(__name__)
Opener = Callable[[], LLMClient] | None
# Maximum characters of a reply in dropped.ndjson.
LONGEST_REPLY = 200
# Examples per reason in the card.
EXAMPLES = 3
_FILTERED = "questions answered directly have no plan, since the filter dropped their documents"
_KEPT = "What was answered is in the ledger: run the same command again to continue"


class NothingLabelled(Exception):
    """The build wrote its folder, with a card but no records: every question was left out."""

    exit_code = 4


def build(
    sources: list[Source],
    options: BuildOptions,
    open_client: Opener = None,
    sampling: Sampling | None = None,
    open_base_model: Opener = None,
) -> Numbers:
    """Build the data set folder; the client's LLM labels the sources without annotations.

    Without records the folder is only written if calls were made: its card then says why the teacher's replies, which
    were paid for, gave none.
    """
    with new_dataset(options, RECORDS, options.inputs(sources)) as dataset:
        job = _Build(options, sampling or Sampling(), dataset)
        asyncio.run(job.run(sources, open_client, open_base_model))
        facts = job.facts()
        records = dataset.statistics.records
        if not records and not facts.calls:
            reasons = []
            for name, drops in facts.drops.items():
                reasons += [f"{name}: {count} x {reason}" for reason, count in drops.items()]
            raise ValueError(f"no question could be labelled ({'; '.join(reasons) or 'there are no questions'})")
        numbers = dataset.finish(facts)
    if not records:
        raise NothingLabelled(why_empty(options.output) or "no question could be labelled")
    job.check_teacher()
    return numbers


# Annotations may state only triples (`steps` of plain questions); training checks it again.
_WITHOUT_TEXT = "steps have triples and no text, so training refuses `data.evidence text` on them"


class _Build:
    """One pass over the questions.

    Args:
        options: The options of the build.
        sampling: How the teacher's replies are drawn.
        dataset: Gets the records and the statistics.
    """

    def __init__(self, options: BuildOptions, sampling: Sampling, dataset: DatasetWriter[Record]) -> None:
        self._options = options
        self._sampling = sampling
        self._dataset = dataset
        self._prompts = load_subq_prompts(options.prompts)
        self._client: LLMClient | None = None
        self._opened: list[OpenSource] = []
        self._examples: Examples = defaultdict(list)
        # Triples of other passages: of distractors, and of what real searches find.
        self._triple_lookup = TripleLookup(options.triple_file, Counter()) if options.triple_file else None
        self._failures: FailedSearches | None = None
        if options.failed_searches:
            self._failures = FailedSearches(
                options.failed_searches, 1 + options.distractors, options.split_of, options.seed, self._triple_lookup
            )
        self._searcher: GoldSearches | RealSearches
        self._searcher = GoldSearches(options.distractors, self._triple_lookup, options.seed, self._failures)
        # All files of triples that are read; each must have been of use in the end.
        self._lookups: list[TripleFile] = []
        if self._triple_lookup:
            self._lookups.append(self._triple_lookup)
        # Triples for the teacher LLM, which the first source that needs it opens for all.
        self._teacher_triples: TripleLookup | None = None
        self._direct: BaseModelAnswers | StoredAnswers | None = None
        if options.direct_answers:
            self._direct = StoredAnswers(options.direct_answers)

    async def run(self, sources: list[Source], open_client: Opener, open_base_model: Opener) -> None:
        """Label all questions and write their records.

        Clients are closed also after an error. Files that were of no use are refused at the end, when all look-ups are
        known.
        """
        base_model: LLMClient | None = None
        try:
            self._open_sources(sources, open_client)
            if open_base_model is not None:
                base_model = open_base_model()
                self._direct = BaseModelAnswers(base_model, self._options.max_new_tokens)
            if isinstance(self._searcher, GoldSearches) and self._failures:
                await self._collect_failures(self._failures)
            await self._label_all()
        finally:
            for client in (self._client, base_model):
                if client is not None:
                    await client.close()
        for lookup in self._lookups:
            lookup.refuse_useless_file()
        if isinstance(self._searcher, RealSearches):
            self._searcher.refuse_useless_corpus()
        for opened in self._opened:
            reasons = "; ".join(f"{count} x {reason}" for reason, count in opened.ordered_drops().items())
            left_out = f"{opened.drops.total()} left out"
            if reasons:
                left_out += f" ({reasons})"
            logger.info("%s: %d questions labelled, %s", opened.source.name, opened.labelled, left_out)
            without_support = opened.drops[DropReason.NO_SUPPORT.value]
            if opened.source.reader == "qa" and without_support:
                logger.warning(
                    "%s: %d questions name no supporting passages: let a loop find them, with `eval run --task qa` and "
                    "then `build trajectories --records`",
                    opened.source.name,
                    without_support,
                )

    async def _collect_failures(self, failures: FailedSearches) -> None:
        """Read the first questions of each source, whose passages serve as failed searches of other questions.

        Only teachers with stored annotations are asked, since those of an LLM cost calls.
        """
        for opened in self._opened:
            if opened.teacher.collects_failures:
                rows = opened.source.rows(None, opened.count, self._options.corpus)
                # Rows that can't be used are counted later, when all questions are read to be labelled.
                questions = (row for row in rows if isinstance(row, Question))
                await failures.collect(questions, opened.teacher)

    def _open_sources(self, sources: list[Source], open_client: Opener) -> None:
        """Open each source's annotations; the teacher LLM is opened last, when all other inputs are valid.

        So sources that need it are opened after the others, while `_opened` keeps the order in which the user named
        them, which is that of the records and of the card. It sets `_opened`, and `_searcher` for real searches; the
        files of triples that teachers read are added to `_lookups`.
        """
        options = self._options
        check_names(sources)
        for source in sources:
            get_reader(source.reader)
        opened: dict[str, OpenSource] = {}
        for source in sorted(sources, key=lambda source: source.needs_teacher):
            issues = Counter[str]()
            teacher: Teacher
            if source.needs_teacher and open_client is not None:
                teacher = self._open_llm_teacher(open_client, issues)
            else:
                teacher = open_teacher(source.reader, source.annotations, issues)
            if teacher.triples_of:
                self._lookups.append(teacher.triples_of)
            opened[source.name] = OpenSource(source, teacher, issues, options.most_questions(source.reader))
        self._opened = [opened[source.name] for source in sources]
        # `BuildOptions.check` allows real searches only with a file of triples.
        if options.retriever and self._triple_lookup:
            self._searcher = _real_searches(options, self._triple_lookup)

    def _open_llm_teacher(self, open_client: Callable[[], LLMClient], issues: Counter[str]) -> LLMTeacher:
        """A teacher over the LLM; the first one opens the client and the file of its triples, which all sources share.

        So malformed triples of the file are counted in the `issues` of the first source.
        """
        options = self._options
        if self._client is None:
            if options.triples_from != "teacher":
                self._teacher_triples = TripleLookup(options.triples_from, issues)
                self._lookups.append(self._teacher_triples)
            self._client = open_client()
        teacher = LLMTeacher(
            self._client, self._prompts, self._teacher_triples, options.show_documents, options.first_subquery,
            self._sampling, options.json_schema,
        )  # fmt: skip
        if self._teacher_triples is not None:
            teacher.name += f", triples of {Path(options.triples_from).name}"
        return teacher

    def check_teacher(self) -> None:
        """Raise `CallError` when replies to more than a tenth of the questions could not be used.

        The folder is written before, since its replies are paid for; but a program that goes on with the data should
        stop, as the teacher is probably set up wrongly. The tenth is our choice.
        """
        lost = 0
        asked = 0
        for opened in self._opened:
            if isinstance(opened.teacher, LLMTeacher):
                unusable = opened.drops[DropReason.UNREADABLE_REPLY] + opened.drops[DropReason.CALL_REFUSED]
                lost += unusable
                asked += unusable + opened.labelled
        if 10 * lost > asked:
            raise CallError(
                f"{self._options.output} is written, but {lost:,} of {asked:,} questions are left out since the "
                "teacher's replies to them could not be used: dropped.ndjson says why"
            )

    async def _label_all(self) -> None:
        """Label the questions in order, many at once, and keep or count each result.

        A question that waits for a batch does not stop the others, so that one batch has all calls. The data set is
        written by the run that finds all replies.

        `seen` is one table for all sources, since a question of two benchmarks is labelled once; the order of the
        sources therefore matters.
        """
        pending: RepliesPending | None = None
        done = 0
        waiting = 0
        with SeenTable() as seen:
            for opened in self._opened:
                corpus = self._options.corpus
                questions = usable_questions(opened.source, seen, opened.drops, opened.issues, opened.count, corpus)
                label = partial(self._label_or_reason, opened)
                async with aclosing(in_order(questions, label, self._options.concurrency)) as results:
                    async for question, result in results:
                        if isinstance(result, RepliesPending):
                            pending = result
                            waiting += 1
                            continue
                        done += 1
                        if isinstance(result, UnlabelledQuestion):
                            opened.drops[result.reason.value] += 1
                            if isinstance(opened.teacher, LLMTeacher):
                                self._log_dropped(opened.source.name, question, result)
                        else:
                            self._keep_records(opened, question, result, is_written=pending is None)
        if pending:
            # A client over the `batch` backend knows how many calls wait, and where.
            message = self._client.pending_message() if self._client is not None else None
            raise RepliesPending(f"{done:,} questions are done, {waiting:,} wait. {message or pending}")

    def _keep_records(self, opened: OpenSource, question: Question, records: list[Record], is_written: bool) -> None:
        """Count a labelled question and write its records, unless an earlier question waits for a batch."""
        opened.labelled += 1
        if isinstance(self._searcher, RealSearches):
            opened.notes += self._searcher.outcomes.pop(f"{question.source}:{question.id}", Counter())
        if is_written:
            counts: Counter[str] = Counter()
            for record in records:
                count_steps(record.steps, counts)
                self._dataset.write(record, self._options.split_of(question.question))
            opened.notes[_WITHOUT_TEXT] += counts[ONLY_TRIPLES]

    async def _records_of(self, opened: OpenSource, question: Question, teacher: Teacher) -> list[Record]:
        """Run the direct-answer test, label the question, and check the facts of its records.

        If the filter keeps no document of a question that the base model answers, there is nothing to plan, so only
        its last record, the answer, is kept (`filtered_answers`). A question that its annotation marks as direct needs
        neither the test nor the filter.
        """
        options = self._options
        is_marked = teacher.answers_directly(question)
        is_direct = is_marked or await self._is_direct(question)
        records = await label_question(question, teacher, is_direct, options.first_subquery, self._searcher)
        is_filtered = is_direct and not is_marked and options.filtered_answers
        # The filter is a call of the teacher, so it is asked last, and only where its answer counts.
        if is_filtered and await teacher.keeps_nothing(question):
            records = records[-1:]
            opened.notes[_FILTERED] += 1
        if options.check_facts != "off":
            self._check_facts(opened, question, records)
        # Each of these records asks again, after a search that failed.
        retries = [record for record in records if record.id.endswith(AGAIN)]
        opened.notes["failed searches are in its histories"] += len(retries)
        return records

    def _check_facts(self, opened: OpenSource, question: Question, records: list[Record]) -> None:
        """Raise `UnlabelledQuestion` for a label that needs a fact its history lacks, or count it (`check_facts`)."""
        for missing in missing_facts(question, records):
            if self._options.check_facts == "drop":
                raise UnlabelledQuestion(missing.reason, missing.name)
            opened.issues[missing.reason.value] += 1

    async def _label_or_reason(
        self, opened: OpenSource, question: Question
    ) -> list[Record] | UnlabelledQuestion | RepliesPending:
        """The records of a question, or why it has none (yet), for `in_order` to hand on; other errors are raised.

        The first error that ends it also stops the ledger client, since the calls of other questions run at the same
        time, and would go on to be paid.
        """
        try:
            return await opened.teacher.records(question, partial(self._records_of, opened))
        except UnlabelledQuestion as error:
            logger.debug("%s %s left out: %s", question.source, question.id, error)
            # A traceback would keep its frames in memory until this question's turn.
            return error.with_traceback(None)
        except RepliesPending as error:
            return error
        except Exception as error:
            # An error that every other question would also meet stops the build, whatever --on-call-error says.
            concerns_one_call = isinstance(error, CallError) and not isinstance(error, (SetupError, RetriesExhausted))
            if concerns_one_call and self._options.on_call_error == "drop":
                logger.warning("%s %s left out: %s", question.source, question.id, error)
                return UnlabelledQuestion(DropReason.CALL_REFUSED)
            if isinstance(self._client, LedgerClient):
                self._client.stop(error)
            if not isinstance(error, CallError):
                raise
            message = f"{question.source} {question.id}: {error}"
            # Some errors of the ledger client say how to continue themselves.
            if "again to continue" not in str(error):
                if concerns_one_call:
                    message += ". To leave such questions out, add --on-call-error drop"
                message += f". {_KEPT}"
            raise CallError(message) from error

    async def _is_direct(self, question: Question) -> bool:
        """Whether a question counts as answered without retrieval (Algorithm 1, lines 3-4)."""
        if self._direct is None:
            return False
        answer = normalize_answer(await self._direct.answer(question))
        return answer in [normalize_answer(gold) for gold in question.answers]

    def _log_dropped(self, source: str, question: Question, error: UnlabelledQuestion) -> None:
        """Append a question that a teacher LLM could not label to `DROPPED`, with the start of its unusable reply.

        The line is written at once, as a killed build should leave it; the card shows the examples with the smallest
        hashes, which do not depend on the order in which questions are done.
        """
        line = {
            "source": source, "question_id": question.id, "question": question.question, "stage": error.stage,
            "reason": error.reason.value, "detail": error.detail, "reply": error.reply[:LONGEST_REPLY],
        }  # fmt: skip
        with (self._dataset.folder / DROPPED).open("a", encoding="utf-8") as file:
            file.write(json_line(line))
        add_to_sample(self._examples[error.reason.value], f"{source}\n{question.id}", line, EXAMPLES)

    def facts(self) -> BuildFacts:
        """Facts on the build for the card; call it after all questions were labelled, since labelling counts them."""
        return build_facts(self._options, self._opened, self._prompts, self._client, self._sampling, self._examples)


def _real_searches(options: BuildOptions, triples_of: TripleLookup) -> RealSearches:
    """Open the retriever over the corpus, with a temporary index, which is removed when the passages are freed."""
    embedder = open_embedder(options.encoder) if options.encoder else None
    scratch = tempfile.TemporaryDirectory(prefix="tripletune-")
    retriever = open_retriever(options.retriever or "bm25", str(options.corpus), scratch.name, embedder)
    weakref.finalize(retriever.passages, scratch.cleanup)
    return RealSearches(retriever, triples_of, options.top_k, options.failed_searches, options.seed)
