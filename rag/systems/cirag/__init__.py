"""CIRAG: iterative construction and integration, then cascaded generation (Wei et al., sections 3.3 and 3.4).

One function over one question that reads like the paper. Where the paper leaves a choice:

- A triple that several passages of a round state is one candidate, of the best-ranked of them.
- A query equal to an earlier one (after answer normalisation) would retrieve the same, so it ends the loop.
- When it cannot be read whether to go on, also after a repair, the loop ends with what was kept ("malformed").
- The last round is integrated like the others, for its core triples; its next query is not searched.
- Evidence is shown as a triple's JSON list, and a sentence after its page's title, without which "she" has no name.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, get_args

from tripletune.models.data.records import Step, normalize_answer
from tripletune.models.data.triples import Triple
from tripletune.models.llm.replies import is_refusal, without_thoughts
from tripletune.models.options import require, setting
from tripletune.rag import StopReason, Trace, TraceAction
from tripletune.rag.retrievers import Retrieved, top, verbalise
from tripletune.rag.systems import PromptSet, QuestionClient, System, Tools, load_prompts, need
from tripletune.rag.systems.cirag.extraction import Extracted, Fact, LLMExtractor, StoredExtractor, provenance
from tripletune.rag.systems.cirag.integration import INTEGRATION_PROMPT, Decision, History, Round, integrate

Extraction = Literal["two_step", "joint", "store"]
Extractor = StoredExtractor | LLMExtractor
Granularity = Literal["triples", "sentences", "passages"]
GRANULARITIES: tuple[Granularity, ...] = get_args(Granularity)
ANSWER_ROLE = "cirag.answer"
REFUSAL = "Unanswerable"
DEFAULT = "default"
_ANSWER = re.compile(r"\banswer[ \t*_]*:[ \t*_]*", re.IGNORECASE)
_THOUGHT = re.compile(r"^[\s*_]*thought[ \t*_]*:[ \t*_]*", re.IGNORECASE)
_REFUSED = re.compile(rf"\W*{REFUSAL}\b(?=.*\w)", re.IGNORECASE)
_NOTHING = "(nothing was found)"
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
        candidates = await _construct(hits, extractor, llm, read, trace)
        if options.rerank and candidates:
            reranker, texts = need(tools, "reranker", "cirag"), [verbalise(fact.triple) for fact in candidates]
            candidates = top(candidates, await reranker.scores(query, texts), options.candidates)
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

    await generate(question, pools, llm, prompts, options, trace)
    trace.seconds = time.perf_counter() - started
    return trace


async def _construct(
    hits: Sequence[Retrieved], extractor: Extractor, llm: QuestionClient, read: dict[str, Extracted], trace: Trace
) -> list[Fact]:
    """The triples of all passages with their provenance, each triple once; a passage is read once a question."""
    new = {hit.passage.id: hit.passage for hit in hits if hit.passage.id not in read}
    # Every call is made before any failure is told: a batch then waits for all of them together.
    calls = (extractor.extract(passage, llm) for passage in new.values())
    for name, result in zip(new, await asyncio.gather(*calls, return_exceptions=True)):
        if isinstance(result, BaseException):
            raise result
        read[name] = result
        for issue, count in result.issues.items():
            trace.tally(issue, count)
    facts: dict[Triple, Fact] = {}
    for hit in hits:
        for fact in provenance(hit.passage, read[hit.passage.id].triples):
            facts.setdefault(fact.triple, fact)
    return list(facts.values())


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


@lru_cache(maxsize=4)
def _prompts(folder: str | None) -> PromptSet:
    return load_prompts(PROMPT_NAMES, folder)


def _open_extractor(tools: Tools, options: CiragOptions, prompts: PromptSet) -> Extractor:
    if options.extraction == "store":
        return StoredExtractor(need(tools, "store", "cirag"))
    steps = {"two_step": ("cirag_triples", "cirag_entities"), "joint": ("cirag_joint", None)}[options.extraction]
    return LLMExtractor(prompts, *steps, options.repairs, options.max_extraction_tokens)


# ACMG, the cascaded generation: triples, then sentences, then passages (section 3.4, eq. 5 and 6) ------------------


@dataclass(slots=True)
class Pools:
    """The cumulative sets of triples, sentences and passages; they grow by union in the order of the rounds (eq. 3, 4).

    Attributes:
        facts: Core triples with their provenance, by triple and id of the passage: a triple that a later round keeps
            from another passage brings that passage too.
    """

    facts: dict[tuple[Triple, str], Fact] = field(default_factory=dict)

    def add(self, core: Iterable[Fact]) -> None:
        """Add the core triples of a round; with them come their sentences and passages."""
        for fact in core:
            self.facts.setdefault((fact.triple, fact.passage.id), fact)

    def context(self, granularity: str) -> list[str]:
        """The evidence of one level as texts, each once: C^(g)."""
        facts = self.facts.values()
        if granularity == "passages":
            return list({fact.passage.id: fact.passage.content for fact in facts}.values())
        shown = (
            json.dumps(fact.triple.as_list(), ensure_ascii=False)
            if granularity == "triples"
            else f"[{' '.join(fact.passage.title.split())}] {' '.join(fact.sentence.split())}"
            for fact in facts
        )
        return list(dict.fromkeys(shown))


async def generate(
    question: str, pools: Pools, llm: QuestionClient, prompts: PromptSet, options: CiragOptions, trace: Trace
) -> None:
    """Answer from the most concise context that is enough (eq. 6), and note the level g* that was.

    Each level is asked with its own context until one gives an answer instead of the refusal word. When none does, the
    answer of the last level stands ("default"). A level without any context is passed over and counted, since it could
    only refuse or guess; the last one is always asked, because its answer is the default.
    """
    trace.details |= {"granularity": DEFAULT, "answers": []}
    for granularity in options.granularities:
        context = pools.context(granularity)
        if not context and granularity != options.granularities[-1]:
            trace.tally("granularities_without_context")
            continue
        completion = await llm.chat(
            prompts.chat(f"cirag_answer_{granularity}", answer_text(question, granularity, context)),
            role=f"{ANSWER_ROLE}.{granularity}",
            sampling=llm.up_to(options.max_generation_tokens),
        )
        trace.answer, faults = read_answer(completion.text, cut_off=completion.finish_reason == "length")
        for fault in faults:
            trace.tally(f"answer.{fault}")
        # Suf(a): there is an answer, and it is not the refusal word, nor a refusal in other words.
        refused = is_refusal(trace.answer)
        sufficient = bool(trace.answer) and not refused
        if refused and normalize_answer(trace.answer) != normalize_answer(REFUSAL):
            trace.tally("answer.refused_in_other_words")
        trace.details["answers"].append(
            {"granularity": granularity, "reply": completion.text, "answer": trace.answer, "sufficient": sufficient}
        )
        if sufficient:
            trace.details["granularity"] = granularity
            break
    trace.tally(f"answered.{trace.details['granularity']}")
    trace.details["core_passages"] = list(dict.fromkeys(fact.passage.id for fact in pools.facts.values()))


def answer_text(question: str, granularity: str, context: list[str]) -> str:
    """The user's turn of the generator: one level's evidence and the question."""
    gap = "\n\n" if granularity == "passages" else "\n"
    return f"{granularity.capitalize()}:\n{gap.join(context) or _NOTHING}\n\nQuestion: {' '.join(question.split())}"


def read_answer(text: str, cut_off: bool = False) -> tuple[str, tuple[str, ...]]:
    """Read "Thought: ... Answer: ..."; the last "Answer:" counts.

    Args:
        text: The reply.
        cut_off: Whether it ended at its limit.

    Returns:
        The answer, and the faults: `missing_answer` (no "Answer:"; the last line counts, but not when the reply was cut
        off), `empty_answer`, `text_after_answer` (dropped; also a reason on the line of the refusal word).
    """
    text = without_thoughts(text).strip()
    markers = list(_ANSWER.finditer(text))
    faults: list[str] = []
    if markers:
        lines = [line.strip() for line in text[markers[-1].end() :].splitlines() if line.strip()]
        if len(lines) > 1:
            faults.append("text_after_answer")
        answer = lines[0] if lines else ""
    else:
        faults.append("missing_answer")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        answer = "" if cut_off or not lines else _THOUGHT.sub("", lines[-1])
    answer = answer.strip("*_` ").strip()
    if _REFUSED.match(answer):
        # "Unanswerable. The triples do not say ..." is the refusal word and a reason for it.
        answer = REFUSAL
        faults += [] if "text_after_answer" in faults else ["text_after_answer"]
    if not answer:
        faults.append("empty_answer")
    return answer, tuple(faults)


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
