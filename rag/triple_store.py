"""Triples by passage in one SQLite file, extracted in advance or in the loop (RAS, section 3.2 and F.2).

The key is (passage, model, prompt). A killed run continues from the file, several processes may write to it, and loops
read it through `StoredTriples`. JSON lines of `{"title", "text", "triples"}` are copied once into such a file, so
memory does not grow with them. A passage's key is its content after NFKC without white space, since copies of a
paragraph differ in spaces.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tripletune.core.data.fields import name_field, name_list
from tripletune.core.data.jsonl import read_jsonl
from tripletune.core.data.passages import Passage
from tripletune.core.data.triples import Triple, triple_of
from tripletune.core.files import file_digest, lock_folder
from tripletune.core.sqlite import Kind, application_of, open_database, unusable

logger = logging.getLogger(__name__)

# The model name of triples that come from a JSON-lines file.
_FILE = "file"
_TABLES = """
CREATE TABLE extractors (
    id INTEGER PRIMARY KEY,
    model TEXT NOT NULL,
    prompt TEXT NOT NULL,
    settings TEXT NOT NULL,
    UNIQUE (model, prompt)
);
CREATE TABLE extractions (
    extractor INTEGER NOT NULL REFERENCES extractors (id),
    passage TEXT NOT NULL,
    triples TEXT NOT NULL,
    malformed INTEGER NOT NULL,
    PRIMARY KEY (extractor, passage)
) WITHOUT ROWID;
"""
_STORE = Kind("triple store", 0x54545854, 1, _TABLES)


@dataclass(frozen=True, slots=True)
class Extraction:
    """The triples of the passage with this `Passage.key`, and the number of malformed triples."""

    key: str
    triples: tuple[Triple, ...]
    malformed: int = 0


@dataclass(frozen=True, slots=True)
class ExtractorInfo:
    """An extractor in a store: model, digest of prompt and settings, the settings, number of passages."""

    id: int
    model: str
    prompt: str
    settings: str
    passages: int


class TripleStore:
    """An open store; with `create=False` it must exist, and is only read if it can't be written."""

    def __init__(self, path: str | Path, create: bool = True) -> None:
        self.path = Path(path)
        self._database = open_database(self.path, _STORE, create)

    def extractor(self, model: str, prompt: str, settings: str = "") -> int:
        """The number of an extractor: a model with a `prompt` (a digest of all that changes replies) and `settings`."""
        self._database.execute(
            "INSERT OR IGNORE INTO extractors (model, prompt, settings) VALUES (?, ?, ?)", (model, prompt, settings)
        )
        query = "SELECT id FROM extractors WHERE model = ? AND prompt = ?"
        return int(self._database.execute(query, (model, prompt)).fetchone()[0])

    def extractors(self) -> list[ExtractorInfo]:
        """All extractors, with the number of their passages."""
        rows = self._database.execute(
            "SELECT id, model, prompt, settings, (SELECT COUNT(*) FROM extractions WHERE extractor = extractors.id) "
            "FROM extractors ORDER BY id"
        )
        return [ExtractorInfo(*row) for row in rows]

    def known(self, extractor: int, keys: Sequence[str]) -> set[str]:
        """Those of the passages that are in the store."""
        query = "SELECT passage FROM extractions WHERE extractor = ? AND passage IN (SELECT value FROM json_each(?))"
        return {row[0] for row in self._database.execute(query, (extractor, json.dumps(keys)))}

    def get(self, extractor: int, key: str) -> tuple[Triple, ...] | None:
        """The triples of a passage; None if the store lacks the passage."""
        query = "SELECT triples FROM extractions WHERE extractor = ? AND passage = ?"
        row = self._database.execute(query, (extractor, key)).fetchone()
        return None if row is None else tuple(Triple(*fields) for fields in json.loads(row[0]))

    def extractions(self, extractor: int) -> Iterator[Extraction]:
        """Yield all extractions of an extractor."""
        query = "SELECT passage, triples, malformed FROM extractions WHERE extractor = ?"
        for key, triples, malformed in self._database.execute(query, (extractor,)):
            yield Extraction(key, tuple(Triple(*fields) for fields in json.loads(triples)), malformed)

    def digest(self, extractor: int) -> str:
        """A digest of all triples of an extractor, with their passages."""
        found = hashlib.blake2b(digest_size=16)
        query = "SELECT passage, triples FROM extractions WHERE extractor = ? ORDER BY passage"
        for row in self._database.execute(query, (extractor,)):
            found.update("\n".join(row).encode())
        return found.hexdigest()

    def put(self, extractor: int, extractions: Iterable[Extraction]) -> None:
        """Store passages in one transaction; a stored passage keeps its first extraction."""
        with self._writing():
            self._insert(extractor, extractions)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            with self._database:
                self._database.execute("BEGIN IMMEDIATE")
                yield
        except sqlite3.Error as error:
            raise unusable(self.path, _STORE, error) from None

    def fill(self, source: str | Path, counts: Counter[str] | None = None) -> int:
        """Import a JSON-lines file unless this was done before; return the extractor number."""
        digest = file_digest(source)
        files = self._database.execute("SELECT id, prompt FROM extractors WHERE model = ?", (_FILE,)).fetchall()
        for number, prompt in files:
            if prompt == digest:
                return int(number)
        counts = Counter() if counts is None else counts
        with self._writing():
            number = self.extractor(_FILE, digest, str(source))
            # A passage's last row has the triples of all its rows.
            self._insert(number, _rows(source, counts, self, number), "REPLACE")
            if not counts["passages"]:
                raise ValueError(
                    f"{source}: no row is a passage with triples ({counts['malformed rows']} malformed rows); write "
                    'rows as {"title": ..., "text": ..., "triples": [[subject, predicate, object], ...]}'
                )
        level = logging.WARNING if counts["malformed rows"] or counts["malformed triples"] else logging.INFO
        logger.log(level, "%s: %s", source, ", ".join(f"{n:,} {name}" for name, n in counts.items()))
        return number

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def choose(self, model: str | None = None) -> ExtractorInfo:
        """The extractor with this model name or number; None: the only extractor."""
        found = [one for one in self.extractors() if one.passages and model in (None, one.model, str(one.id))]
        if len(found) == 1:
            return found[0]
        listed = "; ".join(
            f"{one.id}: {one.model}, prompt {one.prompt}, {one.passages:,} passages" for one in self.extractors()
        )
        problem = "holds triples of several extractors" if found else f"holds no triples of {model or 'any extractor'}"
        raise ValueError(f"{self.path} {problem}: give --extractor as number or model ({listed or 'none is stored'})")

    def _insert(self, extractor: int, extractions: Iterable[Extraction], repeated: str = "IGNORE") -> None:
        rows = (
            (extractor, one.key, json.dumps([t.as_list() for t in one.triples], ensure_ascii=False), one.malformed)
            for one in extractions
        )
        self._database.executemany(f"INSERT OR {repeated} INTO extractions VALUES (?, ?, ?, ?)", rows)


