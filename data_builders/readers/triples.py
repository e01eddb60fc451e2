"""Rows of text-to-triples data: a text, optional title, and triples in any published form.

Triples may be rows `["s", "p", "o"]`, objects with subject, predicate and object, one text with the markers of RAS or
WikiOFGraph, a list of such texts, or any of these as JSON text. A malformed triple is left out and counted.

A source is `[NAME=]READER:FILE[:REPLIES]`, as for HotpotQA-SUBQ: a file of pairs (`triples`, `wikiofgraph`, `genwiki`),
or a benchmark file with a teacher's recorded replies (`{"_id", "triples": {title: [[s, p, o]]}}`), where every passage
that the teacher read gives a pair.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from tripletune.core.data.contexts import find_passage
from tripletune.core.data.fields import checked, name_field, text_field, unfolded
from tripletune.core.data.questions import Dropped
from tripletune.core.data.triples import Triple, parse_triples, plain_markers, triple_of
from tripletune.core.plugins import load_from
from tripletune.core.rows import Row, required_name, source_rows
from tripletune.data_builders import readers
from tripletune.data_builders.datasets.lookup import JsonlIndex
from tripletune.data_builders.subq.options import Source

# A module's `read_pair_rows`: from location, drops and issues to rows; see `pair_rows`.
PairReader = Callable[[str, Counter[str], Counter[str]], Iterator["PairRow"]]

MALFORMED_TRIPLES = "malformed triples, left out"
QUESTIONS_DROPPED = "questions that the reader leaves out"


class PairDrop(StrEnum):
    """Why a row gives no pair; the card shows the values."""

    NO_TEXT = "the text is empty"
    NO_TRIPLES = "there is no list of triples"
    ALL_MALFORMED = "every triple is malformed"
    UNKNOWN_ENTITY = "the text has a placeholder without an entity"
    ALL_OUTSIDE = "no triple has a predicate of the vocabulary"
    NO_FACTS = "the text has no facts (--no-facts drop)"
    REPEATED = "text and triples seen before"
    CONTRADICTED = "text seen before, with other triples"
    EXCLUDED = "the text is excluded (--exclude)"
    NO_PASSAGE = "recorded triples of a title that is not in the question's context"
    NO_ANNOTATION = "no recorded triples for the question"


@dataclass(frozen=True, slots=True)
class PairRow:
    """One row of a source: a text and its triples.

    Attributes:
        id: The row's id, or "".
        unusable: Why the triples can't be used, or None. Such a row has no triples, but `--exclude` uses its text.
    """

    id: str
    title: str
    text: str
    triples: tuple[Triple, ...]
    unusable: PairDrop | None = None


def pair_rows(
    location: str,
    drops: Counter[str],
    issues: Counter[str],
    names: tuple[str, ...],
    text_of: Callable[[Row, str], str | None] | None = None,
) -> Iterator[PairRow]:
    """Stream the rows of a file.

    Args:
        drops: Counts the rows without a text, by `PairDrop`.
        issues: Counts the malformed triples.
        names: The fields that may hold the triples, of which the first present one is read.
        text_of: Returns the text, given a row and its raw text; None if the row has no usable text.
    """
    for where, row in source_rows(location):
        present = [name for name in names if name in row]
        if not present or "text" not in row:
            raise ValueError(
                f"{where}: a row needs 'text' and {' or '.join(map(repr, names))}; it has {', '.join(row) or 'none'}"
            )
        raw_text = text_field(row, where, "text")
        if not raw_text:
            drops[PairDrop.NO_TEXT] += 1
            continue
        text = text_of(row, raw_text) if text_of else raw_text
        if text is None:
            drops[PairDrop.UNKNOWN_ENTITY] += 1
            continue
        # An empty list says that the text has no facts; null says nothing.
        not_null = [name for name in present if row[name] is not None]
        triples = row[not_null[0]] if not_null else None
        identity = name_field(row, where, "id", "_id")
        yield _pair_row(identity, name_field(row, where, "title"), text, triples, issues)


def _pair_row(identity: str, title: str, text: str, stored_triples: object, issues: Counter[str]) -> PairRow:
    """A row from its parts; triples that can't be used leave a row that says why.

    Rows in which every triple is malformed are not counted among the malformed triples, but by `PairDrop`.
    """
    published = published_triples(stored_triples)
    if published is None:
        return PairRow(identity, title, text, (), PairDrop.NO_TRIPLES)
    if published.malformed and not published.triples:
        return PairRow(identity, title, text, (), PairDrop.ALL_MALFORMED)
    issues[MALFORMED_TRIPLES] += published.malformed
    return PairRow(identity, title, text, published.triples)


class PublishedTriples(NamedTuple):
    """The triples of a row, and how many more were malformed."""

    triples: tuple[Triple, ...]
    malformed: int


def published_triples(value: object) -> PublishedTriples | None:
    """Read triples in any published form; None if the value is not a list of triples.

    An empty list is one: it says that the text has no facts. A single triple may stand without a list around it.

    Args:
        value: A value of a row, which may also be JSON as text.
    """
    value = unfolded(value)
    if isinstance(value, str):
        return _triples_between_markers(value.strip())
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, (list, tuple)):
        return None
    triples: list[Triple] = []
    malformed = 0
    for item in value:
        if isinstance(item, str):
            marked = _triples_between_markers(item)
            triples += marked.triples
            malformed += marked.malformed
            continue
        triple = triple_of(item)
        if triple:
            triples.append(triple)
        else:
            malformed += 1
    return PublishedTriples(tuple(triples), malformed)


def _triples_between_markers(text: str) -> PublishedTriples:
    """The triples of a text with the markers of RAS or WikiOFGraph; a text without a marker is one malformed triple."""
    # Published files have no escapes, so a backslash is a plain character.
    parsed = parse_triples(plain_markers(text.replace("\\", "\\\\")))
    malformed = parsed.malformed
    if text.strip() and not parsed.triples and not malformed:
        malformed = 1
    return PublishedTriples(tuple(parsed.triples), malformed)


def read_pair_rows(location: str, drops: Counter[str], issues: Counter[str]) -> Iterator[PairRow]:
    """Stream the rows; see `pair_rows`."""
    return pair_rows(location, drops, issues, ("triples", "triplets", "triplet"))


def check_source(source: Source) -> None:
    """Raise `ValueError` if a source has an unknown reader, or missing or superfluous replies."""
    if source.annotations is not None:
        readers.get_reader(source.reader)
    else:
        _pair_reader(source)


def read_source(source: Source, drops: Counter[str], issues: Counter[str]) -> Iterator[PairRow]:
    """Stream the usable rows of a source; the others are counted in `drops`. See `pair_rows` for the counters."""
    for row in read_rows(source, drops, issues):
        if row.unusable is None:
            yield row
        else:
            drops[row.unusable] += 1


def read_rows(source: Source, drops: Counter[str], issues: Counter[str]) -> Iterator[PairRow]:
    """Stream the rows of a source, including rows with unusable triples; see `pair_rows` for the counters."""
    if source.annotations is None:
        rows = _pair_reader(source)(source.location, drops, issues)
    else:
        rows = _recorded_rows(source, drops, issues)
    return source.not_empty(rows, drops, issues)


def _pair_reader(source: Source) -> PairReader:
    """The `read_pair_rows` function of a source's reader.

    Raises:
        ValueError: There is no such reader, or it reads questions, which have triples only with recorded replies.
    """
    module = load_from(readers.__name__, source.reader, "reader")
    if not hasattr(module, "read_pair_rows"):
        raise ValueError(
            f"source {source.name!r}: {source.reader} reads questions; add the file of a teacher's recorded replies "
            f"({source.reader}:FILE:REPLIES), or use a reader of pairs "
            f"({', '.join(readers.names_with('read_pair_rows'))})"
        )
    return module.read_pair_rows


def _recorded_rows(source: Source, drops: Counter[str], issues: Counter[str]) -> Iterator[PairRow]:
    """The passages of a benchmark's questions with the triples that a teacher's recorded replies give them.

    The id of a row is the question's with the index of the passage, since the same passage may occur in many questions.
    The replies are on disk, so their number does not matter.
    """
    replies = JsonlIndex(str(source.annotations), _reply_key)
    for question in readers.get_reader(source.reader)(source.location, issues, source.name):
        if isinstance(question, Dropped):
            issues[QUESTIONS_DROPPED] += 1
            continue
        stored = replies.get(question.id)
        if stored is None:
            drops[PairDrop.NO_ANNOTATION] += 1
            continue
        _, reply = stored
        for title, triples in (reply.get("triples") or {}).items():
            number = find_passage(title, question.passages)
            if number is None:
                drops[PairDrop.NO_PASSAGE] += 1
                continue
            passage = question.passages[number]
            if not passage.text.strip():
                drops[PairDrop.NO_TEXT] += 1
                continue
            yield _pair_row(f"{question.id}:{number}", passage.title, passage.text, triples, issues)


def _reply_key(where: str, row: Row) -> str:
    """The question of a recorded reply, whose layout is checked."""
    checked(row, where, {"triples?": {}})
    return required_name(row, where, "_id", "id")
