"""What the oracle replies to the calls of each system, by the role of the call: `(oracle, messages) -> reply`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tripletune.data_builders.world.build import World
from tripletune.data_builders.world.questions import WorldQuestion
from tripletune.models.data.triples import Triple, parse_triples
from tripletune.models.llm import Message
from tripletune.models.llm.replies import triple_rows
from tripletune.rag.chat_generator import REFUSAL
from tripletune.rag.retrievers import verbalise


@dataclass(frozen=True, slots=True)
class GoldHop:
    """A fact that a question needs, the sentence of its article that states it, and sub-queries, the gold one first."""

    triple: Triple
    sentence: str
    queries: tuple[str, ...]

    def stands_in(self, passages: str) -> bool:
        """Whether one of several passages, with blank lines between them, is its article and states it."""
        blocks = passages.split("\n\n")
        title = f"{self.triple.subject}\n"
        return any(title in block and self.sentence in block.partition(title)[2] for block in blocks)


class Facts(Protocol):
    """What the oracle knows."""

    world: World

    def question(self, text: str) -> WorldQuestion:
        """The question that a text asks."""

    def hops(self, question: WorldQuestion) -> list[GoldHop]:
        """The facts that it needs, in order."""

    def hops_of(self, text: str) -> list[GoldHop]:
        """The facts that the question of a text needs."""


# RAS's plans and answers on a chat model, from the triples of its steps.


def _ras_plan(oracle: Facts, messages: Sequence[Message]) -> str:
    """The first sub-query whose fact was not found, in other words when it was asked before; else that it suffices."""
    question, missing = _ras_missing(oracle, messages)
    asked = messages[-1]["content"].splitlines()
    if missing:
        query = next((one for one in missing[0].queries if f"[SUBQ] {one}" not in asked), missing[0].queries[0])
        return f"[SUBQ] {query}"
    return "[SUFFICIENT]" if oracle.hops(question) else "[NO_RETRIEVAL]"


def _ras_answer(oracle: Facts, messages: Sequence[Message]) -> str:
    """The answer, where every gold fact was found."""
    question, missing = _ras_missing(oracle, messages)
    return REFUSAL if missing else question.answer


def _ras_missing(oracle: Facts, messages: Sequence[Message]) -> tuple[WorldQuestion, list[GoldHop]]:
    *lines, last = messages[-1]["content"].splitlines()
    found = {triple for line in lines for triple in parse_triples(line).triples}
    question = oracle.question(last.removeprefix("Question: "))
    return question, [hop for hop in oracle.hops(question) if hop.triple not in found]


# IRCoT's thoughts: the facts that the passages state, then the question that is still open, or the answer.


def _ircot_think(oracle: Facts, messages: Sequence[Message]) -> str:
    """The next thought; in other words when it was there before."""
    passages, _, rest = messages[-1]["content"].partition("\n\nQuestion: ")
    text, *thoughts = rest.split("\n")
    question = oracle.question(text)
    missing = [hop for hop in oracle.hops(question) if not hop.stands_in(passages)]
    if not missing:
        return f"So the answer is: {question.answer}"
    return next((query for query in missing[0].queries if query not in thoughts), missing[0].queries[0])


# Self-Ask's follow-up questions: the sub-query of the first hop without an intermediate answer, or the answer.


def _self_ask_follow_up(oracle: Facts, messages: Sequence[Message]) -> str:
    """The next follow-up question; in other words when its answer was none."""
    first, *rest = messages[-1]["content"].splitlines()
    question = oracle.question(first.removeprefix("Question: "))
    queries = [line.removeprefix("Follow up: ") for line in rest[0::2]]
    answers = [line.removeprefix("Intermediate answer: ") for line in rest[1::2]]
    for hop in oracle.hops(question):
        if (hop.triple.object, True) not in [(answer, query in hop.queries) for query, answer in zip(queries, answers)]:
            return f"Follow up: {next((query for query in hop.queries if query not in queries), hop.queries[0])}"
    return f"So the final answer is: {question.answer}"


# ReAct's actions: a search for the first fact that no observation states, or the answer.


def _react_act(oracle: Facts, messages: Sequence[Message]) -> str:
    """The next thought and action."""
    users = [turn["content"] for turn in messages if turn["role"] == "user"]
    said = "\n".join(turn["content"] for turn in messages if turn["role"] == "assistant")
    question = oracle.question(users[0].removeprefix("Question: "))
    missing = [hop for hop in oracle.hops(question) if not hop.stands_in("\n\n".join(users[1:]))]
    if not missing:
        return f"Thought: I know everything that is needed.\nAction: Finish[{question.answer}]"
    fact = missing[0].triple
    query = next((query for query in missing[0].queries if f"[{query}]" not in said), missing[0].queries[0])
    return f"Thought: I need the {fact.predicate} of {fact.subject}.\nAction: Search[{query}]"


# The filter of the PageRank system: which of the facts shown the question needs.


def _ppr_keep(oracle: Facts, messages: Sequence[Message]) -> str:
    """The numbers of the gold facts."""
    facts, _, text = messages[-1]["content"].rpartition("\n\nQuestion: ")
    wanted = {verbalise(hop.triple) for hop in oracle.hops_of(text)}
    lines = facts.splitlines()[1:]
    return json.dumps([n for n, line in enumerate(lines, 1) if line.partition(". ")[2] in wanted])


# T2RAG's clues, filled from the propositions that are shown, and its answer from resolved clues.


def _t2rag_decompose(oracle: Facts, messages: Sequence[Message]) -> str:
    """A clue for each hop; what one hop finds is the subject of the hop that reads its article."""
    hops = [hop.triple for hop in oracle.hops(oracle.question(messages[-1]["content"].removeprefix("Question: ")))]
    rows = []
    for number, hop in enumerate(hops):
        earlier = (f"?x{place}" for place in range(number) if hops[place].object == hop.subject)
        rows.append((next(earlier, hop.subject), hop.predicate, f"?x{number}"))
    return "Reasoning: one fact after the other.\nTriples:\n" + "\n".join(" | ".join(row) for row in rows)


def _t2rag_resolve(oracle: Facts, messages: Sequence[Message]) -> str:
    """The open clues of which the propositions know an unknown; a clue is read again with what another one gave."""
    clues, _, shown = messages[-1]["content"].partition("\n\nPropositions:\n")
    facts = [tuple(fields) for _, fields in triple_rows(shown.partition("\n\nPassages:\n")[0])]
    opened = dict(triple_rows(clues.partition("\n\nResolved clues:\n")[0]))
    known: dict[str, str] = {}
    filled: dict[str, str] = {}
    for _ in opened:
        for number, fields in opened.items():
            subject, predicate, unknown = (known.get(field, field) for field in fields)
            found = [fact[2] for fact in facts if fact[:2] == (subject, predicate)]
            if found:
                known[fields[2]] = found[0]
                filled[number] = f"[{number}] {subject} | {predicate} | {found[0]}"
            elif subject != fields[0]:
                filled[number] = f"[{number}] {subject} | {predicate} | {unknown}"
    return "\n".join(filled.values()) or "(none)"


def _t2rag_answer(oracle: Facts, messages: Sequence[Message]) -> str:
    """The answer, where the clues hold every gold fact."""
    text, _, clues = messages[-1]["content"].removeprefix("Question: ").partition("\n\nClues:\n")
    question = oracle.question(text)
    rows = [fields for _, fields in triple_rows(clues)]
    enough = all(hop.triple.as_list() in rows for hop in oracle.hops(question))
    return f"Answer: {question.answer if enough else REFUSAL}"


# GEAR's reader, its verdict and the next question, from the passages and facts that it is shown.


def _gear_read(oracle: Facts, messages: Sequence[Message]) -> str:
    """The gold facts that the passages state, and that were not found before."""
    passages, _, text = messages[-1]["content"].rpartition("Question: ")
    passages, _, facts = passages.partition("\n\nFacts found before:\n")
    known = _gear_facts(facts)
    hops = oracle.hops_of(text)
    found = [hop.triple for hop in hops if hop.stands_in(passages) and hop.triple not in known]
    return "\n".join(json.dumps(triple.as_list(), ensure_ascii=False) for triple in found) or "NONE"


def _gear_reason(oracle: Facts, messages: Sequence[Message]) -> str:
    """Whether the facts hold every gold fact."""
    facts, _, text = messages[-1]["content"].partition("\n\nQuestion: ")
    if missing := _gear_missing(oracle, facts, text):
        fact = missing[0].triple
        return f"Answerable: No\nWhy: The {fact.predicate} of {fact.subject} is missing."
    return f"Answerable: Yes\nAnswer: {oracle.question(text).answer}"


def _gear_rewrite(oracle: Facts, messages: Sequence[Message]) -> str:
    """The sub-query of the first missing fact."""
    facts, _, rest = messages[-1]["content"].partition("\n\nQuestion: ")
    return _gear_missing(oracle, facts, rest.partition("\n\nReason: ")[0])[0].queries[0]


def _gear_missing(oracle: Facts, facts: str, text: str) -> list[GoldHop]:
    known = _gear_facts(facts)
    return [hop for hop in oracle.hops_of(text) if hop.triple not in known]


def _gear_facts(text: str) -> set[Triple]:
    return {Triple(*json.loads(line)) for line in text.splitlines() if line.startswith("[")}


# TH-RAG's graph, with a subtopic for each article and a topic for each kind, and the labels that a question needs.


def _thrag_extract(oracle: Facts, messages: Sequence[Message]) -> str:
    """The statements of an article."""
    title = messages[-1]["content"].removeprefix("Title: ").split("\n", 1)[0]
    article, kind = oracle.world.articles[title], oracle.world.entities[title].kind
    labels = {"subtopic": f"about {title}", "main_topic": kind}
    return json.dumps(
        [
            {
                "triple": triple.as_list(),
                "sentence": article.sentences[article.sentence_of[triple.predicate]],
                "subject": labels,
                "object": {"subtopic": f"{triple.predicate} of {title}", "main_topic": kind},
            }
            for triple in article.triples
        ],
        ensure_ascii=False,
    )


def _thrag_topics(oracle: Facts, messages: Sequence[Message]) -> str:
    """The kinds of the articles that the question needs."""
    hops = oracle.hops(oracle.question(messages[-1]["content"].rpartition("Question: ")[2]))
    kinds = dict.fromkeys(oracle.world.entities[hop.triple.subject].kind for hop in hops)
    return json.dumps({"topics": list(kinds)})


def _thrag_subtopics(oracle: Facts, messages: Sequence[Message]) -> str:
    """Those that are listed of the articles that the question needs."""
    listed, _, text = messages[-1]["content"].rpartition("Question: ")
    wanted = [f"about {hop.triple.subject}" for hop in oracle.hops(oracle.question(text))]
    return json.dumps({"subtopics": [one for one in wanted if f"\n- {one}\n" in listed]}, ensure_ascii=False)


def _thrag_answer(oracle: Facts, messages: Sequence[Message]) -> str:
    """The answer, where sentences and passages hold every gold fact."""
    shown, _, text = messages[-1]["content"].rpartition("\n\nQuestion: ")
    question = oracle.question(text)
    hops = oracle.hops(question)
    known = [hop.stands_in(shown) or f"[{hop.triple.subject}] {hop.sentence}\n" in f"{shown}\n" for hop in hops]
    return question.answer if all(known) else "Insufficient information"


REPLIES = {
    "ras.plan": _ras_plan,
    "ras.answer": _ras_answer,
    "ircot.think": _ircot_think,
    "ircot.filter": _ppr_keep,
    "self_ask.follow_up": _self_ask_follow_up,
    "react.act": _react_act,
    "ppr.filter": _ppr_keep,
    "t2rag.decompose": _t2rag_decompose,
    "t2rag.resolve": _t2rag_resolve,
    "t2rag.answer": _t2rag_answer,
    "gear.read": _gear_read,
    "gear.reason": _gear_reason,
    "gear.rewrite": _gear_rewrite,
    "thrag.extract": _thrag_extract,
    "thrag.topics": _thrag_topics,
    "thrag.subtopics": _thrag_subtopics,
    "thrag.answer": _thrag_answer,
}
