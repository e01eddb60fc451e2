"""Subject-predicate-object facts and their text form `(S> s| P> p| O> o)` (RAS, section 3.2 eq. 4 and figure 14).

`parse_triples(format_triples(x))` returns `x` for any names, also with commas, brackets, pipes, quotes or any script.
Inside a name, a backslash escapes itself and the three interface markers; other characters are written unchanged. A
malformed triple is counted and does not affect the triples beside it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from tripletune.core.data.fields import unfolded

# Only unescaped markers count: each pattern first skips an escaped character, which leaves its group empty. Models vary
# the spaces, so these are optional when reading.
_SUBJECT = re.compile(r"\\.|(\(\s*S>)", re.DOTALL)
_PREDICATE = re.compile(r"\\.|(\|\s*P>)", re.DOTALL)
_OBJECT = re.compile(r"\\.|(\|\s*O>)", re.DOTALL)
_PREDICATE_OR_OBJECT = re.compile(r"\\.|(\|\s*[PO]>)", re.DOTALL)
_NEEDS_ESCAPE = re.compile(r"\\|\((?=\s*S>)|\|(?=\s*[PO]>)")
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
# Names of the parts of a triple in files and in replies.
_PARTS = (
    ("subject", "head", "subj"),
    ("predicate", "relation", "relationship", "property", "type"),
    ("object", "tail", "obj"),
)
# Where a triple ends and something else begins.
_END = re.compile(r"\)(?=\s*[,;(])")

# WikiOFGraph writes (<S> s| <P> p| <O> o); RAS (figure 14) writes it without the first bracket.
_ANGLED = re.compile(r"(\(\s*)<S>|(\|\s*)<([PO])>")


@dataclass(frozen=True, slots=True, order=True)
class Triple:
    """One fact. White space in a field is folded to single spaces; an empty field raises a `ValueError`."""

    subject: str
    predicate: str
    object: str

    def __post_init__(self) -> None:
        """Fold the white space of all fields, so that equal facts are equal triples and each fits on one line."""
        for name in ("subject", "predicate", "object"):
            folded = " ".join(getattr(self, name).split())
            if not folded:
                raise ValueError(
                    f"triple field {name!r} is empty in {(self.subject, self.predicate, self.object)!r}: "
                    "a triple needs a subject, a predicate and an object"
                )
            object.__setattr__(self, name, folded)

    def __str__(self) -> str:
        subject, predicate, object_ = map(escaped_name, self.as_list())
        return f"(S> {subject}| P> {predicate}| O> {object_})"

    def as_list(self) -> list[str]:
        """The JSON form `[subject, predicate, object]`."""
        return [self.subject, self.predicate, self.object]


def escaped_name(name: str) -> str:
    """A field of a triple as it is written between markers."""
    return _NEEDS_ESCAPE.sub(r"\\\g<0>", name)


class FoundTriples(NamedTuple):
    """The triples in a text, the number of malformed triples, and whether the JSON is cut off."""

    triples: tuple[Triple, ...]
    malformed: int = 0
    cut_off: bool = False


def format_triples(triples: Iterable[Triple]) -> str:
    """Write triples on one line, separated by a comma and a space."""
    return ", ".join(map(str, triples))


def parse_triples(text: str) -> FoundTriples:
    """Read every triple in a text; text between triples (commas, quotes, list brackets, prose) is ignored.

    A beginning without a whole triple counts as malformed, and so does a triple whose beginning is missing, so that a
    reply that was cut off or garbled is noticed.
    """
    starts = list(_unescaped_markers(_SUBJECT, text))
    triples: list[Triple] = []
    without_start = 0
    # Each beginning with the next one, where its text ends; nothing follows the last.
    for match, following in zip(starts, [*starts[1:], None], strict=False):
        body = text[match.end() : following.start() if following else len(text)]
        triple, has_neighbour = _parse_body(body)
        if triple is not None:
            triples.append(triple)
        without_start += has_neighbour
    return FoundTriples(tuple(triples), len(starts) - len(triples) + without_start)


def plain_markers(text: str) -> str:
    """Replace WikiOFGraph's markers `(<S>`, `| <P>`, `| <O>` by those of RAS."""
    return _ANGLED.sub(lambda match: f"{match[1]}S>" if match[1] else f"{match[2]}{match[3]}>", text)


def triples_from_json(rows: object, where: str) -> tuple[Triple, ...]:
    """Build triples from rows `[subject, predicate, object]`, objects (see `triple_of`) or a text.

    A text is in RAS's form, or holds the list of rows, as a cell of a table does. Strict, since these are files: what a
    model's reply may lack is an error here.
    """
    if isinstance(rows, str):
        stored_list = unfolded(rows)
        # A list of texts is one in RAS's form, in which brackets and quotes are skipped.
        if not isinstance(stored_list, list) or any(isinstance(row, str) for row in stored_list):
            return _triples_of_text(rows, where)
        rows = stored_list
    if not isinstance(rows, (list, tuple)):
        raise ValueError(f"{where}: triples must be a list of [subject, predicate, object], found {rows!r:.80}")
    return tuple(_stored_triple(row, where) for row in rows)


