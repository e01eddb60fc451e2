"""Read a JSON array row by row, with a window of the file in memory: HotpotQA is an array of 540 MB in one line.

Tested in `tests/data_builders/test_readers.py`.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from tripletune.core.data.jsonl import open_rows, whole_characters
from tripletune.core.files import JSON

# Characters that are read at once.
_CHUNK = 1 << 18
# A question with its context takes about ten kilobytes; a value of this length is a broken file, not a row.
_LONGEST_ROW = 1 << 26
# The text before the first row of an array, which may be a value of an object: `{"version": 1, "data": [`.
_ARRAY = re.compile(rb'(?:\xef\xbb\xbf)?\s*(?:\{(?:\s*"\w+"\s*:\s*(?:"[^"\\]*"|[\w.]+)\s*,)*\s*"data"\s*:\s*)?\[')
_HALF_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]")


def array_opening(path: Path) -> str:
    """The text before the first row of a file with a JSON array; empty for other files.

    Found in the first bytes: a large file has no line breaks, so it could not be looked at line by line.
    """
    if not path.is_file():
        return ""
    with open_rows(path) as file:
        opening = _ARRAY.match(file.read(4096))
    if opening is None:
        return ""
    return opening[0].decode()


def array_rows(path: Path, opening: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Stream the rows of a JSON array after its `array_opening`, each after its "file:line"."""
    try:
        with open_rows(path) as raw, io.TextIOWrapper(cast(Any, raw), encoding="utf-8", newline="") as file:
            file.read(len(opening))
            yield from _ArrayReader(path, file, 1 + opening.count("\n")).rows(in_object="{" in opening)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error.reason}); is this a binary file?") from None


class _ArrayReader:
    """Decodes a JSON array element by element.

    Args:
        file: The file, read up to the array's opening bracket.
        line: The number of this line, for error messages.
    """

    def __init__(self, path: Path, file: IO[str], line: int) -> None:
        self._path = path
        self._file = file
        # What was read and not yet decoded, and the line on which it begins.
        self._text = ""
        self._line = line

    def rows(self, in_object: bool) -> Iterator[tuple[str, dict[str, Any]]]:
        """Stream the rows; `in_object`: the array is the last value of an object.

        The text before a yielded row is dropped only afterwards, so `_line` is the row's own line in errors about it.
        """
        while self._next_character() != "]":
            if not self._text:
                raise self._error_at_line("the file ends inside its JSON array; is the download complete?")
            row, end = self._decode_value()
            if not isinstance(row, dict):
                raise self._error_at_line(f"expected a JSON object, found {type(row).__name__}")
            if _HALF_CHARACTER.search(self._text, 0, end):
                row = whole_characters(row)
            yield f"{self._path}:{self._line}", row
            self._drop_characters(end)
            character = self._next_character()
            if character == ",":
                self._drop_characters(1)
            elif character not in ("]", ""):
                raise self._error_at_line(f"not valid JSON (expected ',' or ']', found {character!r})")
        self._drop_characters(1)
        if self._next_character() == "}" and in_object:
            self._drop_characters(1)
        if self._next_character():
            raise self._error_at_line("not valid JSON (text after the array)")

    def _next_character(self) -> str:
        """Skip white space and return the next character, or "" at the end of the file."""
        while True:
            text = self._text.lstrip()
            self._drop_characters(len(self._text) - len(text))
            if text:
                return text[0]
            self._text = self._file.read(_CHUNK)
            if not self._text:
                return ""

    def _drop_characters(self, length: int) -> None:
        """Drop characters from the start of the text, and count their lines."""
        self._line += self._text.count("\n", 0, length)
        self._text = self._text[length:]

    def _decode_value(self) -> tuple[Any, int]:
        """Decode the value at the start of the text, reading on until it is whole; return it with its length.

        A value that is cut by the window and one that is broken give the same error, so the file is read on until it
        ends or the value is too long for a row.
        """
        while True:
            try:
                return JSON.raw_decode(self._text)
            except json.JSONDecodeError as error:
                more = ""
                if len(self._text) < _LONGEST_ROW:
                    # Twice as much each time: decoding begins again at the start of the value.
                    more = self._file.read(max(_CHUNK, len(self._text)))
                if not more:
                    self._line += self._text.count("\n", 0, error.pos)
                    raise self._error_at_line(f"not valid JSON ({error.msg})") from None
                self._text += more
            except (ValueError, RecursionError) as error:
                raise self._error_at_line(f"not valid JSON ({error})") from None

    def _error_at_line(self, problem: str) -> ValueError:
        """An error that names the file and the current line."""
        return ValueError(f"{self._path}:{self._line}: {problem}")
