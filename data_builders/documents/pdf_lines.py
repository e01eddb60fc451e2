"""The lines of a PDF page in reading order, from the places of its characters.

PDFium gives characters as they were drawn. Here they become lines, with raised and lowered characters marked, columns
one after the other, and notes after the text. Tested in `tests/data_builders/test_documents.py`.
"""

from __future__ import annotations

import ctypes
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from tripletune.data_builders.documents.marks import subscript, superscript

if TYPE_CHECKING:
    from pypdfium2 import PdfTextPage

# Parts of a line's height: a gap between words; between columns or cells; before a mark; how far a line may rise.
_WORD_GAP = 0.2
_WIDE_GAP = 0.9
_MARK_GAP = 0.15
_SAME_LINE = 0.3
# How far characters are raised or lowered, and how small they are, in parts of the line's height.
_RAISED = 0.1
_FARTHEST = 0.75
_SMALL = 0.88
# Beside a larger letter, text is no superscript: the letter is the initial of a paragraph.
_INITIAL = 1.8
# A column has so many words in a line, and so many of its lines go on with a small letter; cells of tables have fewer.
_WORDS = 2.5
_CONTINUED = 0.25
# Characters with a smaller angle, in radians, are upright.
_UPRIGHT = 0.02
# A line of a note is lower than this part of the height of the text; a line so much higher than a note ends the note.
_NOTE_HEIGHT = 0.95
_HIGHER_THAN_NOTE = 1.03
# The longest name of a font that is read; names of bold fonts.
_FONT_NAME = 128
_BOLD = re.compile(rb"bold|black|heavy|semibd|CMBX", re.IGNORECASE)
_text_of = attrgetter("text")
_NOTE_NUMBER = re.compile(r"(\d{1,3}|[*†‡§¶]+)\s*(?=\S)")
_ENDS_WORD = re.compile(r"[-\u2010\x02\ufffe]$")


class _Glyph(NamedTuple):
    """A character and its place, in points from the lower left corner of the page."""

    text: str
    left: float
    right: float
    baseline: float
    height: float
    is_bold: bool = False


class _ScriptRun(NamedTuple):
    """Neighbouring characters of one level: 1 raised, -1 lowered, 0 on the line."""

    level: int
    text: str


class _Point(NamedTuple):
    """A place on a page, in points."""

    x: float
    y: float


class _LinePlace(NamedTuple):
    """Height and baseline of a line, in points."""

    height: float
    baseline: float


@dataclass(slots=True)
class PageLine:
    """The characters of a line up to a wide gap.

    Attributes:
        height: The height of most of its characters.
        text: Its text; see `read_lines`.
        is_note: Whether it is part of a note below the text.
        is_bold: Whether all its characters are bold.
    """

    glyphs: list[_Glyph]
    baseline: float = 0.0
    height: float = 0.0
    text: str = ""
    is_note: bool = False
    is_bold: bool = False
    # Its characters, divided where they are raised or lowered.
    runs: list[_ScriptRun] = field(default_factory=list)

    @property
    def left(self) -> float:
        """Its left end."""
        return min(glyph.left for glyph in self.glyphs)

    @property
    def right(self) -> float:
        """Its right end."""
        return max(glyph.right for glyph in self.glyphs)


def read_lines(text_page: PdfTextPage, notes: Counter[str]) -> list[PageLine]:
    """The lines of a page in reading order; a hyphen that PDFium found at the end of a line is "-".

    `notes` counts characters that were left out.
    """
    lines = [_measured_line(glyphs) for glyphs in _split_lines(_read_glyphs(text_page, notes))]
    lines = _order_by_column(_merge_broken_lines(lines))
    marks = _mark_note_lines(lines)
    for line in lines:
        line.text = _text_without_note_marks(line.runs, marks)
    return [line for line in lines if line.text]


def _read_glyphs(text_page: PdfTextPage, notes: Counter[str]) -> Iterator[_Glyph | None]:
    """The characters of a page; None for a space that PDFium assumes. Those beyond its edges are never seen.

    The box and the origin are filled by each call of PDFium, so they are read before the next one. Characters are
    turned upright by their own angle, since a table or a figure may lie on its side.
    """
    import pypdfium2.raw as pdfium

    origin_x, origin_y = ctypes.c_double(), ctypes.c_double()
    box = pdfium.FS_RECTF()
    page_left, page_bottom, page_right, page_top = text_page.page.get_cropbox()
    for number in range(text_page.count_chars()):
        code = pdfium.FPDFText_GetUnicode(text_page, number)
        character = chr(code)
        if character in "\r\n" or not code:
            continue
        if character.isspace() and pdfium.FPDFText_IsGenerated(text_page, number):
            yield None
            continue
        if character in "\x02\ufffe":
            character = "-"
        pdfium.FPDFText_GetLooseCharBox(text_page, number, box)
        is_across = box.left < page_right and box.right > page_left and box.bottom < page_top and box.top > page_bottom
        if not is_across:
            notes["characters beyond the page left out"] += 1
            continue
        pdfium.FPDFText_GetCharOrigin(text_page, number, origin_x, origin_y)
        angle = pdfium.FPDFText_GetCharAngle(text_page, number)
        first_x, first_y = _turned_upright(box.left, box.bottom, angle)
        second_x, second_y = _turned_upright(box.right, box.top, angle)
        left, right = sorted((first_x, second_x))
        height = abs(second_y - first_y)
        _, baseline = _turned_upright(origin_x.value, origin_y.value, angle)
        yield _Glyph(character, left, right, baseline, height, _is_bold(text_page, number))


