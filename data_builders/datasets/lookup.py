"""Tables on disk that a build needs while it runs: what was seen before, and the rows of a file by their key.

They are private temporary files of SQLite, so that a build over millions of rows needs no more memory than a small one.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

from tripletune.core.data.jsonl import read_jsonl
from tripletune.core.rows import Row

_CACHE_KIB = 64 * 1024


def temporary_database() -> sqlite3.Connection:
    """Open a database in a temporary file that disappears with the connection; at most 64 MB of it are in memory.

    It is written in one transaction that never commits, without a journal: nobody reads the file after a crash.
    """
    # For an empty name SQLite opens a private temporary file.
    database = sqlite3.connect("", isolation_level=None, check_same_thread=False)
    database.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
    database.execute("PRAGMA journal_mode = OFF")
    database.execute("PRAGMA synchronous = OFF")
    database.execute("BEGIN")
    return database


class SeenTable(AbstractContextManager["SeenTable"]):
    """Remembers the note of the first occurrence of every value, under a 16-byte hash of kind and value."""

    def __init__(self) -> None:
        self._database = temporary_database()
        self._database.execute("CREATE TABLE seen (digest BLOB PRIMARY KEY, note TEXT) WITHOUT ROWID")

    def __exit__(self, *_: object) -> None:
        self._database.close()

    def get_or_add(self, kind: str, value: str, note: str = "") -> str | None:
        """The note that a value was added with before; else add the value with this note, and return None.

        One statement looks and adds, so that streams of millions of rows need one access each.
        """
        row = (_digest_of_value(kind, value), note)
        added = self._database.execute("INSERT OR IGNORE INTO seen VALUES (?, ?)", row).rowcount
        if added:
            return None
        return self.get(kind, value)

    def add_if_new(self, kind: str, value: str) -> bool:
        """Add a value; return whether it was new, as a value is added once."""
        return self.get_or_add(kind, value) is None

    def get(self, kind: str, value: str) -> str | None:
        """The note of a value that was added before, else None."""
        row = self._database.execute(
            "SELECT note FROM seen WHERE digest = ?", (_digest_of_value(kind, value),)
        ).fetchone()
        if row is None:
            return None
        return str(row[0])


def _digest_of_value(kind: str, value: str) -> bytes:
    """A hash of kind and value; a user's row may hold an unpaired surrogate, which strict UTF-8 can't encode."""
    return hashlib.blake2b(f"{kind}\n{value}".encode(errors="surrogatepass"), digest_size=16).digest()


class PlacedRow(NamedTuple):
    """A row of a JSON-lines file with its place, "file:line"."""

    where: str
    row: Row


class JsonlIndex:
    """The rows of a JSON-lines file by their key, kept on disk.

    Args:
        path: The file.
        key_of: Returns the key of a row, given "file:line" and the row.

    Attributes:
        repeated_line: Number of the first line that repeats an earlier key; the earlier line is used.
    """

    def __init__(self, path: str | Path, key_of: Callable[[str, Row], str]) -> None:
        self.repeated_line: int | None = None
        self._rows = SeenTable()
        for where, row in read_jsonl(path):
            earlier = self._rows.get_or_add("row", key_of(where, row), json.dumps([where, row]))
            if earlier is not None and self.repeated_line is None:
                self.repeated_line = int(where.rpartition(":")[2])

    def get(self, key: str) -> PlacedRow | None:
        """The row of this key with its place, or None; of several rows with the key, the first."""
        note = self._rows.get("row", key)
        return None if note is None else PlacedRow(*json.loads(note))
