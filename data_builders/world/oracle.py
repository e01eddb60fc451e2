"""A teacher that knows the facts of a fictional world: it answers the prompts of CIRAG as a perfect model would.

It stands in for a teacher LLM wherever the right decisions must be known: tests of the loop, and trajectories to
distil on a machine without a teacher. It reads the user's turns of the chat alone, so it works with anybody's prompts:

- an extraction prompt gets the article's entities and triples, both in one object;
- an integration prompt gets the gold triples among the new candidates, and the sub-query of the first hop that is
  still unknown, in another wording when the first one was asked before; `<no question>` when nothing is unknown;
- an answering prompt gets the gold answer when the evidence holds every gold fact, else the refusal word.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tripletune.data_builders.world import RELATION_OF
from tripletune.data_builders.world.build import MANIFEST, World, WorldOptions, generate_world
from tripletune.data_builders.world.questions import WorldQuestion
from tripletune.models.data.records import Passage, normalize_answer
from tripletune.models.data.triples import Triple
from tripletune.models.files import read_json
from tripletune.models.llm import CallError, Completion, Message, Sampling
from tripletune.rag.systems.cirag import REFUSAL
from tripletune.rag.systems.cirag.extraction import Fact
from tripletune.rag.systems.cirag.integration import CANDIDATES, CORE, MAIN_QUESTION, QUESTION, Decision, write_decision

_SECTION = re.compile(r"^\[\[## (.+?) ##\]\]\n(.*)$", re.MULTILINE)
_NOWHERE = Passage("", "", "-")


@dataclass(frozen=True, slots=True)
class _Hop:
    """What one hop of a question needs: its fact, the sentence that states it, and ways to ask for it."""

    triple: Triple
    sentence: str
    queries: tuple[str, ...]


class WorldOracle:
    """A `Backend` that answers from the facts of a world.

    Args:
        world: One split of a world.

    Attributes:
        model: "oracle:" with the world's seed and split.
    """

    def __init__(self, world: World) -> None:
        self.model = f"oracle:world{world.seed}-{world.split}"
        self._world = world
        self._questions = {" ".join(question.text.split()): question for question in world.questions}

    @classmethod
    def open(cls, folder: str | Path, split: str) -> WorldOracle:
        """The oracle of a split of a world that `data_builders.world.build` has written; the world is made again.

        Raises:
            FileNotFoundError: the folder holds no world.
            ValueError: the manifest cannot be read, or there is no such split.
        """
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
        """Reply to a prompt of CIRAG.

        Raises:
            CallError: it is no such prompt, or about another world.
        """
        turns = [message["content"] for message in messages if message["role"] == "user"]
        if turns and f"[[## {CANDIDATES} ##]]" in turns[-1]:
            text = self._integrate(messages)
        elif turns and turns[-1].startswith("Title: "):
            text = self._extract(turns[-1])
        elif turns and "\n\nQuestion: " in turns[-1]:
            text = self._answer(turns[-1])
        else:
            raise CallError(f"{self.model}: this is no prompt of CIRAG")
        return Completion(text, sum(len(message["content"].split()) for message in messages), len(text.split()))

    async def close(self) -> None:
        """Nothing is held open."""

    def _extract(self, turn: str) -> str:
        title = turn.removeprefix("Title: ").split("\n", 1)[0]
        article = self._world.articles.get(title)
        triples = article.rows if article else []
        entities = list(dict.fromkeys([title, *(object_ for _, _, object_ in triples)]))
        return json.dumps({"entities": entities, "triples": triples}, ensure_ascii=False)

    def _integrate(self, messages: Sequence[Message]) -> str:
        users = [dict(_SECTION.findall(message["content"])) for message in messages if message["role"] == "user"]
        told = [dict(_SECTION.findall(message["content"])) for message in messages if message["role"] == "assistant"]
        question = self._question(users[0].get(MAIN_QUESTION, ""))
        hops = self._hops(question)
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
        facts = tuple(Fact(triple, _NOWHERE, "") for triple in core)
        return write_decision(Decision(thought, facts, query))

    def _answer(self, turn: str) -> str:
        evidence, _, text = turn.rpartition("\n\nQuestion: ")
        question = self._question(text)
        level, _, rest = evidence.partition(":\n")
        hops = self._hops(question)
        if level == "Triples":
            listed = {Triple(*json.loads(line)) for line in rest.splitlines() if line.startswith("[")}
            enough = {hop.triple for hop in hops} <= listed
        else:
            enough = all(" ".join(hop.sentence.split()) in rest for hop in hops)
        if not hops or not enough:
            return f"Thought: The evidence does not hold every fact that is needed.\nAnswer: {REFUSAL}"
        facts = "; ".join(f"{hop.triple.subject}, {hop.triple.predicate}: {hop.triple.object}" for hop in hops)
        return f"Thought: {facts}.\nAnswer: {question.answer}"

    def _question(self, text: str) -> WorldQuestion:
        found = self._questions.get(" ".join(text.split()))
        if found is None:
            raise CallError(f"{self.model}: the world has no question {text!r}")
        return found

    def _hops(self, question: WorldQuestion) -> list[_Hop]:
        hops = []
        for title, predicate, subquery in zip(question.helpful, question.predicates, question.subqueries):
            entity, article = self._world.entities[title], self._world.articles[title]
            wordings = [form.format(x=entity.mention) for form in RELATION_OF[entity.kind, predicate].ask]
            # The last resort has the title and nothing that could draw in other articles.
            queries = (subquery, *wordings, f"{title} {predicate}", title)
            sentence = article.sentences[article.sentence_of[predicate]]
            hops.append(_Hop(Triple(title, predicate, entity.facts[predicate]), sentence, queries))
        return hops


def _triples(text: str) -> list[Triple]:
    return [Triple(*row) for row in json.loads(text)["fact"]]
