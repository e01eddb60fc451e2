"""The figures of a run that has results, from the table of its questions.

The fields are those of a run in `report.json`. An interval is a `statistics.Interval`; figures that the results do not
allow are None.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from tripletune.eval.report.confidence import ConfidenceFigures, confidence_figures
from tripletune.eval.report.runs import Run, why_untimed
from tripletune.eval.results import RunMetrics, mean_recalls
from tripletune.eval.results.mauve import MauveScore, read_mauve
from tripletune.eval.statistics import Interval, bootstrap_mean, bootstrap_means
from tripletune.llm.question_client import CALLS
from tripletune.rag.costs import COSTS as SUMMED
from tripletune.rag.costs import WEIGHTED, Cost
from tripletune.rag.systems._confidence import MEASURES
from tripletune.rag.systems.cirag import DEFAULT, GRANULARITIES

# The levels of CIRAG's cascade, and the answer without any.
LEVELS = (*GRANULARITIES, DEFAULT)
# How many of a question's supporting passages were shown.
SUPPORT = ("all", "some", "none")
# Columns of costs that a report has by role, too.
COSTS = ("calls", "tokens_read", "tokens_written", WEIGHTED)
_FACTS = ["facts_shown", "facts_kept", "answer_kept"]


@dataclass(frozen=True, slots=True)
class RoundFigures:
    """Searches per question: their mean, the number of questions by searches, and by why planning ended."""

    mean: Interval
    questions: dict[str, int]
    ended_by: dict[str, int]


@dataclass(frozen=True, slots=True)
class Latency:
    """Wall-clock seconds per question, while other questions were answered.

    Attributes:
        structuring: Mean seconds spent waiting for triples.
        percentiles: Seconds by share in percent: "10", "50" and "90".
        questions_per_second: Of the last session; None if the run did not end.
        concurrency: Most questions in progress at once.
    """

    mean: Interval
    structuring: float
    percentiles: dict[str, float]
    questions_per_second: float | None
    concurrency: int | None


@dataclass(frozen=True, slots=True)
class UnknownLatency:
    """Why the seconds do not measure the system."""

    unknown: str


@dataclass(frozen=True, slots=True)
class FactFigures:
    """CIRAG's candidate triples (`facts_shown`) and core triples, and how often a core triple names the answer."""

    facts_shown: Interval
    facts_kept: Interval
    answer_kept: Interval


@dataclass(frozen=True, slots=True)
class SupportFigures:
    """Scores of the questions by how many of their supporting passages the answer's reader was shown.

    Attributes:
        questions: By `SUPPORT`, the number of questions.
        scores: By `SUPPORT`, the headline score.
        recall: Share of the supporting passages that were shown.
        conversion: The headline's mean divided by that of `recall`: what an answerer makes of what was found; None if
            nothing was shown.
    """

    questions: dict[str, int]
    scores: dict[str, Interval]
    recall: Interval
    conversion: float | None


@dataclass(frozen=True, slots=True)
class RunFigures:
    """All figures of a run.

    Attributes:
        scores: By metric, the headline first.
        by_type: Scores by the benchmark's kind of question; None if there is only one.
        by_hops: Scores by the number of gold passages; None if there is only one.
        cost: Means per question: `COSTS`, "tokens", "sent" calls and "dollars" per 1,000 questions, where known.
        indexing: Sums of `rag.costs.Cost`; empty if another program answered.
        embedded: Number of texts in the indexes of vectors.
        roles: `COSTS` per question by role.
        granularity: By level of CIRAG's cascade, the "share" of questions that it answered and their scores.
        recall: Means of `eval.results.recalls_of`; empty if nothing was searched.
        kept: Recall of the gold passages among those of CIRAG's core triples.
        support: None if it is not known which supporting passages were shown.
        confidence: By measure of `rag.systems._confidence`, what it is worth for the headline.
        answered: The headline of the questions whose answer was given; None if none was withheld.
        withheld: Number of questions whose answer was replaced by "I don't know".
        decisions: Searches, unreadable decisions, and the counts that are specific to the system.
        errors: Number of failed questions.
        without_search: See `eval.results.RunCounts`.
        longest: Passages of the longest ranking of a question.
        mauve: None if it was not measured (`tripletune eval mauve`).
    """

    scores: dict[str, Interval]
    by_type: dict[str, dict[str, Interval]] | None
    by_hops: dict[str, dict[str, Interval]] | None
    rounds: RoundFigures
    cost: dict[str, Interval]
    indexing: dict[str, float]
    embedded: int | None
    roles: dict[str, dict[str, float]] | None
    latency: Latency | UnknownLatency
    granularity: dict[str, dict[str, Interval]] | None
    facts: FactFigures | None
    recall: dict[str, Interval]
    kept: Interval
    support: SupportFigures | None
    confidence: dict[str, ConfidenceFigures]
    answered: Interval | None
    withheld: int
    decisions: dict[str, int]
    errors: int
    without_search: int
    longest: int
    mauve: MauveScore | None


