"""The tables of a report, on the page and in the files of tables alone (Markdown and LaTeX).

All figures come from the report's JSON, without any date, so the same results give the same bytes.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from tripletune.core.files import flatten
from tripletune.core.tables import Table
from tripletune.eval import find_metrics
from tripletune.eval.report.cells import Blocks, asked_of, interval, name_of, number_of, with_caveats
from tripletune.eval.report.contents import OtherEvaluation, Report, ReportedFolder, ReportedGroup, ReportedRun
from tripletune.eval.report.loop_tables import (
    cost_blocks,
    decisions_blocks,
    facts_blocks,
    granularity_blocks,
    latency_blocks,
    recall_blocks,
    rounds_blocks,
)
from tripletune.eval.statistics import NO_DIFFERENCE, P_NOTE, SIGNIFICANT, Difference, Interval, correct_table, p_cell

SOURCES = "Where the figures come from"

NOTE = (
    "Scores, shares and recall are times 100. Brackets show a 95 % interval, by bootstrap over questions. "
    f"Differences are paired by question; {P_NOTE}, separately for each score."
)
_SHARED = (
    "Compared runs have equal values of all settings from data to max_answer_tokens that both use; top_k may also be "
    "the value of each system's paper. A setting that only one system has is part of that system."
)


@dataclass(frozen=True)
class Section:
    """The content under one heading; the heading is empty if the title suffices."""

    title: str
    heading: str
    blocks: Blocks


def sections_of(report: Report) -> list[Section]:
    """All tables of a report."""
    sections = _overview(report.groups)
    for group in report.groups:
        sections += _group(group)
    sections += [_other(other) for other in report.others]
    sections.append(_sources(report))
    return sections


def _overview(groups: Sequence[ReportedGroup]) -> list[Section]:
    """Headline scores of runs by name: one column per task, and the mean over tasks if none is missing."""
    columns = [{run.name: run for run in group.runs} for group in groups]
    names: dict[str, None] = {}
    for column in columns:
        names |= dict.fromkeys(column)
    shared = [name for name in names if sum(name in column for column in columns) > 1]
    if not shared:
        return []
    has_mean = _have_one_scale(groups)
    rows = []
    for name in shared:
        cells = [name]
        for group, column in zip(groups, columns):
            cells.append(_headline_cell(group, column.get(name)))
        if has_mean:
            cells.append(number_of(_mean_headline(groups, [column.get(name) for column in columns])))
        rows.append(cells)
    head = ["", *(group.column for group in groups)]
    if has_mean:
        head.append("mean")
    return [Section("All tasks", "", [Table(head, rows)])]


def _have_one_scale(groups: Sequence[ReportedGroup]) -> bool:
    """Whether a mean over groups has a meaning: not over different metrics, nor over two settings of one task."""
    headlines = {group.headline for group in groups}
    tasks = {group.task for group in groups}
    return len(headlines) == 1 and len(tasks) == len(groups)


def _headline_cell(group: ReportedGroup, run: ReportedRun | None) -> str:
    if run is None:
        return "-"
    return with_caveats(interval(run.figures.scores[group.headline]), run)


def _mean_headline(groups: Sequence[ReportedGroup], runs: Sequence[ReportedRun | None]) -> float | None:
    """The mean of the headline scores, times 100; None if a run is missing or not finished."""
    means = []
    for group, run in zip(groups, runs):
        mean = None if run is None or not run.finished else run.figures.scores[group.headline]["mean"]
        if mean is None:
            return None
        means.append(100 * mean)
    return sum(means) / len(means)


def _group(group: ReportedGroup) -> Iterator[Section]:
    """The sections of a group that have something to show."""
    runs = group.runs
    setting: Blocks = [about_of(group), Table(["setting", "value"], group.setting), _SHARED]
    sections = {
        "Setting": setting,
        "Scores": _scores(group),
        "All differences": _pairs(group),
        "By type of question": _slices(group, "type"),
        "By number of hops": _slices(group, "hops"),
        "Which granularity answered": granularity_blocks(runs, group.metrics),
        "Facts that were kept": facts_blocks(runs),
        "Supporting passages found": recall_blocks(runs),
        "Rounds": rounds_blocks(runs),
        "Calls and tokens": cost_blocks(runs),
        "Latency": latency_blocks(runs),
        "Decisions": decisions_blocks(runs),
    }
    for heading, blocks in sections.items():
        if blocks:
            yield Section(group.title, heading, blocks)


def about_of(group: ReportedGroup) -> str:
    """Warnings about a group's figures, shown first."""
    told = dict(group.setting)
    words = [f"{group.title}; {len(group.runs)} runs"]
    words += [f"{name}: {told[name]}" for name in ("model", "date", "code") if told[name] != "-"]
    return "; ".join(words)


