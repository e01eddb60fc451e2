"""Passes over data of any size: what was seen before, rows of a file by key, progress, and results in order.

Memory does not grow with the data: look-ups lie in a private temporary file of SQLite, which the system removes when
the process ends in any way.
"""

from __future__ import annotations

import asyncio
import hashlib
import sqlite3
from array import array
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

from tripletune.models.data.records import json_value, read_jsonl

_CACHE_KIB = 64 * 1024
_KEPT_ROWS = 256
# Results that are done but wait for a slower one before them, for each one at work. Beyond that the work waits too.
_WAITING = 4
T = TypeVar("T")
R = TypeVar("R")


class SeenTable(AbstractContextManager["SeenTable"]):
    """Remembers the note that came with the first occurrence of every value; a context manager.

    At most 64 MB of the table are kept in memory. Values are kept as 16-byte hashes.
    """

    def __init__(self) -> None:
        # An empty name is SQLite's way to ask for a temporary database on disk.
        self._database = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        for setting in (f"cache_size = -{_CACHE_KIB}", "journal_mode = OFF", "synchronous = OFF"):
            self._database.execute(f"PRAGMA {setting}")
        self._database.execute("CREATE TABLE seen (digest BLOB PRIMARY KEY, note TEXT) WITHOUT ROWID")
        self._database.execute("BEGIN")

    def __exit__(self, *_: object) -> None:
        self._database.close()

    def first(self, kind: str, value: str, note: str = "") -> str | None:
        """The note of the first occurrence of a value, or None when this is the first."""
        digest = _digest(kind, value)
        if self._database.execute("INSERT OR IGNORE INTO seen VALUES (?, ?)", (digest, note)).rowcount:
            return None
        return self._note(digest)

    def get(self, kind: str, value: str) -> str | None:
        """The note of a value that was there before, else None; the value is not remembered."""
        return self._note(_digest(kind, value))

    def _note(self, digest: bytes) -> str | None:
        found = self._database.execute("SELECT note FROM seen WHERE digest = ?", (digest,)).fetchone()
        return None if found is None else str(found[0])


class JsonlIndex:
    """An index over a JSON-lines file; a row is read from the file when it is asked for.

    Args:
        keys: Gives the keys a row is found under; it gets "file:line" and the row, and may raise `ValueError`.

    Attributes:
        repeated_line: Number of the first line with a key that an earlier line has too; the earlier one is found.
    """

    def __init__(self, path: str | Path, keys: Callable[[str, dict[str, Any]], list[str]]) -> None:
        self.path = Path(path)
        self.repeated_line: int | None = None
        self._seen = SeenTable()
        for where, row in read_jsonl(self.path):
            number = where.rpartition(":")[2]
            for key in keys(where, row):
                if self._seen.first("row", key, number) is not None:
                    self.repeated_line = self.repeated_line or int(number)
        self._file = self.path.open("rb")
        self._starts = array("Q", accumulate(map(len, self._file), initial=0))
        # A teacher asks for the row of a question several times.
        self._row = lru_cache(maxsize=_KEPT_ROWS)(self._read)

    def get(self, key: str) -> tuple[str, dict[str, Any]] | None:
        """The row stored under `key` with its "file:line", or None."""
        number = self._seen.get("row", key)
        return None if number is None else (f"{self.path}:{number}", self._row(int(number)))

    def _read(self, number: int) -> dict[str, Any]:
        self._file.seek(self._starts[number - 1])
        return json_value(self._file.readline())


def _digest(kind: str, value: str) -> bytes:
    return hashlib.blake2b(f"{kind}\n{value}".encode(errors="surrogatepass"), digest_size=16).digest()


async def in_order(
    items: Iterator[T], work: Callable[[T], Awaitable[R]], concurrency: int
) -> AsyncGenerator[tuple[T, R], None]:
    """Run `work` on every item and yield items with results, in the order of the items, in memory that does not grow.

    A sliding window: a slow item holds back the results after it, not the work on them. Items are taken from the
    iterator only when there is room, so a fast reader does not run ahead of a slow teacher. An exception of `work`
    is raised at its item's turn; whatever happens, nothing is left running.
    """
    room = asyncio.Semaphore(concurrency)
    window: deque[tuple[T, asyncio.Future[R]]] = deque()
    try:
        for item in items:
            await room.acquire()
            task = asyncio.ensure_future(work(item))
            task.add_done_callback(lambda _: room.release())
            window.append((item, task))
            # A turn of the event loop: work that never waits would otherwise only start when the window is full.
            await asyncio.sleep(0)
            while window and (window[0][1].done() or len(window) > _WAITING * concurrency):
                yield window[0][0], await window[0][1]
                window.popleft()
        while window:
            yield window[0][0], await window[0][1]
            window.popleft()
    finally:
        for _, running in window:
            running.cancel()
        await asyncio.gather(*(running for _, running in window), return_exceptions=True)
