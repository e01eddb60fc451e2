"""The models of a server: each loop that can run with the given options, and the model of each role.

A loop answers a question and returns its trace. A part is only the planner, answerer, extractor or integrator. A chat
model gets the chat unchanged. A Graph-LLM gets the last turn as question, and the request's `steps` as earlier rounds.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import chain
from typing import Any, cast
from urllib.parse import quote

from tripletune.core.calls import Completion, Generator, LLMClient, Sampling, UnusableReply
from tripletune.core.data.passages import Passage
from tripletune.core.data.records import ModelInput, Step, Task
from tripletune.core.data.triples import Triple
from tripletune.core.options import require
from tripletune.llm.backends import LLMOptions, load_backend
from tripletune.rag import Trace
from tripletune.rag.answering import Opened, OpenSystem, Watch, clients_of, open_system
from tripletune.rag.extract import CorpusExtraction
from tripletune.rag.system_options import OptionsOfSystem, SystemOptions, options_for, system_problems
from tripletune.rag.systems import AnswerOptions, LoopOptions, find_system, system_names
from tripletune.rag.trained import loop_options
from tripletune.rag.triple_store import TripleSource
from tripletune.serve.limits import Refused
from tripletune.serve.protocol import Answer, Asked, Citation, JsonObject
from tripletune.serve.schemas import fill_schema, read_object

# Reference systems for evaluations, which are offered only if they are named.
_BOUNDS = ("random_passages",)
_WARM = ModelInput("answering", "Who?", (Step("Who?", (Triple("someone", "is", "there"),), "Someone is there."),))
Part = Callable[[Asked], Awaitable[Completion]]
# Subject, predicate and object, as traces hold them.
Fields = tuple[str, str, str]


async def _reply_of_chat_model(
    client: LLMClient, sampling: Sampling | None, instruction: str, asked: Asked
) -> Completion:
    """Pass a request's chat to a chat model; without a system turn it gets the `instruction`, unless that is "".

    What the request sets overrides `sampling`, which holds what the loop would use. A schema is refused where the
    backend does not enforce one, since a client parses the reply without a further look.
    """
    settings = {
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "seed": asked.seed,
        "max_tokens": asked.limit,
    }
    set_by_request: dict[str, Any] = {name: value for name, value in settings.items() if value is not None}
    if set_by_request.get("temperature") and "seed" not in set_by_request:
        set_by_request["seed"] = secrets.randbelow(2**31)  # equal calls at the same time would share a reply
    if asked.response_format is not None:
        if not client.enforces_schemas:
            reason = f"the model behind {asked.model} can't keep to a JSON schema"
            raise Refused(400, reason, param="response_format")
        set_by_request["schema"] = json.dumps(asked.response_format, ensure_ascii=False)
    messages = asked.turns
    if instruction and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": instruction})
    return await client.chat(messages, role="serve", sampling=replace(sampling or Sampling(), **set_by_request))


async def _reply_of_graph_llm(model: Generator, task: Task, limit: int, asked: Asked) -> Completion:
    """Pass the last turn of a request, and the earlier rounds it brings, to a Graph-LLM."""
    if asked.response_format is not None:
        raise Refused(400, f"{asked.model} is a Graph-LLM, which writes no JSON", param="response_format")
    sample = ModelInput(task, asked.turns[-1]["content"], asked.steps)
    return await model.generate(sample, asked.limit or limit)


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
            return await self._answer_of_part(asked)
        return await self._answer_of_loop(asked, watch)

    async def _answer_of_part(self, asked: Asked) -> Answer:
        """The reply of one model; turns that it can't read are refused, since it would answer another chat."""
        if asked.tool_turns:
            raise Refused(400, f"{asked.model} reads no results of tools: leave these turns out", param="messages")
        completion = await self.parts[asked.model](asked)
        if asked.response_format is not None:
            _check_object(completion, asked.response_format)
        return _answer_in_openai_form(asked, completion, completion.text, _finish_reason(completion))

    async def _answer_of_loop(self, asked: Asked, watch: Watch) -> Answer:
        """The answer of a loop to the last turn, with its trace.

        Earlier turns are ignored and counted: chat programs send them with every question, so refusing them would
        refuse all chats but the first turn.
        """
        system, turns = self.loops[asked.model], asked.turns
        if asked.limit is not None:
            # Each system of a shelf answers by a model (`_choose`), so it has the options of an answer.
            options = cast(AnswerOptions, system.options)
            system = replace(system, options=replace(options, max_answer_tokens=asked.limit))
        if asked.response_format is not None and system.tools.llm is None:
            reason = f"{asked.model} has no chat model that could write JSON: start the server with --llm"
            raise Refused(400, reason, param="response_format")
        trace = await system.answer_async(turns[-1]["content"], watch=watch)
        text = trace.answer
        if asked.response_format is not None:
            text = await fill_schema(asked.response_format, system, trace)
        # Only an answer that was cut off makes the reply incomplete; plans that were cut off are in the trace.
        is_cut = any(name.startswith("cut_off.") and ".answer" in name for name in trace.tallies)
        about = {**trace.to_json(), **sources_of(system, trace), "ignored_turns": len(turns) - 1 + asked.tool_turns}
        reply = _answer_in_openai_form(asked, trace, text, "length" if is_cut else "stop", {"tripletune": about})
        return replace(reply, citations=_citations_of(trace, len(reply.text)))

    async def warm_up(self) -> None:
        """Load models and indexes before the first question, without calls to other servers.

        Loops share models and indexes, so each is loaded once; `dict.fromkeys` keeps their order, unlike a set.
        """
        tools = [system.tools for system in self.loops.values()]
        for retriever in dict.fromkeys(own.retriever for own in tools):
            if retriever is not None:
                await retriever.retrieve("Who?", 1)
        for reranker in dict.fromkeys(own.reranker for own in tools):
            if reranker is not None:
                await reranker.scores("Who?", ["Someone."])
        clients = dict.fromkeys(chain.from_iterable(clients_of(own) for own in tools))
        for client in clients:
            await asyncio.to_thread(client.load)
            # A Graph-LLM on this machine loads its sentence encoder at the first graph.
            if hasattr(client, "decode") and not client.address:
                await client.decode(_WARM, Sampling(max_tokens=1))

    async def close(self) -> None:
        """Close models and stores, and remove temporary indexes."""
        for system in self.loops.values():
            await system.close_async()


