"""Read the paragraphs of a PDF, page by page, under the headings of its outline, or without one, its larger lines.

PDFium gives the characters; `pdf_lines.py` makes lines of them, `running_lines.py` leaves out headers, footers and
page numbers, `pdf_headings.py` finds headings by their look, and `line_breaks.py` joins words that a line break cut.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from itertools import chain, pairwise, product
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import regex

from tripletune.data_builders.documents import Block, Unreadable
from tripletune.data_builders.documents.line_breaks import join_cut_words, word_counts
from tripletune.data_builders.documents.pdf_headings import LARGE, sections_by_look
from tripletune.data_builders.documents.pdf_lines import PageLine, body_height, read_lines
from tripletune.data_builders.documents.running_lines import without_running_lines

if TYPE_CHECKING:
    from pypdfium2 import PdfDocument

# Start of a page that may end a sentence of the previous page.
_SENTENCE_END = regex.compile(r"\p{Ll}.{0,600}?[.!?…](?=\s|$)", regex.DOTALL)
# What follows a word that the end of a page cuts, up to the end of its sentence.
_WORD_END = regex.compile(r"[\p{L}\p{N}].{0,600}?[.!?…](?=\s|$)", regex.DOTALL)
_CUT = regex.compile(r"[\p{L}\p{N}][-\u2010]$")
_ENDS_SENTENCE = ".!?:;…"
# Lines that are farther apart, in parts of a line's height, are paragraphs.
_PARAGRAPH_GAP = 1.7
# Cells of a column begin within so many points.
_SAME_PLACE = 2.0
_title_of = attrgetter("title")
_BLANK_LINE = "\n\n"
# Titles that programs write, and not authors.
_NO_TITLE = re.compile(
    r"(?:untitled|unbenannt|sans titre|title|document|microsoft|word|powerpoint|slide|presentation|scan|print)\b.*|"
    r".*\.(?:docx?|pdf|tex|dvi|indd|qxd|rtf|odt|pptx?|xlsx?|html?|md|txt)|[\d\W]*|https?:.*|file:.*",
    re.IGNORECASE,
)


class _Section(NamedTuple):
    """Text of a page, and the headings above it, from the top down."""

    headings: tuple[str, ...]
    text: str


class _Bookmark(NamedTuple):
    """An entry of the outline; `level` counts from 0."""

    level: int
    title: str


def pdf_blocks(path: Path, notes: Counter[str]) -> Iterator[Block]:
    """Yield the paragraphs of each page, also cut where a heading begins; `notes` counts what was not read.

    A title in the file's metadata is the heading above all others.
    """
    import pypdfium2

    try:
        document = pypdfium2.PdfDocument(path)
    except pypdfium2.PdfiumError as error:
        if "password" in str(error).lower():
            raise Unreadable("needs a password") from None
        raise Unreadable(f"damaged: {error}") from None
    with closing(document):
        bookmarks = _bookmarks_by_page(document)
        above = _title_in_metadata(document, bookmarks)
        headings_of = [list(map(_title_of, bookmarks.get(page, ()))) for page in range(len(document))]
        pages = [_read_page_lines(document, number, notes) for number in range(len(document))]
    pages = without_running_lines(pages, headings_of, notes)
    counts = word_counts(line.text for line in chain.from_iterable(pages))
    text_pages = list(map(_without_note_lines, pages))
    if bookmarks:
        sections_of = _under_outline(text_pages, bookmarks)
    else:
        sections_of = _under_large_lines(text_pages, " ".join(above))
    # The last section is held back, since the next page may end its sentence, and with it the notes below it.
    last = Block("")
    below = Block("")
    for number, (lines, sections) in enumerate(zip(pages, sections_of)):
        for place, (headings, text) in enumerate(sections):
            if place == 0:
                last, text = _move_sentence_end(last, text)
            yield from _paragraph_blocks(last, counts)
            yield from _paragraph_blocks(below, counts)
            below = Block("")
            last = Block(text, _without_repeated_headings((*above, *headings)), number + 1)
        below = last._replace(text=_paragraph_text([line for line in lines if line.is_note]))
    yield from _paragraph_blocks(last, counts)
    yield from _paragraph_blocks(below, counts)


def _without_note_lines(lines: Sequence[PageLine]) -> list[PageLine]:
    """The lines of a page but its notes, which are no part of the sections: `pdf_blocks` yields them after the page."""
    return [line for line in lines if not line.is_note]


def _under_large_lines(pages: Sequence[Sequence[PageLine]], title: str) -> Iterator[list[_Section]]:
    """Yield the sections of each page of a document without an outline."""
    for sections in sections_by_look(pages, title):
        yield [_Section(section.headings, _paragraph_text(section.lines)) for section in sections]


def _under_outline(
    pages: Sequence[Sequence[PageLine]], bookmarks: Mapping[int, Sequence[_Bookmark]]
) -> Iterator[list[_Section]]:
    """Yield the sections of each page, under the headings of the outline.

    The text above a heading on its page belongs to the previous heading.
    """
    headings: list[str] = []
    for number, lines in enumerate(pages):
        text = _paragraph_text(lines)
        sections = []
        for level, title in bookmarks.get(number, ()):
            heading = _find_heading(title, text)
            if heading:
                sections.append(_Section(tuple(headings), text[: heading.start()].strip()))
                text = text[heading.end() :].strip()
            headings = [*headings[:level], title]
        sections.append(_Section(tuple(headings), text))
        yield sections


def _without_repeated_headings(headings: tuple[str, ...]) -> tuple[str, ...]:
    """Headings without one that repeats the heading above it, such as the title in the metadata."""
    kept = [title for above, title in pairwise(("", *headings)) if title.casefold() != above.casefold()]
    return tuple(kept)


def _paragraph_blocks(section: Block, counts: Counter[str]) -> Iterator[Block]:
    """Yield the paragraphs of a section, in which cut words are joined."""
    for text in join_cut_words(section.text, counts).split(_BLANK_LINE):
        yield section._replace(text=text)


class _PageTurn(NamedTuple):
    """The section before a page, and the page's text."""

    last: Block
    text: str


