"""Check the fields of rows from files.

A field that is missing, null or blank is absent; 0, False and the text "None" are values. A value of the wrong type
raises an error that names the file and line.
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


def shown(value: Any) -> str:
    """A value as an error message shows it: as JSON, cut to 80 characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else f"{text[:80]}…"


def given(row: Mapping[str, Any], *names: str) -> Any:
    """The value of the first named field that is present; None if all are absent."""
    values = (row.get(name) for name in names)
    return next(
        (one for one in values if one not in (None, []) and not (isinstance(one, str) and not one.strip())), None
    )


def text_field(row: Mapping[str, Any], where: str, *names: str) -> str:
    """The text of the first named field that is present; "" if all are absent."""
    value = given(row, *names)
    if not isinstance(value, str | None):
        raise ValueError(f"{where}: {' or '.join(names)} must be text, found {shown(value)}")
    return value or ""


def name_field(row: Mapping[str, Any], where: str, *names: str) -> str:
    """An id, a title or a label: like `text_field`, but a number is accepted and becomes text."""
    value = given(row, *names)
    return str(value) if type(value) in (int, float) else text_field(row, where, *names)


def name_list(row: Mapping[str, Any], where: str, name: str) -> list[str]:
    """The names in a field that holds a list or one name; null and blank names are dropped, true is "yes", "true"."""
    value = given(row, name)
    values = value if isinstance(value, (list, tuple)) else [value]
    named = [word for one in values for word in (_SPOKEN[one] if isinstance(one, bool) else [one])]
    return [found for one in named if (found := name_field({name: one}, where, name).strip())]


def is_true(row: Mapping[str, Any], where: str, name: str, default: bool = False) -> bool:
    """The boolean of a field: true, false, 1, 0, yes or no, also as text."""
    value = given(row, name)
    word = str(value).strip().lower().removesuffix(".0")
    if value is not None and word not in _WORDS:
        raise ValueError(f"{where}: {name} must be true or false, found {shown(value)}")
    return default if value is None else _WORDS[word]


def unfolded(value: Any) -> Any:
    """Parse a text that holds a list or object (JSON, Python or NumPy); return any other value unchanged."""
    if not isinstance(value, str) or value.strip()[:1] not in ("[", "{"):
        return value
    with suppress(ValueError, RecursionError):
        return json.loads(value)
    with suppress(ValueError, RecursionError, SyntaxError, MemoryError):
        found = ast.literal_eval(_PRINTED.sub(lambda match: match[1] + "," * bool(match[2]), value.strip()))
        return found if isinstance(found, list | dict) else value
    return value


def checked(row: Any, where: str, layout: Mapping[str, Any]) -> dict[str, Any]:
    """Check the types of a row, and return its present fields that the layout names.

    Args:
        layout: Maps each field name to a type, to `[layout]` for a list, or to the layout of an object. A field `name?`
            may be missing or null; the name `""` stands for any field.
    """
    if problem := next(_misfits(row, layout, ""), None):
        raise ValueError(f"{where}: {problem}")
    return {bare: row[bare] for name in layout if row.get(bare := name.removesuffix("?")) is not None}


def _misfits(value: Any, layout: Any, name: str) -> Iterator[str]:
    kind = layout if isinstance(layout, type) else type(layout)
    fits = isinstance(value, _ALSO.get(kind, kind)) and isinstance(value, bool) == (kind is bool)
    if not fits or (kind is float and not abs(value) <= sys.float_info.max):
        yield f"{name or 'the row'} must be {_KINDS.get(kind, 'an object')}, found {shown(value)}"
    elif isinstance(layout, list):
        for number, one in enumerate(value):
            yield from _misfits(one, layout[0], f"{name}[{number}]")
    elif isinstance(layout, dict):
        for key, inner in (dict.fromkeys(value, layout[""]) if "" in layout else layout).items():
            bare = key if key in value else key.removesuffix("?")
            if bare == key and key not in value:
                yield f"{name or 'the row'} lacks {key}; it has {', '.join(map(str, value)) or 'nothing'}"
            elif bare == key or value.get(bare) is not None:
                yield from _misfits(value[bare], inner, f"{name}.{bare}".lstrip("."))
