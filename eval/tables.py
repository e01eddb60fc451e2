"""Tables for people: one run, several runs side by side with paired differences, and scores on records."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tripletune.eval.metrics import METRICS as METRIC_TABLE
from tripletune.eval.results import METRICS, RESULTS, read_rows
from tripletune.eval.statistics import bootstrap_mean, paired_difference

logger = logging.getLogger(__name__)

_INTERVALS = "Scores are times 100, with the 95 % interval of a bootstrap over questions."
_RECORD_EXPLANATIONS = {
    "action_accuracy": "the predicted action is the gold one",
    "action_accuracy_with_history": "the same, for records with at least one step of history",
    "subquery_f1": "token overlap with the gold sub-query, where there is one; another action scores 0",
    "subquery_f1_with_history": "the same, for records with at least one step of history",
    "malformed": "replies that start with no action",
    **{name: METRIC_TABLE[name].explanation for name in ("exact_match", "f1", "f1_hotpotqa")},
}


def show_run(metrics: Mapping[str, Any], console: Console) -> None:
    """Print the metrics of one run."""
    table = Table(title=f"{metrics['system']} on {metrics['task']}, {metrics['questions']} questions")
    for heading in ("metric", "score", "95 % interval", "what it says"):
        table.add_column(heading)
    for name, value in metrics["metrics"].items():
        table.add_row(name, *_cells(value), METRIC_TABLE[name].explanation)
    if metrics["supporting_recall"]["n"]:
        cells = _cells(metrics["supporting_recall"])
        table.add_row("supporting_recall", *cells, "share of the supporting passages that was retrieved")
    console.print(table)
    counts, cost = metrics["counts"], metrics["cost_per_question"]
    console.print(_INTERVALS)
    console.print(
        f"errors {counts['errors']} (they score 0), malformed plans {counts['malformed_plans']}, unexpected plans "
        f"{counts['unexpected_plans']}, passages without triples {counts['passages_without_triples']} of "
        f"{counts['passages']}, ended by {_listed(counts['stop_reasons'])}, actions {_listed(counts['actions'])}",
        markup=False,
    )
    if counts.get("tallies"):
        console.print(f"counted by the system: {_listed(counts['tallies'])}", markup=False)
    session = metrics["session"]
    console.print(
        f"a question: {cost['calls']} calls, {cost['prompt_tokens']} tokens read, {cost['completion_tokens']} written; "
        f"{session['questions']} questions in {session['seconds']} s, {session['questions_per_second']} a second"
    )


def show_records(metrics: Mapping[str, Any], console: Console) -> None:
    """Print the scores on SUBQ records."""
    table = Table(title="scores on records with gold history")
    for heading in ("task", "metric", "score", "95 % interval", "records", "what it says"):
        table.add_column(heading)
    for task in ("planning", "answering"):
        for name, explanation in _RECORD_EXPLANATIONS.items():
            value = metrics[task].get(name)
            if value and value["n"]:
                table.add_row(task, name, *_cells(value), str(value["n"]), explanation)
    for family, what in (("label", "gold action"), ("history", "steps of history")):
        for key, value in metrics["planning"][f"action_accuracy_by_{family}"].items():
            table.add_row("planning", "action_accuracy", *_cells(value), str(value["n"]), f"{what}: {_plain(key)}")
    console.print(table)
    console.print(_INTERVALS)


def compare(folders: Sequence[str | Path], metric: str | None = None) -> dict[str, Any]:
    """Compare runs with the first one, question by question.

    Args:
        folders: Output folders of `tripletune eval run`.
        metric: The score to compare; None takes the headline of the task.

    Returns:
        `{"metric", "questions", "runs": [{"folder", "system", "score", "difference"}]}`; a difference is "this run
        minus the first", None for the first.

    Raises:
        FileNotFoundError: a folder has no results.
        ValueError: the runs are of different tasks, lack the metric, or have no question in common.
    """
    heads = [_head(Path(folder)) for folder in folders]
    tasks = sorted({head["task"] for head in heads})
    if len(tasks) > 1:
        raise ValueError(f"the runs are of different tasks ({', '.join(tasks)}): compare runs of one task")
    metric = metric or heads[0]["primary"]
    for folder, head in zip(folders, heads):
        if metric not in head["metrics"]:
            raise ValueError(f"{folder} has no metric {metric!r}; it has {', '.join(head['metrics'])}")
    scores = [{row["id"]: row["scores"][metric] for row in read_rows(Path(folder) / RESULTS)} for folder in folders]
    common = [name for name in scores[0] if all(name in other for other in scores[1:])]
    if not common:
        raise ValueError("the runs have no question in common: were they made from different files?")
    if any(len(other) != len(common) for other in scores):
        logger.warning("only the %d questions that all runs have are compared", len(common))
    first = [scores[0][name] for name in common]
    runs = []
    for number, (folder, head) in enumerate(zip(folders, heads)):
        values = [scores[number][name] for name in common]
        runs.append(
            {
                "folder": str(folder),
                "system": head["system"],
                "score": bootstrap_mean(values).to_json(),
                "difference": paired_difference(first, values).to_json() if number else None,
                "cost_per_question": head["cost_per_question"],
                "errors": head["counts"]["errors"],
            }
        )
    return {"task": tasks[0], "metric": metric, "questions": len(common), "runs": runs}


def show_comparison(comparison: Mapping[str, Any], console: Console) -> None:
    """Print a comparison."""
    name = comparison["metric"]
    table = Table(title=f"{name} on {comparison['task']}, {comparison['questions']} questions")
    for heading in (
        "run",
        "system",
        "score",
        "95 % interval",
        "minus the first",
        "95 % interval",
        "p",
        "calls",
        "tokens",
    ):
        table.add_column(heading)
    for run in comparison["runs"]:
        gap, cost = run["difference"], run["cost_per_question"]
        cells = (*_cells(gap, sign=True), f"{gap['p_value']:.3f}") if gap else ("", "", "")
        tokens = cost["prompt_tokens"] + cost["completion_tokens"]
        table.add_row(
            run["folder"], run["system"], *_cells(run["score"]), *cells, f"{cost['calls']:.1f}", f"{tokens:.0f}"
        )
    console.print(table)
    console.print(f"{name}: {METRIC_TABLE[name].explanation}. {_INTERVALS}")
    console.print("Differences are paired by question; p is the two-sided bootstrap p-value. Costs are a question.")


def _head(folder: Path) -> dict[str, Any]:
    path = folder / METRICS
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no {METRICS}: it is not the output of a finished `tripletune eval run`")
    try:
        head = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: not valid JSON ({error.msg})") from None
    if "system" not in head:
        raise ValueError(f"{folder} holds scores on records, not a run over a task: compare takes runs")
    return head


def _cells(value: Mapping[str, Any], sign: bool = False) -> tuple[str, str]:
    form = "+.1f" if sign else ".1f"
    if value["mean"] is None:
        return "-", "-"
    return format(100 * value["mean"], form), f"{100 * value['low']:{form}} to {100 * value['high']:{form}}"


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"


def _plain(text: str) -> str:
    # rich would read "[SUBQ]" as a style tag.
    return text.replace("[", r"\[")
