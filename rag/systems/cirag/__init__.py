"""CIRAG: iterative construction and integration, then cascaded generation (Wei et al., sections 3.3 and 3.4).

The function `cirag` follows the paper for one question. Where the paper leaves a choice:

- A triple that several passages of a round state is one candidate, from the best-ranked of these passages.
- A query that equals an earlier query (after answer normalisation) would retrieve the same passages, so the loop ends.
- If a decision to continue or stop cannot be read, even after a repair turn, the loop ends with the triples so far.
- The last round is also integrated, for its core triples; its next query is not searched.
- A refusal in other words ("Unknown", "Not mentioned") goes on to the next level, too; a level without evidence is left
  out.
- Evidence is a triple as a JSON list, or a sentence after its page's title, which explains pronouns.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Literal

from tripletune.core.calls import UnusableReply
from tripletune.core.data.answers import normalize_answer
from tripletune.core.data.passages import Passage
from tripletune.core.data.records import Step
from tripletune.core.data.triples import FoundTriples, Triple
from tripletune.core.options import setting
from tripletune.llm.concurrency import all_of
from tripletune.llm.question_client import QuestionClient, load_prompts
from tripletune.llm.refusals import is_refusal
from tripletune.llm.reply_triples import find_triples
from tripletune.rag import Trace
from tripletune.rag.chat_generator import READER, REFUSAL, Found, finish, prompt_files, read_answer
from tripletune.rag.extractor import ask_of_passage, read_entities, titled_source, with_entities
from tripletune.rag.search.retrievers import Fact, Retrieved, provenance, top, verbalise
from tripletune.rag.systems import AnswerOptions, System, Tools, client_of, need
from tripletune.rag.systems._rounds import reason_to_stop
from tripletune.rag.systems.cirag.integration import (
    FORM,
    INTEGRATION_PROMPT,
    Decision,
    History,
    Round,
    fewer_candidates,
    messages_of,
    read_decision,
    shorten,
)

Extraction = Literal["two_step", "joint", "store"]
GRANULARITIES = ("triples", "sentences", "passages")
DEFAULT = "default"
_OWN = (
    "cirag_entities", "cirag_triples", "cirag_joint", INTEGRATION_PROMPT,
    *(f"cirag_answer_{granularity}" for granularity in GRANULARITIES),
)  # fmt: skip
PROMPT_NAMES = (*_OWN, READER)
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
        """Check that the levels of the cascade are in order."""
        chosen = [name for name in GRANULARITIES if name in self.granularities]
        if list(self.granularities) == chosen and chosen:
            return []
        return [
            f"granularities is {','.join(self.granularities)!r}: give one or more of {', '.join(GRANULARITIES)}, "
            "in this order, each at most once"
        ]


async def cirag(question: str, search: str, tools: Tools, options: CiragOptions) -> Trace:
    """Answer one question with CIRAG; see `System.run`."""
    trace = Trace(question)
    teacher, retriever = need(tools, "llm", "cirag"), need(tools, "retriever", "cirag")
    # M_R extracts triples and answers; K_D, the teacher or a distilled student, filters triples and writes queries.
    drawn = replace(tools, llm=tools.integrator or teacher, sampling=tools.integrator_sampling or tools.sampling)
    prompts = load_prompts(PROMPT_NAMES, options.prompts)
    llm = client_of("cirag", tools, trace, prompts, options.repairs)
    integrator = client_of("cirag", drawn, trace, prompts, options.repairs, fewer_candidates)
    query, asked = search, set[str]()
    history: list[Round] = []
    pools: Pools = {}
    read: dict[str, tuple[Triple, ...] | None] = {}

    while not trace.stop_reason:
        asked.add(normalize_answer(query))
        # Construction: documents D_t, their triples with provenance M^D and M^S, the N best as candidates.
        hits = await retriever.retrieve(query, options.top_k)
        facts = await _construct(hits, tools, options, llm, read, trace)
        candidates = tuple(facts)
        if options.rerank and candidates:
            reranker, texts = need(tools, "reranker", "cirag"), [verbalise(triple) for triple in candidates]
            candidates = tuple(top(candidates, await reranker.scores(query, texts), options.candidates))
        trace.add_step(Step(query, candidates), hits, sum(read[hit.passage.id] is None for hit in hits))
        # Integration: eq. 1 with the history of eq. 2, then the projections of eq. 3 and 4.
        if options.keep is None:
            decision = await integrate(question, candidates, history, integrator, options)
        else:
            decision = Decision("", candidates[: options.keep], "")
        history.append(Round(candidates, decision))
        for fact in map(facts.__getitem__, decision.core):
            pools.setdefault((fact.triple, fact.passage.id), fact)
        _note_decision(decision, trace)
        query = decision.query or ""
        if query:
            trace.stop_reason = reason_to_stop(query, asked, len(history), options.max_rounds)
        else:
            trace.stop_reason = "malformed" if decision.query is None else "no_question"

    core = {fact.passage.id: fact.passage for fact in pools.values()}
    trace.details["core_passages"] = list(core)
    kept = dict.fromkeys(" | ".join(fact.triple.as_list()) for fact in pools.values())
    for key, fact in pools.items():
        for text in chain([" | ".join(fact.triple.as_list())], *(context_of({key: fact}, g) for g in GRANULARITIES)):
            trace.origins.setdefault(text, []).append(fact.passage.id)
    own = partial(generate, question, pools, llm, options, trace)
    return await finish(trace, options, llm, Found(list(core.values()), list(kept)), own)


async def _construct(
    hits: Sequence[Retrieved], tools: Tools, options: CiragOptions, llm: QuestionClient,
    read: dict[str, tuple[Triple, ...] | None], trace: Trace,
) -> dict[Triple, Fact]:  # fmt: skip
    """The distinct triples of all passages with their provenance; each passage is read once per question."""
    new = {hit.passage.id: hit.passage for hit in hits if hit.passage.id not in read}
    started = time.perf_counter()
    if options.extraction == "store":
        read.update(zip(new, await need(tools, "store", "cirag").read(list(new.values()))))
    else:
        issues = Counter[str]()
        calls = (passage_triples(passage, llm, issues, options) for passage in new.values())
        read.update(zip(new, await all_of(calls)))
        for issue, count in sorted((+issues).items()):
            trace.tally(issue, count)
    trace.structuring_seconds += time.perf_counter() - started
    # This runs in a thread, because splitting sentences takes a while.
    found = await asyncio.to_thread(lambda: [provenance(hit.passage, read[hit.passage.id] or ()) for hit in hits])
    facts: dict[Triple, Fact] = {}
    for fact in chain.from_iterable(found):
        facts.setdefault(fact.triple, fact)
    return facts


async def passage_triples(
    passage: Passage, llm: QuestionClient, issues: Counter[str], options: CiragOptions
) -> tuple[Triple, ...] | None:
    """The distinct triples of a passage, in order (figures 9 and 10); None if no reply can be used.

    A call depends only on the passage, so the ledger answers it for all later questions (the paper caches extraction
    offline). `issues` counts faults of replies by kind.
    """
    joint, limit = options.extraction == "joint", options.max_extraction_tokens
    user = titled_source(passage.title, passage.text)
    if not joint:
        # Without a list of entities, triples are extracted all the same.
        entities = await ask_of_passage(llm, "entities", user, read_entities, limit, issues) or ()
        user = with_entities(user, entities)
    call = "joint" if joint else "triples"
    if (found := await ask_of_passage(llm, call, user, read_passage_triples, limit, issues)) is None:
        return None
    issues += Counter({"malformed_triples": found.malformed, "incomplete_json": found.cut_off})
    return found.triples


def read_passage_triples(text: str) -> FoundTriples:
    """Read distinct triples in the form `{"triples": [[s, p, o], ...]}`, or in others of `find_triples`.

    Complete triples of a cut-off list are kept. An empty list is allowed, since some passages state no facts.
    """
    found = find_triples(text, _TRIPLES)
    if found.cut_off and not found.triples:
        raise UnusableReply("bad_json", f"In the reply: the JSON in it is cut off or malformed; {_TRIPLES}.")
    if found.malformed and not found.triples:
        raise UnusableReply("no_triples", f"Nothing in the list is a triple of three non-empty strings; {_TRIPLES}.")
    return found._replace(triples=tuple(dict.fromkeys(found.triples)))


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
        messages, left_out = shorten(messages, llm.count_tokens, options.max_prompt_tokens)
    earlier = [triple for one in history for triple in one.candidates]
    read: list[Decision] = []

    def parse(text: str) -> None:
        read.append(read_decision(text, candidates, earlier))
        if read[-1].query is None:
            raise UnusableReply(read[-1].faults[-1], f"It cannot be read what to do next: {FORM}.")

    with contextlib.suppress(UnusableReply):
        await llm.ask("integrate", messages, parse, options.max_integration_tokens)
    faults = ("repaired",) * (len(read) - 1) + tuple(fault for one in read for fault in one.faults)
    return replace(read[-1], faults=faults, left_out=left_out)


def _note_decision(decision: Decision, trace: Trace) -> None:
    action = {None: None, "": "no_question"}.get(decision.query, "question")
    trace.add_action(decision.reply, action, decision.query or "")
    trace.malformed += action is None
    for fault in decision.faults:
        trace.tally(f"integration.{fault}")
    if decision.left_out:
        trace.tally("shortened_prompts")
        trace.tally("candidates_left_out", decision.left_out)
    trace.tally("core_triples", len(decision.core))
    core = [triple.as_list() for triple in decision.core]
    noted = {"thought": decision.thought, "core_triples": core, "next_query": decision.query}
    trace.details.setdefault("rounds", []).append({**noted, "faults": list(decision.faults)})


# The cumulative sets of triples, sentences and passages, which grow by union in the order of the rounds (eq. 3, 4).
# The key is triple and passage, so a triple that a later round keeps from another passage adds that passage.
Pools = dict[tuple[Triple, str], Fact]


def context_of(pools: Pools, granularity: str) -> list[str]:
    """The evidence C^(g) of one level, as distinct texts."""
    if granularity == "passages":
        return list({fact.passage.id: fact.passage.content for fact in pools.values()}.values())
    shown = (
        json.dumps(fact.triple.as_list(), ensure_ascii=False)
        if granularity == "triples"
        else f"[{' '.join(fact.passage.title.split())}] {' '.join(fact.sentence.split())}"
        for fact in pools.values()
    )
    return list(dict.fromkeys(shown))


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
        completion = await llm.chat(
            llm.prompts.chat(f"cirag_answer_{granularity}", answer_text(question, granularity, context)),
            role=f"cirag.answer.{granularity}",
            sampling=llm.up_to(options.max_thought_tokens + options.max_answer_tokens),
        )
        cut_off, long = completion.finish_reason == "length", options.answer == "long"
        answer, faults = read_answer(completion.text, cut_off, long)
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
