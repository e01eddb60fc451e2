"""A teacher that knows the facts of a fictional world and answers a system's prompts like a perfect model.

The oracle replaces a teacher LLM in tests of the loop, and for trajectories on a machine without a teacher. It reads
only the turns of the chat, so it works with any prompts.

`REPLIES` answer calls of a role `system.call`. A call of a role `system.answer`, which reads passages, gets the gold
answer if the passages hold every gold fact, else the refusal word. Calls of CIRAG and calls without a role are
recognised by their form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tripletune.core.calls import CALL_ROLE, Backend, CallError, Completion, Message, Sampling
from tripletune.core.data.answers import normalize_answer
from tripletune.core.data.triples import Triple, parse_triples
from tripletune.core.files import read_json
from tripletune.data_builders.world import RELATION_OF
from tripletune.data_builders.world.build import MANIFEST, World, WorldOptions, generate_world
from tripletune.data_builders.world.questions import WorldQuestion
from tripletune.llm.replies import REPAIR_ROLE
from tripletune.llm.reply_triples import triple_rows
from tripletune.rag.chat_generator import REFUSAL
from tripletune.rag.search.retrievers import verbalise
from tripletune.rag.systems.cirag.integration import CANDIDATES, CORE, MAIN_QUESTION, QUESTION, Decision, write_decision

_SECTION = re.compile(r"^\[\[## (.+?) ##\]\]\n(.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class GoldHop:
    """A fact that a question needs, with its sentence and its sub-queries, the gold sub-query first."""

    triple: Triple
    sentence: str
    queries: tuple[str, ...]

    def stands_in(self, passages: str) -> bool:
        """Whether one of the passages, separated by blank lines, is the article of the fact and states the fact."""
        blocks = passages.split("\n\n")
        title = f"{self.triple.subject}\n"
        return any(title in block and self.sentence in block.partition(title)[2] for block in blocks)


class WorldOracle(Backend):
    """A `Backend` that answers from the facts of one split of a world."""

    def __init__(self, world: World) -> None:
        self.model = f"oracle:world{world.seed}-{world.split}"
        self.world = world
        self._questions = {" ".join(question.text.split()): question for question in world.questions}
        self._subqueries = {
            query: hop for question in world.questions for hop in self.hops(question) for query in hop.queries
        }

    @classmethod
    def open(cls, folder: str | Path, split: str) -> WorldOracle:
        """The oracle of a split of a world from `data_builders.world.build`; the world is generated again."""
        path = Path(folder) / MANIFEST
        if not path.is_file():
            raise FileNotFoundError(f"{folder} holds no {MANIFEST}: name a folder of data_builders.world and a split")
        try:
            manifest = read_json(path)
            options = WorldOptions(**manifest["options"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} cannot be read as a world of this version: {error}") from None
        if split not in manifest["splits"]:
            raise ValueError(f"{folder} has no split {split!r}; it has {', '.join(manifest['splits'])}")
        return cls(generate_world(options, split))

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        """Reply to a system's prompt by its role; see `llm.CALL_ROLE`."""
        role = CALL_ROLE.get().removesuffix(REPAIR_ROLE)
        system, _, call = role.partition(".")
        turn = next((message["content"] for message in reversed(messages) if message["role"] == "user"), "")
        if reply := REPLIES.get(role):
            text = reply(self, messages)
        elif system != "cirag" and call == "answer":
            text = self.answer(turn)
        elif call and system != "cirag":
            raise CallError(f"{self.model}: no reply for the role {role}: add it to data_builders/world/oracle.py")
        elif f"[[## {CANDIDATES} ##]]" in turn:
            text = self._integrate(messages)
        elif turn.startswith("Title: "):
            text = self._extract(turn)
        elif "\n\nQuestion: " in turn:
            text = self._answer(turn)
        else:
            raise CallError(f"{self.model}: the prompt is not of a system that the oracle knows")
        return Completion(text, sum(len(message["content"].split()) for message in messages), len(text.split()))

    def _extract(self, turn: str) -> str:
        title = turn.removeprefix("Title: ").split("\n", 1)[0]
        article = self.world.articles.get(title)
        triples = article.rows if article else []
        entities = list(dict.fromkeys([title, *(object_ for _, _, object_ in triples)]))
        return json.dumps({"entities": entities, "triples": triples}, ensure_ascii=False)

    def _integrate(self, messages: Sequence[Message]) -> str:
        """The gold triples among the new candidates, and a sub-query of the first hop that is still unknown."""
        users = [dict(_SECTION.findall(message["content"])) for message in messages if message["role"] == "user"]
        told = [dict(_SECTION.findall(message["content"])) for message in messages if message["role"] == "assistant"]
        question = self.question(users[0].get(MAIN_QUESTION, ""))
        hops = self.hops(question)
        shown = set(_triples(users[-1][CANDIDATES]))
        kept = {triple for turn in told for triple in _triples(turn[CORE])}
        asked = {normalize_answer(turn[QUESTION]) for turn in told} | {normalize_answer(question.text)}
        core = [hop.triple for hop in hops if hop.triple in shown]
        missing = [hop for hop in hops if hop.triple not in kept and hop.triple not in core]
        query = next((text for hop in missing[:1] for text in hop.queries if normalize_answer(text) not in asked), "")
        found = " ".join(f"{t.subject}: {t.predicate} {t.object}." for t in core) or "No new fact helps."
        thought = f"With what was kept before, the query can be answered: {question.answer}."
        if missing:
            thought = f"Still missing: {missing[0].triple.predicate} of {missing[0].triple.subject}."
        return write_decision(Decision(f"{found} {thought}", tuple(core), query))

    def _answer(self, turn: str) -> str:
        evidence, _, text = turn.rpartition("\n\nQuestion: ")
        question = self.question(text)
        level, _, rest = evidence.partition(":\n")
        hops = self.hops(question)
        if level == "Triples":
            enough = {hop.triple for hop in hops} <= _listed(rest)
        else:
            enough = all(" ".join(hop.sentence.split()) in rest for hop in hops)
        if not hops or not enough:
            return f"Thought: The evidence does not hold every fact that is needed.\nAnswer: {REFUSAL}"
        facts = "; ".join(f"{hop.triple.subject}, {hop.triple.predicate}: {hop.triple.object}" for hop in hops)
        return f"Thought: {facts}.\nAnswer: {question.answer}"

    def answer(self, turn: str) -> str:
        """The answer to the question or sub-query at the end, if the passages before it hold its facts."""
        passages, _, text = turn.rpartition("Question: ")
        hop = self._subqueries.get(" ".join(text.split()))
        answer = hop.triple.object if hop else self.question(text).answer
        return answer if all(one.stands_in(passages) for one in self.hops_of(text)) else REFUSAL

    def question(self, text: str) -> WorldQuestion:
        """The question with this wording."""
        found = self._questions.get(" ".join(text.split()))
        if found is None:
            raise CallError(f"{self.model}: the world has no question {text!r}")
        return found

    def hops_of(self, text: str) -> list[GoldHop]:
        """The hops of a question or sub-query with this wording."""
        hop = self._subqueries.get(" ".join(text.split()))
        return [hop] if hop else self.hops(self.question(text))

    def hops(self, question: WorldQuestion) -> list[GoldHop]:
        """The hops of the question in reasoning order; none for common knowledge."""
        hops = []
        for title, predicate, subquery in zip(question.helpful, question.predicates, question.subqueries):
            entity, article = self.world.entities[title], self.world.articles[title]
            wordings = [form.format(x=entity.mention) for form in RELATION_OF[entity.kind, predicate].ask]
            # The last sub-query has only the title and the predicate, so that it matches no other article.
            queries = (subquery, *wordings, f"{title} {predicate}", title)
            sentence = article.sentences[article.sentence_of[predicate]]
            hops.append(GoldHop(Triple(title, predicate, entity.facts[predicate]), sentence, queries))
        return hops


