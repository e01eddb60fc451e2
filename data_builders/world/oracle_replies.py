"""The oracle's reply for each role of each system: what a perfect model would write, given the prompt's last turn.

A function `(oracle, messages) -> reply` reads the prompt as its system writes it (`tripletune/prompts/systems/`) and
compares what it shows with the gold facts of the question. A new system needs a line in `REPLIES` for each role.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from tripletune.core.calls import Message
from tripletune.core.data.triples import Triple, parse_triples
from tripletune.data_builders.world.questions import WorldQuestion
from tripletune.llm.reading.rows import field_rows
from tripletune.rag.chat_generator import REFUSAL
from tripletune.rag.search.retrievers import verbalise

if TYPE_CHECKING:
    from tripletune.data_builders.world.oracle import GoldHop, WorldOracle


def listed_triples(text: str) -> set[Triple]:
    """The triples of a text that lists them as JSON, one per line; other lines are skipped."""
    return {Triple(*json.loads(line)) for line in text.splitlines() if line.startswith("[")}


def turns_of(messages: Sequence[Message], role: str) -> list[str]:
    """The texts of the turns of a role, "user" or "assistant"."""
    return [message["content"] for message in messages if message["role"] == role]


def _question_in_last_turn(messages: Sequence[Message]) -> str:
    """The question in the last turn, and what the prompt adds below it; the word "Question: " before it is removed."""
    return messages[-1]["content"].removeprefix("Question: ")


# Plans and answers of RAS with a chat model, from the triples of the steps.


def _ras_plan(oracle: WorldOracle, messages: Sequence[Message]) -> str:
    """The sub-query of the first missing fact, reworded if it was asked before, or [SUFFICIENT] or [NO_RETRIEVAL].

    A second turn is a repair: the number of searches is fixed, and the plan stopped (`rag.chat_generator`). The reply
    is then a sub-query that was not asked, or the question itself, if it needs no search.
    """
    request, *repairs = turns_of(messages, "user")
    question, missing = _ras_missing(oracle, request)
    lines = request.splitlines()
    asked = [line.removeprefix("[SUBQ] ") for line in lines if line.startswith("[SUBQ] ")]
    if missing:
        return f"[SUBQ] {missing[0].query_not_in(asked)}"
    hops = oracle.hops(question)
    if repairs:
        for hop in hops:
            query = hop.query_not_in(asked)
            if query not in asked:
                return f"[SUBQ] {query}"
        return f"[SUBQ] {question.text}"
    return "[SUFFICIENT]" if hops else "[NO_RETRIEVAL]"


def _ras_answer(oracle: WorldOracle, messages: Sequence[Message]) -> str:
    """The answer, if every gold fact was found."""
    question, missing = _ras_missing(oracle, messages[-1]["content"])
    return REFUSAL if missing else question.answer


class _OpenHops(NamedTuple):
    """The question of a prompt, and its hops whose facts the prompt does not hold."""

    question: WorldQuestion
    missing: list[GoldHop]


def _ras_missing(oracle: WorldOracle, request: str) -> _OpenHops:
    """The question in the last line of a prompt, and its hops whose facts the lines above do not hold."""
    *lines, last = request.splitlines()
    shown: set[Triple] = set()
    for line in lines:
        shown.update(parse_triples(line).triples)
    question = oracle.question(last.removeprefix("Question: "))
    return _OpenHops(question, [hop for hop in oracle.hops(question) if hop.triple not in shown])


def _ircot_think(oracle: WorldOracle, messages: Sequence[Message]) -> str:
    """IRCoT's next thought: the open question, reworded if it was asked before, or the answer."""
    passages, _, lines = messages[-1]["content"].partition("\n\nQuestion: ")
    text, *thoughts = lines.split("\n")
    question = oracle.question(text)
    for hop in oracle.hops(question):
        if not hop.stands_in(passages):
            return hop.query_not_in(thoughts)
    return f"So the answer is: {question.answer}"


def _self_ask_follow_up(oracle: WorldOracle, messages: Sequence[Message]) -> str:
    """Self-Ask's next follow-up question, reworded after a refusal; or the answer.

    After the question, follow-ups and their answers alternate, each on a line. A hop counts as answered only by its
    object, so a refusal leaves it open, and it is asked for in words that were not used.
    """
    first_line, *lines = _question_in_last_turn(messages).splitlines()
    question = oracle.question(first_line)
    queries = [line.removeprefix("Follow up: ") for line in lines[0::2]]
    answers = [line.removeprefix("Intermediate answer: ") for line in lines[1::2]]
    for hop in oracle.hops(question):
        answers_to_hop = [answer for query, answer in zip(queries, answers) if query in hop.queries]
        if hop.triple.object not in answers_to_hop:
            return f"Follow up: {hop.query_not_in(queries)}"
    return f"So the final answer is: {question.answer}"


