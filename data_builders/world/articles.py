"""Write the facts of an entity as an article of varied sentences."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tripletune.core.data.triples import Triple
from tripletune.data_builders.world import RELATION_OF, Entity, Relation

# Probabilities of an opening "X is a hockey club", of "X is a film", of two facts in one sentence, and of a statement
# with a form of its own.
_NOUN_OPENING = 0.7
_KIND_OPENING = 0.6
_SHARED_SENTENCE = 0.4
_FULL_STATEMENT = 0.3


@dataclass(frozen=True, slots=True)
class Article:
    """An article, its triples, and the number of the sentence that states each predicate."""

    title: str
    sentences: tuple[str, ...]
    triples: tuple[Triple, ...]
    sentence_of: Mapping[str, int]

    @property
    def text(self) -> str:
        """The sentences, joined as in HotpotQA's reader."""
        return " ".join(self.sentences)

    @property
    def rows(self) -> list[list[str]]:
        """The triples as lists for JSON."""
        return [triple.as_list() for triple in self.triples]

    def sentence(self, predicate: str) -> str:
        """The sentence that states a predicate."""
        return self.sentences[self.sentence_of[predicate]]


class ArticleWriter:
    """Writes the facts of one entity, in random order, as two to five varied sentences that state each fact once.

    Args:
        rng: Draws orders and wordings; the articles of a split share it, so a draw more or less changes all later
            articles.
        entity: The entity, with at least one fact.
        world: All entities by title, since a name in a sentence may take an article ("the Mar River").
    """

    def __init__(self, rng: random.Random, entity: Entity, world: Mapping[str, Entity]) -> None:
        self._rng = rng
        self._entity = entity
        self._world = world
        self._left = [RELATION_OF[entity.kind, predicate] for predicate in entity.facts]
        rng.shuffle(self._left)
        self._stated: dict[str, int] = {}
        self._sentences: list[str] = []

    def write(self) -> Article:
        """The article, with its triples in the order of the text; call it once, since it uses up the facts to state."""
        self._write_opening()
        while self._left:
            self._write_next_sentence()
        title = self._entity.title
        facts = self._entity.facts
        triples = tuple(Triple(title, predicate, facts[predicate]) for predicate in self._stated)
        return Article(title, tuple(self._sentences), triples, self._stated)

    def _write_opening(self) -> None:
        """Write a sentence of the form "X is a hockey club based in Y", or any other, as not all texts begin so.

        The first sentence names the entity in full, which makes later aliases and pronouns clear.
        """
        noun = self._first_left(lambda relation: relation.noun)
        if noun is not None and self._rng.random() < _NOUN_OPENING:
            kind = noun.noun.format(o=self._entity.facts[noun.predicate])
            self._mark_stated(noun)
        elif self._entity.kind != "person" and self._rng.random() < _KIND_OPENING:
            kind = self._entity.alias.removeprefix("the ")
        else:
            self._write_next_sentence()
            return
        sentence = f"{self._entity.mention} is {_with_article(kind)}"
        detail = self._first_left(lambda relation: relation.after)
        if detail is not None:
            sentence += f" {detail.after.format(o=self._object_in_sentence(detail))}"
            self._mark_stated(detail)
        self._add_sentence(sentence)

    def _write_next_sentence(self) -> None:
        """Write a sentence with the next fact, and perhaps a second one: "X was born in Y and is married to Z".

        A relation without a verb has whole statements only, which are not joined with others.
        """
        relation = self._left[0]
        self._mark_stated(relation)
        if not relation.verb or (relation.full and self._rng.random() < _FULL_STATEMENT):
            statement = self._rng.choice(relation.full)
            self._add_sentence(self._fill_statement(statement, relation, pronoun=False))
            return
        sentence = self._fill_statement(f"{{s}} {self._rng.choice(relation.verb)}", relation, pronoun=True)
        partner = self._first_left(lambda relation: relation.verb)
        if partner is not None and self._rng.random() < _SHARED_SENTENCE:
            verb = self._rng.choice(partner.verb)
            # "was born in Y and was born in 1950" reads better as two sentences.
            if f"{verb.split()[0]} " not in f"{sentence} ":
                self._mark_stated(partner)
                sentence += f" and {self._fill_statement(verb, partner, pronoun=True)}"
        self._add_sentence(sentence)

    def _first_left(self, form_of: Callable[[Relation], object]) -> Relation | None:
        """The first relation still to state that has a wording of this form."""
        for relation in self._left:
            if form_of(relation):
                return relation
        return None

    def _mark_stated(self, relation: Relation) -> None:
        """Move a relation from those that are left to those that the next sentence states."""
        self._left.remove(relation)
        self._stated[relation.predicate] = len(self._sentences)

    def _fill_statement(self, template: str, relation: Relation, pronoun: bool) -> str:
        """A statement with subject and object; "@ {o}" stands for an object with its article, "a" or "an"."""
        object_ = self._object_in_sentence(relation)
        if "@ {o}" in template:
            template = template.replace("@ {o}", "{o}")
            object_ = _with_article(object_)
        # The subject is drawn also where the template has none, since another order of draws would change the world.
        return template.format(s=self._draw_subject(pronoun), o=object_)

    def _object_in_sentence(self, relation: Relation) -> str:
        """The object as it stands in a sentence: a name with an article of its own keeps it."""
        text = self._entity.facts[relation.predicate]
        if relation.target:
            return self._world[text].mention
        return text

    def _draw_subject(self, pronoun: bool) -> str:
        """The whole name in the first sentence; later also the alias, and the pronoun where it is clear."""
        if not self._sentences:
            return self._entity.mention
        names = [self._entity.mention, self._entity.mention, self._entity.alias]
        if pronoun:
            names.append(self._entity.pronoun)
        return self._rng.choice(names)

    def _add_sentence(self, sentence: str) -> None:
        """Add a sentence, with a capital letter and a full stop."""
        if not sentence.endswith("."):
            sentence += "."
        self._sentences.append(sentence[0].upper() + sentence[1:])


def _with_article(noun: str) -> str:
    """A noun with "a" or "an"; "university" starts with a vowel letter but takes "a"."""
    starts_with_vowel = noun[0] in "aeiou" and not noun.startswith("uni")
    return f"an {noun}" if starts_with_vowel else f"a {noun}"
