"""JSON inside replies: in fences and prose, with trailing commas, or in Python's form; and replies without thoughts."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from tripletune.core.calls import UnusableReply
from tripletune.core.data.jsonl import whole_characters
from tripletune.core.files import refuse_constant

REPAIRED = "JSON that was repaired"
_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[^\n`]*\n(.*?)(?:^[ \t]*\1|\Z)", re.MULTILINE | re.DOTALL)
_KINDS: dict[type[Any], tuple[str, str]] = {dict: ("object", "{"), list: ("array", "[")}
_BRACKET = re.compile(r"[\[{]|\((?=\s*[\"'“])")
_JSON_START = re.compile(r"[\[{]\s*[\"'“\[{(]")
_CLOSING = {"[": "]", "{": "}", "(": ")"}
_PYTHON = {"True": True, "False": False, "None": None}
_VALUE = re.compile(
    r"""\s*(?:([\[{(])|("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|“(?:[^”\\]|\\.)*”)|([-+.\w]+))""", re.DOTALL
)
_SIGN = re.compile(r"\s*([]}),:])")
# A JSON escape; \'; a control character's escape unless it looks like LaTeX or a path (`\beta`, `C:\temp`), but `\n` is
# common, so `\nabla` is a line break too; a lone backslash.
_ESCAPE = re.compile(r"""\\(?:(u[0-9a-fA-F]{4}|["\\/])|(')|([bfrt](?![a-z])|n)|)|(")""")
_LATEX = re.compile(r"(?<!\\)(?:\\\\)*\\[bfrt][a-z]")
# A value that is nested more deeply comes from a model that loops.
DEEPEST = 50
# If the chat template writes the opening tag, the reply has only the closing tag. A tag in quotation marks or alone in
# a field is a name, and so is an opening tag inside a line without a closing tag.
_OPEN = r"""(?<![|>] )(?:(?<!["'`])<think(?:ing)?>|<think(?:ing)?>(?!["'`]))"""
_CLOSE = r"""(?<![|>] )(?:(?<!["'`])</think(?:ing)?>|</think(?:ing)?>(?!["'`]))"""
_THOUGHT = re.compile(
    rf"\A(?:(?!<think).)*?{_CLOSE}|{_OPEN}.*?</think(?:ing)?>|(?:^\s*|(?<=[\]}})])){_OPEN}.*\Z",
    re.DOTALL | re.MULTILINE,
)
# Not strict, because models put raw line breaks into strings.
_JSON = json.JSONDecoder(parse_constant=refuse_constant, strict=False)
# Numbers are kept as they are written.
_AS_WRITTEN = json.JSONDecoder(parse_constant=refuse_constant, strict=False, parse_int=str, parse_float=str)


class JsonValue(NamedTuple):
    """An outermost value in a reply.

    Attributes:
        value: An object, an array, or a tuple in Python's form, which is read as a list.
        start: Position of its first character.
        end: Position after its last character.
        repaired: Whether it was not valid JSON as written.
    """

    value: Any
    start: int
    end: int
    repaired: bool


class JsonScan(NamedTuple):
    """The outermost values of a reply, and the positions of brackets at which a value begins that is unreadable."""

    values: list[JsonValue]
    unreadable: list[int]


def without_thoughts(text: str) -> str:
    """Remove text between `<think>` tags, or before a closing tag without opening tag; tags inside JSON are text."""
    if "think" not in text:
        return text
    for thought in reversed(list(_THOUGHT.finditer(without_json(text)))):
        text = text[: thought.start()] + text[thought.end() :]
    return text


def find_json(text: str, *kinds: type[Any], advice: str = "", notes: Counter[str] | None = None) -> Any:
    """Find the JSON object or array of a reply that may have code fences and prose around it.

    Only outermost values count: `[{"a": 1}]` holds an array and no object. Of several values, those in a code fence are
    preferred, then the last one, since models answer at the end. Text between `<think>` tags is skipped. If no value is
    valid JSON, a value with trailing commas or in Python's form (single quotes, True, tuples) is read, but never a
    value that is cut off. If a string has a backslash that begins no JSON escape, all its backslashes are text (LaTeX,
    paths). Without `kinds`, objects and arrays count; `notes` counts `REPAIRED`.
    """
    wanted = kinds or (dict, list)
    plain = without_thoughts(text)
    values = scan(plain).values
    fences = [match.span(2) for match in _FENCE.finditer(masked(plain, values))]

    def rank(value: JsonValue) -> tuple[bool, int, int]:
        """Valid JSON before repaired JSON, then the last fence, then the last value."""
        around = [number for number, (start, end) in enumerate(fences) if start <= value.start < end]
        return not value.repaired, max(around, default=-1), value.start

    candidates = [value for value in values if isinstance(value.value, wanted) and plain[value.start] != "("]
    if candidates:
        best = max(candidates, key=rank)
        if notes is not None and best.repaired:
            notes[REPAIRED] += 1
        return best.value
    name = " or ".join(_KINDS[kind][0] for kind in wanted)
    if any(_KINDS[kind][1] in plain for kind in wanted):
        fault = f"the JSON {name} in it is cut off or malformed"
        raise UnusableReply("bad_json", explanation(text, fault, advice))
    raise UnusableReply("no_json", explanation(text, f"there is no JSON {name} in it", advice))


def numbers_in_list(count: int, kind: str, text: str) -> list[int]:
    """The numbers in a reply's list, also as strings ("2", "2. Ada ..."); others than 1 to `count` are skipped.

    Args:
        kind: What is numbered, in the plural, for the advice to a model whose reply has no number.
    """
    rows = find_json(text, list)
    numbers: dict[int, None] = {}
    for row in rows:
        # Some models write a list for each number.
        for item in row if isinstance(row, list) else [row]:
            match = re.match(r"\d+", str(item))
            if match and 1 <= int(match[0]) <= count:
                numbers[int(match[0])] = None
    if rows and not numbers:
        raise UnusableReply("no_number", f"Write only a JSON list of numbers of {kind}, 1 to {count}, or [].")
    return list(numbers)


def json_values(text: str, *kinds: type[Any]) -> list[Any]:
    """Return all outermost JSON objects and arrays of a reply, from left to right.

    Tuples with three items count too; numbers are returned as text.
    """
    wanted = kinds or (dict, list)
    values = scan(without_thoughts(text), numbers_as_written=True).values
    return [value.value for value in values if isinstance(value.value, wanted)]


def nested_lists(values: Iterable[object]) -> list[list[object]]:
    """All lists inside JSON values, from left to right."""
    lists: list[list[object]] = []
    for value in values:
        if isinstance(value, list):
            lists.append(value)
            lists += nested_lists(value)
        elif isinstance(value, dict):
            lists += nested_lists(value.values())
    return lists


def without_json(text: str) -> str:
    """Replace JSON by closing brackets of the same length, so that no marker is found there."""
    return masked(text, scan(text).values)


def explanation(text: str, fault: str, advice: str) -> str:
    """What a repair turn says about a reply: its fault, and how to write it (`advice`; "" for the fault alone)."""
    if not advice:
        return f"{fault}."
    opening = f"In the reply: {fault}" if text.strip() else "The reply is empty"
    return f"{opening}; {advice}."


def masked(text: str, values: Iterable[JsonValue]) -> str:
    """Replace values by closing brackets of the same length, so that places in the text stay what they were."""
    pieces = []
    end = 0
    for value in values:
        pieces += [text[end : value.start], "}" * (value.end - value.start)]
        end = value.end
    return "".join(pieces) + text[end:]


def scan(text: str, numbers_as_written: bool = False) -> JsonScan:
    """Find the outermost objects, arrays and tuples of a text.

    Args:
        text: A reply, with any words around the JSON.
        numbers_as_written: Keep numbers as texts, such as "1.50", which a float would change.
    """
    decoder = _AS_WRITTEN if numbers_as_written else _JSON
    values: list[JsonValue] = []
    unreadable: list[int] = []
    position = 0
    while True:
        bracket = _BRACKET.search(text, position)
        if bracket is None:
            break
        start = bracket.start()
        try:
            found = _read_value(text, start, decoder)
        except RecursionError:
            # A thousand brackets in a row come from a model that loops, and trying each bracket takes long.
            break
        except ValueError:
            position = start + 1
            if _JSON_START.match(text, start):
                unreadable.append(start)
            continue
        # In prose, a bracket before a quotation mark may not begin a tuple.
        if text[start] != "(" or len(found.value) == 3:
            values.append(found)
        position = found.end
    return JsonScan(values, unreadable)


def _read_value(text: str, start: int, decoder: json.JSONDecoder) -> JsonValue:
    """Read the value that starts at a bracket: as JSON if it is JSON, else in a looser form (`repaired`)."""
    try:
        value, end = decoder.raw_decode(text, start)
        # `\beta` is valid JSON, but a model that writes LaTeX did not mean a backspace.
        repaired = bool(_LATEX.search(text, start, end))
    except ValueError:
        repaired = True
    if repaired:
        value, end = _read_loosely(text, start, decoder)
    # JSON can spell a surrogate without its partner.
    return JsonValue(whole_characters(value), start, end, repaired)


def _read_loosely(text: str, position: int, decoder: json.JSONDecoder, depth: int = 0) -> tuple[Any, int]:
    """Read a value in JSON's or Python's form, also with trailing commas; return the value and its end.

    It is tried only where JSON fails. What is cut off or ambiguous raises a `ValueError`, and nothing is added to it.

    Args:
        text: The reply.
        position: Where the value begins, after white space.
        decoder: Reads numbers and words.
        depth: How many brackets are open.
    """
    token = _VALUE.match(text, position)
    if depth > DEEPEST or token is None:
        raise ValueError("no value")
    bracket, string, word = token.groups()
    if string:
        return _read_string(string), token.end()
    if word:
        value = _PYTHON[word] if word in _PYTHON else decoder.decode(word)
        return value, token.end()
    items: list[Any] = []
    position = token.end()
    # In an object, colons and commas alternate.
    separator = ":" if bracket == "{" else ","
    while True:
        sign = _SIGN.match(text, position)
        if sign is not None and sign[1] == _CLOSING[bracket]:
            break
        item, position = _read_loosely(text, position, decoder, depth + 1)
        items.append(item)
        sign = _SIGN.match(text, position)
        if sign is None or sign[1] not in (separator, _CLOSING[bracket]):
            raise ValueError("no comma")
        if sign[1] == separator:
            position = sign.end()
        separator = ":" if bracket == "{" and separator == "," else ","
    if bracket != "{":
        return items, sign.end()
    keys = items[::2]
    if len(items) % 2 or not all(isinstance(key, str) for key in keys):
        raise ValueError("no pairs")
    return dict(zip(keys, items[1::2])), sign.end()


def _read_string(written: str) -> str:
    """Read a string in any quotation marks; if a backslash begins no escape, all backslashes are text."""
    text = written[1:-1]
    has_lone_backslash = any(match.lastindex is None for match in _ESCAPE.finditer(text))

    def as_json(match: re.Match[str]) -> str:
        """An escape or a sign of a Python string as JSON writes it."""
        if match[2]:  # an escaped apostrophe, which JSON does not know
            return "'"
        is_escape = match[1] or (match[3] and not has_lone_backslash)
        return match[0] if is_escape else f"\\{match[0]}"

    return str(_JSON.decode(f'"{_ESCAPE.sub(as_json, text)}"'))
