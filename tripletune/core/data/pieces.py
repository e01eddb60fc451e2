"""Cut texts between sentences into pieces of a maximum size, and join passages into windows."""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

# Average characters of a token of English text.
CHARACTERS_PER_TOKEN = 4


class Span(NamedTuple):
    """A sentence or a part of a long sentence; `last` says whether it ends a paragraph."""

    start: int
    end: int
    text: str
    last: bool = False


def sentences(text: str, limit: int, language: str = "en", start: int = 0) -> Iterator[Span]:
    """Yield the sentences of a paragraph that begins at `start`, with white space folded.

    A sentence longer than `limit` characters is cut between words; a word longer than `limit` is cut anywhere.
    """
    from sentencex import get_sentence_boundaries

    within_limit = re.compile(rf"\S(?:.{{0,{limit - 1}}}(?<=\S)(?!\S)|\S{{0,{limit - 1}}})")
    text = " ".join(text.split())
    for sentence in get_sentence_boundaries(language, text):
        for match in within_limit.finditer(text, sentence["start_index"], sentence["end_index"]):
            yield Span(start + match.start(), start + match.end(), match[0], match.end() == len(text))


def pack(spans: Iterable[Span], limit: int, overlap: int = 0, by_content: bool = False) -> Iterator[list[Span]]:
    """Fill pieces with spans one after the other.

    Args:
        limit: Maximum characters per piece.
        overlap: Maximum characters that a piece repeats from the end of the previous piece, in whole spans.
        by_content: End each piece in its second half, after a paragraph if possible, at the sentence with the smallest
            digest. An edit of the text then changes only the next few pieces, not all later ones.
    """
    piece: list[Span] = []
    for span in spans:
        # More than once if a piece is cut early, and what is left is still too long with this span.
        while piece and span.end - piece[0].start > limit:
            count = _count_to_cut_at(piece, limit // 2) if by_content else len(piece)
            yield piece[:count]
            piece = _spans_to_repeat(piece[:count], span, limit, overlap) + piece[count:]
        piece.append(span)
    if piece:
        yield piece


def _spans_to_repeat(piece: list[Span], following: Span, limit: int, overlap: int) -> list[Span]:
    """The last spans of a piece that the next piece repeats: at most `overlap` characters, with room for a new span.

    Never the whole piece, or the next one would be no step forward.
    """
    common = piece[1:]
    while common:
        exceeds_overlap = common[-1].end - common[0].start > overlap
        leaves_no_room = following.end - common[0].start > limit
        if not exceeds_overlap and not leaves_no_room:
            break
        common = common[1:]
    return common


def _count_to_cut_at(piece: list[Span], least: int) -> int:
    """The number of spans to end a piece with, after at least `least` characters; see `by_content` of `pack`."""
    counts = [count for count in range(1, len(piece) + 1) if piece[count - 1].end - piece[0].start >= least]

    def rank(count: int) -> tuple[bool, bytes]:
        """Ends of paragraphs first, then the smallest digest, which depends on the sentence alone."""
        last = piece[count - 1]
        digest = hashlib.blake2b(last.text.encode("utf-8", "replace"), digest_size=8).digest()
        return not last.last, digest

    return min(counts or [len(piece)], key=rank)


def joined(piece: Iterable[Span]) -> str:
    """The text of a piece; a paragraph ends with a line break.

    A sentence that was cut inside of a word has no gap before its second half, so nothing is put there.
    """
    text = ""
    before: Span | None = None
    for span in piece:
        if before and span.start > before.end:
            text += "\n" if before.last else " "
        text += span.text
        before = span
    return text


def split_passage(text: str, limit: int, overlap: int = 0) -> list[str]:
    """Cut a text into pieces of whole sentences, each filled before the next; see `pack`.

    Together the pieces hold every character of the text except white space.
    """
    text = " ".join(text.split())
    if len(text) <= limit:
        return [text] if text else []
    return [joined(piece) for piece in pack(sentences(text, limit), limit, overlap)]


def about_tokens(text: str) -> int:
    """The number of tokens of a text, estimated from its characters."""
    return -(-len(text) // CHARACTERS_PER_TOKEN)


class Window(NamedTuple):
    """A part of a text that is made of several passages.

    Attributes:
        text: A line per title or part of a passage.
        passages: Numbers of the passages that it has sentences of, from 0.
    """

    text: str
    passages: range


def windows(
    contents: Iterable[Sequence[str]], size: int, overlap: int, count: Callable[[str], int]
) -> Iterator[Window]:
    """Join passages in their order, and cut their text between sentences into windows (TH-RAG, appendix B).

    Args:
        contents: The paragraphs of each passage, for example its title and its text.
        size: Maximum tokens of a window.
        overlap: Maximum tokens that a window repeats from the end of the one before it, in whole sentences.
        count: Counts the tokens of a sentence.
    """
    # Spans are measured in tokens here. These are the positions at which passages begin.
    beginnings: list[int] = []

    def spans() -> Iterator[Span]:
        """The sentences of all contents in a row, with their places in tokens."""
        position = 0
        for paragraphs in contents:
            beginnings.append(position)
            for paragraph in paragraphs:
                for sentence in sentences(paragraph, size * CHARACTERS_PER_TOKEN):
                    start = position
                    position += max(1, count(sentence.text))
                    yield Span(start, position, sentence.text, sentence.last)

    for piece in pack(spans(), size, overlap):
        lines: list[str] = []
        begins_line = True
        for span in piece:
            if begins_line:
                lines.append(span.text)
            else:
                lines[-1] += f" {span.text}"
            begins_line = span.last
        first = bisect_right(beginnings, piece[0].start) - 1
        last = bisect_right(beginnings, piece[-1].start) - 1
        yield Window("\n".join(lines), range(first, last + 1))
