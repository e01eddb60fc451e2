"""Run a system on the questions of a task (`tripletune eval run`), with answers, traces and cost."""

from __future__ import annotations

import argparse
import logging
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any

from rich.console import Console

from tripletune.core.calls import Sampling, in_role
from tripletune.core.command_line import CommandParser, from_arguments
from tripletune.core.data.passages import Passage, corpus_file, read_corpus
from tripletune.core.data.questions import Question
from tripletune.core.data.words import AUTO
from tripletune.core.files import file_digest, read_json
from tripletune.core.options import convert, not_one_of, require
from tripletune.data_builders.readers import linked
from tripletune.eval import context_links, find_metrics, load_task, score_answer, task_questions, write_context_corpus
from tripletune.eval.controls import LoopControl, OtherFacts, run_histories
from tripletune.eval.costs import WEIGHTED, read_prices, summarise_questions, unused_roles
from tripletune.eval.metrics import recall
from tripletune.eval.results import METRICS, RANKINGS, ResultLog
from tripletune.eval.suites import Failure, Suite, interval_cells, run_suites, show_table
from tripletune.eval.systems import (
    UNNAMED,
    QuestionOptions,
    add_run_arguments,
    chat_models,
    extractor_settings,
    model_settings,
    open_chat_model,
    other_prompt,
    run_problems,
    triples_settings,
)
from tripletune.llm.backends import LLMOptions
from tripletune.models.loading import encoder_fingerprint
from tripletune.rag import Trace
from tripletune.rag.answering import Opened, OpenSystem, clients_of, open_tools
from tripletune.rag.extract import CorpusExtraction
from tripletune.rag.extractor import ROLE
from tripletune.rag.results import RESULTS
from tripletune.rag.search.options import extracts
from tripletune.rag.systems import Tools, find_system, make_options, system_names
from tripletune.rag.triple_store import read_gold

logger = logging.getLogger(__name__)
# Options in which {task} stands for the name of the task.
_OF_TASK = ("data", "corpus", "triples", "gold", "index", "answers")


