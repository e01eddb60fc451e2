"""Read rows of three fields, `subject | predicate | object` (T2RAG, GEAR), and their unknowns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from tripletune.llm.reading.lines import (
    COMMENT_LABELS,
    Line,
    lines_of,
    plain_text,
    read_line,
    unquoted,
    without_emphasis,
)
from tripletune.llm.reply_json import json_values, nested_lists


class FieldRow(NamedTuple):
    """A row `subject | predicate | object`, with the digits of its number or ""."""

    number: str
    fields: tuple[str, str, str]


class FieldRows(NamedTuple):
    """The rows of a reply, and the number of rows whose fields are unclear and which are left out."""

    rows: list[FieldRow]
    unclear: int


_TABLE_RULE = re.compile(r"[ \t|:]*--[ \t|:-]*")
_NAMED_FIELDS = re.compile(r"\bSubject:(.+?)\bPredicate:(.+?)\bObject:(.+?)$", re.MULTILINE | re.DOTALL)
# The bracket around a row is not closed in its first field, as in "<singer> | was born in | <city>".
_BRACKETED_ROW = re.compile(r"[(<\[{]([^|)>\]}]*(?:\([^|)]*\)[^|)>\]}]*)?\|.*\|.*)[)>\]}]")
# Where a fact comes from is no part of its object: "(from passage 2)", "[Passage 2]", "[2]", ", as stated above".
_SHOWN = r"(?:the )?(?:passages?|propositions?|props?|facts?|clues?|texts?|contexts?|documents?|sources?|above)\b"
_STATED = r"(?:stated|mentioned|given|described|noted|found|said|shown)"
_SOURCE = re.compile(
    rf"\s*(?:[(\[](?:(?:from|see|per|in|via|by|according to|based on|(?:as )?{_STATED} (?:in|by)) {_SHOWN}"
    rf"|source\b|{_SHOWN}(?= ?\d|[)\]]|:))[^)\]]*[)\]]"
    r"|\[\d{1,2}(?:, ?\d{1,2})*\]"
    rf"|, (?:as|which is) {_STATED}\b.*| as {_STATED} (?:in |by )?{_SHOWN}.*"
    rf"|,? (?:according to|as per|per) {_SHOWN}.*"
    rf"|(?:,?| [–—-]) (?:from |see |in )?{_SHOWN} ?\d.*)\s*\Z",
    re.IGNORECASE,
)


def field_rows(reply: str) -> FieldRows:
    """Read rows of three fields, as in `bar_rows` or in JSON.

    JSON is tried only where no row has bars, so a reply is never read twice.
    """
    rows, unclear = bar_rows(reply)
    return FieldRows(rows or _json_rows(reply), unclear)


def bar_rows(reply: str) -> FieldRows:
    """Read rows `subject | predicate | object`, in lists and tables.

    A fourth field, for example a year or a place, belongs to the object. A row of more fields is unclear: nobody can
    say which of them belong together.
    """
    text = plain_text(reply)
    rows = []
    unclear = 0
    raw_lines = text.splitlines()
    heads = {position - 1 for position, raw in enumerate(raw_lines) if "|" in raw and _TABLE_RULE.fullmatch(raw)}
    for position, raw in enumerate(raw_lines):
        if "|" not in raw or position in heads or _TABLE_RULE.fullmatch(raw):
            continue
        line = read_line(raw.strip().strip("|") if raw.strip().startswith("|") else raw)
        if line.label in COMMENT_LABELS:
            continue
        fields = _fields_between_bars(line.text)
        number = line.number
        if len(fields) == 4 and not number and re.fullmatch(r"[\[(]?\d{1,3}[\])]?[.:]?", fields[0]):
            number = re.sub(r"\D", "", fields[0])
            fields = fields[1:]
        if len(fields) in (3, 4):
            rows.append(FieldRow(number, (fields[0], fields[1], ", ".join(fields[2:]))))
        elif len(fields) > 4:
            unclear += 1
    for match in _NAMED_FIELDS.finditer(text):
        named = [_clean_field(field) for field in match.groups()]
        if all(named):
            rows.append(FieldRow("", (named[0], named[1], named[2])))
    return FieldRows(rows, unclear)


def below_header(reply: str, header: str) -> str:
    """The text below the last line that is only a header such as "Triples:"; all of it if there is no such line."""
    text = plain_text(reply)
    raw_lines = text.splitlines()
    for position in range(len(raw_lines) - 1, -1, -1):
        if read_line(raw_lines[position]) == Line("", "", header):
            return "\n".join(raw_lines[position + 1 :])
    return text


def _fields_between_bars(text: str) -> list[str]:
    """The fields of a row with bars; none if one of them is empty, since it is then unclear what the others are."""
    bracketed = _BRACKETED_ROW.fullmatch(text)
    if bracketed:
        text = bracketed[1]
    text = text.strip().strip("|")
    fields = [_clean_field(field) for field in re.split(r"\|+", text)]
    if fields:
        fields[-1] = _without_source(fields[-1])
    return fields if all(fields) else []


def _without_source(field: str) -> str:
    """An object without the remark that says where it was read."""
    name = _SOURCE.sub("", field)
    if name.count("(") > name.count(")"):
        # The remark began before what names the source: "Oslo (inferred from passage 2)".
        name = name[: name.rindex("(")]
    return _clean_field(name) or field


def _clean_field(text: str) -> str:
    """A field without marks and quotation marks around it; brackets stay, since they may belong to a name."""
    return unquoted(without_emphasis(" ".join(text.split())).strip("*` ,;"), brackets=False)


def _json_rows(text: str) -> list[FieldRow]:
    """The lists of three texts in JSON; longer ones are left out, as `bar_rows` alone knows what a fourth field is."""
    rows = []
    for value in nested_lists(json_values(text)):
        fields = [_clean_field(field) for field in value if isinstance(field, str)]
        if len(value) == len(fields) == 3 and all(fields):
            rows.append(FieldRow("", (fields[0], fields[1], fields[2])))
    return rows


_NONE = re.compile(
    r"(?:(?:unfortunately|sorry|i(?: am|['’]m) afraid)\b[\s,:–—-]*)?(?:there(?: (?:is|are)|['’]s) )?"
    r"(?:none|n/?a|nothing|no (?:new |relevant |further |other |more |additional |useful )*(?:facts?|triples?))\b",
    re.IGNORECASE,
)


# Other words for NONE in a short reply without rows.
_NOTHING_HELPS = re.compile(
    r"\b(?:not|don['’]t|doesn['’]t|aren['’]t|isn['’]t) (?:\w+ )?(?:help|see|find|add|relevant|related|useful|about)\b"
    r"|\bnothing (?:new|else|more|further|relevant|useful|to add)\b|\bno (?:\w+ )?(?:facts?|information)\b"
    r"|\balready (?:been )?(?:found|known|covered|cover|listed|stated|state)\b",
    re.IGNORECASE,
)
_NO_ROWS = re.compile(r"\s*(?:\(?(?:no|null|nil)\b[.!)]*|[-–—]+)\s*", re.IGNORECASE)


def says_none(reply: str) -> bool:
    """Whether a reply to a prompt for rows says that there are none: `NONE`, "No new facts.", also with a reason.

    Elsewhere than at its beginning such words count only in a short reply (40 words, our choice): a long one may use
    them about one of its facts.
    """
    lines = [line.text for line in lines_of(reply) if line.text]
    if not lines:
        return False
    if _NONE.match(lines[0]) or _NO_ROWS.fullmatch(reply):
        return True
    is_short = len(reply.split()) <= 40
    return is_short and bool(_NOTHING_HELPS.search(reply))


_UNKNOWN_FIELD = re.compile(
    r"[\[<{(]*\s*\?[ \t]*(\w*)\s*[\]>})]*"  # ?c, ? c, ?, {?c}
    r"|\$(\w+)"  # $c
    r"|[\[<{]\s*([A-Za-z][\w '-]*)\s*[\]>}]"  # [director], <person>
    r"|_{2,}|\.{3}|…|unknown"
    r"|([X-Z]\d?)",  # X
    re.IGNORECASE,
)
# An unknown inside a field, as in "war with {leader}", "director of $film"; "?film" is in the paper's spelling.
_INNER_UNKNOWN = re.compile(r"(?<!\S)\$(?=[A-Za-z])|[{<]\s*\??([A-Za-z][\w '-]*?)\s*[}>]|[\[(]\s*\?(\w+)\s*[\])]")

_IN_BRACKETS = re.compile(r"[<\[{]\s*([^<>\[\]{}]*?)\s*[>\]}]")
_LETTER = re.compile(r"\?[X-Z]\d?")


def unknowns_in(rows: Sequence[Sequence[str]], question: str = "") -> list[list[str]]:
    """The fields of T2RAG's clues, with unknowns as in `unknown_field`; one that is X alone is X inside fields, too.

    Args:
        rows: Rows of three fields.
        question: The question; a name that stands in it is no unknown.
    """
    # In "<Ada> | <was born in> | <?city>", the brackets are the form of the rows.
    is_form = all(_IN_BRACKETS.fullmatch(row[1]) for row in rows)
    clues = []
    letters: set[str] = set()
    for row in rows:
        fields = [_IN_BRACKETS.sub(r"\1", field) for field in row] if is_form else row
        clue = [unknown_field(field, question) for field in fields]
        letters.update(field[1:] for field in clue if _LETTER.fullmatch(field))
        clues.append(clue)
    if not letters:
        return clues
    inner = re.compile(rf"(?<![?\w])({'|'.join(sorted(letters))})\b")
    for clue in clues:
        clue[:] = [inner.sub(r"?\1", field) for field in clue]
    return clues


def unknown_field(field: str, question: str = "") -> str:
    """A field of a T2RAG clue with its unknown in the paper's spelling: `?name`, or `?` for an unknown without name.

    A single X, Y or Z is an unknown unless the question names it, and so is a capitalised name in brackets. Other
    fields are returned without brackets around them.
    """
    match = _UNKNOWN_FIELD.fullmatch(field.strip())
    bracketed = match[3] if match else None
    if bracketed and bracketed[0].isupper() and bracketed in question:
        return bracketed
    if match is None:
        whole = _IN_BRACKETS.fullmatch(field)
        field = whole[1] if whole else field
        return _INNER_UNKNOWN.sub(lambda inner: _unknown_named(inner[1] or inner[2] or ""), field)
    letter = match[4]
    if letter and (letter != letter.upper() or re.search(rf"\b{letter}\b", question)):
        return field
    name = match[1] or match[2] or match[3] or letter or ""
    return _unknown_named(name)


def _unknown_named(name: str) -> str:
    """An unknown in the paper's spelling: `?film_director`."""
    return "?" + re.sub(r"\W+", "_", name.strip())
