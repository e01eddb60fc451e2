"""ROUGE (Lin, 2004) of texts in any script, by Google's `rouge-score` with other words.

Its own words are runs of the letters a to z and digits, so equal answers in Cyrillic or Chinese would score 0, and
"Möller" and "Müller" would be equal. ASCII texts score as with `rouge-score` alone.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache
from typing import TYPE_CHECKING

import regex

from tripletune.core.data.words import UNSPACED

if TYPE_CHECKING:
    from rouge_score.rouge_scorer import RougeScorer

_ASCII_WORD = re.compile(r"[a-z0-9]+")
_LETTERS = r"[\p{L}\p{N}\p{M}]"
# A character of a script without spaces, with its marks; or a run of other letters and digits, with their marks.
_WORD = regex.compile(rf"(?V1)(?=[{UNSPACED.pattern}&&[\p{{L}}\p{{N}}]])\X|[{_LETTERS}--{UNSPACED.pattern}]+")


class RougeWords:
    """The tokenizer of `RougeScorer`: words in any script; in scripts without spaces, each character is a word.

    Args:
        stems: Reduce English words of more than three letters to their stems, as the scripts of ASQA do.
    """

    def __init__(self, stems: bool) -> None:
        from nltk.stem.porter import PorterStemmer

        self._stemmer = PorterStemmer() if stems else None

    def tokenize(self, text: str) -> list[str]:
        """The words of a text, in lower case, and stemmed if a stemmer was given.

        For ASCII these are the words of the package rouge-score, whose scores papers report; other scripts keep their
        letters.
        """
        lowered = text.lower()
        if lowered.isascii():
            words = _ASCII_WORD.findall(lowered)
        else:
            words = _WORD.findall(unicodedata.normalize("NFC", lowered))
        if self._stemmer is None:
            return words
        return [self._stemmer.stem(word) if len(word) > 3 and word.isascii() else word for word in words]


@lru_cache(maxsize=4)
def rouge_scorer(kinds: tuple[str, ...], stems: bool) -> RougeScorer:
    """A scorer of these kinds of ROUGE, kept because its construction takes longer than scoring an answer."""
    from rouge_score.rouge_scorer import RougeScorer  # imports nltk, which takes a while

    return RougeScorer(list(kinds), tokenizer=RougeWords(stems))
