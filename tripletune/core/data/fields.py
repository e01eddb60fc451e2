"""Check the fields of rows from files.

A field that is missing, null or blank is absent; 0, False and the text "None" are values. A value of the wrong type
raises an error that names the file and line. `NotedRow` notices which fields a reader reads, so that a run can name
those that it does not read.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

_WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_SPOKEN = {True: ("yes", "true"), False: ("no", "false")}
_KINDS = {str: "text", int: "a whole number", float: "a finite number", bool: "true or false", list: "a list"}
_ALSO: dict[type, Any] = {float: (int, float), list: (list, tuple)}
# A string or the end of another value, and the white space before the next value (NumPy prints no comma there).
_PRINTED = re.compile(r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[\]})\w.])(\s+(?=['"\[{(\w-]))?""")


def shown(value: object) -> str:
    """A value as an error message shows it: as JSON, cut to 80 characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else f"{text[:80]}…"


def given(row: Mapping[str, Any], *names: str) -> Any:
    """The value of the first named field that is present; None if all are absent.

    An empty list is absent too: tables fill columns that a row lacks.
    """
    for name in names:
        value = row.get(name)
        is_blank = isinstance(value, str) and not value.strip()
        if value not in (None, []) and not is_blank:
            return value
    return None


def text_field(row: Mapping[str, Any], where: str, *names: str) -> str:
    """The text of the first named field that is present; "" if all are absent."""
    value = given(row, *names)
    if not isinstance(value, str | None):
        raise ValueError(f"{where}: {' or '.join(names)} must be text, found {shown(value)}")
    return value or ""


def name_field(row: Mapping[str, Any], where: str, *names: str) -> str:
    """An id, a title or a label: like `text_field`, but a number is accepted and becomes text."""
    value = given(row, *names)
    if type(value) in (int, float):
        return str(value)
    return text_field(row, where, *names)


def name_list(row: Mapping[str, Any], where: str, name: str) -> list[str]:
    """The names in a field that holds a list or one name; null and blank names are dropped, true is "yes", "true".

    Some benchmarks store the answer yes as true; then both words count as right.
    """
    value = given(row, name)
    names = []
    for item in value if isinstance(value, (list, tuple)) else [value]:
        words = _SPOKEN[item] if isinstance(item, bool) else [item]
        names += [name_field({name: word}, where, name).strip() for word in words]
    return [text for text in names if text]


def is_true(row: Mapping[str, Any], where: str, name: str, default: bool = False) -> bool:
    """The boolean of a field: true, false, 1, 0, yes or no, also as text; tables write 1 as 1.0."""
    value = given(row, name)
    word = str(value).strip().lower().removesuffix(".0")
    if value is not None and word not in _WORDS:
        raise ValueError(f"{where}: {name} must be true or false, found {shown(value)}")
    return default if value is None else _WORDS[word]


def unfolded(value: Any) -> Any:
    """Parse a text that holds a list or object (JSON, Python or NumPy); return any other value unchanged.

    Tables of the hub hold lists as text, as the library that wrote them printed them. A text that is cut off stays a
    text, so that the caller's check names it.
    """
    if not isinstance(value, str) or value.strip()[:1] not in ("[", "{"):
        return value
    with suppress(ValueError, RecursionError):
        return json.loads(value)
    with suppress(ValueError, RecursionError, SyntaxError, MemoryError):
        parsed = ast.literal_eval(_PRINTED.sub(_with_comma, value.strip()))
        return parsed if isinstance(parsed, list | dict) else value
    return value


def _with_comma(match: re.Match[str]) -> str:
    """A value that NumPy printed, with the comma that Python needs before the next value."""
    return f"{match[1]}," if match[2] else match[1]


def checked(row: Any, where: str, layout: Mapping[str, Any]) -> dict[str, Any]:
    """Check the types of a row, and return its present fields that the layout names.

    Args:
        layout: Maps each field name to a type, to `[layout]` for a list, or to the layout of an object. A field `name?`
            may be missing or null; the name `""` stands for any field.
    """
    problem = next(_misfits(row, layout, ""), None)
    if problem is not None:
        raise ValueError(f"{where}: {problem}")
    names = [name.removesuffix("?") for name in layout]
    return {name: row[name] for name in names if row.get(name) is not None}


def _misfits(value: Any, layout: Any, name: str) -> Iterator[str]:
    """Yield what is wrong with a value; `name` is its place in the row, such as `messages[0].role`.

    A layout is a type, a list with the layout of its items, or an object's layouts by field; see `checked`.
    """
    kind = layout if isinstance(layout, type) else type(layout)
    if not _is_of_kind(value, kind):
        yield f"{name or 'the row'} must be {_KINDS.get(kind, 'an object')}, found {shown(value)}"
    elif isinstance(layout, list):
        if layout[0] is str and set(map(type, value)) <= {str}:
            # Sentences are by far the most values of a row.
            return
        for number, item in enumerate(value):
            yield from _misfits(item, layout[0], f"{name}[{number}]")
    elif isinstance(layout, dict):
        yield from _misfits_of_object(value, layout, name)


def _is_of_kind(value: Any, kind: type) -> bool:
    """Whether a value has a type; Python counts true as a whole number, and NaN and infinity as numbers."""
    if isinstance(value, bool) != (kind is bool):
        return False
    if not isinstance(value, _ALSO.get(kind, kind)):
        return False
    # Not true for NaN.
    return kind is not float or abs(value) <= sys.float_info.max


def _misfits_of_object(value: Mapping[str, Any], layout: Mapping[str, Any], name: str) -> Iterator[str]:
    """Yield what is wrong with the fields of an object, and which of them are missing; see `_misfits`."""
    fields = dict.fromkeys(value, layout[""]) if "" in layout else layout
    for key, inner in fields.items():
        # A row may have a field whose own name ends with a question mark.
        field = key if key in value else key.removesuffix("?")
        is_required = field == key
        if is_required and key not in value:
            yield f"{name or 'the row'} lacks {key}; it has {', '.join(map(str, value)) or 'nothing'}"
        elif is_required or value.get(field) is not None:
            yield from _misfits(value[field], inner, f"{name}.{field}".lstrip("."))


class NotedRow(dict[str, Any]):
    """A row that remembers which of its columns were read with `get` or `[]`, also in objects inside it.

    Attributes:
        read: Paths of the columns that were read, such as "messages[].content".
    """

    def __init__(self, row: dict[str, Any], read: set[str] | None = None, path: str = "") -> None:
        super().__init__(row)
        self.read: set[str] = set() if read is None else read
        self._path = path

    def __getitem__(self, name: str) -> Any:
        return self._note_column(name, super().__getitem__(name))

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a column, which counts as read."""
        return self._note_column(name, super().get(name, default))

    def _note_column(self, name: str, value: Any) -> Any:
        """Note a column as read, and return its value; objects in it note their columns in the same set."""
        path = f"{self._path}{name}"
        self.read.add(path)
        if isinstance(value, dict):
            return NotedRow(value, self.read, f"{path}.")
        if isinstance(value, list) and any(isinstance(item, dict) for item in value):
            return [NotedRow(item, self.read, f"{path}[].") if isinstance(item, dict) else item for item in value]
        return value


