"""What `tripletune eval run` prints of a system's figures."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console

from tripletune.eval.results import RANKINGS, RunMetrics
from tripletune.eval.suites import interval_cells, listed_numbers, show_table
from tripletune.rag.costs import CACHED, COSTS, DOLLARS, WEIGHTED


def show_run(metrics: RunMetrics, explanations: Mapping[str, str], console: Console, with_oracle: bool) -> None:
    """Print the figures of a run.

    Args:
        explanations: For each metric the sentence about it.
        with_oracle: The teacher was an oracle, whose scores must not be taken for a model's.
    """
    rows = []
    for name, value in metrics.metrics.items():
        rows.append((name, *interval_cells(value), explanations[name]))
    for name, value in metrics.recall.items():
        ranking, _, k = name.partition("@")
        explanation = f"recall of the supporting passages in the first {k}, {RANKINGS[ranking]}"
        rows.append((name, *interval_cells(value), explanation))
    oracle = " with an ORACLE, which knows the facts," if with_oracle else ""
    title = f"{metrics.system}{oracle} on {metrics.task}, {metrics.questions} questions"
    heads = ("metric", "score", "95 % interval", "what it says")
    show_table(console, title, heads, rows, "questions", metrics.failed)
    counts = metrics.counts
    if metrics.recall and counts.without_search:
        console.print(f"{counts.without_search} questions were answered without a search; their recall counts as 0")
    numbers = {name.replace("_", " "): number for name, number in counts.numbers().items()}
    stops = listed_numbers(counts.stop_reasons)
    console.print(f"{listed_numbers(numbers)}, ended by {stops}, actions {listed_numbers(counts.actions)}")
    if counts.tallies:
        console.print(f"counted by the system: {listed_numbers(counts.tallies)}")
    console.print(_cost_line("per question", metrics.cost_per_question))
    if metrics.indexing.get("calls"):
        console.print(_cost_line("indexing", metrics.indexing))


def _cost_line(title: str, cost: Mapping[str, float]) -> str:
    """Calls, tokens and money; in brackets the part that was not sent, and "-" for what is not known."""
    calls, read, written = (cost.get(name, "-") for name in COSTS)
    unsent_calls, unsent_read, unsent_written = (cost.get(f"{CACHED}{name}", "-") for name in COSTS)
    money = ""
    if DOLLARS in cost:
        money = f", ${cost[DOLLARS]:.4g} (${cost[CACHED + DOLLARS]:.4g})"
    return (
        f"{title}: {calls} calls ({unsent_calls} of them not sent: the ledger had the reply), "
        f"{read} tokens read ({unsent_read}), {written} written ({unsent_written}), "
        f"{cost.get(WEIGHTED, '-')} in + 4 x out{money}"
    )
