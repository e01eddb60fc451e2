"""Triples by passage in one SQLite file, extracted in advance or in the loop (RAS, section 3.2 and F.2).

The key is (passage, model, prompt). A killed run continues from the file, several processes may write to it, and loops
read it through `StoredTriples`. JSON lines of `{"title", "text", "triples"}` are copied once into such a file, so
memory does not grow with them. A passage's key is its content after NFKC without white space but between
numbers, since copies of a paragraph differ in spaces.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sqlite3
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import Literal

from tripletune.core.calls import Endpoint
from tripletune.core.data.fields import name_field, name_list
from tripletune.core.data.jsonl import read_jsonl
from tripletune.core.data.passages import Passage
from tripletune.core.data.triples import Triple, triple_of
from tripletune.core.files import file_digest, lock_folder
from tripletune.core.sqlite import Kind, application_of, file_error, open_database
from tripletune.rag.triples.names import EntityNames, read_names

logger = logging.getLogger(__name__)

# The model name of triples that come from a JSON-lines file.
_FILE = "file"
_EXTRACT = "run `tripletune rag extract --corpus CORPUS --output STORE --llm BACKEND:MODEL[@URL]` (or --model FOLDER)"
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


class FileCount(StrEnum):
    """What is counted of a JSON-lines file that is imported, as the log names it."""

    PASSAGES = "passages"
    TRIPLES = "triples"
    MALFORMED_ROWS = "malformed rows"
    MALFORMED_TRIPLES = "malformed triples"


class TripleStore:
    """An open store; with `create=False` it must exist, and is only read if it can't be written."""

    def __init__(self, path: str | Path, create: bool = True) -> None:
        self.path = Path(path)
        self._database = open_database(self.path, _STORE, create)

    def extractor(self, model: str, prompt: str, settings: str = "") -> int:
        """The number of an extractor, which is added to the store if this has none of the same model and prompt.

        Args:
            model: Its name, which changes with a local model's weights.
            prompt: A digest of all that changes replies.
            settings: The same in words, for people; those of the first time are kept.
        """
        self._database.execute(
            "INSERT OR IGNORE INTO extractors (model, prompt, settings) VALUES (?, ?, ?)", (model, prompt, settings)
        )
        query = "SELECT id FROM extractors WHERE model = ? AND prompt = ?"
        return int(self._database.execute(query, (model, prompt)).fetchone()[0])

    def extractors(self) -> list[ExtractorInfo]:
        """All extractors in the order of their numbers, each with the number of its passages."""
        rows = self._database.execute(
            "SELECT id, model, prompt, settings, (SELECT COUNT(*) FROM extractions WHERE extractor = extractors.id) "
            "FROM extractors ORDER BY id"
        )
        return [ExtractorInfo(*row) for row in rows]

    def info(self, extractor: int) -> ExtractorInfo:
        """The extractor with this number; another number is a `KeyError`."""
        for info in self.extractors():
            if info.id == extractor:
                return info
        raise KeyError(f"{self.path} has no extractor {extractor}")

    def stored_among(self, extractor: int, keys: Sequence[str]) -> set[str]:
        """Those of the passages' keys that the store has."""
        query = "SELECT passage FROM extractions WHERE extractor = ? AND passage IN (SELECT value FROM json_each(?))"
        return {row[0] for row in self._database.execute(query, (extractor, json.dumps(keys)))}

    def get(self, extractor: int, key: str) -> tuple[Triple, ...] | None:
        """The triples of a passage by its `Passage.key`; None if the store lacks it, which is not "no facts"."""
        query = "SELECT triples FROM extractions WHERE extractor = ? AND passage = ?"
        row = self._database.execute(query, (extractor, key)).fetchone()
        return None if row is None else _triples_of(row[0])

    def extractions(self, extractor: int) -> Iterator[Extraction]:
        """Yield all extractions of an extractor, in the order of the passages' keys."""
        query = "SELECT passage, triples, malformed FROM extractions WHERE extractor = ?"
        for key, triples, malformed in self._database.execute(query, (extractor,)):
            yield Extraction(key, _triples_of(triples), malformed)

    def digest(self, extractor: int) -> str:
        """A digest of all triples of an extractor, with their passages; only runs over equal triples are compared."""
        digest = hashlib.blake2b(digest_size=16)
        query = "SELECT passage, triples FROM extractions WHERE extractor = ? ORDER BY passage"
        for row in self._database.execute(query, (extractor,)):
            digest.update("\n".join(row).encode())
        return digest.hexdigest()

    def put(self, extractor: int, extractions: Iterable[Extraction]) -> None:
        """Store passages in one transaction; a stored passage keeps its first extraction.

        Other processes may have used it by now, and a run must see the same triples from begin to end.
        """
        with self._write_transaction():
            self._insert_extractions(extractor, extractions)

    @contextmanager
    def _write_transaction(self) -> Iterator[None]:
        """A transaction that takes the lock for writing at its start, where SQLite waits for other processes."""
        try:
            with self._database:
                self._database.execute("BEGIN IMMEDIATE")
                yield
        except sqlite3.Error as error:
            raise file_error(self.path, _STORE, error) from None

    def fill(self, source: str | Path, counts: Counter[str] | None = None) -> int:
        """Import a JSON-lines file unless this was done before; return the extractor number.

        All rows are one transaction, so that a killed import leaves nothing that looks complete. `counts` counts what
        the file has, by `FileCount`.
        """
        digest = file_digest(source)
        imported = self.number_of_file(digest)
        if imported is not None:
            return imported
        counts = Counter() if counts is None else counts
        with self._write_transaction():
            number = self.extractor(_FILE, digest, str(source))
            # A passage's last row has the triples of all its rows.
            self._insert_extractions(number, _extractions_in_file(source, counts, self, number), "REPLACE")
            if not counts[FileCount.PASSAGES]:
                bad_rows = counts[FileCount.MALFORMED_ROWS]
                raise ValueError(
                    f"{source}: no row is a passage with triples ({bad_rows} malformed rows); write "
                    'rows as {"title": ..., "text": ..., "triples": [[subject, predicate, object], ...]}, or give '
                    "files of other projects (HippoRAG, T2RAG, TH-RAG) to `tripletune data adapt` first"
                )
        malformed = counts[FileCount.MALFORMED_ROWS] + counts[FileCount.MALFORMED_TRIPLES]
        level = logging.WARNING if malformed else logging.INFO
        logger.log(level, "%s: %s", source, ", ".join(f"{count:,} {name}" for name, count in counts.items()))
        return number

    def number_of_file(self, digest: str) -> int | None:
        """The extractor number of an imported JSON-lines file; None if the store lacks it."""
        query = "SELECT id FROM extractors WHERE model = ? AND prompt = ?"
        row = self._database.execute(query, (_FILE, digest)).fetchone()
        return None if row is None else int(row[0])

    def close(self) -> None:
        """Close the file; the store cannot be used after that."""
        self._database.close()

    def choose(self, model: str | None = None) -> ExtractorInfo:
        """The extractor with this model name or number; None: the only extractor.

        With several, a choice is the user's, since triples of two extractors must not be mixed.
        """
        extractors = self.extractors()
        if not any(info.passages for info in extractors):
            raise ValueError(
                f"{self.path} holds no triples of any passage, since no extraction has finished one: {_EXTRACT}"
            )
        fitting = [info for info in extractors if info.passages and model in (None, info.model, str(info.id))]
        if len(fitting) == 1:
            return fitting[0]
        problem = f"holds no triples of {model or 'any extractor'}"
        if fitting:
            problem = "holds triples of several extractors"
        listed = [f"{info.id}: {info.model}, prompt {info.prompt}, {info.passages:,} passages" for info in extractors]
        listing = "; ".join(listed) or "none is stored"
        raise ValueError(f"{self.path} {problem}: give --extractor as number or model ({listing})")

    def _insert_extractions(
        self, extractor: int, extractions: Iterable[Extraction], repeated: Literal["IGNORE", "REPLACE"] = "IGNORE"
    ) -> None:
        """Insert extractions inside the caller's transaction; `repeated` says what happens to a stored passage.

        SQL has its words: "IGNORE" keeps the stored extraction, "REPLACE" puts the new one in its place.
        """
        query = f"INSERT OR {repeated} INTO extractions VALUES (?, ?, ?, ?)"
        for extraction in extractions:
            triples = json.dumps([triple.as_list() for triple in extraction.triples], ensure_ascii=False)
            self._database.execute(query, (extractor, extraction.key, triples, extraction.malformed))


