"""Normalisation of text-to-triples rows; whatever it changes or leaves out is counted for the card, never silent."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from tripletune.data_builders.text_to_triples.rows import MALFORMED_TRIPLES, PairRow
from tripletune.models.data.pairs import entity_triple, is_only_a_name, predicate_words
from tripletune.models.data.records import whole_characters
from tripletune.models.data.triples import Triple
from tripletune.models.options import setting

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
            spelt = Triple(
                _spelling(changed.subject, searched, lowered),
                changed.predicate,
                _spelling(changed.object, searched, lowered),
            )
            issues[CASE_CHANGED] += spelt != changed
            changed = spelt
        if cleaning.predicates == "words":
            worded = Triple(changed.subject, predicate_words(changed.predicate), changed.object)
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


def text_key(text: str) -> str:
    """What two texts have in common that differ in spaces, case or Unicode form alone."""
    return "".join(unicodedata.normalize("NFKC", text).casefold().split())


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
