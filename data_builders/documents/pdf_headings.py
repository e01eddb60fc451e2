"""Headings of a PDF without an outline: lines that are larger or bolder than the text.

Only the look of a line tells them: it is alone in its row, short, and no sentence. A larger heading is above a smaller
one, and one that is only bold is the lowest.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from tripletune.data_builders.documents.pdf_lines import PageLine, body_height

# Larger lines are headings, in parts of the text's height; bold ones must not be smaller than the text.
LARGE = 1.12
_TEXT_SIZE = 0.97
# What is added to the level of a title; levels are tenths.
_ABOVE = 0.05
# Lines that are farther apart, in parts of a line's height, are no title of several lines.
_TITLE_GAP = 1.7
_LONGEST = 120
# A sentence, a label before a value, and the title of a figure or table.
_NO_HEADING = re.compile(r".*[.,;:!]|(?:fig(?:ure|ura)?|tab(?:le|elle|la|leau)?|abb(?:ildung)?)\b.*\d.*", re.IGNORECASE)
_WORD = re.compile(r"[^\W\d_]{2}")


class LinesOfSection(NamedTuple):
    """Lines of a page, and the headings above them, from the top down."""

    headings: tuple[str, ...]
    lines: list[PageLine]


class _Run(NamedTuple):
    """Lines of one level: 0 for text, 1.0 for bold lines, and the height of larger ones in parts of the text's."""

    level: float
    lines: list[PageLine]

    @property
    def title(self) -> str:
        """Its lines as one text."""
        return " ".join(line.text for line in self.lines)


class _Heading(NamedTuple):
    """A heading with its level, as in `_Run`: a larger one is above a smaller one."""

    level: float
    title: str


def sections_by_look(pages: Sequence[Sequence[PageLine]], title: str = "") -> list[list[LinesOfSection]]:
    """The sections of each page in order; the first one belongs to the last heading of the page before.

    A heading without text or a smaller heading below it is text: not all large lines of a title page are headings.

    Args:
        title: The title of the document, if it is known: large lines that hold it are above lines of their size.
    """
    runs_of = _runs_of_pages(pages, title)
    runs = list(chain.from_iterable(runs_of))
    next_levels = iter([run.level for run in runs[1:]] + [math.inf])
    # The headings above the next line, from the top down.
    above: list[_Heading] = []
    sections_of: list[list[LinesOfSection]] = []
    for page_runs in runs_of:
        sections = [LinesOfSection(_titles_of(above), [])]
        for run in page_runs:
            if next(next_levels) < run.level:
                above = [heading for heading in above if heading.level > run.level]
                above.append(_Heading(run.level, run.title))
                sections.append(LinesOfSection(_titles_of(above), []))
            else:
                sections[-1].lines.extend(run.lines)
        sections_of.append(sections)
    return sections_of


def _titles_of(above: Sequence[_Heading]) -> tuple[str, ...]:
    """The texts of headings, from the top down, as blocks have them."""
    return tuple(heading.title for heading in above)


def _runs_of_pages(pages: Sequence[Sequence[PageLine]], title: str) -> list[list[_Run]]:
    """The lines of each page, those of a title or of text between titles together."""
    all_lines = list(chain.from_iterable(pages))
    height = body_height(all_lines)
    characters = sum(len(line.text) for line in all_lines)
    is_bold = sum(len(line.text) for line in all_lines if line.is_bold) > characters / 2
    runs_of: list[list[_Run]] = []
    for lines in pages:
        runs: list[_Run] = []
        for place, line in enumerate(lines):
            neighbours = [*lines[max(0, place - 1) : place], *lines[place + 1 : place + 2]]
            is_alone = all(abs(other.baseline - line.baseline) >= line.height / 2 for other in neighbours)
            level = _heading_level(line, height, is_bold) if is_alone else 0.0
            if runs and runs[-1].level == level and (not level or _is_next_line_of_title(runs[-1].lines[-1], line)):
                runs[-1].lines.append(line)
            else:
                runs.append(_Run(level, [line]))
            if level and runs[-1].title.casefold() == title.casefold():
                runs[-1] = runs[-1]._replace(level=runs[-1].level + _ABOVE)
        runs_of.append([run if _may_be_title(run.title) else run._replace(level=0.0) for run in runs])
    return runs_of


def _heading_level(line: PageLine, text_height: float, is_text_bold: bool) -> float:
    """The level of a line as a heading: its height beside the text's, 1 for bold text of its size, 0 for text."""
    height = line.height / text_height
    if height > LARGE:
        return round(height, 1)
    return 1.0 if line.is_bold and not is_text_bold and height > _TEXT_SIZE else 0.0


def _is_next_line_of_title(last: PageLine, line: PageLine) -> bool:
    """Whether a line stands so close below another one that both may be lines of one title."""
    return 0 < last.baseline - line.baseline < _TITLE_GAP * line.height


def _may_be_title(text: str) -> bool:
    """Whether a text can be a title by its words: short, with a word, and neither a sentence nor a figure's caption."""
    return len(text) <= _LONGEST and bool(_WORD.search(text)) and not _NO_HEADING.fullmatch(text)
