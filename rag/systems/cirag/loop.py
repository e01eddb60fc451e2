"""CIRAG: iterative construction and integration, then cascaded generation (Wei et al., sections 3.3 and 3.4).

One function over one question that reads like the paper. Where the paper leaves a choice:

- A triple that several passages of a round state is one candidate, of the best-ranked of them.
- A query equal to an earlier one (after answer normalisation) would retrieve the same, so it ends the loop.
- When it cannot be read whether to go on, also after a repair, the loop ends with what was kept ("malformed").
- The last round is integrated like the others, for its core triples; its next query is not searched.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import lru_cache

from tripletune.models.data.records import Passage, normalize_answer
from tripletune.models.data.triples import Triple
from tripletune.models.llm.client import Message
from tripletune.rag.retrieval.rerank import Reranker, top, verbalise
from tripletune.rag.retrieval.retrievers import Retrieved, Retriever
from tripletune.rag.systems import PromptSet, QuestionClient, System, Tools, load_prompts, need
from tripletune.rag.systems.cirag.extraction import Extracted, Extractor, LLMExtractor, StoredExtractor
from tripletune.rag.systems.cirag.generation import Generated, Pools, generate
from tripletune.rag.systems.cirag.integration import Decision, Round, integrate, shorten
from tripletune.rag.systems.cirag.options import EXTRACTION_PROMPTS, PROMPT_NAMES, CiragOptions
from tripletune.rag.trace import StopReason, Trace, TraceAction, TraceStep
from tripletune.rag.triples.sentences import Fact, provenance


async def cirag(
    question: str,
    llm: QuestionClient,
    integrator: QuestionClient,
    retriever: Retriever,
    extractor: Extractor,
    reranker: Reranker | None,
    prompts: PromptSet,
    trace: Trace,
    options: CiragOptions | None = None,
    search: str = "",
) -> Trace:
    """Answer one question with CIRAG.

    Args:
        question: The question x as the models read it.
        llm: Extracts triples and answers, M_R.
        integrator: Filters triples and asks the next query, K_D: the teacher, or a distilled student.
        retriever: Searches the corpus, R.
        extractor: Triples of a passage.
        reranker: Ranks triples by a query; None only where the options switch reranking off.
        prompts: The prompts of `PROMPT_NAMES`.
        trace: Where everything is noted; the clients count their calls in it.
        options: Defaults to the paper's settings.
        search: The question as it is searched in the first round, when that differs from `question`.

    Returns:
        The trace, with the answer in it.

    Raises:
        ValueError: the options ask for reranking and there is no reranker.
    """
    options = options or CiragOptions()
    started = time.perf_counter()
    query, asked = search or question, set[str]()
    history: list[Round] = []
    pools = Pools()
    read: dict[str, Extracted] = {}
    fit = _fit(integrator, trace, options.max_prompt_tokens)

    while not trace.stop_reason:
        asked.add(normalize_answer(query))
        # Construction: documents D_t, their triples with provenance M^D and M^S, the N best as candidates.
        hits = await retriever.retrieve(query, options.top_k)
        facts = await _construct(hits, extractor, llm, read, trace)
        candidates = _rerank(query, facts, reranker, options)
        _note_step(query, hits, candidates, read, trace)
        # Integration: eq. 1 with the history of eq. 2, then the projections of eq. 3 and 4.
        decision = await integrate(question, candidates, history, integrator, prompts, options, fit)
        history.append(Round(tuple(candidates), decision))
        pools.add(decision.core)
        _note_decision(decision, trace)
        query, trace.stop_reason = _next(decision, asked, len(history), options)

    generated = await generate(question, pools, llm, prompts, options)  # eq. 5 and 6
    _note_answer(generated, pools, trace)
    trace.seconds = time.perf_counter() - started
    return trace


async def _construct(
    hits: Sequence[Retrieved], extractor: Extractor, llm: QuestionClient, read: dict[str, Extracted], trace: Trace
) -> list[Fact]:
    """The triples of all passages with their provenance, each triple once; a passage is read once a question."""
    new = {hit.passage.id: hit.passage for hit in hits if hit.passage.id not in read}
    read.update(await _extract_all(new, extractor, llm))
    for name in new:
        for issue, count in read[name].issues.items():
            trace.tally(issue, count)
    facts: dict[Triple, Fact] = {}
    for hit in hits:
        for fact in provenance(hit.passage, read[hit.passage.id].triples):
            facts.setdefault(fact.triple, fact)
    return list(facts.values())


async def _extract_all(passages: dict[str, Passage], extractor: Extractor, llm: QuestionClient) -> dict[str, Extracted]:
    # Every call is made before any failure is told: a batch then waits for all of them together.
    calls = (extractor.extract(passage, llm) for passage in passages.values())
    results = await asyncio.gather(*calls, return_exceptions=True)
    found = {}
    for name, result in zip(passages, results):
        if isinstance(result, BaseException):
            raise result
        found[name] = result
    return found


def _rerank(query: str, facts: list[Fact], reranker: Reranker | None, options: CiragOptions) -> list[Fact]:
    if not options.rerank:
        return facts
    if reranker is None:
        raise ValueError("CIRAG reranks triples, and no reranker was given: name one, or set rerank=False")
    if not facts:
        return []
    return top(facts, reranker.scores(query, [verbalise(fact.triple) for fact in facts]), options.candidates)


def _fit(
    integrator: QuestionClient, trace: Trace, limit: int | None
) -> Callable[[list[Message]], list[Message]] | None:
    """What shortens the integrator's prompts, where the options limit them."""
    if limit is None:
        return None

    def fit(messages: list[Message]) -> list[Message]:
        kept, left_out = shorten(messages, integrator.count_tokens, limit)
        if left_out:
            trace.tally("shortened_prompts")
            trace.tally("candidates_left_out", left_out)
        return kept

    return fit


