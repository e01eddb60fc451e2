"""`tripletune eval compare`: finished runs side by side, with differences to the first that are paired by item."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from tripletune.eval import find_metrics
from tripletune.eval.results import METRICS, RESULTS, read_results
from tripletune.eval.statistics import bootstrap_ratio, flatten, paired_ratio_difference
from tripletune.eval.suites import interval_cells, show_table
from tripletune.eval.suites.extraction import KIND, SCORES_FILE
from tripletune.eval.triples import PARTS
from tripletune.models.files import check_new, read_json, write_json
from tripletune.models.options import nearest

logger = logging.getLogger(__name__)
_COSTS = {"calls": "calls", "prompt_tokens": "tokens read", "completion_tokens": "tokens written"}


def compare(args: argparse.Namespace, console: Console) -> None:
    """Print a comparison, and write it as JSON where `args.output` says so; see `compare_folders`."""
    if args.output:
        check_new(args.output, args.folders)
    comparison = compare_folders(args.folders, args.metric)
    _show(comparison, console)
    if args.output:
        write_json(args.output, comparison)


def compare_folders(folders: Sequence[str | Path], metric: str | None = None) -> dict[str, Any]:
    """Compare runs with the first one, question by question or text by text.

    Args:
        folders: Output folders of `tripletune eval run`, or all of `tripletune eval extraction`.
        metric: The score to compare, for `extraction` also the beginning of several names, such as "soft"; None takes
            the headline of the task, or all scores of `extraction`.

    Returns:
        `{"what", "unit", "items", "runs": [{"folder", "name", "cost"}], "scores": {name: [{"score", "difference"}]}}`;
        a difference is "this run minus the first", None for the first.

    Raises:
        FileNotFoundError: a folder has no results.
        ValueError: runs are of different kinds or tasks, lack the metric, or have no item in common.
    """
    heads = [_head(Path(folder)) for folder in folders]
    kinds = [KIND if head.get("evaluation") == KIND else "run" for head in heads]
    for folder, head, kind in zip(folders, heads, kinds):
        if kind != kinds[0] or (kind == "run" and "system" not in head):
            raise ValueError(
                f"{folder} is not the output of a finished `tripletune eval {kinds[0]}`: compare one kind of run"
            )
    texts = kinds[0] == KIND
    what = sorted({KIND if texts else head["task"] for head in heads})
    if len(what) > 1:
        raise ValueError(f"the runs are of different tasks ({', '.join(what)}): compare runs of one task")
    unit, file = ("text", SCORES_FILE) if texts else ("question", RESULTS)
    rows = [{row["id"]: row for row in read_results(Path(folder) / file)} for folder in folders]
    common = [name for name in rows[0] if all(name in other for other in rows[1:])]
    if not common:
        raise ValueError(f"the runs have no {unit} in common: were they made from different data?")
    if any(len(other) != len(common) for other in rows):
        logger.warning("only the %d %ss that all runs have are compared", len(common), unit)
    parts = PARTS if texts else {name: _part(name) for name in heads[0]["metrics"]}
    metric = metric if texts else metric or heads[0]["primary"]
    # The soft level is only there when it was asked for.
    there = [flatten(head if texts else head["metrics"], "/") for head in heads]
    known = [name for name in parts if all(name in one for one in there)]
    chosen = [name for name in known if metric is None or name == metric or name.startswith(f"{metric}/")]
    if not chosen:
        raise ValueError(f"no metric {metric!r} that all runs have{nearest(str(metric), known)}: {', '.join(known)}")
    scores: dict[str, list[dict[str, Any]]] = {}
    for name in chosen:
        columns: list[Any] = [tuple(zip(*(parts[name](run[item]) for item in common))) for run in rows]
        scores[name] = [
            {
                "score": bootstrap_ratio(*column),
                "difference": paired_ratio_difference(columns[0], column) if number else None,
            }
            for number, column in enumerate(columns)
        ]
    runs = [
        {"folder": str(folder), "name": head.get("system") or head["model"], "cost": head[f"cost_per_{unit}"]}
        for folder, head in zip(folders, heads)
    ]
    return {"what": what[0], "unit": unit, "items": len(common), "runs": runs, "scores": scores}


def _head(folder: Path) -> dict[str, Any]:
    if not (folder / METRICS).is_file():
        raise FileNotFoundError(f"{folder} has no {METRICS}: it is not the output of a finished `tripletune eval`")
    return read_json(folder / METRICS)


def _part(name: str) -> Any:
    return lambda row: (row["scores"][name], 1.0)


def _show(comparison: Mapping[str, Any], console: Console) -> None:
    unit = comparison["unit"]
    for number, run in enumerate(comparison["runs"], 1):
        cost = ", ".join(f"{run['cost'][name]:.1f} {told}" for name, told in _COSTS.items() if name in run["cost"])
        console.print(f"run {number}: {run['folder']} ({run['name']}), per {unit}: {cost}")
    rows = []
    for name, found in comparison["scores"].items():
        for number, one in enumerate(found, 1):
            gap = one["difference"]
            cells = (*interval_cells(gap, sign=True), f"{gap['p_value']:.3f}") if gap else ("", "", "")
            rows.append((name if number == 1 else "", str(number), *interval_cells(one["score"]), *cells))
    heads = ("score", "run", "mean", "95 % interval", "minus run 1", "95 % interval", "p")
    show_table(console, f"{comparison['what']}, {comparison['items']} {unit}s", heads, rows, f"{unit}s")
    known = find_metrics()
    for name in comparison["scores"]:
        if name in known:
            console.print(f"{name}: {known[name].explanation}.")
    console.print(f"Differences to run 1 are paired by {unit}; p is the two-sided bootstrap p-value.")
