"""Lines at the top and bottom of pages that are no text: running headers and footers, and page numbers.

Tested in `tests/data_builders/test_documents.py`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tripletune.data_builders.documents.pdf_lines import PageLine

# Rows at each end of a page that may be running lines.
_EDGE_ROWS = 2
# Running lines are on so many pages; in documents of few pages on two.
_PAGES = 3
_FEW_PAGES = 4
_LONGEST = 150
_NUMBER = re.compile(r"\d+")
_ROMAN = re.compile(r"[ivxlc]+")
# "of" in "3 of 12", in the languages in which programs number pages.
_OF = r"(?:/|of|von|de|sur|di|van|av|из)"
_PAGE_OF = re.compile(rf"\d+\s*{_OF}\s*\d+", re.IGNORECASE)
_PAGE_NUMBER = re.compile(
    r"[\W_]*(?:(?:page|seite|p\.?|s\.?|página|pagina|side|sida|strona)\s*)?(\d+)"
    rf"(?:\s*{_OF}\s*\d+)?[\W_]*",
    re.IGNORECASE,
)


def without_running_lines(
    pages: Sequence[list[PageLine]], headings: Sequence[Sequence[str]], notes: Counter[str]
) -> list[list[PageLine]]:
    """The lines of pages without running headers, footers and page numbers; `notes` counts what was left out.

    All pages are counted before any line is left out, since a line is known by its repetition. Lines are compared by
    `id`, because equal lines may stand in the middle of a page, where they are text.

    Args:
        headings: The headings of the outline by page: these lines stay.
    """
    counts: Counter[str] = Counter()
    for number, lines in enumerate(pages):
        keys: set[str] = set()
        for line, _ in _edge_lines(lines):
            keys |= _repetition_keys(line.text, number)
        counts.update(keys)
    least = 2 if len(pages) <= _FEW_PAGES else _PAGES
    left: list[list[PageLine]] = []
    for number, lines in enumerate(pages):
        running: set[int] = set()
        for line, is_alone in _edge_lines(lines):
            is_repeated = any(counts[key] >= least for key in _repetition_keys(line.text, number))
            page_number = _PAGE_NUMBER.fullmatch(line.text)
            # A number beside others is the cell of a table.
            is_page_number = is_alone and page_number is not None and int(page_number[1]) == number + 1
            if (is_repeated or is_page_number) and line.text not in headings[number]:
                running.add(id(line))
                notes["headers, footers and page numbers left out"] += 1
        left.append([line for line in lines if id(line) not in running])
    return left


class _EdgeLine(NamedTuple):
    """A line at the top or bottom of a page, and whether no other line stands in its row."""

    line: PageLine
    is_alone: bool


def _edge_lines(lines: Sequence[PageLine]) -> Iterator[_EdgeLine]:
    """The lines in the first and last rows of a page that has other rows, too.

    PDFs draw headers and footers in any order, so the rows are sorted from top to bottom. Never more than half of the
    rows count as one edge, so a short page is not read as nothing but edges, and no row is in both.
    """
    rows: list[list[PageLine]] = []
    for line in sorted(lines, key=lambda line: -line.baseline):
        if rows and abs(rows[-1][0].baseline - line.baseline) < line.height / 2:
            rows[-1].append(line)
        else:
            rows.append([line])
    if len(rows) < 2:
        return
    depth = min(_EDGE_ROWS, len(rows) // 2)
    for row in [*rows[:depth], *rows[-depth:]]:
        for line in row:
            if len(line.text) <= _LONGEST:
                yield _EdgeLine(line, len(row) == 1)


def _repetition_keys(text: str, page: int) -> set[str]:
    """What a line has in common with those of other pages: its text, or its text but for the number of the page.

    A page number is known by its distance from the page's place, which is the same on all pages, so chapter and year
    in a header do not count as one. Only the first and last number of a line can be it.
    """
    numbers = list(_NUMBER.finditer(text))
    keys = {text}
    if _ROMAN.fullmatch(text):
        keys.add("roman number")
    keys.add(_PAGE_OF.sub("number of numbers", text))
    for number in numbers[:1] + numbers[-1:]:
        offset = int(number[0]) - page
        keys.add(f"{text[: number.start()]}page {offset:+}{text[number.end() :]}")
    return keys