def _triples(text: str) -> list[Triple]:
    return [Triple(*row) for row in json.loads(text)["fact"]]


def _listed(text: str) -> set[Triple]:
    return {Triple(*json.loads(line)) for line in text.splitlines() if line.startswith("[")}


# Plans and answers of RAS with a chat model, from the triples of the steps.


def _ras_plan(oracle: WorldOracle, messages: Sequence[Message]) -> str:
    """The sub-query of the first missing fact, reworded if it was asked before, or [SUFFICIENT] or [NO_RETRIEVAL]."""
    question, missing = _ras_missing(oracle, messages)
    asked = messages[-1]["content"].splitlines()
    if missing:
        query = next((one for one in missing[0].queries if f"[SUBQ] {one}" not in asked), missing[0].queries[0])
        return f"[SUBQ] {query}"
    return "[SUFFICIENT]" if oracle.hops(question) else "[NO_RETRIEVAL]"


def _ras_answer(oracle: WorldOracle, messages: Sequence[Message]) -> str:
    """The answer, if every gold fact was found."""
    question, missing = _ras_missing(oracle, messages)
    return REFUSAL if missing else question.answer


def _ras_missing(oracle: WorldOracle, messages: Sequence[Message]) -> tuple[WorldQuestion, list[GoldHop]]:
    *lines, last = messages[-1]["content"].splitlines()
    found = {triple for line in lines for triple in parse_triples(line).triples}
    question = oracle.question(last.removeprefix("Question: "))
    return question, [hop for hop in oracle.hops(question) if hop.triple not in found]