def figures_of(run: Run) -> RunFigures:
    """Compute all figures of a run that has results.

    Figures that only some systems or benchmarks have are None, empty, or intervals without values; a 0 would be read as
    a measurement. All come from the one table of questions, so that the figures of a report agree.
    """
    rows = run.rows
    metrics = run.scores
    return RunFigures(
        scores=_means_of(rows, metrics),
        by_type=_scores_by_value(rows, "type", metrics),
        by_hops=_scores_by_value(rows, "hops", metrics),
        rounds=RoundFigures(
            bootstrap_mean(rows["rounds"], None), _count_of_each(rows["rounds"]), _count_of_each(rows["stop"])
        ),
        cost=_mean_costs(rows),
        # Another program's calls are not known.
        indexing={} if run.system == "answers" else run.indexing.to_json(),
        embedded=max((session.embedded or 0 for session in run.sessions), default=None),
        roles=_costs_by_role(run),
        latency=_latency_of(run),
        granularity=_scores_by_level(rows, metrics),
        facts=_fact_figures(rows),
        recall=mean_recalls(rows["recall"]) if rows["rounds"].any() else {},
        kept=bootstrap_mean(rows["kept"].dropna()),
        support=_support_figures(rows, metrics[0]),
        confidence=_confidence_by_measure(rows, metrics[0]),
        answered=bootstrap_mean(rows[~rows["withheld"]][metrics[0]].dropna()) if rows["withheld"].any() else None,
        withheld=int(rows["withheld"].sum()),
        decisions=_decision_counts(rows),
        errors=int(rows["failed"].sum()),
        without_search=int(((rows["rounds"] == 0) & ~rows["failed"] & rows["recall"].map(bool)).sum()),
        longest=int(rows["ranked"].max()),
        mauve=read_mauve(run.folder),
    )


def _count_of_each(values: pd.Series) -> dict[str, int]:
    """How many questions have each value, sorted by value, so that equal results give equal bytes."""
    return {str(value): int(count) for value, count in values.value_counts().sort_index().items()}


def _means_of(rows: pd.DataFrame, metrics: Sequence[str]) -> dict[str, Interval]:
    """The mean of each metric over the questions that have it: without gold passages, rankings have no score."""
    return bootstrap_means({name: rows[name].dropna() for name in metrics})


def _scores_by_value(rows: pd.DataFrame, column: str, metrics: Sequence[str]) -> dict[str, dict[str, Interval]] | None:
    """Scores by the values of a column; None if all rows have the same value, whose scores are those of the run."""
    slices = {}
    for value, chosen in rows.dropna(subset=column).groupby(column):
        # The column of hops has floats, since it may have gaps.
        name = f"{value:g}" if column == "hops" else value or "none"
        slices[name] = _means_of(chosen, metrics)
    return slices if len(slices) > 1 else None


def _mean_costs(rows: pd.DataFrame) -> dict[str, Interval]:
    """Means of the costs that are known for every question; a mean over some of them would not compare with others."""
    columns = {}
    for name in (*COSTS, "tokens", "sent", "dollars"):
        if rows[name].notna().all():
            columns[name] = rows[name]
    return bootstrap_means(columns, None)


def _costs_by_role(run: Run) -> dict[str, dict[str, float]] | None:
    """Costs by role; roles that only read the corpus are left out, since their cost is per corpus, not per question."""
    questions = len(run.rows)
    roles = {role: _per_question(cost, questions) for role, cost in run.roles.items() if cost is not None}
    return roles or None


