"""Bootstrap intervals (Efron's percentile method) for means, ratios and paired differences, seeded and vectorised.

What is drawn with replacement is the question. Several rows of one question, such as its planning steps, rise and
fall together, so they are drawn together: pass the question ids as `clusters`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
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
        return asdict(self)


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
        return asdict(self)


def bootstrap_mean(
    values: Sequence[float],
    clusters: Sequence[Hashable] | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Mean and 95 % percentile interval.

    Args:
        values: One value per row.
        clusters: The question each row belongs to; None when every row is a question of its own.
        resamples: Bootstrap samples.
        seed: Seed of the draws; the same for every metric, so that metrics move together.

    Raises:
        ValueError: `clusters` has another length than `values`, or a value is not a finite number.
    """
    sums, counts = _by_cluster(_finite(values), clusters)
    return _interval(sums, counts, len(values), resamples, seed)


def bootstrap_pairs(pairs: Sequence[tuple[Hashable, float]]) -> Interval:
    """Mean and 95 % percentile interval of `(question, score)` pairs; questions are drawn."""
    questions, scores = zip(*pairs) if pairs else ((), ())
    return bootstrap_mean(scores, questions)


def bootstrap_ratio(
    numerators: Sequence[float], denominators: Sequence[float], resamples: int = RESAMPLES, seed: int = 0
) -> Interval:
    """A ratio of sums, such as a micro-averaged precision, and its 95 % percentile interval.

    What is drawn is the text with both its counts, so that numerator and denominator move together. A sample whose
    denominators add up to 0 counts as 0.

    Args:
        numerators: One value per text.
        denominators: One value per text, none negative; all 0 gives an interval without values.
        resamples: Bootstrap samples.
        seed: Seed of the draws.

    Raises:
        ValueError: the lengths differ, or a value is not a finite number.
    """
    if len(numerators) != len(denominators):
        raise ValueError(f"{len(numerators)} numerators and {len(denominators)} denominators: each needs its other")
    return _interval(_finite(numerators), _finite(denominators), len(numerators), resamples, seed)


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
        ValueError: the lengths differ, there are no scores, or one is not a finite number.
    """
    ones = np.ones(len(first))
    return paired_ratio_difference((first, ones), (second, ones), resamples, seed)  # type: ignore[arg-type]


def paired_ratio_difference(
    first: tuple[Sequence[float], Sequence[float]],
    second: tuple[Sequence[float], Sequence[float]],
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Difference:
    """Compare two ratios of sums, such as micro-averaged F1 of two systems, on the same texts.

    Args:
        first: Numerators and denominators of the one to compare with, one of each per text.
        second: The other's, in the same order of texts.
        resamples: Bootstrap samples.
        seed: Seed of the draws.

    Raises:
        ValueError: the lengths differ, there is nothing to compare, or a value is not a finite number.
    """
    parts = [_finite(values) for values in (*first, *second)]
    if len({len(part) for part in parts}) != 1 or not len(parts[0]):
        raise ValueError(
            f"a paired difference of {' and '.join(str(len(part)) for part in parts[::2])} scores: both systems must "
            "have answered the same questions, at least one"
        )
    # The same seed draws the same texts for both.
    one, other = (_resampled(above, below, resamples, seed) for above, below in (parts[:2], parts[2:]))
    gaps = other - one
    means = [above.sum() / below.sum() if below.sum() else 0.0 for above, below in (parts[:2], parts[2:])]
    low, high = np.percentile(gaps, [2.5, 97.5])
    # Sums that differ in their last digit alone are no difference.
    tail = min(float(np.mean(gaps <= 1e-12)), float(np.mean(gaps >= -1e-12)))
    return Difference(float(means[1] - means[0]), float(low), float(high), min(1.0, 2 * tail), len(parts[0]))


def flatten_means(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The means of nested metrics, as `planning/action_accuracy` and so on; what has none is left out."""
    flat = flatten(metrics, "/")
    return {name: one["mean"] for name, one in flat.items() if isinstance(one, Mapping) and one["mean"] is not None}


def flatten(values: Mapping[str, Any], separator: str) -> dict[str, Any]:
    """Nested values under their joined names; an interval is one value."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and "mean" not in value:
            flat |= {f"{name}{separator}{inner}": one for inner, one in flatten(value, separator).items()}
        else:
            flat[name] = value
    return flat


def _finite(values: Sequence[float]) -> np.ndarray:
    numbers = np.asarray(values, dtype=np.float64)
    if not np.isfinite(numbers).all():
        raise ValueError("a score is NaN or infinite, so nothing can be said of their mean: run what made it again")
    return numbers


def _by_cluster(values: np.ndarray, clusters: Sequence[Hashable] | None) -> tuple[np.ndarray, np.ndarray]:
    if clusters is None:
        return values, np.ones_like(values)
    if len(clusters) != len(values):
        raise ValueError(f"{len(values)} values in {len(clusters)} clusters: every value needs its cluster")
    numbers: dict[Hashable, int] = {}
    index = np.fromiter((numbers.setdefault(name, len(numbers)) for name in clusters), dtype=np.int64)
    return np.bincount(index, weights=values), np.bincount(index).astype(np.float64)


def _interval(above: np.ndarray, below: np.ndarray, n: int, resamples: int, seed: int) -> Interval:
    if not below.sum():
        return Interval(None, None, None, 0)
    low, high = np.percentile(_resampled(above, below, resamples, seed), [2.5, 97.5])
    return Interval(float(above.sum() / below.sum()), float(low), float(high), n)


def _resampled(sums: np.ndarray, counts: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    """The ratio of sums in each bootstrap sample."""
    random = np.random.default_rng(seed)
    size = len(sums)
    rows = max(1, _CELLS_AT_ONCE // size)
    means = []
    for start in range(0, resamples, rows):
        drawn = random.integers(0, size, size=(min(rows, resamples - start), size))
        total = counts[drawn].sum(axis=1)
        means.append(np.divide(sums[drawn].sum(axis=1), total, out=np.zeros_like(total), where=total > 0))
    return np.concatenate(means)
