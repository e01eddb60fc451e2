"""The entities of the fictional world of `data_builders.world` and the facts between them, free of contradictions.

Nobody directs a film before growing up, no album is older than its band, a bridge stands in a town on the river that
it crosses, and a capital lies in its own country: a learner may rely on what it knows about the real world.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field

from tripletune.data_builders.world.names import Namer
from tripletune.data_builders.world.relations import PERSON_NOUNS, RELATIONS_OF_KIND

# Entities of a kind among a hundred; few rivers, countries and bands make many things share one. A kind stands after
# the kinds whose facts decide its own (a film after the novel it is based on).
_MIX = {
    "country": 4,
    "town": 16,
    "river": 6,
    "lake": 4,
    "person": 26,
    "company": 8,
    "novel": 6,
    "film": 9,
    "band": 4,
    "album": 5,
    "university": 4,
    "club": 5,
    "bridge": 3,
}
MINIMUM_ARTICLES = 120
_FEWEST_FACTS = 3
_LEFT_OUT = 0.4
_BORN = (1925, 1985)
_GROWN_UP = 20
_SPORTS = ("football", "hockey", "handball", "rugby", "tennis", "rowing", "volleyball", "basketball")
_GENRES = ("jazz", "folk", "rock", "blues", "pop", "metal", "soul", "punk")
_PRODUCTS = ("bicycles", "clocks", "pianos", "boats", "shoes", "cameras", "chairs", "bread", "paper", "glass")


@dataclass(slots=True)
class Entity:
    """A thing with an article.

    Attributes:
        title: Its name, unique in all splits.
        kind: Its kind, for example "film".
        alias: Short form for later sentences: a family name, or "the film".
        pronoun: "He", "She" or "It".
        facts: Predicate to object; an object with an article is given by its title.
    """

    title: str
    kind: str
    alias: str
    pronoun: str
    facts: dict[str, str] = field(default_factory=dict)

    @property
    def mention(self) -> str:
        """The name as it stands in a sentence: rivers and bridges take an article."""
        return f"the {self.title}" if self.kind in ("river", "bridge") else self.title


def build_entities(rng: random.Random, namer: Namer, articles: int) -> dict[str, Entity]:
    """Make entities of every kind and the facts between them.

    Args:
        rng: Source of chance.
        namer: Source of names.
        articles: About how many entities to make; at least `MINIMUM_ARTICLES`.

    Returns:
        Entities by title, in the order of their kinds.
    """
    return _Builder(rng, namer, max(articles, MINIMUM_ARTICLES)).build()


class _Builder:
    def __init__(self, rng: random.Random, namer: Namer, articles: int) -> None:
        self._rng = rng
        self._namer = namer
        self._of: dict[str, list[Entity]] = {}
        for kind, share in _MIX.items():
            count = max(3, round(articles * share / sum(_MIX.values())))
            self._of[kind] = [self._new(kind) for _ in range(count)]
        # Sorted by birth, so that everybody grown up in a given year is a prefix of the list.
        self._births = sorted(rng.randint(_BORN[0], _BORN[1]) for _ in self._of["person"])
        self._births[0] = _BORN[0]

    def _new(self, kind: str) -> Entity:
        name = self._namer.name(kind)
        return Entity(name.title, kind, name.alias, name.pronoun)

    def build(self) -> dict[str, Entity]:
        fill: dict[str, Callable[[int, Entity], dict[str, str]]] = {kind: getattr(self, f"_{kind}") for kind in _MIX}
        for kind, entities in self._of.items():
            for number, entity in enumerate(entities):
                entity.facts.update(fill[kind](number, entity))
        self._marry()
        for entities in self._of.values():
            for entity in entities:
                self._leave_out(entity)
        return {entity.title: entity for entities in self._of.values() for entity in entities}

    def _one(self, kind: str) -> Entity:
        return self._rng.choice(self._of[kind])

    def _adult(self, year: int) -> str:
        grown_up = bisect_right(self._births, year - _GROWN_UP)
        return self._of["person"][self._rng.randrange(grown_up)].title

    def _year(self, first: int, last: int) -> int:
        return self._rng.randint(first, last)

    def _thousands(self, lowest: int, highest: int) -> str:
        return f"{self._rng.randint(lowest, highest) * 100:,}"

    def _country(self, number: int, entity: Entity) -> dict[str, str]:
        return {
            "Capital": self._of["town"][number].title,
            "Language": self._namer.coin(["ish", "ese"]),
            "Currency": self._namer.coin().lower(),
            "Independence": str(self._year(1800, 1990)),
        }

    def _town(self, number: int, entity: Entity) -> dict[str, str]:
        countries = self._of["country"]
        # The first towns are the capitals.
        country = countries[number] if number < len(countries) else self._rng.choice(countries)
        return {
            "Country": country.title,
            "River": self._one("river").title,
            "Population": self._thousands(20, 900),
            "Mayor": self._one("person").title,
        }

    def _river(self, number: int, entity: Entity) -> dict[str, str]:
        return {
            "Flows into": self._one("lake").title,
            "Source": f"Mount {self._namer.coin()}",
            "Length": f"{self._rng.randint(30, 900)} km",
        }

    def _lake(self, number: int, entity: Entity) -> dict[str, str]:
        return {
            "Country": self._one("country").title,
            "Depth": f"{self._rng.randint(5, 300)} m",
            "Area": f"{self._rng.randint(10, 900)} sq km",
        }

    def _person(self, number: int, entity: Entity) -> dict[str, str]:
        return {
            "Birthplace": self._one("town").title,
            "Birth year": str(self._births[number]),
            "Occupation": self._rng.choice(PERSON_NOUNS),
            "Studied at": self._one("university").title,
        }

    def _company(self, number: int, entity: Entity) -> dict[str, str]:
        year = self._year(1955, 2015)
        return {
            "Founder": self._adult(year),
            "Founded in": str(year),
            "Headquarters": self._one("town").title,
            "Product": self._rng.choice(_PRODUCTS),
        }

    def _novel(self, number: int, entity: Entity) -> dict[str, str]:
        year = self._year(1955, 2015)
        return {"Author": self._adult(year), "Publication year": str(year), "Setting": self._one("town").title}

    def _film(self, number: int, entity: Entity) -> dict[str, str]:
        novel = self._one("novel")
        year = self._year(1955, 2020)
        facts = {"Director": self._adult(year), "Star": self._adult(year), "Release year": str(year)}
        if self._rng.random() < 0.6 and int(novel.facts["Publication year"]) < year:
            facts["Based on"] = novel.title
        return facts

    def _band(self, number: int, entity: Entity) -> dict[str, str]:
        year = self._year(1955, 2005)
        return {
            "Hometown": self._one("town").title,
            "Lead singer": self._adult(year),
            "Genre": self._rng.choice(_GENRES),
            "Founded in": str(year),
        }

    def _album(self, number: int, entity: Entity) -> dict[str, str]:
        band = self._one("band")
        year = int(band.facts["Founded in"]) + self._rng.randint(1, 18)
        return {"Performer": band.title, "Release year": str(year), "Producer": self._adult(year)}

    def _university(self, number: int, entity: Entity) -> dict[str, str]:
        return {
            "Location": self._one("town").title,
            "Founded in": str(self._year(1450, 1940)),
            "Rector": self._one("person").title,
        }

    def _club(self, number: int, entity: Entity) -> dict[str, str]:
        return {
            "Hometown": self._one("town").title,
            "Coach": self._one("person").title,
            "Sport": self._rng.choice(_SPORTS),
            "Founded in": str(self._year(1880, 1975)),
        }

    def _bridge(self, number: int, entity: Entity) -> dict[str, str]:
        town = self._one("town")
        year = self._year(1955, 2015)
        return {
            "Location": town.title,
            "Crosses": town.facts["River"],
            "Architect": self._adult(year),
            "Opened in": str(year),
        }

    def _marry(self) -> None:
        # Neighbours in the order of birth are of one age; different pronouns keep "She is married to him. She …" clear.
        people = self._of["person"]
        for one, other in zip(people[::2], people[1::2]):
            if one.pronoun != other.pronoun and self._rng.random() < 0.8:
                one.facts["Spouse"], other.facts["Spouse"] = other.title, one.title

    def _leave_out(self, entity: Entity) -> None:
        for relation in RELATIONS_OF_KIND[entity.kind]:
            droppable = relation.optional and len(entity.facts) > _FEWEST_FACTS
            if droppable and relation.predicate in entity.facts and self._rng.random() < _LEFT_OUT:
                del entity.facts[relation.predicate]
