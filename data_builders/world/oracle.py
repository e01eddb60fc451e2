"""A teacher that knows the facts of a fictional world and answers a system's prompts like a perfect model.

The oracle replaces a teacher LLM in tests of the loop, and for trajectories on a machine without a teacher. It reads
only the turns of the chat, so it works with any prompts.

A call of a role `system.call` is answered by `oracle_replies.REPLIES`. Any other call of a role `system.answer`, which
reads passages, gets the gold answer if the passages hold every gold fact, else the refusal word. Calls of CIRAG and
calls without a role are recognised by their form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from tripletune.core.calls import CALL_ROLE, Backend, CallError, Completion, Message, Sampling, SetupError
from tripletune.core.data.answers import normalize_answer
from tripletune.core.data.triples import Triple
from tripletune.core.files import read_json
from tripletune.data_builders.world import RELATION_OF, Split
from tripletune.data_builders.world.build import MANIFEST, World, WorldOptions, generate_world
from tripletune.data_builders.world.oracle_replies import REPLIES, listed_triples, turns_of
from tripletune.data_builders.world.questions import WorldQuestion
from tripletune.llm.replies import REPAIR_ROLE
from tripletune.rag.chat_generator import REFUSAL
from tripletune.rag.systems.cirag.integration import CANDIDATES, CORE, MAIN_QUESTION, QUESTION, Decision, decision_text

# A section of CIRAG's prompts and replies: heading and content.
_SECTION = re.compile(r"^\[\[## (.+?) ##\]\]\n(.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class GoldHop:
    """A fact that a question needs, with its sentence and its sub-queries, the gold sub-query first."""

    triple: Triple
    sentence: str
    queries: tuple[str, ...]

    def stands_in(self, passages: str) -> bool:
        """Whether one of the passages, separated by blank lines, is the article of the fact and states the fact."""
        heading = f"{self.triple.subject}\n"
        for passage in passages.split("\n\n"):
            _, is_article, text = passage.partition(heading)
            if is_article and self.sentence in text:
                return True
        return False

    def query_not_in(self, asked: Iterable[str]) -> str:
        """The first sub-query that was not asked, or the gold one if all were.

        A loop that searches twice for the same words finds the same passages, so a hop that was missed is asked in
        other words.
        """
        asked = set(asked)
        for query in self.queries:
            if query not in asked:
                return query
        return self.queries[0]


class WorldOracle(Backend):
    """A `Backend` that answers from the facts of one split of a world.

    `model` names the world and its split, so that replies of two worlds never share a key in a ledger. Replies count
    words as tokens, since there is no tokenizer.
    """

    def __init__(self, world: World) -> None:
        self.model = f"oracle:world{world.seed}-{world.split}"
        self.world = world
        self._questions = {_with_single_spaces(question.text): question for question in world.questions}
        self._hop_of_query: dict[str, GoldHop] = {}
        for question in world.questions:
            for hop in self.hops(question):
                for query in hop.queries:
                    self._hop_of_query[query] = hop

    @classmethod
    def open(cls, folder: str | Path, split: str) -> WorldOracle:
        """The oracle of a split of a world from `data_builders.world.build`; the world is generated again."""
        path = Path(folder) / MANIFEST
        if not path.is_file():
            raise FileNotFoundError(
                f"{folder} holds no {MANIFEST}: an oracle is named by the folder of `build world` and a split, such as "
                "runs/world/test"
            )
        try:
            manifest = read_json(path)
            options = WorldOptions(**manifest["options"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} cannot be read as a world of this version: {error}") from None
        if split not in manifest["splits"]:
            raise ValueError(f"{folder} has no split {split!r}; it has {', '.join(manifest['splits'])}")
        return cls(generate_world(options, cast(Split, split)))

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        """Reply to a system's prompt by its role; see `llm.CALL_ROLE`."""
        text = self._reply_to_role(CALL_ROLE.get().removesuffix(REPAIR_ROLE), messages)
        prompt_words = sum(len(message["content"].split()) for message in messages)
        return Completion(text, prompt_words, len(text.split()))

    def _reply_to_role(self, role: str, messages: Sequence[Message]) -> str:
        """The reply to a call of a role; without a known role, the form of the prompt says what is asked.

        An unknown role is an error and no refusal: a system that was never taught to the oracle would seem to fail.
        """
        if role in REPLIES:
            return REPLIES[role](self, messages)
        user_turns = turns_of(messages, "user")
        turn = user_turns[-1] if user_turns else ""
        system, _, call = role.partition(".")
        if system != "cirag" and call == "answer":
            return self.answer(turn)
        if system != "cirag" and call:
            raise SetupError(
                f"{self.model}: no reply for the role {role}: add a function to REPLIES of "
                "tripletune.data_builders.world.oracle_replies, in that file or from the package of the system"
            )
        if f"[[## {CANDIDATES} ##]]" in turn:
            return self._cirag_integrate(messages)
        if turn.startswith("Title: "):
            return self._cirag_extract(turn)
        if "\n\nQuestion: " in turn:
            return self._cirag_answer(turn)
        raise CallError(f"{self.model}: the prompt is not of a system that the oracle knows")

    def _cirag_extract(self, turn: str) -> str:
        """CIRAG's triples of a passage: those of its article."""
        title = turn.removeprefix("Title: ").split("\n", 1)[0]
        article = self.world.articles.get(title)
        triples = article.rows if article else []
        objects = [object_ for _, _, object_ in triples]
        entities = list(dict.fromkeys([title, *objects]))
        return json.dumps({"entities": entities, "triples": triples}, ensure_ascii=False)

    def _cirag_integrate(self, messages: Sequence[Message]) -> str:
        """CIRAG's decision: the gold triples among the new candidates, and a sub-query of the first missing hop.

        A sub-query that was asked before is not asked again, since the loop ends at a repeated one; without another
        wording the query is empty, which ends the loop.
        """
        rounds = list(map(_sections_of_turn, turns_of(messages, "user")))
        # Only the first turn has the main question, and only the last has the new candidates.
        question = self.question(rounds[0].get(MAIN_QUESTION, ""))
        candidates = _triples_in(rounds[-1][CANDIDATES])
        # The loop itself keeps what earlier decisions chose, so the core of this one has new triples only.
        kept: list[Triple] = []
        asked = {normalize_answer(question.text)}
        for decision in map(_sections_of_turn, turns_of(messages, "assistant")):
            kept += _triples_in(decision[CORE])
            asked.add(normalize_answer(decision[QUESTION]))
        hops = self.hops(question)
        core = [hop.triple for hop in hops if hop.triple in candidates]
        missing = [hop for hop in hops if hop.triple not in kept and hop.triple not in core]
        query = ""
        if missing:
            query = _unasked_query(missing[0], asked)
            fact = missing[0].triple
            conclusion = f"Still missing: {fact.predicate} of {fact.subject}."
        else:
            conclusion = f"With what was kept before, the query can be answered: {question.answer}."
        return decision_text(Decision(f"{facts_in_sentences(core)}{conclusion}", tuple(core), query))

    def _cirag_answer(self, turn: str) -> str:
        """CIRAG's answer from triples, or from passages that hold every gold sentence.

        With less than all facts it refuses, so that the cascade goes on to the next level.
        """
        evidence, _, text = turn.rpartition("\n\nQuestion: ")
        question = self.question(text)
        hops = self.hops(question)
        level, _, lines = evidence.partition(":\n")
        if level == "Triples":
            triples = listed_triples(lines)
            is_enough = all(hop.triple in triples for hop in hops)
        else:
            is_enough = all(_with_single_spaces(hop.sentence) in lines for hop in hops)
        if not hops or not is_enough:
            return f"Thought: The evidence does not hold every fact that is needed.\nAnswer: {REFUSAL}"
        facts = "; ".join(f"{hop.triple.subject}, {hop.triple.predicate}: {hop.triple.object}" for hop in hops)
        return f"Thought: {facts}.\nAnswer: {question.answer}"

    def answer(self, turn: str) -> str:
        """The answer to the question or sub-query at the end, if the passages before it hold its facts."""
        passages, _, text = turn.rpartition("Question: ")
        if not all(hop.stands_in(passages) for hop in self.hops_of(text)):
            return REFUSAL
        hop = self._hop_of_query.get(_with_single_spaces(text))
        if hop:
            return hop.triple.object
        return self.question(text).answer

    def question(self, text: str) -> WorldQuestion:
        """The question with this wording, apart from white space.

        Raises:
            CallError: The world has no such question; a system that changes the question's words can't be answered for.
        """
        question = self._questions.get(_with_single_spaces(text))
        if question is None:
            raise CallError(f"{self.model}: the world has no question {text!r}")
        return question

    def hops_of(self, text: str) -> list[GoldHop]:
        """The hops of a question or sub-query with this wording; a sub-query is one hop.

        Raises:
            CallError: The world has neither.
        """
        hop = self._hop_of_query.get(_with_single_spaces(text))
        if hop:
            return [hop]
        return self.hops(self.question(text))

    def hops(self, question: WorldQuestion) -> list[GoldHop]:
        """The hops of the question in reasoning order; none for common knowledge."""
        hops = []
        for title, predicate, subquery in zip(question.helpful, question.predicates, question.subqueries, strict=True):
            entity = self.world.entities[title]
            wordings = [form.format(x=entity.mention) for form in RELATION_OF[entity.kind, predicate].ask]
            # The last two have no words but the title and the predicate, so that they match no other article.
            queries = (subquery, *wordings, f"{title} {predicate}", title)
            triple = Triple(title, predicate, entity.facts[predicate])
            hops.append(GoldHop(triple, self.world.articles[title].sentence(predicate), queries))
        return hops


def _unasked_query(hop: GoldHop, asked: set[str]) -> str:
    """The first sub-query of a hop that is not among `asked`, normalised as in CIRAG's loop; "" if all are."""
    for query in hop.queries:
        if normalize_answer(query) not in asked:
            return query
    return ""


def facts_in_sentences(core: Sequence[Triple]) -> str:
    """The core triples of a decision as sentences of its reasoning."""
    if not core:
        return "No new fact helps. "
    facts = ""
    for triple in core:
        facts += f"{triple.subject}: {triple.predicate} {triple.object}. "
    return facts


def _with_single_spaces(text: str) -> str:
    """A text with single spaces, since prompts may break lines elsewhere than the world does."""
    return " ".join(text.split())


def _sections_of_turn(turn: str) -> Mapping[str, str]:
    """The sections of a turn of CIRAG by their headings."""
    return dict(_SECTION.findall(turn))


def _triples_in(section: str) -> list[Triple]:
    """The triples of a section of CIRAG, which holds JSON."""
    return [Triple(*row) for row in json.loads(section)["fact"]]
