import math

import numpy as np
import pytest
from scipy.stats import binomtest, permutation_test

from tripletune.eval.statistics import (
    NO_DIFFERENCE,
    add_corrected_p_values,
    bootstrap_mean,
    bootstrap_pairs,
    bootstrap_ratio,
    p_cell,
    paired_ratio_difference,
    paired_table,
    seeds_difference,
    seeds_interval,
    verdict,
)


def paired_difference(first, second):
    return paired_table({1: first, 2: second})[1, 2]


def test_interval_agrees_with_the_normal_approximation():
    values = [1.0] * 120 + [0.0] * 280
    interval = bootstrap_mean(values)
    half = 1.96 * math.sqrt(0.3 * 0.7 / 400)
    assert interval["mean"] == pytest.approx(0.3)
    assert interval["low"] == pytest.approx(0.3 - half, abs=0.006)
    assert interval["high"] == pytest.approx(0.3 + half, abs=0.006)


def test_nothing_and_values_that_are_all_the_same():
    assert bootstrap_mean([]) == {"mean": None, "low": None, "high": None, "n": 0}
    for right in (0, 40):
        exact = binomtest(right, 40).proportion_ci()
        found = bootstrap_mean([float(right > 0)] * 40)
        assert (found["low"], found["high"]) == pytest.approx((exact.low, exact.high))
    # Half of the values unlike the others could be missed by one draw or by a few, and they could be 0 or 1.
    assert bootstrap_mean([0.3] * 40) == pytest.approx(
        {"mean": 0.3, "low": 0.3 - 0.0881 * 0.3, "high": 0.3 + 0.0881 * 0.7, "n": 40}, abs=1e-4
    )
    assert bootstrap_mean([3.0] * 40, None) == {"mean": 3.0, "low": 3.0, "high": 3.0, "n": 40}


