"""Split texts in any script into words, and detect their language.

A word is a run of letters, digits and the marks on them. Text in Korean and in scripts without spaces is cut into pairs
of characters, like in Lucene's CJK analyzer. Accents are folded; vowel signs are kept.
"""

from __future__ import annotations

import re
import threading
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import regex

from tripletune.core import libraries
from tripletune.core.options import not_one_of

AUTO = "auto"
NONE = "none"
_ENGLISH = ("en", "english")
# Minimum probability of a detected language.
_SURE = 0.5
# Snowball's codes for py3langid's codes of Norwegian and Arabic.
_OTHER_CODES = {"no": "nb", "nn": "nb", "ary": "ar", "arz": "ar"}
# Names such as C++, Notepad++, C# and F#.
_SIGNED = r"\w+\+\+(?!\+)|(?<!\w)[a-z]#(?!\w)"
_ASCII_WORD = re.compile(rf"{_SIGNED}|\w+")
# The scripts of South-East Asia have line breaks of class SA, which Unicode leaves to a dictionary.
UNSPACED = regex.compile(r"[\p{scx=Hani}\p{scx=Hira}\p{scx=Kana}\p{lb=SA}]")
_PAIRED = rf"[{UNSPACED.pattern}\p{{scx=Hang}}]"
_WORD = regex.compile(
    rf"(?V1)(?!\p{{M}})(?:[\w--{_PAIRED}]+\+\+(?!\+)|(?<!\w)[a-z]#(?!\w)|(?P<pairs>[{_PAIRED}&&\w]+)|[\w--{_PAIRED}]+)"
)
# A place between a number and a raised number or a fraction, which NFKC would join: "10⁶", "3½".
_BEFORE_RAISED = regex.compile(r"(?<=\p{Nd})(?=\p{No})")
_ACCENTS = regex.compile(r"(?<=[\p{Latin}\p{Greek}\p{Cyrillic}\p{Arabic}\p{Hebrew}])\p{Mn}+|\u0640")
# Letters that Unicode does not decompose.
_LETTERS = str.maketrans({"ø": "o", "ł": "l", "đ": "d", "ð": "d", "ħ": "h", "ı": "i", "æ": "ae", "œ": "oe", "þ": "th"})
# Threads that split passages into sentences begin at once, and each would load the detector's 50 MB.
_LOADING = threading.Lock()


def one_form(text: str) -> str:
    """A text in Unicode's form NFKC, in which a raised number or a fraction stays apart from the number before it."""
    return unicodedata.normalize("NFKC", _BEFORE_RAISED.sub(" ", text))


def words(text: str) -> list[str]:
    """Split a text into words, with accents; case and Unicode form are normalised.

    A run of a script without spaces becomes pairs of neighbouring characters, a single character itself. ASCII, most of
    all corpora, takes a shorter way to the same words.
    """
    if text.isascii():
        return _ASCII_WORD.findall(text.lower())
    terms: list[str] = []
    for match in _WORD.finditer(one_form(text).casefold()):
        characters = regex.findall(r"\X", match[0]) if match["pairs"] else [match[0]]
        if len(characters) > 1:
            terms += map("".join, pairwise(characters))
        else:
            terms += characters
    return terms


def fold(word: str) -> str:
    """Remove the accents of a word."""
    if word.isascii():
        return word
    return unicodedata.normalize("NFKC", _ACCENTS.sub("", unicodedata.normalize("NFKD", word)).translate(_LETTERS))


class WordRules(NamedTuple):
    """How the words of a language become BM25 terms.

    Attributes:
        left_out: The stop words, with and without accents.
        stem: Returns the stem of a word.
    """

    left_out: frozenset[str]
    stem: Callable[[str], str]

    def term(self, word: str) -> str:
        """The stem of a word without accents; stemmed again, since the stem of "Beyonce" is "beyonc"."""
        stem = self.stem(word)
        return stem if stem.isascii() else self.stem(fold(stem))

    def kept(self, text: str) -> list[str]:
        """The terms of a text without its stop words."""
        return [self.term(word) for word in words(text) if word not in self.left_out]

    def all(self, text: str) -> list[str]:
        """The terms of a text, stop words among them."""
        return [self.term(word) for word in words(text)]


