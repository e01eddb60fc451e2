"""Where text-to-triples pairs come from: files of pairs, or the passages of a benchmark with a teacher's triples.

A source is `[NAME=]READER:FILE[:REPLIES]`, as for HotpotQA-SUBQ. Without REPLIES the reader is one of files of pairs
(`triples`, `wikiofgraph`, `genwiki`); with a file of recorded replies (`{"_id", "triples": {title: [[s, p, o]]}}`) it
is one of questions (`hotpotqa`, ...), and every passage that the teacher read gives a pair.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from tripletune.data_builders import readers
from tripletune.data_builders.datasets.lookup import JsonlIndex
from tripletune.data_builders.hotpotqa_subq.options import Source
from tripletune.data_builders.hotpotqa_subq.questions import Dropped
from tripletune.data_builders.readers._rows import PassageFinder
from tripletune.data_builders.text_to_triples.rows import (
    MALFORMED_TRIPLES,
    PairDrop,
    PairReader,
    PairRow,
    published_triples,
)
from tripletune.models.program import load_from

QUESTIONS_DROPPED = "questions that the reader leaves out"


def check_source(source: Source) -> None:
    """Raise `ValueError` when a source cannot be read: no such reader, or replies missing or superfluous."""
    if source.annotations is not None:
        readers.get_reader(source.reader)
    else:
        _pair_reader(source)


def read_source(source: Source, drops: Counter[str], issues: Counter[str]) -> Iterator[PairRow]:
    """Stream the rows of a source.

    Args:
        source: What to read.
        drops: Counts the rows that are left out, by `PairDrop`.
        issues: Counts warnings that cost no row.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: an unknown reader, or a row with other columns; the message has file and line.
    """
    return _usable(_rows(source, drops, issues), drops)


def read_texts(source: Source) -> Iterator[str]:
    """Stream the texts of a source, also of rows whose triples can't be used; raises as `read_source`."""
    return (row.text for row in _rows(source, Counter(), Counter()))


def _rows(source: Source, drops: Counter[str], issues: Counter[str]) -> Iterator[PairRow]:
    if source.annotations is None:
        return _pair_reader(source)(source.location, drops, issues)
    return _recorded_rows(source, drops, issues)


def _usable(rows: Iterator[PairRow], drops: Counter[str]) -> Iterator[PairRow]:
    for row in rows:
        if row.unusable is None:
            yield row
        else:
            drops[row.unusable] += 1


def _pair_reader(source: Source) -> PairReader:
    names = readers.names_with("read_pair_rows")
    if source.reader not in names:
        known = ", ".join(names)
        if source.reader in readers.reader_names():
            raise ValueError(
                f"source {source.name!r}: {source.reader} reads questions; add the file of a teacher's recorded "
                f"replies, {source.reader}:FILE:REPLIES, or take a reader of pairs ({known})"
            )
        raise ValueError(f"source {source.name!r}: there is no reader {source.reader!r}; the readers are {known}")
    reader: PairReader = load_from(readers.__name__, source.reader, "reader").read_pair_rows
    return reader


def _recorded_rows(source: Source, drops: Counter[str], issues: Counter[str]) -> Iterator[PairRow]:
    index = JsonlIndex(str(source.annotations), _keys)
    for question in readers.get_reader(source.reader)(source.location, issues, source.name):
        if isinstance(question, Dropped):
            issues[QUESTIONS_DROPPED] += 1
            continue
        found = index.get(question.id)
        if found is None:
            drops[PairDrop.NO_ANNOTATION] += 1
            continue
        where, row = found
        find = PassageFinder(question.passages)
        for title, rows in row.get("triples", {}).items():
            number = find(title)
            triples, malformed = published_triples(rows) or ([], 1)
            if number is None:
                drops[PairDrop.NO_PASSAGE] += 1
            elif not question.passages[number].text.strip():
                drops[PairDrop.NO_TEXT] += 1
            else:
                unusable = PairDrop.ALL_MALFORMED if malformed and not triples else None
                issues[MALFORMED_TRIPLES] += 0 if unusable else malformed
                passage = question.passages[number]
                name = f"{question.id}:{number}"
                yield PairRow(where, name, passage.title, passage.text, tuple(triples), unusable)


def _keys(where: str, row: dict[str, Any]) -> list[str]:
    identity, triples = row.get("_id", row.get("id")), row.get("triples", {})
    if not isinstance(identity, str) or not identity or not isinstance(triples, dict):
        raise ValueError(
            f"{where}: a recorded reply needs '_id' and 'triples', an object of title to triples; the line has "
            f"{', '.join(row) or 'nothing'}"
        )
    return [identity]
