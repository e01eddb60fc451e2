"""A teacher that knows the facts of a fictional world: it answers the prompts of a system as a perfect model would.

It stands in for a teacher LLM wherever the right decisions must be known: tests of the loop, and trajectories to
distil on a machine without a teacher. It reads the turns of the chat alone, so it works with anybody's prompts.

Calls of a role `system.call` are answered by `replies.py:REPLIES`. A reader of passages, `system.answer`, needs none:
it gets the gold answer when the passages hold every gold fact, else the refusal word. Calls without a role are CIRAG's,
told apart by their form:

- an extraction prompt gets the article's entities and triples, both in one object;
- an integration prompt gets the gold triples among the new candidates, and the sub-query of the first hop that is
  still unknown, in another wording when the first one was asked before; `<no question>` when nothing is unknown;
- an answering prompt gets the gold answer when the evidence holds every gold fact, else the refusal word.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from tripletune.data_builders.world import RELATION_OF
from tripletune.data_builders.world.build import MANIFEST, World, WorldOptions, generate_world
from tripletune.data_builders.world.questions import WorldQuestion
from tripletune.data_builders.world.replies import REPLIES, GoldHop
from tripletune.models.data.records import normalize_answer
from tripletune.models.data.triples import Triple
from tripletune.models.files import read_json
from tripletune.models.llm import CALL_ROLE, Backend, CallError, Completion, Message, Sampling
from tripletune.models.llm.replies import REPAIR_ROLE
from tripletune.rag.chat_generator import REFUSAL
from tripletune.rag.systems.cirag.integration import CANDIDATES, CORE, MAIN_QUESTION, QUESTION, Decision, write_decision

_SECTION = re.compile(r"^\[\[## (.+?) ##\]\]\n(.*)$", re.MULTILINE)


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
        """The oracle of a split of a world that `data_builders.world.build` has written; the world is made again."""
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
        """Reply to a prompt of a system; its role says what it asks for, see `models.llm.CALL_ROLE`."""
        role = CALL_ROLE.get().removesuffix(REPAIR_ROLE)
        system, _, call = role.partition(".")
        turns = [message["content"] for message in messages if message["role"] == "user"]
        if reply := REPLIES.get(role):
            text = reply(self, messages)
        elif system != "cirag" and call == "answer":
            text = self.answer(turns[-1])
        elif turns and f"[[## {CANDIDATES} ##]]" in turns[-1]:
            text = self._integrate(messages)
        elif turns and turns[-1].startswith("Title: "):
            text = self._extract(turns[-1])
        elif turns and "\n\nQuestion: " in turns[-1]:
            text = self._answer(turns[-1])
        else:
            raise CallError(f"{self.model}: this is no prompt of a system that it knows")
        return Completion(text, sum(len(message["content"].split()) for message in messages), len(text.split()))

    def _extract(self, turn: str) -> str:
        title = turn.removeprefix("Title: ").split("\n", 1)[0]
        article = self.world.articles.get(title)
        triples = article.rows if article else []
        entities = list(dict.fromkeys([title, *(object_ for _, _, object_ in triples)]))
        return json.dumps({"entities": entities, "triples": triples}, ensure_ascii=False)

    def _integrate(self, messages: Sequence[Message]) -> str:
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
        if not missing:
            thought = f"{found} With what was kept before, the query can be answered: {question.answer}."
        else:
            thought = f"{found} Still missing: {missing[0].triple.predicate} of {missing[0].triple.subject}."
        return write_decision(Decision(thought, tuple(core), query))

    def _answer(self, turn: str) -> str:
        evidence, _, text = turn.rpartition("\n\nQuestion: ")
        question = self.question(text)
        level, _, rest = evidence.partition(":\n")
        hops = self.hops(question)
        if level == "Triples":
            listed = {Triple(*json.loads(line)) for line in rest.splitlines() if line.startswith("[")}
            enough = {hop.triple for hop in hops} <= listed
        else:
            enough = all(" ".join(hop.sentence.split()) in rest for hop in hops)
        if not hops or not enough:
            return f"Thought: The evidence does not hold every fact that is needed.\nAnswer: {REFUSAL}"
        facts = "; ".join(f"{hop.triple.subject}, {hop.triple.predicate}: {hop.triple.object}" for hop in hops)
        return f"Thought: {facts}.\nAnswer: {question.answer}"

    def answer(self, turn: str) -> str:
        """The answer to a question or sub-query that stands last, after passages that must hold its facts."""
        passages, _, text = turn.rpartition("Question: ")
        text = " ".join(text.split())
        if hop := self._subqueries.get(text):
            return hop.triple.object if hop.stands_in(passages) else REFUSAL
        question = self.question(text)
        enough = all(hop.stands_in(passages) for hop in self.hops(question))
        return question.answer if enough else REFUSAL

    def question(self, text: str) -> WorldQuestion:
        """The question of this wording."""
        found = self._questions.get(" ".join(text.split()))
        if found is None:
            raise CallError(f"{self.model}: the world has no question {text!r}")
        return found

    def hops_of(self, text: str) -> list[GoldHop]:
        """What a question or sub-query of this wording needs."""
        hop = self._subqueries.get(" ".join(text.split()))
        return [hop] if hop else self.hops(self.question(text))

    def hops(self, question: WorldQuestion) -> list[GoldHop]:
        """What the question needs, in reasoning order; nothing for common knowledge."""
        hops = []
        for title, predicate, subquery in zip(question.helpful, question.predicates, question.subqueries):
            entity, article = self.world.entities[title], self.world.articles[title]
            wordings = [form.format(x=entity.mention) for form in RELATION_OF[entity.kind, predicate].ask]
            # The last resort has the title and nothing that could draw in other articles.
            queries = (subquery, *wordings, f"{title} {predicate}", title)
            sentence = article.sentences[article.sentence_of[predicate]]
            hops.append(GoldHop(Triple(title, predicate, entity.facts[predicate]), sentence, queries))
        return hops


def _triples(text: str) -> list[Triple]:
    return [Triple(*row) for row in json.loads(text)["fact"]]
