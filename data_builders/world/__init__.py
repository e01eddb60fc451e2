"""A fictional world whose questions no model has seen: relations and words (`world.yaml`), names, entities, facts.

The facts are free of contradictions: nobody directs a film before growing up, no album is older than its band, a bridge
stands in a town on the river that it crosses, and a capital lies in its own country.

Every coined word belongs to exactly one split, decided by a digest of the word itself. So splits share no name,
whatever their sizes and seeds, and each split is generated independently.
"""

from __future__ import annotations

import hashlib
import json
import random
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from tripletune.core.options import read_yaml

SPLITS = ("train", "validation", "test")
WORLD = read_yaml(Path(__file__).with_name("world.yaml"))
WH_WORDS: dict[str, str] = WORLD["wh_words"]
MINIMUM_ARTICLES = 120
_MIX: dict[str, int] = WORLD["mix"]
_NAMES = {name: tuple(words.split()) for name, words in WORLD["names"].items()}
_CYRILLIC = str.maketrans("abcdefghiklmnoprstuvwyABDFGHLMNPRSTV", "абцдефгхиклмнопрстувўйАБДФГХЛМНПРСТВ")
_ACCENTS = str.maketrans("aeiou", "áéíóú")
_KANA = "アイウエオカキクケコサシスタテトナニノハヒマミムモヤユヨラリルレロワ"
_FEWEST_FACTS = 3
_LEFT_OUT = 0.4
_FIRST_BIRTH, _LAST_BIRTH = 1925, 1985
_GROWN_UP = 20
# Facts that only some entities of a kind have.
_SPOUSE, _BASED_ON = "Spouse", "Based on"


@dataclass(frozen=True, slots=True)
class Relation:
    """One predicate of one kind of entity, and how its object is drawn, stated and asked for; see `world.yaml`."""

    kind: str
    predicate: str
    ask: tuple[str, ...]
    target: str = ""
    words: tuple[str, ...] = ()
    range: tuple[int, ...] = ()
    form: str = "{}"
    refer: tuple[str, ...] = ()
    verb: tuple[str, ...] = ()
    after: str = ""
    full: tuple[str, ...] = ()
    noun: str = ""
    act: str = ""
    less: tuple[str, ...] = ()
    more: tuple[str, ...] = ()
    same: tuple[str, ...] = ()
    optional: bool = False
    grown_up: bool = False


def _relation(kind: str, predicate: str, row: Mapping[str, Any]) -> Relation:
    pattern = json.dumps(WORLD["patterns"].get(row.get("like"), {}))
    for name, words in row.get("with", {}).items():
        pattern = pattern.replace(f"<{name}>", words)
    values = json.loads(pattern) | {name: value for name, value in row.items() if name not in ("like", "with")}
    for name, value in values.items():
        if isinstance(value, list):
            # "Who <does> {x}?" and "Who is the <noun> of {x}?" may be the same.
            values[name] = tuple(dict.fromkeys(value))
    return Relation(kind, predicate, **values)


RELATIONS = tuple(
    _relation(kind, predicate, row) for kind, rows in WORLD["relations"].items() for predicate, row in rows.items()
)
RELATION_OF = {(relation.kind, relation.predicate): relation for relation in RELATIONS}
RELATIONS_OF_KIND = {kind: tuple(r for r in RELATIONS if r.kind == kind) for kind in WORLD["relations"]}


@dataclass(slots=True)
class Entity:
    """An entity with an article.

    Attributes:
        title: The name, unique in all splits.
        alias: Short form for later sentences: a family name, or "the film".
        facts: Predicate -> object; an object that has an article is given by its title.
    """

    title: str
    kind: str
    alias: str
    pronoun: str
    facts: dict[str, str] = field(default_factory=dict)

    @property
    def mention(self) -> str:
        """The name inside a sentence: rivers and bridges take an article."""
        return f"the {self.title}" if self.kind in ("river", "bridge") else self.title


def split_of_word(word: str) -> str:
    """The member of `SPLITS` that a coined word belongs to, independent of case, machine and seed."""
    digest = hashlib.blake2b(word.lower().encode(), digest_size=8).digest()
    return SPLITS[int.from_bytes(digest, "big") % len(SPLITS)]


