"""Sentences of a passage, and the one that each of its triples comes from (CIRAG, section 3.3: provenance).

Extraction reads a whole passage, so a triple arrives without its sentence. It is aligned to the sentence that shares
most of its words: the shares of subject, predicate and object that occur in the sentence are added up, the object's
twice, because after the first sentence of an article the subject is often a pronoun. The earliest of equals is taken.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from tripletune.models.data.passages import Passage
from tripletune.models.data.triples import Triple

_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class Fact:
    """A triple with its provenance, the maps M^D and M^S of the paper.

    Attributes:
        triple: The triple.
        passage: The passage it was extracted from.
        sentence: The sentence of the passage that states it.
    """

    triple: Triple
    passage: Passage
    sentence: str


def provenance(passage: Passage, triples: Iterable[Triple]) -> list[Fact]:
    """The triples of a passage with the sentences they come from."""
    sentences = split_sentences(passage.text)
    return [Fact(triple, passage, sentences[source_sentence(triple, sentences)]) for triple in triples]


@lru_cache(maxsize=8192)
def split_sentences(text: str) -> tuple[str, ...]:
    """The sentences of an English text, by the rules of sentencex; a text without any is one sentence.

    White space is folded, and half characters become question marks.
    """
    from sentencex import segment

    folded = " ".join(text.encode("utf-8", "replace").decode("utf-8").split())
    sentences = tuple(stripped for part in segment("en", folded) if (stripped := part.strip()))
    return sentences or (folded,)


def source_sentence(triple: Triple, sentences: Sequence[str]) -> int:
    """The index of the sentence that states a triple.

    Args:
        triple: The triple.
        sentences: At least one sentence.
    """
    fields = [_words(field) for field in triple.as_list()]
    weights = (1.0, 1.0, 2.0)

    def score(sentence: str) -> float:
        words = set(_words(sentence))
        shares = (sum(word in words for word in field) / len(field) if field else 0.0 for field in fields)
        return sum(weight * share for weight, share in zip(weights, shares))

    scores = [score(sentence) for sentence in sentences]
    return scores.index(max(scores))


def _words(text: str) -> list[str]:
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())