def _triples_of_text(text: str, where: str) -> tuple[Triple, ...]:
    """The triples of a text in RAS's form; text without any is refused, unless it is blank."""
    parsed = parse_triples(plain_markers(text))
    if parsed.malformed or (text.strip() and not parsed.triples):
        raise ValueError(
            f"{where}: write triples in a text as (S> subject| P> predicate| O> object), or as the list "
            f'[["subject", "predicate", "object"]], found {text!r:.80}'
        )
    return parsed.triples


def _stored_triple(row: object, where: str) -> Triple:
    """The triple of one row of a file; see `triples_from_json`.

    Files are read strictly, unlike replies of models: a row that is no triple is a fault of the file.
    """
    if isinstance(row, dict):
        named = triple_of(row)
        if named is not None:
            return named
    if not isinstance(row, (list, tuple)) or len(row) != 3 or not all(isinstance(field, str) for field in row):
        raise ValueError(f"{where}: a triple must be [subject, predicate, object], three strings; found {row!r}")
    try:
        return Triple(*row)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def triple_of(row: object) -> Triple | None:
    """Read `[s, p, o]`, or `{"subject", "predicate", "object"}` (also "head", "relation", …); None for other rows.

    Replies of models and files of others are both read by this, so it takes what is clear and guesses nothing: three
    fields, none of them empty.
    """
    if isinstance(row, dict):
        row = _named_parts(row)
    if not isinstance(row, (list, tuple)) or len(row) != 3:
        return None
    fields = []
    for field in row:
        # A number is often written without quotation marks; NaN stands for a missing value in a table.
        is_missing = isinstance(field, float) and math.isnan(field)
        is_name = type(field) in (str, int, float) and not is_missing and str(field).strip()
        if not is_name:
            return None
        fields.append(str(field))
    return Triple(*fields)


def _named_parts(row: dict[Any, Any]) -> list[Any]:
    """Subject, predicate and object of an object by any of their names; None for a part that it lacks."""
    values = {str(key).strip().casefold(): value for key, value in row.items()}
    parts = []
    for names in _PARTS:
        present = [values[name] for name in names if name in values]
        parts.append(present[0] if present else None)
    return parts


def names_subject(row: dict[Any, Any]) -> bool:
    """Whether an object has a key that names a subject, so that it is meant as a triple."""
    return any(str(key).strip().casefold() in _PARTS[0] for key in row)


def _unescaped_markers(pattern: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
    """The matches of a pattern that are markers, and not the escaped characters that it skips."""
    return (match for match in pattern.finditer(text) if match[1])


class _ParsedBody(NamedTuple):
    """The triple after `(S>`, None if it is not valid, and whether a triple without `(S>` follows it."""

    triple: Triple | None
    has_neighbour: bool


def _parse_body(body: str) -> _ParsedBody:
    """Read what follows `(S>` up to the next one.

    The closing bracket is the last one of the line, since names may hold brackets: ` a| P> b| O> c (d)), ` has the
    object "c (d)". In ` a| P> b| O> c), e| P> f| O> g)` a second triple lacks its beginning, so the first ends at the
    last bracket with a comma behind it before the next marker.
    """
    # Names hold no line break, so a triple ends on its line, at the last closing bracket before the next triple.
    body = body.split("\n", 1)[0]
    predicate = next(_unescaped_markers(_PREDICATE, body), None)
    if predicate is None:
        return _ParsedBody(None, False)
    subject = body[: predicate.start()]
    after_subject = body[predicate.end() :]
    object_ = next(_unescaped_markers(_OBJECT, after_subject), None)
    if object_ is None:
        return _ParsedBody(None, False)
    relation = after_subject[: object_.start()]
    after_relation = after_subject[object_.end() :]
    end = after_relation.rfind(")")
    # Another predicate or object belongs to a triple whose `(S>` is missing: this triple ends before it.
    neighbour = next(_unescaped_markers(_PREDICATE_OR_OBJECT, after_relation), None)
    has_neighbour = False
    if neighbour:
        for match in _END.finditer(after_relation, 0, neighbour.start()):
            end = match.start()
            has_neighbour = True
    if end < 0:
        return _ParsedBody(None, False)
    fields = [_ESCAPED.sub(r"\1", field) for field in (subject, relation, after_relation[:end])]
    try:
        return _ParsedBody(Triple(*fields), has_neighbour)
    except ValueError:
        return _ParsedBody(None, has_neighbour)
