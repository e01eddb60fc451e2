"""Sentences of passages: long passages are cut between them, and a triple is led back to the one that states it.

Sentences are found by `sentencex` (Wikimedia, MIT): it is kept up, knows some 300 languages, loses no character, does
not split when in doubt, and takes ten microseconds per passage.

Extraction reads a whole passage, so a triple arrives without its sentence (CIRAG, section 3.3: provenance). It is
aligned to the sentence that shares most of its words: the shares of subject, predicate and object that occur in the
sentence are added up, the object's twice, because after the first sentence of an article the subject is often a
pronoun. The earliest of equals is taken.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from tripletune.models.data.records import Passage, whole_characters
from tripletune.models.data.triples import Triple

# RAS reads 512 tokens (section D.1); English has some four characters per token, tables and names fewer.
PIECE_LIMIT = 1600
_WORD = re.compile(r"\w+")


def split_passage(text: str, limit: int = PIECE_LIMIT) -> list[str]:
    """Cut a text into pieces of whole sentences, as few as filling them one after the other gives.

    A sentence that is longer than a piece is cut between words, a word that is longer anywhere.

    Args:
        text: The text; white space is folded.
        limit: Longest piece, in characters.

    Returns:
        The pieces in order; together they hold every character of the text but white space.

    Raises:
        ValueError: the limit is below 1.
    """
    if limit < 1:
        raise ValueError(f"piece limit {limit}: it must be at least 1")
    text = " ".join(whole_characters(text).split())
    if len(text) <= limit:
        return [text] if text else []
    from sentencex import segment

    sentences = (sentence.strip() for sentence in segment("en", text))
    return list(_packed(_parts(filter(None, sentences), limit), limit))


def _packed(parts: Iterator[str], limit: int) -> Iterator[str]:
    """Join parts by spaces as long as they fit."""
    waiting: list[str] = []
    filled = 0
    for part in parts:
        size = len(part)
        if waiting and filled + 1 + size > limit:
            yield " ".join(waiting)
            waiting, filled = [], 0
        filled += size + bool(waiting)
        waiting.append(part)
    if waiting:
        yield " ".join(waiting)


def _parts(sentences: Iterator[str], limit: int) -> Iterator[str]:
    for sentence in sentences:
        if len(sentence) <= limit:
            yield sentence
        else:
            words = (part for word in sentence.split() for part in _halves(word, limit))
            # Filled here already, so that the words of one sentence are not measured again and again.
            yield from _packed(words, limit)


def _halves(word: str, limit: int) -> Iterator[str]:
    if len(word) <= limit or len(word) == 1:
        yield word
    else:
        middle = len(word) // 2
        yield from _halves(word[:middle], limit)
        yield from _halves(word[middle:], limit)


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
