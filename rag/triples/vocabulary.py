"""One predicate per relation: a file says which spellings are one predicate, and which of them read backwards.

The file is a table separated by tabs, which a person reads and edits, also in a spreadsheet. Each line is one spelling
of a predicate, for all objects or only for years, dates, numbers or names: "born in" is a birth year before "1903" and
a birth place before "Oslo". `rag.triples.predicates` writes a first file from a teacher's triples.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from tripletune.core.data.pairs import predicate_words
from tripletune.core.data.triples import Triple
from tripletune.rag.triples._table import reviewed_rows

COLUMNS = ("predicate", "spelling", "objects", "direction", "why", "triples", "example")
SAME, REVERSED = "same", "reversed"

_YEAR = re.compile(r"(?:c\.|ca\.|circa)? ?\d{3,4}(?: ?(?:ad|bc|ce|bce))?", re.IGNORECASE)
_MONTH = re.compile(
    r"\b(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?"
    r"|nov(?:ember)?|dec(?:ember)?)\b",
    re.IGNORECASE,
)
_DATE = re.compile(r"\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}")
# A quantity: a number, perhaps with a sign or a currency before it, and a unit of at most two words behind it.
_NUMBER = re.compile(r"[^\w]{0,2}\d[\d.,:\s]*%?(?:\s?[^\W\d]+\.?){0,2}")
# "was directed by" is "directed by", "has the capital" is "capital".
_LIGHT_WORDS = frozenset(
    ["a", "an", "the", "is", "are", "was", "were", "be", "been", "being", "has", "have", "had", "also"]
)


class Objects(StrEnum):
    """The kinds of objects that tell the meanings of a predicate apart."""

    ANY = "any"
    YEAR = "year"
    DATE = "date"
    NUMBER = "number"
    NAME = "name"


class VocabularyCount(StrEnum):
    """What happened to the predicates of triples."""

    RENAMED = "triples with another spelling of their predicate"
    REVERSED = "triples turned around with their predicate"
    OUTSIDE = "triples whose predicate is not in the vocabulary"


class Entry(NamedTuple):
    """The predicate of a spelling, and whether subject and object change places."""

    predicate: str
    is_reversed: bool


class _EntryInFile(NamedTuple):
    """A line of a vocabulary: `place` is its file and number, for errors."""

    place: str
    spelling: str
    objects: Objects
    entry: Entry


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """Which spellings are which predicate.

    Attributes:
        entries: By spelling (`spelling_key`) and kind of objects.
        predicates: The predicates, in the order of the file.
        digest: Identifies the entries, not the file: counts and examples change no result.
    """

    entries: Mapping[tuple[str, Objects], Entry] = field(default_factory=dict)
    predicates: tuple[str, ...] = ()
    digest: str = ""

    def entry(self, predicate: str, object_: str) -> Entry | None:
        """The predicate for a spelling before an object; None if the vocabulary lacks it."""
        spelling = spelling_key(predicate)
        for key in (spelling, without_light_words(spelling)):
            for kind in (objects_of(object_), Objects.ANY):
                if (key, kind) in self.entries:
                    return self.entries[key, kind]
        return None

    def of(
        self, triples: Iterable[Triple], counts: Counter[str] | None = None, drop_outside: bool = False
    ) -> tuple[Triple, ...]:
        """The triples with the vocabulary's predicates, each once.

        Args:
            counts: Counts the changes by `VocabularyCount`.
            drop_outside: Whether a triple is dropped if the vocabulary lacks its predicate; else it stays as it is.
        """
        counts = Counter() if counts is None else counts
        written: dict[Triple, None] = {}
        for triple in triples:
            entry = self.entry(triple.predicate, triple.object)
            if entry is None:
                counts[VocabularyCount.OUTSIDE] += 1
                if not drop_outside:
                    written[triple] = None
                continue
            ends = (triple.subject, triple.object)
            subject, object_ = reversed(ends) if entry.is_reversed else ends
            counts[VocabularyCount.RENAMED] += entry.predicate != triple.predicate
            counts[VocabularyCount.REVERSED] += entry.is_reversed
            written[Triple(subject, entry.predicate, object_)] = None
        return tuple(written)


def spelling_key(predicate: str) -> str:
    """A predicate without capitals and signs between its words."""
    return predicate_words(predicate).casefold().replace("-", " ")


def without_light_words(spelling: str) -> str:
    """A spelling without the words at its beginning that rarely change its meaning; the last word stays."""
    words = spelling.split()
    start = 0
    while start < len(words) - 1 and words[start] in _LIGHT_WORDS:
        start += 1
    return " ".join(words[start:])


def objects_of(name: str) -> Objects:
    """The kind of an object: what looks like a year, a date or a quantity, else a name."""
    if not any(character.isdigit() for character in name):
        return Objects.NAME
    if _YEAR.fullmatch(name):
        return Objects.YEAR
    if _DATE.fullmatch(name) or _MONTH.search(name):
        return Objects.DATE
    return Objects.NUMBER if _NUMBER.fullmatch(name) else Objects.NAME


def read_vocabulary(path: str | Path) -> Vocabulary:
    """Read a vocabulary.

    Raises:
        ValueError: A line can't be read, or a spelling has two predicates for the same objects.
    """
    entries: dict[tuple[str, Objects], Entry] = {}
    predicates: dict[str, None] = {}
    for where, spelling, kind, entry in _entries_in_file(path):
        key = (spelling_key(spelling), kind)
        if entries.setdefault(key, entry) != entry:
            raise ValueError(
                f"{where}: {spelling!r} is {entries[key].predicate!r} in one line and {entry.predicate!r} in another, "
                "or has two directions: delete one of these lines"
            )
        predicates[entry.predicate] = None
    if not entries:
        raise ValueError(f"{path}: the vocabulary has no lines")
    # A predicate is a spelling of its own, unless the file says otherwise.
    for predicate in predicates:
        entries.setdefault((spelling_key(predicate), Objects.ANY), Entry(predicate, False))
    content = json.dumps(sorted([*key, *entry] for key, entry in entries.items()))
    return Vocabulary(entries, tuple(predicates), hashlib.sha256(content.encode(errors="replace")).hexdigest()[:16])


def _entries_in_file(path: str | Path) -> Iterator[_EntryInFile]:
    """The lines of a vocabulary."""
    for where, row in reviewed_rows(path, COLUMNS[:2], "vocabulary", "vocabulary"):
        yield _entry_of_row(row, where)


def _entry_of_row(row: Mapping[str, str | None], where: str) -> _EntryInFile:
    """One spelling; a line that a person adds may leave the objects and the direction empty."""
    predicate, spelling = [" ".join((row.get(column) or "").split()) for column in ("predicate", "spelling")]
    if not predicate or not spelling:
        raise ValueError(f"{where}: the columns predicate and spelling must both be filled")
    kind = (row.get("objects") or Objects.ANY).strip().casefold()
    if kind not in list(Objects):
        raise ValueError(f"{where}: the column objects must be one of {', '.join(Objects)}, found {kind!r}")
    direction = (row.get("direction") or SAME).strip().casefold()
    if direction not in (SAME, REVERSED):
        raise ValueError(f"{where}: the column direction must be {SAME} or {REVERSED}, found {direction!r}")
    return _EntryInFile(where, spelling, Objects(kind), Entry(predicate, direction == REVERSED))
