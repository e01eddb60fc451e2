"""Open a system with its models and indexes from options, for `tripletune ask`, `eval run`, `serve` and Python.

In Python, `tripletune.load_system` opens a system; inside an event loop, use `async with` and `answer_async`.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Callable, Hashable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, TypeVar, Unpack, cast

from tripletune.core.calls import Endpoint, LLMClient, Sampling
from tripletune.core.data.passages import Passage, read_corpus
from tripletune.core.options import CheckedOptions, require
from tripletune.llm.backends import LLMOptions, open_client
from tripletune.llm.question_client import load_prompts
from tripletune.rag import WATCH, Trace, TraceAction, TraceStep
from tripletune.rag.chat_generator import COMMON
from tripletune.rag.search.embedding import Embedder
from tripletune.rag.search.index import PassageStore, check_index_folder
from tripletune.rag.search.opened import open_triple_source, search_embedder
from tripletune.rag.search.options import VectorSearch
from tripletune.rag.search.retrievers import open_retriever
from tripletune.rag.search.text_index import KeptTexts
from tripletune.rag.system_options import SystemOptions, system_problems
from tripletune.rag.systems import AnswerOptions, LoopOptions, System, Tools, find_system
from tripletune.rag.trained import loop_options, overridden_options, warn_of_overrides
from tripletune.rag.triple_store import StoredTriples, TripleSource
from tripletune.rag.triples.names import EntityNames, read_names

if TYPE_CHECKING:
    from tripletune.llm.graph_generator import LocalGenerator
    from tripletune.llm.ledger_client import LedgerClient
    from tripletune.rag.search.retrievers import CorpusRetriever
    from tripletune.rag.search.triple_index import TripleIndex
    from tripletune.rag.systems.cirag import CiragOptions

logger = logging.getLogger(__name__)
T = TypeVar("T")
# Called with each plan and each round of retrieval of a question, as they happen.
Watch = Callable[[TraceAction | TraceStep], None]
# How many passages of a corpus are looked up in --triples, to see whether these are the triples of another corpus.
_LOOKED_UP = 100


class ToolsOfQuestion(TypedDict, total=False):
    """The fields of `Tools` that belong to one question."""

    question_id: str
    gold: tuple[Passage, ...]
    context: tuple[Passage, ...]


@dataclass
class OpenSystem(AbstractContextManager["OpenSystem"], AbstractAsyncContextManager["OpenSystem"]):
    """A system with its tools, which answers any number of questions, also concurrently.

    Attributes:
        options: The options of the class `system.options`.
        scratch: Holds the indexes if no option names a folder; removed when the system is closed.
    """

    system: System
    options: CheckedOptions
    tools: Tools
    scratch: tempfile.TemporaryDirectory[str] | None = field(default=None, repr=False)
    _runner: asyncio.Runner = field(default_factory=asyncio.Runner, init=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def answer(
        self, question: str, search: str = "", watch: Watch | None = None, **tools_of_question: Unpack[ToolsOfQuestion]
    ) -> Trace:
        """Answer a question outside an event loop; threads wait for each other. See `answer_async`."""
        with self._lock:
            return self._runner.run(self.answer_async(question, search, watch, **tools_of_question))

    async def answer_async(
        self,
        question: str,
        search: str = "",
        watch: Watch | None = None,
        **tools_of_question: Unpack[ToolsOfQuestion],
    ) -> Trace:
        """Answer a question; all questions of a system whose models are on servers need the same event loop.

        Args:
            question: The question as the model reads it.
            search: The text to search with, without instruction or choices; "": the question.
            watch: Called with each event as it happens.
            **tools_of_question: Fields of `Tools` that replace those of the open system for this question.
        """
        started = time.perf_counter()
        tools = replace(self.tools, **tools_of_question)
        before = WATCH.set(watch)
        try:
            trace = await self.system.run(question, search or question, tools, self.options)
        finally:
            WATCH.reset(before)
        # TH-RAG measures its time itself, because building its graph does not count for a question.
        trace.seconds = trace.seconds or time.perf_counter() - started
        return trace

    async def steps(
        self, question: str, search: str = "", **tools_of_question: Unpack[ToolsOfQuestion]
    ) -> AsyncGenerator[TraceAction | TraceStep | Trace, None]:
        """Yield each plan and each round of retrieval as it happens, then the trace; see `answer_async`."""
        # The queue gets the events, and at the end the task itself, which then holds the trace or the error.
        events: asyncio.Queue[TraceAction | TraceStep | asyncio.Task[Trace]] = asyncio.Queue()
        answering = asyncio.create_task(self.answer_async(question, search, events.put_nowait, **tools_of_question))
        answering.add_done_callback(events.put_nowait)
        try:
            while not isinstance(event := await events.get(), asyncio.Task):
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
        for client in clients_of(self.tools):
            await client.close()
        if self.tools.store is not None:
            self.tools.store.close()
        if self.scratch is not None:
            self.scratch.cleanup()

    def __exit__(self, *error: object) -> None:
        self.close()

    async def __aexit__(self, *error: object) -> None:
        await self.close_async()


@dataclass
class Opened:
    """Indexes, stores and models that several runs share; each is opened at its first use."""

    things: dict[Hashable, Any] = field(default_factory=dict)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """The thing with this key, which names all that it depends on; the first call makes it and keeps it."""
        if key not in self.things:
            self.things[key] = make()
        return self.things[key]


def open_system(options: SystemOptions, teacher: LLMOptions | None = None, opened: Opened | None = None) -> OpenSystem:
    """Open a system; indexes that `options.index` lacks are built.

    Without a folder for indexes they are temporary, and removed when the system is closed.

    Args:
        teacher: A chat model that replaces the Graph-LLM. If RAS has both models, the chat model plans.
        opened: What several systems share.

    Raises:
        ValueError: All problems of the options, in one message.
    """
    require(options)
    system = find_system(options.system)
    loop = loop_options(system, options)
    if problems := system_problems(options, system, loop, teacher, alone=True):
        raise ValueError("; ".join(problems))
    warn_of_overrides(overridden_options(system, options, loop))
    load_prompts.cache_clear()  # prompts may have changed
    opened = opened or Opened()
    scratch = None
    if options.index:
        index = Path(options.index)
    else:
        scratch = opened.once("scratch", tempfile.TemporaryDirectory)
        index = Path(scratch.name)
    corpus = options.corpus if system.needs_corpus(loop) else None
    tools = open_tools(options, system, loop, corpus, index, opened, teacher)
    return OpenSystem(system, loop, tools, scratch)


def open_tools(
    options: SystemOptions,
    system: System,
    loop: CheckedOptions,
    corpus: str | Path | None,
    index: Path,
    opened: Opened | None = None,
    teacher: LLMOptions | None = None,
    llm: LLMClient | None = None,
) -> Tools:
    """Open corpus, triples, Graph-LLMs, chat model and student of a system.

    Args:
        loop: The system's options.
        corpus: The passages; None for a system that retrieves nothing.
        index: The folder of the indexes.
        opened: What was opened for other systems, and is opened for them here.
        teacher: The options of the chat model, which may also extract triples in the loop.
        llm: The client of the chat model, if the caller has opened it; None: open it for a system that stays open for
            long, in which calls succeed again when the model's server is back (`LedgerClient.ends_run`).
    """
    stays_open = llm is None
    opened = opened or Opened()
    if teacher is not None and llm is None:
        client = opened.once(teacher, partial(open_client, teacher))
        client.ends_run = False
        llm = client
    check_index_folder(index)
    parts = _Parts(options, system, loop, corpus, index, opened)
    store = parts.open_store(llm, teacher)
    embedder = parts.open_embedder(options.encoder) if options.encoder else None
    retriever, triples = None, None
    if corpus and isinstance(store, StoredTriples) and system.searches_triples(loop):
        triples = parts.open_triples(corpus, store, embedder)
    # Most systems that search triples do not search passages.
    if corpus and (triples is None or system.searches_both):
        retriever = parts.open_passages(corpus, embedder)
    planner = parts.open_graph_llm(options.planner_model) if options.planner_model else None
    answerer = parts.open_graph_llm(options.model, options.prompt_embeds) if options.model else None
    student, student_sampling = None, None
    if options.integrator and teacher is not None:
        student = parts.open_student(options.integrator, teacher)
        if stays_open:
            student.ends_run = False
        if options.student_seed is not None:
            student_sampling = Sampling(1.0, seed=options.student_seed)
    tools = Tools(
        planner=planner or (answerer if llm is None else None),
        answerer=answerer,
        retriever=retriever,
        store=store,
        llm=llm,
        integrator=student,
        sampling=teacher.sampling(1) if teacher else None,
        integrator_sampling=student_sampling,
        reranker=embedder if system.needs_reranker(loop) else None,
        triples=triples,
        keep=partial(KeptTexts, index / "texts", embedder) if embedder else None,
        names=read_names(options.entities) if options.entities and system.own_triples else EntityNames(),
        scored_role=_scored_role(system, loop, answerer is not None),
    )
    # Exclude loaded objects from garbage collections, which would block the event loop for tenths of a second.
    gc.freeze()
    return tools


def _scored_role(system: System, loop: CheckedOptions, has_answerer: bool) -> str:
    """The role of the chat model's answer, if its log-probabilities decide whether it is given; else ""."""
    if not isinstance(loop, AnswerOptions) or not loop.abstains_by_scores:
        return ""
    if loop.reader == "common":
        return COMMON
    # A Graph-LLM knows how sure it is.
    return "" if has_answerer else f"{system.name}.answer"


