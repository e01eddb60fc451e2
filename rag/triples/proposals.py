"""Propose names that mean one entity: by their letters, and by the cosine of their vectors.

| why | what is alike |
|---|---|
| `signs` | all but punctuation, hyphens, "the" and the form of Unicode, "&" for "and"; or capitals of a whole name |
| `case` | all but capitals at the beginning of words: "south", "South"; "Democratic party" |
| `article` | all but an article of a common word or a title: "song", "the song"; "Terror", "The Terror" |
| `accents` | all but accents |
| `initials` | all but the spaces and dots of initials |
| `order` | "Tolkien, J. R. R." |
| `written out` | word by word, an initial stands for a word; no other name fits |
| `abbreviation` | all but brackets with the first letters of the name: "European Union (EU)" |
| `brackets` | all but other brackets, if all names with brackets have the same ones |
| `comma` | all but what follows a comma ("Denver, Colorado"), if nothing else follows this name elsewhere |
| `vectors` | cosine of at least a threshold, each the other's closest name, and no word that stands for another one |

Numbers must be equal in all of them. `case`, `article` and the last three are often wrong, so their lines say "no"
until a person or a chat model says "yes"; so do names that a triple relates ("Lake Erie", "borders", "Lake Huron").
Vectors are compared for names with a capital letter only.
"""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tripletune.core.data.answers import normalize_name, one_spelling
from tripletune.core.data.triples import Triple
from tripletune.rag.search.triple_index import entity_key
from tripletune.rag.triples.names import NamePair

SIGNS, CASE, ARTICLE = "signs", "case", "article"
ACCENTS, INITIALS, ORDER = "accents", "initials", "order"
WRITTEN_OUT, ABBREVIATION = "written out", "abbreviation"
BRACKETS, COMMA, VECTORS = "brackets", "comma", "vectors"
# What a person or a chat model decides.
DOUBTFUL = frozenset((CASE, ARTICLE, BRACKETS, COMMA, VECTORS))
# Two words with so many equal letters at their beginning may be forms of one word.
_STEM = 4
# Rows of vectors that are compared at once.
_COMPARED = 2048
_HYPHENS = re.compile("[-‐‑‒–—−/]")
_BRACKETED = re.compile(r"\s*[(\[]([^()\[\]]*)[)\]]\s*")
# "A." is an initial, no article; the stand-in is a letter that no name has.
_INITIAL_A = re.compile(r"\bA(?=\.)")
_STAND_IN = "\ue000"
_INITIALS = re.compile(r"\b(\w)\.?\s+(?=\w\b)")
_ROMAN = re.compile(r"(?=[ivx])(x{0,3})(ix|iv|v?i{0,3})")
_DIGITS = re.compile(r"\d+")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}\b)")
_ALIAS = re.compile(
    r"\b(also|aka|alias|alternat|abbreviat|acronym|short|former|nick|known|called|named?|stands? for|same as)",
    re.IGNORECASE,
)
_ARTICLES = frozenset(("The", "A", "An"))
_ARTICLES_LOWER = frozenset(("the", "a", "an"))
# Letters that Unicode does not take apart.
_PLAIN = str.maketrans({"ø": "o", "ł": "l", "đ": "d", "ß": "ss", "æ": "ae", "œ": "oe", "ı": "i", "ð": "d", "þ": "th"})


@dataclass(slots=True)
class NameUse:
    """A name with the number of passages that use it, and one of its triples."""

    name: str
    passages: int
    example: Triple


class Proposal(NamedTuple):
    """Two names that may mean one entity: `name` would be written as `into`; `cosine` is 0 if letters decided."""

    name: NameUse
    into: NameUse
    why: str
    cosine: float = 0.0


