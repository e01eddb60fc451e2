"""One name per entity, as a view over triples: a file says which names are replaced, and the store stays as it is.

The file is a table separated by tabs, which a person reads and edits, also in a spreadsheet. Each line is one proposal
to write the entity `name` as `into`; it counts if the column `merge` says yes. `rag.triples.entities` proposes them.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tripletune.core.data.triples import Triple
from tripletune.core.files import few
from tripletune.rag.triples._table import reviewed_rows

logger = logging.getLogger(__name__)
COLUMNS = ("merge", "name", "into", "why", "cosine", "passages", "passages_into", "example", "example_into")
_DECISIONS = {"yes": True, "y": True, "no": False, "n": False}


class NamePair(NamedTuple):
    """Two names that may mean one entity; `name` would be written as `into`."""

    name: str
    into: str


@dataclass(frozen=True, eq=False)
class EntityNames:
    """Which names are replaced by which; without any, all triples stay as they are.

    Attributes:
        digest: Identifies the replacements, not the file: comments and rejected proposals change no result.
        places: File and line of each replacement, by its name.
    """

    replaced: Mapping[str, str] = field(default_factory=dict)
    digest: str = ""
    places: Mapping[str, str] = field(default_factory=dict)

    def of(self, triples: Iterable[Triple]) -> tuple[Triple, ...]:
        """The triples with the names of entities replaced, each once.

        A triple whose two ends would become one name states that both are names of one entity, so it is kept as it is.
        """
        if not self.replaced:
            return tuple(triples)
        renamed: dict[Triple, None] = {}
        for triple in triples:
            subject = self.replaced.get(triple.subject, triple.subject)
            object_ = self.replaced.get(triple.object, triple.object)
            if subject == object_:
                renamed[triple] = None
            else:
                renamed[Triple(subject, triple.predicate, object_)] = None
        return tuple(renamed)

    def log_use(self, triples: Iterable[Triple], source: str | Path) -> None:
        """Log how many names of these triples are replaced, and warn of names that no triple has.

        Args:
            triples: All triples as they were extracted; they are read until each name was met.
            source: The file of the triples.
        """
        if not self.replaced:
            return
        unmet = set(self.replaced)
        for triple in triples:
            unmet -= {triple.subject, triple.object}
            if not unmet:
                break
        merged = len(self.replaced) - len(unmet)
        message = f"{source}: {merged:,} {'name' if merged == 1 else 'names'} merged"
        if not unmet:
            logger.info("%s", message)
            return
        lines = "1 line names" if len(unmet) == 1 else f"{len(unmet):,} lines name"
        shown = [f"{name} ({self.places.get(name, '--entities')})" for name in self.replaced if name in unmet]
        logger.warning("%s; %s nothing in the triples: %s", message, lines, few(shown))


def read_names(path: str | Path) -> EntityNames:
    """Read a file of names; a name with two different replacements, or that replaces itself in the end, is an error."""
    into: dict[str, str] = {}
    places: dict[str, str] = {}
    for line in _proposal_lines(path):
        places.setdefault(line.name, line.where)
        if line.merge and into.setdefault(line.name, line.into) != line.into:
            raise ValueError(
                f"{line.where}: {line.name!r} is merged into {into[line.name]!r} and into {line.into!r}: say no to one "
                "of these lines"
            )
    replaced = {}
    for name in into:
        last = _end_of_chain(name, into, path)
        if last != name:
            replaced[name] = last
    content = json.dumps(sorted(replaced.items()))
    digest = hashlib.sha256(content.encode(errors="replace")).hexdigest() if replaced else ""
    return EntityNames(replaced, digest, places)


def read_decisions(path: str | Path) -> dict[NamePair, bool]:
    """What a person decided: whether two names are merged."""
    return {NamePair(line.name, line.into): line.merge for line in _proposal_lines(path)}


class _Line(NamedTuple):
    """A line of a file of names: two names, and whether the person who read it merges them."""

    where: str
    merge: bool
    name: str
    into: str


def _proposal_lines(path: str | Path) -> Iterator[_Line]:
    """The lines of a file of names; a file without its columns, or in another encoding, is a `ValueError`."""
    for where, row in reviewed_rows(path, COLUMNS[:3], "file of entities", "entities"):
        yield _proposal_of_row(row, where)


def _proposal_of_row(row: Mapping[str, str | None], where: str) -> _Line:
    """One proposal; white space in names is folded, as in triples."""
    word = (row.get("merge") or "").strip().casefold()
    if word not in _DECISIONS:
        raise ValueError(f"{where}: the column merge must say yes or no, found {word!r}")
    name, into = [" ".join((row.get(column) or "").split()) for column in ("name", "into")]
    if not name or not into:
        raise ValueError(f"{where}: the columns name and into must both be filled")
    return _Line(where, _DECISIONS[word], name, into)


def _end_of_chain(name: str, into: Mapping[str, str], path: str | Path) -> str:
    """The name at the end of a chain of replacements, so that triples are renamed in one step; a circle is an error."""
    passed = [name]
    while passed[-1] in into:
        following = into[passed[-1]]
        if following == passed[-1]:
            break
        if following in passed:
            raise ValueError(
                f"{path}: {' -> '.join([*passed, following])} goes in a circle: say no to one of these lines"
            )
        passed.append(following)
    return passed[-1]
