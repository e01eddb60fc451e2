"""Cut the blocks of a document into passages: between sentences, under their headings, with citation data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, groupby, islice
from operator import attrgetter
from typing import NamedTuple

from tripletune.core.data.passages import passage_id
from tripletune.core.data.pieces import Span, joined, pack, sentences
from tripletune.core.data.records import one_line
from tripletune.core.data.words import main_language
from tripletune.core.rows import Row
from tripletune.data_builders.documents import Block

# Paragraphs that decide the language of a document, and characters of each.
_LANGUAGE_PARAGRAPHS = 20
_LANGUAGE_CHARACTERS = 300


def passages_of(document: str, blocks: Iterable[Block], size: int) -> Iterator[Row]:
    """Yield the rows of a corpus: the sentences under one heading, on one page, in passages.

    Args:
        document: Its name.
        size: The maximum characters of a passage.

    Yields:
        `{"id", "title", "text", "document", "page"?, "heading"?, "position": [first, last]}`; positions count the
        characters of all blocks, joined by line breaks.
    """
    blocks = iter(blocks)
    head = list(islice(blocks, _LANGUAGE_PARAGRAPHS))
    language = main_language(block.text[:_LANGUAGE_CHARACTERS] for block in head)
    placed = _with_starts(chain(head, blocks))
    for (heading, page, _), section in groupby(placed, key=_section_of):
        title = one_line(" › ".join([document, *heading]))
        source: Row = {"document": document}
        if page:
            source["page"] = page
        if heading:
            source["heading"] = " › ".join(heading)
        for piece in pack(_sentence_spans(section, size, language), size, by_content=True):
            text = joined(piece)
            position = [piece[0].start, piece[-1].end]
            yield {"id": passage_id(title, text), "title": title, "text": text, **source, "position": position}


def without_lone_headings(blocks: Iterable[Block], notes: Counter[str]) -> Iterator[Block]:
    """The blocks without headings that would be passages of their own; `notes` counts these.

    Such passages say nothing, and take places in searches. Several of them under one heading stay, since they may be a
    list.
    """
    for _, section in groupby(blocks, key=attrgetter("heading", "page", "row")):
        yield from _without_lone_heading(section, notes)


def _without_lone_heading(section: Iterator[Block], notes: Counter[str]) -> Iterator[Block]:
    """The blocks of a section, or none if it is a heading alone, which would be a passage without text."""
    first = next(section)
    second = next(section, None)
    if first.is_heading and second is None:
        notes["headings without text left out"] += 1
        return
    yield first
    if second is not None:
        yield second
    yield from section


class _Section(NamedTuple):
    """What all blocks of a passage share: headings, page (of a PDF) and row (of a table)."""

    heading: tuple[str, ...]
    page: int | None
    row: int | None


class _PlacedBlock(NamedTuple):
    """A block, and the number of its first character in the text of the document."""

    block: Block
    start: int


def _with_starts(blocks: Iterable[Block]) -> Iterator[_PlacedBlock]:
    """The blocks with the place of each in the document's text, in characters."""
    start = 0
    for block in blocks:
        yield _PlacedBlock(block, start)
        # White space is folded as in `sentences`; a line break joins the blocks. If this and `sentences` differ, the
        # positions in the corpus are wrong: `tests/data_builders/test_documents.py` compares them with the text.
        start += len(" ".join(block.text.split())) + 1


def _section_of(placed: _PlacedBlock) -> _Section:
    """The section of a block, to group neighbouring blocks by."""
    return _Section(placed.block.heading, placed.block.page, placed.block.row)


def _sentence_spans(section: Iterable[_PlacedBlock], size: int, language: str) -> Iterator[Span]:
    """The sentences of a section with their places in the document; a longer one than `size` characters is cut."""
    for block, start in section:
        yield from sentences(block.text, size, language, start)
