"""Rows of tables as text: the cells with bars between them; a cell over several rows or columns is in each of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

# A longer cell holds a text, not the subject of the rows beside it.
_LONGEST_REPEATED = 200
# HTML's own limits; 0 rows mean all that follow.
_MOST_COLUMNS = 1000
_ALL_ROWS = 65_534


class _Span(NamedTuple):
    """A cell that reaches into rows below; `rows` counts them, with the row that is being read."""

    text: str
    rows: int


@dataclass
class TableRows:
    """The row of a table that is being read, and the cells that reach into it from above."""

    _cells: list[str] = field(default_factory=list)
    # How many of these cells begin in this row.
    _own_cells: int = 0
    # The column of the next cell.
    _column: int = 0
    _spans: dict[int, _Span] = field(default_factory=dict)
    # The rows and columns of the cell that is being read.
    _rows: int = 1
    _columns: int = 1

    def next_row(self) -> None:
        """Begin a row; cells of earlier rows that span it take their columns."""
        if not self._column:
            return
        self._column = 0
        self._own_cells = 0
        self._spans = {column: _Span(text, rows - 1) for column, (text, rows) in self._spans.items() if rows > 1}

    def end_group(self) -> None:
        """End a group of rows, beyond which no cell reaches."""
        self.next_row()
        self._spans = {}

    def begin_cell(self, rowspan: str, colspan: str) -> None:
        """Begin a cell with these attributes of HTML; others than numbers span nothing, and very large ones are cut."""
        self._rows = 1
        if rowspan.isdecimal():
            self._rows = int(rowspan) or _ALL_ROWS
        self._columns = 1
        if colspan.isdecimal():
            self._columns = min(max(int(colspan), 1), _MOST_COLUMNS)

    def end_cell(self, text: str) -> None:
        """End a cell, whose text is repeated in each column and row that it spans, unless it is long."""
        self._add_cells_from_above()
        self._own_cells += 1
        repeated = text if len(text) <= _LONGEST_REPEATED else ""
        self._cells += [text, *[repeated] * (self._columns - 1)]
        for _ in range(self._columns):
            if self._rows > 1:
                self._spans[self._column] = _Span(repeated, self._rows)
            self._column += 1

    def take_row(self) -> str:
        """Take the text of the row, or of what was read of it; "" if it has only cells from above."""
        if not self._own_cells:
            return ""
        self._add_cells_from_above()
        cells = self._cells
        self._cells = []
        if self._own_cells == 1 and len(set(cells)) == 1:
            # A cell over a whole row is a line.
            return cells[0]
        return " | ".join(cells).strip("| ")

    def _add_cells_from_above(self) -> None:
        """Add the cells from above that stand before the next cell."""
        while self._column in self._spans:
            self._cells.append(self._spans[self._column].text)
            self._column += 1
