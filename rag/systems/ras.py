"""Retrieval-And-Structuring: plan, retrieve, structure, answer (RAS, section 3, eq. 1-8).

One function over one question that reads like the paper. Where the paper leaves a choice:

- A malformed plan is counted; it means `[SUFFICIENT]` when there is evidence, else `[SUBQ]` with the question.
- `[SUFFICIENT]` before any retrieval and `[NO_RETRIEVAL]` after it both end planning, and are counted as unexpected.
- A sub-query equal to an earlier one (after answer normalisation) would retrieve the same, so it ends planning.
- When the last allowed round is done, the plan could change nothing, so it is not asked for.
"""

from __future__ import annotations

import random
import time

from tripletune.models.data.records import Action, ModelInput, Step, normalize_answer
from tripletune.models.data.triples import Triple
from tripletune.models.llm.client import Generator
from tripletune.models.rendering import Plan, parse_plan
from tripletune.rag.chat_generator import ANSWER, PLAN, chat_generator, prompt_files
from tripletune.rag.retrievers import Retrieved, Retriever
from tripletune.rag.systems import LoopOptions, System, Tools, need
from tripletune.rag.trace import StopReason, Trace
from tripletune.rag.triple_store import TripleSource


async def ras(
    question: str,
    planner: Generator,
    answerer: Generator,
    retriever: Retriever | None,
    store: TripleSource | None,
    options: LoopOptions | None = None,
    search: str = "",
) -> Trace:
    """Answer one question with RAS.

    Args:
        question: The main question Q as the models read it.
        planner: Replies to planning inputs.
        answerer: Replies to the answering input; usually the same model.
        retriever: Searches the corpus; None only when the options switch retrieval off.
        store: Triples by passage; None is allowed with `evidence="text"`.
        options: Defaults to the paper's settings.
        search: The question as it is searched for q_0, when that differs from `question`.

    Returns:
        The trace, with the answer in it.

    Raises:
        ValueError: the options ask for retrieval or triples and there is no retriever or store.
    """
    options = options or LoopOptions()
    started = time.perf_counter()
    trace = Trace(question)
    main_query = search or question
    steps: tuple[Step, ...] = ()
    asked: set[str] = set()

    trace.stop_reason = _before_planning(options)
    if trace.stop_reason == "single_pass":
        steps = (await _retrieve_and_structure(main_query, retriever, store, options, trace),)
    while not trace.stop_reason:
        plan = await _plan(question, steps, planner, options, trace)  # eq. 1 and 2
        query, trace.stop_reason = _next_query(plan, steps, main_query, options)
        if trace.stop_reason:
            break
        if not steps and options.first_query == "main_question":
            query = main_query
        if normalize_answer(query) in asked:
            trace.stop_reason = "repeated_subquery"
            break
        asked.add(normalize_answer(query))
        steps += (await _retrieve_and_structure(query, retriever, store, options, trace),)  # eq. 3, 4 and 6
        if len(steps) == options.max_rounds:
            trace.stop_reason = "max_rounds"

    # Eq. 7 without steps, eq. 8 with them.
    answer = await answerer.generate(
        ModelInput("answering", question, steps), options.max_answer_tokens, options.evidence
    )
    trace.count(answer)
    trace.answer = answer.text.strip()
    trace.seconds = time.perf_counter() - started
    return trace


def _before_planning(options: LoopOptions) -> StopReason:
    if not options.retrieval:
        return "retrieval_off"
    if options.max_rounds == 0:
        return "max_rounds"
    return "" if options.planning else "single_pass"


async def _plan(question: str, steps: tuple[Step, ...], planner: Generator, options: LoopOptions, trace: Trace) -> Plan:
    reply = await planner.generate(ModelInput("planning", question, steps), options.max_plan_tokens, options.evidence)
    trace.count(reply)
    plan = parse_plan(reply.text)
    trace.add_plan(reply.text, plan, plan.action is (Action.NO_RETRIEVAL if steps else Action.SUFFICIENT))
    return plan


def _next_query(plan: Plan, steps: tuple[Step, ...], main_query: str, options: LoopOptions) -> tuple[str, StopReason]:
    """The query to search next, or the reason to stop."""
    if plan.action is Action.SUBQ:
        return plan.subquery, ""
    if plan.action is not None:
        # After retrieval both markers say the same: nothing is missing.
        return "", "no_retrieval" if plan.action is Action.NO_RETRIEVAL and not steps else "sufficient"
    has_evidence = any(step.triples if options.evidence == "triples" else step.text for step in steps)
    return ("", "malformed") if has_evidence else (main_query, "")


async def _retrieve_and_structure(
    query: str, retriever: Retriever | None, store: TripleSource | None, options: LoopOptions, trace: Trace
) -> Step:
    """t_i by retrieval (eq. 3) and g_i by look-up (eq. 4); repeated triples are kept once, in passage order."""
    if retriever is None:
        raise ValueError("RAS retrieves passages, and no retriever was given: name a corpus, or set retrieval=False")
    hits = await retriever.retrieve(query, options.top_k)
    triples, missing = _structure(hits, store, options, f"{options.share_seed} {trace.question} {query}")
    step = Step(query, triples, "\n".join(hit.passage.content for hit in hits))
    trace.add_step(step, hits, missing)
    return step


def _structure(
    hits: list[Retrieved], store: TripleSource | None, options: LoopOptions, seed: str
) -> tuple[tuple[Triple, ...], int]:
    if store is None:
        if options.evidence == "triples":
            raise ValueError('RAS reads triples, and no triple store was given: name one, or set evidence="text"')
        return (), 0
    found = [store.get(hit.passage) for hit in hits]
    distinct = list(dict.fromkeys(triple for triples in found if triples for triple in triples))
    if options.triples_share < 1:
        kept = random.Random(seed).sample(range(len(distinct)), round(options.triples_share * len(distinct)))
        distinct = [distinct[number] for number in sorted(kept)]
    return tuple(distinct[: options.triples_per_step]), sum(triples is None for triples in found)


async def _run(question: str, search: str, tools: Tools, options: LoopOptions) -> Trace:
    retriever = need(tools, "retriever", "ras") if _retrieves(options) else None
    # A chat model takes the places that no Graph-LLM has: both, or one of them (figure 3).
    planner, answerer = (one or chat_generator(tools, options.prompts) for one in (tools.planner, tools.answerer))
    return await ras(question, planner, answerer, retriever, tools.store, options, search)


def _retrieves(options: LoopOptions) -> bool:
    return options.retrieval and options.max_rounds > 0


SYSTEM = System(
    name="ras",
    summary="plans sub-queries, retrieves for each, reads the passages' triples, answers",
    run=_run,
    needs_corpus=_retrieves,
    needs_triples=lambda options: _retrieves(options) and options.evidence == "triples",
    files=prompt_files(PLAN, ANSWER),
    plans=True,
)
