"""Look up rows of a JSON-lines file by key; memory does not grow with the file.

Digests of the keys and byte offsets of the rows lie in a private temporary file of SQLite, which the system removes
when the process ends in any way; a row is read from its file when it is asked for.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tripletune.models.data.records import json_value

Row = dict[str, Any]

_CACHE_KIB = 32 * 1024
_KEPT_ROWS = 256
_MOST_LINES = 20


class JsonlIndex:
    """An index over a JSON-lines file.

    Args:
        path: The file.
        keys: Gives the keys a row is found under; it gets "file:line" and the row, and may raise `ValueError`.

    Attributes:
        repeated_lines: Numbers of the first lines with a key that an earlier line has too; the earlier one is found.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line is not a JSON object; the message has file and line.
    """

    def __init__(self, path: str | Path, keys: Callable[[str, Row], list[str]]) -> None:
        self.path = Path(path)
        self.repeated_lines: list[int] = []
        self._count = 0
        # The rows asked for last: a teacher asks for that of a question several times.
        self._rows: OrderedDict[int, Row] = OrderedDict()
        self._places = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        weakref.finalize(self, self._places.close)
        for setting in (f"cache_size = -{_CACHE_KIB}", "journal_mode = OFF", "synchronous = OFF"):
            self._places.execute(f"PRAGMA {setting}")
        self._places.execute(
            "CREATE TABLE places (digest BLOB PRIMARY KEY, start INTEGER, line INTEGER, repeated INTEGER) WITHOUT ROWID"
        )
        self._places.execute("BEGIN")
        for number, start, row in self._scan():
            for key in keys(f"{self.path}:{number}", row):
                self._add(_digest(key), start, number)
        self._file = self.path.open("rb")
        weakref.finalize(self, self._file.close)

    def __len__(self) -> int:
        return self._count

    def get(self, key: str) -> tuple[str, Row] | None:
        """The row stored under `key` with its "file:line", or None."""
        place = self._places.execute("SELECT start, line FROM places WHERE digest = ?", (_digest(key),)).fetchone()
        if place is None:
            return None
        start, line = place
        row = self._rows.get(start)
        if row is None:
            self._file.seek(start)
            row = self._rows[start] = json_value(self._file.readline())
            if len(self._rows) > _KEPT_ROWS:
                self._rows.popitem(last=False)
        else:
            self._rows.move_to_end(start)
        return f"{self.path}:{line}", row

    def is_repeated(self, key: str) -> bool:
        """Whether more than one line has this key."""
        found = self._places.execute("SELECT repeated FROM places WHERE digest = ?", (_digest(key),)).fetchone()
        return bool(found and found[0])

    def _add(self, digest: bytes, start: int, line: int) -> None:
        values = (digest, start, line)
        if self._places.execute("INSERT OR IGNORE INTO places VALUES (?, ?, ?, 0)", values).rowcount:
            self._count += 1
            return
        self._places.execute("UPDATE places SET repeated = 1 WHERE digest = ?", (digest,))
        if len(self.repeated_lines) < _MOST_LINES:
            self.repeated_lines.append(line)

    def _scan(self) -> Iterator[tuple[int, int, Row]]:
        if not self.path.is_file():
            raise FileNotFoundError(f"no such file: {self.path}")
        offset = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                start, offset = offset, offset + len(line)
                if not line.strip():
                    continue
                where = f"{self.path}:{number}"
                try:
                    row = json_value(line)
                except json.JSONDecodeError as error:
                    raise ValueError(f"{where}: not valid JSON ({error.msg} at column {error.colno})") from None
                except UnicodeDecodeError as error:
                    raise ValueError(f"{where}: not UTF-8 text ({error.reason}); is this a binary file?") from None
                if not isinstance(row, dict):
                    raise ValueError(f"{where}: expected a JSON object, found {type(row).__name__}")
                yield number, start, row


def _digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode(), digest_size=16).digest()