def test_rows_of_one_question_are_drawn_together():
    values, questions = [0.0, 1.0] * 40, [number // 4 for number in range(80)]
    same_in_each = bootstrap_pairs(list(zip(questions, values)))
    assert same_in_each == pytest.approx({**bootstrap_mean([0.5] * 20), "n": 80})
    grouped = bootstrap_pairs(list(zip(questions, sorted(values))))
    single = bootstrap_mean(sorted(values))
    assert grouped["high"] - grouped["low"] > 1.5 * (single["high"] - single["low"])
    assert grouped["n"] == 80
    # Of different size, they keep the mean over rows.
    assert bootstrap_pairs([("a", 1.0), ("a", 1.0), ("a", 1.0), ("b", 0.0)])["mean"] == 0.75
    assert bootstrap_pairs([]) == bootstrap_mean([])


def test_pairing_sees_a_small_constant_gain():
    random = np.random.default_rng(0)
    first = random.random(200)
    second = first + 0.02 + 0.01 * random.standard_normal(200)
    gap = paired_difference(first, second)
    assert gap["low"] > 0.015
    assert gap["high"] < 0.025
    assert gap["p_value"] < 0.01
    assert paired_difference(second, first)["mean"] == pytest.approx(-gap["mean"])


def test_no_difference_has_p_value_one():
    gap = paired_difference([1.0, 0.0, 1.0], [1.0, 0.0, 1.0])
    assert (gap["mean"], gap["p_value"], verdict(gap)) == (0.0, 1.0, NO_DIFFERENCE)
    # Three questions alike say little about the next.
    assert gap["high"] == -gap["low"] == pytest.approx(1 - 0.025 ** (1 / 3))


def test_scores_of_0_and_1_have_mcnemars_exact_test():
    first, second = [0.0] * 9 + [1.0] * 51, [1.0] * 8 + [0.0] + [0.0] * 1 + [1.0] * 50
    gap = paired_difference(first, second)
    # 8 questions won, 1 lost: twice the chance of at most 1 head of 9, (1 + 9) / 2**9.
    assert gap["p_value"] == pytest.approx(2 * 10 / 2**9)
    assert (gap["test"], verdict(gap)) == ("McNemar's exact test", "better")


def test_other_scores_have_the_permutation_test():
    random = np.random.default_rng(3)
    first, gaps = random.random(12) / 2, random.normal(0.05, 0.1, 12)
    found = paired_difference(first, first + gaps)
    exact = permutation_test((gaps,), np.mean, permutation_type="samples", n_resamples=np.inf)
    assert found["p_value"] == pytest.approx(exact.pvalue, abs=0.015)
    assert found["test"] == "permutation test"


def test_a_table_is_corrected_by_holm():
    texts = [p_cell({"p_value": p}) for p in (0.0004, 0.0497, 0.05)]
    assert texts == ["< 0.001", "< 0.05", "0.050"], "no text contradicts the verdict"
    gaps = [{"mean": 0.1, "p_value": p} for p in (0.04, 0.01, 0.03, 0.02)]
    add_corrected_p_values(gaps)
    # 4 x 0.01, 3 x 0.02; then 2 x 0.03 = 0.06 and 1 x 0.04, which is not less than what stands before it.
    assert [one["p_holm"] for one in gaps] == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert [verdict(one) for one in gaps] == [NO_DIFFERENCE, "better", NO_DIFFERENCE, NO_DIFFERENCE]


def test_every_two_systems_are_compared_as_two_alone_are():
    random = np.random.default_rng(5)
    right = {name: (random.random(300) < share).astype(float) for name, share in (("a", 0.3), ("b", 0.5), ("c", 0.52))}
    overlap = {name: values * 0.7 + 0.1 * random.random(300) for name, values in right.items()}
    for scores in (right, overlap):
        table = paired_table(scores)
        assert list(table) == [("a", "b"), ("a", "c"), ("b", "c")]
        for (first, second), one in table.items():
            assert one == pytest.approx(paired_difference(scores[first], scores[second]))
        add_corrected_p_values(table.values())
        assert [verdict(one) for one in table.values()] == ["better", "better", NO_DIFFERENCE]


def test_a_ratio_of_sums_by_hand():
    interval = bootstrap_ratio([1, 0, 3], [2, 0, 4])
    assert interval["mean"] == pytest.approx(4 / 6)
    assert interval["low"] <= interval["mean"] <= interval["high"]
    assert interval["n"] == 3
    values = [0.0, 1.0, 1.0, 0.0, 1.0]
    assert bootstrap_ratio(values, [1.0] * 5) == bootstrap_mean(values)
    assert bootstrap_ratio([0, 0], [0, 0]) == bootstrap_ratio([], []) == bootstrap_mean([])


def test_a_difference_of_ratios_is_paired_by_text():
    random = np.random.default_rng(4)
    below = random.integers(1, 9, 80).astype(float)
    above = np.minimum(below, random.integers(0, 6, 80))
    better = np.minimum(below, above + (random.random(80) < 0.3))
    found = paired_ratio_difference((above, below), (better, below))
    assert found["mean"] == pytest.approx(better.sum() / below.sum() - above.sum() / below.sum())
    assert found["low"] > 0
    assert found["p_value"] < 0.01
    # The texts that are drawn are the same for both, so what both share does not widen the interval.
    apart = [bootstrap_ratio(values, below) for values in (above, better)]
    assert found["high"] - found["low"] < apart[1]["high"] - apart[1]["low"]
    same = paired_ratio_difference((above, below), (above, below))
    assert (same["mean"], same["p_value"]) == (0.0, 1.0)
    ones = np.ones(80)
    means = paired_ratio_difference((above, ones), (better, ones))
    assert means == pytest.approx(paired_difference(above, better))


def columns_of(scores):
    """Numerators and denominators of scores of one seed, as a comparison has them."""
    return np.array([scores, np.ones(len(scores))])


def test_one_seed_has_the_interval_of_its_questions():
    scores = columns_of([1.0, 0.0, 0.0, 1.0, 1.0])
    assert seeds_interval([scores]) == bootstrap_ratio(*scores)
    other = columns_of([1.0, 1.0, 0.0, 1.0, 1.0])
    assert seeds_difference([scores], [other]) == paired_ratio_difference(tuple(scores), tuple(other))


def test_seeds_that_differ_widen_the_interval_by_as_much_as_they_differ():
    # Every question is as hard as the others for a seed, so only the seeds matter: their means are 0.2 and 0.6. A mean
    # of two new seeds varies by the variance of the seeds, 0.08, over two: a draw of both from one seed is
    # 0.4 - 0.2 * sqrt(2) or 0.4 + 0.2 * sqrt(2), and has the chance 1/4 each.
    seeds = [columns_of([0.2] * 50), columns_of([0.6] * 50)]
    interval = seeds_interval(seeds)
    assert interval["mean"] == pytest.approx(0.4)
    assert interval["low"] == pytest.approx(0.4 - 0.2 * math.sqrt(2))
    assert interval["high"] == pytest.approx(0.4 + 0.2 * math.sqrt(2))
    assert interval["n"] == 50
    assert bootstrap_ratio(*np.mean(seeds, axis=0))["high"] < 0.5
    difference = seeds_difference([columns_of([0.3] * 50)], seeds)
    assert difference["mean"] == pytest.approx(0.1)
    assert difference["test"] == "two-level bootstrap"
    # One draw in four lies below the first system.
    assert difference["p_value"] == pytest.approx(0.5, abs=0.05)


def test_the_same_models_run_in_two_ways_are_paired_by_seed():
    # The models differ by 0.4 and their gains by 0.1 (0.1 and 0.2, mean 0.15): a draw of both models from one is
    # 0.15 - 0.05 * sqrt(2) or 0.15 + 0.05 * sqrt(2). The second system names its models in the other order.
    first = [columns_of([0.2] * 50), columns_of([0.6] * 50)]
    second = [columns_of([0.8] * 50), columns_of([0.3] * 50)]
    paired = seeds_difference(first, second, [1, 0])
    assert paired["mean"] == pytest.approx(0.15)
    assert paired["low"] == pytest.approx(0.15 - 0.05 * math.sqrt(2))
    assert paired["high"] == pytest.approx(0.15 + 0.05 * math.sqrt(2))
    assert paired["p_value"] < 0.001
    assert seeds_difference(first, second)["low"] < 0, "seeds of two trainings are not paired"


def test_equal_trainings_are_seldom_called_different():
    """Two systems of three seeds each, which differ in nothing else: the questions alone say "better" too often."""
    random = np.random.default_rng(0)
    verdicts = {"seeds": [], "questions": []}
    for _ in range(100):
        hardness = random.normal(size=200)
        systems = []
        for _ in range(2):
            skill = random.normal(scale=0.4, size=3)
            chance = 1 / (1 + np.exp(hardness[None] - skill[:, None]))
            systems.append([columns_of(scores) for scores in (random.random(chance.shape) < chance).astype(float)])
        both = seeds_difference(*systems)
        verdicts["seeds"].append(both["p_value"] < 0.05)
        first, second = (np.mean(system, axis=0)[0] for system in systems)
        low, high = np.percentile(
            random.multinomial(200, [1 / 200] * 200, size=500) @ (second - first) / 200, [2.5, 97.5]
        )
        verdicts["questions"].append(low > 0 or high < 0)
    assert np.mean(verdicts["seeds"]) <= 0.1
    assert np.mean(verdicts["questions"]) > 0.3
