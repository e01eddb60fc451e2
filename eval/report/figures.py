"""The figures of one run: scores, rounds, calls, tokens, latency, granularities, recall, decisions; all with their n.

Everything is computed from the rows of `results.jsonl`, also for a run that was killed, so that tables and plots of a
report agree with each other. Values are JSON values; an interval is `{"mean", "low", "high", "n"}`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tripletune.eval.report.read import Row, Run
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
    rows = run.rows
    if not rows:
        return {}
    return {
        "scores": _scores(rows, run.metrics),
        "by_type": _by_type(rows, run.metrics),
        "rounds": {
            "mean": _mean(row.rounds for row in rows),
            "questions": {str(count): n for count, n in sorted(Counter(row.rounds for row in rows).items())},
            "ended_by": dict(sorted(Counter(row.stop for row in rows).items())),
        },
        "cost": {name: _mean(row.cost[place] for row in rows) for place, name in enumerate(COSTS)},
        "roles": _roles(rows),
        "latency": _latency(rows, run),
        "granularity": _granularity(rows, run.metrics),
        "recall": _recall(rows),
        "decisions": _decisions(rows),
        "errors": sum(row.failed for row in rows),
    }


def _mean(values: Iterable[float]) -> dict[str, Any]:
    return bootstrap_mean(list(values)).to_json()


def _scores(rows: Sequence[Row], metrics: Sequence[str]) -> dict[str, Any]:
    return {name: _mean(row.scores[name] for row in rows) for name in metrics}


def _by_type(rows: Sequence[Row], metrics: Sequence[str]) -> dict[str, Any] | None:
    kinds = sorted({row.type for row in rows})
    if len(kinds) < 2:
        return None
    return {kind or "none": _scores([row for row in rows if row.type == kind], metrics) for kind in kinds}


def _roles(rows: Sequence[Row]) -> dict[str, dict[str, float | None]] | None:
    """Calls, tokens read and tokens written a question, by role, in the order in which questions meet them."""
    calls: Counter[str] = Counter()
    tokens: dict[str, list[int]] = {}
    for row in rows:
        calls.update({key.removeprefix(_CALLS): n for key, n in row.tallies.items() if key.startswith(_CALLS)})
        for role, (read, written) in (row.tokens or {}).items():
            sums = tokens.setdefault(role, [0, 0])
            sums[0] += read
            sums[1] += written
    total = len(rows)
    return {
        role: {
            "calls": count / total,
            "tokens_read": tokens[role][0] / total if role in tokens else None,
            "tokens_written": tokens[role][1] / total if role in tokens else None,
        }
        for role, count in calls.items()
    } or None


def _latency(rows: Sequence[Row], run: Run) -> dict[str, Any]:
    seconds = [row.seconds for row in rows]
    return {
        "mean": _mean(seconds),
        "percentiles": {str(share): float(np.percentile(seconds, share)) for share in (10, 50, 90)},
        "questions_per_second": run.session.get("questions_per_second"),
        "concurrency": run.about.get("concurrency"),
    }


def _granularity(rows: Sequence[Row], metrics: Sequence[str]) -> dict[str, Any] | None:
    """Share of the questions each level answered, and how well (CIRAG, figures 3 and 5)."""
    if not any(row.granularity for row in rows):
        return None
    # A question that failed has no level and stays in the denominator of the shares.
    return {
        level: {
            "share": _mean(float(row.granularity == level) for row in rows),
            **_scores([row for row in rows if row.granularity == level], metrics),
        }
        for level in LEVELS
    }


def _recall(rows: Sequence[Row]) -> dict[str, Any] | None:
    """Recall of the supporting passages up to each round; a question that has ended keeps its last value."""
    known = [row.recall for row in rows if row.recall]
    if not known:
        return None
    return {
        "by_round": {
            str(number): _mean(shares[min(number, len(shares)) - 1] for shares in known)
            for number in range(1, max(map(len, known)) + 1)
        },
        "kept": _mean(row.kept for row in rows if row.kept is not None),
    }


def _decisions(rows: Sequence[Row]) -> dict[str, int]:
    """What was odd or noted, by name: the system's tallies, and decisions that could not be read."""
    counts: Counter[str] = Counter()
    for row in rows:
        counts.update({key: n for key, n in row.tallies.items() if not key.startswith(_ELSEWHERE)})
        counts.update({"rounds": row.rounds, "unreadable_decisions": row.malformed})
    return dict(sorted((name, n) for name, n in counts.items() if n))