def _next(decision: Decision, asked: set[str], rounds: int, options: CiragOptions) -> tuple[str, StopReason]:
    """The next query, or the reason to stop."""
    if decision.query is None:
        return "", "malformed"
    if not decision.query:
        return "", "no_question"
    if rounds == options.max_rounds:
        return "", "max_rounds"
    if normalize_answer(decision.query) in asked:
        return "", "repeated_subquery"
    return decision.query, ""


def _note_step(
    query: str, hits: Sequence[Retrieved], candidates: Sequence[Fact], read: dict[str, Extracted], trace: Trace
) -> None:
    passages = [{"id": hit.passage.id, "title": hit.passage.title, "score": hit.score} for hit in hits]
    unknown = sum(not read[hit.passage.id].known for hit in hits)
    trace.steps.append(TraceStep(query, passages, [fact.triple.as_list() for fact in candidates], unknown))


def _note_decision(decision: Decision, trace: Trace) -> None:
    action = {None: None, "": "no_question"}.get(decision.query, "question")
    trace.actions.append(TraceAction(decision.reply, action, decision.query or ""))
    trace.malformed += action is None
    for fault in decision.faults:
        trace.tally(f"integration.{fault}")
    trace.tally("core_triples", len(decision.core))
    trace.details.setdefault("rounds", []).append(
        {
            "thought": decision.thought,
            "core_triples": [fact.triple.as_list() for fact in decision.core],
            "next_query": decision.query,
            "faults": list(decision.faults),
        }
    )


def _note_answer(generated: Generated, pools: Pools, trace: Trace) -> None:
    trace.answer = generated.answer
    trace.tally(f"answered.{generated.granularity}")
    if generated.skipped:
        trace.tally("granularities_without_context", generated.skipped)
    for attempt in generated.attempts:
        for fault in attempt.faults:
            trace.tally(f"answer.{fault}")
    trace.details["granularity"] = generated.granularity
    trace.details["answers"] = [
        {
            "granularity": attempt.granularity,
            "reply": attempt.reply,
            "answer": attempt.answer,
            "sufficient": attempt.sufficient,
        }
        for attempt in generated.attempts
    ]
    trace.details["core_passages"] = list(dict.fromkeys(fact.passage.id for fact in pools.facts.values()))


def _open_extractor(options: CiragOptions, prompts: PromptSet, tools: Tools) -> Extractor:
    """The extractor that the options name.

    Raises:
        ValueError: they name the triple store and there is none.
    """
    if options.extraction == "store":
        if tools.store is None:
            raise ValueError('extraction "store" reads triples extracted before, and no triple file was given')
        return StoredExtractor(tools.store)
    triples, entities = EXTRACTION_PROMPTS[options.extraction]
    return LLMExtractor(prompts, triples, entities, options.repairs, options.max_extraction_tokens)


@lru_cache(maxsize=4)
def _prompts(folder: str | None) -> PromptSet:
    return load_prompts(PROMPT_NAMES, folder)


async def _run(question: str, search: str, tools: Tools, options: CiragOptions) -> Trace:
    trace = Trace(question)
    client = need(tools, "llm", "cirag")
    llm, integrator = (
        QuestionClient(one, trace, tools.question_id, tools.sampling) for one in (client, tools.integrator or client)
    )
    prompts = _prompts(options.prompts)
    return await cirag(
        question,
        llm,
        integrator,
        need(tools, "retriever", "cirag"),
        _open_extractor(options, prompts, tools),
        tools.reranker,
        prompts,
        trace,
        options,
        search,
    )


SYSTEM = System(
    name="cirag",
    summary="constructs candidate triples, integrates them round by round, answers from triples, sentences or passages",
    run=_run,
    needs_corpus=lambda options: True,
    needs_triples=lambda options: options.extraction == "store",
    needs_reranker=lambda options: options.rerank,
    options=CiragOptions,
    model="llm",
    files=lambda options: _prompts(options.prompts).digests(),
)
