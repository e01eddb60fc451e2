"""Run a system on the questions of a task (`tripletune eval run`), with answers, traces and cost.

`QuestionSuite` has the steps in their order: `items` reads the questions, `open` opens corpus, indexes and models,
`ask` answers a question, `score` makes its row, and `summarise` the figures of all rows. `eval/running.py` calls them,
many questions at once, and writes the files.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any, Self

from rich.console import Console

from tripletune.core.calls import in_role
from tripletune.core.command_line import from_arguments
from tripletune.core.data.passages import Passage
from tripletune.core.data.questions import Question
from tripletune.core.files import read_json
from tripletune.core.options import CheckedOptions, convert, require
from tripletune.eval import find_metrics, load_task, score_answer, task_questions, write_context_corpus
from tripletune.eval.controls import controlled_tools
from tripletune.eval.costs import summarise_questions
from tripletune.eval.metrics import recall
from tripletune.eval.result_log import ResultLog
from tripletune.eval.results import METRICS, RunMetrics, RunSettings
from tripletune.eval.running import run_suites
from tripletune.eval.suites import Failure, Suite, _gold
from tripletune.eval.suites._run_settings import backends_of, model_settings, run_settings, trainings_of
from tripletune.eval.suites._run_tables import print_warnings_of_run, show_run, show_runs
from tripletune.eval.systems import (
    UNNAMED,
    QuestionOptions,
    RunCommand,
    chat_models_by_role,
    chosen_teacher,
    open_chat_model,
    options_of_run,
    run_problems,
    unknown_owners,
)
from tripletune.llm.backends import LLMOptions
from tripletune.rag import Trace
from tripletune.rag.answering import Opened, OpenSystem, clients_of, open_tools
from tripletune.rag.costs import read_prices, with_batch_prices
from tripletune.rag.extractor import ROLE
from tripletune.rag.results import ResultRow, StoredTrace
from tripletune.rag.systems import Tools, find_system
from tripletune.rag.trained import loop_options, overridden_options, warn_of_overrides

logger = logging.getLogger(__name__)
# Options that `options_of_run` takes away from the systems that do not use them.
_READ_BY_SOME = ("triples", "encoder", "integrator", "planner_model", "answers")


class QuestionSuite(RunCommand, Suite[QuestionOptions, Question, Trace, RunMetrics]):
    """A system that answers a task's questions in its loop.

    The constructor reads the questions and checks all options; models and indexes are opened by `open`.

    Args:
        teacher: The chat model of the run, if it has one.
        opened: Indexes and models that several runs share.
        home: The folder with indexes and the corpus of contexts, which several runs share; default: the output folder.

    Attributes:
        loop: The options of the system.
        gold: Ids of the supporting passages in `--corpus`, by question; None if they are not known there.
        own_contexts: The corpus consists of the passages that came with the questions.
    """

    unit = "question"
    options_class = QuestionOptions

    def __init__(
        self,
        options: QuestionOptions,
        teacher: LLMOptions | None = None,
        opened: Opened | None = None,
        home: Path | None = None,
    ) -> None:
        self.options = options
        self.system = find_system(options.system)
        self.task = load_task(options.task)
        self.prices = read_prices(options.price)
        self.opened = opened or Opened()
        self.home = home or Path(options.output)
        self.metrics = {name: metric for name, metric in find_metrics().items() if name in self.task.metrics}
        # Of the class `system.options`: each system has options of its own.
        self.loop: Any = self._loop_options()
        problems = run_problems(options, self.system, self.loop, teacher)
        if problems:
            raise ValueError("; ".join(problems))
        warn_of_overrides(overridden_options(self.system, options, self.loop))
        self._notes: Counter[str] = Counter()
        try:
            # This reads the questions, for which task and notes are needed.
            super().__init__(options)
        finally:
            # Also after an error, which the notes may explain.
            for note, count in self._notes.items():
                if count > 0:
                    logger.warning("%s: %d %s", options.data, count, note)
        self.gold: _gold.GoldLinks | None = _gold.read_gold_links(options.gold, self.ids) if options.gold else None
        self.tools = Tools()
        self._passages: dict[str, Passage] = {}
        reads_answers = self.system.model == "none"
        self.teacher = None if reads_answers else teacher
        self.backends = backends_of(options, self.teacher)
        self.trainings = trainings_of(options)
        self.own_contexts = (reads_answers or self.system.needs_corpus(self.loop)) and not options.corpus
        self.retry_errors = options.retry_errors
        # A batch backend does not answer calls now; questions in order give the same request file every time.
        self.concurrency = 1 if self.backends else options.concurrency

    def _loop_options(self) -> CheckedOptions:
        """The options of the system; those of `--set` override the protocol of the task.

        What the task or the command line does not say (None) keeps the system's own default. A system gets only the
        values for which it has an option: a system that does not search has no `top_k`.
        """
        protocol = {
            "max_answer_tokens": self.task.max_answer_tokens,
            "answer": self.task.answer,
            "top_k": self.task.top_k,
            "answers": self.options.answers,
            "corpus": self.options.corpus,
        }
        names = {field.name for field in fields(self.system.options)}
        values = {name: value for name, value in protocol.items() if name in names and value is not None}
        return loop_options(self.system, self.options, **values)

    @classmethod
    def suites(cls, args: argparse.Namespace) -> Sequence[QuestionSuite]:
        """A suite for every named system on every named task; see `suites_of`."""
        teacher = from_arguments(LLMOptions, args, "teacher", model=args.teacher_model or UNNAMED)
        return suites_of(from_arguments(QuestionOptions, args), teacher)

    def items(self) -> Iterator[Question]:
        """The first questions, by `--limit` and the protocol of the task; notes are counted again for each reading."""
        self._notes.clear()
        limits = [limit for limit in (self.options.limit, self.task.questions) if limit is not None]
        return islice(task_questions(self.task, self.options.data, self._notes), min(limits, default=None))

    def settings(self) -> dict[str, Any]:
        """What a row depends on; see `run_settings`."""
        return run_settings(self.options, self.task, self.system, self.loop, self.teacher).to_json()

    def open(self) -> None:
        """Open corpus, indexes and models, which takes the time; the settings were checked when the suite was made."""
        corpus = self._open_corpus()
        self._set_gold_links(corpus)
        self.tools = self._open_tools(corpus)
        self.clients = clients_of(self.tools)
        if self.options.retriever != "bm25":
            self.embedded = _embedded_texts(self.tools)
        if self.options.control:
            self.tools = controlled_tools(self.tools, self.options.control, self.options.control_run)

    def _open_corpus(self) -> Path | None:
        """The corpus to search, by default the passages of all questions; None for a system that does not search."""
        if not self.system.needs_corpus(self.loop):
            return None
        if self.options.corpus:
            return Path(self.options.corpus)
        corpus = self.home / "corpus.jsonl"
        count = self.opened.once(corpus, partial(write_context_corpus, self.task, self.options.data, corpus))
        logger.info("corpus of all contexts in %s: %d passages", self.options.data, count)
        return corpus

    def _set_gold_links(self, corpus: Path | None) -> None:
        """Set `gold`, and keep the passages that `--gold` names, or find those of the questions' contexts in a corpus.

        Ids of a corpus differ from those of the contexts, so without `--gold` the links are found by content.
        """
        options, place = self.options, self.options.corpus or corpus
        if self.gold and place:
            self.gold, self._passages = _gold.linked_passages(self.gold, str(options.gold), place, self.ids)
        elif options.corpus and (corpus or self.system.model == "none"):
            key = ("links", options.corpus, options.task, options.data, options.limit)
            self.gold = self.opened.once(key, partial(_gold.links_of_contexts, self.items, options.corpus))

    def _open_tools(self, corpus: Path | None) -> Tools:
        """The system's tools; chat models and indexes are opened once for all runs that share them."""
        llm = None
        extractor = None
        if self.teacher is not None:
            chosen = (self.teacher, self.options.oracle, tuple(self.options.llm))
            llm = self.opened.once(chosen, partial(open_chat_model, *chosen))
            # The extractor is the model of `--teacher`, or of `--llm extract=...`.
            extractor = in_role(chat_models_by_role(self.options.llm, self.teacher), ROLE, self.teacher)
        index = Path(self.options.index or self.home / "index")
        return open_tools(self.options, self.system, self.loop, corpus, index, self.opened, extractor, llm)

    async def ask(self, batch: list[Question]) -> list[Trace]:
        """The system's trace of a question."""
        # `batches` yields one item at a time.
        (question,) = batch
        return [await self.answer(question, self.loop, self.tools)]

    async def answer(self, question: Question, loop: Any, tools: Tools) -> Trace:
        """Answer a question; gold passages are only for systems that exist to read them.

        Args:
            loop: Options of the class `system.options`, which may differ from `self.loop`, as in `eval stopping`.
        """
        return await OpenSystem(self.system, loop, tools).answer_async(
            self._question_in_template(question),
            question.search or question.question,
            question_id=question.id,
            context=question.passages,
            gold=self._gold_passages(question) if self.system.needs_gold else (),
        )

    def _question_in_template(self, question: Question) -> str:
        """The question as the model reads it; retrieval gets it without the template of the task."""
        return self.task.template.replace("{question}", question.question)

    def _gold_passages(self, question: Question) -> tuple[Passage, ...]:
        """The supporting passages, from the corpus if its gold links are known, else from the question's context."""
        if self.gold is None:
            return tuple(question.passages[index] for index in question.supporting)
        names = sorted(self.gold.get(question.id, ()))
        return tuple(self._passages[name] for name in names if name in self._passages)

    def score(self, item: Question, reply: Trace | Failure) -> ResultRow:
        """The row of a question; without a search, or after a failure, `supporting_recall` is None.

        The trace of a failed question is kept, because its calls were paid, and its id is set here, since a failure
        before the system began has made none.
        """
        trace = self._failed_trace(item, reply) if isinstance(reply, Failure) else reply
        trace.question_id = item.id
        supporting = self._supporting_ids(item)
        supporting_recall = None
        if supporting and trace.steps and not trace.error:
            retrieved: list[str] = []
            for step in trace.steps:
                retrieved += [passage["id"] for passage in step.passages]
            supporting_recall = recall(retrieved, supporting)
        return ResultRow(
            id=item.id,
            question=item.question,
            type=item.type,
            answers=list(item.answers),
            short_answers=[list(aliases) for aliases in item.short_answers],
            prediction=trace.answer,
            scores=self._scores_of_answer(item, trace),
            supporting=sorted(supporting),
            supporting_recall=supporting_recall,
            error=trace.error,
            trace=StoredTrace.of(trace),
        )

    def _failed_trace(self, question: Question, failure: Failure) -> Trace:
        """What the system had done until it failed, without an answer."""
        begun = failure.trace or Trace(self._question_in_template(question))
        return replace(begun, answer="", stop_reason="", error=failure.error, seconds=failure.seconds)

    def _scores_of_answer(self, question: Question, trace: Trace) -> dict[str, float]:
        """The scores in the order of the task, all 0 after a failure; none without a gold answer or an answer."""
        if not question.answers or "answer" in StoredTrace.of(trace).unknown:
            return {}
        # A metric that fails ends the run, so it also scores the empty answer of a failed question.
        scores = score_answer(trace.answer, question.answers, self.metrics, question.short_answers, self.task.refusal)
        if trace.error:
            scores = dict.fromkeys(scores, 0.0)
        return {name: scores[name] for name in self.task.metrics if name in scores}

    def _supporting_ids(self, question: Question) -> frozenset[str]:
        """Ids of the supporting passages as the corpus names them; empty if they are not known.

        The questions' own ids count only where the questions' passages are the corpus, or what the system reads.
        """
        if self.gold is not None:
            return self.gold.get(question.id, frozenset())
        if self.own_contexts or self.system.needs_gold:
            return frozenset(question.passages[index].id for index in question.supporting)
        return frozenset()

    def summarise(self, log: ResultLog) -> RunMetrics:
        """Scores, counts and costs of all rows; a Batch API's calls cost half.

        This warns of found passages that are not in the corpus. Those of our retrievers are; a file of answers, and a
        system in another module, which declares no files, may have any.
        """
        may_have_others = not self.system.needs_corpus(self.loop) or self.system.files is None
        if may_have_others and not self.system.needs_gold:
            rows = map(ResultRow.from_json, log.rows())
            _gold.warn_of_unknown_passages(rows, self.task, self.options.data, self.options.corpus)
        return summarise_questions(log, self.system.name, self.task, with_batch_prices(self.prices, self.backends))

    def show(self, metrics: RunMetrics, console: Console) -> None:
        """Print the figures and the warnings of the run."""
        explanations = {name: metric.explanation for name, metric in self.metrics.items()}
        show_run(metrics, explanations, console, with_oracle=bool(self.options.oracle))
        self._print_warnings(metrics, console)

    def show_all(self, finished: Sequence[tuple[Self, RunMetrics]], console: Console) -> None:
        """Print a table of all systems per task, the warnings of each run, and what comes next."""
        by_task: dict[str, list[RunMetrics]] = {}
        for _, metrics in finished:
            by_task.setdefault(metrics.task, []).append(metrics)
        for runs in by_task.values():
            show_runs(runs, console, with_oracle=any(suite.options.oracle for suite, _ in finished))
        for suite, metrics in finished:
            suite._print_warnings(metrics, console)
        folders = [Path(suite.options.output) for suite, _ in finished]
        # OUTPUT/TASK/SYSTEM
        output = folders[0].parents[1]
        console.print(f"all figures: metrics.json in {', '.join(str(folder) for folder in folders)}")
        console.print(f"next: tripletune eval report {output}   (tables with differences, plots, traces)")

    def _print_warnings(self, metrics: RunMetrics, console: Console) -> None:
        """Print what the loop extracted, and log what the user should look at."""
        models = chat_models_by_role(self.options.llm, self.teacher) if self.teacher else {}
        named_roles = {"--price": self.prices, "--llm": models}
        settings = model_settings(self.options, self.teacher) if self.options.oracle else RunSettings()
        print_warnings_of_run(metrics, settings, self.tools.store, self.options.triples, named_roles, console)


