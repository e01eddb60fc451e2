"""Retrieval-And-Structuring: plan, retrieve, structure, answer (RAS, section 3, eq. 1-8).

The function `ras` follows the paper for one question. Where the paper leaves a choice:

- A malformed plan is counted; it means `[SUFFICIENT]` if there is evidence, else `[SUBQ]` with the question.
- `[SUFFICIENT]` before any retrieval and `[NO_RETRIEVAL]` after it both end planning, and are counted as unexpected.
- A sub-query that equals an earlier one (after answer normalisation) would retrieve the same, so planning ends.
- After the last allowed round, the planner is not called.

With `stop: fixed` (ours) the planner only writes sub-queries: each of its replies begins with `[SUBQ]`, and the loop
ends after `max_rounds` searches, or at a sub-query that equals an earlier one.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import NamedTuple

from tripletune.core.calls import Generator
from tripletune.core.data.answers import normalize_answer
from tripletune.core.data.passages import Passage
from tripletune.core.data.records import Action, ModelInput, Step
from tripletune.core.data.rendering import Plan, parse_plan
from tripletune.core.data.triples import Triple
from tripletune.llm.question_client import TRAINED_PLANNER, QuestionClient, load_prompts, note_unreadable
from tripletune.llm.refusals import asks_nothing
from tripletune.rag import Trace
from tripletune.rag.chat_generator import ANSWER, PLAN, PROMPTS, ChatGenerator, finish, prompt_files
from tripletune.rag.evidence import Found, passages_by_round
from tripletune.rag.search.retrievers import Retrieved, highest_scored, passages_of_hits, verbalise_all
from tripletune.rag.systems import LoopOptions, System, Tools, client_of, need


async def ras(question: str, search: str, tools: Tools, options: LoopOptions) -> Trace:
    """Answer one question with RAS; see `System.run`.

    Each round plans (a sub-query, or that nothing is missing), retrieves passages for the sub-query and structures them
    as triples, which the next plan and the answer read. Equations are those of section 3. Batching is not this
    function's business: many questions run at once, and the models group what waits.
    """
    trace = Trace(question)
    # A chat model replaces a missing Graph-LLM as planner, answerer or both (figure 3); its client counts its calls.
    planner: Generator | ChatGenerator = tools.planner or ChatGenerator(tools, options, trace)
    answerer: Generator | ChatGenerator = tools.answerer or ChatGenerator(tools, options, trace)
    # The variants without plans end here; in the others, the planner decides.
    steps = await _steps_without_plans(search, tools, options, trace)
    queries_so_far: set[str] = set()
    while not trace.stop_reason:
        plan = await _ask_for_plan(question, steps, planner, options, trace)  # eq. 1 and 2
        query, trace.stop_reason = _query_or_stop(plan, steps, search, options)
        if trace.stop_reason:
            break
        if not steps and options.first_query == "main_question":
            query = search
        if normalize_answer(query) in queries_so_far:
            trace.stop_reason = "repeated_subquery"
            break
        queries_so_far.add(normalize_answer(query))
        steps += (await _retrieve_and_structure(query, tools, options, trace),)  # eq. 3, 4 and 6
        if len(steps) == options.max_rounds:
            trace.stop_reason = "max_rounds"

    async def answer_from_steps() -> str:
        """Answer by eq. 7 if there are no steps, else by eq. 8; a reply that was cut off is counted."""
        history = steps
        if options.answer_history == "merged" and steps:
            history = (merge_steps(search, steps),)
        if isinstance(answerer, ChatGenerator):
            return await answerer.answer(question, history)
        model_input = ModelInput("answering", question, history)
        reply = await answerer.generate(model_input, options.max_answer_tokens, options.evidence)
        trace.count(reply)
        if not reply.is_whole:
            trace.tally("cut_off.ras.answer")
        return reply.text.strip()

    llm = _client_that_answers(answerer, tools, options, trace)
    return await finish(trace, options, llm, _evidence_of_steps(trace, options), answer_from_steps)


async def _steps_without_plans(search: str, tools: Tools, options: LoopOptions, trace: Trace) -> tuple[Step, ...]:
    """The steps of a variant that does not plan, with the reason to stop; no step and no reason if it plans.

    The reason is set in `trace.stop_reason`.
    """
    if not options.retrieval:
        trace.stop_reason = "retrieval_off"
        return ()
    if options.max_rounds == 0:
        trace.stop_reason = "max_rounds"
        return ()
    steps = []
    if options.context == "static":  # section 4.1: fixed rounds over a predetermined context
        trace.stop_reason = "static_context"
        for passage in need(tools.context, "context", "ras")[: options.max_rounds]:
            steps.append(await _retrieve_and_structure(search, tools, options, trace, (passage,)))
    elif not options.planning:
        trace.stop_reason = "single_pass"
        steps.append(await _retrieve_and_structure(search, tools, options, trace))
    return tuple(steps)


async def _ask_for_plan(
    question: str, steps: tuple[Step, ...], planner: Generator | ChatGenerator, options: LoopOptions, trace: Trace
) -> Plan:
    """Ask for the next action, and add the reply to the trace.

    The planner reads the question and the steps as `core.data.rendering.render` writes them; a chat model reads them
    after the prompt `tripletune/prompts/systems/ras_plan_chat.md`.
    """
    is_fixed = options.stop == "fixed"
    if is_fixed and not steps and options.first_query == "main_question":
        # There is nothing to decide, and no query to write.
        return Plan(Action.SUBQ, question)
    if isinstance(planner, ChatGenerator):
        reply, plan = await planner.plan(question, steps)
    else:
        model_input = ModelInput("planning", question, steps, begun=Action.SUBQ.value if is_fixed else "")
        completion = await planner.generate(model_input, options.max_plan_tokens, options.evidence)
        trace.count(completion)
        if not completion.is_whole:
            trace.tally("cut_off.ras.plan")
        reply, plan = completion.text, parse_plan(completion.text)
        if plan.action is None:
            note_unreadable(trace, TRAINED_PLANNER, reply, "no_action")
    unexpected = plan.action is (Action.NO_RETRIEVAL if steps else Action.SUFFICIENT)
    action = plan.action.value if plan.action else None
    note = ""
    if plan.action is Action.SUBQ and asks_nothing(plan.subquery):
        note = "not searched: this sub-query asks nothing"
    elif plan.action is Action.SUBQ and not steps and options.first_query == "main_question":
        note = "not searched: the first search is for the main question (--first-query main_question)"
    trace.add_action(reply, action, plan.subquery, unexpected, note)
    trace.malformed += plan.action is None
    trace.unexpected += unexpected
    return plan


class _NextSearch(NamedTuple):
    """The next query, or the reason to stop; the other of the two is empty."""

    query: str
    stop_reason: str = ""


def _query_or_stop(plan: Plan, steps: tuple[Step, ...], search: str, options: LoopOptions) -> _NextSearch:
    """What a plan means for the loop: a query to search, or the end.

    An unreadable plan ends the loop if there is evidence to answer from; else the question itself is searched, since an
    answer without any evidence would be worse.
    """
    if plan.action is Action.SUBQ:
        if asks_nothing(plan.subquery):
            return _NextSearch("", "no_question")
        return _NextSearch(plan.subquery)
    if plan.action is Action.NO_RETRIEVAL and not steps:
        return _NextSearch("", "no_retrieval")
    if plan.action is not None:
        # After retrieval both markers mean that nothing is missing.
        return _NextSearch("", "sufficient")
    has_evidence = any(step.text if options.evidence == "text" else step.triples for step in steps)
    if has_evidence:
        return _NextSearch("", "malformed")
    return _NextSearch(search)


async def _retrieve_and_structure(
    query: str, tools: Tools, options: LoopOptions, trace: Trace, context: Sequence[Passage] = ()
) -> Step:
    """Retrieve t_i (eq. 3) unless it is the `context`, and structure it as g_i (eq. 4): triples in passage order.

    The step is recorded in the trace, with the passages that the store lacks, and with the passages of each triple.
    Options may leave out triples: those of earlier steps (chat models only), a random share (figure 4), or all but
    `triples_per_step`.
    """
    context = context or _first_context(tools, options, trace)
    if context:
        hits = [Retrieved(passage, 0.0) for passage in context]
    else:
        hits = await need(tools.retriever, "retriever", "ras").retrieve(query, options.top_k)
    store = need(tools.store, "store", "ras") if options.evidence != "text" else tools.store
    started = time.perf_counter()
    # By hit; None for a passage that the store lacks.
    stated: list[tuple[Triple, ...] | None] = []
    if store is not None:
        stated = await store.read(passages_of_hits(hits))
    trace.structuring_seconds += time.perf_counter() - started
    triples: dict[Triple, None] = {}
    for triples_of_hit in stated:
        triples |= dict.fromkeys(triples_of_hit or ())
    if options.triples_per_step is not None and _hides_repeats(tools):
        # A prompt for a chat model has each triple once, so that a repeated one would only take a place.
        for earlier in trace.steps:
            for shown_before in earlier.triples:
                triples.pop(Triple(*shown_before), None)
    shown = _share_of(list(triples), f"{options.share_seed} {trace.question} {query}", options)
    if options.triples_per_step is not None and options.triples_chosen == "closest":
        shown = await _closest_triples(shown, query, trace.question, options.triples_per_step, tools)
    text = "\n".join(passage.content for passage in passages_of_hits(hits))
    step = Step(query, tuple(shown[: options.triples_per_step]), text)
    trace.add_step(step, hits, stated.count(None))
    for hit, triples_of_hit in zip(hits, stated):
        for triple in step.triples:
            if triple in (triples_of_hit or ()):
                _note_origin(triple, hit.passage, trace)
    return step


def merge_steps(query: str, steps: Sequence[Step]) -> Step:
    """One step for a query with all triples and texts of several steps; what several of them found is there once."""
    triples: dict[Triple, None] = {}
    texts: dict[str, None] = {}
    for step in steps:
        triples |= dict.fromkeys(step.triples)
        if step.text:
            texts[step.text] = None
    return Step(query, tuple(triples), "\n".join(texts))


def _first_context(tools: Tools, options: LoopOptions, trace: Trace) -> Sequence[Passage]:
    """The passages t_0 of section 4.1; a question that came without passages is searched, and counted."""
    if options.context != "first" or trace.steps:
        return ()
    if not tools.context:
        trace.tally("searched_without_context")
    return tools.context[: options.top_k]


def _hides_repeats(tools: Tools) -> bool:
    """Whether only chat models read the steps; see `ChatGenerator`."""
    return tools.planner is None and tools.answerer is None


async def _closest_triples(triples: list[Triple], query: str, question: str, count: int, tools: Tools) -> list[Triple]:
    """The `count` triples closest to the sub-query or the question, in passage order.

    The question is asked, too, because a passage may hold what a later sub-query needs.
    """
    reranker = need(tools.reranker, "reranker", "ras")
    texts = verbalise_all(triples)
    to_query = await reranker.scores(query, texts)
    to_question = await reranker.scores(question, texts)
    closeness = [max(scores) for scores in zip(to_query, to_question)]
    kept = set(highest_scored(triples, closeness, count))
    return [triple for triple in triples if triple in kept]


def _share_of(triples: list[Triple], seed: str, options: LoopOptions) -> list[Triple]:
    """A random share of the triples (figure 4), in their order unless `triples_shuffled`; by default all of them."""
    if options.triples_share == 1 and not options.triples_shuffled:
        return triples
    # A small share of few triples would else be none, as if nothing had been found.
    count = max(round(options.triples_share * len(triples)), min(1, len(triples)))
    kept = random.Random(seed).sample(range(len(triples)), count)
    if not options.triples_shuffled:
        kept.sort()
    return [triples[position] for position in kept]


def _note_origin(triple: Triple, passage: Passage, trace: Trace) -> None:
    """Note in `trace.origins` that a passage states a triple, under both texts that prompts have for it."""
    for text in (str(triple), " | ".join(triple.as_list())):
        trace.origins.setdefault(text, []).append(passage.id)


def _client_that_answers(
    answerer: Generator | ChatGenerator, tools: Tools, options: LoopOptions, trace: Trace
) -> QuestionClient | None:
    """The client of the call that answers; None if a Graph-LLM answers."""
    if options.reader == "common":
        return client_of("ras", tools, trace, load_prompts(PROMPTS, options.prompts))
    if isinstance(answerer, ChatGenerator):
        return answerer.client
    return None


def _evidence_of_steps(trace: Trace, options: LoopOptions) -> Found:
    """What the answer's prompt may hold: the triples of all steps, and passages if the reader sees their text."""
    facts_by_round = []
    for step in trace.steps:
        facts_by_round.append([" | ".join(triple) for triple in step.triples])
    passages = []
    if options.reader == "common" or options.evidence == "text":
        passages = passages_by_round(trace)
    return Found(passages, facts_by_round)


SYSTEM = System(
    name="ras",
    run=ras,
    needs_corpus=lambda options: options.retrieval and options.max_rounds > 0 and options.context != "static",
    needs_triples=lambda options: options.retrieval and options.max_rounds > 0 and options.evidence != "text",
    needs_reranker=lambda options: options.triples_per_step is not None and options.triples_chosen == "closest",
    options=LoopOptions,
    files=prompt_files(PLAN, ANSWER),
    plans=True,
)