class _IndexSettings(NamedTuple):
    """What an index depends on besides its texts; systems with equal settings share the index.

    The order is that of the last arguments of `open_retriever` and `TripleIndex`.
    """

    index_dir: Path
    embedder: Embedder | None
    search: VectorSearch
    language: str
    overwrite: bool


class _Parts:
    """Opens the parts of a system, except the chat model; see `open_tools` for the arguments.

    Args:
        options: The user's choices: files, models and options of the system.
        system: The system, which says what it needs.
        loop: The checked options of the system.
    """

    def __init__(
        self,
        options: SystemOptions,
        system: System,
        loop: CheckedOptions,
        corpus: str | Path | None,
        index: Path,
        opened: Opened,
    ) -> None:
        self._options = options
        self._system = system
        self._loop = loop
        self._corpus = corpus
        self._index = index
        self._once = opened.once

    def open_store(self, llm: LLMClient | None, teacher: LLMOptions | None) -> TripleSource | None:
        """Open the triples of passages, or the model that extracts them; None for a system that reads no triples.

        Triples of another corpus are no error, since they may be extracted later, but a system that finds none for any
        passage would only seem to answer badly.
        """
        options = self._options
        if not self._system.needs_triples(self._loop):
            if options.triples:
                unless = " without --set extraction=store" if hasattr(self._loop, "extraction") else ""
                logger.warning(
                    "--triples %s has no effect: %s reads no triples%s", options.triples, self._system.name, unless
                )
            if options.entities and not self._system.own_triples:
                logger.warning("--entities %s has no effect: %s reads no triples", options.entities, self._system.name)
            return None
        how = (options.extractor, options.extractor_set, options.keep_unsupported, options.entities)
        key = ("store", options.triples or self._index, *how)
        store = self._once(key, lambda: open_triple_source(options, self._index, llm, teacher))
        if self._corpus and isinstance(store, StoredTriples):
            warn = partial(_warn_of_other_triples, store, self._corpus, options.triples)
            self._once(("other triples", str(self._corpus), *key), warn)
        return store

    def open_embedder(self, encoder: str) -> Embedder | None:
        """Open the sentence encoder; None, with a warning, for a system that embeds nothing here."""
        embeds = self._options.retriever != "bm25" or self._system.needs_reranker(self._loop)
        if self._corpus and embeds:
            return search_embedder(self._options)
        logger.warning("--encoder %s has no effect: %s embeds nothing here", encoder, self._system.name)
        return None

    def open_triples(self, corpus: str | Path, store: StoredTriples, embedder: Embedder | None) -> TripleIndex:
        """Open the index of the corpus's triples, once for all systems that search them by the same settings."""
        from tripletune.rag.search.triple_index import TripleIndex

        settings = self._index_settings(embedder)

        def make() -> TripleIndex:
            """Open the passages and the index of their triples."""
            passages = PassageStore(corpus, self._index, self._options.overwrite)
            return TripleIndex(self._options.retriever, passages, store, *settings)

        return self._once(("triples", self._options.retriever, str(corpus), store, *settings), make)

    def open_passages(self, corpus: str | Path, embedder: Embedder | None) -> CorpusRetriever:
        """Open the index of the corpus's passages, once for all systems that search it by the same settings."""
        settings = self._index_settings(embedder)
        make = partial(open_retriever, self._options.retriever, corpus, *settings)
        return self._once(("passages", self._options.retriever, str(corpus), *settings), make)

    def _index_settings(self, embedder: Embedder | None) -> _IndexSettings:
        """The settings of the indexes of passages and of triples; with BM25 the embedder only reranks."""
        options = self._options
        if options.retriever == "bm25":
            embedder = None
        return _IndexSettings(self._index, embedder, options.vectors, options.language, options.overwrite)

    def open_graph_llm(self, spec: str, prompt_embeds: str | None = None) -> LocalGenerator:
        """Open a Graph-LLM; `prompt_embeds` names the server that runs its language model."""
        from tripletune.rag.graph_models import open_generator

        options = self._options
        settings = (options.untrained, options.batch_size, options.dtype, options.ledger, options.student_seed)
        has_graph_token = not isinstance(self._loop, LoopOptions) or self._loop.graph
        how = (spec, *settings, has_graph_token, prompt_embeds)
        return self._once(how, partial(open_generator, *how))

    def open_student(self, spec: str, teacher: LLMOptions) -> LedgerClient:
        """Open the model that integrates in CIRAG instead of the teacher.

        It runs on this machine, with the teacher's ledger, batch size and type of weights.
        """
        from tripletune.rag.systems.cirag.student import warning_of_other_prompt

        # `system_problems` refuses `--integrator` for any other system.
        loop = cast("CiragOptions", self._loop)
        if warning := warning_of_other_prompt(spec, loop.prompts):
            logger.warning("%s", warning)
        local = LLMOptions(
            backend="hf", model=spec, ledger=teacher.ledger, batch_size=teacher.batch_size, dtype=teacher.dtype
        )
        return self._once(local, partial(open_client, local))


def _warn_of_other_triples(store: StoredTriples, corpus: str | Path, triples: str | None) -> None:
    """Warn if the store has triples for none of the corpus's first passages."""
    passages = list(islice(read_corpus(corpus, blank_texts=True), _LOOKED_UP))
    if passages and all(store.get(passage) is None for passage in passages):
        logger.warning(
            "--triples %s has none of the first %d passages of --corpus: is it the file of another corpus? If not, run "
            "`tripletune rag extract` to add them",
            triples, len(passages),
        )  # fmt: skip


def clients_of(tools: Tools) -> list[Endpoint]:
    """The distinct models of a system; the caller closes each of them by `await client.close()`.

    One model may plan and answer, and must not be closed twice.
    """
    named = [tools.llm, tools.integrator, tools.planner, tools.answerer]
    models: list[Endpoint] = [model for model in named if model is not None]
    if tools.store is not None:
        models += tools.store.models
    return list(dict.fromkeys(models))