class QuestionSuite(Suite):
    """A system that answers a task's questions in its loop.

    Several runs share `opened`, and the folder `home` with indexes and the corpus of contexts.
    """

    unit = "question"
    options_class = QuestionOptions
    example = "--system ras --task hotpotqa --data test.jsonl --model runs/ras/final --output runs/eval/ras"

    def __init__(
        self,
        options: QuestionOptions,
        teacher: LLMOptions | None = None,
        opened: Opened | None = None,
        home: Path | None = None,
    ) -> None:
        self.system, self.task = find_system(options.system), load_task(options.task)
        self.teacher, self.tools = teacher, Tools()
        self.opened, self.home = opened or Opened(), home or Path(options.output)
        self.metrics = {name: metric for name, metric in find_metrics().items() if name in self.task.metrics}
        self.options, self.prices = options, read_prices(options.price)
        known = {item.name for item in fields(self.system.options)}
        wanted = {name: getattr(self.task, name) for name in ("max_answer_tokens", "answer", "top_k")}
        wanted |= {"answers": options.answers, "corpus": options.corpus}
        protocol = {name: value for name, value in wanted.items() if value is not None and name in known}
        self.loop = make_options(self.system, options.set, **protocol)
        if problems := run_problems(options, self.system, self.loop, teacher):
            raise ValueError("; ".join(problems))
        self._notes: Counter[str] = Counter()
        try:
            super().__init__(options)
        finally:
            for note, count in (+self._notes).items():
                logger.warning("%s: %d %s", options.data, count, note)
        self.gold: Mapping[str, frozenset[str]] | None = self._read_gold() if options.gold else None
        self._passages: dict[str, Passage] = {}
        outside = self.system.model == "none"
        self.teacher = None if outside else teacher
        self.own_contexts = (outside or self.system.needs_corpus(self.loop)) and not options.corpus
        self.retry_errors = options.retry_errors
        # A batch backend does not answer calls now; questions in order give the same request file every time.
        waits = teacher is not None and teacher.backend == "batch" and not options.oracle
        self.concurrency = 1 if waits else options.concurrency

    @classmethod
    def add_arguments(cls, parser: CommandParser) -> None:
        add_run_arguments(parser)

    @classmethod
    def suites(cls, args: argparse.Namespace) -> Sequence[QuestionSuite]:
        teacher = from_arguments(LLMOptions, args, "teacher", model=args.teacher_model or UNNAMED)
        return suites_of(from_arguments(QuestionOptions, args), teacher)

    def items(self) -> Iterator[Question]:
        self._notes.clear()
        limits = (limit for limit in (self.options.limit, self.task.questions) if limit is not None)
        return islice(task_questions(self.task, self.options.data, self._notes), min(limits, default=None))

    def settings(self) -> dict[str, Any]:
        """All settings that change a result; batch size and concurrency do not."""
        options, system = self.options, self.system
        corpus, triples = system.needs_corpus(self.loop), system.needs_triples(self.loop)
        read = options.corpus if corpus or options.answers else None
        embeds = corpus and (options.retriever != "bm25" or system.needs_reranker(self.loop))
        models = model_settings(options, self.teacher)
        if (self.teacher or system.model == "none") and (files := dict(system.files(self.loop))):
            models["files"] = files
        if embeds:
            how = ("query_prompt", "text_prompt", "similarity")
            models |= {name: value for name in how if (value := getattr(options, name)) is not None}
            models |= {"encoder_weights": weights} if (weights := encoder_fingerprint(options.encoder)) else {}
            models |= {"vectors": options.vectors} if options.vectors != "flat" else {}
        if corpus and options.retriever != "dense" and options.language != AUTO:
            models["language"] = options.language
        if options.control:
            models["control"] = options.control
        if options.control_run:
            models["control_run"] = file_digest(Path(options.control_run) / RESULTS)
        if options.gold:
            models["gold"] = file_digest(options.gold)
        if triples and options.extractor and extracts(options):
            found: Any = extractor_settings(options)
        else:
            found = triples_settings(str(options.triples), options.extractor) if triples else None
        return {
            "system": options.system,
            "task": {name: value for name, value in asdict(self.task).items() if value is not None},
            "data": _data_digest(options.data),
            "limit": options.limit,
            **models,
            "corpus": read and file_digest(corpus_file(read)),
            "triples": found,
            "retriever": options.retriever if corpus else None,
            "encoder": options.encoder if embeds else None,
            "options": asdict(self.loop),
        }

    def open(self) -> None:
        options, system, loop, corpus = self.options, self.system, self.loop, None
        if system.needs_corpus(loop):
            corpus = Path(options.corpus or self.home / "corpus.jsonl")
        if corpus and self.own_contexts:
            count = self.opened.once(corpus, partial(write_context_corpus, self.task, options.data, corpus))
            logger.info("corpus of all contexts in %s: %d passages", options.data, count)
        if self.gold and (place := options.corpus or corpus):
            wanted = {name for links in self.gold.values() for name in links}
            self._passages = {one.id: one for one in read_corpus(place) if one.id in wanted}
            if not self._passages:
                raise ValueError(f"--gold {options.gold} has no passage of {place}: give the links of this corpus")
        elif options.corpus and (corpus or system.model == "none"):
            questions = (one for one in linked(self.items, options.corpus) if isinstance(one, Question))
            links = partial(context_links, questions, Path(options.corpus))
            self.gold = self.opened.once(("links", options.corpus, options.task, options.data, options.limit), links)
        llm = teacher = None
        if self.teacher is not None:
            chosen = (self.teacher, options.oracle, tuple(options.llm))
            llm = self.opened.once(chosen, partial(open_chat_model, *chosen))
            # The extractor is the model of `--teacher`, or of `--llm extract=...`.
            teacher = in_role(chat_models(options.llm, self.teacher), ROLE, self.teacher)
        index = Path(options.index or self.home / "index")
        self.tools = open_tools(options, system, loop, corpus, index, self.opened, teacher, llm)
        if self.teacher is not None and options.integrator:
            if warning := other_prompt(options.integrator, loop.prompts):
                logger.warning("%s", warning)
            seed = options.student_seed
            drawn = None if seed is None else Sampling(1.0, seed=seed)
            shared = {name: getattr(self.teacher, name) for name in ("ledger", "batch_size", "dtype")}
            local = LLMOptions(backend="hf", model=options.integrator, **shared)
            student = self.opened.once(local, partial(open_chat_model, local))
            self.tools = replace(self.tools, integrator=student, integrator_sampling=drawn)
        self.clients = clients_of(self.tools)
        if options.retriever != "bm25" and (passages := getattr(self.tools.retriever, "passages", None)) is not None:
            self.notes = {"embedded": len(passages) + len(self.tools.triples or ())}
        if options.control:
            facts = OtherFacts(run_histories(options.control_run)) if options.control_run else None
            models = (self.tools.planner, self.tools.answerer)
            readers = [one and LoopControl(one, options.control, facts) for one in models]
            self.tools = replace(self.tools, planner=readers[0], answerer=readers[1])

    async def ask(self, batch: list[Question]) -> list[Trace]:
        (question,) = batch
        gold: Iterable[Passage] = (question.passages[index] for index in question.supporting)
        if self.gold is not None:
            gold = (self._passages[name] for name in sorted(self.gold.get(question.id, ())) if name in self._passages)
        known: dict[str, Any] = {"question_id": question.id, "context": question.passages}
        known["gold"] = tuple(gold) if self.system.needs_gold else ()
        asked = self.task.template.replace("{question}", question.question)
        system = OpenSystem(self.system, self.loop, self.tools)
        return [await system.answer_async(asked, question.search or question.question, **known)]

    def score(self, item: Question, reply: Trace | Failure) -> dict[str, Any]:
        if isinstance(reply, Failure):
            begun = reply.trace or Trace(self.task.template.replace("{question}", item.question))
            reply = replace(begun, answer="", stop_reason="", error=reply.error, seconds=reply.seconds)
        reply.question_id = item.id
        gold = item.answers, self.metrics, item.short_answers, self.task.refusal
        scores = score_answer(reply.answer, *gold) if item.answers else {}
        supporting = item.supporting if self.own_contexts or self.system.needs_gold else ()
        own = frozenset(item.passages[index].id for index in supporting)
        wanted = own if self.gold is None else self.gold.get(item.id, frozenset())
        found = [passage["id"] for step in reply.steps for passage in step.passages]
        return {
            "id": item.id,
            "question": item.question,
            "type": item.type,
            "answers": list(item.answers),
            **({"short_answers": item.short_answers} if item.short_answers else {}),
            "prediction": reply.answer,
            "scores": {name: 0.0 if reply.error else scores[name] for name in self.task.metrics if name in scores},
            "supporting": sorted(wanted),
            "supporting_recall": recall(found, wanted) if wanted and reply.steps and not reply.error else None,
            "error": reply.error,
            "trace": reply.to_json(),
        }

    def summarise(self, log: ResultLog) -> dict[str, Any]:
        found = summarise_questions(log, self.task.metrics, self.prices)
        return {"system": self.system.name, "task": self.task.name, **found}

    def show(self, metrics: Mapping[str, Any], console: Console) -> None:
        rows = [
            (name, *interval_cells(value), self.metrics[name].explanation) for name, value in metrics["metrics"].items()
        ]
        for name, value in metrics["recall"].items():
            of, _, k = name.partition("@")
            said = f"recall of the supporting passages in the first {k}, {RANKINGS[of]}"
            rows.append((name, *interval_cells(value), said))
        oracle = " with an ORACLE, which knows the facts," if self.options.oracle else ""
        title = f"{metrics['system']}{oracle} on {metrics['task']}, {metrics['questions']} questions"
        heads = ("metric", "score", "95 % interval", "what it says")
        show_table(console, title, heads, rows, "questions", metrics["failed"])
        counts, cost = metrics["counts"], defaultdict[str, Any](lambda: "-", metrics["cost_per_question"])
        console.print(
            f"{_listed({name.replace('_', ' '): n for name, n in counts.items() if isinstance(n, int)})}, ended by "
            f"{_listed(counts['stop_reasons'])}, actions {_listed(counts['actions'])}"
        )
        if counts["tallies"]:
            console.print(f"counted by the system: {_listed(counts['tallies'])}")
        parts = {"per question": cost} | ({"indexing": metrics["indexing"]} if metrics["indexing"].get("calls") else {})
        for name, part in parts.items():
            money = f", ${part['dollars']:.4g} (${part['cached_dollars']:.4g})" if "dollars" in part else ""
            console.print(
                f"{name}: {part['calls']} calls ({part['cached_calls']} of them not sent: the ledger had the reply), "
                f"{part['prompt_tokens']} tokens read ({part['cached_prompt_tokens']}), {part['completion_tokens']} "
                f"written ({part['cached_completion_tokens']}), {part[WEIGHTED]} in + 4 x out{money}"
            )
        if isinstance(store := self.tools.store, CorpusExtraction):
            console.print(f"triples in the loop, {store.store.path}: {store.counts.line()}")
        if counts["passages"] and 2 * counts["passages_without_triples"] > counts["passages"] and self.options.triples:
            logger.warning(
                "most retrieved passages have no triples in %s: does it cover this corpus?", self.options.triples
            )
        self._warn_of_unused(metrics["roles"])

    def _warn_of_unused(self, met: list[str]) -> None:
        models = chat_models(self.options.llm, self.teacher) if self.teacher else {}
        # With several systems, each is warned only about its own roles.
        others = {*system_names()} - {self.system.name}
        for flag, roles in (("--price", self.prices), ("--llm", models)):
            for role in unused_roles(roles, met):
                if role.split(".")[0] not in others:
                    logger.warning("%s %s=…: unknown role; this run used %s", flag, role, ", ".join(met) or "none")

    def _read_gold(self) -> Mapping[str, frozenset[str]]:
        path = self.options.gold
        gold = read_gold(path)
        without = sum(name not in gold for name in self.ids)
        if without == len(self.ids):
            raise ValueError(f"--gold {path} has no links of these questions: is it the file of another split?")
        if without:
            logger.warning("%s: %d questions have no gold link, so the recall is over the others", path, without)
        return gold