def _is_bold(text_page: PdfTextPage, number: int) -> bool:
    """Whether the font of a character is bold by its name: few files state a weight."""
    import pypdfium2.raw as pdfium

    name = ctypes.create_string_buffer(_FONT_NAME)
    pdfium.FPDFText_GetFontInfo(text_page, number, name, _FONT_NAME, None)
    return bool(_BOLD.search(name.value))


def _turned_upright(x: float, y: float, angle: float) -> _Point:
    """A place on a page that is turned so that characters with this angle, in radians, stand upright."""
    if abs(angle) < _UPRIGHT:
        return _Point(x, y)
    return _Point(x * math.cos(angle) + y * math.sin(angle), y * math.cos(angle) - x * math.sin(angle))


def _split_lines(glyphs: Iterator[_Glyph | None]) -> Iterator[list[_Glyph]]:
    """Yield the characters between wide gaps; a space is a glyph without width.

    Beside the spaces of the file, gaps count, since many PDFs have no spaces. Each line has a character that is no
    space, on which `_measured_line` relies.
    """
    line: list[_Glyph] = []
    has_space = False
    is_gap = False
    for glyph in glyphs:
        if glyph is None:
            is_gap = True
            continue
        if glyph.text.isspace():
            has_space = True
            continue
        if line:
            last = line[-1]
            height = max(last.height, glyph.height)
            gap = max(glyph.left - last.right, last.left - glyph.right)
            rise = abs(glyph.baseline - last.baseline)
            is_small = min(last.height, glyph.height) < _SMALL * height
            is_near = rise < _SAME_LINE * height or (is_small and rise < _FARTHEST * height)
            if not is_near or gap > _WIDE_GAP * height:
                yield line
                line = []
            elif is_small and rise > _RAISED * height / 2 and gap < _MARK_GAP * height and not has_space:
                # A mark stands a little apart from its word.
                pass
            elif has_space or is_gap or gap > _WORD_GAP * height:
                line.append(_Glyph(" ", last.right, last.right, last.baseline, last.height))
        line.append(glyph)
        has_space = False
        is_gap = False
    if line:
        yield line


def _measured_line(glyphs: list[_Glyph]) -> PageLine:
    """A line with its main height and baseline, and its raised and lowered characters.

    They are those of most letters, as marks are usually fewer. Only if most letters are small beside the largest (few
    letters with a long superscript), those of the largest letters count, but not an initial that several lines stand
    beside.

    Args:
        glyphs: At least one of them is no space; see `_split_lines`.
    """
    letters = [glyph for glyph in glyphs if glyph.text != " "]
    height, baseline = _most_common_place(letters)
    largest = max(round(letter.height, 1) for letter in letters)
    if height < _SMALL * largest < _INITIAL * height:
        height, baseline = _most_common_place([letter for letter in letters if round(letter.height, 1) == largest])
    line = PageLine(glyphs, baseline, height, is_bold=all(glyph.is_bold for glyph in letters))
    for glyph in glyphs:
        level = _script_level(glyph, line)
        # A space has the place of the character before it, so it would belong to a mark.
        if glyph.text == " " and line.runs:
            level = 0
        if line.runs and line.runs[-1].level == level:
            line.runs[-1] = _ScriptRun(level, line.runs[-1].text + glyph.text)
        else:
            line.runs.append(_ScriptRun(level, glyph.text))
    return line


def _most_common_place(letters: Sequence[_Glyph]) -> _LinePlace:
    """The height and baseline of most letters, to a tenth of a point, so that equal ones can be counted."""
    places = Counter(_LinePlace(round(letter.height, 1), round(letter.baseline, 1)) for letter in letters)
    return places.most_common(1)[0][0]


def _script_level(glyph: _Glyph, line: PageLine) -> int:
    """1 for a raised character, -1 for a lowered one, else 0.

    A lowered character needs half the distance: subscripts are lowered less than superscripts are raised.
    """
    if glyph.height >= _SMALL * line.height:
        return 0
    rise = glyph.baseline - line.baseline
    if rise > _RAISED * line.height:
        return 1
    if rise < -_RAISED * line.height / 2:
        return -1
    return 0


