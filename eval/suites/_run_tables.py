"""What `tripletune eval run` prints of a system's figures, and its warnings."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console

from tripletune.eval.costs import unused_roles
from tripletune.eval.results import RANKINGS, RunMetrics, RunSettings
from tripletune.eval.results.unreadable import REPORTED_SHARE
from tripletune.eval.suites import interval_cells, named_numbers, show_table
from tripletune.rag.costs import CACHED, COSTS, DOLLARS
from tripletune.rag.extract import CorpusExtraction
from tripletune.rag.systems import system_names
from tripletune.rag.triple_store import TripleSource

logger = logging.getLogger(__name__)


def show_run(metrics: RunMetrics, explanations: Mapping[str, str], console: Console, with_oracle: bool) -> None:
    """Print the figures of a run.

    Args:
        explanations: For each metric the sentence about it.
        with_oracle: The teacher was an oracle, whose scores must not be taken for a model's.
    """
    rows: list[tuple[str, ...]] = []
    for name, value in metrics.metrics.items():
        # A system that only retrieves has no scores of answers.
        if value["n"]:
            rows.append((name, *interval_cells(value), explanations[name]))
    for name, value in metrics.answered.items():
        explanation = f"of the {value['n']} answers that were given; the others are I don't know"
        rows.append((f"{name}, answered", *interval_cells(value), explanation))
    rows += _recall_rows(metrics)
    oracle = " with an ORACLE, which knows the facts," if with_oracle else ""
    title = f"{metrics.system}{oracle} on {metrics.task}, {metrics.questions} questions"
    heads = ("metric", "score", "95 % interval", "what it says")
    show_table(console, title, heads, rows, "questions", metrics.failed)
    counts = metrics.counts
    if not rows:
        logger.warning(
            "no question has a score: answers need gold answers, and a retriever needs known supporting passages, from "
            "`supporting` in the questions (titles or ids of --corpus) or from --gold FILE"
        )
    if metrics.recall and counts.without_search:
        console.print(f"{counts.without_search} questions were answered without a search; their recall counts as 0")
    numbers = {name.replace("_", " "): number for name, number in counts.numbers().items()}
    stops = named_numbers(counts.stop_reasons)
    actions = f", actions {named_numbers(counts.actions)}" if counts.actions else ""
    console.print(f"{named_numbers(numbers)}, ended by {stops}{actions}")
    if counts.tallies:
        console.print(f"counted by the system: {named_numbers(counts.tallies)}")
    console.print(_cost_line("per question", metrics.cost_per_question))
    if metrics.indexing.get("calls"):
        console.print(_cost_line("indexing", metrics.indexing))


def _recall_rows(metrics: RunMetrics) -> list[tuple[str, ...]]:
    """Rows of recall; numbers of passages with the same recall share a row, as all above the number that was found."""
    cutoffs: dict[tuple[str, ...], list[str]] = {}
    for name, value in metrics.recall.items():
        ranking, _, k = name.partition("@")
        cutoffs.setdefault((ranking, *interval_cells(value)), []).append(k)
    rows = []
    for (ranking, *cells), numbers in cutoffs.items():
        explanation = f"recall of the supporting passages in the first {' or '.join(numbers)}, {RANKINGS[ranking]}"
        rows.append((f"{ranking}@{','.join(numbers)}", *cells, explanation))
    return rows


def show_runs(runs: Sequence[RunMetrics], console: Console, with_oracle: bool) -> None:
    """Print one table of several systems on a task: a row per system with its scores, its cost and its failures.

    The best headline comes first. Only the headline has an interval: more would not fit a terminal.
    """
    oracle = " with an ORACLE, which knows the facts," if with_oracle else ""
    names = list(runs[0].metrics)
    heads = ["system", f"{names[0]} (95 % interval)", *names[1:]] if names else ["system"]
    heads += ["calls", "tokens read", "written"]
    with_dollars = any(DOLLARS in run.cost_per_question for run in runs)
    if with_dollars:
        heads.append("dollars")
    heads.append("failed")
    rows = []
    for run in runs:
        cells = [run.system]
        for number, name in enumerate(names):
            mean, interval = interval_cells(run.metrics[name])
            cells.append(f"{mean} ({interval})" if number == 0 else mean)
        cells += [_readable_number(run.cost_per_question.get(name)) for name in COSTS]
        if with_dollars:
            cells.append(_readable_number(run.cost_per_question.get(DOLLARS)))
        rows.append([*cells, str(run.failed)])
    # The headline decides the order.
    if names:
        rows.sort(key=lambda row: _mean_of_system(row[0], names[0], runs), reverse=True)
    show_table(
        console, f"All systems{oracle} on {runs[0].task}, {runs[0].questions} questions", heads, rows, "questions"
    )
    costs = "Calls, tokens and dollars" if with_dollars else "Calls and tokens"
    console.print(f"{costs} are per question.")
    for run in runs:
        # It is paid once, so it is in no cost per question.
        if run.indexing.get("calls"):
            console.print(_cost_line(f"{run.system}, indexing", run.indexing))


def _mean_of_system(system: str, metric: str, runs: Sequence[RunMetrics]) -> float:
    """A system's mean of a metric; -1 if it has none, so that it is sorted last."""
    for run in runs:
        mean = run.metrics[metric]["mean"] if run.system == system else None
        if mean is not None:
            return mean
    return -1.0


