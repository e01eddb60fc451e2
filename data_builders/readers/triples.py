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

from tripletune.core.data.fields import checked, name_field, text_field, unfolded
from tripletune.core.data.questions import Dropped
from tripletune.core.data.triples import Triple, parse_triples, plain_markers, triple_of
from tripletune.core.plugins import load_from
from tripletune.core.rows import Row, find_passage, required_text, source_rows
from tripletune.data_builders import readers
from tripletune.data_builders.datasets import JsonlIndex
from tripletune.data_builders.subq.options import Source

MALFORMED_TRIPLES = "malformed triples, left out"
QUESTIONS_DROPPED = "questions that the reader leaves out"


class PairDrop(StrEnum):
    """Why a row gives no pair; the card shows the values."""

    NO_TEXT = "the text is empty"
    NO_TRIPLES = "there is no list of triples"
    ALL_MALFORMED = "every triple is malformed"
    UNKNOWN_ENTITY = "the text has a placeholder without an entity"
    NO_FACTS = "the text has no facts (--no-facts drop)"
    REPEATED = "text and triples seen before"
    CONTRADICTED = "text seen before, with other triples"
    EXCLUDED = "the text is excluded (--exclude)"
    NO_PASSAGE = "recorded triples of a title that is not in the question's context"
    NO_ANNOTATION = "no recorded triples for the question"


@dataclass(frozen=True, slots=True)
class PairRow:
    """One row of a source; `--exclude` also uses the text of a row whose triples are `unusable`."""

    id: str
    title: str
    text: str
    triples: tuple[Triple, ...]
    unusable: PairDrop | None = None


def pair_rows(
    location: str,
    drops: Counter[str],
    issues: Counter[str],
    keys: tuple[str, ...],
    text_of: Callable[[Row, str], str | None] | None = None,
) -> Iterator[PairRow]:
    """Stream the rows of a file whose triples are under one of `keys`; `drops` counts rows without text.

    `text_of` returns the text, given a row and its raw text; None if the row has no usable text.
    """
    for where, row in source_rows(location):
        # An empty list says that the text has no facts; null says nothing.
        key = next((key for key in keys if row.get(key) is not None), next((key for key in keys if key in row), None))
        if key is None or "text" not in row:
            raise ValueError(
                f"{where}: a row needs 'text' and {' or '.join(map(repr, keys))}; it has {', '.join(row) or 'none'}"
            )
        raw = text_field(row, where, "text")
        text = text_of(row, raw) if text_of else raw
        if not raw or text is None:
            drops[PairDrop.UNKNOWN_ENTITY if raw else PairDrop.NO_TEXT] += 1
            continue
        identity, title = name_field(row, where, "id", "_id"), name_field(row, where, "title")
        yield _pair_row(identity, title, text, row[key], issues)


def _pair_row(identity: str, title: str, text: str, value: object, issues: Counter[str]) -> PairRow:
    found = published_triples(value)
    triples, malformed = found or ([], 0)
    unusable = PairDrop.NO_TRIPLES if found is None else PairDrop.ALL_MALFORMED if malformed and not triples else None
    issues[MALFORMED_TRIPLES] += 0 if unusable else malformed
    return PairRow(identity, title, text, tuple(triples), unusable)


def published_triples(value: object) -> tuple[list[Triple], int] | None:
    """Triples in any published form, and the number of malformed ones; None if the value is not a list of triples."""
    if isinstance(value := unfolded(value), str):
        return _marked(value.strip())
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, (list, tuple)):
        return None
    found, malformed = list[Triple](), 0
    for item in value:
        if isinstance(item, str):
            triples, bad = _marked(item)
            found += triples
            malformed += bad
        elif triple := triple_of(item):
            found.append(triple)
        else:
            malformed += 1
    return found, malformed


def _marked(text: str) -> tuple[list[Triple], int]:
    # Published files have no escapes, so a backslash is a plain character.
    parsed = parse_triples(plain_markers(text.replace("\\", "\\\\")))
    return list(parsed.triples), parsed.malformed + bool(text.strip() and not parsed.triples and not parsed.malformed)


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
    """Stream the rows of a source."""
    for row in read_rows(source, drops, issues):
        if row.unusable is None:
            yield row
        else:
            drops[row.unusable] += 1


def read_rows(source: Source, drops: Counter[str], issues: Counter[str]) -> Iterator[PairRow]:
    """Stream the rows of a source, including rows with unusable triples; see `pair_rows` for the counters."""
    if source.annotations is None:
        return _pair_reader(source)(source.location, drops, issues)
    return _recorded_rows(source, drops, issues)


def _pair_reader(source: Source) -> Callable[[str, Counter[str], Counter[str]], Iterator[PairRow]]:
    """The `read_pair_rows` function of a source's reader."""
    module = load_from(readers.__name__, source.reader, "reader")
    if not hasattr(module, "read_pair_rows"):
        raise ValueError(
            f"source {source.name!r}: {source.reader} reads questions; add the file of a teacher's recorded replies "
            f"({source.reader}:FILE:REPLIES), or use a reader of pairs "
            f"({', '.join(readers.names_with('read_pair_rows'))})"
        )
    return module.read_pair_rows


def _recorded_rows(source: Source, drops: Counter[str], issues: Counter[str]) -> Iterator[PairRow]:
    index = JsonlIndex(str(source.annotations), _key)
    for question in readers.get_reader(source.reader)(source.location, issues, source.name):
        if isinstance(question, Dropped):
            issues[QUESTIONS_DROPPED] += 1
            continue
        found = index.get(question.id)
        if found is None:
            drops[PairDrop.NO_ANNOTATION] += 1
            continue
        for title, rows in (found[1].get("triples") or {}).items():
            number = find_passage(title, question.passages)
            if number is None:
                drops[PairDrop.NO_PASSAGE] += 1
            elif not question.passages[number].text.strip():
                drops[PairDrop.NO_TEXT] += 1
            else:
                passage = question.passages[number]
                yield _pair_row(f"{question.id}:{number}", passage.title, passage.text, rows, issues)


def _key(where: str, row: Row) -> str:
    checked(row, where, {"triples?": {}})
    return required_text(row, ("_id", "id"), where, name_field)
