"""A fictional world whose questions no model has seen: relations and words (`world.yaml`), names, entities, facts.

The facts are free of contradictions: nobody directs a film before growing up, no album is older than its band, a bridge
stands in a town on the river that it crosses, and a capital lies in its own country.

Every coined word belongs to exactly one split, decided by a digest of the word itself. So splits share no name,
whatever their sizes and seeds, and each split is generated independently.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal, get_args

from tripletune.core.config import read_yaml

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)
WORLD = read_yaml(Path(__file__).with_name("world.yaml"))
WH_WORDS: dict[str, str] = WORLD["wh_words"]


@dataclass(frozen=True, slots=True)
class Relation:
    """One predicate of one kind of entity, and how its object is drawn, stated and asked for.

    The fields below `predicate` are those of `world.yaml`, where they are explained. A new field needs a default, since
    most relations leave most fields out.
    """

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


def _read_relation(kind: str, predicate: str, row: Mapping[str, Any]) -> Relation:
    """A relation from its row in `world.yaml`: the pattern that it is `like`, in its words, and its own fields.

    A pattern is filled as JSON text, so that its words may stand inside any of its sentences. Own fields replace those
    of the pattern.
    """
    pattern = json.dumps(WORLD["patterns"].get(row.get("like"), {}))
    for name, words in row.get("with", {}).items():
        pattern = pattern.replace(f"<{name}>", words)
    values = json.loads(pattern)
    for name, value in row.items():
        if name not in ("like", "with"):
            values[name] = value
    for name, value in values.items():
        if isinstance(value, list):
            # "Who <does> {x}?" and "Who is the <noun> of {x}?" may be the same.
            values[name] = tuple(dict.fromkeys(value))
    return Relation(kind, predicate, **values)


def _relations_of(kind: str) -> tuple[Relation, ...]:
    """The relations of a kind of entity, in the order of `world.yaml`."""
    rows = WORLD["relations"][kind]
    return tuple(_read_relation(kind, predicate, row) for predicate, row in rows.items())


RELATIONS_OF_KIND = {kind: _relations_of(kind) for kind in WORLD["relations"]}
RELATIONS = tuple(chain.from_iterable(RELATIONS_OF_KIND.values()))
RELATION_OF = {(relation.kind, relation.predicate): relation for relation in RELATIONS}


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
        if self.kind in ("river", "bridge"):
            return f"the {self.title}"
        return self.title


def split_of_word(word: str) -> Split:
    """The member of `SPLITS` that a coined word belongs to, independent of case, machine and seed.

    Splits share no name because of this function alone. Another digest makes every world another one, and lets a model
    that was trained on an old world meet its names in a new test split.
    """
    digest = hashlib.blake2b(word.lower().encode(), digest_size=8).digest()
    return SPLITS[int.from_bytes(digest, "big") % len(SPLITS)]