def _merge_broken_lines(lines: list[PageLine]) -> list[PageLine]:
    """The lines; those that PDFium broke at a raised character are joined, and measured again."""
    merged: list[PageLine] = []
    for line in lines:
        last = merged[-1] if merged else None
        if last and _continues_line(last, line):
            merged[-1] = _measured_line(
                [*last.glyphs, _Glyph(" ", last.right, last.right, last.baseline, 0), *line.glyphs]
            )
        else:
            merged.append(line)
    return merged


def _continues_line(last: PageLine, line: PageLine) -> bool:
    """Whether a line begins right behind another one, at its height."""
    height = max(last.height, line.height)
    gap = line.left - last.right
    return abs(line.baseline - last.baseline) < _SAME_LINE * height and -height / 2 < gap < _WIDE_GAP * height


def _order_by_column(lines: list[PageLine]) -> list[PageLine]:
    """The lines, with columns that were drawn row by row one after the other.

    A line across both, such as a heading, ends the columns above it. A half may itself have columns, so
    `_left_column_first` calls this again; each half lacks the lines of the other, so it ends.
    """
    gutter_x = _gutter_between_columns(lines)
    if gutter_x is None:
        return lines
    ordered: list[PageLine] = []
    start = 0
    while start < len(lines):
        end = start
        while end < len(lines) and not lines[end].left < gutter_x < lines[end].right:
            end += 1
        ordered += _left_column_first(lines[start:end], gutter_x)
        if end < len(lines):
            ordered.append(lines[end])
        start = end + 1
    return ordered


def _gutter_between_columns(lines: Sequence[PageLine]) -> float | None:
    """The x of the gutter between columns, where most pairs of neighbouring pieces have a gap; None for one pair."""
    gaps: list[tuple[float, float]] = []
    for last, line in pairwise(lines):
        height = max(last.height, line.height)
        is_beside = abs(last.baseline - line.baseline) < height
        if is_beside and line.left - last.right > _WIDE_GAP * height:
            gaps.append((last.right, line.left))
    best = 0
    gutter_x = None
    for _, end in gaps:
        # The widest gaps are those behind short lines, so the gutter is near the right end.
        middle = end - 1
        count = sum(left < middle < right for left, right in gaps)
        if count > best:
            best = count
            gutter_x = middle
    return gutter_x if best > 1 else None


def _left_column_first(lines: list[PageLine], gutter_x: float) -> list[PageLine]:
    """The lines left of a gutter before those right of it, if both are columns of text."""
    left = [line for line in lines if line.right <= gutter_x]
    right = [line for line in lines if line.right > gutter_x]
    if not _is_column(left) or not _is_column(right):
        return lines
    return [*_order_by_column(left), *_order_by_column(right)]


def _is_column(lines: list[PageLine]) -> bool:
    """Whether lines are running text, and not the cells of a table."""
    texts = ["".join(map(_text_of, line.glyphs)) for line in lines]
    if len(texts) < 2:
        return False
    words = sum(len(text.split()) for text in texts) / len(texts)
    continued = sum(text[0].islower() or bool(_ENDS_WORD.search(last)) for last, text in pairwise(texts))
    return words >= _WORDS and continued >= max(1, _CONTINUED * (len(texts) - 1))


def body_height(lines: Sequence[PageLine]) -> float:
    """The height of most characters, in points, rounded to a tenth; 0 for no lines."""
    heights: Counter[float] = Counter()
    for line in lines:
        heights[round(line.height, 1)] += len(line.glyphs)
    return heights.most_common(1)[0][0] if heights else 0.0


def _mark_note_lines(lines: list[PageLine]) -> set[str]:
    """Set `is_note` of the lines of notes; return the marks of notes, which stand raised in the text.

    A note begins with a number or sign that is also raised somewhere in the text, and is raised or small itself: a
    numbered list is neither. It goes on to the first line that is higher on the page, or set larger.
    """
    raised: set[str] = set()
    for line in lines:
        raised.update(text.strip() for level, text in line.runs[1:] if level == 1)
    height = body_height(lines)
    marks: set[str] = set()
    note: PageLine | None = None
    for line in lines:
        mark = _NOTE_NUMBER.match("".join(text for _, text in line.runs))
        begins_raised = line.runs[0].level == 1
        is_small = line.height < _NOTE_HEIGHT * height
        if mark and mark[1] in raised and (begins_raised or is_small):
            note = line
            marks.add(mark[1])
        elif note:
            is_larger = line.height > _HIGHER_THAN_NOTE * note.height
            is_above = line.baseline > note.baseline
            if is_larger or is_above or not is_small:
                note = None
        line.is_note = note is not None
    return marks


def _text_without_note_marks(runs: Sequence[_ScriptRun], marks: set[str]) -> str:
    """The text of a line without the marks of notes; a number after a superscript or subscript stays apart from it."""
    text = ""
    last_level = 0
    for level, run in runs:
        if level == 1 and run.strip() in marks:
            continue
        if level == 1:
            text += superscript(text, run)
        elif level == -1:
            text += subscript(text, run)
        else:
            if last_level and run[0].isdecimal() and text[-1:].isdecimal():
                text += " "
            text += run
        last_level = level
    return " ".join(text.split())
