"""Retrieval-And-Structuring: plan, retrieve, structure, answer (RAS, section 3, eq. 1-8).

The function `ras` follows the paper for one question. Where the paper leaves a choice:

- A malformed plan is counted; it means `[SUFFICIENT]` if there is evidence, else `[SUBQ]` with the question.
- `[SUFFICIENT]` before any retrieval and `[NO_RETRIEVAL]` after it both end planning, and are counted as unexpected.
- A sub-query that equals an earlier one (after answer normalisation) would retrieve the same, so planning ends.
- After the last allowed round, the planner is not called.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

from tripletune.core.calls import Generator
from tripletune.core.data.answers import normalize_answer
from tripletune.core.data.passages import Passage
from tripletune.core.data.records import Action, ModelInput, Step
from tripletune.core.data.rendering import Plan, parse_plan
from tripletune.llm.question_client import load_prompts
from tripletune.llm.refusals import asks_nothing
from tripletune.rag import Trace
from tripletune.rag.chat_generator import ANSWER, PLAN, PROMPTS, ChatGenerator, Found, finish, prompt_files
from tripletune.rag.search.retrievers import Retrieved
from tripletune.rag.systems import LoopOptions, System, Tools, client_of, need


async def ras(question: str, search: str, tools: Tools, options: LoopOptions) -> Trace:
    """Answer one question with RAS; see `System.run`."""
    # `notes` records a chat model's calls for the trace; their cost is counted below, as for a Graph-LLM.
    notes = Trace(question)
    trace = Trace(question, tallies=notes.tallies, details=notes.details, cached=notes.cached)
    # A chat model replaces a missing Graph-LLM as planner, answerer or both (figure 3).
    planner, answerer = (one or ChatGenerator(tools, options, notes) for one in (tools.planner, tools.answerer))
    steps: tuple[Step, ...] = ()
    asked: set[str] = set()

    if not options.retrieval:
        trace.stop_reason = "retrieval_off"
    elif options.max_rounds == 0:
        trace.stop_reason = "max_rounds"
    elif options.context == "static":  # section 4.1: fixed rounds over a predetermined context, no plans
        trace.stop_reason = "static_context"
        for passage in need(tools, "context", "ras")[: options.max_rounds]:
            steps += (await _retrieve_and_structure(search, tools, options, trace, (passage,)),)
    elif not options.planning:
        trace.stop_reason = "single_pass"
        steps = (await _retrieve_and_structure(search, tools, options, trace),)
    while not trace.stop_reason:
        plan = await _plan(question, steps, planner, options, trace)  # eq. 1 and 2
        query, trace.stop_reason = _next_query(plan, steps, search, options)
        if trace.stop_reason:
            break
        if not steps and options.first_query == "main_question":
            query = search
        if normalize_answer(query) in asked:
            trace.stop_reason = "repeated_subquery"
            break
        asked.add(normalize_answer(query))
        steps += (await _retrieve_and_structure(query, tools, options, trace),)  # eq. 3, 4 and 6
        if len(steps) == options.max_rounds:
            trace.stop_reason = "max_rounds"

    async def own() -> str:
        """Answer by eq. 7 if there are no steps, else by eq. 8."""
        asked = ModelInput("answering", question, steps)
        answer = await answerer.generate(asked, options.max_answer_tokens, options.evidence)
        trace.count(answer)
        if answer.finish_reason == "length":
            trace.tallies["cut_off.ras.answer"] = 1  # a chat model's client has counted it, too
        return answer.text.strip()

    common, prompts = options.reader == "common", load_prompts(PROMPTS, options.prompts)
    llm: Any = client_of("ras", tools, trace, prompts) if common else getattr(answerer, "client", None)
    facts = dict.fromkeys(" | ".join(triple.as_list()) for step in steps for triple in step.triples)
    passages = list(trace.found.values()) if common or options.evidence == "text" else ()
    return await finish(trace, options, llm, Found(passages, list(facts)), own)


async def _plan(question: str, steps: tuple[Step, ...], planner: Generator, options: LoopOptions, trace: Trace) -> Plan:
    reply = await planner.generate(ModelInput("planning", question, steps), options.max_plan_tokens, options.evidence)
    trace.count(reply)
    plan = parse_plan(reply.text)
    unexpected = plan.action is (Action.NO_RETRIEVAL if steps else Action.SUFFICIENT)
    action = plan.action.value if plan.action else None
    trace.add_action(reply.text, action, plan.subquery, unexpected)
    trace.malformed += plan.action is None
    trace.unexpected += unexpected
    return plan


def _next_query(plan: Plan, steps: tuple[Step, ...], search: str, options: LoopOptions) -> tuple[str, str]:
    if plan.action is Action.SUBQ:
        return ("", "no_question") if asks_nothing(plan.subquery) else (plan.subquery, "")
    if plan.action is not None:
        # After retrieval both markers mean that nothing is missing.
        return "", "no_retrieval" if plan.action is Action.NO_RETRIEVAL and not steps else "sufficient"
    has_evidence = any(step.triples if options.evidence == "triples" else step.text for step in steps)
    return ("", "malformed") if has_evidence else (search, "")


async def _retrieve_and_structure(
    query: str, tools: Tools, options: LoopOptions, trace: Trace, given: Sequence[Passage] = ()
) -> Step:
    """Retrieve t_i (eq. 3) unless `given`, and structure it as g_i (eq. 4): distinct triples in passage order."""
    if options.context == "first" and not trace.steps:
        given = tools.context[: options.top_k]  # t_0 of section 4.1
    if given:
        hits = [Retrieved(passage, 0.0) for passage in given]
    else:
        hits = await need(tools, "retriever", "ras").retrieve(query, options.top_k)
    store = need(tools, "store", "ras") if options.evidence == "triples" else tools.store
    started = time.perf_counter()
    found = await store.read([hit.passage for hit in hits]) if store is not None else []
    trace.structuring_seconds += time.perf_counter() - started
    triples = list(dict.fromkeys(triple for known in found if known for triple in known))
    if options.triples_share < 1 or options.triples_shuffled:
        seed = f"{options.share_seed} {trace.question} {query}"
        kept = random.Random(seed).sample(range(len(triples)), round(options.triples_share * len(triples)))
        triples = [triples[number] for number in (kept if options.triples_shuffled else sorted(kept))]
    step = Step(query, tuple(triples[: options.triples_per_step]), "\n".join(hit.passage.content for hit in hits))
    trace.add_step(step, hits, sum(known is None for known in found))
    for hit, triple in ((hit, one) for hit, known in zip(hits, found) for one in step.triples if one in (known or ())):
        for text in (str(triple), " | ".join(triple.as_list())):
            trace.origins.setdefault(text, []).append(hit.passage.id)
    return step


SYSTEM = System(
    name="ras",
    run=ras,
    needs_corpus=lambda options: options.retrieval and options.max_rounds > 0 and options.context != "static",
    needs_triples=lambda options: options.retrieval and options.max_rounds > 0 and options.evidence == "triples",
    files=prompt_files(PLAN, ANSWER),
    plans=True,
)