def _react_act(oracle: WorldOracle, messages: Sequence[Message]) -> str:
    """ReAct's next thought and action: a search for the first fact that no observation states, or the answer."""
    first_turn, *observations = turns_of(messages, "user")
    actions = "\n".join(turns_of(messages, "assistant"))
    question = oracle.question(first_turn.removeprefix("Question: "))
    passages = "\n\n".join(observations)
    for hop in oracle.hops(question):
        if not hop.stands_in(passages):
            searched = [query for query in hop.queries if f"[{query}]" in actions]
            thought = f"Thought: I need the {hop.triple.predicate} of {hop.triple.subject}."
            return f"{thought}\nAction: Search[{hop.query_not_in(searched)}]"
    return f"Thought: I know everything that is needed.\nAction: Finish[{question.answer}]"


def _ppr_keep(oracle: WorldOracle, messages: Sequence[Message]) -> str:
    """Reply of the PageRank system's filter: numbers of the shown facts that the question needs."""
    facts, _, text = messages[-1]["content"].rpartition("\n\nQuestion: ")
    gold_facts = {verbalise(hop.triple) for hop in oracle.hops_of(text)}
    numbers = []
    for number, line in enumerate(facts.splitlines()[1:], 1):
        _, _, fact = line.partition(". ")
        if fact in gold_facts:
            numbers.append(number)
    return json.dumps(numbers)


# T2RAG's clues, filled from the shown propositions, and its answer from resolved clues.


def _t2rag_decompose(oracle: WorldOracle, messages: Sequence[Message]) -> str:
    """One clue per hop; the object of a hop is the subject of the hop that reads the object's article."""
    placeholder_of: dict[str, str] = {}
    rows = []
    for number, hop in enumerate(oracle.hops(oracle.question(_question_in_last_turn(messages)))):
        fact = hop.triple
        placeholder = f"?x{number}"
        subject = placeholder_of.get(fact.subject, fact.subject)
        rows.append(f"{subject} | {fact.predicate} | {placeholder}")
        placeholder_of.setdefault(fact.object, placeholder)
    return "Reasoning: one fact after the other.\nTriples:\n" + "\n".join(rows)


def _t2rag_resolve(oracle: WorldOracle, messages: Sequence[Message]) -> str:
    """The open clues that the propositions can fill; a clue with several values is repeated.

    A clue is "subject | predicate | object", with a placeholder such as "?x1" for what is not known. Propositions and
    clues have the prompt's numbered layout.
    """
    clues, _, shown = messages[-1]["content"].partition("\n\nPropositions:\n")
    stated, _ = field_rows(shown.partition("\n\nPassages:\n")[0])
    facts = [row.fields for row in stated]
    open_rows, _ = field_rows(clues.partition("\n\nResolved clues:\n")[0])
    open_clues = {row.number: row.fields for row in open_rows}
    value_of: dict[str, str] = {}
    filled: dict[str, str] = {}
    # A value may fill the clue before it, so the clues are read as often as there are clues.
    for _ in open_clues:
        for number, fields in open_clues.items():
            subject, predicate, object_ = (value_of.get(field, field) for field in fields)
            objects = [fact[2] for fact in facts if (fact[0], fact[1]) == (subject, predicate)]
            if objects:
                value_of[fields[2]] = objects[0]
                filled[number] = f"[{number}] {subject} | {predicate} | {objects[0]}"
            elif subject != fields[0]:
                filled[number] = f"[{number}] {subject} | {predicate} | {object_}"
    return "\n".join(filled.values()) or "(none)"


def _t2rag_answer(oracle: WorldOracle, messages: Sequence[Message]) -> str:
    """The answer, if the clues hold every gold fact, word for word; else the word that refuses."""
    text, _, clues = _question_in_last_turn(messages).partition("\n\nClues:\n")
    question = oracle.question(text)
    rows, _ = field_rows(clues)
    facts = [list(row.fields) for row in rows]
    for hop in oracle.hops(question):
        if hop.triple.as_list() not in facts:
            return f"Answer: {REFUSAL}"
    return f"Answer: {question.answer}"