def _scores(group: ReportedGroup) -> Blocks:
    """All scores of all runs, and each difference to the first run."""
    head = ["run", "questions", "failed"]
    rows: list[list[Any]] = [[run.name, asked_of(run), run.figures.errors] for run in group.runs]
    for metric in group.metrics:
        head.append(metric)
        for row, run in zip(rows, group.runs):
            row.append(interval(run.figures.scores[metric]))
        if len(group.runs) > 1:
            head += [f"minus {group.runs[0].name}", "p"]
            for row, cells in zip(rows, _difference_cells(group, metric)):
                row += cells
    blocks: Blocks = [Table(head, rows)]
    known = find_metrics()
    blocks += [f"{name}: {known[name].explanation}." for name in group.metrics if name in known]
    questions = max(run.questions for run in group.runs)
    for metric in group.metrics:
        scored = max(run.figures.scores[metric]["n"] for run in group.runs)
        if scored < questions:
            blocks.append(f"{metric} is known for {scored} of {questions:,} questions.")
    return blocks


def _difference_cells(group: ReportedGroup, metric: str) -> list[list[str]]:
    """For each run, its difference to the first run and p, corrected for this column alone."""
    # Copies, since the correction of the whole matrix stays in the report.
    differences = [None if row[0] is None else row[0].copy() for row in group.pairs[metric]]
    correct_table(difference for difference in differences if difference is not None)
    cells = []
    for difference in differences:
        if difference is None:
            cells.append(["", ""])
        else:
            cells.append([interval(difference, sign="+"), p_cell(difference)])
    return cells


def _pairs(group: ReportedGroup) -> Blocks:
    """Differences of the headline between all pairs of runs; for two runs, the table of scores has the difference."""
    if len(group.runs) < 3:
        return []
    rows = []
    for run, differences in zip(group.runs, group.pairs[group.headline]):
        rows.append([name_of(run), *map(_pair_cell, differences)])
    about = f"{group.headline}: row minus column, with p in brackets; p of {SIGNIFICANT} or more means {NO_DIFFERENCE}."
    return [about, Table(["", *(run.name for run in group.runs)], rows)]


def _pair_cell(difference: Difference | None) -> str:
    if difference is None:
        return ""
    return f"{100 * difference['mean']:+z.1f} ({p_cell(difference)})"


def _slices(group: ReportedGroup, kind: str) -> Blocks:
    """The headline by type of question ("type"), or by number of supporting passages ("hops")."""
    by_run = [(run.figures.by_type if kind == "type" else run.figures.by_hops) or {} for run in group.runs]
    # Of each kind of question, the most scores that a run has: a run that was stopped has fewer.
    counts: dict[str, int] = {}
    for slices in by_run:
        for name, scores in slices.items():
            counts[name] = max(counts.get(name, 0), scores[group.headline]["n"])
    if not counts:
        return []
    names = sorted(counts)
    rows = []
    for run, slices in zip(group.runs, by_run):
        cells = [interval(slices[name][group.headline]) if name in slices else "-" for name in names]
        rows.append([name_of(run), *cells])
    title = f"{group.headline}, the headline"
    if kind == "hops":
        title += "; the number of hops is the number of supporting passages"
    blocks: Blocks = [f"{title}:", Table(["run", *(f"{name} ({counts[name]:,})" for name in names)], rows)]
    questions = max(run.questions for run in group.runs)
    left_out = questions - max(_sliced(slices, group.headline) for slices in by_run)
    if left_out:
        blocks.append(f"{left_out:,} of {questions:,} questions are in no column, since their kind is not known.")
    return blocks


def _sliced(slices: Mapping[str, Mapping[str, Interval]], metric: str) -> int:
    """The number of questions in all slices of a run."""
    return sum(scores[metric]["n"] for scores in slices.values())


def _other(other: OtherEvaluation) -> Section:
    """The figures of another evaluation, as its `metrics.json` has them."""
    if other.metrics is None:
        return Section(other.name, "", ["Not finished."])
    intervals: list[list[str]] = []
    numbers: list[list[str]] = []
    for name, value in flatten(other.metrics, "/").items():
        # `control_table` shows the controls of records.
        if name == "control_table" or name.startswith("controls/"):
            continue
        if isinstance(value, Mapping):
            intervals.append([name, interval(cast(Interval, value)), str(value.get("n", "-"))])
        elif isinstance(value, float):
            numbers.append([name, f"{value:.4g}"])
        elif isinstance(value, (str, int)) and not isinstance(value, bool):
            numbers.append([name, str(value)])
    blocks: Blocks = []
    if "control_table" in other.metrics:
        blocks.append(Table(*other.metrics["control_table"]))
    if intervals:
        blocks.append(Table(["score", "times 100", "n"], intervals))
    if numbers:
        blocks.append(Table(["figure", "value"], numbers))
    return Section(f"{other.name}, another evaluation", "", blocks)


def _sources(report: Report) -> Section:
    folders: dict[str, ReportedFolder] = {}
    for group in report.groups:
        folders |= {run.folder: run for run in group.runs}
    rows = []
    for source in (*folders.values(), *report.others):
        rows.append([source.name, source.folder, shlex.join(source.command or ())])
    return Section(SOURCES, "", [Table(["run", "folder", "command"], rows)])
