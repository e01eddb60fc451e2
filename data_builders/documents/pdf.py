"""Read the paragraphs of a PDF: one per page, or per heading of its table of contents."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import regex

from tripletune.data_builders.documents import Block, Unreadable

# Start of a page that may end a sentence of the previous page.
_SENTENCE_END = regex.compile(r"\p{Ll}.{0,600}?[.!?…](?=\s|$)", regex.DOTALL)
_ENDS_SENTENCE = ".!?:;…"


class _Bookmark(NamedTuple):
    """An entry of the table of contents; `level` counts from 0."""

    level: int
    title: str


def pdf_blocks(path: Path, notes: Counter[str]) -> Iterator[Block]:
    """Yield the text of each page, cut where a heading begins; `notes` counts pages without text."""
    import pypdfium2

    try:
        document = pypdfium2.PdfDocument(path)
    except pypdfium2.PdfiumError as error:
        if "password" in str(error).lower():
            raise Unreadable("needs a password") from None
        raise Unreadable(f"damaged: {error}") from None
    with closing(document):
        bookmarks = _bookmarks(document)
        headings: list[str] = []
        # The last block is held back, since the next page may end its sentence.
        last = Block("")
        for number in range(len(document)):
            text = _page_text(document, number, notes)
            is_unfinished = last.text and last.text[-1] not in _ENDS_SENTENCE
            sentence_end = _SENTENCE_END.match(text) if is_unfinished else None
            if sentence_end:
                last = last._replace(text=f"{last.text} {sentence_end[0]}")
                text = text[sentence_end.end() :].strip()
            for level, title in bookmarks.get(number, ()):
                heading = _find_heading(title, text)
                if heading:
                    # The text above the heading on this page belongs to the previous heading.
                    yield last
                    last = Block(text[: heading.start()].strip(), tuple(headings), number + 1)
                    text = text[heading.end() :].strip()
                headings = [*headings[:level], title]
            yield last
            last = Block(text, tuple(headings), number + 1)
        yield last


def _bookmarks(document: Any) -> dict[int, list[_Bookmark]]:
    """The entries of the table of contents by the page, counted from 0, that they point to."""
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


def _page_text(document: Any, number: int, notes: Counter[str]) -> str:
    """The text of a page, counted from 0; "" if it has none or can't be read."""
    from pypdfium2 import PdfiumError

    try:
        with closing(document[number]) as page, closing(page.get_textpage()) as text_page:
            # U+FFFE is a hyphen at the end of a line.
            text = text_page.get_text_range().replace("\ufffe", "").strip()
    except PdfiumError:
        notes["pages that can't be read"] += 1
        return ""
    if not text:
        notes["pages without text"] += 1
    return text
