"""Triples extracted beforehand, looked up by passage (RAS, section 3.2 and F.2: "pre-extracted" triples).

The source is a JSON-lines file of `{"title", "text", "triples"}`; it is read once into an SQLite file, so memory does
not grow with it. The key is the passage's content after NFKC without white space: copies of one paragraph differ in
their spaces, and a miss would lose the whole passage.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import unicodedata
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from tripletune.models.data.passages import Passage, passage_id
from tripletune.models.data.records import read_jsonl, whole_characters
from tripletune.models.data.triples import Triple, triples_from_json
from tripletune.rag.retrieval.index_folder import sha256_of

logger = logging.getLogger(__name__)

_FORMAT = "1"


class TripleSource(Protocol):
    """What a loop asks of a triple store."""

    def get(self, passage: Passage) -> tuple[Triple, ...] | None:
        """The triples of a passage, or None when it was never read for triples."""
        ...


@dataclass(frozen=True, slots=True)
class StoreCounts:
    """What was read from the source file.

    Attributes:
        passages: Distinct passages stored.
        triples: Triples stored.
        malformed_rows: Rows without a text or without a list of triples, skipped.
        malformed_triples: Triples that are not three non-empty strings, skipped alone.
        duplicates: Rows of a passage that was there already; the first row counts.
    """

    passages: int = 0
    triples: int = 0
    malformed_rows: int = 0
    malformed_triples: int = 0
    duplicates: int = 0


class TripleStore:
    """Triples by passage. `misses` counts the look-ups of passages that are not in the store."""

    def __init__(self, connection: sqlite3.Connection, counts: StoreCounts) -> None:
        self._connection = connection
        self.counts = counts
        self.misses = 0

    @classmethod
    def open(cls, source: str | Path, database: str | Path) -> TripleStore:
        """Open the triples of a file, reading it into `database` when that is missing or of another file.

        Args:
            source: JSON lines of `{"title", "text", "triples": [[s, p, o], ...]}`.
            database: The SQLite file to keep.

        Raises:
            FileNotFoundError: there is no such source.
            ValueError: a line is not JSON, or no row of the file has passage and triples.
        """
        source, database = Path(source), Path(database)
        sha256 = sha256_of(source)
        stored = _read_meta(database)
        if stored.get("sha256") != sha256 or stored.get("format") != _FORMAT:
            _build(source, database, sha256)
            stored = _read_meta(database)
        return cls(sqlite3.connect(database), StoreCounts(**json.loads(stored["counts"])))

    def get(self, passage: Passage) -> tuple[Triple, ...] | None:
        """The triples of a passage in the order of the source; None (and one more miss) when it has no row."""
        row = self._connection.execute(
            "SELECT triples FROM triples WHERE passage = ?", (passage_key(passage.title, passage.text),)
        ).fetchone()
        if row is None:
            self.misses += 1
            return None
        return tuple(Triple(*fields) for fields in json.loads(row[0]))

    def close(self) -> None:
        """Close the database."""
        self._connection.close()


def passage_key(title: str, text: str) -> str:
    """What names a passage in stores of triples: its content after NFKC without white space.

    A corpus may name its passages itself, so `Passage.id` can't be the key.
    """
    return passage_id(_bare(title), _bare(text))


def _bare(text: str) -> str:
    if not text.isascii():
        # Half characters, which JSON can spell and no encoding can hold, are one unknown character.
        text = whole_characters(unicodedata.normalize("NFKC", text))
    return "".join(text.split())


def _read_meta(database: Path) -> dict[str, str]:
    if not database.exists():
        return {}
    connection = sqlite3.connect(database)
    try:
        return dict(connection.execute("SELECT name, value FROM meta"))
    except sqlite3.DatabaseError:
        raise ValueError(f"{database} is not a triple store: name another file, or remove this one") from None
    finally:
        connection.close()


def _build(source: Path, database: Path, sha256: str) -> None:
    database.parent.mkdir(parents=True, exist_ok=True)
    scratch = database.with_name(database.name + ".tmp")
    scratch.unlink(missing_ok=True)
    connection = sqlite3.connect(scratch)
    try:
        connection.execute("CREATE TABLE triples (passage TEXT PRIMARY KEY, triples TEXT NOT NULL) WITHOUT ROWID")
        connection.execute("CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL)")
        counts = _fill(connection, source)
        meta = {"format": _FORMAT, "sha256": sha256, "counts": json.dumps(asdict(counts))}
        connection.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())
        connection.commit()
    finally:
        connection.close()
    if not counts.passages:
        scratch.unlink()
        raise ValueError(
            f"{source}: no row holds a passage with triples ({counts.malformed_rows} malformed); "
            'a row is {"title": ..., "text": ..., "triples": [[subject, predicate, object], ...]}'
        )
    os.replace(scratch, database)
    logger.info("triple store %s: %s", database, counts)


def _fill(connection: sqlite3.Connection, source: Path) -> StoreCounts:
    passages = triples = malformed_rows = malformed_triples = duplicates = 0
    for where, row in read_jsonl(source):
        text, listed = row.get("text"), row.get("triples")
        if not isinstance(text, str) or not text.strip() or not isinstance(listed, list):
            malformed_rows += 1
            continue
        good: list[Triple] = []
        for fields in listed:
            try:
                good += triples_from_json([fields], where)
            except ValueError as error:
                malformed_triples += 1
                logger.debug("%s", error)
        key = passage_key(str(row.get("title") or ""), text)
        packed = json.dumps([triple.as_list() for triple in good], ensure_ascii=False)
        added = connection.execute("INSERT OR IGNORE INTO triples VALUES (?, ?)", (key, packed)).rowcount
        duplicates += not added
        passages += added
        triples += len(good) * added
    return StoreCounts(passages, triples, malformed_rows, malformed_triples, duplicates)
