"""`tripletune eval report`: reads results folders, and writes page, figures and plots as one folder, in one step."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from tripletune.eval.report.page import page_of
from tripletune.eval.report.read import Other, Run, figures_of, read_folder
from tripletune.eval.report.variants import Group, differences, group_runs, sweeps_of
from tripletune.eval.statistics import paired_difference
from tripletune.models.files import check_folder, new_folder

logger = logging.getLogger(__name__)
PAGE, FIGURES = "report.md", "report.json"
_MADE = (PAGE, FIGURES, "*.png")


def write_report(args: argparse.Namespace, console: Console) -> None:
    """Write page, figures and plots; the same results give the same bytes.

    Args:
        args: `folders` (results folders, or NAME=FOLDER), `output` and `no_plots`.
        console: Told what was written.

    Raises:
        FileNotFoundError: a folder is not there.
        ValueError: a folder holds no results, or is named twice; or plots are wanted and matplotlib is missing.
        FileExistsError: the output folder holds something else than a report.
    """
    check_folder(args.output, _MADE, overwrite=True)
    found = [read_folder(spec) for spec in args.folders]
    places = [Path(one.folder).resolve() for one in found]
    twice = next((one.folder for one, place in zip(found, places) if places.count(place) > 1), None)
    if twice is not None:
        raise ValueError(f"{twice} is named twice: name every folder once")
    report = build_report(found)
    told: list[dict[str, str]] = []
    files: dict[str, bytes] = {}
    if not args.no_plots:
        from tripletune.eval.report.plots import draw_plots

        told, files = draw_plots(report)
    with new_folder(args.output, _MADE, overwrite=True, sources=places) as scratch:
        for name, png in files.items():
            (scratch / name).write_bytes(png)
        (scratch / PAGE).write_text(page_of(report, told), encoding="utf-8")
        text = json.dumps(report, ensure_ascii=False, indent=1) + "\n"
        (scratch / FIGURES).write_text(text, encoding="utf-8")
    for sentence in report["missing"]:
        logger.warning("%s", sentence.replace("`", ""))
    console.print(f"{Path(args.output) / PAGE}: {len(found)} results, {len(files)} plots", markup=False)


def build_report(found: Sequence[Run | Other]) -> dict[str, Any]:
    """All figures of a report.

    Args:
        found: Results folders, in the order given.

    Returns:
        `groups` of runs over the same questions, `others`, and `missing`: sentences on what could not be said.
    """
    runs = [one for one in found if isinstance(one, Run)]
    groups = [_group(group) for group in group_runs(runs)]
    others = [
        {
            "name": one.name or one.folder,
            "folder": one.folder,
            "command": _command(one.about),
            "settings": dict(one.settings),
            "results": one.rows,
            "metrics": one.metrics,
        }
        for one in found
        if isinstance(one, Other)
    ]
    missing = [sentence for group in groups for run in group["runs"] for sentence in _missing(run)]
    missing += [
        f"{_span(str(one['name']))} was stopped before its end: it has {one['results']:,} results and no metrics yet. "
        "Give its command again to continue."
        for one in others
        if one["metrics"] is None
    ]
    return {"groups": groups, "others": others, "missing": missing}


def _group(group: Group) -> dict[str, Any]:
    metrics = group.runs[0].metrics
    reference = group.runs[0]
    order = group.in_paper_order()
    return {
        "task": group.task,
        "metrics": metrics,
        "runs": [
            {
                "name": name,
                "folder": run.folder,
                "system": run.system,
                "command": _command(run.about),
                "settings": dict(run.settings),
                "differs": {key: list(values) for key, values in differences(reference.settings, run.settings).items()},
                "ablations": list(ablations),
                "questions": len(run.rows),
                "expected": run.expected,
                "finished": run.finished,
                "cut_off": run.cut_off,
                "figures": figures_of(run),
            }
            for run, name, ablations in zip(group.runs, group.names, group.ablations)
        ],
        "differences": [_paired(reference, run, metrics) for run in group.runs],
        "ablations": {
            "order": order,
            "differences": [_paired(group.runs[order[0]], group.runs[n], metrics) for n in order],
        }
        if order
        else None,
        "sweeps": [
            {"option": sweep.option, "values": list(sweep.values), "runs": list(sweep.members)}
            for sweep in sweeps_of(group)
        ],
    }


def _paired(first: Run, second: Run, metrics: Sequence[str]) -> dict[str, Any] | None:
    """Differences to the first by metric, over the questions that both have; None for the first itself."""
    if first is second:
        return None
    if first.rows.empty or second.rows.empty:
        return None
    both = first.rows.merge(second.rows, on="id", suffixes=("_first", "_second"))
    if both.empty:
        return None
    return {
        name: paired_difference(list(both[f"{name}_first"]), list(both[f"{name}_second"])).to_json() for name in metrics
    }


def _span(name: str) -> str:
    return f"`{name.replace('`', chr(39))}`"


def _command(about: Mapping[str, Any]) -> list[str] | None:
    return list(about["command"]) if about.get("command") else None


def _missing(run: Mapping[str, Any]) -> list[str]:
    name, figures = _span(run["name"]), run["figures"]
    found = []
    if not run["finished"]:
        of = f" of {run['expected']:,}" if run["expected"] else ""
        cut = "; its last line was cut off" if run["cut_off"] else ""
        found.append(
            f"{name} is not finished: it has {run['questions']:,}{of} questions{cut}. Its figures are about these "
            "alone; give its command again to continue."
        )
    if run["command"] is None:
        found.append(f"{name} does not say which command made it: an earlier version wrote its results.")
    if not figures:
        return found
    if figures["errors"]:
        found.append(
            f"{name}: {figures['errors']:,} questions failed; they score 0 and stay in the denominator of every score. "
            "Recall is that of the others."
        )
    if figures["recall"] is None and figures["errors"] < run["questions"]:
        found.append(f"{name} has no gold links (`--gold`), so the recall of its passages is not known.")
    roles = figures["roles"] or {}
    if any(one["tokens_read"] is None for one in roles.values()):
        found.append(f"{name} does not say how many tokens each role used: an earlier version wrote its results.")
    return found