SUITE = QuestionSuite


def suites_of(options: QuestionOptions, teacher: LLMOptions | None = None) -> list[QuestionSuite]:
    """The suites of every system on every task, with outputs in OUTPUT/TASK/SYSTEM if there are several.

    The chat model is the model that `options.llm` names without a role, else `teacher` unless `teacher` is `UNNAMED`,
    else the oracle. The other settings of `teacher` hold for all these models. The problems of all runs are one error,
    so that a user corrects them at once.
    """
    teacher = chosen_teacher(options, teacher or LLMOptions(model=UNNAMED))
    systems = _distinct_names(options.system)
    tasks = _distinct_names(options.task)
    if len(systems) == len(tasks) == 1:
        return [QuestionSuite(options, teacher)]
    problems = unknown_owners(options.set)
    suites = []
    opened = Opened()
    for task, system in product(tasks, systems):
        try:
            of_run, teacher_of_run = options_of_run(options, teacher, task, system)
            suites.append(QuestionSuite(of_run, teacher_of_run, opened, Path(options.output) / Path(task).stem))
        except (ValueError, OSError) as error:
            problems.append(str(error))
    if problems:
        raise ValueError("; ".join(dict.fromkeys(problems)))
    for name in _READ_BY_SOME:
        if getattr(options, name) and not any(getattr(suite.options, name) for suite in suites):
            logger.warning("--%s %s has no effect: none of these systems uses it", name, getattr(options, name))
    return suites


