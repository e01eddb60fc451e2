"""Bootstrap intervals (Efron's percentile method) for means, ratios and paired differences, seeded and vectorised.

An interval is `{"mean", "low", "high", "n"}`: a mean with its 95 % interval, over `n` values; else None.
A difference has its two-sided bootstrap p-value too, as `p_value`.

What is drawn with replacement is the question.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

RESAMPLES = 2000
_CELLS_AT_ONCE = 1 << 22
Interval = dict[str, Any]


def bootstrap_mean(values: Sequence[float]) -> Interval:
    """Mean and 95 % percentile interval.

    Args:
        values: One value per question.

    Raises:
        ValueError: a value is not a finite number.
    """
    numbers = _finite(values)
    return _interval(numbers, np.ones_like(numbers), len(values))


def bootstrap_pairs(pairs: Sequence[tuple[Hashable, float]]) -> Interval:
    """Mean and 95 % percentile interval of `(question, score)` pairs.

    Several rows of one question, such as its planning steps, rise and fall together, so they are drawn together.

    Raises:
        ValueError: a score is not a finite number.
    """
    places: dict[Hashable, int] = {}
    index = np.array([places.setdefault(question, len(places)) for question, _ in pairs], dtype=np.int64)
    sums, counts = np.bincount(index, weights=_finite([score for _, score in pairs])), np.bincount(index)
    return _interval(sums, counts.astype(np.float64), len(pairs))


def bootstrap_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Interval:
    """A ratio of sums, such as a micro-averaged precision, and its 95 % percentile interval.

    What is drawn is the text with both its counts, so that numerator and denominator move together. A sample whose
    denominators add up to 0 counts as 0.

    Args:
        numerators: One value per text.
        denominators: One value per text, none negative; all 0 gives an interval without values.

    Raises:
        ValueError: a value is not a finite number.
    """
    return _interval(_finite(numerators), _finite(denominators), len(numerators))


def paired_difference(first: Sequence[float], second: Sequence[float]) -> Interval:
    """Compare the scores of two systems on the same questions, in the same order.

    Returns:
        The mean of `second - first` with its interval and `p_value`.

    Raises:
        ValueError: the lengths differ, there are no scores, or one is not a finite number.
    """
    ones = np.ones(len(first))
    return paired_ratio_difference((first, ones), (second, ones))  # type: ignore[arg-type]


def paired_ratio_difference(
    first: tuple[Sequence[float], Sequence[float]], second: tuple[Sequence[float], Sequence[float]]
) -> Interval:
    """Compare two ratios of sums, such as micro-averaged F1 of two systems, on the same texts.

    Args:
        first: Numerators and denominators of the one to compare with, one of each per text.
        second: The other's, in the same order of texts.

    Raises:
        ValueError: the lengths differ, there is nothing to compare, or a value is not a finite number.
    """
    parts = [_finite(values) for values in (*first, *second)]
    if len({len(part) for part in parts}) != 1 or not len(parts[0]):
        raise ValueError(
            f"a paired difference of {' and '.join(str(len(part)) for part in parts[::2])} scores: both systems must "
            "have answered the same questions, at least one"
        )
    gaps = _resampled(*parts[2:]) - _resampled(*parts[:2])
    means = [above.sum() / below.sum() if below.sum() else 0.0 for above, below in (parts[:2], parts[2:])]
    low, high = np.percentile(gaps, [2.5, 97.5])
    # Sums that differ in their last digit alone are no difference.
    tail = min(float(np.mean(gaps <= 1e-12)), float(np.mean(gaps >= -1e-12)))
    return {
        "mean": float(means[1] - means[0]),
        "low": float(low),
        "high": float(high),
        "p_value": min(1.0, 2 * tail),
        "n": len(parts[0]),
    }


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


def _interval(above: np.ndarray, below: np.ndarray, n: int) -> Interval:
    if not below.sum():
        return {"mean": None, "low": None, "high": None, "n": 0}
    low, high = np.percentile(_resampled(above, below), [2.5, 97.5])
    return {"mean": float(above.sum() / below.sum()), "low": float(low), "high": float(high), "n": n}


def _resampled(sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The ratio of sums in each bootstrap sample."""
    # One seed draws the same texts for two systems and for all metrics, so that they move together.
    random = np.random.default_rng(0)
    size = len(sums)
    rows = max(1, _CELLS_AT_ONCE // size)
    means = []
    for start in range(0, RESAMPLES, rows):
        drawn = random.integers(0, size, size=(min(rows, RESAMPLES - start), size))
        total = counts[drawn].sum(axis=1)
        means.append(np.divide(sums[drawn].sum(axis=1), total, out=np.zeros_like(total), where=total > 0))
    return np.concatenate(means)
