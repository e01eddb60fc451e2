"""`tripletune eval report` and `curve` (and `compare`): show the results of finished runs.

A report is a folder with one HTML page, its tables in Markdown and LaTeX, and all figures. A comparison is a table of
differences to the first run, paired by question or text. A curve is a picture of a training run's logs.
"""

from __future__ import annotations

import argparse
import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from tripletune.core.files import check_folder, new_file, new_folder, write_json, write_text
from tripletune.core.options import convert, not_one_of
from tripletune.eval.costs import unused_roles
from tripletune.eval.report.compare import compare
from tripletune.eval.report.contents import build_report
from tripletune.eval.report.curve import MALFORMED_OUTPUT, Logged, draw_curve, panels_of, read_curve
from tripletune.eval.report.export import CaptionedTable, latex_of, markdown_of, tables_of
from tripletune.eval.report.groups import group_runs
from tripletune.eval.report.page import write_page
from tripletune.eval.report.runs import Run, named_folder, output_folders, read_run
from tripletune.eval.report.setting import read_across_names
from tripletune.eval.report.tables import ALL_TASKS, sections_of
from tripletune.eval.suites import show_table
from tripletune.rag.costs import read_prices

# The programs of this folder, which `eval/__main__.py` calls by their names.
__all__ = ["compare", "curve", "report"]

logger = logging.getLogger(__name__)
PAGE = "report.html"
TABLES = "report.md"
LATEX = "report.tex"
FIGURES = "report.json"
CSV = "csv"
# What an earlier report has left; only the first name shows that the folder is a report.
_MADE = (FIGURES, PAGE, TABLES, LATEX, CSV, "*.png")


def report(args: argparse.Namespace, console: Console) -> None:
    """`tripletune eval report`: write page, tables and figures; the same results give the same bytes.

    The default place is in the first folder. Other evaluations have no questions to compare and are shown as they are.
    A role in `--price` that no call has, as after a typing error, is named among what is missing.
    """
    if args.traces < 0:
        raise ValueError(f"--traces {args.traces}: must be at least 0")
    output = Path(args.output or named_folder(args.folders[0]).folder / "report")
    check_folder(output, _MADE, overwrite=True)
    prices = read_prices(args.price)
    runs = []
    for spec in args.folders:
        runs += [read_run(folder, prices) for folder in output_folders(spec)]
    runs = _with_headlines(runs, args.metric)
    with_questions = [run for run in runs if len(run.rows)]
    groups = group_runs(with_questions, read_across_names(args.across), args.baseline)
    contents = build_report(runs, groups, args.title)
    roles: set[str] = set()
    for run in runs:
        roles.update(run.roles)
    for role in unused_roles(prices, roles):
        contents.missing.append(f"--price {role}=…: unknown role in these runs.")
    sections = sections_of(contents)
    tables = tables_of(sections)
    with new_folder(output, _MADE, overwrite=True) as scratch:
        write_page(scratch / PAGE, contents, groups, sections, args.traces, args.corpus)
        write_text(scratch / TABLES, markdown_of(contents, sections))
        write_text(scratch / LATEX, latex_of(contents, sections))
        (scratch / CSV).mkdir()
        for number, (caption, table) in enumerate(tables, 1):
            name = re.sub(r"\W+", "_", caption)[:80].strip("_")
            write_text(scratch / CSV / f"{number:03d}_{name}.csv", table.csv())
        write_json(scratch / FIGURES, contents.to_json())
    if args.wandb:
        _log_to_wandb(args.wandb, tables)
    for sentence in contents.missing:
        logger.warning("%s", sentence)
    for caption, table in tables:
        if caption == ALL_TASKS:
            show_table(console, "all tasks; scores are times 100, with 95 % intervals", table.head, table.rows)
    results = "1 result" if len(runs) == 1 else f"{len(runs)} results"
    console.print(f"{output / PAGE}: {results}")


def _with_headlines(runs: Sequence[Run], text: str | None) -> list[Run]:
    """The runs with the headlines of `--metric`, such as "f1" for all tasks, or "asqa=rouge_lsum,arc=accuracy".

    Raises:
        ValueError: No run is of a named task, or a run lacks the score that would be its headline.
    """
    of_task: dict[str, str] = {}
    for item in convert(text, list[str]) if text else ():
        task, _, metric = item.rpartition("=")
        of_task[task] = metric
    tasks = {run.task for run in runs if len(run.rows)}
    problems = [not_one_of("--metric", task, sorted(tasks)) for task in of_task if task and task not in tasks]
    named = []
    for run in runs:
        headline = of_task.get(run.task, of_task.get("", ""))
        if headline and len(run.rows) and headline not in run.scores:
            problems.append(not_one_of(f"--metric {headline}: {run.folder}", headline, run.scores))
        named.append(replace(run, headline=headline))
    if problems:
        raise ValueError("; ".join(problems))
    return named


def _log_to_wandb(project: str, tables: Sequence[CaptionedTable]) -> None:
    """Send captioned tables to W&B; with `WANDB_MODE=offline` nothing is sent."""
    import wandb

    with wandb.init(project=project, job_type="report") as run:
        logged = {}
        for number, (caption, table) in enumerate(tables, 1):
            # W&B adds a prefix to each name and allows at most 128 characters.
            name = f"{number:03d} {caption}"[:90]
            logged[name] = wandb.Table(columns=table.head, data=table.rows)
        run.log(logged)


def curve(args: argparse.Namespace, console: Console) -> None:
    """`tripletune eval curve`: draw the curve of `args.run_folder` as `args.output`, and print the evaluations.

    The picture appears complete or not at all, so it can be drawn again while the training runs.
    """
    output = Path(args.output or Path(args.run_folder) / "learning_curve.png")
    if output.suffix.lower() != ".png":
        raise ValueError(f"--output {output}: its name must end in .png")
    logged = read_curve(args.run_folder)
    picture = draw_curve(logged.losses, logged.evaluations)
    with new_file(output) as scratch:
        scratch.write_bytes(picture)
    if logged.evaluations:
        _show_evaluations(logged.evaluations, console)
    else:
        console.print("the run has no evaluation yet: the picture shows only its training")
    console.print(f"written to {output}")


def _show_evaluations(evaluations: list[Logged], console: Console) -> None:
    """Print a table of the evaluations of a training run, one row per step.

    The columns are the scores that the picture shows; a score that an evaluation lacks is a dash.
    """
    names: list[str] = []
    for scores in panels_of(evaluations).values():
        names += scores
    if any(MALFORMED_OUTPUT in evaluation for evaluation in evaluations):
        names.append(MALFORMED_OUTPUT)
    rows = []
    for evaluation in evaluations:
        cells = [str(evaluation["step"])]
        cells.append(f"{evaluation['loss']:.4f}" if "loss" in evaluation else "-")
        cells += [f"{100 * evaluation[name]:.1f}" if name in evaluation else "-" for name in names]
        rows.append(cells)
    show_table(console, "evaluations while training; scores are times 100", ("step", "loss", *names), rows)
