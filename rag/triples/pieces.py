"""Cuts long passages into pieces that a text-to-triples model can read whole, between sentences.

Sentences are found by `sentencex` (Wikimedia, MIT): it is kept up, knows some 300 languages, loses no character, does
not split when in doubt, and takes ten microseconds a passage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tripletune.models.data.records import whole_characters

# RAS reads 512 tokens (section D.1); English has some four characters a token, tables and names fewer.
PIECE_LIMIT = 1600


def split_passage(text: str, limit: int = PIECE_LIMIT, length: Callable[[str], int] = len) -> list[str]:
    """Cut a text into pieces of whole sentences, as few as filling them one after the other gives.

    A sentence that is longer than a piece is cut between words, a word that is longer anywhere.

    Args:
        text: The text; white space is folded.
        limit: Longest piece.
        length: Measures a text: characters, or the tokens of a model.

    Returns:
        The pieces in order; together they hold every character of the text but white space.

    Raises:
        ValueError: the limit is below 1.
    """
    if limit < 1:
        raise ValueError(f"piece limit {limit}: it must be at least 1")
    text = " ".join(whole_characters(text).split())
    if length(text) <= limit:
        return [text] if text else []
    from sentencex import segment

    sentences = (sentence.strip() for sentence in segment("en", text))
    return list(_packed(_parts(filter(None, sentences), limit, length), limit, length))


def _packed(parts: Iterator[str], limit: int, length: Callable[[str], int]) -> Iterator[str]:
    """Join parts by spaces as long as they fit."""
    waiting: list[str] = []
    filled = 0
    for part in parts:
        size = length(part)
        if waiting and filled + 1 + size > limit:
            yield " ".join(waiting)
            waiting, filled = [], 0
        filled += size + bool(waiting)
        waiting.append(part)
    if waiting:
        yield " ".join(waiting)


def _parts(sentences: Iterator[str], limit: int, length: Callable[[str], int]) -> Iterator[str]:
    for sentence in sentences:
        if length(sentence) <= limit:
            yield sentence
        else:
            words = (part for word in sentence.split() for part in _halves(word, limit, length))
            # Filled here already, so that the words of one sentence are not measured again and again.
            yield from _packed(words, limit, length)


def _halves(word: str, limit: int, length: Callable[[str], int]) -> Iterator[str]:
    if length(word) <= limit or len(word) == 1:
        yield word
    else:
        middle = len(word) // 2
        yield from _halves(word[:middle], limit, length)
        yield from _halves(word[middle:], limit, length)
