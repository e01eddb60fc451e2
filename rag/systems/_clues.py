"""T2RAG's clues: triples with unknown fields, which the rows of a reply fill (algorithm 1)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum

import regex as re

from tripletune.core.calls import UnusableReply
from tripletune.llm.reading.lines import unquoted
from tripletune.llm.reading.rows import FieldRow, below_header, field_rows, unknowns_in
from tripletune.llm.refusals import is_refusal
from tripletune.rag.search.triple_index import entity_key

# A question mark directly after a word ("Who's Afraid of Virginia Woolf?") is no unknown.
_UNKNOWN = re.compile(r"(?<![^\s(\"'\[<{])\?\w*")
# A value that says that there is none, also with a reason: "unknown (the passages do not say)".
_NOTHING = re.compile(
    r"\W+|\W*(unknown|none|n/?a|tbd|not (known|found|given|specified|stated|mentioned|available))"
    r"(\W*| (in|by) the (passages?|propositions?|text)\W*|\s*[(,;:–—-].*)",
    re.IGNORECASE,
)
# Words without which two predicates are compared: "was born in" is "born in".
_AUXILIARIES = frozenset(("is", "are", "was", "were", "be", "been", "has", "have", "had", "does", "did", "do"))
_PREPOSITIONS = frozenset(("of", "in", "at", "on", "by", "to", "from", "with", "for"))
_ENDS = (0, 2)  # places of subject and object


class ClueKind(IntEnum):
    """Kinds of clues by their number of unknowns; FUZZY has two or more."""

    RESOLVED = 0
    SEARCHABLE = 1
    FUZZY = 2


class Clue:
    """A triple with unknowns, and a number from 1, which stays when the unknowns are filled."""

    def __init__(self, number: int, fields: Sequence[str]) -> None:
        self.number = number
        self.fields = list(fields)

    def __str__(self) -> str:
        """The clue as prompts show it; replies refer to it by the number."""
        return f"[{self.number}] {' | '.join(self.fields)}"

    @property
    def kind(self) -> ClueKind:
        """The kind by the number of unknowns; a name counts once, and each `?` without a name counts."""
        names: set[str] = set()
        nameless = 0
        for field in self.fields:
            # Most fields have no question mark, which is found sooner than by the pattern.
            for unknown in _UNKNOWN.findall(field) if "?" in field else ():
                if unknown == "?":
                    nameless += 1
                else:
                    names.add(unknown.lower())
        return ClueKind(min(len(names) + nameless, 2))

    @property
    def query(self) -> str:
        """The query proposition: the known fields, separated by spaces."""
        return " ".join(_UNKNOWN.sub(" ", " ".join(self.fields)).split())

    def agrees(self, fields: Sequence[str]) -> bool:
        """Whether a reply's fields equal this clue's known fields, apart from case and articles."""
        for own, other in zip(self.fields, fields):
            if not _UNKNOWN.search(own) and entity_key(own) != entity_key(other):
                return False
        return True


def first_clues(reply: str, question: str = "") -> list[Clue]:
    """Read the clues of a question from a reply (step 1); `UnusableReply` if the reply has no clue."""
    rows, _ = field_rows(below_header(reply, "triples"))
    rows = rows or field_rows(reply)[0]
    if not rows:
        raise UnusableReply("no_clue", "The reply holds no line of the form subject | predicate | object.")
    clues = []
    for number, fields in enumerate(unknowns_in([row.fields for row in rows], question), 1):
        clues.append(Clue(number, fields))
    return clues


def fill_clues(clues: list[Clue], rows: Iterable[FieldRow]) -> None:
    """Fill unknowns of `clues` from the rows of a reply, and add its new clues to them (step 2.3).

    What a row says wins over what another row of the same reply says of an unknown with the same name: two clues may
    share a name and have two values, as when two places are compared. So names are bound after all rows were read.
    """
    bindings: dict[str, str] = {}
    for row in rows:
        clue = _clue_of(clues, row)
        if clue is None:
            clues.append(Clue(len(clues) + 1, row.fields))
            continue
        for place, value in _values_of_unknowns(clue, row.fields).items():
            unknown = clue.fields[place]
            value = unquoted(value)
            is_open = _UNKNOWN.search(value) or entity_key(value) == entity_key(unknown)
            if is_open or _NOTHING.fullmatch(value) or is_refusal(value):
                continue
            clue.fields[place] = value
            has_name = len(unknown) > 1 and _UNKNOWN.fullmatch(unknown)
            if has_name:
                bindings.setdefault(unknown, value)
    for name, value in bindings.items():
        _fill_everywhere(clues, name, value)


def _clue_of(clues: list[Clue], row: FieldRow) -> Clue | None:
    """The clue that a row fills; None if the row is a new clue.

    A row names a clue by its number and must agree with its known fields. Models renumber rows and respell fields, so a
    clue that agrees, or alone is similar, may take the row in the place of the named one.
    """
    agreeing = sorted((clue for clue in clues if clue.agrees(row.fields)), key=lambda clue: clue.kind)
    numbered = [clue for clue in clues if str(clue.number) == row.number]
    if not numbered and agreeing:
        return agreeing[0]
    if numbered:
        (named,) = numbered
        if named in agreeing:
            return named
        # The model numbered its rows from 1, or the row spells a known field differently.
        nearly_resolved = [clue for clue in agreeing if clue.kind < ClueKind.FUZZY]
        if nearly_resolved:
            return nearly_resolved[0]
        if _has_in_common(named, row.fields):
            return named
    similar = [clue for clue in clues if _is_similar(clue, row.fields)]
    return similar[0] if len(similar) == 1 else None


def _values_of_unknowns(clue: Clue, fields: Sequence[str]) -> dict[int, str]:
    """The values that a row gives to the unknowns of a clue, by place.

    A row with subject and object exchanged gives them exchanged back.
    """
    values = {place: fields[place] for place in range(3) if _UNKNOWN.search(clue.fields[place])}
    inverted = _inverted_place(clue, fields)
    if inverted is not None:
        values[inverted] = fields[2 - inverted]
    return values


def _inverted_place(clue: Clue, fields: Sequence[str]) -> int | None:
    """The place of the unknown that a row names at its other end, as `M | became | F` does for `?p | came from | M`."""
    for place in _ENDS:
        other = 2 - place
        own = clue.fields[other]
        if _UNKNOWN.search(clue.fields[place]) and not _UNKNOWN.search(own):
            is_inverted = entity_key(fields[place]) == entity_key(own) and not _are_alike(fields[other], own)
            if is_inverted:
                return place
    return None


def _has_in_common(clue: Clue, fields: Sequence[str]) -> bool:
    """Whether a row with a clue's number may state its fact: it shares a word of a known field, or is inverted."""
    if all(_UNKNOWN.search(clue.fields[place]) for place in _ENDS):
        return True
    for own, field in zip(clue.fields, fields):
        if not _UNKNOWN.search(own) and (_content_words(own) & _content_words(field)) - _PREPOSITIONS:
            return True
    return _inverted_place(clue, fields) is not None


