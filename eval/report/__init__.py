"""`tripletune eval report`, `compare` and `curve`: show the results of finished runs.

A report is a folder with one HTML page, its tables in Markdown and LaTeX, and all figures. A comparison is a table of
differences to the first run, paired by question or text. A curve is a picture of a training run's logs.
"""

from __future__ import annotations

import argparse
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from tripletune.core.files import check_folder, check_new, new_file, new_folder, write_json, write_text
from tripletune.core.options import nearest
from tripletune.eval import find_metrics
from tripletune.eval.costs import read_prices, unused_roles
from tripletune.eval.report.curve import MALFORMED_OUTPUT, draw_curve, panels_of, read_curve
from tripletune.eval.report.groups import Group, compare_pairs, group_runs, sweeps_of
from tripletune.eval.report.page import write_page
from tripletune.eval.report.runs import Run, figures_of, named_folder, read_folder
from tripletune.eval.report.setting import check_across, check_comparable, setting_rows
from tripletune.eval.report.tables import latex_of, markdown_of, sections_of, tables_of
from tripletune.eval.results import METRICS, SCORES, SETTINGS, read_about, read_results, read_scored, run_folders
from tripletune.eval.statistics import P_NOTE, bootstrap_ratio, correct_table, p_cell, paired_ratio_difference, verdict
from tripletune.eval.suites import interval_cells, show_table
from tripletune.eval.suites.extraction import KIND
from tripletune.eval.triples import TextScores, shares_of

logger = logging.getLogger(__name__)
PAGE, TABLES, LATEX, FIGURES, CSV = "report.html", "report.md", "report.tex", "report.json", "csv"
_MADE = (FIGURES, PAGE, TABLES, LATEX, CSV, "*.png")
_COSTS = {"calls": "calls", "prompt_tokens": "tokens read", "completion_tokens": "tokens written"}


def report(args: argparse.Namespace, console: Console) -> None:
    """`tripletune eval report`: write page, tables and figures; the same results give the same bytes."""
    output = Path(args.output or named_folder(args.folders[0])[1] / "report")
    check_folder(output, _MADE, overwrite=True)
    prices = read_prices(args.price)
    found = [read_folder(one, prices) for spec in args.folders for one in _folders(spec)]
    groups = group_runs([one for one in found if len(one.rows)], check_across(args.across), args.baseline)
    figures = {"title": args.title, **build_report(found, groups)}
    unused = unused_roles(prices, [role for one in found for role in one.roles])
    figures["missing"] += [f"--price {role}=…: unknown role in these runs." for role in unused]
    sections = sections_of(figures)
    with new_folder(output, _MADE, overwrite=True) as scratch:
        write_page(scratch / PAGE, figures, groups, sections, args.traces, args.corpus)
        write_text(scratch / TABLES, markdown_of(figures, sections))
        write_text(scratch / LATEX, latex_of(figures, sections))
        (scratch / CSV).mkdir()
        for number, (caption, table) in enumerate(tables_of(sections), 1):
            name = re.sub(r"\W+", "_", caption)[:80].strip("_")
            write_text(scratch / CSV / f"{number:03d}_{name}.csv", table.csv())
        write_json(scratch / FIGURES, figures)
    if args.wandb:
        import wandb

        # W&B adds a prefix to each name and allows at most 128 characters. With `WANDB_MODE=offline` nothing is sent.
        tables = {f"{n:03d} {caption}"[:90]: table for n, (caption, table) in enumerate(tables_of(sections), 1)}
        with wandb.init(project=args.wandb, job_type="report") as run:
            run.log({name: wandb.Table(columns=table.head, data=table.rows) for name, table in tables.items()})
    for sentence in figures["missing"]:
        logger.warning("%s", sentence)
    console.print(f"{output / PAGE}: {len(found)} results")


def _folders(spec: str) -> list[str]:
    """The output folders inside a folder, the oldest run first; an output folder or NAME=FOLDER is not changed."""
    if not Path(spec).is_dir() or any((Path(spec) / name).is_file() for name in (SETTINGS, METRICS)):
        return [spec]
    began = {path: [one["began"] for one in read_about(path)[1].get("sessions", ())] for path in run_folders([spec])}
    return list(map(str, sorted(began, key=began.__getitem__)))


def build_report(found: Sequence[Run], groups: Sequence[Group]) -> dict[str, Any]:
    """All figures of a report: those of groups of runs and of other evaluations, and sentences on missing figures."""
    made = [_figures(group) for group in groups]
    others = [_about(one, one.name or one.folder) | {"metrics": one.metrics or None} for one in found if one.rows.empty]
    missing = [
        sentence
        for group in made
        for run in group["runs"]
        for sentence in _missing(run, f"{run['name']} on {group['task']}" if len(made) > 1 else run["name"])
    ]
    missing += [_unfinished(one, one["name"]) for one in others if one["metrics"] is None]
    return {"groups": made, "others": others, "missing": list(dict.fromkeys(missing))}


