"""What a server offers as models: each loop that can run with what is opened, and the model behind each role.

A loop answers a question and shows how. A part is the planner, answerer, extractor or integrator alone: of a chat model
the chat as it comes; of a Graph-LLM the last turn is the question, and what was found so far stands beside it as steps.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tripletune.models.data.records import ModelInput, Passage, Step, Task
from tripletune.models.data.triples import Triple
from tripletune.models.llm import Completion, Endpoint, LLMClient, Message, Sampling
from tripletune.models.llm.backends import LLMOptions, load_backend, open_client
from tripletune.models.llm.ledger_client import LedgerClient
from tripletune.models.options import require
from tripletune.rag import Trace, TraceAction, TraceStep
from tripletune.rag.answering import (
    Opened,
    OpenSystem,
    SystemOptions,
    clients_of,
    corpus_problem,
    open_tools,
    system_problems,
)
from tripletune.rag.extract import CorpusExtraction
from tripletune.rag.systems import find_system, make_options, system_names

logger = logging.getLogger(__name__)
Watch = Callable[[TraceAction | TraceStep], None]
# Bounds that evaluations compare with; nobody asks them but by name.
_BOUNDS = ("random_passages",)
PARTS = ("planner", "answerer", "extractor", "integrator")
_WARM = ModelInput("answering", "Who?", (Step("Who?", (Triple("someone", "is", "there"),), "Someone is there."),))


@dataclass(frozen=True, slots=True)
class Asked:
    """A request: the chat, whose last turn is the user's, and how the reply is drawn where the request says."""

    messages: Sequence[Message]
    max_tokens: int | None = None
    drawn: dict[str, Any] = field(default_factory=dict)
    steps: tuple[Step, ...] = ()

    @property
    def text(self) -> str:
        """The last turn."""
        return self.messages[-1]["content"]


@dataclass(frozen=True, slots=True)
class Answer:
    """A reply, what it cost, and of a loop its trace."""

    text: str
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str = "stop"
    trace: dict[str, Any] | None = None

    @classmethod
    def of(cls, reply: Completion) -> Answer:
        """That of one call."""
        reason = "length" if reply.finish_reason == "length" else "stop"
        return cls(reply.text, reply.prompt_tokens, reply.completion_tokens, reason)


class Served:
    """One model of a server."""

    kind = "part"

    async def answer(self, asked: Asked, watch: Watch) -> Answer:
        """Reply to a request."""
        raise NotImplementedError


class ServedLoop(Served):
    """A system; it answers the last turn and does not read those before it."""

    kind = "loop"

    def __init__(self, system: OpenSystem) -> None:
        self.system = system

    async def answer(self, asked: Asked, watch: Watch) -> Answer:
        """Answer a question; `watch` is called with each plan and each round of retrieval as it happens."""
        system = self.system
        if asked.max_tokens is not None:
            system = replace(system, options=replace(system.options, max_answer_tokens=asked.max_tokens))
        trace = await system.answer_async(asked.text, watch=watch)
        cut = any(name.startswith("cut_off.") and name.endswith(".answer") for name in trace.tallies)
        shown = {**trace.to_json(), **self.sources(trace), "ignored_turns": len(asked.messages) - 1}
        return Answer(trace.answer, trace.prompt_tokens, trace.completion_tokens, "length" if cut else "stop", shown)

    def sources(self, trace: Trace) -> dict[str, Any]:
        """The passages that were found, and the triples of all rounds with the passages that they come from."""
        said = {passage.id: self._said(passage) for passage in trace.found.values()}
        places: dict[tuple[str, ...], list[str]] = {}
        for triple in (tuple(triple) for step in trace.steps for triple in step.triples):
            if triple not in places:
                places[triple] = [name for name, says in said.items() if says(triple)]
        names = ("subject", "predicate", "object")
        triples = [{**dict(zip(names, triple)), "passages": found} for triple, found in places.items()]
        return {"passages": [_passage(one) for one in trace.found.values()], "triples": triples}

    def _said(self, passage: Passage) -> Callable[[tuple[str, ...]], bool]:
        """Whether a triple is one of a passage: as the store knows, else where it names both entities."""
        store, known = self.system.tools.store, None
        if isinstance(store, CorpusExtraction):
            known = store.store.get(store.id, passage.key)
        elif store is not None:
            known = store.get(passage)
        if known is not None:
            stored = {tuple(triple.as_list()) for triple in known}
            return stored.__contains__
        text = passage.content.casefold()
        return lambda triple: triple[0].casefold() in text and triple[2].casefold() in text


