"""The models of a server: each loop that can run with the given options, and the model of each role.

A loop answers a question and returns its trace. A part is only the planner, answerer, extractor or integrator. A chat
model gets the chat unchanged. A Graph-LLM gets the last turn as question, and the request's `steps` as earlier rounds.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tripletune.core.calls import Completion, LLMClient, Sampling
from tripletune.core.data.passages import Passage
from tripletune.core.data.records import ModelInput, Step, Task
from tripletune.core.data.triples import Triple
from tripletune.core.options import require
from tripletune.llm.backends import LLMOptions, load_backend, open_client
from tripletune.rag import Trace, TraceAction, TraceStep
from tripletune.rag.answering import Opened, OpenSystem, SystemOptions, clients_of, open_system, system_problems
from tripletune.rag.extract import CorpusExtraction
from tripletune.rag.systems import find_system, make_options, system_names
from tripletune.serve.protocol import Answer, Asked

# Reference systems for evaluations, which are offered only if they are named.
_BOUNDS = ("random_passages",)
_WARM = ModelInput("answering", "Who?", (Step("Who?", (Triple("someone", "is", "there"),), "Someone is there."),))
Watch = Callable[[TraceAction | TraceStep], None]
Chosen = dict[str, tuple[SystemOptions, LLMOptions | None]]
Part = Callable[[Asked], Awaitable[Completion]]


async def _chat(client: LLMClient, sampling: Sampling | None, instruction: str, asked: Asked) -> Completion:
    drawn = {"temperature": asked.temperature, "top_p": asked.top_p, "seed": asked.seed, "max_tokens": asked.limit}
    given: dict[str, Any] = {name: value for name, value in drawn.items() if value is not None}
    if given.get("temperature") and "seed" not in given:
        given["seed"] = secrets.randbelow(2**31)  # equal calls at the same time would share a reply
    messages = asked.turns
    if instruction and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": instruction})
    return await client.chat(messages, role="serve", sampling=replace(sampling or Sampling(), **given))


async def _generate(model: Any, task: Task, limit: int, asked: Asked) -> Completion:
    sample = ModelInput(task, asked.turns[-1]["content"], asked.steps)
    found: Completion = await model.generate(sample, asked.limit or limit)
    return found


@dataclass
class Shelf:
    """All models of a server by name, and the reasons why systems are missing."""

    loops: dict[str, OpenSystem]
    parts: dict[str, Part]
    left_out: dict[str, str]

    @property
    def names(self) -> dict[str, str]:
        """The kind of each model by name: "loop" or "part"."""
        return {**dict.fromkeys(self.loops, "loop"), **dict.fromkeys(self.parts, "part")}

    async def answer(self, asked: Asked, watch: Watch) -> Answer:
        """Reply to a request; `watch` is called with each step of a loop."""
        if asked.model in self.parts:
            cost: Any = await self.parts[asked.model](asked)
            cut, more, text = cost.finish_reason == "length", {}, cost.text
        else:
            system, turns = self.loops[asked.model], asked.turns
            if asked.limit is not None:
                system = replace(system, options=replace(system.options, max_answer_tokens=asked.limit))
            trace = cost = await system.answer_async(turns[-1]["content"], watch=watch)
            cut = any(name.startswith("cut_off.") and ".answer" in name for name in trace.tallies)
            more = {"tripletune": {**trace.to_json(), **_sources(system, trace), "ignored_turns": len(turns) - 1}}
            text = trace.answer
        read, written = cost.prompt_tokens, cost.completion_tokens
        usage = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
        ends = [place for stop in asked.stop or () if stop and (place := text.find(stop)) >= 0]
        return Answer(text[: min(ends, default=len(text))], usage, "length" if cut else "stop", more)

    async def warm_up(self) -> None:
        """Load models and indexes before the first question, without calls to other servers."""
        for retriever in filter(None, dict.fromkeys(system.tools.retriever for system in self.loops.values())):
            await retriever.retrieve("Who?", 1)
        for reranker in filter(None, dict.fromkeys(system.tools.reranker for system in self.loops.values())):
            await reranker.scores("Who?", ["Someone."])
        for client in dict.fromkeys(one for system in self.loops.values() for one in clients_of(system.tools)):
            await asyncio.to_thread(client.load)
            # A Graph-LLM on this machine loads its sentence encoder at the first graph.
            if hasattr(client, "decode") and not client.address:
                await client.decode(_WARM, 1)

    async def close(self) -> None:
        """Close models and stores, and remove temporary indexes."""
        for system in self.loops.values():
            await system.close_async()


def _sources(system: OpenSystem, trace: Trace) -> dict[str, Any]:
    """The retrieved passages, and the triples of all rounds with the passages that state them."""
    found, triples = trace.found.values(), dict.fromkeys(tuple(one) for step in trace.steps for one in step.triples)
    said = {passage.id: _says(system.tools.store, passage) for passage in found}
    passages = [{"id": one.id, "title": one.label, "text": one.text, "source": one.source} for one in found]
    where = ([name for name, says in said.items() if says(triple)] for triple in triples)
    names = ("subject", "predicate", "object", "passages")
    return {"passages": passages, "triples": [dict(zip(names, (*one, places))) for one, places in zip(triples, where)]}


def _says(store: Any, passage: Passage) -> Callable[[tuple[str, ...]], bool]:
    """A function that says whether a passage states a triple: by the store, or else if it names both entities."""
    known = store and store.get(passage)
    if known is not None:
        return {tuple(triple.as_list()) for triple in known}.__contains__
    text = passage.content.casefold()
    return lambda triple: triple[0].casefold() in text and triple[2].casefold() in text


def open_shelf(
    options: SystemOptions, teacher: LLMOptions | None, names: Sequence[str] = (), integrator: str | None = None
) -> Shelf:
    """Open the systems `names`, or all systems that can run with these options, and their models."""
    require(options)
    if teacher is not None and not load_backend(teacher.backend).sends:
        raise ValueError(f"--teacher {teacher.backend} does not answer at once: choose another backend")
    chosen, left_out = _choose(options, teacher, names)
    if left_out and (names or not chosen):
        # Without names, report only what RAS lacks, since RAS needs least.
        raise ValueError("; ".join(left_out.values()) if names else left_out["ras"])
    if integrator and (teacher is None or "cirag" not in chosen):
        raise ValueError(f"--integrator {integrator} has no effect, since the system cirag is not offered")
    opened, loops = Opened(), dict[str, OpenSystem]()
    for name, (own, chat) in chosen.items():
        if len(chosen) > 1:  # of several systems, some may ignore an option
            system = find_system(name)
            loop = make_options(system, own.set)
            embeds = own.retriever != "bm25" or system.needs_reranker(loop)
            own.triples = own.triples if system.needs_triples(loop) else None
            own.encoder = own.encoder if embeds and system.needs_corpus(loop) else None
        loops[name] = open_system(own, chat, opened)
    if integrator and teacher:
        shared = {name: getattr(teacher, name) for name in ("ledger", "batch_size", "dtype")}
        student = open_client(LLMOptions(backend="hf", model=integrator, **shared))
        student.ends_run = False
        loops["cirag"].tools = replace(loops["cirag"].tools, integrator=student)
    return Shelf(loops, _parts(loops), left_out)


def _choose(options: SystemOptions, teacher: LLMOptions | None, names: Sequence[str]) -> tuple[Chosen, dict[str, str]]:
    """Return the options of each system that can run, and the reasons why other systems can't run.

    `--set ras.top_k=3` sets an option only for RAS, and overrides `--set top_k=5`.
    """
    chosen, left_out = Chosen(), dict[str, str]()
    ordered = sorted(options.set, key=lambda text: "." in text.split("=")[0])
    usual = sorted(set(system_names()) - set(_BOUNDS), key=lambda name: (name != "ras", name))
    for name in dict.fromkeys(names or usual):
        system, chat = find_system(name), teacher
        mine = [text.removeprefix(f"{name}.") for text in ordered]
        own = replace(options, system=name, set=[text for text in mine if "." not in text.split("=")[0]])
        if system.model == "llm":  # only other systems use a Graph-LLM
            own.model, own.planner_model, own.untrained = None, None, False
        elif options.model and not system.plans:
            own.planner_model, chat = None, None
        try:
            loop = make_options(system, own.set)
            found = system_problems(own, system, loop, chat, alone=True)
        except ValueError as error:
            found = [str(error)]
        if system.needs_gold or system.model == "none":
            found = [f"--system {name} is only for evaluations, whose questions have gold passages or answers"]
        if found:
            left_out[name] = "; ".join(found)
        else:
            chosen[name] = own, chat
    return chosen, left_out


def _parts(loops: dict[str, OpenSystem]) -> dict[str, Part]:
    """The model of each role; planner and answerer are those of RAS if RAS is offered."""
    found = dict[str, Part | None]()
    for name, system in sorted(loops.items(), key=lambda one: one[0] != "ras"):
        tools, options = system.tools, system.options
        usual = replace(tools.sampling or Sampling(), max_tokens=Sampling().max_tokens)
        chat = partial(_chat, tools.llm, usual, "") if tools.llm else None
        plan = tools.planner and partial(_generate, tools.planner, "planning", options.max_plan_tokens)
        answer = tools.answerer and partial(_generate, tools.answerer, "answering", options.max_answer_tokens)
        found["planner"] = found.get("planner") or plan or chat
        found["answerer"] = found.get("answerer") or answer or chat
        if isinstance(tools.store, CorpusExtraction):
            reader = tools.store.extractor
            found["extractor"] = partial(_chat, reader.client, reader.sampling, reader.instruction)
        if name == "cirag":
            student = tools.integrator and partial(_chat, tools.integrator, tools.integrator_sampling, "")
            found["integrator"] = student or chat
    return {part: model for part, model in sorted(found.items(), key=lambda one: one[0] != "planner") if model}
