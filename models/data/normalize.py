"""Answer normalisation shared by metrics, the direct-answer test and the loops (SQuAD/HotpotQA evaluation rule)."""

from __future__ import annotations

import re
import string

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Lower-case, drop ASCII punctuation and the articles a, an, the, and fold white space.

    A text that consists of nothing else (the choice "A", the band "The The", the answer "!") keeps its articles, or
    else its punctuation: an empty gold answer would match every prediction.
    """
    lowered = text.lower()
    bare = lowered.translate(_PUNCTUATION)
    normal = " ".join(_ARTICLES.sub(" ", bare).split())
    return normal or " ".join(bare.split()) or " ".join(lowered.split())