def uses_of(passages: Iterable[Sequence[Triple]]) -> dict[str, NameUse]:
    """The names of all subjects and objects, in order of appearance."""
    uses: dict[str, NameUse] = {}
    for triples in passages:
        examples: dict[str, Triple] = {}
        for triple in triples:
            examples.setdefault(triple.subject, triple)
            examples.setdefault(triple.object, triple)
        for name, triple in examples.items():
            if name in uses:
                uses[name].passages += 1
            else:
                uses[name] = NameUse(name, 1, triple)
    return uses


def propose(
    uses: Mapping[str, NameUse], encode: Callable[[Sequence[str]], np.ndarray] | None, threshold: float
) -> list[Proposal]:
    """Propose merges of names; each name is merged at most once, into the name that leads its group at that moment.

    A leading name may be merged into another one by a later rule, so that each line stands and falls by itself.

    Args:
        encode: Vectors of names; None: only letters are compared.
        threshold: Minimum cosine.
    """
    groups = _Groups(uses)
    for why, key in _KEYS:
        groups.join_equal(why, key)
    groups.join_written_out()
    groups.join_parts(BRACKETS, _without_brackets)
    groups.join_parts(COMMA, _without_comma)
    if encode is not None:
        groups.join_close(encode, threshold)
    return groups.proposals()


def related_pairs(proposals: Sequence[Proposal], passages: Iterable[Sequence[Triple]]) -> set[NamePair]:
    """The pairs of proposals that a triple relates, other than by calling one by the other name."""
    pairs = {}
    for proposal in proposals:
        pair = NamePair(proposal.name.name, proposal.into.name)
        pairs[frozenset(pair)] = pair
    related: set[NamePair] = set()
    for triples in passages:
        for triple in triples:
            related_pair = pairs.get(frozenset((triple.subject, triple.object)))
            if related_pair is not None and not _ALIAS.search(triple.predicate):
                related.add(related_pair)
    return related


class _Join(NamedTuple):
    """Into which name another one was joined, and why; `cosine` is 0 if letters decided."""

    into: str
    why: str
    cosine: float


