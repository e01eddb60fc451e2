"""The tables of a report as text: one page in Markdown, and tables in LaTeX, the first one in a paper's form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tripletune.core.tables import Table, on_one_line, plain, tex
from tripletune.eval.report.cells import with_caveats
from tripletune.eval.report.contents import Report, ReportedGroup, ReportedRun
from tripletune.eval.report.tables import NOTE, SOURCES, Section
from tripletune.eval.statistics import SIGNIFICANT, verdict

# Verdict on the difference to the first run -> its mark.
_MARKS = {"better": r"$^\dagger$", "worse": r"$^\ddagger$"}


def markdown_of(report: Report, sections: Sequence[Section]) -> str:
    """The tables as a page in Markdown, for a repository or a ticket.

    What is missing or doubtful comes before the tables, so that nobody copies a figure without its caveat. A title is
    written once for all its sections.
    """
    parts = [f"# {plain(report.title)}", NOTE]
    if report.missing:
        parts += ["## What is missing or doubtful", "\n".join(f"- {plain(sentence)}" for sentence in report.missing)]
    title = ""
    for section in sections:
        if section.title != title:
            title = section.title
            parts.append(f"## {plain(title)}")
        if section.heading:
            parts.append(f"### {plain(section.heading)}")
        for block in section.blocks:
            parts.append(plain(block) if isinstance(block, str) else block.markdown())
    return "\n\n".join(parts) + "\n"


class CaptionedTable(NamedTuple):
    """A table of the report, with its section's title and heading."""

    caption: str
    table: Table


def tables_of(sections: Sequence[Section]) -> list[CaptionedTable]:
    """All tables except sources, each with its caption; sources are folders and commands, not figures."""
    tables: list[CaptionedTable] = []
    for section in sections:
        if section.title == SOURCES:
            continue
        caption = f"{section.title}: {section.heading}" if section.heading else section.title
        tables += [CaptionedTable(caption, block) for block in section.blocks if isinstance(block, Table)]
    return tables


def latex_of(report: Report, sections: Sequence[Section]) -> str:
    """The main table and all other tables in LaTeX, each a `table` with the rules of `booktabs`."""
    parts = ["% Needs \\usepackage{booktabs}. " + on_one_line(NOTE)]
    if report.groups:
        parts.append(_main_table(report.groups))
    parts += [table.latex(caption) for caption, table in tables_of(sections)]
    return "\n\n".join(parts) + "\n"


def _main_table(groups: Sequence[ReportedGroup]) -> str:
    """A paper's main table: systems by tasks, with marks for the best score and for differences to the first run.

    The marks are of tests that are corrected per column, since a reader of such a table compares within a column.
    """
    caption = (
        "Scores are times 100, the best in bold. A dagger marks scores better than the first run of the column, a "
        f"double dagger worse scores (p < {SIGNIFICANT}, Holm). Failed questions score 0. Unfinished runs are not bold."
    )
    head = ["system"]
    # By the names of the runs, in the order in which they first occur; a run may be missing in a group.
    rows: dict[str, list[str]] = {}
    for number, group in enumerate(groups):
        head.append(group.column)
        for name, cell in _main_column(group).items():
            row = rows.setdefault(name, [tex(name), *["-"] * len(groups)])
            row[1 + number] = cell
    return Table(head, rows.values()).latex(caption, str)


def _main_column(group: ReportedGroup) -> dict[str, str]:
    """The headline scores of a group in LaTeX, by the names of its runs.

    Scores that look equal are all bold, since the figures behind them do not tell the systems apart.
    """
    best = _best_mean(group)
    cells = {}
    for run, difference in zip(group.runs, group.to_first(group.headline), strict=True):
        cell = _mean_cell(run, group.headline)
        if not cell:
            cells[run.name] = "-"
            continue
        if cell == best and run.finished:
            cell = rf"\textbf{{{cell}}}"
        if difference is not None:
            cell += _MARKS.get(verdict(difference), "")
        cells[run.name] = with_caveats(cell, run)
    return cells


def _mean_cell(run: ReportedRun, metric: str) -> str:
    """The mean of a score, times 100; "" if no question has one."""
    mean = run.figures.scores[metric]["mean"]
    return "" if mean is None else f"{100 * mean:z.1f}"


def _best_mean(group: ReportedGroup) -> str:
    """The highest headline of a finished run, as it is shown, since equal figures are equally good; "" if all are 0.

    A stopped run can't be the best: the questions that it has answered may be the easy ones.
    """
    means = []
    for run in group.runs:
        mean = _mean_cell(run, group.headline)
        if run.finished and mean:
            means.append(mean)
    best = max(means, key=float, default="")
    # A run that got nothing right is not the best.
    return "" if best and float(best) == 0 else best
