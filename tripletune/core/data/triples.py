"""Subject-predicate-object facts and their text form `(S> s| P> p| O> o)` (RAS, section 3.2 eq. 4 and figure 14).

`parse_triples(format_triples(x))` returns `x` for any names, also with commas, brackets, pipes, quotes or any script.
Inside a name, a backslash escapes itself and the three interface markers; other characters are written unchanged. A
malformed triple is counted and does not affect the triples beside it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

# Only unescaped markers count. Model output varies in spacing, so the spaces are optional when reading.
_SUBJECT, _PREDICATE, _OBJECT, _PREDICATE_OR_OBJECT = (
    re.compile(rf"\\.|({marker})", re.DOTALL) for marker in (r"\(\s*S>", r"\|\s*P>", r"\|\s*O>", r"\|\s*[PO]>")
)
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
        for name in ("subject", "predicate", "object"):
            folded = " ".join(getattr(self, name).split())
            if not folded:
                raise ValueError(
                    f"triple field {name!r} is empty in {(self.subject, self.predicate, self.object)!r}: "
                    "a triple needs a subject, a predicate and an object"
                )
            object.__setattr__(self, name, folded)

    def __str__(self) -> str:
        names = (_NEEDS_ESCAPE.sub(r"\\\g<0>", name) for name in (self.subject, self.predicate, self.object))
        return "(S> {}| P> {}| O> {})".format(*names)

    def as_list(self) -> list[str]:
        """The JSON form `[subject, predicate, object]`."""
        return [self.subject, self.predicate, self.object]


class FoundTriples(NamedTuple):
    """The triples in a text, the number of malformed triples, and whether the JSON is cut off."""

    triples: tuple[Triple, ...]
    malformed: int = 0
    cut_off: bool = False


def format_triples(triples: Iterable[Triple]) -> str:
    """Write triples on one line, separated by a comma and a space."""
    return ", ".join(map(str, triples))


def parse_triples(text: str) -> FoundTriples:
    """Read every triple in a text; text between triples (commas, quotes, list brackets, prose) is ignored."""
    starts = list(_markers(_SUBJECT, text))
    triples: list[Triple] = []
    without_start = 0
    for match, following in zip(starts, [*starts[1:], None]):
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
    """Build triples from rows `[subject, predicate, object]`, objects (see `triple_of`) or a text."""
    if isinstance(rows, str):
        rows, malformed, _ = parse_triples(plain_markers(found := rows))
        if malformed or (found.strip() and not rows):
            raise ValueError(
                f"{where}: write triples in a text as (S> subject| P> predicate| O> object), found {found!r:.80}"
            )
        return rows
    if not isinstance(rows, (list, tuple)):
        raise ValueError(f"{where}: triples must be a list of [subject, predicate, object], found {rows!r:.80}")
    triples = []
    for row in rows:
        if isinstance(row, dict) and (named := triple_of(row)):
            triples.append(named)
            continue
        if not isinstance(row, (list, tuple)) or len(row) != 3 or not all(isinstance(field, str) for field in row):
            raise ValueError(f"{where}: a triple must be [subject, predicate, object], three strings; found {row!r}")
        try:
            triples.append(Triple(*row))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    return tuple(triples)


def triple_of(row: object) -> Triple | None:
    """Read `[s, p, o]`, or `{"subject", "predicate", "object"}` (also "head", "relation", …); None for other rows."""
    if isinstance(row, dict):
        named = {str(key).strip().casefold(): value for key, value in row.items()}
        row = [next((named[name] for name in names if name in named), None) for names in _PARTS]
    if not isinstance(row, (list, tuple)) or len(row) != 3:
        return None
    # A number is often written without quotation marks; NaN stands for a missing value in a table.
    fields = [str(field) for field in row if type(field) in (str, int, float) and field == field]
    return Triple(*fields) if len(fields) == 3 and all(field.strip() for field in fields) else None


def names_subject(row: dict[Any, Any]) -> bool:
    """Whether an object has a key that names a subject, so that it is meant as a triple."""
    return any(str(key).strip().casefold() in _PARTS[0] for key in row)


def _markers(pattern: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
    return (match for match in pattern.finditer(text) if match[1])


def _parse_body(body: str) -> tuple[Triple | None, bool]:
    """Return the triple after `(S>`, if valid, and whether a triple without `(S>` follows it."""
    # Names hold no line break, so a triple ends on its line, at the last closing bracket before the next triple.
    body = body.split("\n", 1)[0]
    predicate = next(_markers(_PREDICATE, body), None)
    if predicate is None:
        return None, False
    subject, rest = body[: predicate.start()], body[predicate.end() :]
    object_ = next(_markers(_OBJECT, rest), None)
    if object_ is None:
        return None, False
    name, tail = rest[object_.end() :], rest[: object_.start()]
    end, neighbour = name.rfind(")"), next(_markers(_PREDICATE_OR_OBJECT, name), None)
    ends = [match.start() for match in _END.finditer(name, 0, neighbour.start())] if neighbour else []
    if ends:
        end = ends[-1]
    if end < 0:
        return None, False
    try:
        fields = (_ESCAPED.sub(r"\1", field) for field in (subject, tail, name[:end]))
        return Triple(*fields), bool(ends)
    except ValueError:
        return None, bool(ends)