class _Groups:
    """Names that were joined so far; each group is known by its leading name, the most used one.

    Attributes:
        uses: All names that may be joined: those with a letter.
    """

    def __init__(self, uses: Mapping[str, NameUse]) -> None:
        self.uses = {name: use for name, use in uses.items() if any(map(str.isalpha, name))}
        self._leader: dict[str, str] = {}
        self._joined: dict[str, _Join] = {}

    def leader(self, name: str) -> str:
        """The leading name of the group of a name."""
        while name in self._leader:
            name = self._leader[name]
        return name

    def join(self, first: str, second: str, why: str, cosine: float = 0.0) -> None:
        """Join the groups of two names unless their numbers differ; a `why` of "" is that of `_kind_of_difference`."""
        leaders = [self.leader(first), self.leader(second)]
        if leaders[0] == leaders[1] or _numbers_in(first) != _numbers_in(second):
            return
        into, name = sorted(leaders, key=self._leading_order)
        why = why or _kind_of_difference(name, into)
        self._leader[name] = into
        self._joined[name] = _Join(into, why, cosine)

    def _leading_order(self, name: str) -> tuple[bool, int, int, str]:
        """The key by which a name leads its group: capitals before none, often used before rare, long before short."""
        return name.islower(), -self.uses[name].passages, -len(name), name

    def join_equal(self, why: str, key: Callable[[str], str]) -> None:
        """Join leading names with equal keys; a name with the key "" is left alone."""
        first_of: dict[str, str] = {}
        for name in self._leading_names():
            normal = key(name)
            if not normal:
                continue
            self.join(name, first_of.setdefault(normal, name), why)

    def join_parts(self, why: str, shorten: Callable[[str], str]) -> None:
        """Join a name with the same name and an addition, if all names with an addition have the same one."""
        longer: dict[str, dict[str, str]] = defaultdict(dict)
        plain: dict[str, str] = {}
        for name in self._leading_names():
            base = shorten(name)
            if base == name:
                plain.setdefault(_plain_key(name), name)
            elif base:
                longer[_plain_key(base)].setdefault(_plain_key(name), name)
        for base, names in longer.items():
            if base in plain and len(names) == 1:
                (name,) = names.values()
                is_abbreviated = why == BRACKETS and _has_abbreviation(name)
                self.join(name, plain[base], ABBREVIATION if is_abbreviated else why)

    def join_written_out(self) -> None:
        """Join "J. Tolkien" with "John Tolkien" if no other name of as many words fits to either."""
        by_last: dict[tuple[str, int], list[str]] = defaultdict(list)
        for name in self._leading_names():
            words = _plain_words(name)
            if len(words) > 1 and len(words[-1]) > 1 and name[:1].isupper():
                by_last[words[-1], len(words)].append(name)
        for names in by_last.values():
            for name in names:
                if min(map(len, _plain_words(name))) > 1:
                    continue
                fitting = [
                    other
                    for other in names
                    if other != name and _fits_word_by_word(_plain_words(name), _plain_words(other))
                ]
                if len(fitting) == 1:
                    self.join(name, fitting[0], WRITTEN_OUT)

    def join_close(self, encode: Callable[[Sequence[str]], np.ndarray], threshold: float) -> None:
        """Join leading names that are each other's closest name."""
        names = [name for name in self._leading_names() if any(map(str.isupper, name))]
        if len(names) < 2:
            return
        vectors = encode(names)
        vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True).clip(1e-12)
        closest, cosines = _closest_rows(vectors)
        for row, other in enumerate(closest.tolist()):
            is_close = closest[other] == row and cosines[row] >= threshold
            if row < other and is_close and not _exchanges_words(names[row], names[other]):
                self.join(names[row], names[other], VECTORS, round(float(cosines[row]), 3))

    def _leading_names(self) -> list[str]:
        """The names that were joined into no other one, in order of appearance; later rules join only these."""
        return [name for name in self.uses if name not in self._leader]

    def proposals(self) -> list[Proposal]:
        """All merges, those into one name beside each other, the most used names first."""
        rows = []
        for name, (into, why, cosine) in self._joined.items():
            rows.append(Proposal(self.uses[name], self.uses[into], why, cosine))
        return sorted(rows, key=lambda row: (-row.into.passages, row.into.name, row.name.name))


class _Closest(NamedTuple):
    """The closest other row of each row, and its cosine; both of shape (rows,)."""

    rows: np.ndarray
    cosines: np.ndarray


def _closest_rows(vectors: np.ndarray) -> _Closest:
    """The closest other row of each vector; vectors have length one and shape (rows, width)."""
    closest, cosines = [], []
    for start in range(0, len(vectors), _COMPARED):
        block = vectors[start : start + _COMPARED] @ vectors.T
        rows = np.arange(len(block))
        block[rows, start + rows] = -2
        best = block.argmax(axis=1)
        closest.append(best)
        cosines.append(block[rows, best])
    return _Closest(np.concatenate(closest), np.concatenate(cosines))


def _case_key(name: str) -> str:
    """A name without case, punctuation, hyphens and articles, with "and" for "&"."""
    name = _INITIAL_A.sub(_STAND_IN, one_spelling(name)).replace("&", " and ")
    return entity_key(_HYPHENS.sub(" ", name)).replace(_STAND_IN, "a")


def _kind_of_difference(name: str, other: str) -> str:
    """What tells two names with the same `_case_key` apart."""
    words, others = [_HYPHENS.sub(" ", one_spelling(text)).split() for text in (name, other)]
    articles, others_articles = [_ARTICLES_LOWER.intersection(map(str.lower, row)) for row in (words, others)]
    if {*words} & _ARTICLES != {*others} & _ARTICLES or (articles != others_articles and name.islower()):
        return ARTICLE
    bare = [word for word in words if word.lower() not in _ARTICLES_LOWER]
    others_bare = [word for word in others if word.lower() not in _ARTICLES_LOWER]
    for word, other_word in zip(bare, others_bare):
        if word[:1].lower() == other_word[:1].lower() and word[:1] != other_word[:1]:
            return CASE
    return SIGNS