def _triples_of(text: str) -> tuple[Triple, ...]:
    """The triples in a column of the table, JSON lists of subject, predicate and object."""
    return tuple(Triple(*fields) for fields in json.loads(text))


class TripleSource(ABC):
    """The triples of passages, as a loop reads them.

    Attributes:
        models: The models that extract the triples of passages without any; a store alone has none.
    """

    models: Sequence[Endpoint] = ()

    @abstractmethod
    def get(self, passage: Passage) -> tuple[Triple, ...] | None:
        """The stored triples of a passage; None if it has none yet."""

    @abstractmethod
    async def read(self, passages: Sequence[Passage]) -> list[tuple[Triple, ...] | None]:
        """The triples of each passage; None for a passage whose triples are not to be had."""

    @abstractmethod
    def close(self) -> None:
        """Close the store; `models` stay open."""


@dataclass(frozen=True)
class StoredTriples(TripleSource):
    """The triples of one extractor in a store; `rag.extract.CorpusExtraction` also extracts missing passages.

    Attributes:
        names: Names that are read in place of those in the store.
    """

    store: TripleStore
    extractor: int
    names: EntityNames = field(default_factory=EntityNames)

    @property
    def identity(self) -> list[str | int]:
        """What identifies these triples: the model, digests of its prompt and its triples or of the file, the names."""
        info = self.store.info(self.extractor)
        # The digest of a file is its "prompt", so its triples need none.
        content: str | int = info.passages if info.model == _FILE else self.store.digest(self.extractor)
        identity: list[str | int] = [info.model, info.prompt, content]
        if self.names.digest:
            identity.append(self.names.digest)
        return identity

    def get(self, passage: Passage) -> tuple[Triple, ...] | None:
        """The triples of a passage; None if the store lacks the passage."""
        triples = self.store.get(self.extractor, passage.key)
        return None if triples is None else self.names.of(triples)

    async def read(self, passages: Sequence[Passage]) -> list[tuple[Triple, ...] | None]:
        """The triples of each passage, by its key; None for a passage that the store lacks, which is not "no facts"."""
        return [self.get(passage) for passage in passages]

    def close(self) -> None:
        """Close the store."""
        self.store.close()