def _figures(group: Group) -> dict[str, Any]:
    reference = group.runs[0]
    return {
        "task": reference.task,
        "metrics": group.metrics,
        "told": group.told,
        "setting": setting_rows(group.runs, group.names),
        "runs": [
            {
                **_about(run, name),
                "system": run.system,
                "ablations": ablations,
                "finished": run.finished,
                "unshared": [name for name in run.scores if name not in group.metrics],
                "figures": figures_of(run),
            }
            for run, name, ablations in zip(group.runs, group.names, group.ablations)
        ],
        "pairs": compare_pairs(group),
        "ablations": group.in_paper_order(),
        "sweeps": sweeps_of(group),
    }


def _about(run: Run, name: str) -> dict[str, Any]:
    told = {"name": name, "folder": run.folder, "command": run.about.get("command") or None, "settings": run.settings}
    return told | {"questions": run.results, "expected": run.about.get("questions")}


def _unfinished(run: Mapping[str, Any], name: str) -> str:
    of = f" of {run['expected']:,}" if run["expected"] else ""
    return (
        f"{name} is not finished: it has {run['questions']:,}{of} questions. Its figures count only these; run its "
        "command again to continue."
    )


def _missing(run: Mapping[str, Any], name: str) -> list[str]:
    figures, found = run["figures"], [] if run["finished"] else [_unfinished(run, name)]
    if figures["errors"]:
        found.append(f"{name}: {figures['errors']:,} questions failed; they count as 0 in every score and recall.")
    if not figures["recall"] and figures["rounds"]["mean"]["mean"]:
        found.append(f"{name} has no gold links (--gold), so the recall of its passages is not known.")
    if run["unshared"]:
        found.append(f"{name} has {', '.join(run['unshared'])}, which other runs of the task lack: score those, too.")
    return found


def compare(args: argparse.Namespace, console: Console) -> None:
    """`tripletune eval compare`: print a comparison, and write it to `args.output`; see `compare_folders`."""
    folders = [one for spec in args.folders for one in _folders(spec)]
    if args.output:
        check_new(args.output, [one for each in folders for one in _seeds(each)])
    comparison = compare_folders(folders, args.metric, check_across(args.across))
    _show(comparison, console)
    if args.output:
        write_json(args.output, comparison)


def compare_folders(
    folders: Sequence[str | Path], metric: str | None = None, across: Collection[str] = ()
) -> dict[str, Any]:
    """Compare runs with the first run, question by question or text by text.

    Args:
        folders: Output folders, all of `tripletune eval run` or all of `extraction`; `A,B,C` are seeds of one system.
        metric: The score to compare, for `extraction` also the start of several names; None takes the headline of the
            task, or all scores of `extraction`.
        across: Names of `setting.EQUAL` in which the runs may differ.
    """
    groups = [_seeds(one) for one in folders]
    found = {one: _finished(one) for seeds in groups for one in seeds}
    heads = {one: run.metrics for one, run in found.items()}
    tasks = {one: KIND if head.get("evaluation") == KIND else str(head.get("task", "")) for one, head in heads.items()}
    if other := [one for one, task in tasks.items() if not task]:
        raise ValueError(f"{other[0]} is not the output of a finished `tripletune eval run` or `extraction`")
    if len(what := sorted(set(tasks.values()))) > 1:
        raise ValueError(f"the runs are of different tasks ({', '.join(what)}): compare runs of one task")
    texts = what[0] == KIND
    check_comparable([[found[one] for one in seeds] for seeds in groups], across)
    unit = "text" if texts else "question"

    def parts_of(row: Mapping[str, Any]) -> Mapping[str, tuple[float, float]]:
        if texts:
            return shares_of(TextScores.from_json(row))
        return {name: (score, 1.0) for name, score in row["scores"].items()}

    rows = [read_results(Path(one) / SCORES) if texts else read_scored(one, "scores") for one in heads]
    runs = [{row["id"]: parts_of(row) for row in one} for one in rows]
    failures = {one: head.get("failed", head.get("counts", {}).get("errors", 0)) for one, head in heads.items()}
    common = [name for name in runs[0] if all(name in other for other in runs[1:])]
    if empty := [one for one, run in zip(heads, runs) if not run]:
        raise ValueError(f"{empty[0]}: the results are empty; run the same command again")
    if not common:
        raise ValueError(f"the runs have no {unit} in common: were they made from different data?")
    if any(len(other) != len(common) for other in runs):
        logger.warning("only %d %ss are compared: those that all runs have", len(common), unit)
    metric = metric if texts else metric or heads[groups[0][0]]["primary"]
    # Soft scores exist only on request, and scores of rankings only for questions with known gold passages.
    having = {
        name: [item for item in common if all(name in run[item] for run in runs)]
        for name in dict.fromkeys(name for item in common for name in runs[0][item])
    }
    known = [name for name, items in having.items() if items]
    chosen = [name for name in known if metric is None or name == metric or name.startswith(f"{metric}/")]
    if not chosen:
        raise ValueError(f"no metric {metric!r} that all runs have{nearest(str(metric), known)}: {', '.join(known)}")
    scores: dict[str, list[dict[str, Any]]] = {}
    for name in chosen:
        if len(having[name]) < len(common):
            logger.warning("%s: compared on %d of %d %ss", name, len(having[name]), len(common), unit)
        columns = {one: np.array([run[item][name] for item in having[name]]).T for one, run in zip(heads, runs)}
        means = [np.mean([columns[one] for one in seeds], 0) for seeds in groups]
        scores[name] = [
            {
                "score": bootstrap_ratio(*column),
                "seeds": [bootstrap_ratio(*columns[one])["mean"] for one in seeds],
                "difference": paired_ratio_difference(means[0], column) if number else None,
            }
            for number, (column, seeds) in enumerate(zip(means, groups))
        ]
    correct_table(one["difference"] for found in scores.values() for one in found[1:])
    about = []
    for spec, seeds in zip(folders, groups):
        names = {heads[one].get("system") or heads[one]["model"] for one in seeds}
        costs = [heads[one][f"cost_per_{unit}"] for one in seeds]
        cost = {key: sum(one[key] for one in costs) / len(costs) for key in costs[0] if all(key in c for c in costs)}
        failed = sum(failures[one] for one in seeds)
        about.append({"folder": str(spec), "name": ", ".join(sorted(names)), "cost": cost, "failed": failed})
    return {"what": what[0], "unit": unit, "items": len(common), "runs": about, "scores": scores}


