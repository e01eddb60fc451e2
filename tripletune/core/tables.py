"""Show text from data, and tables, on a terminal, in Markdown and in LaTeX.

Names and replies come from other people's files, so all output is escaped.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

# Includes characters that change the direction of text, which can make a line look like another line.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
_TEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "&": r"\&",
        "%": r"\%",
        "$": r"\$",
        "#": r"\#",
        "_": r"\_",
        "{": r"\{",
        "}": r"\}",
    }
)
# A number as LaTeX or text, perhaps with an interval behind it, or an empty cell.
_NUMBER = re.compile(r"(?:\\textbf\{)?[-+]?\d.*|-?")


def printable(text: str) -> str:
    """Replace the control characters of a text, so that data can't control a terminal."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def on_one_line(text: object) -> str:
    """Put text from data on one line, without control characters."""
    return " ".join(printable(str(text)).split())


def plain(text: object) -> str:
    """Write text from data as one line of plain Markdown, in which tags, code, links and pictures are escaped."""
    line = on_one_line(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"[\\`]|\](?=[(\[])", r"\\\g<0>", line)


def code_span(text: object) -> str:
    """Write text from data as a Markdown code span, even if the text holds back-ticks."""
    line = on_one_line(text)
    runs = re.findall("`+", line)
    if not runs:
        return f"`{line}`"
    # The fence is longer than every run of back-ticks inside.
    ticks = "`" + max(runs, key=len)
    return f"{ticks} {line} {ticks}"


def tex(text: object) -> str:
    """Write text from data as one escaped line of LaTeX."""
    return on_one_line(text).translate(_TEX)


class Table:
    """A table of data, which can be written in several formats.

    Args:
        head: The heads of the columns.
        rows: Rows of as many cells; values are written as text.
        title: The caption.
        note: A remark about the table, which its reader prints.
        cell: Writes a cell in Markdown: `plain`, `code_span`, or `str` for cells that are Markdown already.
    """

    def __init__(
        self,
        head: Iterable[object],
        rows: Iterable[Iterable[object]],
        title: str = "",
        note: str = "",
        cell: Callable[[object], str] = plain,
    ) -> None:
        self.head = [str(name) for name in head]
        self.rows = [_cells_as_text(row) for row in rows]
        self.title = title
        self.note = note
        self.cell = cell

    def markdown(self) -> str:
        """Head and rows in Markdown."""
        lines = [
            _markdown_line(map(plain, self.head)),
            _markdown_line(["---"] * len(self.head)),
        ]
        for row in self.rows:
            lines.append(_markdown_line(map(self.cell, row)))
        return "\n".join(lines)

    def csv(self) -> str:
        """Head and rows as CSV; pandas quotes what holds commas or line breaks."""
        import pandas as pd

        return pd.DataFrame(self.rows, columns=self.head).to_csv(index=False)

    def latex(self, caption: str, cell: Callable[[object], str] = tex) -> str:
        """A LaTeX `table` with the rules of `booktabs`; `cell` writes a cell (`str`: the text is LaTeX)."""
        import pandas as pd

        rows = pd.DataFrame([list(map(cell, row)) for row in self.rows], columns=range(len(self.head)))
        alignment = ""
        head: Any = []
        for place, name in enumerate(self.head):
            alignment += "r" if self._has_numbers(place) else "l"
            # pandas reads a name as a format string.
            head.append(tex(name).replace("{", "{{").replace("}", "}}"))
        text = rows.to_latex(index=False, escape=False, header=head, column_format=alignment, caption=tex(caption))
        return text.rstrip()

    def _has_numbers(self, place: int) -> bool:
        """Whether a column holds only numbers and empty cells, so that it is flush right."""
        return all(_NUMBER.fullmatch(row[place]) for row in self.rows)

    def show(self, console: Console) -> None:
        """Print title, head and rows on a `plain_console`; columns of numbers are flush right.

        Long cells are folded, not cut, since a cut name or path is worth nothing.
        """
        from rich.table import Table as RichTable

        shown = RichTable(title=self.title or None, title_justify="left")
        for place, name in enumerate(self.head):
            if self._has_numbers(place):
                shown.add_column(name, justify="right", overflow="fold")
            else:
                shown.add_column(name, overflow="fold")
        for row in self.rows:
            shown.add_row(*row)
        console.print(shown)


def _cells_as_text(row: Iterable[object]) -> list[str]:
    """The cells of a row as texts."""
    return [str(value) for value in row]


def _markdown_line(cells: Iterable[str]) -> str:
    """A line of a Markdown table; a bar inside of a cell, even in code, would begin the next cell."""
    escaped = [cell.replace("|", "\\|") for cell in cells]
    return f"| {' | '.join(escaped)} |"


def plain_console(width: int = 140) -> Console:
    """A Rich console that shows text from data without markup and control characters.

    Without a terminal, lines have `width` characters, since Rich would cut a table in a log file at 80.
    """
    from rich.console import Console

    class Plain(Console):
        def render_str(self, text: str, **options: Any) -> Text:
            """Render a text from data; Rich itself passes control characters on to the terminal."""
            return super().render_str(printable(text), **options)

    if sys.stdout.isatty():
        return Plain(markup=False, emoji=False, highlight=False)
    return Plain(markup=False, emoji=False, highlight=False, width=width)
