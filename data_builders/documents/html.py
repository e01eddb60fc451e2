"""Read the paragraphs of HTML, under their headings; Markdown and DOCX become HTML first."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser

from tripletune.data_builders.documents import Block

# A longer heading is a paragraph in a large font.
_LONGEST_HEADING = 200
# Tags without text, tags that begin and end a paragraph, and headings.
SKIPPED_TAGS = re.compile("script|style|template|svg|nav|title|noscript|select|button")
_BLOCKS = re.compile(
    "address|article|aside|blockquote|body|caption|d[dlt]|details|div|fig(caption|ure)|footer|form|header|hr|html|li|main|"
    "ol|p|pre|section|summary|table|t(body|foot|head|r)|ul|h[1-6]"
)
_HEADING = re.compile("h[1-6]")
_IN_CELL = re.compile("blockquote|d[dlt]|div|li|ol|p|pre|ul")


def html_blocks(texts: Iterable[str]) -> Iterator[Block]:
    """Yield the paragraphs of HTML, which may come in pieces."""
    parser = _BlockParser()
    for text in texts:
        parser.feed(text)
        yield from parser.take()
    parser.close()
    yield from parser.take()


class _BlockParser(HTMLParser):
    """Collects paragraphs; the cells of a table row become one paragraph, separated by bars."""

    def __init__(self) -> None:
        super().__init__()
        self._blocks: list[Block] = []
        # The pieces of the paragraph, heading or table row that is being read.
        self._pieces: list[str] = []
        self._in_cell = False
        # The headings above the text by their tags, such as {"h1": "Handbook", "h2": "Leave"}.
        self._headings: dict[str, str] = {}
        # The tag of the last heading while no text has followed it, else "".
        self._bare_tag = ""
        # How many tags without text are open.
        self._skipping = 0

    def take(self) -> list[Block]:
        """The paragraphs that were read since the last call."""
        blocks = self._blocks
        self._blocks = []
        return blocks

    def close(self) -> None:
        """Finish the last paragraph."""
        super().close()
        self._end_paragraph()
        self._store_bare_heading("h1")

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "main":
            # The text begins here, also if a tag before it was not closed.
            self._skipping = 0
        elif SKIPPED_TAGS.fullmatch(tag):
            self._skipping += 1
        if tag in ("td", "th"):
            self._in_cell = True
            if "".join(self._pieces).strip():
                self._pieces.append(" | ")
        elif tag == "br" or (self._in_cell and _IN_CELL.fullmatch(tag)):
            self._pieces.append(" ")
        elif _BLOCKS.fullmatch(tag):
            self._end_paragraph()

    def handle_endtag(self, tag: str) -> None:
        if SKIPPED_TAGS.fullmatch(tag) and self._skipping:
            self._skipping -= 1
        if self._in_cell and _IN_CELL.fullmatch(tag):
            self._pieces.append(" ")
        elif _HEADING.fullmatch(tag):
            self._end_heading(tag)
        elif _BLOCKS.fullmatch(tag):
            self._end_paragraph()

    def handle_data(self, data: str) -> None:
        if not self._skipping:
            self._pieces.append(data)

    def _take_text(self) -> str:
        """The text that was read since the last paragraph, with white space folded."""
        text = " ".join("".join(self._pieces).split())
        self._pieces.clear()
        self._in_cell = False
        return text

    def _end_paragraph(self) -> None:
        self._store(self._take_text())

    def _end_heading(self, tag: str) -> None:
        text = self._take_text()
        if len(text) > _LONGEST_HEADING:
            self._store(text)
        elif text:
            self._store_bare_heading(tag)
            above = {level: name for level, name in self._headings.items() if level < tag}
            # Sphinx and others link a heading to itself.
            self._headings = above | {tag: text.rstrip("¶ ")}
            self._bare_tag = tag

    def _store(self, text: str) -> None:
        if text:
            self._blocks.append(Block(text, tuple(self._headings.values())))
            self._bare_tag = ""

    def _store_bare_heading(self, next_tag: str) -> None:
        """Store a heading as a paragraph if it has neither text nor sub-headings before the next heading."""
        if self._bare_tag >= next_tag:
            *above, name = self._headings.values()
            self._blocks.append(Block(name, tuple(above)))
