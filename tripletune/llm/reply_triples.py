"""Triples inside replies: RAS's and WikiOFGraph's markers, JSON rows and objects, rows with bars."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tripletune.core.calls import UnusableReply
from tripletune.core.data.triples import (
    FoundTriples,
    Triple,
    names_subject,
    parse_triples,
    plain_markers,
    triple_of,
)
from tripletune.llm.reading.rows import bar_rows, says_none
from tripletune.llm.reply_json import DEEPEST, JsonScan, explanation, masked, scan, without_thoughts

# A JSON object or array.
JsonContainer = dict[str, Any] | list[Any]
# Marks the key of the list of triples in an object with several lists.
_LISTED = re.compile("triple|fact", re.IGNORECASE)
_MARKER = re.compile(r"\(\s*S>|\|\s*[PO]>")
_ROW_START = re.compile(r"\[\s*[\"'“]|\{\s*[\"'](?:subject|head)\b", re.IGNORECASE)
# The beginning of a JSON list or object, in which a cut is seen.
_JSON_START = re.compile(r"\s*[\[{]\s*[\"'“\[{]")


def find_triples(text: str, advice: str = "") -> FoundTriples:
    """Find the triples of a reply in any form that models write; every valid triple of a bad reply is kept.

    The forms are RAS's `(S> s| P> p| O> o)`, WikiOFGraph's angled markers, JSON rows `[s, p, o]` or objects with
    "subject", "predicate" and "object" (`core.data.triples.triple_of`), and rows `s | p | o`. JSON rows may stand in an
    object (under "triples" or in its only list), in a list, or one after another. All lists are read. `UnusableReply`
    is raised if the reply has no triple and does not say that there are none ("NONE", also with a reason; an empty
    list).
    """
    # A reply that begins with a triple holds no thoughts and no JSON; later tags or brackets belong to names.
    begins_with_triple = _MARKER.match(plain_markers(text).lstrip())
    plain = text if begins_with_triple else without_thoughts(text)
    found = JsonScan([], []) if begins_with_triple else scan(plain, numbers_as_written=True)
    values, unreadable = found
    rows = _rows_of_json([value.value for value in values])
    triples: list[Triple] = []
    malformed = 0
    for row in rows or ():
        read = _triples_of_row(row)
        triples += read
        malformed += not read
    marked = _with_plain_markers(plain)
    outside_json = _with_plain_markers(masked(plain, values))
    if _MARKER.search(outside_json) or (not triples and _MARKER.search(marked)):
        parsed = parse_triples(marked)
        # Predicate or object markers without a subject marker count as one malformed triple.
        return FoundTriples(parsed.triples, parsed.malformed or int(not parsed.triples))
    key = text.rfind('"triples"')
    if unreadable and key > 0:
        # Skip entities before the triples: since the outer object is incomplete, they would be read as triples.
        return find_triples(text[key:], advice)
    cut_off = sum(bool(_ROW_START.match(plain, start)) for start in unreadable)
    if rows is None and not cut_off:
        with_bars, unclear = bar_rows(plain)
        if with_bars:
            return FoundTriples(tuple(Triple(*row.fields) for row in with_bars), unclear)
        if says_none(plain):
            return FoundTriples(())
        raise UnusableReply("no_triples", explanation(text, "there is no list of triples in it", advice))
    return FoundTriples(tuple(triples), malformed + cut_off, bool(unreadable))


def _with_plain_markers(text: str) -> str:
    """A text with RAS's markers, unless it has some already: then angled ones belong to names."""
    return text if _MARKER.search(text) else plain_markers(text)


def _triples_of_row(row: object) -> list[Triple]:
    """The triples of a JSON value: a row or object is one, a text with markers may hold several, others are none."""
    if isinstance(row, str):
        return list(parse_triples(plain_markers(row)).triples)
    triple = triple_of(row)
    return [triple] if triple else []


def without_cut_row(text: str) -> str:
    """A reply that was cut off, without a last row of fields that the cut may have shortened.

    JSON and rows in RAS's markers show by their brackets whether they are whole, so they stay.
    """
    before, line_break, last = text.rpartition("\n")
    if _JSON_START.match(last) or not ("|" in last or "Object:" in last):
        return text
    if _MARKER.search(plain_markers(last)):
        return text
    return before + line_break