def _passage(passage: Passage) -> dict[str, Any]:
    source = {"source": passage.source} if passage.source else {}
    return {"id": passage.id, "title": passage.label, "text": passage.text, **source}


class ServedChat(Served):
    """A chat model; a chat without a system turn gets `instruction` as one."""

    def __init__(self, client: LLMClient, sampling: Sampling | None = None, instruction: str = "") -> None:
        self.client, self.sampling, self.instruction = client, sampling or Sampling(), instruction

    async def answer(self, asked: Asked, watch: Watch) -> Answer:
        """Reply to a chat."""
        sampling = replace(self.sampling, **asked.drawn)
        if asked.max_tokens is not None:
            sampling = replace(sampling, max_tokens=asked.max_tokens)
        messages = list(asked.messages)
        if self.instruction and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.instruction})
        return Answer.of(await self.client.chat(messages, role="serve", sampling=sampling))


class ServedGraphLLM(Served):
    """A Graph-LLM in one of its two roles."""

    def __init__(self, model: Any, task: Task, limit: int) -> None:
        self.model, self.task, self.limit = model, task, limit

    async def answer(self, asked: Asked, watch: Watch) -> Answer:
        """Plan, or answer, from the question and the steps."""
        sample = ModelInput(self.task, asked.text, asked.steps)
        return Answer.of(await self.model.generate(sample, asked.max_tokens or self.limit))


@dataclass
class Shelf:
    """All models of a server by name, and what is closed with them."""

    models: dict[str, Served]
    systems: list[OpenSystem]
    left_out: dict[str, str]
    scratch: tempfile.TemporaryDirectory[str] | None = None

    async def warm_up(self) -> None:
        """Load what the first question would wait for; no call goes to another server."""
        retrievers = dict.fromkeys(system.tools.retriever for system in self.systems)
        for retriever in filter(None, retrievers):
            await retriever.retrieve("Who?", 1)
        for client in self._clients():
            await asyncio.to_thread(client.load)
            if hasattr(client, "decode"):  # a Graph-LLM, whose sentence encoder comes with the first graph
                await client.decode(_WARM, 1)

    async def close(self) -> None:
        """Close models and stores, and remove indexes that no option keeps."""
        for client in self._clients():
            await client.close()
        for store in dict.fromkeys(system.tools.store for system in self.systems):
            if store is not None:
                store.close()
        if self.scratch is not None:
            self.scratch.cleanup()

    def _clients(self) -> Iterable[Endpoint]:
        return dict.fromkeys(client for system in self.systems for client in clients_of(system.tools))


