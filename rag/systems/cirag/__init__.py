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
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

from tripletune.models.data.records import Passage, Step, normalize_answer
from tripletune.models.data.triples import Triple
from tripletune.models.options import require, setting
from tripletune.rag.retrievers import Reranker, Retrieved, top, verbalise
from tripletune.rag.systems import PromptSet, QuestionClient, System, Tools, load_prompts, need
from tripletune.rag.systems.cirag.extraction import (
    Extracted,
    Extractor,
    Fact,
    LLMExtractor,
    StoredExtractor,
    provenance,
)
from tripletune.rag.systems.cirag.generation import GRANULARITIES, Generated, Pools, generate
from tripletune.rag.systems.cirag.integration import INTEGRATION_PROMPT, Decision, History, Round, integrate
from tripletune.rag.trace import StopReason, Trace, TraceAction

Extraction = Literal["two_step", "joint", "store"]
PROMPT_NAMES = (
    "cirag_entities",
    "cirag_triples",
    "cirag_joint",
    INTEGRATION_PROMPT,
    *(f"cirag_answer_{granularity}" for granularity in GRANULARITIES),
)


@dataclass(frozen=True, slots=True)
class CiragOptions:
    """Settings of a run.

    Raises:
        ValueError: a value is out of range; all problems are named at once.
    """

    max_rounds: int = setting(4, "L, most rounds (figure 8 varies it)", at_least=1)
    top_k: int = setting(10, "K, passages per round", at_least=1)
    candidates: int = setting(30, "N, triples that are left after reranking (figure 7: 10 to 100)", at_least=1)
    rerank: bool = setting(True, 'no shows the integrator all triples of the round ("w/o reranker", table 2)')
    granularities: tuple[str, ...] = setting(
        GRANULARITIES,
        "levels of the cascade, in order; one is a single granularity, two are a two-level cascade (table 3): "
        'triples,passages is "w/o Sentence"',
        choices=GRANULARITIES,
    )
    extraction: Extraction = setting(
        "two_step",
        "triples of a passage: in two steps (figures 9 and 10), from one joint prompt, or from a store",
        choices=get_args(Extraction),
    )
    history: History = setting(
        "chat",
        "how the integrator reads earlier rounds: as turns of the chat, in which one sequence holds a whole "
        "trajectory, or as the section historical_context of one turn (figure 11)",
        choices=get_args(History),
    )
    repairs: int = setting(1, "most repair turns for a reply that can't be used; the paper has none", at_least=0)
    prompts: str | None = setting(None, "folder with prompts of one's own: any of cirag_*.md")
    max_prompt_tokens: int | None = setting(
        None,
        "longest prompt of the integrator: candidates of the oldest rounds are left out first, as in its training; it "
        "needs an integrator on this machine; none shows all candidates of all rounds, as in the paper",
        at_least=1,
    )
    max_extraction_tokens: int = setting(1536, "longest reply with entities or triples", at_least=1)
    max_integration_tokens: int = setting(1024, "longest reply of the integrator", at_least=1)
    max_generation_tokens: int = setting(512, "longest reply of the generator, its thought included", at_least=1)

    def __post_init__(self) -> None:
        require(self)

    def check(self) -> list[str]:
        """What `setting` can't say: the levels of the cascade have an order."""
        chosen = [name for name in GRANULARITIES if name in self.granularities]
        if list(self.granularities) == chosen and chosen:
            return []
        return [
            f"granularities is {','.join(self.granularities)!r}: name one or more of {', '.join(GRANULARITIES)}, "
            "in this order and each once"
        ]


async def cirag(question: str, search: str, tools: Tools, options: CiragOptions) -> Trace:
    """Answer one question with CIRAG; see `System.run`.

    Raises:
        ValueError: there is no model, corpus, store or reranker, and the options ask for one.
    """
    started = time.perf_counter()
    trace = Trace(question)
    teacher, retriever = need(tools, "llm", "cirag"), need(tools, "retriever", "cirag")
    # M_R extracts triples and answers; K_D, the teacher or a distilled student, filters triples and asks on.
    llm, integrator = (
        QuestionClient(one, trace, tools.question_id, tools.sampling) for one in (teacher, tools.integrator or teacher)
    )
    prompts = _prompts(options.prompts)
    extractor = _open_extractor(tools, options, prompts)
    query, asked = search, set[str]()
    history: list[Round] = []
    pools = Pools()
    read: dict[str, Extracted] = {}

    while not trace.stop_reason:
        asked.add(normalize_answer(query))
        # Construction: documents D_t, their triples with provenance M^D and M^S, the N best as candidates.
        hits = await retriever.retrieve(query, options.top_k)
        facts = await _construct(hits, extractor, llm, read, trace)
        candidates = await _rerank(query, facts, tools.reranker, options)
        unknown = sum(not read[hit.passage.id].known for hit in hits)
        trace.add_step(Step(query, tuple(fact.triple for fact in candidates)), hits, unknown)
        # Integration: eq. 1 with the history of eq. 2, then the projections of eq. 3 and 4.
        decision = await integrate(
            question, candidates, history, integrator, prompts,
            options.history, options.repairs, options.max_integration_tokens, options.max_prompt_tokens,
        )  # fmt: skip
        history.append(Round(tuple(candidates), decision))
        pools.add(decision.core)
        _note_decision(decision, trace)
        query, trace.stop_reason = _next(decision, asked, len(history), options)

    # Eq. 5 and 6.
    generated = await generate(question, pools, llm, prompts, options.granularities, options.max_generation_tokens)
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


async def _rerank(query: str, facts: list[Fact], reranker: Reranker | None, options: CiragOptions) -> list[Fact]:
    if not options.rerank:
        return facts
    if reranker is None:
        raise ValueError("CIRAG reranks triples, and no reranker was given: name one, or set rerank=False")
    if not facts:
        return []
    scores = await reranker.scores(query, [verbalise(fact.triple) for fact in facts])
    return top(facts, scores, options.candidates)


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


def _note_decision(decision: Decision, trace: Trace) -> None:
    action = {None: None, "": "no_question"}.get(decision.query, "question")
    trace.actions.append(TraceAction(decision.reply, action, decision.query or ""))
    trace.malformed += action is None
    for fault in decision.faults:
        trace.tally(f"integration.{fault}")
    if decision.left_out:
        trace.tally("shortened_prompts")
        trace.tally("candidates_left_out", decision.left_out)
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
    told = ("granularity", "reply", "answer", "sufficient")
    trace.details["answers"] = [{name: getattr(attempt, name) for name in told} for attempt in generated.attempts]
    trace.details["core_passages"] = list(dict.fromkeys(fact.passage.id for fact in pools.facts.values()))


@lru_cache(maxsize=4)
def _prompts(folder: str | None) -> PromptSet:
    return load_prompts(PROMPT_NAMES, folder)


def _open_extractor(tools: Tools, options: CiragOptions, prompts: PromptSet) -> Extractor:
    if options.extraction == "store":
        return StoredExtractor(need(tools, "store", "cirag"))
    steps = {"two_step": ("cirag_triples", "cirag_entities"), "joint": ("cirag_joint", None)}[options.extraction]
    return LLMExtractor(prompts, *steps, options.repairs, options.max_extraction_tokens)


SYSTEM = System(
    name="cirag",
    summary="constructs candidate triples, integrates them round by round, answers from triples, sentences or passages",
    run=cirag,
    needs_corpus=lambda options: True,
    needs_triples=lambda options: options.extraction == "store",
    needs_reranker=lambda options: options.rerank,
    options=CiragOptions,
    model="llm",
    files=lambda options: _prompts(options.prompts).digests(),
)