def _move_sentence_end(last: Block, text: str) -> _PageTurn:
    """The end of a sentence at the beginning of a page, moved to the end of the section before the page.

    A sentence that two pages divide would else be in no passage as a whole.
    """
    is_unfinished = last.text and last.text[-1] not in _ENDS_SENTENCE
    # A name may go on with a capital.
    end = _WORD_END if _CUT.search(last.text) else _SENTENCE_END
    sentence_end = end.match(text) if is_unfinished else None
    if not sentence_end:
        return _PageTurn(last, text)
    whole = last._replace(text=f"{last.text}\n{sentence_end[0]}")
    return _PageTurn(whole, text[sentence_end.end() :].strip())


def _title_in_metadata(document: PdfDocument, bookmarks: Mapping[int, Sequence[_Bookmark]]) -> tuple[str, ...]:
    """The title in the metadata, if an author wrote it and the outline does not begin with it."""
    title = " ".join(document.get_metadata_value("Title").split())
    first = next(chain.from_iterable(bookmarks.values()), None)
    if not title or _NO_TITLE.fullmatch(title) or (first and first.title == title):
        return ()
    return (title,)


def _bookmarks_by_page(document: PdfDocument) -> dict[int, list[_Bookmark]]:
    """The entries of the outline by the page, counted from 0, that they point to."""
    bookmarks: dict[int, list[_Bookmark]] = {}
    for entry in document.get_toc():
        target = entry.get_dest()
        page = target.get_index() if target else None
        if page is not None:
            title = " ".join(entry.get_title().split())
            bookmarks.setdefault(page, []).append(_Bookmark(entry.level, title))
    return bookmarks


def _find_heading(title: str, text: str) -> re.Match[str] | None:
    """The line of a page that holds this title, perhaps after a number."""
    if not title:
        return None
    words = r"\s+".join(map(re.escape, title.split()))
    return re.search(rf"^[\W\d]*{words}\s*$", text, re.MULTILINE)


def _read_page_lines(document: PdfDocument, number: int, notes: Counter[str]) -> list[PageLine]:
    """Read the lines of a page, counted from 0; none, counted in `notes`, if it has no text or can't be read."""
    from pypdfium2 import PdfiumError

    try:
        with closing(document[number]) as page, closing(page.get_textpage()) as text_page:
            lines = read_lines(text_page, notes)
    except PdfiumError:
        notes["pages that can't be read"] += 1
        return []
    if not lines:
        notes["pages without text"] += 1
    return lines


def _paragraph_text(lines: Sequence[PageLine]) -> str:
    """The text of lines, with blank lines around paragraphs, headings and rows of tables; lines in one row are joined.

    Line breaks stay, since `join_cut_words` looks for hyphens before them.
    """
    height = body_height(lines)
    rows: list[list[PageLine]] = []
    for line in lines:
        if rows and abs(rows[-1][-1].baseline - line.baseline) < line.height / 2:
            rows[-1].append(line)
        else:
            rows.append([line])
    text = ""
    was_cells = False
    for number, row in enumerate(rows):
        is_cells = any(_have_cells(row, other) for other in rows[max(0, number - 1) : number + 2] if other is not row)
        joined = (" | " if is_cells else " ").join(line.text for line in row)
        if not number:
            text = joined
        elif is_cells or was_cells or _begins_paragraph(rows[number - 1][-1], row[0], height):
            text += f"{_BLANK_LINE}{joined}"
        else:
            text += f"\n{joined}"
        was_cells = is_cells
    return text


def _have_cells(row: Sequence[PageLine], other: Sequence[PageLine]) -> bool:
    """Whether two rows are of one table: several pieces in each, of which one behind the first begins at one place.

    Without a row of its own, the cells of several rows would read as one sentence.
    """
    return any(abs(line.left - cell.left) < _SAME_PLACE for line, cell in product(row[1:], other[1:]))


def _begins_paragraph(last: PageLine, line: PageLine, height: float) -> bool:
    """Whether a line begins a paragraph, or is or follows a heading.

    A line that begins with a small letter goes on with a sentence, whatever stands between, such as a formula.
    """
    is_heading = line.height > LARGE * height
    if is_heading != (last.height > LARGE * height):
        return True
    gap = last.baseline - line.baseline
    return gap > _PARAGRAPH_GAP * max(last.height, line.height) and not line.text[0].islower()
