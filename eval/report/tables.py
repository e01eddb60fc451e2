"""The tables of a report, on the page and in the files of tables alone (Markdown and LaTeX).

All figures come from the report's JSON, without any date, so the same results give the same bytes.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from tripletune.core.files import flatten
from tripletune.core.tables import Table
from tripletune.eval import find_metrics
from tripletune.eval.report.cells import Blocks, asked_of, interval_cell, name_of, number_cell, with_caveats
from tripletune.eval.report.confidence_tables import confidence_blocks
from tripletune.eval.report.contents import OtherEvaluation, Report, ReportedFolder, ReportedGroup, ReportedRun
from tripletune.eval.report.loop_tables import (
    cost_blocks,
    decisions_blocks,
    facts_blocks,
    granularity_blocks,
    latency_blocks,
    recall_blocks,
    rounds_blocks,
    support_blocks,
)
from tripletune.eval.report.seeds import SeedRow
from tripletune.eval.rescore import beyond_ranking
from tripletune.eval.statistics import NO_DIFFERENCE, P_NOTE, SIGNIFICANT, Difference, Interval, p_cell

# By what the headline is shown separately: the benchmark's type of question, or the number of supporting passages.
SliceKind = Literal["type", "hops"]
ALL_TASKS = "All tasks"
SOURCES = "Where the figures come from"
# Tables in `metrics.json` of other evaluations, and the beginnings of the names of the figures that they show.
_TABLES = {
    "control_table": "controls/",
    "rules_table": "rules/",
    "rules_differences_table": "rules/",
    "seeds/rules_table": "seeds/",
    "seeds/rules_differences_table": "seeds/",
}
_CAPTIONS = {"seeds/rules_table": "Means over training seeds; intervals are over seeds and questions:"}

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
    """All sections of a report, from which page, Markdown, LaTeX and CSV files are made.

    Sections of one group follow each other, since the files of tables print a title only where it changes.
    """
    sections = _overview_sections(report.groups)
    for group in report.groups:
        sections += _group_sections(group)
    sections += [_other_section(other) for other in report.others]
    sections.append(_sources_section(report))
    return sections


def _overview_sections(groups: Sequence[ReportedGroup]) -> list[Section]:
    """Headline scores of runs by name: one column per task, and the mean over tasks if none is missing.

    There is no such table if every run is in one group alone: its group's own table then says the same.
    """
    occurrences: Counter[str] = Counter()
    for group in groups:
        occurrences.update(set(group.names))
    if not any(count > 1 for count in occurrences.values()):
        return []
    # A run that is in one group alone has its row, too: its column would otherwise lack it without a word.
    rows = [_overview_row(name, groups) for name in occurrences]
    head = ["", *(group.column for group in groups)]
    if _have_one_scale(groups):
        head.append("mean")
    return [Section(ALL_TASKS, "", [Table(head, rows)])]


def _overview_row(name: str, groups: Sequence[ReportedGroup]) -> list[str]:
    """The headline scores of the runs of one name, and their mean if it has a meaning.

    The mean needs a finished run on every task: a mean with a stopped run would depend on the questions that it has
    answered.
    """
    cells = [name]
    means: list[float | None] = []
    for group in groups:
        run = group.run_named(name)
        if run is None:
            cells.append("-")
            means.append(None)
        else:
            score = run.figures.scores[group.headline]
            cells.append(with_caveats(interval_cell(score), run))
            means.append(score["mean"] if run.finished else None)
    if _have_one_scale(groups):
        cells.append(_mean_of_all(means))
    return cells


def _mean_of_all(means: Sequence[float | None]) -> str:
    """The mean over all tasks, times 100; a dash if one is missing, since means over fewer tasks do not compare."""
    total = 0.0
    for mean in means:
        if mean is None:
            return "-"
        total += 100 * mean
    return number_cell(total / len(means))


def _have_one_scale(groups: Sequence[ReportedGroup]) -> bool:
    """Whether a mean over groups has a meaning: not over different metrics, nor over two settings of one task."""
    headlines = {group.headline for group in groups}
    tasks = {group.task for group in groups}
    return len(headlines) == 1 and len(tasks) == len(groups)


def _group_sections(group: ReportedGroup) -> Iterator[Section]:
    """The sections of a group, in the order of reading: setting, scores, why they differ, what they cost.

    A section without blocks is left out: most tables exist only for some systems (CIRAG's facts) or some benchmarks
    (types of question).
    """
    runs = group.runs
    setting: Blocks = [about_of(group), Table(["setting", "value"], group.setting), _SHARED]
    sections = {
        "Setting": setting,
        "Scores": _score_blocks(group),
        "Seeds together": _seed_blocks(group),
        "All differences": _pair_blocks(group),
        "By type of question": _slice_blocks(group, "type"),
        "By number of hops": _slice_blocks(group, "hops"),
        "Which granularity answered": granularity_blocks(runs, group.metrics),
        "Facts that were kept": facts_blocks(runs),
        "Supporting passages found": recall_blocks(runs),
        "What recall buys": support_blocks(runs, group.headline),
        "When to say I don't know": confidence_blocks(runs, group.headline),
        "Rounds": rounds_blocks(runs),
        "Calls and tokens": cost_blocks(runs),
        "Latency": latency_blocks(runs),
        "Decisions": decisions_blocks(runs),
    }
    for heading, blocks in sections.items():
        if blocks:
            yield Section(group.title, heading, blocks)


def about_of(group: ReportedGroup) -> str:
    """A sentence on a group: task and number of questions, runs, and the models, days and code of their results.

    It stands first in the group's setting and on its page, so that figures of other code or another day are seen as
    such.
    """
    settings = dict(group.setting)
    runs = "1 run" if len(group.runs) == 1 else f"{len(group.runs)} runs"
    sentence = f"{group.title}; {runs}"
    for name in ("model", "date", "code"):
        if settings[name] != "-":
            sentence += f"; {name}: {settings[name]}"
    return sentence


def _score_blocks(group: ReportedGroup) -> Blocks:
    """All scores of all runs, and each difference to the first run.

    A metric that some questions lack gets a sentence, since its mean is over fewer questions than the table says.
    """
    head = ["run", "questions", "failed"]
    rows: list[list[Any]] = [[run.name, asked_of(run), run.figures.errors] for run in group.runs]
    for metric in group.metrics:
        head.append(metric)
        for row, run in zip(rows, group.runs, strict=True):
            row.append(interval_cell(run.figures.scores[metric]))
        if len(group.runs) > 1:
            head += [f"minus {group.runs[0].name}", "p"]
            for row, cells in zip(rows, _difference_cells(group, metric), strict=True):
                row += cells
    metrics = find_metrics()
    explained: Blocks = [f"{name}: {metrics[name].explanation}." for name in group.metrics if name in metrics]
    for metric in group.metrics:
        scored = max(run.figures.scores[metric]["n"] for run in group.runs)
        if scored < group.questions:
            explained.append(f"{metric} is known for {scored} of {group.questions:,} questions.")
    for run in group.runs:
        mauve = run.figures.mauve
        if mauve:
            explained.append(
                f"MAUVE of {run.name}: {100 * mauve.mauve:.1f}, over {mauve.texts:,} answers with features of "
                f"{mauve.model}; comparable with the same model and number of answers."
            )
        if beyond := beyond_ranking(group.metrics, run.figures.longest):
            explained.append(
                f"{', '.join(beyond)} of {run.name}: its longest ranking has {run.figures.longest} passages, and only "
                "these count."
            )
    return [Table(head, rows), *explained]


def _difference_cells(group: ReportedGroup, metric: str) -> list[list[str]]:
    """For each run, its difference to the first run and p, corrected for this column alone.

    The first run, and a run without a common question, have two empty cells, so that the columns of a row stay aligned.
    """
    cells = []
    for difference in group.to_first(metric):
        if difference is None:
            cells.append(["", ""])
        else:
            cells.append([interval_cell(difference, sign="+"), p_cell(difference)])
    return cells


def _seed_blocks(group: ReportedGroup) -> Blocks:
    """One row for each system, over its seeds; nothing if no system has several seeds."""
    if not group.seeds:
        return []
    head = ["system", "seeds"]
    for metric in group.metrics:
        head += [metric, "of each seed", f"minus {group.seeds[0].name}", "p", "verdict"]
    rows = []
    for system in group.seeds:
        row = [system.name, ", ".join(map(str, system.seeds)) or "one run"]
        for metric in group.metrics:
            means = ["-" if mean is None else f"{100 * mean:.1f}" for mean in system.of_seeds[metric]]
            row += [interval_cell(system.scores[metric]), ", ".join(means), *_seed_difference(system, metric)]
        rows.append(row)
    sentence = (
        "Runs that differ in the training seed alone, or in the seed of their replies alone, are one system. Intervals "
        "and p are about other seeds and other questions (two-level bootstrap); those of a system with one seed say "
        "nothing about another seed."
    )
    return [Table(head, rows), sentence]


def _seed_difference(system: SeedRow, metric: str) -> list[str]:
    """A system's difference to the first one, p, and the verdict in words that say when it is about one seed."""
    difference = system.differences[metric]
    if difference is None:
        return ["", "", ""]
    words = difference["verdict"]
    if len(system.runs) == 1 and words != NO_DIFFERENCE:
        words += ", of one seed"
    return [interval_cell(difference, sign="+"), p_cell(difference), words]


def _pair_blocks(group: ReportedGroup) -> Blocks:
    """Differences of the headline between all pairs of runs; for two runs, the table of scores has the difference."""
    if len(group.runs) < 3:
        return []
    rows = []
    for run, differences in zip(group.runs, group.pairs[group.headline], strict=True):
        rows.append([name_of(run), *map(_pair_cell, differences)])
    about = f"{group.headline}: row minus column, with p in brackets; p of {SIGNIFICANT} or more means {NO_DIFFERENCE}."
    return [about, Table(["", *group.names], rows)]


def _pair_cell(difference: Difference | None) -> str:
    """A difference, times 100, with its p in brackets; "" on the diagonal and for runs without a common question."""
    if difference is None:
        return ""
    return f"{100 * difference['mean']:+z.1f} ({p_cell(difference)})"


def _slice_blocks(group: ReportedGroup, kind: SliceKind) -> Blocks:
    """The headline by type of question ("type"), or by number of supporting passages ("hops").

    Returns:
        A table with a row per run and a column per kind, whose head has the number of questions; nothing if the
        questions are all of one kind. Questions of unknown kind are in no column, and a sentence counts them.
    """
    by_run = [_headline_slices(run, group.headline, kind) for run in group.runs]
    # The most questions of each kind that a run has, and of all kinds: a run that was stopped has fewer.
    counts: dict[str, int] = {}
    most = 0
    for slices in by_run:
        total = 0
        for name, score in slices.items():
            counts[name] = max(counts.get(name, 0), score["n"])
            total += score["n"]
        most = max(most, total)
    if not counts:
        return []
    names = sorted(counts)
    rows = []
    for run, slices in zip(group.runs, by_run, strict=True):
        rows.append([name_of(run), *(interval_cell(slices.get(name)) for name in names)])
    title = f"{group.headline}, the headline"
    if kind == "hops":
        title += "; the number of hops is the number of supporting passages"
    blocks: Blocks = [f"{title}:", Table(["run", *(f"{name} ({counts[name]:,})" for name in names)], rows)]
    left_out = group.questions - most
    if left_out:
        reason = "their kind is not known"
        if kind == "hops":
            reason = "none of their supporting passages is known: the number of hops may be 0"
        blocks.append(f"{left_out:,} of {group.questions:,} questions are in no column, since {reason}.")
    return blocks


def _headline_slices(run: ReportedRun, headline: str, kind: SliceKind) -> dict[str, Interval]:
    """A run's headline by kind of question; empty if there is only one kind."""
    slices = run.figures.by_type if kind == "type" else run.figures.by_hops
    return {name: scores[headline] for name, scores in (slices or {}).items()}


def _other_section(other: OtherEvaluation) -> Section:
    """The figures of another evaluation, as its `metrics.json` has them.

    Their names are not known here, so a value is shown by its type: intervals in one table, numbers and texts in
    another; switches say nothing to a reader.
    """
    if other.metrics is None:
        return Section(other.name, "", ["Not finished."])
    intervals: list[list[str]] = []
    numbers: list[list[str]] = []
    figures = flatten(other.metrics, "/")
    for name, value in figures.items():
        if name in _TABLES or name.startswith(tuple(_TABLES.values())):
            continue
        if isinstance(value, Mapping):
            intervals.append([name, interval_cell(cast(Interval, value)), str(value.get("n", "-"))])
        elif isinstance(value, float):
            numbers.append([name, f"{value:.4g}"])
        elif isinstance(value, (str, int)) and not isinstance(value, bool):
            numbers.append([name, str(value)])
    blocks: Blocks = []
    for name in _TABLES:
        if name in figures:
            if name in _CAPTIONS:
                blocks.append(_CAPTIONS[name])
            blocks.append(Table(*figures[name]))
    if intervals:
        blocks.append(Table(["score", "times 100", "n"], intervals))
    if numbers:
        blocks.append(Table(["figure", "value"], numbers))
    return Section(f"{other.name}, another evaluation", "", blocks)


def _sources_section(report: Report) -> Section:
    """Folder and command of each run, once even if it is in several groups, so that every figure can be made again."""
    folders: dict[str, ReportedFolder] = {}
    for group in report.groups:
        folders |= {run.folder: run for run in group.runs}
    rows = []
    for source in (*folders.values(), *report.others):
        rows.append([source.name, source.folder, shlex.join(source.command or ())])
    return Section(SOURCES, "", [Table(["run", "folder", "command"], rows)])
