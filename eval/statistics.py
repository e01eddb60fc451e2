"""Seeded, vectorised intervals and tests for means, ratios of sums, and paired differences between systems.

An `Interval` is a mean over `n` values with its 95 % bootstrap interval (Efron's percentile method). If all values are
equal, the bootstrap shows no spread. The interval then assumes the largest share of other values that `n` draws may
miss, by Clopper and Pearson (1934); at 0 % and 100 % it equals their interval.

A `Difference` between two systems also has a test. The test is McNemar's exact test if every score is 0 or 1, else a
permutation test, in which the systems swap results on a random half of the questions. For many differences in one
table, `add_corrected_p_values` corrects the p-values (Holm, 1979).

Bootstrap and permutation treat a whole question, or text, as the unit. Of a system that was run with several seeds, the
seeds are drawn as well (`seeds_interval`, `seeds_difference`), since another seed would give other scores.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple, NotRequired, TypedDict, TypeVar

import numpy as np

from tripletune.core.files import flatten

RESAMPLES = 2000
PERMUTATIONS = 100_000
SIGNIFICANT = 0.05
NO_DIFFERENCE = "no difference shown"
P_NOTE = (
    "p is two-sided, from McNemar's exact test if all scores are 0 or 1 and else from a permutation test, and is "
    "corrected for the number of differences in the table (Holm); intervals are not corrected, so one may leave out 0 "
    "where p is above 0.05"
)
# Sums that differ only in their last digits count as equal.
_EQUAL = 1e-12
# Maximum draws in memory at once.
_CELLS_AT_ONCE = 1 << 20
# Numbers of the random draws of the seeds of two systems.
_FIRST_SYSTEM, _SECOND_SYSTEM = 1, 2
Numbers = Sequence[float] | np.ndarray
# What names a system in a table, such as a name or a number.
SystemT = TypeVar("SystemT", bound=Hashable)


class Bounds(NamedTuple):
    """The smallest and the largest value that a figure can have, or the two ends of an interval."""

    low: float
    high: float


# Of scores, and of differences between two scores.
SCORE = Bounds(0.0, 1.0)
GAP = Bounds(-1.0, 1.0)


class Interval(TypedDict):
    """A mean over `n` values, with the ends of its 95 % interval; None without values."""

    mean: float | None
    low: float | None
    high: float | None
    n: int


class Difference(TypedDict):
    """A mean difference between two systems over `n` questions, with the ends of its 95 % interval and a test.

    Attributes:
        p_value: Chance of such a difference between equal systems, two-sided.
        test: Name of the test.
        p_holm: `p_value`, corrected for the number of differences in the table; see `add_corrected_p_values`.
        verdict: See the function `verdict`; reports have it.
    """

    mean: float
    low: float
    high: float
    n: int
    p_value: float
    test: str
    p_holm: NotRequired[float]
    verdict: NotRequired[str]


class Sums(NamedTuple):
    """For each question, the sum of its scores and their number; arrays of shape (questions,)."""

    scores: np.ndarray
    counts: np.ndarray


def bootstrap_mean(values: Numbers, bounds: Bounds | None = SCORE) -> Interval:
    """Mean and 95 % interval of one value per question; `bounds` is None for costs."""
    return bootstrap_means({"": values}, bounds)[""]


def bootstrap_means(values: Mapping[str, Numbers], bounds: Bounds | None = SCORE) -> dict[str, Interval]:
    """Several means at once, such as the metrics of one run; values of equal length share their draws.

    This is faster, and scores of the same questions vary together.
    """
    intervals: dict[str, Interval] = {}
    by_size: dict[int, dict[str, np.ndarray]] = {}
    for name, column in values.items():
        intervals[name] = _empty_interval()
        if len(column):
            by_size.setdefault(len(column), {})[name] = np.asarray(column, np.float64)
    for size, columns in by_size.items():
        samples = _bootstrap_sums(np.column_stack(list(columns.values()))) / size
        for (name, column), sampled_means in zip(columns.items(), samples.T, strict=True):
            mean = float(column.sum() / size)
            low, high = _interval_ends(mean, sampled_means, bounds, size)
            intervals[name] = {"mean": mean, "low": low, "high": high, "n": size}
    return intervals


def bootstrap_pairs(pairs: Sequence[tuple[Hashable, float]]) -> Interval:
    """Mean and interval of `(question, score)` pairs.

    The rows of one question, such as its planning steps, are correlated, so they are drawn together.
    """
    return _ratio_interval(*sums_by_question(pairs), len(pairs))


def sums_by_question(pairs: Sequence[tuple[Hashable, float]]) -> Sums:
    """For each question of `(question, score)` pairs, the sum of the scores and their number."""
    sums: dict[Hashable, float] = {}
    counts: Counter[Hashable] = Counter()
    for question, score in pairs:
        sums[question] = sums.get(question, 0.0) + score
        counts[question] += 1
    return Sums(np.array(list(sums.values()), np.float64), np.array(list(counts.values()), np.float64))


def bootstrap_ratio(numerators: Numbers, denominators: Numbers, bounds: Bounds | None = SCORE) -> Interval:
    """A ratio of sums, such as a micro-averaged precision, and its 95 % interval; `bounds` is None for costs.

    A text is drawn with both its counts. A sample whose denominator is 0 counts as 0; if all denominators are 0, the
    interval has no values.
    """
    return _ratio_interval(np.asarray(numerators), np.asarray(denominators), len(numerators), bounds)


def paired_table(scores: Mapping[SystemT, Numbers]) -> dict[tuple[SystemT, SystemT], Difference]:
    """Mean, interval and test of `second - first` by `(first, second)`, for all pairs of systems.

    Args:
        scores: By system, the scores of the same questions in the same order.
    """
    columns = np.column_stack(list(scores.values())).astype(np.float64)
    return dict(zip(combinations(scores, 2), _paired_differences(columns, np.ones_like(columns)), strict=True))


def paired_ratio_difference(first: tuple[Numbers, Numbers], second: tuple[Numbers, Numbers]) -> Difference:
    """Like `paired_table`, for two ratios of sums, such as micro-averaged F1, from numerators and denominators."""
    columns = np.column_stack([first[0], second[0], first[1], second[1]]).astype(np.float64)
    return _paired_differences(columns[:, :2], columns[:, 2:])[0]


def seeds_interval(seeds: Sequence[np.ndarray], bounds: Bounds | None = SCORE) -> Interval:
    """Mean and 95 % interval of one system that was run with several seeds: the seeds and the questions are drawn.

    Both levels are drawn with replacement and apart from each other (the pigeonhole bootstrap of Owen, 2007). It counts
    the differences between seeds on single questions more than once, so the interval is rather too wide than too
    narrow. For a single seed it is that of `bootstrap_ratio`, which says nothing about other seeds.

    Args:
        seeds: Numerators and denominators of each seed, shape (2, questions), over the same questions.
        bounds: The range of a score; None for costs.
    """
    mean = _mean_of_seeds(seeds)
    if len(seeds) == 1 or mean is None:
        above, below = np.mean(seeds, axis=0)
        return bootstrap_ratio(above, below, bounds)
    low, high = _interval_ends(mean, _samples_of_seeds(seeds, _FIRST_SYSTEM), bounds, seeds[0].shape[1])
    if bounds:
        low = max(low, bounds.low)
        high = min(high, bounds.high)
    return {"mean": mean, "low": low, "high": high, "n": int((seeds[0][1] > 0).sum())}


def seeds_difference(
    first: Sequence[np.ndarray], second: Sequence[np.ndarray], same_models: Sequence[int] | None = None
) -> Difference:
    """`second - first` of two systems, of which at least one was run with several seeds; see `seeds_interval`.

    Questions are paired, and so are seeds if both systems are the same trained models, run in two ways: `same_models`
    has the index in `second` of the model of each seed of `first`. The p-value is that of the bootstrap: twice the
    share of the samples in which the difference has the other sign or is 0. A test that exchanges results question by
    question would only ask whether these trained models differ, and not whether training again would show the same. If
    one system has a single seed, p and interval lack the differences between its seeds.
    """
    first_mean = _mean_of_seeds(first)
    second_mean = _mean_of_seeds(second)
    if (len(first) == 1 and len(second) == 1) or first_mean is None or second_mean is None:
        return paired_ratio_difference(tuple(np.mean(first, axis=0)), tuple(np.mean(second, axis=0)))
    if same_models is not None:
        second = [second[place] for place in same_models]
    # The same draws take the same models.
    system = _SECOND_SYSTEM if same_models is None else _FIRST_SYSTEM
    samples = _samples_of_seeds(second, system) - _samples_of_seeds(first, _FIRST_SYSTEM)
    mean = second_mean - first_mean
    items = first[0].shape[1]
    low, high = _interval_ends(mean, samples, GAP, items)
    not_above = int((samples <= _EQUAL).sum())
    not_below = int((samples >= -_EQUAL).sum())
    # The observed result counts as one of the samples, so that no p-value is 0.
    p_value = min(1.0, 2 * (min(not_above, not_below) + 1) / (len(samples) + 1))
    return {"mean": mean, "low": low, "high": high, "n": items, "p_value": p_value, "test": "two-level bootstrap"}


def add_corrected_p_values(differences: Iterable[Difference]) -> None:
    """Add `p_holm` to each difference: p, corrected (Holm's step-down), as in a table some are small by chance."""
    ordered = sorted(differences, key=lambda difference: difference["p_value"])
    largest = 0.0
    for place, difference in enumerate(ordered):
        corrected = (len(ordered) - place) * difference["p_value"]
        largest = max(largest, min(1.0, corrected))
        difference["p_holm"] = largest


def verdict(difference: Difference) -> str:
    """The verdict on a difference, by `p_holm` if present: "better", "worse" or "no difference shown"."""
    if _corrected_p(difference) >= SIGNIFICANT:
        return NO_DIFFERENCE
    return "better" if difference["mean"] > 0 else "worse"


def p_cell(difference: Difference) -> str:
    """The p-value of a difference for a table: `p_holm` if present, since a table holds several tests."""
    p_value = _corrected_p(difference)
    if p_value < 0.001:
        return "< 0.001"
    if SIGNIFICANT - 0.0005 <= p_value < SIGNIFICANT:
        return f"< {SIGNIFICANT}"  # 0.0497 is not to read as 0.050
    return f"{p_value:.3f}"


def _corrected_p(difference: Difference) -> float:
    """The p-value that counts: the corrected one if the difference belongs to a table."""
    return difference.get("p_holm", difference["p_value"])


def flatten_means(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The means of nested metrics by names such as `planning/action_accuracy`; values without a mean are left out."""
    means = {}
    for name, value in flatten(metrics, "/").items():
        # `flatten` leaves intervals whole; other values are numbers and texts.
        if isinstance(value, Mapping) and value["mean"] is not None:
            means[name] = value["mean"]
    return means


def _empty_interval() -> Interval:
    """The interval of a score that no question has."""
    return {"mean": None, "low": None, "high": None, "n": 0}


def _ratio_interval(above: np.ndarray, below: np.ndarray, n: int, bounds: Bounds | None = SCORE) -> Interval:
    """Ratio of the sums of two arrays of shape (questions,), and its interval, as a mean over `n` values."""
    if not below.sum():
        return _empty_interval()
    mean = float(above.sum() / below.sum())
    samples = _ratios_of_sums(_bootstrap_sums(np.column_stack([above, below])))
    low, high = _interval_ends(mean, samples, bounds, int(np.count_nonzero(below)))
    return {"mean": mean, "low": low, "high": high, "n": n}


def _mean_of_seeds(seeds: Sequence[np.ndarray]) -> float | None:
    """Ratio of the sums of all seeds; None if no question has a denominator."""
    above, below = np.sum(seeds, axis=(0, 2))
    return float(above / below) if below else None


def _samples_of_seeds(seeds: Sequence[np.ndarray], system: int) -> np.ndarray:
    """Ratios in the bootstrap samples of questions and seeds, shape (samples,).

    Questions are drawn alike for all systems, so that they are paired; `system` numbers the draws of the seeds.
    """
    number = len(seeds)
    sums = _bootstrap_sums(np.concatenate(seeds).T).reshape(-1, number, 2)
    shares = np.full((len(sums), number), 1 / number)
    if number > 1:
        random = np.random.default_rng(system)
        drawn = random.multinomial(number, [1 / number] * number, size=len(sums)) / number
        # The mean of k drawn seeds varies by only (k - 1) / k of the variance of k new seeds.
        shares += (drawn - shares) * np.sqrt(number / (number - 1))
    return _ratios_of_sums(np.einsum("ns,nsc->nc", shares, sums))[:, 0]


def _interval_ends(mean: float, samples: np.ndarray, bounds: Bounds | None, draws: int) -> Bounds:
    """The ends of the interval of a mean, from the means of the bootstrap samples, each of `draws` questions."""
    low, high = np.percentile(samples, [2.5, 97.5])
    if bounds and high - low < _EQUAL:
        # All values are equal: other values may have been missed, at most as many as Clopper and Pearson allow.
        missed = 1 - 0.025 ** (1 / draws)
        low = mean - missed * (mean - bounds.low)
        high = mean + missed * (bounds.high - mean)
    return Bounds(float(low), float(high))


def _ratios_of_sums(sums: np.ndarray) -> np.ndarray:
    """Ratios of sums of shape (samples, 2 x systems), numerators first; 0 if the denominator is 0."""
    above, below = np.hsplit(sums, 2)
    return np.divide(above, below, out=np.zeros_like(above), where=below > 0)


def _draws_per_chunk(total: int, size: int) -> Iterator[int]:
    """Split `total` draws of `size` numbers each into chunks that fit in memory; yields the number of draws of each."""
    most = max(1, _CELLS_AT_ONCE // size)
    for start in range(0, total, most):
        yield min(most, total - start)


def _bootstrap_sums(columns: np.ndarray) -> np.ndarray:
    """The sums of the columns in each bootstrap sample, shape (samples, columns); `columns` is (questions, columns)."""
    # One seed draws the same texts for all systems and metrics, so that their sums vary together.
    random = np.random.default_rng(0)
    size = len(columns)
    sums = []
    for count in _draws_per_chunk(RESAMPLES, size):
        # Texts of sample `i` have numbers from `i * size`, so that one `bincount` counts the draws of all samples.
        drawn = random.integers(0, size, size=(count, size)) + size * np.arange(count)[:, None]
        times = np.bincount(drawn.ravel(), minlength=count * size).reshape(count, size)
        sums.append(times.astype(np.float64) @ columns)
    return np.concatenate(sums)


def _paired_differences(above: np.ndarray, below: np.ndarray) -> list[Difference]:
    """Differences of all pairs of systems, from numerators and denominators, each of shape (texts, systems).

    McNemar's exact test is the permutation test for scores of 0 and 1, without drawing; it holds only for plain means,
    where all denominators are 1.
    """
    pairs = list(combinations(range(above.shape[1]), 2))
    are_means = bool((below == 1).all())
    totals = _ratios_of_sums(np.hstack([above.sum(0), below.sum(0)])[None])[0]
    samples = _ratios_of_sums(_bootstrap_sums(np.hstack([above, below])))
    # p-values by pair; all permutation tests use the same swaps.
    exact: dict[tuple[int, int], float] = {}
    for first, second in pairs:
        gaps = above[:, second] - above[:, first]
        if are_means and np.isin(gaps, (-1.0, 0.0, 1.0)).all():
            exact[first, second] = _mcnemar_p_value(gaps)
    permuted = _permutation_p_values(above, below, [pair for pair in pairs if pair not in exact])
    differences: list[Difference] = []
    for first, second in pairs:
        mean = float(totals[second] - totals[first])
        low, high = _interval_ends(mean, samples[:, second] - samples[:, first], GAP, len(above))
        if (first, second) in exact:
            p_value = exact[first, second]
            test = "McNemar's exact test"
        else:
            p_value = permuted[first, second]
            test = "permutation test"
        differences.append({"mean": mean, "low": low, "high": high, "n": len(above), "p_value": p_value, "test": test})
    return differences


def _mcnemar_p_value(gaps: np.ndarray) -> float:
    """The p-value for differences of -1, 0 and 1, whose permutation test is a binomial test."""
    # The import takes longer than all of `tripletune eval --help`.
    from scipy.stats import binomtest

    differ = np.count_nonzero(gaps)
    if not differ:
        return 1.0
    return float(binomtest(int((gaps > 0).sum()), differ).pvalue)


def _permutation_p_values(
    above: np.ndarray, below: np.ndarray, pairs: Sequence[tuple[int, int]]
) -> dict[tuple[int, int], float]:
    """Two-sided p-values of pairs of systems, swapping each text's two results at random.

    Scores are ratios of sums over texts, so the swapped sums are compared and not means of differences.

    Args:
        above: Numerators, of shape (texts, systems).
        below: Denominators, of the same shape.
        pairs: Columns of the two systems of each pair.

    Returns:
        The p-value of each pair. The same seed is drawn from each time, so equal results give equal values.
    """
    if not pairs:
        return {}
    firsts, seconds = np.array(pairs).T
    first_sums = np.hstack([above[:, firsts].sum(0), below[:, firsts].sum(0)])
    second_sums = np.hstack([above[:, seconds].sum(0), below[:, seconds].sum(0)])
    observed = np.abs(_ratios_of_sums(second_sums[None]) - _ratios_of_sums(first_sums[None]))
    # What a swapped text takes from the sums of the second system and adds to those of the first.
    moved = np.hstack([above[:, seconds] - above[:, firsts], below[:, seconds] - below[:, firsts]])
    random = np.random.default_rng(0)
    size = len(above)
    as_far = np.zeros(len(pairs))
    for count in _draws_per_chunk(PERMUTATIONS, size):
        # Each text of each permutation has one random bit; a row is filled up to whole bytes.
        bits = np.frombuffer(random.bytes(count * -(-size // 8)), np.uint8).reshape(count, -1)
        change = np.unpackbits(bits, axis=1, count=size).astype(np.float64) @ moved
        distances = np.abs(_ratios_of_sums(second_sums - change) - _ratios_of_sums(first_sums + change))
        as_far += (distances >= observed - _EQUAL).sum(0)
    # The observed result counts as one of the permutations, so that no p-value is 0.
    return dict(zip(pairs, ((as_far + 1) / (PERMUTATIONS + 1)).tolist(), strict=True))
