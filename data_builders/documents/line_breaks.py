"""Join the lines of a text: a word that a line break cut is one word again, a name or number keeps its hyphen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import regex

# A word with a hyphen at the end of a line, and the word that begins the next line.
_CUT = regex.compile(
    r"(?P<before>[\p{L}\p{M}\p{N}'’\-\u2010\u2011]*[\p{L}\p{N}])(?P<sign>[-\u2010\u2013])[^\S\n]*\n[^\S\n]*"
    r"(?P<after>[\p{L}\p{N}][\p{L}\p{M}\p{N}]*)"
)
_WORD = regex.compile(r"\p{L}[\p{L}\p{M}]*(?:[-\u2010]\p{L}[\p{L}\p{M}]*)*")
# Words behind a hyphen that stands for the end of a word to come: "Haus- und Gartenbau".
_AND = frozenset(["und", "oder", "bzw", "bis", "sowie", "and", "or", "nor"])


def word_counts(texts: Iterable[str]) -> Counter[str]:
    """How often words stand in texts, with the words of hyphenated words, which tell how a cut word is written."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(word.casefold().replace("\u2010", "-") for word in _WORD.findall(text))
    return counts


def join_cut_words(text: str, counts: Counter[str]) -> str:
    """Join the words that a line break cuts.

    The hyphen stays if the document has the word with a hyphen more often than without (`counts` of `word_counts`),
    and else if a capital or a digit follows it, a digit stands before it, or the word has another hyphen.
    """
    return _CUT.sub(lambda cut: _join_at_hyphen(cut["before"], cut["sign"], cut["after"], counts), text)


def _join_at_hyphen(before: str, sign: str, after: str, counts: Counter[str]) -> str:
    """A word that a line break cut at a hyphen: as the document writes it elsewhere, or else by its letters.

    Args:
        before, after: Its parts, at the end of a line and at the beginning of the next one.
        sign: The hyphen or dash between them.
        counts: How often the document has each word, in lower case (`word_counts`).
    """
    if sign == "–":
        # A dash stands between years and names, and cuts no word.
        return f"{before}{sign}{after}"
    if after.casefold() in _AND and after.islower():
        return f"{before}- {after}"
    with_hyphen = counts[f"{before}-{after}".casefold()]
    without = counts[f"{before}{after}".casefold()]
    if with_hyphen != without:
        is_one_word = without > with_hyphen
    elif before.isupper() and after.isupper() and len(before) > 1 and len(after) > 1:
        # A heading in capitals, or two names: the second is rare.
        is_one_word = before.isalpha()
    else:
        has_hyphen = any(sign in before for sign in "-\u2010\u2011")
        is_one_word = before[-1].isalpha() and after[0].islower() and not has_hyphen
    return f"{before}{after}" if is_one_word else f"{before}-{after}"