def _seeds(spec: str | Path) -> list[str]:
    """The distinct folders of `A,B,C`; the name of a single folder may have a comma."""
    return [str(spec)] if Path(spec).exists() else list(dict.fromkeys(str(spec).split(",")))


def _finished(folder: str) -> Run:
    if not (Path(folder) / METRICS).is_file():
        raise FileNotFoundError(f"{folder} has no {METRICS}, so it is not the output of a finished `tripletune eval`")
    return Run(folder, "", *read_about(Path(folder)))


def _show(comparison: Mapping[str, Any], console: Console) -> None:
    unit = comparison["unit"]
    for number, run in enumerate(comparison["runs"], 1):
        cost = ", ".join(f"{run['cost'][name]:.1f} {title}" for name, title in _COSTS.items() if name in run["cost"])
        console.print(f"run {number}: {run['folder']} ({run['name']}), per {unit}: {cost or '-'}")
    rows = []
    for name, found in comparison["scores"].items():
        for number, one in enumerate(found, 1):
            gap = one["difference"]
            cells = (*interval_cells(gap, form="+z.1f"), p_cell(gap), verdict(gap)) if gap else ("", "", "", "")
            failed = str(comparison["runs"][number - 1]["failed"])
            rows.append((name if number == 1 else "", str(number), failed, *interval_cells(one["score"]), *cells))
    heads = ("score", "run", "failed", "mean", "95 % interval", "minus run 1", "95 % interval", "p", "than run 1")
    show_table(console, f"{comparison['what']}, {comparison['items']} {unit}s", heads, rows, f"{unit}s")
    known = find_metrics()
    for name, found in comparison["scores"].items():
        for number, one in enumerate(found, 1):
            if len(one["seeds"]) > 1:
                means = ", ".join(f"{100 * mean:.1f}" for mean in one["seeds"])
                console.print(f"run {number}, {name} of each seed: {means}.")
        if name in known:
            console.print(f"{name}: {known[name].explanation}.")
    console.print(f"Differences to run 1 are paired by {unit}; {P_NOTE}.")


def curve(args: argparse.Namespace, console: Console) -> None:
    """`tripletune eval curve`: draw the curve of `args.run_folder` as `args.output`, and print the evaluations."""
    output = Path(args.output or Path(args.run_folder) / "learning_curve.png")
    if output.suffix.lower() != ".png":
        raise ValueError(f"--output {output}: its name must end in .png")
    losses, evaluations = read_curve(args.run_folder)
    picture = draw_curve(losses, evaluations)
    with new_file(output) as scratch:
        scratch.write_bytes(picture)
    if evaluations:
        names = [name for panel in panels_of(evaluations).values() for name in panel]
        names += [MALFORMED_OUTPUT] * any(MALFORMED_OUTPUT in row for row in evaluations)
        rows = [
            [str(row["step"]), f"{row['loss']:.4f}" if "loss" in row else "-"]
            + [f"{100 * row[name]:.1f}" if name in row else "-" for name in names]
            for row in evaluations
        ]
        show_table(console, "evaluations while training; scores are times 100", ("step", "loss", *names), rows)
    else:
        console.print("the run has no evaluation yet: the picture shows only its training")
    console.print(f"written to {output}")
