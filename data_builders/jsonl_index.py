"""Look up rows of a JSON-lines file by key, keeping 16-byte digests and byte offsets in memory instead of rows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class JsonlIndex:
    """An index over a JSON-lines file.

    Args:
        path: The file.
        keys: Gives the keys a row is found under; it gets "file:line" and the row, and may raise `ValueError`.

    Attributes:
        repeated_lines: Numbers of the lines with a key that an earlier line has too; the earlier one is found.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line is not a JSON object; the message has file and line.
    """

    def __init__(self, path: str | Path, keys: Callable[[str, Row], list[str]]) -> None:
        self.path = Path(path)
        self.repeated_lines: list[int] = []
        self._repeated: set[bytes] = set()
        self._places: dict[bytes, tuple[int, int]] = {}
        for number, offset, row in self._scan():
            for key in keys(f"{self.path}:{number}", row):
                digest = _digest(key)
                if digest in self._places:
                    self._repeated.add(digest)
                    self.repeated_lines.append(number)
                else:
                    self._places[digest] = (offset, number)

    def __len__(self) -> int:
        return len(self._places)

    def get(self, key: str) -> tuple[str, Row] | None:
        """The row stored under `key` with its "file:line", or None."""
        place = self._places.get(_digest(key))
        if place is None:
            return None
        offset, number = place
        with self.path.open("rb") as file:
            file.seek(offset)
            return f"{self.path}:{number}", json.loads(file.readline())

    def is_repeated(self, key: str) -> bool:
        """Whether more than one line has this key."""
        return _digest(key) in self._repeated

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
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(f"{where}: not valid JSON ({error.msg} at column {error.colno})") from None
                except UnicodeDecodeError as error:
                    raise ValueError(f"{where}: not UTF-8 text ({error.reason}); is this a binary file?") from None
                if not isinstance(row, dict):
                    raise ValueError(f"{where}: expected a JSON object, found {type(row).__name__}")
                yield number, start, row


def _digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode(), digest_size=16).digest()
