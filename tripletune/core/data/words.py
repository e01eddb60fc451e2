"""Split texts in any script into words, and detect their language.

A word is a run of letters, digits and the marks on them. Text in Korean and in scripts without spaces is cut into pairs
of characters, like in Lucene's CJK analyzer. Accents are folded; vowel signs are kept.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from itertools import pairwise
from typing import Any

import regex

from tripletune.core.options import not_one_of

AUTO, NONE, _ENGLISH = "auto", "none", ("en", "english")
# Minimum probability of a detected language, and Snowball's codes for py3langid's codes of Norwegian and Arabic.
_SURE, _OTHER_CODES = 0.5, {"no": "nb", "nn": "nb", "ary": "ar", "arz": "ar"}
_ASCII_WORD = re.compile(r"\w+")
# The scripts of South-East Asia have line breaks of class SA, which Unicode leaves to a dictionary.
UNSPACED = regex.compile(r"[\p{scx=Hani}\p{scx=Hira}\p{scx=Kana}\p{lb=SA}]")
_PAIRED = rf"[{UNSPACED.pattern}\p{{scx=Hang}}]"
_WORD = regex.compile(rf"(?V1)(?!\p{{M}})(?:(?P<pairs>[{_PAIRED}&&\w]+)|[\w--{_PAIRED}]+)")
_ACCENTS = regex.compile(r"(?<=[\p{Latin}\p{Greek}\p{Cyrillic}\p{Arabic}\p{Hebrew}])\p{Mn}+|\u0640")
# Letters that Unicode does not decompose.
_LETTERS = str.maketrans({"ø": "o", "ł": "l", "đ": "d", "ð": "d", "ħ": "h", "ı": "i", "æ": "ae", "œ": "oe", "þ": "th"})


def words(text: str) -> list[str]:
    """Split a text into words, with accents; case and Unicode form are normalised."""
    if text.isascii():
        return _ASCII_WORD.findall(text.lower())
    found: list[str] = []
    for match in _WORD.finditer(unicodedata.normalize("NFKC", text).casefold()):
        one = regex.findall(r"\X", match[0]) if match["pairs"] else [match[0]]
        found += map("".join, pairwise(one)) if len(one) > 1 else one
    return found


def fold(word: str) -> str:
    """Remove the accents of a word."""
    if word.isascii():
        return word
    return unicodedata.normalize("NFKC", _ACCENTS.sub("", unicodedata.normalize("NFKD", word)).translate(_LETTERS))


@cache
def analyzer(language: str) -> Callable[[str], list[str]]:
    """Return a function from text to BM25 terms: stems without accents and without stop words.

    `language` is a name in Snowball or stop-words, or a code; a detected language may have no rules.
    """
    import Stemmer
    from bm25s.stopwords import STOPWORDS_EN
    from stop_words import StopWordError, get_stop_words

    stem: Callable[[str], str] | None = str if language == NONE else None
    listed = list(STOPWORDS_EN) if language in _ENGLISH else []
    with suppress(KeyError):
        stem = stem or Stemmer.Stemmer(language).stemWord
    with suppress(StopWordError):
        # "don't" gives two words; phrases and entries that are cut into several pairs are left out.
        entries = [] if listed else [(text, words(text)) for text in get_stop_words(language)]
        listed += [word for text, parts in entries if len(parts) == 1 or "'" in text for word in parts]
    if not stem and not listed and language not in _identifier().labels:
        raise ValueError(not_one_of("language", language, [AUTO, NONE, *Stemmer.algorithms()]))
    left_out, stem = {*listed, *map(fold, listed)}, stem or str

    def terms(text: str) -> list[str]:
        stems = [stem(word) for word in words(text) if word not in left_out]
        # Stem again without accents, since the stem of "Beyonce" is "beyonc".
        return [one if one.isascii() else stem(fold(one)) for one in stems]

    return terms


def detect(text: str) -> str:
    """The code (ISO 639) of a text's language; "en" if the detector is not sure."""
    found, confidence = _identifier().classify(text)
    return _OTHER_CODES.get(found, found) if confidence >= _SURE else "en"


@cache
def _identifier() -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
