"""The table of a comparison, and whether the page of evidence names each difference."""

import re
from pathlib import Path
from typing import Any, NamedTuple

PAGE = Path(__file__).parents[2] / "docs" / "evidence" / "public_code.md"
NOT_RUN = "not run"
_WIDTH = 110


class Row(NamedTuple):
    """A step of a comparison.

    Attributes:
        step: What was compared.
        theirs: What the authors' code gave, or `NOT_RUN` with the reason.
        ours: What this code gave.
        named: The row of the page, by its first cell, that names this difference; "" if none is expected.
        is_equal: Whether both are equal; None: by `==`.
    """

    step: str
    theirs: Any
    ours: Any
    named: str = ""
    is_equal: bool | None = None

    @property
    def verdict(self) -> str:
        """The last cell."""
        if str(self.theirs).startswith(NOT_RUN):
            return NOT_RUN
        is_equal = self.theirs == self.ours if self.is_equal is None else self.is_equal
        return "equal" if is_equal else f"differs: {self.named or 'not named'}"


def named_steps(section: str) -> set[str]:
    """The first cells of the table of differences, which has five columns, in a section of the page."""
    text = PAGE.read_text(encoding="utf-8").partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return set(re.findall(r"^\| ([^|]+) \|(?:[^|]*\|){4}$", text, re.MULTILINE))


def show(section: str, rows: list[Row]) -> int:
    """Print the table, and return the exit status: 1 if a difference is not named on the page."""
    print("| step | theirs | ours | equal? |\n|---|---|---|---|")
    counts = {"equal": 0, "differs": 0, NOT_RUN: 0}
    surprises = []
    on_page = named_steps(section)
    for row in rows:
        print(f"| {row.step} | {_cell(row.theirs)} | {_cell(row.ours)} | {row.verdict} |")
        kind = row.verdict.partition(":")[0]
        counts[kind] += 1
        if kind == "differs" and row.named not in on_page:
            surprises.append(row.step)
    print(f"\n{counts['equal']} steps equal, {counts['differs']} differ, {counts[NOT_RUN]} not run.")
    if surprises:
        print(f"{PAGE.name} does not name the difference of: {'; '.join(surprises)}.")
    else:
        print(f"{PAGE.name} names every difference.")
    return int(bool(surprises))


def _cell(value: Any) -> str:
    """A value as the text of a cell: on one line, without bars, and cut."""
    text = value if isinstance(value, str) else repr(value)
    text = " ".join(text.split()).replace("|", "¦")
    return text if len(text) <= _WIDTH else f"{text[:_WIDTH]}…"