class Namer:
    """Makes names that are unique in all splits; for `noise` see `build.WorldOptions`."""

    def __init__(self, rng: random.Random, split: str, noise: float) -> None:
        self._rng, self._split, self._noise = rng, split, noise
        self._words: set[str] = set()
        self._titles: set[str] = set()
        self._surnames: list[str] = []

    def coin(self, endings: Sequence[str] = _NAMES["endings"]) -> str:
        """A new capitalised word with one of `endings`; words grow longer when short words run out."""
        for attempts in count():
            stem = "".join(map(self._one, ("onsets", "vowels", "middles") * (1 + attempts // 200)))
            word = (stem + self._rng.choice(endings)).capitalize()
            if self._is_new(word):
                break
        return word

    def entity(self, kind: str) -> Entity:
        """A new entity of `kind`, without facts."""
        while True:
            entity = self._person() if kind == "person" else self._thing(kind)
            if entity.title not in self._titles:
                self._titles.add(entity.title)
                return entity

    def _one(self, words: str) -> str:
        return self._rng.choice(_NAMES[words])

    def _is_new(self, word: str) -> bool:
        if word in self._words or split_of_word(word) != self._split:
            return False
        self._words.add(word)
        return True

    def _is_odd(self) -> bool:
        return self._rng.random() < self._noise / 2

    def _person(self) -> Entity:
        # Family names repeat, so that a name must be read as a whole.
        if self._surnames and self._rng.random() < 0.25:
            surname = self._rng.choice(self._surnames)
        else:
            surname = self._odd_script(self.coin())
            self._surnames.append(surname)
        woman = self._rng.random() < 0.5
        given = self._one("women" if woman else "men")
        title = f"{given} {surname}"
        if self._is_odd():
            title = self._rng.choice([f"{title}, Jr.", f'{given} "{self._one("nicknames")}" {surname}'])
        return Entity(title, "person", surname, "She" if woman else "He")

    def _thing(self, kind: str) -> Entity:
        word = self._odd_script(self.coin(_NAMES.get(f"{kind}_endings", _NAMES["endings"])))
        title = self._odd_title(kind, word) if self._is_odd() else self._plain_title(kind, word)
        # Articles do not say "country", since questions do; see `relations` in world.yaml.
        return Entity(title, kind, "the nation" if kind == "country" else f"the {kind}", "It")

    def _plain_title(self, kind: str, word: str) -> str:
        one = self._one
        if kind in ("film", "novel", "album"):
            forms = [f"The {one('nouns')} of {word}", f"{one('adjectives')} {word}", f"{word} {one('nouns')}"]
            return self._rng.choice(forms)
        if kind == "band":
            return self._rng.choice([f"{one('adjectives')} {word}", f"{word} {one('bands')}"])
        patterns = {"river": f"{word} River", "lake": f"Lake {word}", "bridge": f"{word} Bridge"}
        # All forms are drawn for every kind, since another order of draws would change the world.
        patterns |= {kind: f"{word} {one(kind)}" for kind in ("company", "club", "university")}
        return patterns.get(kind, word)

    def _odd_title(self, kind: str, word: str) -> str:
        if kind in ("film", "novel", "album"):
            noun = self._one("nouns")
            return self._rng.choice([f'The "{word}" {noun}', f"{noun}, {word}, {noun}", f"{word} ({noun})"])
        if kind == "company":
            return f"{word}, {self.coin()} & Co."
        return f"{word} ({kind})"

    def _odd_script(self, word: str) -> str:
        if not self._is_odd():
            return word
        style = self._rng.randrange(3)
        if style < 2:
            return word.translate((_CYRILLIC, _ACCENTS)[style])
        while True:
            word = "".join(self._rng.choices(_KANA, k=self._rng.randint(3, 5)))
            if self._is_new(word):
                return word


class EntityBuilder:
    """Makes about `articles` entities (at least `MINIMUM_ARTICLES`) of all kinds, and their facts."""

    def __init__(self, rng: random.Random, namer: Namer, articles: int) -> None:
        self._rng, self._namer = rng, namer
        self._of: dict[str, list[Entity]] = {}
        for kind, share in _MIX.items():
            number = max(3, round(max(articles, MINIMUM_ARTICLES) * share / sum(_MIX.values())))
            self._of[kind] = [namer.entity(kind) for _ in range(number)]
        # People are sorted by birth, so that the adults of a given year are a prefix of the list.
        self._births = sorted(rng.randint(_FIRST_BIRTH, _LAST_BIRTH) for _ in self._of["person"])
        self._births[0] = _FIRST_BIRTH

    def build(self) -> dict[str, Entity]:
        """Entities by title, in the order of their kinds."""
        for kind, entities in self._of.items():
            for number, entity in enumerate(entities):
                entity.facts.update(self._facts(kind, number))
        self._marry()
        everything = {entity.title: entity for entities in self._of.values() for entity in entities}
        for entity in everything.values():
            self._leave_out(entity)
        return everything

    def _one(self, kind: str) -> Entity:
        return self._rng.choice(self._of[kind])

    def _facts(self, kind: str, number: int) -> dict[str, str]:
        known, year = self._connected(kind, number)
        facts = {
            relation.predicate: known.get(relation.predicate) or self._object(relation, year)
            for relation in RELATIONS_OF_KIND[kind]
            if relation.predicate in known or relation.predicate not in (_SPOUSE, _BASED_ON)
        }
        if kind == "film" and self._rng.random() >= 0.6:
            facts.pop(_BASED_ON, None)
        return facts

    def _connected(self, kind: str, number: int) -> tuple[dict[str, str], int]:
        """The facts that others depend on, and the year in which the entity's people must be adults (or 0)."""
        if kind == "country":
            language, currency = self._namer.coin(["ish", "ese"]), self._namer.coin().lower()
            return {"Capital": self._of["town"][number].title, "Language": language, "Currency": currency}, 0
        if kind == "town":
            countries = self._of["country"]
            # The first towns are the capitals.
            country = countries[number] if number < len(countries) else self._rng.choice(countries)
            return {"Country": country.title}, 0
        if kind == "person":
            return {"Birth year": str(self._births[number])}, 0
        made = next((r for r in RELATIONS_OF_KIND[kind] if r.grown_up), None)
        return self._made(kind, made) if made else ({}, 0)

    def _made(self, kind: str, relation: Relation) -> tuple[dict[str, str], int]:
        known, years = {}, relation.range
        if kind == "bridge":
            town = self._one("town")
            known = {"Location": town.title, "Crosses": town.facts["River"]}
        elif kind == "album":
            band = self._one("band")
            known = {"Performer": band.title}
            years = tuple(int(band.facts["Founded in"]) + age for age in years)
        novel = self._one("novel") if kind == "film" else None
        year = self._rng.randint(*years)
        if novel and int(novel.facts["Publication year"]) < year:
            known = {_BASED_ON: novel.title}
        return {**known, relation.predicate: str(year)}, year

    def _object(self, relation: Relation, year: int) -> str:
        if relation.target == "person" and year:
            grown_up = bisect_right(self._births, year - _GROWN_UP)
            return self._of["person"][self._rng.randrange(grown_up)].title
        if relation.target:
            return self._one(relation.target).title
        if relation.words:
            return self._rng.choice(relation.words)
        if not relation.range:
            return relation.form.format(self._namer.coin())
        lowest, highest, *times = relation.range
        number = self._rng.randint(lowest, highest)
        return relation.form.format(number * times[0] if times else number)

    def _marry(self) -> None:
        # Neighbours in the list are of similar age; different pronouns keep "She is married to him. She …" clear.
        people = self._of["person"]
        for one, other in zip(people[::2], people[1::2]):
            if one.pronoun != other.pronoun and self._rng.random() < 0.8:
                one.facts[_SPOUSE], other.facts[_SPOUSE] = other.title, one.title

    def _leave_out(self, entity: Entity) -> None:
        for relation in RELATIONS_OF_KIND[entity.kind]:
            droppable = relation.optional and len(entity.facts) > _FEWEST_FACTS
            if droppable and relation.predicate in entity.facts and self._rng.random() < _LEFT_OUT:
                del entity.facts[relation.predicate]