def _is_similar(clue: Clue, fields: Sequence[str]) -> bool:
    """Whether a row states an open clue's fact under a longer or shorter name, as the passages may have it."""
    if clue.kind is ClueKind.RESOLVED or _content_words(clue.fields[1]) != _content_words(fields[1]):
        return False
    ends = [place for place in _ENDS if not _UNKNOWN.search(clue.fields[place])]
    return bool(ends) and all(_are_alike(clue.fields[place], fields[place]) for place in ends)


def _are_alike(name: str, other: str) -> bool:
    """Whether two names may be one thing's: all words of one are in the other ("The Daily News (Palo Alto)")."""
    words = set(entity_key(name).split())
    others = set(entity_key(other).split())
    return bool(words and others) and (words <= others or others <= words)


def _content_words(text: str) -> set[str]:
    """The words of a field without auxiliary verbs, which a model adds and leaves out at will."""
    return set(entity_key(text).split()) - _AUXILIARIES


def _fill_everywhere(clues: list[Clue], name: str, value: str) -> None:
    """Write a value in the place of a named unknown in all clues, which changes their fields."""
    same = re.compile(rf"{re.escape(name)}(?!\w)", re.IGNORECASE)
    for clue in clues:
        clue.fields = [same.sub(lambda _: value, text) for text in clue.fields]