def _readable_number(value: float | None) -> str:
    """A number as people read it: whole from 100 on, else three digits; "-" if it is not known."""
    if value is None:
        return "-"
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _cost_line(title: str, cost: Mapping[str, float]) -> str:
    """One line of calls, tokens and money, and of the part that was not sent; an unknown number is "-"."""
    calls, read, written = (_readable_number(cost.get(name)) for name in COSTS)
    text = f"{title}: {calls} calls, {read} tokens read, {written} written"
    if DOLLARS in cost:
        text += f", ${cost[DOLLARS]:.4g}"
    unsent = cost.get(f"{CACHED}{COSTS[0]}")
    if unsent:
        text += f"; {_readable_number(unsent)} of the calls were not sent, since the ledger had the reply"
        if DOLLARS in cost:
            text += f" (${cost[CACHED + DOLLARS]:.4g})"
    return text


def print_warnings_of_run(
    metrics: RunMetrics,
    settings: RunSettings,
    store: TripleSource | None,
    triples: str | None,
    named_roles: Mapping[str, Iterable[str]],
    console: Console,
) -> None:
    """Print what the loop extracted; warn of triples that do not cover the corpus, and of roles that no call has.

    These warnings come at the end of a run, since only its calls and searches show what was of use.

    Args:
        settings: The models of the run; that an oracle's reply could not be read says nothing about a prompt.
        store: Where the system's triples come from.
        triples: The file of triples, if one was named.
        named_roles: Roles that the user named, by flag.
    """
    of_run = f"{metrics.system} on {metrics.task}"
    if isinstance(store, CorpusExtraction):
        counts_of_loop = store.counts
        console.print(f"triples in the loop, {store.store.path}: {counts_of_loop.line()}")
        if counts_of_loop.failed:
            logger.warning(
                "%s: %d passages could not be read, so questions may be answered without their triples; when the cause "
                "is fixed, --overwrite answers all questions again, and extracts only what %s lacks",
                of_run, counts_of_loop.failed, store.store.path,
            )  # fmt: skip
        if counts_of_loop.unread > REPORTED_SHARE * counts_of_loop.passages:
            logger.warning(
                "%s: %d passages have replies that are no triples, such as %r: take another --extractor",
                of_run, counts_of_loop.unread, counts_of_loop.unread_reply[:100],
            )  # fmt: skip
    counts = metrics.counts
    are_most_without_triples = 2 * counts.passages_without_triples > counts.passages > 0
    if triples and are_most_without_triples:
        logger.warning("%s: most retrieved passages have no triples in %s: does it cover this corpus?", of_run, triples)
    for replies in metrics.unreadable:
        if not settings.asks_oracle(replies.role):
            logger.warning("%s: %s", of_run, replies.sentence)
    # With several systems, each is warned only about its own roles.
    others = set(system_names()) - {metrics.system}
    for flag, roles in named_roles.items():
        for role in unused_roles(roles, metrics.roles):
            if role.split(".")[0] not in others:
                shown_roles = ", ".join(metrics.roles) or "none"
                logger.warning("%s: %s %s=…: unknown role; this run used %s", of_run, flag, role, shown_roles)