# GEAR's new facts, verdict and next question, from the shown passages and facts.


def _gear_read(oracle: WorldOracle, messages: Sequence[Message]) -> str:
    """The new gold facts in the passages, a JSON list per line, as the prompt asks for them."""
    shown, _, text = messages[-1]["content"].rpartition("Question: ")
    passages, _, facts = shown.partition("\n\nFacts found before:\n")
    lines = []
    for hop in _gear_missing(oracle, facts, text):
        if hop.stands_in(passages):
            lines.append(json.dumps(hop.triple.as_list(), ensure_ascii=False))
    return "\n".join(lines) or "NONE"


def _gear_reason(oracle: WorldOracle, messages: Sequence[Message]) -> str:
    """Whether the facts hold every gold fact; if not, which is missing, from which `_gear_rewrite` asks on."""
    facts, _, text = messages[-1]["content"].partition("\n\nQuestion: ")
    missing = _gear_missing(oracle, facts, text)
    if missing:
        fact = missing[0].triple
        return f"Answerable: No\nWhy: The {fact.predicate} of {fact.subject} is missing."
    return f"Answerable: Yes\nAnswer: {oracle.question(text).answer}"


def _gear_rewrite(oracle: WorldOracle, messages: Sequence[Message]) -> str:
    """The sub-query of the first missing fact."""
    facts, _, lines = messages[-1]["content"].partition("\n\nQuestion: ")
    text, _, _ = lines.partition("\n\nReason: ")
    return _gear_missing(oracle, facts, text)[0].queries[0]


def _gear_missing(oracle: WorldOracle, facts: str, text: str) -> list[GoldHop]:
    """The hops of a question whose facts are not listed."""
    listed = listed_triples(facts)
    return [hop for hop in oracle.hops_of(text) if hop.triple not in listed]


# TH-RAG's graph, with a subtopic per article and a topic per kind, and the labels that a question needs.


def _thrag_extract(oracle: WorldOracle, messages: Sequence[Message]) -> str:
    """The statements of an article: each triple with its sentence, and the article as the subtopic of its subjects.

    The sentence is that of the article, word for word, since `_thrag_answer` looks for it in the prompt.
    """
    title = messages[-1]["content"].removeprefix("Title: ").split("\n", 1)[0]
    article = oracle.world.articles[title]
    kind = oracle.world.entities[title].kind
    statements = []
    for triple in article.triples:
        statements.append({
            "triple": triple.as_list(),
            "sentence": article.sentence(triple.predicate),
            "subject": {"subtopic": f"about {title}", "main_topic": kind},
            "object": {"subtopic": f"{triple.predicate} of {title}", "main_topic": kind},
        })  # fmt: skip
    return json.dumps(statements, ensure_ascii=False)


def _thrag_topics(oracle: WorldOracle, messages: Sequence[Message]) -> str:
    """The kinds of the needed articles, which are the topics of the graph (`_thrag_extract`)."""
    _, _, text = messages[-1]["content"].rpartition("Question: ")
    hops = oracle.hops(oracle.question(text))
    kinds = [oracle.world.entities[hop.triple.subject].kind for hop in hops]
    return json.dumps({"topics": list(dict.fromkeys(kinds))})


def _thrag_subtopics(oracle: WorldOracle, messages: Sequence[Message]) -> str:
    """The listed subtopics of the needed articles."""
    listed, _, text = messages[-1]["content"].rpartition("Question: ")
    subtopics = []
    for hop in oracle.hops(oracle.question(text)):
        subtopic = f"about {hop.triple.subject}"
        if f"\n- {subtopic}\n" in listed:
            subtopics.append(subtopic)
    return json.dumps({"subtopics": subtopics}, ensure_ascii=False)


def _thrag_answer(oracle: WorldOracle, messages: Sequence[Message]) -> str:
    """The answer, if sentences and passages hold every gold fact; else the words with which TH-RAG's prompt refuses."""
    shown, _, text = messages[-1]["content"].rpartition("\n\nQuestion: ")
    question = oracle.question(text)
    for hop in oracle.hops(question):
        statement = f"[{hop.triple.subject}] {hop.sentence}\n"
        if not hop.stands_in(shown) and statement not in f"{shown}\n":
            return "Insufficient information"
    return question.answer


REPLIES: dict[str, Callable[[WorldOracle, Sequence[Message]], str]] = {
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