SUITE = QuestionSuite


def suites_of(options: QuestionOptions, teacher: LLMOptions | None = None) -> list[QuestionSuite]:
    """The suites of every system on every task, with outputs in OUTPUT/TASK/SYSTEM if there are several.

    The chat model is the model that `options.llm` names without a role, else `teacher` unless `teacher` is `UNNAMED`,
    else the oracle. The other settings of `teacher` hold for all these models.
    """
    teacher = _chosen_teacher(options, teacher or LLMOptions(model=UNNAMED))
    systems, tasks = (list(dict.fromkeys(convert(text, list[str]))) for text in (options.system, options.task))
    if len(systems) * len(tasks) == 1:
        return [QuestionSuite(options, teacher)]
    names = system_names()
    owners = [word.split(".")[0] for word in options.set if "." in word.split("=")[0]]
    found, problems = [], [not_one_of("--set", name, names) for name in owners if name not in names]
    opened = Opened()
    for task, system in product(tasks, systems):
        try:
            own = _options_of(options, teacher, task, system)
            found.append(QuestionSuite(*own, opened, Path(options.output) / Path(task).stem))
        except (ValueError, OSError) as error:
            problems.append(str(error))
    if problems:
        raise ValueError("; ".join(dict.fromkeys(problems)))
    return found