@cache
def word_rules(language: str) -> WordRules:
    """The stems and stop words of a language.

    `language` is a name in Snowball or stop-words, or a code. A language that the detector knows may have neither
    stemmer nor stop words; a name that nobody knows is a mistake.
    """
    import Stemmer

    stem = _stem_function(language)
    stop_words = _stop_words(language)
    has_rules = stem is not None or bool(stop_words)
    if not has_rules and language not in _language_identifier().labels:
        raise ValueError(not_one_of("language", language, [AUTO, NONE, *Stemmer.algorithms()]))
    return WordRules(frozenset([*stop_words, *map(fold, stop_words)]), stem or str)


def analyzer(language: str) -> Callable[[str], list[str]]:
    """Return a function from text to BM25 terms: stems without accents and without stop words.

    A text of stop words alone ("It", "To Be or Not to Be") keeps them all. For `language` see `word_rules`.
    """
    rules = word_rules(language)
    return lambda text: rules.kept(text) or rules.all(text)


def _stem_function(language: str) -> Callable[[str], str] | None:
    """The function from a word to its stem; None for a language without stemmer."""
    import Stemmer

    if language == NONE:
        return str
    try:
        return Stemmer.Stemmer(language).stemWord  # type: ignore[no-any-return]
    except KeyError:
        return None


def _stop_words(language: str) -> list[str]:
    """The stop words of a language, as `words` splits a text; empty for a language without a list.

    English has the list of bm25s, so that its scores are the same to the last bit.
    """
    from stop_words import StopWordError, get_stop_words

    if language in _ENGLISH:
        return list(libraries.take("bm25s.stopwords:STOPWORDS_EN"))
    stop_words: list[str] = []
    with suppress(StopWordError):
        for entry in get_stop_words(language):
            entry_words = words(entry)
            # "don't" gives two words; phrases and entries that are cut into several pairs are left out.
            if len(entry_words) == 1 or "'" in entry:
                stop_words += entry_words
    return stop_words


def detect(text: str) -> str:
    """The code (ISO 639) of a text's language; "en" if the detector is not sure."""
    return _sure_language(text) or "en"


def language_shares(texts: Iterable[tuple[str, int]]) -> dict[str, float]:
    """The share of each language in some texts, the largest first.

    Each text is detected by itself: the detector takes a third of German among English for German. Texts of which it is
    not sure, such as lists of names, are detected together.

    Args:
        texts: The beginning of each text, and the number of characters of the whole text.
    """
    characters: Counter[str] = Counter()
    unsure: list[str] = []
    unsure_characters = 0
    for beginning, length in texts:
        code = _sure_language(beginning)
        if code is None:
            unsure.append(beginning)
            unsure_characters += length
        else:
            characters[code] += length
    if unsure_characters or not characters:
        characters[detect("\n".join(unsure))] += unsure_characters
    total = max(characters.total(), 1)
    return {code: count / total for code, count in characters.most_common()}


def main_language(texts: Iterable[str]) -> str:
    """The code of the language of most text."""
    return next(iter(language_shares((text, len(text)) for text in texts)))


def _sure_language(text: str) -> str | None:
    """The code of a text's language; None if the detector is not sure."""
    with _LOADING:
        identifier = _language_identifier()
    code, confidence = identifier.classify(text)
    if confidence < _SURE:
        return None
    return _OTHER_CODES.get(code, code)


@cache
def _language_identifier() -> Any:
    """The language detector, which has no types; its model is loaded once."""
    from py3langid.langid import LanguageIdentifier

    libraries.check_use("language detection")
    return LanguageIdentifier.from_model_file(libraries.take("py3langid.langid:MODEL_FILE"), norm_probs=True)
