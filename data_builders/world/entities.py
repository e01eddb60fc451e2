"""The entities of the fictional world and their facts, which are free of contradictions."""

from __future__ import annotations

import random
from bisect import bisect_right
from typing import NamedTuple

from tripletune.data_builders.world import RELATIONS_OF_KIND, WORLD, Entity, Relation
from tripletune.data_builders.world.names import Namer

MINIMUM_ARTICLES = 120
# The share of each kind of entity, relative to the others.
_MIX: dict[str, int] = WORLD["mix"]
_FEWEST_OF_A_KIND = 3
# An article keeps so many facts; others are left out with this probability.
_FEWEST_FACTS = 3
_LEFT_OUT = 0.4
_FIRST_BIRTH = 1925
_LAST_BIRTH = 1985
_GROWN_UP = 20
_MARRIED = 0.8
_BASED_ON_NOVEL = 0.6
# Facts that only some entities of a kind have.
_SPOUSE = "Spouse"
_BASED_ON = "Based on"


class _GivenFacts(NamedTuple):
    """The facts of an entity that others depend on.

    Attributes:
        facts: Predicate -> object.
        year: The year in which the entity's people must be adults; 0 for any.
    """

    facts: dict[str, str]
    year: int = 0


class EntityBuilder:
    """Makes about `articles` entities (at least `MINIMUM_ARTICLES`) of all kinds, and their facts.

    All names are made first, since facts refer to entities of other kinds; marriages come after all facts, and
    omissions last. Everything is drawn from `rng`, so another order of these steps makes another world of the same
    seed.
    """

    def __init__(self, rng: random.Random, namer: Namer, articles: int) -> None:
        self._rng = rng
        self._namer = namer
        articles = max(articles, MINIMUM_ARTICLES)
        self._of_kind: dict[str, list[Entity]] = {}
        for kind, share in _MIX.items():
            number = max(_FEWEST_OF_A_KIND, round(articles * share / sum(_MIX.values())))
            self._of_kind[kind] = [namer.entity(kind) for _ in range(number)]
        # People are sorted by birth, so that the adults of a given year are a prefix of the list.
        self._births = sorted(rng.randint(_FIRST_BIRTH, _LAST_BIRTH) for _ in self._of_kind["person"])
        # In every year that is drawn, somebody is an adult.
        self._births[0] = _FIRST_BIRTH

    def build(self) -> dict[str, Entity]:
        """Entities by title, in the order of their kinds; call it once, since it fills the entities in place."""
        by_title = {}
        for kind, entities in self._of_kind.items():
            for number, entity in enumerate(entities):
                entity.facts.update(self._draw_facts(kind, number))
                by_title[entity.title] = entity
        self._marry_neighbours()
        for entity in by_title.values():
            self._leave_out_facts(entity)
        return by_title

    def _draw_entity(self, kind: str) -> Entity:
        """Draw an entity of a kind."""
        return self._rng.choice(self._of_kind[kind])

    def _draw_facts(self, kind: str, number: int) -> dict[str, str]:
        """Draw the facts of the entity with this number of its kind, before marriages and omissions."""
        given = self._draw_given_facts(kind, number)
        facts = {}
        for relation in RELATIONS_OF_KIND[kind]:
            if relation.predicate in given.facts:
                facts[relation.predicate] = given.facts[relation.predicate]
            elif relation.predicate not in (_SPOUSE, _BASED_ON):
                facts[relation.predicate] = self._draw_object(relation, given.year)
        if kind == "film" and self._rng.random() >= _BASED_ON_NOVEL:
            facts.pop(_BASED_ON, None)
        return facts

    def _draw_given_facts(self, kind: str, number: int) -> _GivenFacts:
        """Draw the facts that must fit those of other entities: capitals, countries of towns, births, years of works.

        Args:
            kind: The kind of the entity.
            number: Its place among the entities of its kind, by which a country finds its capital and a person the
                birth year.
        """
        if kind == "country":
            language = self._namer.coin(["ish", "ese"])
            currency = self._namer.coin().lower()
            capital = self._of_kind["town"][number].title
            return _GivenFacts({"Capital": capital, "Language": language, "Currency": currency})
        if kind == "town":
            countries = self._of_kind["country"]
            # The first towns are the capitals.
            country = countries[number] if number < len(countries) else self._rng.choice(countries)
            return _GivenFacts({"Country": country.title})
        if kind == "person":
            return _GivenFacts({"Birth year": str(self._births[number])})
        for relation in RELATIONS_OF_KIND[kind]:
            if relation.grown_up:
                return self._draw_facts_of_work(kind, relation)
        return _GivenFacts({})

    def _draw_facts_of_work(self, kind: str, relation: Relation) -> _GivenFacts:
        """Draw the given facts of what people make, in a year in which they are adults; `relation` holds this year.

        `mix` in `world.yaml` sorts the kinds so that the facts that are read here exist: towns before bridges, bands
        before albums, novels before films.
        """
        facts = {}
        years = relation.range
        novel = None
        if kind == "bridge":
            # It stands in a town on the river that it crosses.
            town = self._draw_entity("town")
            facts = {"Location": town.title, "Crosses": town.facts["River"]}
        elif kind == "album":
            # The range counts from the year of the band.
            band = self._draw_entity("band")
            facts = {"Performer": band.title}
            years = tuple(int(band.facts["Founded in"]) + age for age in years)
        elif kind == "film":
            novel = self._draw_entity("novel")
        year = self._rng.randint(*years)
        if novel and int(novel.facts["Publication year"]) < year:
            facts = {_BASED_ON: novel.title}
        return _GivenFacts({**facts, relation.predicate: str(year)}, year)

    def _draw_object(self, relation: Relation, year: int) -> str:
        """Draw the object of a relation; people are adults in `year`, if it is not 0.

        People are sorted by birth, so the adults of a year are the first of the list. Each case draws from the one
        random generator of the world, so a change in what is drawn, or when, makes another world of the same seed.
        """
        if relation.target == "person" and year:
            adults = bisect_right(self._births, year - _GROWN_UP)
            return self._of_kind["person"][self._rng.randrange(adults)].title
        if relation.target:
            return self._draw_entity(relation.target).title
        if relation.words:
            return self._rng.choice(relation.words)
        if not relation.range:
            return relation.form.format(self._namer.coin())
        lowest, highest, *factor = relation.range
        number = self._rng.randint(lowest, highest)
        if factor:
            number *= factor[0]
        return relation.form.format(number)

    def _marry_neighbours(self) -> None:
        """Add marriages to the facts of people: of neighbours in the list, who are of similar age.

        Different pronouns keep "She is married to him. She …" clear.
        """
        people = self._of_kind["person"]
        # The last one of an odd number stays alone.
        for person, neighbour in zip(people[::2], people[1::2]):
            if person.pronoun != neighbour.pronoun and self._rng.random() < _MARRIED:
                person.facts[_SPOUSE] = neighbour.title
                neighbour.facts[_SPOUSE] = person.title

    def _leave_out_facts(self, entity: Entity) -> None:
        """Remove some optional facts of an entity, so that not every article of a kind has the same."""
        for relation in RELATIONS_OF_KIND[entity.kind]:
            if not relation.optional or relation.predicate not in entity.facts:
                continue
            if len(entity.facts) > _FEWEST_FACTS and self._rng.random() < _LEFT_OUT:
                del entity.facts[relation.predicate]
