"""`tripletune eval compare`: finished runs side by side, with differences to the first that are paired by question."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tripletune.eval.harness import SCORES_NOTE, interval_cells
from tripletune.eval.metrics import find_metrics
from tripletune.eval.results import METRICS, RESULTS, read_results
from tripletune.eval.statistics import bootstrap_mean, bootstrap_ratio, paired_difference, paired_ratio_difference
from tripletune.eval.suites.extraction import KIND, PARTS, SCORES_FILE
from tripletune.models.files import read_json
from tripletune.models.options import nearest

logger = logging.getLogger(__name__)


def compare_folders(folders: Sequence[str | Path], metric: str | None = None) -> dict[str, Any]:
    """Compare runs with the first one, question by question or text by text.

    Args:
        folders: Output folders of `tripletune eval run`, or all of `tripletune eval extraction`.
        metric: The score to compare, for `extraction` also the beginning of several names, such as "soft"; None takes
            the headline of the task, or all scores of `extraction`.

    Returns:
        `{"task", "metric", "questions", "runs": [{"folder", "system", "score", "difference", ...}]}`, or for
        `extraction` `{"evaluation", "texts", "runs": [folder, ...], "scores": {name: [{"score", "difference"}]}}`; a
        difference is "this run minus the first", None for the first.

    Raises:
        FileNotFoundError: a folder has no results.
        ValueError: runs are of different kinds or tasks, lack the metric, or have no question in common.
    """
    heads = [_head(Path(folder)) for folder in folders]
    extraction = [head.get("evaluation") == KIND for head in heads]
    for folder, head, one in zip(folders, heads, extraction):
        if one is not extraction[0] or not (one or "system" in head):
            kind = KIND if extraction[0] else "run"
            raise ValueError(
                f"{folder} is not the output of a finished `tripletune eval {kind}`: compare one kind of run"
            )
    try:
        return _compare_texts(folders, metric) if extraction[0] else _compare_runs(folders, heads, metric)
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"the results in {', '.join(map(str, folders))} are damaged: {error!r}; run them again"
        ) from None


def show_comparison(comparison: Mapping[str, Any], console: Console) -> None:
    """Print a comparison."""
    if comparison.get("evaluation") == KIND:
        _show_texts(comparison, console)
        return
    name = comparison["metric"]
    table = Table(title=f"{name} on {comparison['task']}, {comparison['questions']} questions")
    spread = "95 % interval"
    for heading in ("run", "system", "score", spread, "minus the first", spread, "p", "calls", "tokens"):
        table.add_column(heading)
    for run in comparison["runs"]:
        gap, cost = run["difference"], run["cost_per_question"]
        cells = (*interval_cells(gap, sign=True), f"{gap['p_value']:.3f}") if gap else ("", "", "")
        tokens = cost["prompt_tokens"] + cost["completion_tokens"]
        score = interval_cells(run["score"])
        table.add_row(run["folder"], run["system"], *score, *cells, f"{cost['calls']:.1f}", f"{tokens:.0f}")
    console.print(table)
    metric = find_metrics().get(name)
    console.print(f"{name}: {metric.explanation}. {SCORES_NOTE.format('questions')}" if metric else name)
    console.print("Differences are paired by question; p is the two-sided bootstrap p-value. Costs are per question.")


def _compare_runs(
    folders: Sequence[str | Path], heads: Sequence[Mapping[str, Any]], metric: str | None
) -> dict[str, Any]:
    tasks = sorted({head["task"] for head in heads})
    if len(tasks) > 1:
        raise ValueError(f"the runs are of different tasks ({', '.join(tasks)}): compare runs of one task")
    metric = metric or heads[0]["primary"]
    for folder, head in zip(folders, heads):
        if metric not in head["metrics"]:
            known = nearest(metric, head["metrics"])
            raise ValueError(f"{folder} has no metric {metric!r}{known}; it has {', '.join(head['metrics'])}")
    scores = [{row["id"]: row["scores"][metric] for row in read_results(Path(folder) / RESULTS)} for folder in folders]
    common = _common(scores, "question")
    columns = [[one[name] for name in common] for one in scores]
    runs = [
        {
            "folder": str(folder),
            "system": head["system"],
            "score": bootstrap_mean(values).to_json(),
            "difference": paired_difference(columns[0], values).to_json() if number else None,
            "cost_per_question": head["cost_per_question"],
            "errors": head["counts"]["errors"],
        }
        for number, (folder, head, values) in enumerate(zip(folders, heads, columns))
    ]
    return {"task": tasks[0], "metric": metric, "questions": len(common), "runs": runs}


def _compare_texts(folders: Sequence[str | Path], metric: str | None) -> dict[str, Any]:
    rows = [{row["id"]: row for row in read_results(Path(folder) / SCORES_FILE)} for folder in folders]
    common = _common(rows, "text")
    sample = [run[common[0]] for run in rows]
    # The soft level and ROUGE are only there when they were asked for.
    names = [name for name in PARTS if all((name.split("/")[0] in row) or name not in _OPTIONAL for row in sample)]
    chosen = [name for name in names if metric is None or name == metric or name.startswith(f"{metric}/")]
    if not chosen:
        raise ValueError(f"no metric {metric!r} that all runs have; there are {', '.join(names)}")
    scores: dict[str, list[dict[str, Any]]] = {}
    for name in chosen:
        columns: list[Any] = [tuple(zip(*(PARTS[name](run[text]) for text in common))) for run in rows]
        scores[name] = [
            {
                "score": bootstrap_ratio(*column).to_json(),
                "difference": paired_ratio_difference(columns[0], column).to_json() if number else None,
            }
            for number, column in enumerate(columns)
        ]
    return {"evaluation": KIND, "texts": len(common), "runs": [str(folder) for folder in folders], "scores": scores}


_OPTIONAL = {name for name in PARTS if name.split("/")[0] in ("soft", "rouge1", "rouge2", "rougeL")}


def _show_texts(comparison: Mapping[str, Any], console: Console) -> None:
    table = Table(title=f"extraction, {comparison['texts']} texts")
    table.add_column("score", no_wrap=True)
    # Folders have long names, so the columns have numbers.
    for number, folder in enumerate(comparison["runs"], 1):
        console.print(f"run {number}: {folder}", markup=False)
        table.add_column(f"run {number}")
        if number > 1:
            table.add_column(f"{number} minus 1")
            table.add_column("p")
    for name, runs in comparison["scores"].items():
        cells: list[str] = []
        for run in runs:
            cells.append("{} ({})".format(*interval_cells(run["score"])))
            if gap := run["difference"]:
                cells += ["{} ({})".format(*interval_cells(gap, sign=True)), f"{gap['p_value']:.3f}"]
        table.add_row(name, *cells)
    console.print(table)
    console.print(SCORES_NOTE.format("texts"))
    console.print("Differences to run 1 are paired by text; p is the two-sided bootstrap p-value.")


def _common(runs: Sequence[Mapping[str, Any]], unit: str) -> list[str]:
    """The ids that all runs have, in the order of the first."""
    common = [name for name in runs[0] if all(name in other for other in runs[1:])]
    if not common:
        raise ValueError(f"the runs have no {unit} in common: were they made from different data?")
    if any(len(other) != len(common) for other in runs):
        logger.warning("only the %d %ss that all runs have are compared", len(common), unit)
    return common


def _head(folder: Path) -> dict[str, Any]:
    if not (folder / METRICS).is_file():
        raise FileNotFoundError(f"{folder} has no {METRICS}: it is not the output of a finished `tripletune eval`")
    return read_json(folder / METRICS)