def _answer_in_openai_form(
    asked: Asked, cost: Trace | Completion, text: str, finish_reason: str, more: JsonObject | None = None
) -> Answer:
    """A reply in OpenAI's form: the text up to the first of the request's stop sequences, and the tokens it cost.

    Args:
        asked: The request.
        cost: The trace of a loop or the completion of a chat model, with its tokens.
        text: The whole answer.
        finish_reason: Why it ended, as OpenAI names it.
        more: Fields of our own beside OpenAI's.
    """
    usage = {
        "prompt_tokens": cost.prompt_tokens,
        "completion_tokens": cost.completion_tokens,
        "total_tokens": cost.prompt_tokens + cost.completion_tokens,
    }
    end = len(text)
    for stop in asked.stop or ():
        if stop and stop in text:
            end = min(end, text.index(stop))
    return Answer(text[:end], usage, finish_reason, more or {})


def _check_object(completion: Completion, schema: dict[str, Any]) -> None:
    """Refuse a part's reply that does not fit the schema of its request: not every server keeps to it."""
    try:
        read_object(completion.text, schema)
    except UnusableReply as error:
        reason = f"the model's reply does not fit the schema: {error.explanation}"
        raise Refused(502, reason, "upstream_error", "response_format") from None


def _citations_of(trace: Trace, length: int) -> list[Citation]:
    """The passages in the prompt of the answer, or if these are not known all passages, as citations.

    They stand for the whole reply, of `length` characters. OpenAI's clients know only citations of URLs here. The URL
    of a passage is that of its document, `file:` and the document's path, or `urn:passage:` and the passage's id.
    """
    citations = []
    for name in trace.shown or trace.found:
        passage = trace.found.get(name)
        if passage is None:
            continue
        source = passage.source or {}
        document = str(source.get("document") or "")
        url = f"urn:passage:{quote(passage.id)}"
        if document.startswith(("http://", "https://")):
            url = document
        elif document:
            url = f"file:{quote(document)}"
        if document and source.get("page"):
            url += f"#page={source['page']}"
        citations.append(Citation(url=url, title=passage.label, start_index=0, end_index=length))
    return citations


