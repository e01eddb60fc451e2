"""Read the paragraphs of HTML, under their headings; Markdown and DOCX become HTML first.

Text that a browser hides, deleted text and menus are left out. Superscripts, notes, formulas and readings are written
so that they stay apart from the word or number before them (`marks.py`), and the cells of merged rows and columns are
repeated (`tables.py`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from copy import deepcopy
from html.parser import HTMLParser

from tripletune.data_builders.documents import Block
from tripletune.data_builders.documents.elements import (
    AROUND_PARAGRAPHS,
    BLOCKS,
    ENDED_BY,
    PARAGRAPH,
    ROWS,
    OpenElement,
    Snapshot,
    StyleSheets,
    must_end,
    place_of_outermost,
    why_left_out,
)
from tripletune.data_builders.documents.lists import LISTS, item_numbers
from tripletune.data_builders.documents.marks import formula, is_note, says_note, split_fraction, subscript, superscript
from tripletune.data_builders.documents.tables import TableRows

# A longer heading is a paragraph in a large font.
_LONGEST_HEADING = 200
_HEADING = re.compile("h[1-6]")
_IN_CELL = re.compile("blockquote|d[dlt]|div|li|ol|p|pre|ul")
_FORMULA = re.compile(
    "semantics|m(ath|i|n|o|s|text|row|sup|sub|subsup|frac|sqrt|root|under|over|underover|table|tr|td|style|padded)"
)
_RAISING_STYLE = re.compile(r"(?:^|;)\s*vertical-align\s*:\s*(su[pb])", re.IGNORECASE)


def html_blocks(texts: Iterable[str], notes: Counter[str]) -> Iterator[Block]:
    """Yield the paragraphs of HTML, which may come in pieces; `notes` counts hidden and deleted texts."""
    parser = _BlockParser(notes)
    for text in texts:
        parser.feed(text)
        yield from parser.take_blocks()
    parser.close()
    yield from parser.take_blocks()


class _BlockParser(HTMLParser):
    """Collects paragraphs; the cells of a table row become one paragraph, separated by bars."""

    def __init__(self, notes: Counter[str]) -> None:
        super().__init__()
        self._notes = notes
        self._blocks: list[Block] = []
        # The pieces of the paragraph, heading or table cell that is being read.
        self._pieces: list[str] = []
        self._in_cell = False
        self._tables: list[TableRows] = []
        # The headings above the text by their tags, such as {"h1": "Handbook", "h2": "Leave"}.
        self._headings: dict[str, str] = {}
        # The tag of the last heading while no text has followed it, else "".
        self._bare_tag = ""
        self._open: list[OpenElement] = []
        # The last formula, and how many there were.
        self._formula = ""
        self._formulas = 0
        self._style_sheets = StyleSheets()
        # Whether the last piece is a superscript or subscript.
        self._after_mark = False
        # The number of a list's item that the pieces begin with.
        self._item_number = ""
        # The readings of the characters of a ruby element.
        self._readings: list[str] = []

    def take_blocks(self) -> list[Block]:
        """Take the paragraphs read since the last call out of the parser, up to an element that may be left out.

        What stands in such an element is only known to stay when the element ends. The number of paragraphs before
        each open element is lowered by those taken, since it counts from the beginning of the list.
        """
        for element in self._open:
            if element.before:
                count = element.before.blocks
                break
        else:
            count = len(self._blocks)
        blocks = self._blocks[:count]
        del self._blocks[:count]
        for element in self._open:
            if element.before:
                element.before = element.before._replace(blocks=element.before.blocks - count)
        return blocks

    def close(self) -> None:
        """Finish all elements that were never closed, the last paragraph, and a heading with nothing below it."""
        super().close()
        while self._open:
            self._end_element(has_end_tag=False)
        self._end_paragraph()
        self._store_bare_heading("h1")

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Open an element, after those whose end tags HTML lets out; `HTMLParser` calls this."""
        if tag == "main":
            # The text begins here, also if a menu before it was not closed.
            while self._is_left_out():
                self._end_element(has_end_tag=self._open[-1].left_out == "menu")
        self._end_unclosed(tag)
        attributes = {name: value or "" for name, value in attrs}
        element = self._new_element(tag, attributes)
        if must_end(element, self._open):
            self._open.append(element)
        self._begin_block(tag, attributes)
        if tag == "li":
            self._begin_item(attributes | {"style": self._style_sheets.style_of(tag, attributes)})
        element.first_piece = len(self._pieces)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Open an element, and close it where its slash means something; `HTMLParser` calls this."""
        self.handle_starttag(tag, attrs)
        # In HTML, a slash closes only elements that can't have text; in SVG and MathML it closes all.
        if self._open and self._open[-1].tag == tag and not BLOCKS.fullmatch(tag):
            self._end_element(has_end_tag=True)

    def handle_endtag(self, tag: str) -> None:
        """Close an element and those inside it; an end tag without its element only ends a block."""
        if any(element.tag == tag for element in self._open):
            while self._open[-1].tag != tag:
                self._end_element(has_end_tag=False)
            self._end_element(has_end_tag=True)
        elif BLOCKS.fullmatch(tag):
            self._end_block(tag)

    def handle_data(self, data: str) -> None:
        """Keep a text; a digit right after a superscript or subscript that ends in one stays apart from it."""
        if self._open and _FORMULA.fullmatch(self._open[-1].tag) and not data.strip():
            # White space between the elements of a formula.
            return
        if self._after_mark and data[:1].isdecimal() and self._pieces and self._pieces[-1][-1:].isdecimal():
            self._pieces.append(" ")
        self._after_mark = False
        self._pieces.append(data)

    def _is_left_out(self) -> bool:
        """Whether the text that is read now belongs to an element whose text is left out."""
        return any(element.left_out for element in self._open)

    def _new_element(self, tag: str, attributes: dict[str, str]) -> OpenElement:
        """An element that begins here; if its text is left out, with the snapshot that `_leave_out` restores."""
        attributes = attributes | {"style": self._style_sheets.style_of(tag, attributes)}
        raised = _RAISING_STYLE.search(attributes["style"])
        element = OpenElement(
            tag, len(self._pieces), why_left_out(tag, attributes, [outer.tag for outer in self._open])
        )
        if raised:
            element.level = raised[1].lower()
        elif tag in ("sup", "sub"):
            element.level = tag
        if element.left_out:
            element.before = Snapshot(
                len(self._blocks),
                self._pieces.copy(),
                self._headings.copy(),
                self._bare_tag,
                self._in_cell,
                deepcopy(self._tables),
                self._item_number,
            )
        element.formulas = self._formulas
        if tag == "ol":
            element.numbers = item_numbers(attributes)
        kinds = f"{attributes.get('role', '')} {attributes.get('epub:type', '')} {attributes.get('class', '')}".lower()
        element.is_note = says_note(kinds)
        element.links_to_note = tag == "a" and "#" in attributes.get("href", "")
        return element

    def _end_unclosed(self, tag: str) -> None:
        """End the elements before a start tag whose end tag HTML lets out."""
        if tag in ENDED_BY:
            ended, around = ENDED_BY[tag]
            self._end_up_to(ended, around)
        if BLOCKS.fullmatch(tag):
            self._end_up_to(PARAGRAPH, AROUND_PARAGRAPHS)

    def _end_up_to(self, ended: frozenset[str], around: frozenset[str]) -> None:
        """End the outermost element of some tags that is inside all those around it."""
        first = place_of_outermost(self._open, ended, around)
        while first is not None and len(self._open) > first:
            self._end_element(has_end_tag=False)

    def _end_element(self, has_end_tag: bool) -> None:
        """End the last open element; the text of a menu without an end tag is read.

        A menu that is never closed would otherwise hide the rest of the page.
        """
        element = self._open.pop()
        is_left_out = element.before and (has_end_tag or element.left_out != "menu")
        if element.tag == "style":
            self._style_sheets.add_rules("".join(self._pieces[element.first_piece :]))
        if element.left_out == "hidden" and self._formulas > element.formulas:
            # Pages hide the text of a formula beside its picture.
            is_left_out = "".join(self._pieces[element.first_piece :]).strip() != self._formula
        if element.before and is_left_out:
            self._leave_out(element, element.before)
            return
        if BLOCKS.fullmatch(element.tag) or element.tag in ("td", "th"):
            self._end_block(element.tag)
        else:
            self._end_inline(element)

    def _leave_out(self, element: OpenElement, before: Snapshot) -> None:
        """Forget what was read in an element: the parser is as it was before the element.

        A new field of the parser that outlives an element belongs into `Snapshot`, else a hidden text leaves traces.
        """
        text = "".join(self._pieces[element.first_piece :]).strip()
        if element.left_out in ("hidden", "deleted") and (text or len(self._blocks) > before.blocks):
            self._notes[f"{element.left_out} texts left out"] += 1
        del self._blocks[before.blocks :]
        self._pieces = before.pieces
        self._headings = before.headings
        self._bare_tag = before.bare_tag
        self._in_cell = before.in_cell
        self._tables = before.tables
        self._item_number = before.item_number
        if BLOCKS.fullmatch(element.tag):
            self._end_block(element.tag)

    def _begin_block(self, tag: str, attributes: dict[str, str]) -> None:
        """Begin a table, row, cell or paragraph.

        A block inside a cell, such as a list, is a space and no new paragraph: the row is one paragraph. Table tags
        outside a table (`_tables` is empty) only end the paragraph.
        """
        if tag == "table":
            self._end_paragraph()
            self._tables.append(TableRows())
        elif tag == "tr":
            self._end_paragraph()
            if self._tables:
                self._tables[-1].next_row()
        elif tag in ROWS:
            self._end_paragraph()
            if self._tables:
                self._tables[-1].end_group()
        elif tag in ("td", "th"):
            self._end_cell()
            if self._tables:
                self._tables[-1].begin_cell(attributes.get("rowspan", ""), attributes.get("colspan", ""))
            self._in_cell = True
        elif tag == "input" and attributes.get("type", "").lower() in ("checkbox", "radio"):
            # Without its state, each answer of a form would be a statement.
            self._pieces.append(" [x] " if "checked" in attributes else " [ ] ")
        elif tag == "br" or (self._in_cell and _IN_CELL.fullmatch(tag)):
            self._pieces.append(" ")
        elif BLOCKS.fullmatch(tag):
            self._end_paragraph()

    def _begin_item(self, attributes: dict[str, str]) -> None:
        """Write the number of a list's item; an item in a text that a browser does not show is not counted."""
        for element in reversed(self._open):
            if element.left_out not in ("", "deleted"):
                return
            if element.tag in LISTS:
                number = element.numbers.take(attributes) if element.numbers else ""
                self._pieces.append(number)
                if not self._in_cell:
                    self._item_number += number
                return

    def _end_block(self, tag: str) -> None:
        """End a table, cell, heading or paragraph; blocks inside a cell are a space, as in `_begin_block`."""
        if tag == "table":
            self._end_paragraph()
            if self._tables:
                self._tables.pop()
        elif tag in ("td", "th"):
            self._end_cell()
        elif self._in_cell and _IN_CELL.fullmatch(tag):
            self._pieces.append(" ")
        elif _HEADING.fullmatch(tag):
            self._end_heading(tag)
        elif BLOCKS.fullmatch(tag):
            self._end_paragraph()
            if tag == "li" and self._item_number:
                # An item without text.
                self._pieces.clear()
                self._item_number = ""

    def _end_inline(self, element: OpenElement) -> None:
        """Write the text of an element that is no block as it is to be read.

        The first case that fits decides. Marks of notes come before raised text, since most of them are raised, and
        what an element says of notes (`is_note`, `has_link`) is handed to the element around it, because pages write
        both `<sup><a>` and `<a><sup>`. Guarded by tests/data_builders/test_markup.py.
        """
        # The rules of `marks` look at the last word before the element.
        before = "".join(self._pieces[: element.first_piece])[-20:]
        inner = self._pieces[element.first_piece :]
        text = "".join(inner).strip()
        if self._open and (element.links_to_note or element.has_link):
            self._open[-1].has_link = True
        if self._open and element.is_note:
            self._open[-1].is_note = True
        if (element.level or element.tag == "a") and is_note(before, text, element.is_note, element.links_to_note):
            inner = []
        elif element.level == "sup":
            linked = element.has_link and is_note(before, text, is_marked=False, is_linked=True)
            inner = [] if linked else [superscript(before, text)]
            self._after_mark = True
        elif element.level == "sub":
            split_fraction(self._pieces, element.first_piece)
            inner = [subscript(before, text)]
            self._after_mark = True
        elif _FORMULA.fullmatch(element.tag):
            inner = [formula(element.tag, inner)]
            if element.tag == "math":
                self._formula = inner[0].strip()
                self._formulas += 1
        elif element.tag == "rt" and any(outer.tag == "ruby" for outer in self._open):
            self._readings.append(text)
            inner = []
        elif element.tag == "ruby" and self._readings:
            inner.append(f"({''.join(self._readings)})")
            self._readings.clear()
        else:
            return
        self._pieces[element.first_piece :] = inner

    def _end_cell(self) -> None:
        """End a cell; text outside of tables is no cell, whatever its tags say."""
        if self._in_cell and self._tables:
            self._tables[-1].end_cell(self._take_pieces())
        self._in_cell = False

    def _take_pieces(self) -> str:
        """Take the pieces as one text with white space folded; the open elements then begin in an empty list."""
        text = " ".join("".join(self._pieces).split())
        self._pieces.clear()
        for element in self._open:
            element.first_piece = 0
        return text

    def _take_text(self) -> str:
        """Take the text that was read since the last paragraph: a row of a table, or a paragraph.

        The number of an item alone stays, for the item's first paragraph.
        """
        self._end_cell()
        row = self._tables[-1].take_row() if self._tables else ""
        text = self._take_pieces()
        text = " | ".join(filter(None, (row, text)))
        if text and text == self._item_number.strip():
            self._pieces.append(self._item_number)
            return ""
        self._item_number = ""
        return text

    def _end_paragraph(self) -> None:
        """End a paragraph: what was read since the last one becomes a block, unless it is empty."""
        self._add_block(self._take_text())

    def _end_heading(self, tag: str) -> None:
        """Put a heading in the place of the headings of its level and below.

        Tags are compared as texts: "h1" < "h2" … < "h6", and "", no tag, is before all of them. `_headings` therefore
        always has its tags in rising order. The last heading, if bare, must be stored before it is replaced.
        """
        text = self._take_text()
        if len(text) > _LONGEST_HEADING:
            self._add_block(text)
        elif text:
            self._store_bare_heading(tag)
            above = {level: name for level, name in self._headings.items() if level < tag}
            # Sphinx and others link a heading to itself.
            self._headings = above | {tag: text.rstrip("¶ ")}
            self._bare_tag = tag

    def _add_block(self, text: str) -> None:
        """Add a paragraph under the headings that are open now."""
        if text:
            self._blocks.append(Block(text, tuple(self._headings.values())))
            self._bare_tag = ""

    def _store_bare_heading(self, next_tag: str) -> None:
        """Store a heading as a paragraph if it has neither text nor sub-headings before the next heading.

        Its words would otherwise be in no passage. A heading of a lower level keeps it, as a heading above.
        """
        if self._bare_tag >= next_tag:
            *above, name = self._headings.values()
            self._blocks.append(Block(name, tuple(above), is_heading=True))
