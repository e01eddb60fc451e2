"""The tables of a report as text: one page in Markdown, and tables in LaTeX, the first one in a paper's form."""

from __future__ import annotations

from collections.abc import Sequence

from tripletune.core.tables import Table, on_one_line, plain, tex
from tripletune.eval.report.cells import with_caveats
from tripletune.eval.report.contents import Report, ReportedGroup, ReportedRun
from tripletune.eval.report.tables import NOTE, SOURCES, Section
from tripletune.eval.statistics import SIGNIFICANT, correct_table, verdict

# Verdict on the difference to the first run -> its mark.
_MARKS = {"better": r"$^\dagger$", "worse": r"$^\ddagger$"}


def markdown_of(report: Report, sections: Sequence[Section]) -> str:
    """The tables as a page in Markdown."""
    parts = [f"# {plain(report.title)}", NOTE]
    if report.missing:
        parts += ["## What is missing", "\n".join(f"- {plain(sentence)}" for sentence in report.missing)]
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


def tables_of(sections: Sequence[Section]) -> list[tuple[str, Table]]:
    """All tables except sources, each with its caption."""
    tables = []
    for section in sections:
        if section.title == SOURCES:
            continue
        caption = f"{section.title}: {section.heading}" if section.heading else section.title
        tables += [(caption, block) for block in section.blocks if isinstance(block, Table)]
    return tables


def latex_of(report: Report, sections: Sequence[Section]) -> str:
    """The main table and all other tables in LaTeX, each a `table` with the rules of `booktabs`."""
    parts = ["% Needs \\usepackage{booktabs}. " + on_one_line(NOTE)]
    if report.groups:
        parts.append(_main_table(report.groups))
    parts += [table.latex(caption) for caption, table in tables_of(sections)]
    return "\n\n".join(parts) + "\n"


def _main_table(groups: Sequence[ReportedGroup]) -> str:
    """A paper's main table: systems by tasks, with marks for the best score and for differences to the first run."""
    caption = (
        "Scores are times 100, the best in bold. A dagger marks scores better than the first run of the column, a "
        f"double dagger worse scores (p < {SIGNIFICANT}, Holm). Failed questions score 0. Unfinished runs are not bold."
    )
    columns = [_main_column(group) for group in groups]
    names: dict[str, None] = {}
    for group in groups:
        names |= dict.fromkeys(run.name for run in group.runs)
    rows = [[tex(name), *(column.get(name, "-") for column in columns)] for name in names]
    return Table(["system", *(group.column for group in groups)], rows).latex(caption, str)


def _main_column(group: ReportedGroup) -> dict[str, str]:
    """The headline scores of a group in LaTeX, by the names of its runs."""
    verdicts = _verdicts(group)
    means = {}
    for run in group.runs:
        mean = run.figures.scores[group.headline]["mean"]
        if mean is not None:
            means[run.name] = f"{100 * mean:z.1f}"
    # Equal figures are equally good, so they are compared as they are shown.
    best = max((means[run.name] for run in group.runs if _can_be_best(run, means)), key=float, default="")
    cells = {}
    for run in group.runs:
        if run.name not in means:
            continue
        cell = means[run.name]
        if cell == best and run.finished:
            cell = rf"\textbf{{{cell}}}"
        cells[run.name] = with_caveats(cell + _MARKS.get(verdicts[run.name], ""), run)
    return cells


def _can_be_best(run: ReportedRun, means: dict[str, str]) -> bool:
    return run.finished and run.name in means


def _verdicts(group: ReportedGroup) -> dict[str, str]:
    """The verdicts on the differences to the first run, corrected for this column alone; "" for the first run."""
    verdicts = dict.fromkeys((run.name for run in group.runs), "")
    differences = {}
    for run, row in zip(group.runs, group.pairs[group.headline]):
        if row[0] is not None:
            # A copy, since the correction of the whole matrix stays in the report.
            differences[run.name] = row[0].copy()
    correct_table(differences.values())
    return verdicts | {name: verdict(difference) for name, difference in differences.items()}