def _rows_of_json(values: Sequence[JsonContainer]) -> list[object] | None:
    """The rows of all lists of triples, and single triples, in the JSON of a reply.

    None if no JSON value can hold triples, so that `find_triples` goes on to other forms; an empty list of triples
    says instead that there are none.
    """
    only_rows = all(_is_row(value) for value in values)
    rows: list[object] = []
    is_clear = False
    for value in values:
        # A row that is no triple cites a passage ("[1]") if it stands beside other values, or has one field alone.
        is_malformed = _is_row(value) and not triple_of(value)
        may_be_meant = only_rows and len(value) > 1
        is_citation = is_malformed and not may_be_meant
        inner = None if is_citation else _rows_in(value)
        if inner is not None:
            rows += inner
            is_clear = True
    return rows if is_clear else None


def _is_row(value: JsonContainer) -> bool:
    """Whether a value is one triple, valid or malformed: an object with a subject, or a list of plain values.

    A list that holds a list, an object or a text with markers is a list of triples. An empty list is none.
    """
    if isinstance(value, dict):
        return names_subject(value)
    for item in value:
        holds_triples = isinstance(item, (list, dict)) or _MARKER.match(plain_markers(str(item)).lstrip())
        if holds_triples:
            return False
    return bool(value)


def _rows_in(value: JsonContainer, depth: int = 0) -> list[object] | None:
    """Valid and malformed triples in an object or array; None if it is unclear which values are triples.

    A list under a telling name, such as "triples", counts before others. An object without any value is an empty list.
    """
    if _is_row(value) or depth > DEEPEST:
        return [value]
    if isinstance(value, list):
        return _rows_in_list(value, depth)
    named = {key: inner for key, inner in value.items() if _LISTED.search(key)}
    rows: list[object] = []
    is_clear = False
    lists = [inner for inner in (named or value).values() if isinstance(inner, (list, dict))]
    for inner in lists:
        inner_rows = _rows_in(inner, depth + 1)
        if inner_rows is None:
            continue
        if len(lists) > 1 and not named:
            # Of several lists without a telling name, those count that hold triples.
            is_list_of_triples = not _is_row(inner) and any(triple_of(row) for row in inner_rows)
            if not is_list_of_triples:
                continue
        rows += inner_rows
        is_clear = True
    is_empty = not named and not any(value.values())
    return rows if is_clear or is_empty else None


def _rows_in_list(values: list[Any], depth: int) -> list[object]:
    """The rows in an array; an object, or an array of rows, is opened.

    A value of which it is unclear what it holds is kept as a row, so that it counts as a malformed triple.
    """
    rows: list[object] = []
    for value in values:
        is_group = isinstance(value, list) and bool(value) and all(isinstance(item, (list, dict)) for item in value)
        inner = _rows_in(value, depth + 1) if isinstance(value, dict) or is_group else None
        if inner is None:
            rows.append(value)
        else:
            rows += inner
    return rows


@dataclass(frozen=True, slots=True)
class ExtractionReply:
    """A parsed reply, without repeated triples.

    A reply is `unreadable` if it has text, but neither a triple nor the word for "no facts".
    """

    triples: tuple[Triple, ...]
    malformed: int = 0
    unreadable: bool = False
    repeated: int = 0

    @property
    def is_malformed(self) -> bool:
        """Whether any part of the output could not be used as written."""
        return self.unreadable or self.malformed > 0


def read_reply(*texts: str) -> ExtractionReply:
    """Parse a reply, or the replies to the pieces of a text, with `find_triples`; a bad reply does not affect others.

    An empty reply means no facts (so encoder-decoder models learn it).
    """
    found, malformed, unreadable = list[Triple](), 0, False
    for text in filter(str.strip, texts):
        try:
            reply = find_triples(text)
        except UnusableReply:
            unreadable = True
        else:
            found += reply.triples
            malformed += reply.malformed
    distinct = tuple(dict.fromkeys(found))
    return ExtractionReply(distinct, malformed, unreadable, len(found) - len(distinct))
