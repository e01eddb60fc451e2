"""Whether a text states the names and values of a triple: a check for extractors that invent facts.

An extractor may add what it remembers ("France" to a text about Lyon), read a number wrongly, or copy the example of
its prompt. The check reads words, not meaning: it finds an invented name or value, not a wrong relation between two
names of the text. It knows no language: words are compared by their beginnings, so that "Chinese" states "China".
"""

from __future__ import annotations

import re
from enum import StrEnum
from functools import lru_cache

from tripletune.core.data.triples import Triple
from tripletune.core.data.words import fold, words

# A number, with points and commas inside it: 1,234.5.
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_SEPARATORS = re.compile(r"[.,]")
# Smaller numbers often stand in the text as words, or as the names of months: "three", "third", "May 4".
_LEAST_NUMBER = 32
# From here on a text may have the number as "5 million" or "1.5 billion".
_LEAST_ROUND = 10_000
# A word of the text states another with the same beginning, of all but the last letters but at least of so many.
_LEAST_BEGINNING = 4
_ENDING = 3
# Texts whose words are kept; an extractor checks all triples of a passage in a row, against it and its prompt.
_KEPT = 8


class Unsupported(StrEnum):
    """Why a triple is not supported by its passage."""

    NAME = "name"
    NUMBER = "number"
    EXAMPLE = "example"


def unsupported_reason(triple: Triple, passage: str, prompt: str = "") -> Unsupported | None:
    """What of a triple its passage does not have; None for a triple whose subject and object stand in it.

    A field stands in the passage if at most half of its letters belong to words that the passage lacks, and if the
    passage has its numbers. The predicate is the extractor's own word, so it is not checked.

    Args:
        passage: The text with its title.
        prompt: The extractor's instruction with its examples. A triple that stands there is called a copy.
    """
    problem = _unstated_part(triple, _words_of(passage))
    if problem and prompt and _unstated_part(triple, _words_of(prompt)) is None:
        return Unsupported.EXAMPLE
    return problem


class _Words:
    """The words and numbers of a text, for comparison."""

    def __init__(self, text: str) -> None:
        """Collect words and numbers once, in the forms in which fields of triples are looked up."""
        folded = [fold(word) for word in words(text)]
        self.words = frozenset(folded)
        # Of each word, all beginnings that another word may share with it.
        self.beginnings: set[str] = set()
        for word in self.words:
            self.beginnings.update(word[:length] for length in range(_LEAST_BEGINNING, len(word) + 1))
        # "NewYork" and "non-profit" in a triple, "New York" and "nonprofit" in the text.
        self.letters = "".join(folded)
        self.numbers: set[str] = set()
        for number in _NUMBER.findall(text):
            self.numbers |= _readings_of_number(number)

    def has_word(self, word: str) -> bool:
        """Whether a folded word stands in the text, perhaps with another ending."""
        if word in self.words:
            return True
        if len(word) < _LEAST_BEGINNING:
            return False
        return word[: max(_LEAST_BEGINNING, len(word) - _ENDING)] in self.beginnings or word in self.letters

    def has_number(self, number: str) -> bool:
        """Whether a number stands in the text, or is too small or too round to say."""
        digits = _digits_of(number)
        if not digits or int(digits) < _LEAST_NUMBER or digits in self.numbers:
            return True
        parts = [_digits_of(part) for part in _SEPARATORS.split(number)]
        if len(parts) > 1 and self.numbers.issuperset(parts):
            return True
        return int(digits) >= _LEAST_ROUND and digits.rstrip("0") in self.numbers


@lru_cache(maxsize=_KEPT)
def _words_of(text: str) -> _Words:
    """The words of a text, remembered: all triples of a passage are checked in a row, against the same two texts."""
    return _Words(text)


def _readings_of_number(number: str) -> set[str]:
    """A number without its separators, and its parts: "1,234.5" has 12345, 1, 234 and 5; "1.50" also has 15."""
    digits = _digits_of(number)
    return {digits, digits.rstrip("0"), *map(_digits_of, _SEPARATORS.split(number))}


def _digits_of(number: str) -> str:
    """The digits of a number, without separators and leading zeros; "0" keeps none."""
    return _SEPARATORS.sub("", number).lstrip("0")


def _unstated_part(triple: Triple, text: _Words) -> Unsupported | None:
    """What of a triple's subject and object a text lacks."""
    for field in (triple.subject, triple.object):
        if not all(text.has_number(number) for number in _NUMBER.findall(field)):
            return Unsupported.NUMBER
        letters = 0
        missing_letters = 0
        for word in map(fold, words(field)):
            if word.isdigit():
                continue
            letters += len(word)
            if not text.has_word(word):
                missing_letters += len(word)
        if 2 * missing_letters > letters:
            return Unsupported.NAME
    return None
