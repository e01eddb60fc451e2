"""What was seen before, for checks over data sets of any size: a table on disk instead of one in memory."""

from __future__ import annotations

import hashlib
import sqlite3
from types import TracebackType

_CACHE_KIB = 64 * 1024


class SeenTable:
    """Remembers the note that came with the first occurrence of every value; a context manager.

    The table is a private temporary file of SQLite, which keeps at most 64 MB of it in memory and lets the system
    remove it when the process ends in any way. Values are kept as 16-byte hashes.
    """

    def __init__(self) -> None:
        # An empty name is SQLite's way to ask for a temporary database on disk.
        self._database = sqlite3.connect("", isolation_level=None)
        for setting in (f"cache_size = -{_CACHE_KIB}", "journal_mode = OFF", "synchronous = OFF"):
            self._database.execute(f"PRAGMA {setting}")
        self._database.execute("CREATE TABLE seen (digest BLOB PRIMARY KEY, note TEXT) WITHOUT ROWID")
        self._database.execute("BEGIN")

    def __enter__(self) -> SeenTable:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._database.close()

    def first(self, kind: str, value: str, note: str = "") -> str | None:
        """The note of the first occurrence of a value, or None when this is the first.

        Args:
            kind: Values of different kinds are different.
            value: The value.
            note: What is kept when the value is new.
        """
        digest = _digest(kind, value)
        if self._database.execute("INSERT OR IGNORE INTO seen VALUES (?, ?)", (digest, note)).rowcount:
            return None
        found: str = self._database.execute("SELECT note FROM seen WHERE digest = ?", (digest,)).fetchone()[0]
        return found

    def has(self, kind: str, value: str) -> bool:
        """Whether a value was there before; it is not remembered."""
        query = "SELECT 1 FROM seen WHERE digest = ?"
        return self._database.execute(query, (_digest(kind, value),)).fetchone() is not None


def _digest(kind: str, value: str) -> bytes:
    return hashlib.blake2b(f"{kind}\n{value}".encode(errors="surrogatepass"), digest_size=16).digest()
