"""Where text-to-triples pairs come from, and how their rows are normalised.

A source is `[NAME=]READER:FILE[:REPLIES]`, as for HotpotQA-SUBQ: a file of pairs (`triples`, `wikiofgraph`, `genwiki`),
or a benchmark file with a teacher's recorded replies (`{"_id", "triples": {title: [[s, p, o]]}}`), of which every
passage that the teacher read gives a pair. Whatever normalisation changes or leaves out is counted, never silent.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from tripletune.data_builders import readers
from tripletune.data_builders.datasets.lookup import JsonlIndex
from tripletune.data_builders.hotpotqa_subq import Dropped
from tripletune.data_builders.hotpotqa_subq.options import Source
from tripletune.data_builders.readers._rows import find_passage
from tripletune.data_builders.readers.triples import (
    MALFORMED_TRIPLES,
    PairDrop,
    PairReader,
    PairRow,
    published_triples,
)
from tripletune.models.data.pairs import entity_triple, is_only_a_name, predicate_words
from tripletune.models.data.records import whole_characters
from tripletune.models.data.triples import Triple
from tripletune.models.options import setting
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
    for row in read_rows(source, drops, issues):
        if row.unusable is None:
            yield row
        else:
            drops[row.unusable] += 1


def read_rows(source: Source, drops: Counter[str], issues: Counter[str]) -> Iterator[PairRow]:
    """Stream the rows of a source, also those whose triples can't be used; as `read_source` otherwise."""
    if source.annotations is None:
        return _pair_reader(source)(source.location, drops, issues)
    return _recorded_rows(source, drops, issues)


def _pair_reader(source: Source) -> PairReader:
    module = load_from(readers.__name__, source.reader, "reader")
    if not hasattr(module, "read_pair_rows"):
        raise ValueError(
            f"source {source.name!r}: {source.reader} reads questions; add the file of a teacher's recorded replies, "
            f"{source.reader}:FILE:REPLIES, or take a reader of pairs "
            f"({', '.join(readers.names_with('read_pair_rows'))})"
        )
    reader: PairReader = module.read_pair_rows
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
        for title, rows in row.get("triples", {}).items():
            number = find_passage(title, question.passages)
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


TEXT_CHANGED = "texts with Unicode composed, spaces folded or control characters removed"
TRIPLE_CHANGED = "triples changed in the same way"
CASE_CHANGED = "triples with entities in the spelling of the text"
PREDICATE_CHANGED = "triples with predicates written as words"
REPEATED_TRIPLES = "triples that a row has twice, left out"
ONLY_A_NAME = "rows that are only a name, with the target (NAME, is, NAME)"

_UNSEEN = re.compile("[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\u200b\ufeff]")


@dataclass(frozen=True)
class Cleaning:
    """How rows are normalised."""

    entity_case: Literal["source", "text"] = setting(
        "source",
        "spelling of names: the source's, or that of the text where they occur in it (RAS, figure 19, rule 5; "
        "WikiOFGraph lower-cases its names)",
    )
    predicates: Literal["source", "words"] = setting(
        "source", "spelling of predicates: the source's, or as words (birthPlace becomes 'birth place')"
    )


@dataclass(frozen=True, slots=True)
class CleanRow:
    """A row after normalisation; `malformed` says that all of its triples were lost to it."""

    title: str
    text: str
    triples: tuple[Triple, ...]
    malformed: bool = False


def clean_row(row: PairRow, cleaning: Cleaning, issues: Counter[str]) -> CleanRow:
    """Normalise a row and count in `issues` what was changed."""
    title, text = clean_text(row.title), clean_text(row.text)
    issues[TEXT_CHANGED] += (title, text) != (row.title, row.text)
    if not row.triples and is_only_a_name(title, text):
        issues[ONLY_A_NAME] += 1
        return CleanRow(title, text, (entity_triple(title),))
    found: list[Triple] = []
    searched = f"{title}\n{text}"
    lowered = searched.lower()
    for triple in row.triples:
        changed = _clean_triple(triple)
        if changed is None:
            issues[MALFORMED_TRIPLES] += 1
            continue
        issues[TRIPLE_CHANGED] += changed != triple
        if cleaning.entity_case == "text":
            subject, object_ = (_spelling(name, searched, lowered) for name in (changed.subject, changed.object))
            spelt = replace(changed, subject=subject, object=object_)
            issues[CASE_CHANGED] += spelt != changed
            changed = spelt
        if cleaning.predicates == "words":
            worded = replace(changed, predicate=predicate_words(changed.predicate))
            issues[PREDICATE_CHANGED] += worded != changed
            changed = worded
        found.append(changed)
    distinct = tuple(dict.fromkeys(found))
    issues[REPEATED_TRIPLES] += len(found) - len(distinct)
    return CleanRow(title, text, distinct, bool(row.triples) and not distinct)


def clean_text(text: str) -> str:
    """Unicode composed (NFC), spaces folded, control characters removed, half characters replaced."""
    if not text.isascii():
        text = unicodedata.normalize("NFC", whole_characters(text))
    return " ".join(_UNSEEN.sub("", text).split())


def triples_key(triples: tuple[Triple, ...]) -> str:
    """Equal for the same triples in any order."""
    lines = "\n".join(sorted("\t".join(triple.as_list()) for triple in triples))
    return hashlib.blake2b(lines.encode(), digest_size=8).hexdigest()


def _clean_triple(triple: Triple) -> Triple | None:
    try:
        return Triple(*(clean_text(field) for field in triple.as_list()))
    except ValueError:
        return None


def _spelling(name: str, text: str, lowered: str) -> str:
    """A name as the text spells it where it occurs as whole words; the name itself where it does not, or as it is."""
    wanted = name.lower()
    if len(lowered) != len(text) or len(wanted) != len(name):
        return name
    found: str | None = None
    start = lowered.find(wanted)
    while start >= 0:
        end = start + len(name)
        before, after = text[start - 1 : start] if start else "", text[end : end + 1]
        if not before.isalnum() and not after.isalnum():
            if text[start:end] == name:
                return name
            found = found or text[start:end]
        start = lowered.find(wanted, start + 1)
    return found or name