def _finish_reason(completion: Completion) -> str:
    """Why a part's reply ended, in the words of OpenAI's API."""
    if completion.is_whole:
        return "stop"
    if completion.finish_reason in ("content_filter", "refusal"):
        return "content_filter"
    return "length"


def sources_of(system: OpenSystem, trace: Trace) -> dict[str, list[JsonObject]]:
    """The retrieved passages, and the triples of all rounds with the ids of the passages that state them.

    A trace keeps the triples of a round without their passages, so the passages are found here, for the page.
    """
    passages = []
    states: dict[str, Callable[[Fields], bool]] = {}
    for passage in trace.found.values():
        states[passage.id] = _statement_test(system.tools.store, passage)
        passages.append({"id": passage.id, "title": passage.label, "text": passage.text, "source": passage.source})
    distinct: dict[Fields, None] = {}
    for step in trace.steps:
        for subject, predicate, object_ in step.triples:
            distinct[subject, predicate, object_] = None
    triples = []
    for triple in distinct:
        stated_by = [name for name, is_stated in states.items() if is_stated(triple)]
        triples.append(dict(zip(("subject", "predicate", "object", "passages"), (*triple, stated_by))))
    return {"passages": passages, "triples": triples}


def _statement_test(store: TripleSource | None, passage: Passage) -> Callable[[Fields], bool]:
    """Make a function that says whether a passage states a triple.

    A store knows which triples were read from the passage. Without its entry (a system that reads passages, or triples
    that a model wrote in the loop) a passage that names subject and object counts, so that a reader has a place to
    look; the predicate is not compared, since models word it freely. The text is folded once here, not per triple.
    """
    stored = store.get(passage) if store is not None else None
    if stored is not None:
        stated = {(triple.subject, triple.predicate, triple.object) for triple in stored}
        return stated.__contains__
    text = passage.content.casefold()

    def names_both(triple: Fields) -> bool:
        """Whether the passage names subject and object of a triple."""
        subject, _, object_ = triple
        return subject.casefold() in text and object_.casefold() in text

    return names_both


def open_shelf(options: SystemOptions, teacher: LLMOptions | None, names: Sequence[str] = ()) -> Shelf:
    """Open the systems `names`, or all systems that can run with these options, and their models.

    Raises:
        ValueError: A named system, or without names every system, can't run; or an option can't be met.
    """
    require(options)
    if teacher is not None and not load_backend(teacher.backend).sends:
        raise ValueError(f"--teacher {teacher.backend} does not answer at once: choose another backend")
    chosen: dict[str, OptionsOfSystem[SystemOptions]] = {}
    left_out: dict[str, str] = {}
    for name in dict.fromkeys(names or _usual_systems()):
        own = options if names else replace(options, set=_settings_read(name, options.set))
        try:
            # With several systems a file may be for another one; a single system reports files that it does not read.
            chosen[name] = _options_if_runnable(name, own, teacher, shared=len(names) != 1)
        except ValueError as error:
            left_out[name] = str(error)
    if names and left_out:
        raise ValueError("; ".join(left_out.values()))
    if not chosen:
        # Without names, report only what RAS lacks, since RAS needs least.
        raise ValueError(left_out["ras"])
    if not names:
        _refuse_unread_settings(options.set, chosen, left_out)
    if options.integrator and "cirag" not in chosen:
        raise ValueError(f"--integrator {options.integrator} has no effect, since the system cirag is not offered")
    opened = Opened()
    loops = {name: open_system(choice.options, choice.teacher, opened) for name, choice in chosen.items()}
    return Shelf(loops, _models_by_role(loops), left_out)