def _ircot_think(oracle: WorldOracle, messages: Sequence[Message]) -> str:
    """IRCoT's next thought: the open question, reworded if it was asked before, or the answer."""
    passages, _, rest = messages[-1]["content"].partition("\n\nQuestion: ")
    text, *thoughts = rest.split("\n")
    question = oracle.question(text)
    missing = [hop for hop in oracle.hops(question) if not hop.stands_in(passages)]
    if not missing:
        return f"So the answer is: {question.answer}"
    return next((query for query in missing[0].queries if query not in thoughts), missing[0].queries[0])


def _self_ask_follow_up(oracle: WorldOracle, messages: Sequence[Message]) -> str:
    """Self-Ask's next follow-up question, reworded after a refusal; or the answer."""
    first, *rest = messages[-1]["content"].splitlines()
    question = oracle.question(first.removeprefix("Question: "))
    queries = [line.removeprefix("Follow up: ") for line in rest[0::2]]
    answers = [line.removeprefix("Intermediate answer: ") for line in rest[1::2]]
    for hop in oracle.hops(question):
        if (hop.triple.object, True) not in [(answer, query in hop.queries) for query, answer in zip(queries, answers)]:
            return f"Follow up: {next((query for query in hop.queries if query not in queries), hop.queries[0])}"
    return f"So the final answer is: {question.answer}"


def _react_act(oracle: WorldOracle, messages: Sequence[Message]) -> str:
    """ReAct's next thought and action: a search for the first fact that no observation states, or the answer."""
    users = [turn["content"] for turn in messages if turn["role"] == "user"]
    said = "\n".join(turn["content"] for turn in messages if turn["role"] == "assistant")
    question = oracle.question(users[0].removeprefix("Question: "))
    missing = [hop for hop in oracle.hops(question) if not hop.stands_in("\n\n".join(users[1:]))]
    if not missing:
        return f"Thought: I know everything that is needed.\nAction: Finish[{question.answer}]"
    fact = missing[0].triple
    query = next((query for query in missing[0].queries if f"[{query}]" not in said), missing[0].queries[0])
    return f"Thought: I need the {fact.predicate} of {fact.subject}.\nAction: Search[{query}]"


def _ppr_keep(oracle: WorldOracle, messages: Sequence[Message]) -> str:
    """Reply of the PageRank system's filter: numbers of the shown facts that the question needs."""
    facts, _, text = messages[-1]["content"].rpartition("\n\nQuestion: ")
    wanted = {verbalise(hop.triple) for hop in oracle.hops_of(text)}
    lines = facts.splitlines()[1:]
    return json.dumps([n for n, line in enumerate(lines, 1) if line.partition(". ")[2] in wanted])


# T2RAG's clues, filled from the shown propositions, and its answer from resolved clues.


def _t2rag_decompose(oracle: WorldOracle, messages: Sequence[Message]) -> str:
    """One clue per hop; the object of a hop is the subject of the hop that reads the object's article."""
    hops = [hop.triple for hop in oracle.hops(oracle.question(messages[-1]["content"].removeprefix("Question: ")))]
    rows = []
    for number, hop in enumerate(hops):
        earlier = (f"?x{place}" for place in range(number) if hops[place].object == hop.subject)
        rows.append((next(earlier, hop.subject), hop.predicate, f"?x{number}"))
    return "Reasoning: one fact after the other.\nTriples:\n" + "\n".join(" | ".join(row) for row in rows)


def _t2rag_resolve(oracle: WorldOracle, messages: Sequence[Message]) -> str:
    """The open clues that the propositions can fill; a clue with several values is repeated."""
    clues, _, shown = messages[-1]["content"].partition("\n\nPropositions:\n")
    facts = [tuple(fields) for _, fields in triple_rows(shown.partition("\n\nPassages:\n")[0])]
    opened = dict(triple_rows(clues.partition("\n\nResolved clues:\n")[0]))
    known, filled = dict[str, str](), dict[str, str]()
    for _ in opened:
        for number, fields in opened.items():
            subject, predicate, unknown = (known.get(field, field) for field in fields)
            if found := [fact[2] for fact in facts if fact[:2] == (subject, predicate)]:
                known[fields[2]] = found[0]
                filled[number] = f"[{number}] {subject} | {predicate} | {found[0]}"
            elif subject != fields[0]:
                filled[number] = f"[{number}] {subject} | {predicate} | {unknown}"
    return "\n".join(filled.values()) or "(none)"


