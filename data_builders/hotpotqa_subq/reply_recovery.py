"""Replies that are not in the form asked for and can still be read in one way alone.

Small models forget the JSON, use other keys or write a label in front. Where only one reading is possible the reply is
taken, and the card counts it by the names below; where two are, it is refused like any other. Nothing here guesses: a
reply with a word that is no mere filler, with "or", or with two questions is left alone, and so is one that is cut off.
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any

BARE_NUMBERS = "document numbers without JSON"
TEXT_VALUES = "numbers or yes and no as text"
OTHER_KEYS = "JSON with another key"
PYTHON_LITERAL = "a Python literal instead of JSON"
LABEL = "a label before the sub-query"
MORE_TEXT = "more lines after the sub-query"
LOOSE_TRIPLES = "triples without a list around them"

_LONGEST_LITERAL = 20_000
_DOCUMENT_NOUNS = ("doc", "docs", "document", "documents")
_FILLERS = frozenset(
    (*_DOCUMENT_NOUNS, "number", "numbers", "kept", "keep", "needed", "relevant", "helpful", "supporting", "required",
     "the", "are", "is", "and", "then")
)  # fmt: skip
_TOKEN = re.compile(r"[^\W\d_]+|\d+|\S")
_PUNCTUATION = frozenset("[](){},.:;&#*\"'`")
# "1.5", "1-3", and the numbers of a list's own lines.
_LISTED = re.compile(r"\d\s*[.\-–]\s*\d|^\s*\d{1,4}[.)]\s+\S", re.MULTILINE)
_UNFINISHED = re.compile(r"(?:[,;&:]|\band)\s*\Z")
_BRACKETS = re.compile(r"(\[\d{1,4}\][\s,;&]*(and\s+)?)+\.?")
_ANSWERABLE = re.compile(r"[\"'`]?answerable[\"'`]?\s*[:=]\s*[\"'`]?(true|false|yes|no)\b[\"'`]?", re.IGNORECASE)
_TRUTH = {"true": True, "yes": True, "false": False, "no": False}
# One of them stands for "documents" or "question"; "rejected" or "answer" would not.
_DOCUMENT_KEYS = frozenset({"document", "docs", "doc", "numbers", "kept", "keep"})
_QUESTION_KEYS = frozenset(
    {"query", *(f"sub{mark}{noun}" for mark in ("", "_", "-") for noun in ("query", "question"))}
)
_LABEL = re.compile(
    r"(?:[-*•]\s+|\(?\d{1,2}[.)]\s+)?"
    r"(?:\**(?:here is |here's )?(?:(?:the|a|my|your) )?(?:next |first )?"
    r"(?:sub-? ?quer(?:y|ies)|sub-? ?questions?|question|reply|q)(?: \d{1,2})?\**\s*:\**\s*)?",
    re.IGNORECASE,
)
_PAIRS = ('""', "''", "“”", "**", "``")
_SEPARATOR = re.compile(r"[\s,;]*(?:[-*•]\s+|\d{1,3}[.)]\s+)?")
_FENCE = re.compile(r"^[ \t]*(?:`{3,}|~{3,})[^\n`]*$", re.MULTILINE)


def python_literal(text: str) -> Any:
    """The dictionary or list of a reply that is written as Python writes it; None when there is none."""
    start, end = text.find("{"), text.rfind("}")
    if start < 0 or not 0 < end - start < _LONGEST_LITERAL:
        return None
    try:
        value = ast.literal_eval(text[start : end + 1])
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return None
    return value if isinstance(value, dict) else None


def bare_numbers(text: str) -> tuple[list[int], bool] | None:
    """Numbers of documents from a reply like "Documents 1 and 3" or "[1] [3]", and whether it says answerable.

    Returns:
        None when the reply holds anything else, or names no document.
    """
    answerable = True
    if match := _ANSWERABLE.search(text):
        answerable = _TRUTH[match[1].lower()]
        text = f"{text[: match.start()]} {text[match.end() :]}".rstrip(" ,;")
    if any(text.count(left) != text.count(right) for left, right in ("[]", "()", "{}")) or _UNFINISHED.search(text):
        return None
    tokens = [token.casefold() for token in _TOKEN.findall(text)]
    numbers = [int(token) for token in tokens if token.isdecimal() and len(token) <= 4]
    known = [token for token in tokens if token in _FILLERS or token in _PUNCTUATION]
    if not numbers or len(known) + len(numbers) < len(tokens) or _LISTED.search(text):
        return None
    bracketed = _BRACKETS.fullmatch(text.strip()) is not None
    named = next((place for place, token in enumerate(tokens) if token in _DOCUMENT_NOUNS), None)
    first = next(place for place, token in enumerate(tokens) if token.isdecimal())
    # "2 documents" and "Documents: 2" may be a count.
    counted = named is None or first < named or (len(numbers) == 1 and "[" not in tokens and tokens[named][-1] == "s")
    return None if counted and not bracketed else (numbers, answerable)


def truth(value: object) -> bool | None:
    """True or false from a text that says it."""
    return _TRUTH.get(value.strip().casefold()) if isinstance(value, str) else None


def documents_of(reply: dict[str, Any]) -> list[Any] | None:
    """The list of documents in a reply that calls it by another name or writes it as text."""
    found = [value for key, value in reply.items() if str(key).casefold() in {"documents", *_DOCUMENT_KEYS}]
    if len(found) != 1:
        return None
    value = found[0]
    if isinstance(value, str):
        read = bare_numbers(value if "doc" in value.casefold() else f"documents {value}")
        return None if read is None else list(read[0])
    return value if isinstance(value, list) else None


def number_of(value: object) -> int | None:
    """The number in a text like "[2]" or "Document 2"."""
    read = bare_numbers(f"document {value}") if isinstance(value, str) else None
    return read[0][0] if read is not None and len(read[0]) == 1 else None


def question_of(reply: dict[str, Any]) -> str | None:
    """The sub-query in a reply that calls it by another name."""
    found = [value for key, value in reply.items() if str(key).casefold() in _QUESTION_KEYS]
    return found[0] if len(found) == 1 and isinstance(found[0], str) else None


def without_label(text: str) -> str:
    """A sub-query without a number, bullet, "Sub-query:" or quotation marks around it; itself when there are none."""
    bare = text.strip()
    rest = bare[len(match[0]) :] if (match := _LABEL.match(bare)) else bare
    return without_quotes(rest) or bare


def without_quotes(text: str) -> str:
    """A text without the quotation marks, stars or backticks that stand around all of it."""
    text = text.strip()
    while len(text) > 2 and text[0] + text[-1] in _PAIRS:
        text = text[1:-1].strip()
    return text


def first_question(text: str) -> str | None:
    """The first line of a reply of several, when it ends with a question mark and no other line has one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if len(lines) < 2 or not without_label(lines[0]).endswith("?") or any("?" in line for line in lines[1:]):
        return None
    return without_label(lines[0])


def loose_triples(text: str) -> list[list[Any]]:
    """JSON arrays of three that stand one after another, without a list around them; empty when there is more."""
    body, found, position = _FENCE.sub("", text).strip(), [], 0
    decoder = json.JSONDecoder(strict=False)
    while position < len(body):
        match = _SEPARATOR.match(body, position)
        position = match.end() if match else position
        if position == len(body):
            break
        try:
            value, position = decoder.raw_decode(body, position)
        except (ValueError, RecursionError):
            return []
        if not isinstance(value, list) or len(value) != 3:
            return []
        found.append(value)
    return found


def facts_of(reply: dict[str, Any]) -> list[Any] | None:
    """The list of triples in a reply that has it under another name and nothing else."""
    (value,) = reply.values() if len(reply) == 1 else (None,)
    return value if isinstance(value, list) and value else None