def _distinct_names(names: str) -> list[str]:
    """The distinct names of a list that is separated by commas."""
    return list(dict.fromkeys(convert(names, list[str])))


def _embedded_texts(tools: Tools) -> int | None:
    """Number of texts in the vector indexes of passages and triples; None without an index of passages."""
    passages = getattr(tools.retriever, "passages", None)
    if passages is None:
        return None
    return len(passages) + len(tools.triples or ())


def evaluate(
    system: str, task: str, data: str, *, teacher: LLMOptions | None = None, output: str | None = None, **options: Any
) -> dict[str, Any]:
    """Run a system on a task and score it, like `tripletune eval run`; no event loop may be running.

    Args:
        teacher: The chat model, for systems that prompt one; `llm=["openai:NAME"]` is the short form.
        output: Folder of the results, in which a stopped run continues; None keeps no results.
        **options: Other fields of `QuestionOptions`, and options of the system, such as `top_k=2`; `require` and the
            suite refuse unknown names and values out of range.

    Returns:
        The content of `metrics.json`, with scores and intervals under "metrics".
    """
    with tempfile.TemporaryDirectory() as scratch:
        chosen = QuestionOptions.of(system=system, task=task, data=data, output=output or scratch, **options)
        require(chosen)
        suites = suites_of(chosen, teacher)
        if len(suites) > 1:
            raise ValueError(f"evaluate runs one system on one task, but {len(suites)} such pairs are named")
        run_suites(suites)
        return read_json(Path(chosen.output) / METRICS)
