"""Seeded, vectorised intervals and tests for means, ratios of sums, and paired differences between systems.

An interval is `{"mean", "low", "high", "n"}`: a mean over `n` values with its 95 % bootstrap interval (Efron's
percentile method), or None without values. If all values are equal, the bootstrap shows no spread. The interval then
assumes the largest share of other values that `n` draws may miss, by Clopper and Pearson (1934); at 0 % and 100 % it
equals their interval.

A difference has two more keys: the two-sided `p_value`, and `test`, the name of the test. The test is McNemar's exact
test if every score is 0 or 1, else a permutation test, in which the systems swap results on a random half of the
questions. For many differences in one table, `correct_table` adds `p_holm` (Holm, 1979).

Bootstrap and permutation treat a whole question, or text, as the unit.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from tripletune.core.files import flatten

RESAMPLES, PERMUTATIONS = 2000, 100_000
SIGNIFICANT = 0.05
NO_DIFFERENCE = "no difference shown"
P_NOTE = (
    "p is two-sided, from McNemar's exact test if all scores are 0 or 1 and else from a permutation test, and is "
    "corrected for the number of differences in the table (Holm)"
)
# Sums that differ only in their last digits count as equal.
_EQUAL = 1e-12
# Maximum draws in memory at once.
_CELLS_AT_ONCE = 1 << 20
# Smallest and largest value of scores, and of differences between scores.
SCORE, GAP = (0.0, 1.0), (-1.0, 1.0)
Bounds = tuple[float, float]
Interval = dict[str, Any]
Numbers = Sequence[float] | np.ndarray


def bootstrap_mean(values: Sequence[float], bounds: Bounds | None = SCORE) -> Interval:
    """Mean and 95 % interval of one value per question; `bounds` is None for costs."""
    return bootstrap_means({"": values}, bounds)[""]


def bootstrap_means(values: Mapping[str, Sequence[float]], bounds: Bounds | None = SCORE) -> dict[str, Interval]:
    """Several means at once, such as the metrics of one run; values of equal length share their draws."""
    columns = {name: np.asarray(column, np.float64) for name, column in values.items()}
    found: dict[str, Interval] = {name: {"mean": None, "low": None, "high": None, "n": 0} for name in columns}
    for size in {len(column) for column in columns.values()} - {0}:
        names = [name for name, column in columns.items() if len(column) == size]
        samples = _resampled(np.column_stack([columns[name] for name in names])) / size
        for name, drawn in zip(names, samples.T):
            mean = float(columns[name].sum() / size)
            found[name] = {"mean": mean, **_limits(mean, drawn, bounds, size), "n": size}
    return found


def bootstrap_pairs(pairs: Sequence[tuple[Hashable, float]]) -> Interval:
    """Mean and interval of `(question, score)` pairs.

    The rows of one question, such as its planning steps, are correlated, so they are drawn together.
    """
    return _interval(*sums_of(pairs), len(pairs))


def sums_of(pairs: Sequence[tuple[Hashable, float]]) -> tuple[np.ndarray, np.ndarray]:
    """For each question of `(question, score)` pairs, the sum of the scores and their number."""
    places: dict[Hashable, int] = {}
    index = np.array([places.setdefault(question, len(places)) for question, _ in pairs], dtype=np.int64)
    return np.bincount(index, weights=[score for _, score in pairs]), np.bincount(index).astype(np.float64)


def bootstrap_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Interval:
    """A ratio of sums, such as a micro-averaged precision, and its 95 % interval.

    A text is drawn with both its counts. A sample whose denominator is 0 counts as 0; if all denominators are 0, the
    interval has no values.
    """
    return _interval(np.asarray(numerators), np.asarray(denominators), len(numerators))


def paired_table(scores: Mapping[Any, Sequence[float]]) -> dict[tuple[Any, Any], Interval]:
    """Mean, interval and test of `second - first` for all pairs of systems on the same questions, in the same order."""
    columns = np.column_stack(list(scores.values())).astype(np.float64)
    return dict(zip(combinations(scores, 2), _differences(columns, np.ones_like(columns))))


def paired_ratio_difference(first: tuple[Numbers, Numbers], second: tuple[Numbers, Numbers]) -> Interval:
    """Like `paired_table`, for two ratios of sums, such as micro-averaged F1, from numerators and denominators."""
    parts = np.column_stack([first[0], second[0], first[1], second[1]]).astype(np.float64)
    return _differences(parts[:, :2], parts[:, 2:])[0]


def correct_table(differences: Iterable[Interval]) -> None:
    """Add `p_holm` to each difference of a table: p, corrected for the number of differences (Holm's step-down)."""
    found = sorted(differences, key=lambda one: one["p_value"])
    largest = 0.0
    for place, one in enumerate(found):
        largest = max(largest, min(1.0, (len(found) - place) * one["p_value"]))
        one["p_holm"] = largest


def verdict(difference: Interval) -> str:
    """The verdict on a difference, by `p_holm` if present: "better", "worse" or "no difference shown"."""
    if difference["p_holm" if "p_holm" in difference else "p_value"] >= SIGNIFICANT:
        return NO_DIFFERENCE
    return "better" if difference["mean"] > 0 else "worse"


def p_cell(difference: Interval) -> str:
    """The p-value of a difference for a table: `p_holm` if present."""
    p_value = difference["p_holm" if "p_holm" in difference else "p_value"]
    close = SIGNIFICANT - 0.0005 <= p_value < SIGNIFICANT  # 0.0497 is not to read as 0.050
    return "< 0.001" if p_value < 0.001 else "< 0.05" if close else f"{p_value:.3f}"


def flatten_means(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The means of nested metrics by names such as `planning/action_accuracy`; values without a mean are left out."""
    flat = flatten(metrics, "/")
    return {name: one["mean"] for name, one in flat.items() if isinstance(one, Mapping) and one["mean"] is not None}


def _interval(above: np.ndarray, below: np.ndarray, n: int) -> Interval:
    if not below.sum():
        return {"mean": None, "low": None, "high": None, "n": 0}
    mean, samples = float(above.sum() / below.sum()), _ratios(_resampled(np.column_stack([above, below])))
    return {"mean": mean, **_limits(mean, samples, SCORE, int(np.count_nonzero(below))), "n": n}


def _limits(mean: float, samples: np.ndarray, bounds: Bounds | None, draws: int) -> Interval:
    low, high = np.percentile(samples, [2.5, 97.5])
    if bounds and high - low < _EQUAL:
        missed = 1 - 0.025 ** (1 / draws)
        low, high = mean - missed * (mean - bounds[0]), mean + missed * (bounds[1] - mean)
    return {"low": float(low), "high": float(high)}


def _ratios(sums: np.ndarray) -> np.ndarray:
    """Ratios of sums of shape (samples, 2 x systems), numerators first; 0 if the denominator is 0."""
    above, below = np.hsplit(sums, 2)
    return np.divide(above, below, out=np.zeros_like(above), where=below > 0)


def _resampled(columns: np.ndarray) -> np.ndarray:
    """The sums of the columns in each bootstrap sample, shape (samples, columns)."""
    # One seed draws the same texts for all systems and metrics, so that their sums vary together.
    random, size = np.random.default_rng(0), len(columns)
    rows, sums = max(1, _CELLS_AT_ONCE // size), []
    for start in range(0, RESAMPLES, rows):
        count = min(rows, RESAMPLES - start)
        drawn = random.integers(0, size, size=(count, size)) + size * np.arange(count)[:, None]
        times = np.bincount(drawn.ravel(), minlength=count * size).reshape(count, size)
        sums.append(times.astype(np.float64) @ columns)
    return np.concatenate(sums)


def _differences(above: np.ndarray, below: np.ndarray) -> list[Interval]:
    """Differences of all pairs of systems, from numerators and denominators, each of shape (texts, systems)."""
    means = bool((below == 1).all())
    pairs = list(combinations(range(above.shape[1]), 2))
    totals = _ratios(np.hstack([above.sum(0), below.sum(0)])[None])[0]
    samples = _ratios(_resampled(np.hstack([above, below])))
    found: list[Interval] = []
    for one, two in pairs:
        mean, gaps = float(totals[two] - totals[one]), above[:, two] - above[:, one]
        limits = _limits(mean, samples[:, two] - samples[:, one], GAP, len(gaps))
        found.append({"mean": mean, **limits, "n": len(gaps)})
        if means and np.isin(gaps, (-1.0, 0.0, 1.0)).all():
            found[-1] |= {"p_value": _mcnemar(gaps), "test": "McNemar's exact test"}
    drawn = [place for place, one in enumerate(found) if "p_value" not in one]
    chances = _permuted(above, below, [pairs[place] for place in drawn]) if drawn else ()
    for place, p_value in zip(drawn, chances):
        found[place] |= {"p_value": p_value, "test": "permutation test"}
    return found


def _mcnemar(gaps: np.ndarray) -> float:
    """The p-value for differences of -1, 0 and 1, whose permutation test is a binomial test."""
    # The import takes longer than all of `tripletune eval --help`.
    from scipy.stats import binomtest

    differ = np.count_nonzero(gaps)
    return float(binomtest(int((gaps > 0).sum()), differ).pvalue) if differ else 1.0


def _permuted(above: np.ndarray, below: np.ndarray, pairs: list[tuple[int, int]]) -> list[float]:
    """Two-sided p-values of pairs of systems, swapping each text's two results at random."""
    one, two = ([pair[side] for pair in pairs] for side in (0, 1))
    moved = np.hstack([above[:, two] - above[:, one], below[:, two] - below[:, one]])
    first, second = (np.hstack([above[:, side].sum(0), below[:, side].sum(0)]) for side in (one, two))
    observed = np.abs(_ratios(second[None]) - _ratios(first[None]))
    random, size = np.random.default_rng(0), len(above)
    rows, as_far = max(1, _CELLS_AT_ONCE // size), np.zeros(len(pairs))
    for start in range(0, PERMUTATIONS, rows):
        count = min(rows, PERMUTATIONS - start)
        bits = np.frombuffer(random.bytes(count * -(-size // 8)), np.uint8).reshape(count, -1)
        change = np.unpackbits(bits, axis=1, count=size).astype(np.float64) @ moved
        as_far += (np.abs(_ratios(second - change) - _ratios(first + change)) >= observed - _EQUAL).sum(0)
    # The observed result counts as one of the permutations, so that no p-value is 0.
    return [float(p_value) for p_value in (as_far + 1) / (PERMUTATIONS + 1)]
