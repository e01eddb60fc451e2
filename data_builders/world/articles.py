"""Short articles about the entities of the fictional world: two to five varied sentences.

The facts come in any order, two of them sometimes share a sentence, and after the first sentence the subject is often
a pronoun or a short form of its name. The triples of an article are its statements, in the order of the text.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from tripletune.data_builders.world.facts import RELATION_OF, Entity, Relation
from tripletune.models.data.triples import Triple

_NOUN_OPENING = 0.7
_KIND_OPENING = 0.6
_SHARED_SENTENCE = 0.4
_FULL_STATEMENT = 0.3


@dataclass(frozen=True, slots=True)
class Article:
    """An article, its triples, and the sentence that states each predicate."""

    title: str
    kind: str
    sentences: tuple[str, ...]
    triples: tuple[Triple, ...]
    sentence_of: Mapping[str, int]

    @property
    def text(self) -> str:
        """The sentences as a HotpotQA reader joins them."""
        return " ".join(self.sentences)

    @property
    def rows(self) -> list[list[str]]:
        """The triples as JSON has them."""
        return [triple.as_list() for triple in self.triples]


def write_article(rng: random.Random, entity: Entity, world: Mapping[str, Entity]) -> Article:
    """Put the facts of one entity into words.

    Args:
        rng: Source of chance.
        entity: The subject; it has at least one fact.
        world: All entities by title, to know how objects are mentioned.

    Returns:
        The article; every fact of the entity is stated once.
    """
    return _Writer(rng, entity, world).write()


class _Writer:
    def __init__(self, rng: random.Random, entity: Entity, world: Mapping[str, Entity]) -> None:
        self._rng = rng
        self._entity = entity
        self._world = world
        self._left = [RELATION_OF[entity.kind, predicate] for predicate in entity.facts]
        rng.shuffle(self._left)
        self._stated: dict[str, int] = {}
        self._sentences: list[str] = []

    def write(self) -> Article:
        self._opening()
        while self._left:
            self._next_sentence()
        entity = self._entity
        triples = tuple(Triple(entity.title, predicate, entity.facts[predicate]) for predicate in self._stated)
        return Article(entity.title, entity.kind, tuple(self._sentences), triples, dict(self._stated))

    def _opening(self) -> None:
        """A sentence of the form "X is a hockey club based in Y", or any other one."""
        noun = next((r for r in self._left if r.noun), None)
        if noun is not None and self._rng.random() < _NOUN_OPENING:
            kind = noun.noun.format(o=self._entity.facts[noun.predicate])
            self._take(noun)
        elif self._entity.kind != "person" and self._rng.random() < _KIND_OPENING:
            kind = self._entity.alias.removeprefix("the ")
        else:
            self._next_sentence()
            return
        details = [r for r in self._left if r.after]
        sentence = f"{self._entity.mention} is {_with_article(kind)}"
        if details:
            sentence += f" {details[0].after.format(o=self._object(details[0]))}"
            self._take(details[0])
        self._finish(sentence)

    def _next_sentence(self) -> None:
        first = self._left[0]
        self._take(first)
        if not first.verb or (first.full and self._rng.random() < _FULL_STATEMENT):
            self._finish(self._fill(self._rng.choice(first.full), first, pronoun=False))
            return
        sentence = self._fill(f"{{s}} {self._rng.choice(first.verb)}", first, pronoun=True)
        partner = next((r for r in self._left if r.verb), None)
        if partner is not None and self._rng.random() < _SHARED_SENTENCE:
            verb = self._rng.choice(partner.verb)
            # "was born in Y and was born in 1950" is better said in two sentences.
            if f"{verb.split()[0]} " not in f"{sentence} ":
                self._take(partner)
                sentence += f" and {self._fill(verb, partner, pronoun=True)}"
        self._finish(sentence)

    def _take(self, relation: Relation) -> None:
        self._left.remove(relation)
        self._stated[relation.predicate] = len(self._sentences)

    def _fill(self, template: str, relation: Relation, pronoun: bool) -> str:
        object_ = self._object(relation)
        if "@ {o}" in template:
            template, object_ = template.replace("@ {o}", "{o}"), _with_article(object_)
        return template.format(s=self._subject(pronoun), o=object_)

    def _object(self, relation: Relation) -> str:
        text = self._entity.facts[relation.predicate]
        return self._world[text].mention if relation.target else text

    def _subject(self, pronoun: bool) -> str:
        if not self._sentences:
            return self._entity.mention
        names = [self._entity.mention, self._entity.mention, self._entity.alias]
        return self._rng.choice([*names, self._entity.pronoun] if pronoun else names)

    def _finish(self, sentence: str) -> None:
        self._sentences.append(sentence[0].upper() + sentence[1:] + ("" if sentence.endswith(".") else "."))


def _with_article(noun: str) -> str:
    # The spelling of "university" misleads.
    vowel = noun[0] in "aeiou" and not noun.startswith("uni")
    return f"{'an' if vowel else 'a'} {noun}"