def _usual_systems() -> list[str]:
    """The systems that are offered unless some are named: RAS first, then by name."""
    return ["ras", *(name for name in system_names() if name not in ("ras", *_BOUNDS))]


def _settings_read(name: str, settings: Sequence[str]) -> list[str]:
    """The texts `NAME=VALUE` that a system reads, or that are for one system alone (`ras.NAME=VALUE`).

    Where no system is named, an option that only RAS has must not keep all others from being offered.
    """
    own = {item.name for item in fields(find_system(name).options)}
    read = []
    for text in settings:
        setting = text.partition("=")[0].strip().replace("-", "_")
        if "." in setting or setting in own:
            read.append(text)
    return read


def _refuse_unread_settings(settings: Iterable[str], chosen: Iterable[str], left_out: Mapping[str, str]) -> None:
    """Raise `ValueError` for an option that no offered system reads, with the reason why its system is not offered."""
    for text in settings:
        if any(_settings_read(name, [text]) for name in chosen):
            continue
        for name, why in left_out.items():
            if _settings_read(name, [text]):
                raise ValueError(why)
        raise ValueError(f"--set {text}: none of the systems that are offered ({', '.join(chosen)}) has this option")


def _options_if_runnable(
    name: str, options: SystemOptions, teacher: LLMOptions | None, shared: bool
) -> OptionsOfSystem[SystemOptions]:
    """The options and the chat model of a system, all of which are checked; a `ValueError` says why it can't run."""
    system = find_system(name)
    if system.needs_gold or system.model == "none":
        raise ValueError(f"--system {name} is only for evaluations, whose questions have gold passages or answers")
    own, chat_model = options_for(name, options, teacher, shared)
    loop = loop_options(system, own)
    if problems := system_problems(own, system, loop, chat_model, alone=True):
        raise ValueError("; ".join(problems))
    return OptionsOfSystem(own, chat_model)


def _models_by_role(loops: dict[str, OpenSystem]) -> dict[str, Part]:
    """The model of each role, the planner first; planner and answerer are those of RAS if RAS is offered.

    RAS comes first since its loop can have a Graph-LLM for each of the two; see `options_for` for the other systems.
    """
    parts: dict[str, Part] = {}
    for name in sorted(loops, key=lambda name: name != "ras"):
        for role, part in _models_of_system(name, loops[name]).items():
            if role in ("planner", "answerer"):
                parts.setdefault(role, part)
            else:
                parts[role] = part
    return parts


def _models_of_system(name: str, system: OpenSystem) -> dict[str, Part]:
    """The models of one system by role.

    A Graph-LLM comes before the chat model, as in the loop, and each model keeps the settings with which the loop calls
    it. Only CIRAG has an integrator: without one of its own, its chat model integrates.
    """
    tools = system.tools
    parts: dict[str, Part] = {}
    if tools.planner is not None:
        # Only the options of a loop name a Graph-LLM that plans.
        limit = cast(LoopOptions, system.options).max_plan_tokens
        parts["planner"] = partial(_reply_of_graph_llm, tools.planner, "planning", limit)
    if tools.answerer is not None:
        limit = cast(AnswerOptions, system.options).max_answer_tokens
        parts["answerer"] = partial(_reply_of_graph_llm, tools.answerer, "answering", limit)
    chat = None
    if tools.llm is not None:
        # The limit of a loop's short replies is no limit for a chat.
        usual = replace(tools.sampling or Sampling(), max_tokens=Sampling().max_tokens)
        chat = partial(_reply_of_chat_model, tools.llm, usual, "")
        parts.setdefault("planner", chat)
        parts.setdefault("answerer", chat)
    if isinstance(tools.store, CorpusExtraction):
        extractor = tools.store.extractor
        parts["extractor"] = partial(_reply_of_chat_model, extractor.client, extractor.sampling, extractor.instruction)
    if name == "cirag" and tools.integrator is not None:
        parts["integrator"] = partial(_reply_of_chat_model, tools.integrator, tools.integrator_sampling, "")
    elif name == "cirag" and chat is not None:
        parts["integrator"] = chat
    return parts