@dataclass(frozen=True, slots=True)
class StoredTriples:
    """The triples of one extractor for the loops; `rag.extract.CorpusExtraction` also extracts missing passages."""

    store: TripleStore
    extractor: int

    @property
    def identity(self) -> list[Any]:
        """What identifies these triples: the model, and digests of its prompt and its triples or of the file."""
        chosen = next(one for one in self.store.extractors() if one.id == self.extractor)
        content = chosen.passages if chosen.model == _FILE else self.store.digest(self.extractor)
        return [chosen.model, chosen.prompt, content]

    def get(self, passage: Passage) -> tuple[Triple, ...] | None:
        """The triples of a passage; None if the store lacks the passage."""
        return self.store.get(self.extractor, passage.key)

    async def read(self, passages: Sequence[Passage]) -> list[tuple[Triple, ...] | None]:
        """The triples of each passage; None for a passage that the store lacks."""
        return [self.store.get(self.extractor, one.key) for one in passages]

    def close(self) -> None:
        """Close the store."""
        self.store.close()


def is_store(path: str | Path) -> bool:
    """Whether a file is a triple store."""
    return application_of(path) == _STORE.application


def open_triples(
    source: str | Path, database: str | Path, model: str | None = None, counts: Counter[str] | None = None
) -> StoredTriples:
    """Open the triples of a loop: a store, or JSON lines `{"title", "text", "triples"}`.

    Args:
        database: The store into which a JSON-lines file is copied; not used if `source` is a store.
        model: The extractor to use, if the store holds several; see `TripleStore.choose`.
        counts: Counts passages, triples and malformed triples of a JSON-lines file.
    """
    if not Path(source).is_file():
        raise FileNotFoundError(f"no such file of triples: {source}")
    made, folder = is_store(source), Path(database).parent
    if not made and is_store(database):  # perhaps another user's, which can only be read
        store, digest = TripleStore(database, create=False), file_digest(source)
        for one in store.extractors():
            if (one.model, one.prompt) == (_FILE, digest):
                return StoredTriples(store, one.id)
        store.close()
    lock = None if made else lock_folder(folder, f"{folder}: another program is building an index", wait=True)
    with lock or nullcontext():
        store = TripleStore(source, create=False) if made else TripleStore(database)
        try:
            return StoredTriples(store, store.choose(model).id if made else store.fill(source, counts))
        except BaseException:
            store.close()
            raise


def _rows(source: str | Path, counts: Counter[str], store: TripleStore, number: int) -> Iterator[Extraction]:
    """Yield the passages of a JSON-lines file; rows without a text or a list of triples are skipped and counted."""
    for where, row in read_jsonl(source):
        listed, passage = row.get("triples"), None
        with suppress(ValueError):
            passage = Passage.from_json(row, where)
        if passage is None or not passage.text or not isinstance(listed, list):
            counts["malformed rows"] += 1
            continue
        good = [triple for fields in listed if (triple := triple_of(fields)) is not None]
        malformed, earlier = len(listed) - len(good), store.get(number, passage.key)
        kept = tuple(good if earlier is None else dict.fromkeys([*earlier, *good]))
        counts["passages"] += earlier is None
        counts["triples"] += len(kept) - len(earlier or ())
        counts["malformed triples"] += malformed
        yield Extraction(passage.key, kept, malformed)


def read_gold(path: str | Path) -> dict[str, frozenset[str]]:
    """Read gold links (the ids of the passages that support each question), which `data_builders.corpus` writes."""
    links: dict[str, frozenset[str]] = {}
    for where, row in read_jsonl(path):
        if not (name := name_field(row, where, "question_id")) or not isinstance(row.get("passages"), list):
            raise ValueError(f'{where}: a gold link is {{"question_id": "...", "passages": ["id", ...]}}')
        links[name] = frozenset(name_list(row, where, "passages"))
    if not links:
        raise ValueError(f"{path}: the file holds no row")
    return links
