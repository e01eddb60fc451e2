"""ACMG, the cascaded generation of CIRAG: triples, then sentences, then passages (section 3.4, eq. 5 and 6).

Each level is asked with its own context until one gives an answer instead of the refusal word. When none does, the
answer of the last level stands ("default"). A level without any context is passed over and counted, since it could
only refuse or guess; the last one is always asked, because its answer is the default. Where the paper does not say
how evidence is shown: a triple as a JSON list, a sentence after its page's title, without which "she" has no name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from tripletune.models.data.records import normalize_answer
from tripletune.models.data.triples import Triple
from tripletune.models.llm.replies import without_thoughts
from tripletune.rag.systems import PromptSet, QuestionClient
from tripletune.rag.systems.cirag.extraction import Fact

Granularity = Literal["triples", "sentences", "passages"]
GRANULARITIES: tuple[Granularity, ...] = get_args(Granularity)
ANSWER_ROLE = "cirag.answer"
REFUSAL = "Unanswerable"
DEFAULT = "default"
_ANSWER = re.compile(r"\banswer[ \t*_]*:[ \t*_]*", re.IGNORECASE)
_THOUGHT = re.compile(r"^[\s*_]*thought[ \t*_]*:[ \t*_]*", re.IGNORECASE)
_REFUSED = re.compile(rf"\W*{REFUSAL}\b(?=.*\w)", re.IGNORECASE)
_NOTHING = "(nothing was found)"


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

    def triples(self) -> list[str]:
        """The triples as text, each once."""
        return [json.dumps(triple.as_list(), ensure_ascii=False) for triple in dict.fromkeys(t for t, _ in self.facts)]

    def sentences(self) -> list[str]:
        """The sentences after the titles of their pages, each once."""
        shown = (
            f"[{' '.join(fact.passage.title.split())}] {' '.join(fact.sentence.split())}"
            for fact in self.facts.values()
        )
        return list(dict.fromkeys(shown))

    def passages(self) -> list[str]:
        """The passages, each once."""
        return list({fact.passage.id: fact.passage.content for fact in self.facts.values()}.values())

    def context(self, granularity: str) -> list[str]:
        """The evidence of one level, C^(g)."""
        return {"triples": self.triples, "sentences": self.sentences, "passages": self.passages}[granularity]()


@dataclass(frozen=True, slots=True)
class Attempt:
    """One level's answer a^(g).

    Attributes:
        granularity: The level.
        reply: The reply as it came.
        answer: The answer in it.
        faults: what was wrong with the reply, by name.
    """

    granularity: str
    reply: str
    answer: str
    faults: tuple[str, ...] = ()

    @property
    def sufficient(self) -> bool:
        """Suf(a): whether there is an answer and it is not the refusal word."""
        return bool(self.answer) and normalize_answer(self.answer) != normalize_answer(REFUSAL)


@dataclass(frozen=True, slots=True)
class Generated:
    """The outcome of the cascade.

    Attributes:
        answer: The final answer.
        granularity: The level that gave it (g* of eq. 6), or "default" when none was sufficient.
        attempts: The levels that were asked.
        skipped: Levels without context that were passed over.
    """

    answer: str
    granularity: str
    attempts: tuple[Attempt, ...]
    skipped: int = 0


async def generate(
    question: str, pools: Pools, llm: QuestionClient, prompts: PromptSet, granularities: Sequence[str], max_tokens: int
) -> Generated:
    """Answer from the most concise context that is enough (eq. 6).

    Args:
        question: The main question x.
        pools: What the rounds have kept.
        llm: The generator M_R.
        prompts: Has the prompts `cirag_answer_<granularity>`.
        granularities: The levels in order.
        max_tokens: Longest reply.
    """
    attempts: list[Attempt] = []
    skipped = 0
    for granularity in granularities:
        context = pools.context(granularity)
        if not context and granularity != granularities[-1]:
            skipped += 1
            continue
        completion = await llm.chat(
            prompts.chat(f"cirag_answer_{granularity}", answer_text(question, granularity, context)),
            role=f"{ANSWER_ROLE}.{granularity}",
            sampling=llm.up_to(max_tokens),
        )
        answer, faults = read_answer(completion.text, cut_off=completion.finish_reason == "length")
        attempts.append(Attempt(granularity, completion.text, answer, faults))
        if attempts[-1].sufficient:
            return Generated(answer, granularity, tuple(attempts), skipped)
    return Generated(attempts[-1].answer, DEFAULT, tuple(attempts), skipped)


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