def is_store(path: str | Path) -> bool:
    """Whether a file is a triple store, by the number in its head that SQLite keeps for applications."""
    return application_of(path) == _STORE.application


def open_triples(
    source: str | Path,
    database: str | Path,
    model: str | None = None,
    counts: Counter[str] | None = None,
    entities: str | Path | None = None,
) -> StoredTriples:
    """Open the triples of a loop: a store, or JSON lines `{"title", "text", "triples"}`.

    Args:
        database: The store into which a JSON-lines file is copied; not used if `source` is a store.
        model: The extractor to use, if the store holds several; see `TripleStore.choose`.
        counts: Counts what a JSON-lines file has, by `FileCount`.
        entities: A file of names to read in place of others (`rag.triples.names`).
    """
    names = read_names(entities) if entities else EntityNames()
    if not Path(source).is_file():
        raise FileNotFoundError(f"no such file of triples: {source}; to make one, {_EXTRACT}")
    if is_store(source):
        return _with_extractor(TripleStore(source, create=False), lambda store: store.choose(model).id, names, source)
    if is_store(database):
        # The copy may be another user's, which can only be read, so it is not opened to be written.
        store = TripleStore(database, create=False)
        number = store.number_of_file(file_digest(source))
        if number is not None:
            return _with_extractor(store, lambda _: number, names, source)
        store.close()
    folder = Path(database).parent
    with lock_folder(folder, f"{folder}: another program is building an index", wait=True):
        return _with_extractor(TripleStore(database), lambda store: store.fill(source, counts), names, source)


def _with_extractor(
    store: TripleStore, number_of: Callable[[TripleStore], int], names: EntityNames, source: str | Path
) -> StoredTriples:
    """The triples of the extractor that `number_of` finds in a store of `source`; if it fails, the store is closed."""
    try:
        number = number_of(store)
        names.log_use(chain.from_iterable(passage.triples for passage in store.extractions(number)), source)
        return StoredTriples(store, number, names)
    except BaseException:
        # Nobody else holds the store yet.
        store.close()
        raise


def _extractions_in_file(
    source: str | Path, counts: Counter[str], store: TripleStore, number: int
) -> Iterator[Extraction]:
    """Yield the passages of a JSON-lines file, and add to `counts`; rows without a text or list of triples are skipped.

    A passage that the file has several times gets the triples of all its rows so far: the last one replaces the others.
    The caller stores each yielded row before it asks for the next one (`fill`), so `store` has the earlier rows.

    Args:
        counts: What the file has, by `FileCount`.
        store: Holds the rows so far under the extractor `number`.
    """
    for where, row in read_jsonl(source):
        passage = None
        with suppress(ValueError):
            passage = Passage.from_json(row, where)
        listed = row.get("triples")
        if passage is None or not passage.text or not isinstance(listed, list):
            counts[FileCount.MALFORMED_ROWS] += 1
            continue
        stated = []
        for fields in listed:
            triple = triple_of(fields)
            if triple is not None:
                stated.append(triple)
        malformed = len(listed) - len(stated)
        earlier = store.get(number, passage.key)
        if earlier is None:
            counts[FileCount.PASSAGES] += 1
            counts[FileCount.TRIPLES] += len(stated)
            triples = stated
        else:
            triples = list(dict.fromkeys([*earlier, *stated]))
            counts[FileCount.TRIPLES] += len(triples) - len(earlier)
        counts[FileCount.MALFORMED_TRIPLES] += malformed
        yield Extraction(passage.key, tuple(triples), malformed)


def gold_links_in_file(path: str | Path) -> dict[str, frozenset[str]]:
    """Read gold links (the ids of the passages that support each question), which `data_builders.corpus` writes."""
    links: dict[str, frozenset[str]] = {}
    for where, row in read_jsonl(path):
        name = name_field(row, where, "question_id")
        if not name or not isinstance(row.get("passages"), list):
            raise ValueError(f'{where}: a gold link is {{"question_id": "...", "passages": ["id", ...]}}')
        links[name] = frozenset(name_list(row, where, "passages"))
    if not links:
        raise ValueError(f"{path}: the file holds no row")
    return links
