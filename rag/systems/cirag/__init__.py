"""CIRAG: iterative construction and integration, then cascaded generation (Wei et al., sections 3.3 and 3.4).

The function `cirag` follows the paper for one question. Where the paper leaves a choice:

- A triple that several passages of a round state is one candidate, from the best-ranked of these passages.
- A query that equals an earlier query (after answer normalisation) would retrieve the same passages, so the loop ends.
- If a decision to continue or stop cannot be read, even after a repair turn, the loop ends with the triples so far.
- The last round is also integrated, for its core triples; its next query is not searched.
- A refusal in other words ("Unknown", "Not mentioned") goes on to the next level, too; an empty level is left out.
- Evidence is a triple as a JSON list, or a sentence after its page's title, which explains pronouns.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from tripletune.core.calls import UnusableReply
from tripletune.core.concurrency import all_of
from tripletune.core.data.answers import normalize_answer
from tripletune.core.data.passages import Passage
from tripletune.core.data.records import Step
from tripletune.core.data.triples import FoundTriples, Triple
from tripletune.core.options import setting
from tripletune.llm.question_client import QuestionClient, ask_of_passage, load_prompts
from tripletune.llm.refusals import is_refusal
from tripletune.llm.reply_triples import find_triples
from tripletune.rag import Trace
from tripletune.rag.chat_generator import COMMON_READER, REFUSAL, finish, prompt_files, read_answer
from tripletune.rag.evidence import Found
from tripletune.rag.extractor import read_entities, titled_source, with_entities
from tripletune.rag.search.retrievers import Fact, Retrieved, fact_lines, highest_scored, provenance, verbalise_all
from tripletune.rag.systems import AnswerOptions, System, Tools, client_of, need
from tripletune.rag.systems._rounds import reason_to_stop
from tripletune.rag.systems.cirag.integration import (
    FORM,
    INTEGRATION_PROMPT,
    Decision,
    History,
    Round,
    messages_of,
    read_decision,
)
from tripletune.rag.systems.cirag.shortening import fewer_candidates, leave_out_candidates

Extraction = Literal["two_step", "joint", "store"]
GRANULARITIES = ("triples", "sentences", "passages")
DEFAULT = "default"
_OWN = (
    "cirag_entities", "cirag_triples", "cirag_joint", INTEGRATION_PROMPT,
    *(f"cirag_answer_{granularity}" for granularity in GRANULARITIES),
)  # fmt: skip
PROMPT_NAMES = (*_OWN, *COMMON_READER)
# The cumulative sets of triples, sentences and passages, which grow by union in the order of the rounds (eq. 3, 4).
# The key is triple and passage, so a triple that a later round keeps from another passage adds that passage.
Pools = dict[tuple[Triple, str], Fact]
# The triples of each passage that a question has read, by passage id; None if no reply could be used.
TriplesByPassage = dict[str, tuple[Triple, ...] | None]
_TRIPLES = 'write one JSON object {"triples": [["subject", "predicate", "object"], ...]} and nothing else'


@dataclass(frozen=True, slots=True)
class CiragOptions(AnswerOptions):
    """Settings of a run."""

    max_rounds: int = setting(4, "L, the maximum number of rounds (figure 8 varies L)", at_least=1)
    top_k: int = setting(10, "K, passages per round", at_least=1)
    candidates: int = setting(30, "N, triples to keep after reranking (figure 7: 10 to 100)", at_least=1)
    rerank: bool = setting(True, 'no: show all triples of the round to the integrator ("w/o reranker", table 2)')
    granularities: tuple[str, ...] = setting(
        GRANULARITIES,
        'levels of the cascade, in order (table 3), for example triples,passages for "w/o Sentence"',
        choices=GRANULARITIES,
    )
    extraction: Extraction = setting(
        "two_step", "source of a passage's triples: two steps (figures 9 and 10), one joint prompt, or a store"
    )
    history: History = setting(
        "chat",
        "how the integrator reads earlier rounds: as turns of the chat, so that a trajectory is one sequence, or in "
        "the section historical_context of one turn (figure 11)",
    )
    keep: int | None = setting(
        None,
        "replace the integrator by a rule: keep the first N candidates of round 1, then stop",
        at_least=1,
    )
    repairs: int = setting(1, "maximum repair turns for an unusable reply; 0 in the paper", at_least=0)
    prompts: str | None = setting(None, "folder of custom prompts: any of cirag_*.md")
    max_prompt_tokens: int | None = setting(
        None,
        "maximum tokens of the prompt of an integrator on this machine; the oldest candidates are left out first, as "
        "in training; none: no limit, as in the paper",
        at_least=1,
    )
    max_extraction_tokens: int = setting(1536, "maximum tokens of a reply with entities or triples", at_least=1)
    max_integration_tokens: int = setting(1024, "maximum tokens of the integrator's reply", at_least=1)
    max_thought_tokens: int = setting(412, "maximum tokens of the generator's thought, before its answer", at_least=1)

    def check(self) -> list[str]:
        """Check that the levels of the cascade are in order, and the options of the answer."""
        problems = AnswerOptions.check(self)
        in_order = [name for name in GRANULARITIES if name in self.granularities]
        if list(self.granularities) == in_order and in_order:
            return problems
        return [
            *problems,
            f"granularities is {','.join(self.granularities)!r}: give one or more of {', '.join(GRANULARITIES)}, "
            "in this order, each at most once",
        ]


async def cirag(question: str, search: str, tools: Tools, options: CiragOptions) -> Trace:
    """Answer one question with CIRAG; see `System.run`.

    Each round constructs candidates (passages and their triples), and integrates them: the integrator selects core
    triples and asks the next query. Then the cascade of `generate` answers. With `keep`, the first candidates become
    core triples without an integrator.
    """
    trace = Trace(question)
    teacher, retriever = need(tools.llm, "llm", "cirag"), need(tools.retriever, "retriever", "cirag")
    # M_R extracts triples and answers; K_D, the teacher or a distilled student, filters triples and writes queries.
    sampling = tools.integrator_sampling or tools.sampling
    drawn = replace(tools, llm=tools.integrator or teacher, sampling=sampling, scored_role="")
    prompts = load_prompts(PROMPT_NAMES, options.prompts)
    llm = client_of("cirag", tools, trace, prompts, options.repairs)
    integrator = client_of("cirag", drawn, trace, prompts, options.repairs, fewer_candidates)
    query = search
    queries_so_far: set[str] = set()
    history: list[Round] = []
    pools: Pools = {}
    core_by_round: list[list[Fact]] = []
    triples_by_passage: TriplesByPassage = {}

    while not trace.stop_reason:
        queries_so_far.add(normalize_answer(query))
        # Construction: documents D_t, their triples with provenance M^D and M^S, the N best as candidates.
        hits = await retriever.retrieve(query, options.top_k)
        await _read_triples_of_hits(hits, tools, options, llm, triples_by_passage, trace)
        facts = await asyncio.to_thread(_facts_of, hits, triples_by_passage)
        candidates = tuple(facts)
        if options.rerank and candidates:
            texts = verbalise_all(candidates)
            scores = await need(tools.reranker, "reranker", "cirag").scores(query, texts)
            candidates = tuple(highest_scored(candidates, scores, options.candidates))
        without_triples = [hit for hit in hits if triples_by_passage[hit.passage.id] is None]
        trace.add_step(Step(query, candidates), hits, len(without_triples))
        # Integration: eq. 1 with the history of eq. 2, then the projections of eq. 3 and 4.
        if options.keep is None:
            decision = await integrate(question, candidates, history, integrator, options)
        else:
            decision = Decision("", candidates[: options.keep], "")
        history.append(Round(candidates, decision))
        new_facts = []
        for triple in decision.core:
            fact = facts[triple]
            if (triple, fact.passage.id) not in pools:
                pools[triple, fact.passage.id] = fact
                new_facts.append(fact)
        core_by_round.append(new_facts)
        _note_decision(decision, trace)
        query = decision.query or ""
        if query:
            trace.stop_reason = reason_to_stop(query, queries_so_far, len(history), options.max_rounds)
        elif decision.query is None:
            trace.stop_reason = "malformed"
        else:
            trace.stop_reason = "no_question"

    trace.details["core_passages"] = list({fact.passage.id: fact.passage for fact in pools.values()})
    found = _evidence_by_round(core_by_round)
    _note_origins(pools, trace)
    # Generation: section 3.4.
    answer = partial(generate, question, pools, llm, options, trace)
    return await finish(trace, options, llm, found, answer)


def _evidence_by_round(core_by_round: Sequence[Sequence[Fact]]) -> Found:
    """The core facts and their passages, by round, for the common reader, which gets the best of each round."""
    passages = []
    facts = []
    for core in core_by_round:
        passages.append([fact.passage for fact in core])
        facts.append(fact_lines(fact.triple for fact in core))
    return Found(passages, facts)


async def _read_triples_of_hits(
    hits: Sequence[Retrieved],
    tools: Tools,
    options: CiragOptions,
    llm: QuestionClient,
    triples_by_passage: TriplesByPassage,
    trace: Trace,
) -> None:
    """Add to `triples_by_passage` the triples of hits that this question has not read; None where none can be read."""
    new = {hit.passage.id: hit.passage for hit in hits if hit.passage.id not in triples_by_passage}
    started = time.perf_counter()
    if options.extraction == "store":
        extracted = await need(tools.store, "store", "cirag").read(list(new.values()))
    else:
        issues = Counter[str]()
        extracted = await all_of(passage_triples(passage, llm, issues, options) for passage in new.values())
        for issue, count in sorted(issues.items()):
            if count:
                trace.tally(issue, count)
    triples_by_passage.update(zip(new, extracted))
    trace.structuring_seconds += time.perf_counter() - started


def _facts_of(hits: Sequence[Retrieved], triples_by_passage: TriplesByPassage) -> dict[Triple, Fact]:
    """The distinct triples of passages with their provenance, which is the best-ranked passage that states them.

    This runs in a thread, because splitting sentences takes a while.
    """
    facts: dict[Triple, Fact] = {}
    for hit in hits:
        for fact in provenance(hit.passage, triples_by_passage[hit.passage.id] or ()):
            facts.setdefault(fact.triple, fact)
    return facts


async def passage_triples(
    passage: Passage, llm: QuestionClient, issues: Counter[str], options: CiragOptions
) -> tuple[Triple, ...] | None:
    """The distinct triples of a passage, in order (figures 9 and 10); None if no reply can be used.

    A call depends only on the passage, so the ledger answers it for all later questions (the paper caches extraction
    offline). `issues` counts faults of replies by kind.
    """
    limit = options.max_extraction_tokens
    user = titled_source(passage.title, passage.text)
    if options.extraction == "joint":
        call = "joint"
    else:
        call = "triples"
        entities = await ask_of_passage(llm, "entities", user, read_entities, limit, issues)
        # Without a list of entities, triples are extracted all the same.
        user = with_entities(user, entities or ())
    reply = await ask_of_passage(llm, call, user, read_passage_triples, limit, issues)
    if reply is None:
        return None
    issues["malformed_triples"] += reply.malformed
    issues["incomplete_json"] += reply.cut_off
    return reply.triples


def read_passage_triples(text: str) -> FoundTriples:
    """Read distinct triples in the form `{"triples": [[s, p, o], ...]}`, or in others of `find_triples`.

    Complete triples of a cut-off list are kept. An empty list is allowed, since some passages state no facts.
    """
    reply = find_triples(text, _TRIPLES)
    if reply.cut_off and not reply.triples:
        raise UnusableReply("bad_json", f"In the reply: the JSON in it is cut off or malformed; {_TRIPLES}.")
    if reply.malformed and not reply.triples:
        raise UnusableReply("no_triples", f"Nothing in the list is a triple of three non-empty strings; {_TRIPLES}.")
    return reply._replace(triples=tuple(dict.fromkeys(reply.triples)))


async def integrate(
    question: str, candidates: Sequence[Triple], history: Sequence[Round], llm: QuestionClient, options: CiragOptions
) -> Decision:
    """K_D of eq. 1: filter the candidates and find the next query.

    If a reply does not say whether to continue or stop, at most `options.repairs` repair turns follow. If they fail
    too, the decision has the readable parts of the reply, without a query.
    """
    messages = messages_of(llm.prompts.texts[INTEGRATION_PROMPT], question, candidates, history, options.history)
    left_out = 0
    if options.max_prompt_tokens is not None:
        messages, left_out = leave_out_candidates(messages, llm.count_tokens, options.max_prompt_tokens)
    earlier_candidates: list[Triple] = []
    for round_ in history:
        earlier_candidates += round_.candidates
    # What each reply says: the first one, then those to repair turns.
    attempts: list[Decision] = []

    def read(text: str) -> Decision:
        """The decision of a reply; without a next step it is unusable, but kept, since its core triples still count."""
        decision = read_decision(text, candidates, earlier_candidates)
        attempts.append(decision)
        if decision.query is None:
            raise UnusableReply(decision.faults[-1], f"It cannot be read what to do next: {FORM}.")
        return decision

    try:
        decision = await llm.ask("integrate", messages, read, options.max_integration_tokens)
    except UnusableReply:
        decision = attempts[-1]
    faults = ["repaired"] * (len(attempts) - 1)
    for attempt in attempts:
        faults += attempt.faults
    return replace(decision, faults=tuple(faults), left_out=left_out)


def _note_decision(decision: Decision, trace: Trace) -> None:
    """Record a decision as an action, in the counts and under "rounds", by names that reports and traces have."""
    action = None
    if decision.query is None:
        trace.malformed += 1
    else:
        action = "question" if decision.query else "no_question"
    trace.add_action(decision.reply, action, decision.query or "")
    for fault in decision.faults:
        trace.tally(f"integration.{fault}")
    if decision.left_out:
        trace.tally("shortened_prompts")
        trace.tally("candidates_left_out", decision.left_out)
    trace.tally("core_triples", len(decision.core))
    noted = {
        "thought": decision.thought,
        "core_triples": [triple.as_list() for triple in decision.core],
        "next_query": decision.query,
        "faults": list(decision.faults),
    }
    trace.details.setdefault("rounds", []).append(noted)


def context_of(pools: Pools, granularity: str) -> list[str]:
    """The evidence C^(g) of one level, as distinct texts: triples, sentences with titles, or whole passages."""
    if granularity == "passages":
        passages = {fact.passage.id: fact.passage for fact in pools.values()}
        return [passage.content for passage in passages.values()]
    texts: dict[str, None] = {}
    for fact in pools.values():
        if granularity == "triples":
            text = json.dumps(fact.triple.as_list(), ensure_ascii=False)
        else:
            text = f"[{' '.join(fact.passage.title.split())}] {' '.join(fact.sentence.split())}"
        texts[text] = None
    return list(texts)


def _note_origins(pools: Pools, trace: Trace) -> None:
    """Note which passage states a fact, under every text that a prompt may have for the fact."""
    for key, fact in pools.items():
        texts = fact_lines([fact.triple])
        for granularity in GRANULARITIES:
            texts += context_of({key: fact}, granularity)
        for text in texts:
            trace.origins.setdefault(text, []).append(fact.passage.id)


async def generate(question: str, pools: Pools, llm: QuestionClient, options: CiragOptions, trace: Trace) -> str:
    """ACMG (section 3.4): answer from the smallest sufficient context (eq. 6); the trace records its level g*.

    If every level refuses, the last level's reply is the answer ("default"). A level without context is skipped and
    counted, unless it is the last level.
    """
    answer = ""
    trace.details |= {"granularity": DEFAULT, "answers": []}
    for granularity in options.granularities:
        context = context_of(pools, granularity)
        if not context and granularity != options.granularities[-1]:
            trace.tally("granularities_without_context")
            continue
        chat = llm.prompts.chat(f"cirag_answer_{granularity}", answer_text(question, granularity, context))
        sampling = llm.up_to(options.max_thought_tokens + options.max_answer_tokens)
        completion = await llm.chat(chat, role=f"cirag.answer.{granularity}", sampling=sampling)
        answer, faults = read_answer(completion.text, not completion.is_whole, long=options.answer == "long")
        for fault in faults:
            trace.tally(f"answer.{fault}")
        # Suf(a): the answer is neither empty, nor the refusal word, nor a refusal in other words.
        refused = is_refusal(answer)
        sufficient = bool(answer) and not refused
        if refused and normalize_answer(answer) != normalize_answer(REFUSAL):
            trace.tally("answer.refused_in_other_words")
        trace.details["answers"].append(
            {"granularity": granularity, "reply": completion.text, "answer": answer, "sufficient": sufficient}
        )
        if sufficient:
            trace.details["granularity"] = granularity
            break
    trace.tally(f"answered.{trace.details['granularity']}")
    return answer


def answer_text(question: str, granularity: str, context: list[str]) -> str:
    """The user turn for the generator: the evidence of one level, and the question."""
    gap = "\n\n" if granularity == "passages" else "\n"
    evidence = gap.join(context) or "(nothing was found)"
    return f"{granularity.capitalize()}:\n{evidence}\n\nQuestion: {' '.join(question.split())}"


SYSTEM = System(
    name="cirag",
    run=cirag,
    needs_triples=lambda options: options.extraction == "store",
    needs_reranker=lambda options: options.rerank,
    options=CiragOptions,
    model="llm",
    files=prompt_files(*_OWN, names=PROMPT_NAMES),
)