def _chosen_teacher(options: QuestionOptions, teacher: LLMOptions) -> LLMOptions | None:
    chosen = chat_models(options.llm, teacher).get("", teacher)
    if options.oracle and chosen.model != UNNAMED:
        raise ValueError(f"--system {options.system} needs one teacher: --teacher-model or --oracle, not both")
    if options.oracle:
        chosen = replace(chosen, model=f"oracle {options.oracle}")
    elif chosen.model == UNNAMED:
        return None
    ledger = chosen.ledger or options.ledger or str(Path(options.output) / "ledger.sqlite")
    return replace(chosen, ledger=ledger)


def _options_of(
    options: QuestionOptions, teacher: LLMOptions | None, task: str, system: str
) -> tuple[QuestionOptions, LLMOptions | None]:
    """The part of the options for one system and task."""
    name = Path(task).stem
    # An option for one system overrides an option for all systems.
    ordered = sorted(options.set, key=lambda word: "." in word.split("=")[0])
    mine = [word.removeprefix(f"{system}.") for word in ordered]
    own = replace(
        options,
        system=system,
        task=task,
        output=str(Path(options.output) / name / system),
        set=[word for word in mine if "." not in word.split("=")[0]],
        **{key: value.replace("{task}", name) for key in _OF_TASK if (value := getattr(options, key))},
    )
    if system != "cirag":
        own.integrator = None
    if system != "answers":
        own.answers = None
    if find_system(system).model == "none":
        return replace(own, model=None, planner_model=None, oracle=None, llm=[]), None
    if find_system(system).model == "llm":  # only systems that use a Graph-LLM get one
        own.model, own.planner_model, own.untrained = None, None, False
        if options.model or options.planner_model:
            own.control, own.control_run = None, None
    elif options.model and make_options(find_system(system), own.set).reader == "common":
        own.model, own.planner_model = None, options.model if find_system(system).plans else None
    elif options.model:
        teacher, own.oracle, own.llm = None, None, []
    if (options.integrator or options.model) and not (own.integrator or own.model):
        own.student_seed = None
    return own, teacher


def evaluate(
    system: str, task: str, data: str, *, teacher: LLMOptions | None = None, output: str | None = None, **options: Any
) -> dict[str, Any]:
    """Run a system on a task and score it, like `tripletune eval run`; no event loop may be running.

    Args:
        teacher: The chat model, for systems that prompt one; `llm=["openai:NAME"]` is the short form.
        output: Folder of the results, in which a stopped run continues; None keeps no results.
        **options: Other fields of `QuestionOptions`, and options of the system, such as `top_k=2`.

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


def _data_digest(data: str) -> str:
    """The digest of a file, digests of a folder's files, or the hub id."""
    files = sorted(filter(Path.is_file, Path(data).rglob("*")))
    return file_digest(data) if Path(data).is_file() else ",".join(map(file_digest, files)) or data


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"