def _t2rag_answer(oracle: WorldOracle, messages: Sequence[Message]) -> str:
    """The answer, if the clues hold every gold fact."""
    text, _, clues = messages[-1]["content"].removeprefix("Question: ").partition("\n\nClues:\n")
    question = oracle.question(text)
    rows = [fields for _, fields in triple_rows(clues)]
    enough = all(hop.triple.as_list() in rows for hop in oracle.hops(question))
    return f"Answer: {question.answer if enough else REFUSAL}"


# GEAR's new facts, verdict and next question, from the shown passages and facts.


def _gear_read(oracle: WorldOracle, messages: Sequence[Message]) -> str:
    """The new gold facts in the passages."""
    passages, _, text = messages[-1]["content"].rpartition("Question: ")
    passages, _, facts = passages.partition("\n\nFacts found before:\n")
    found = [hop.triple for hop in _gear_missing(oracle, facts, text) if hop.stands_in(passages)]
    return "\n".join(json.dumps(triple.as_list(), ensure_ascii=False) for triple in found) or "NONE"


def _gear_reason(oracle: WorldOracle, messages: Sequence[Message]) -> str:
    """Whether the facts hold every gold fact."""
    facts, _, text = messages[-1]["content"].partition("\n\nQuestion: ")
    if missing := _gear_missing(oracle, facts, text):
        fact = missing[0].triple
        return f"Answerable: No\nWhy: The {fact.predicate} of {fact.subject} is missing."
    return f"Answerable: Yes\nAnswer: {oracle.question(text).answer}"


def _gear_rewrite(oracle: WorldOracle, messages: Sequence[Message]) -> str:
    """The sub-query of the first missing fact."""
    facts, _, rest = messages[-1]["content"].partition("\n\nQuestion: ")
    return _gear_missing(oracle, facts, rest.partition("\n\nReason: ")[0])[0].queries[0]


def _gear_missing(oracle: WorldOracle, facts: str, text: str) -> list[GoldHop]:
    known = _listed(facts)
    return [hop for hop in oracle.hops_of(text) if hop.triple not in known]


# TH-RAG's graph, with a subtopic per article and a topic per kind, and the labels that a question needs.


def _thrag_extract(oracle: WorldOracle, messages: Sequence[Message]) -> str:
    """The statements of an article."""
    title = messages[-1]["content"].removeprefix("Title: ").split("\n", 1)[0]
    article, kind = oracle.world.articles[title], oracle.world.entities[title].kind
    rows = [
        {
            "triple": triple.as_list(),
            "sentence": article.sentences[article.sentence_of[triple.predicate]],
            "subject": {"subtopic": f"about {title}", "main_topic": kind},
            "object": {"subtopic": f"{triple.predicate} of {title}", "main_topic": kind},
        }
        for triple in article.triples
    ]
    return json.dumps(rows, ensure_ascii=False)


def _thrag_topics(oracle: WorldOracle, messages: Sequence[Message]) -> str:
    """The kinds of the needed articles."""
    hops = oracle.hops(oracle.question(messages[-1]["content"].rpartition("Question: ")[2]))
    kinds = dict.fromkeys(oracle.world.entities[hop.triple.subject].kind for hop in hops)
    return json.dumps({"topics": list(kinds)})


def _thrag_subtopics(oracle: WorldOracle, messages: Sequence[Message]) -> str:
    """The listed subtopics of the needed articles."""
    listed, _, text = messages[-1]["content"].rpartition("Question: ")
    wanted = [f"about {hop.triple.subject}" for hop in oracle.hops(oracle.question(text))]
    return json.dumps({"subtopics": [one for one in wanted if f"\n- {one}\n" in listed]}, ensure_ascii=False)


def _thrag_answer(oracle: WorldOracle, messages: Sequence[Message]) -> str:
    """The answer, if sentences and passages hold every gold fact."""
    shown, _, text = messages[-1]["content"].rpartition("\n\nQuestion: ")
    question = oracle.question(text)
    hops = oracle.hops(question)
    known = [hop.stands_in(shown) or f"[{hop.triple.subject}] {hop.sentence}\n" in f"{shown}\n" for hop in hops]
    return question.answer if all(known) else "Insufficient information"


# Role of the call -> function `(oracle, messages) -> reply`.
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