def unread_columns(row: NotedRow) -> set[str]:
    """Paths of the columns that have a value and were not read.

    A row or an object in it of which nothing was read by name counts as read, since it was taken as a whole.
    """
    if not row.read:
        return set()
    return set(_unread_paths(row, row.read, ""))


def unread_note(place: str, rows_of_column: Mapping[str, int]) -> str:
    """A line that names columns that are not read, each with the number of rows that have a value there."""
    columns = [f"{column} ({count:,} rows)" for column, count in sorted(rows_of_column.items())]
    return f"{place} has columns that are not read: {', '.join(columns)}"


def _unread_paths(row: dict[str, Any], read: set[str], path: str) -> Iterator[str]:
    """Yield the paths of unread columns of a row, or of an object at a path in it; see `unread_columns`.

    Objects are looked into only if one of their columns was read by name. Any item of a list may have been the one that
    a reader read, so a column counts as read for all of them.
    """
    for name, value in row.items():
        column = f"{path}{name}"
        if column not in read:
            if given(row, name) is not None:
                yield column
            continue
        inside = f"{column}."
        items = [value]
        if isinstance(value, list):
            inside = f"{column}[]."
            items = value
        is_read_by_name = any(other.startswith(inside) for other in read)
        if is_read_by_name:
            for item in items:
                if isinstance(item, dict):
                    yield from _unread_paths(item, read, inside)