def open_shelf(
    options: SystemOptions, teacher: LLMOptions | None, names: Sequence[str] = (), integrator: str | None = None
) -> Shelf:
    """Open the systems `names`, or all that can run with these options, and the models behind them.

    Args:
        integrator: Folder or hub id of a trained model that integrates in CIRAG.
    """
    require(options)
    if teacher is not None and not load_backend(teacher.backend).sends:
        raise ValueError(f"--teacher {teacher.backend} answers nothing at once: name a model that does")
    chosen, left_out = dict[str, tuple[SystemOptions, LLMOptions | None]](), dict[str, str]()
    usual = sorted(set(system_names()) - set(_BOUNDS), key=lambda name: (name != "ras", name))
    for name in dict.fromkeys(names or usual):
        own = _options_of(options, teacher, name)
        if found := _problems(*own):
            left_out[name] = "; ".join(found)
        else:
            chosen[name] = own
    if left_out and (names or not chosen):
        # Without names, what RAS lacks says it all: it takes the fewest things.
        told = left_out if names else {"ras": left_out["ras"]}
        raise ValueError("; ".join(dict.fromkeys(told.values())))
    scratch = None if options.index else tempfile.TemporaryDirectory()
    index, opened = Path(options.index or scratch.name), Opened()  # type: ignore[union-attr]
    student = _open_integrator(integrator, teacher, chosen) if integrator else None
    systems = []
    for name, (mine, chat) in chosen.items():
        system = find_system(name)
        loop = make_options(system, mine.set)
        corpus = mine.corpus if system.needs_corpus(loop) else None
        if len(chosen) > 1:  # what one of several has no use for is no mistake
            mine = replace(
                mine,
                triples=mine.triples if system.needs_triples(loop) else None,
                encoder=mine.encoder if mine.retriever != "bm25" or system.needs_reranker(loop) else None,
            )
        tools = open_tools(mine, system, loop, corpus, index, opened, chat)
        if student is not None and name == "cirag":
            tools = replace(tools, integrator=student)
        systems.append(OpenSystem(system, loop, tools))
    loops: dict[str, Served] = {system.system.name: ServedLoop(system) for system in systems}
    return Shelf({**loops, **_parts(systems)}, systems, left_out, scratch)


def _options_of(
    options: SystemOptions, teacher: LLMOptions | None, name: str
) -> tuple[SystemOptions, LLMOptions | None]:
    """What of the options is for one system; `--set ras.top_k=3` is for RAS alone, and goes before `--set top_k=5`."""
    ordered = sorted(options.set, key=lambda text: "." in text.split("=")[0])
    mine = [text.removeprefix(f"{name}.") for text in ordered]
    own = replace(options, system=name, set=[text for text in mine if "." not in text.split("=")[0]])
    system = find_system(name)
    if system.model == "llm":  # a Graph-LLM is for the systems that take one
        return replace(own, model=None, planner_model=None, untrained=False), teacher
    if options.model and not system.plans:
        return replace(own, planner_model=None), None
    return own, teacher


def _problems(options: SystemOptions, teacher: LLMOptions | None) -> list[str]:
    system = find_system(options.system)
    if system.needs_gold or system.model == "none":
        return [f"--systems {system.name}: it is for evaluations, whose questions have gold passages or answers"]
    try:
        loop = make_options(system, options.set)
    except ValueError as error:
        return [str(error)]
    found = system_problems(options, system, loop, teacher)
    return found + corpus_problem(options, system, loop)


def _open_integrator(spec: str, teacher: LLMOptions | None, chosen: Iterable[str]) -> LedgerClient:
    if teacher is None or "cirag" not in chosen:
        raise ValueError(f"--integrator {spec}: without effect, since cirag, which takes it, can't run; leave it out")
    shared = {name: getattr(teacher, name) for name in ("ledger", "batch_size", "dtype")}
    client = open_client(LLMOptions(backend="hf", model=spec, **shared))
    client.ends_run = False
    return client


def _parts(systems: Sequence[OpenSystem]) -> dict[str, Served]:
    """The model behind each role; RAS says who plans and answers, where it is one of the systems."""
    found = dict[str, Served | None].fromkeys(PARTS)
    for system in sorted(systems, key=lambda one: one.system.name != "ras"):
        tools, options = system.tools, system.options
        chat = tools.llm and ServedChat(tools.llm, tools.sampling)
        graphs = {
            "planner": tools.planner and ServedGraphLLM(tools.planner, "planning", options.max_plan_tokens),
            "answerer": tools.answerer and ServedGraphLLM(tools.answerer, "answering", options.max_answer_tokens),
        }
        for part, graph in graphs.items():
            found[part] = found[part] or graph or chat
        if isinstance(tools.store, CorpusExtraction):
            reader = tools.store.extractor
            found["extractor"] = ServedChat(reader.client, reader.sampling, reader.instruction)
        if system.system.name == "cirag":
            student = tools.integrator and ServedChat(tools.integrator, tools.integrator_sampling)
            found["integrator"] = student or chat
    return {part: model for part, model in found.items() if model is not None}
