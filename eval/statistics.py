"""Bootstrap intervals (Efron's percentile method) for means and for paired differences, seeded and vectorised.

What is drawn with replacement is the question. Several rows of one question, such as its planning steps, rise and
fall together, so they are drawn together: pass the question ids as `clusters`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

RESAMPLES = 2000
_CELLS_AT_ONCE = 1 << 22


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its 95 % interval, over `n` values; all None when there are no values."""

    mean: float | None
    low: float | None
    high: float | None
    n: int

    def to_json(self) -> dict[str, Any]:
        """The interval as JSON values."""
        return {"mean": self.mean, "low": self.low, "high": self.high, "n": self.n}


@dataclass(frozen=True, slots=True)
class Difference:
    """The mean of `second - first` over the same questions, its 95 % interval and a two-sided bootstrap p-value."""

    mean: float
    low: float
    high: float
    p_value: float
    n: int

    def to_json(self) -> dict[str, Any]:
        """The difference as JSON values."""
        return {"mean": self.mean, "low": self.low, "high": self.high, "p_value": self.p_value, "n": self.n}


def bootstrap_mean(
    values: Sequence[float],
    clusters: Sequence[Hashable] | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Mean and 95 % percentile interval.

    Args:
        values: One value a row.
        clusters: The question each row belongs to; None when every row is a question of its own.
        resamples: Bootstrap samples.
        seed: Seed of the draws; the same for every metric, so that metrics move together.

    Raises:
        ValueError: `clusters` has another length than `values`.
    """
    if not len(values):
        return Interval(None, None, None, 0)
    sums, counts = _by_cluster(np.asarray(values, dtype=np.float64), clusters)
    means = _resampled_means(sums, counts, resamples, seed)
    low, high = np.percentile(means, [2.5, 97.5])
    return Interval(float(sums.sum() / counts.sum()), float(low), float(high), len(values))


def bootstrap_ratio(
    numerators: Sequence[float], denominators: Sequence[float], resamples: int = RESAMPLES, seed: int = 0
) -> Interval:
    """A ratio of sums, such as a micro-averaged precision, and its 95 % percentile interval.

    What is drawn is the text with both its counts, so that numerator and denominator move together. A sample whose
    denominators add up to 0 counts as 0.

    Args:
        numerators: One value a text.
        denominators: One value a text, none negative; all 0 gives an interval without values.
        resamples: Bootstrap samples.
        seed: Seed of the draws.

    Raises:
        ValueError: the lengths differ.
    """
    if len(numerators) != len(denominators):
        raise ValueError(f"{len(numerators)} numerators and {len(denominators)} denominators: each needs its other")
    above, below = np.asarray(numerators, dtype=np.float64), np.asarray(denominators, dtype=np.float64)
    if not below.sum():
        return Interval(None, None, None, 0)
    ratios = _resampled_means(above, below, resamples, seed)
    low, high = np.percentile(ratios, [2.5, 97.5])
    return Interval(float(above.sum() / below.sum()), float(low), float(high), len(numerators))


def paired_difference(
    first: Sequence[float], second: Sequence[float], resamples: int = RESAMPLES, seed: int = 0
) -> Difference:
    """Compare two systems on the same questions.

    Args:
        first: Scores of the one to compare with.
        second: Scores of the other, in the same order of questions.
        resamples: Bootstrap samples.
        seed: Seed of the draws.

    Raises:
        ValueError: the lengths differ, or there are no scores.
    """
    if len(first) != len(second) or not len(first):
        raise ValueError(
            f"a paired difference of {len(first)} and {len(second)} scores: both systems must have answered the same "
            "questions, at least one"
        )
    gaps = np.asarray(second, dtype=np.float64) - np.asarray(first, dtype=np.float64)
    means = _resampled_means(gaps, np.ones_like(gaps), resamples, seed)
    low, high = np.percentile(means, [2.5, 97.5])
    tail = min(float(np.mean(means <= 0)), float(np.mean(means >= 0)))
    return Difference(float(gaps.mean()), float(low), float(high), min(1.0, 2 * tail), len(gaps))


def paired_ratio_difference(
    first: tuple[Sequence[float], Sequence[float]],
    second: tuple[Sequence[float], Sequence[float]],
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Difference:
    """Compare two ratios of sums, such as micro-averaged F1 of two systems, on the same texts.

    Args:
        first: Numerators and denominators of the one to compare with, one of each a text.
        second: The other's, in the same order of texts.
        resamples: Bootstrap samples.
        seed: Seed of the draws.

    Raises:
        ValueError: the lengths differ, or there is nothing to compare.
    """
    parts = [np.asarray(values, dtype=np.float64) for values in (*first, *second)]
    if len({len(part) for part in parts}) != 1 or not len(parts[0]):
        raise ValueError(
            f"a paired difference of {' and '.join(str(len(part)) for part in parts)} values: both systems must have "
            "read the same texts, at least one"
        )
    # The same seed draws the same texts for both.
    one, other = (
        _resampled_means(above, below, resamples, seed) for above, below in ((parts[0], parts[1]), (parts[2], parts[3]))
    )
    gaps = other - one
    means = [above.sum() / below.sum() if below.sum() else 0.0 for above, below in (parts[:2], parts[2:])]
    low, high = np.percentile(gaps, [2.5, 97.5])
    tail = min(float(np.mean(gaps <= 0)), float(np.mean(gaps >= 0)))
    return Difference(float(means[1] - means[0]), float(low), float(high), min(1.0, 2 * tail), len(parts[0]))


def _by_cluster(values: np.ndarray, clusters: Sequence[Hashable] | None) -> tuple[np.ndarray, np.ndarray]:
    if clusters is None:
        return values, np.ones_like(values)
    if len(clusters) != len(values):
        raise ValueError(f"{len(values)} values in {len(clusters)} clusters: every value needs its cluster")
    numbers: dict[Hashable, int] = {}
    index = np.fromiter((numbers.setdefault(name, len(numbers)) for name in clusters), dtype=np.int64)
    return np.bincount(index, weights=values), np.bincount(index).astype(np.float64)


def _resampled_means(sums: np.ndarray, counts: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    size = len(sums)
    rows = max(1, _CELLS_AT_ONCE // size)
    means = []
    for start in range(0, resamples, rows):
        drawn = random.integers(0, size, size=(min(rows, resamples - start), size))
        total = counts[drawn].sum(axis=1)
        means.append(np.divide(sums[drawn].sum(axis=1), total, out=np.zeros_like(total), where=total > 0))
    return np.concatenate(means)