def _plain_key(name: str) -> str:
    """A name without case, signs and accents, by which most rules compare names."""
    apart = unicodedata.normalize("NFKD", _case_key(name).translate(_PLAIN))
    return " ".join("".join(letter for letter in apart if not unicodedata.combining(letter)).split())


def _initials_key(name: str) -> str:
    """A name whose neighbouring initials are one word: "j r r tolkien" and "jrr tolkien" are one."""
    return _INITIALS.sub(r"\1", _plain_key(name.replace(".", ". ")))


def _order_key(name: str) -> str:
    """A name with its parts around one comma exchanged, or as it is."""
    last, comma, first = name.partition(",")
    if comma and first.strip() and "," not in first:
        name = f"{first} {last}"
    return _initials_key(name)


_KEYS: tuple[tuple[str, Callable[[str], str]], ...] = (
    ("", _case_key),
    (ACCENTS, _plain_key),
    (INITIALS, _initials_key),
    (ORDER, _order_key),
)


def _without_brackets(name: str) -> str:
    """A name without what stands in brackets; the same name if it has none."""
    return _BRACKETED.sub(" ", name).strip()


def _without_comma(name: str) -> str:
    """A name with a capital letter up to its only comma; other names are lists or sentences."""
    before, comma, after = name.partition(",")
    is_addition = comma and before[:1].isupper() and after.strip()[:1].isupper() and "," not in after
    return before.strip() if is_addition else name


def _has_abbreviation(name: str) -> bool:
    """Whether the brackets of a name hold the first letters of its words, also without small words."""
    match = _BRACKETED.search(name)
    if match is None:
        return False
    letters = [word[:1] for word in _HYPHENS.sub(" ", _without_brackets(name)).split()]
    capitals = [letter for letter in letters if letter.isupper()]
    short = match[1].replace(".", "").casefold()
    return len(short) > 1 and short in ("".join(letters).casefold(), "".join(capitals).casefold())


def _exchanges_words(first: str, second: str) -> bool:
    """Whether each of two names has a word of its own that is no form of a word of the other's.

    "Lower Bay" and "Upper Bay" do; "Hot Songs chart" and "Hot Songs charts" do not.
    """
    words, others = set(_plain_words(first)), set(_plain_words(second))
    alone, others_alone = words - others, others - words
    if not alone or not others_alone:
        return False
    for word in alone:
        if not any(word[:_STEM] == other[:_STEM] and min(len(word), len(other)) >= _STEM for other in others_alone):
            return True
    return False


def _plain_words(name: str) -> list[str]:
    """The words of a name by `_plain_key`; neighbouring initials ("J.R.R.") are words of their own."""
    return _plain_key(name.replace(".", ". ")).split()


def _fits_word_by_word(words: Sequence[str], others: Sequence[str]) -> bool:
    """Whether two names of equal length are equal word by word, where an initial stands for a word."""
    for word, other in zip(words, others, strict=True):
        one_is_initial = min(len(word), len(other)) == 1 and word[:1] == other[:1]
        if word != other and not one_is_initial:
            return False
    return True


class _Numbers(NamedTuple):
    """The numbers of a name: in digits, and in Roman letters."""

    digits: list[str]
    roman: list[str]


def _numbers_in(name: str) -> _Numbers:
    """The numbers of a name; marks of thousands are left out, and Roman numbers are whole words.

    Names with other numbers ("Part I", "Part II") are never one entity.
    """
    roman = [word for word in normalize_name(name).split() if _ROMAN.fullmatch(word)]
    return _Numbers(_DIGITS.findall(_THOUSANDS.sub("", name)), roman)