def _per_question(cost: Cost, questions: int) -> dict[str, float]:
    """`COSTS` of a role per question."""
    sums = cost.to_json()
    return {name: sums[key] / questions for name, key in zip(COSTS, (*SUMMED, WEIGHTED), strict=True)}


def _latency_of(run: Run) -> Latency | UnknownLatency:
    """The seconds of a run, or why they would measure something else than the system; see `why_untimed`."""
    reason = why_untimed(run)
    if reason:
        return UnknownLatency(reason)
    seconds = run.rows["seconds"]
    session = RunMetrics.from_json(run.metrics).session
    return Latency(
        mean=bootstrap_mean(seconds, None),
        structuring=float(run.rows["structuring"].mean()),
        percentiles={str(share): float(seconds.quantile(share / 100)) for share in (10, 50, 90)},
        questions_per_second=None if session is None else session.per_second,
        concurrency=run.about.concurrency,
    )


def _fact_figures(rows: pd.DataFrame) -> FactFigures | None:
    """The core triples over the questions that have them; None for systems that select none."""
    facts = rows[_FACTS].dropna()
    if not len(facts):
        return None
    shown = bootstrap_mean(facts["facts_shown"], None)
    kept = bootstrap_mean(facts["facts_kept"], None)
    return FactFigures(shown, kept, bootstrap_mean(facts["answer_kept"]))


def _support_figures(rows: pd.DataFrame, headline: str) -> SupportFigures | None:
    """What recall buys; only questions with known supporting and shown passages and a score count.

    The conversion is the ratio of two means and not the mean of ratios, since many questions have a recall of 0.
    """
    known = rows.dropna(subset=["support", headline])
    if known.empty:
        return None
    shares = known["support"].astype(float)
    chosen = {"all": shares == 1, "some": (shares > 0) & (shares < 1), "none": shares == 0}
    recall = float(shares.mean())
    return SupportFigures(
        questions={name: int(of_name.sum()) for name, of_name in chosen.items()},
        scores={name: bootstrap_mean(known[of_name][headline]) for name, of_name in chosen.items()},
        recall=bootstrap_mean(shares),
        conversion=float(known[headline].mean()) / recall if recall else None,
    )


def _confidence_by_measure(rows: pd.DataFrame, headline: str) -> dict[str, ConfidenceFigures]:
    """What each measure is worth; answers that failed or were withheld have no score that would show it."""
    scored = rows[~rows["failed"] & ~rows["withheld"]].dropna(subset=headline)
    by_measure = {}
    for measure in MEASURES:
        confidences = []
        scores = []
        for confidence, score in zip(scored["confidence"], scored[headline], strict=True):
            if measure in confidence:
                confidences.append(confidence[measure])
                scores.append(float(score))
        figures = confidence_figures(confidences, scores)
        if figures is not None:
            by_measure[measure] = figures
    return by_measure


def _scores_by_level(rows: pd.DataFrame, metrics: Sequence[str]) -> dict[str, dict[str, Interval]] | None:
    """Share and scores of the questions that each level answered (CIRAG, figures 3 and 5); None for other systems."""
    if not rows["granularity"].isin(LEVELS).any():
        return None
    levels = {}
    for level in LEVELS:
        # A failed question has no level but counts in the shares.
        chosen = rows["granularity"] == level
        levels[level] = {"share": bootstrap_mean(chosen), **_means_of(rows[chosen], metrics)}
    return levels


def _decision_counts(rows: pd.DataFrame) -> dict[str, int]:
    """Counts by name: the system's tallies, and unreadable decisions; counts of 0 are left out."""
    counts: Counter[str] = Counter()
    counts["rounds"] = int(rows["rounds"].sum())
    counts["unreadable_decisions"] = int(rows["malformed"].sum())
    for tallies in rows["tallies"]:
        for name, count in tallies.items():
            # Calls and answers by granularity have separate tables.
            if not name.startswith((CALLS, "answered.")):
                counts[name] += count
    return {name: count for name, count in sorted(counts.items()) if count}
