"""The figures of one run: scores, rounds, calls, tokens, latency, granularities, recall, decisions; all with their n.

Everything is computed from the rows of `results.jsonl`, also for a run that was killed, so that tables and plots of a
report agree with each other. Values are JSON values; an interval is `{"mean", "low", "high", "n"}`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from tripletune.eval.report.read import Run
from tripletune.eval.statistics import bootstrap_mean
from tripletune.rag.systems.cirag.generation import DEFAULT
from tripletune.rag.systems.cirag.options import GRANULARITIES

LEVELS = (*GRANULARITIES, DEFAULT)
COSTS = ("calls", "tokens_read", "tokens_written")
_CALLS = "calls."
# Counts that have tables of their own.
_ELSEWHERE = (_CALLS, "answered.")


def figures_of(run: Run) -> dict[str, Any]:
    """All figures of a run.

    Returns:
        `scores`, `by_type`, `rounds`, `cost`, `roles`, `latency`, `granularity`, `recall`, `decisions` and `errors`;
        those that its results do not allow are None. Nothing at all for a run without a result.
    """
    rows, metrics = run.rows, run.metrics
    if rows.empty:
        return {}
    types = {kind or "none": _scores(part, metrics) for kind, part in rows.groupby("type")}
    seconds = rows["seconds"]
    return {
        "scores": _scores(rows, metrics),
        "by_type": types if len(types) > 1 else None,
        "rounds": {
            "mean": _mean(rows["rounds"]),
            "questions": _counted(rows["rounds"]),
            "ended_by": _counted(rows["stop"]),
        },
        "cost": {name: _mean(rows[name]) for name in COSTS},
        "roles": _roles(rows),
        "latency": {
            "mean": _mean(seconds),
            "percentiles": {str(share): float(seconds.quantile(share / 100)) for share in (10, 50, 90)},
            "questions_per_second": run.session.get("questions_per_second"),
            "concurrency": run.about.get("concurrency"),
        },
        "granularity": _granularity(rows, metrics),
        "recall": _recall(rows),
        "decisions": _decisions(rows),
        "errors": int(rows["failed"].sum()),
    }


def _mean(values: Iterable[float]) -> dict[str, Any]:
    return bootstrap_mean([float(value) for value in values]).to_json()


def _counted(values: pd.Series) -> dict[str, int]:
    return {str(value): int(count) for value, count in values.value_counts().sort_index().items()}


def _scores(rows: pd.DataFrame, metrics: Sequence[str]) -> dict[str, Any]:
    return {name: _mean(rows[name]) for name in metrics}


def _roles(rows: pd.DataFrame) -> dict[str, dict[str, float | None]] | None:
    """Calls, tokens read and tokens written per question, by role, in the order in which questions meet them."""
    calls: Counter[str] = Counter()
    tokens: dict[str, Counter[str]] = {}
    for tallies, used in zip(rows["tallies"], rows["tokens"]):
        calls.update({key.removeprefix(_CALLS): n for key, n in tallies.items() if key.startswith(_CALLS)})
        for role, both in (used or {}).items():
            tokens.setdefault(role, Counter()).update(dict(zip(COSTS[1:], both)))
    found: dict[str, dict[str, float | None]] = {}
    for role, count in calls.items():
        found[role] = {name: tokens[role][name] / len(rows) if role in tokens else None for name in COSTS[1:]}
        found[role] = {"calls": count / len(rows), **found[role]}
    return found or None


def _granularity(rows: pd.DataFrame, metrics: Sequence[str]) -> dict[str, Any] | None:
    """Share of the questions each level answered, and how well (CIRAG, figures 3 and 5)."""
    # A question that failed has no level and stays in the denominator of the shares.
    levels = {level: rows["granularity"] == level for level in LEVELS}
    if not any(chosen.any() for chosen in levels.values()):
        return None
    return {level: {"share": _mean(chosen), **_scores(rows[chosen], metrics)} for level, chosen in levels.items()}


def _recall(rows: pd.DataFrame) -> dict[str, Any] | None:
    """Recall of the supporting passages up to each round; a question that has ended keeps its last value."""
    known = rows["recall"].dropna()
    if known.empty:
        return None
    return {
        "by_round": {
            str(number): _mean(shares[min(number, len(shares)) - 1] for shares in known)
            for number in range(1, known.map(len).max() + 1)
        },
        "kept": _mean(rows["kept"].dropna()),
    }


def _decisions(rows: pd.DataFrame) -> dict[str, int]:
    """What was noted, by name: the system's tallies, and decisions that cannot be read."""
    counts: Counter[str] = Counter(rounds=int(rows["rounds"].sum()), unreadable_decisions=int(rows["malformed"].sum()))
    for tallies in rows["tallies"]:
        counts.update({key: n for key, n in tallies.items() if not key.startswith(_ELSEWHERE)})
    return dict(sorted((name, n) for name, n in counts.items() if n))
