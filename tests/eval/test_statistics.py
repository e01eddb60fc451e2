from __future__ import annotations

import math

import numpy as np
import pytest

from tripletune.eval.statistics import (
    bootstrap_mean,
    bootstrap_pairs,
    bootstrap_ratio,
    flatten_means,
    paired_difference,
    paired_ratio_difference,
)


def test_interval_agrees_with_the_normal_approximation():
    values = [1.0] * 120 + [0.0] * 280
    interval = bootstrap_mean(values)
    half = 1.96 * math.sqrt(0.3 * 0.7 / 400)
    assert interval["mean"] == pytest.approx(0.3)
    assert interval["low"] == pytest.approx(0.3 - half, abs=0.006)
    assert interval["high"] == pytest.approx(0.3 + half, abs=0.006)


def test_the_same_interval_whatever_is_drawn_at_once(monkeypatch):
    values = list(np.random.default_rng(2).random(30))
    whole = bootstrap_mean(values)
    monkeypatch.setattr("tripletune.eval.statistics._CELLS_AT_ONCE", 100)
    assert bootstrap_mean(values) == whole


def test_nothing_and_one_value():
    assert bootstrap_mean([]) == {"mean": None, "low": None, "high": None, "n": 0}
    assert bootstrap_mean([0.25]) == {"mean": 0.25, "low": 0.25, "high": 0.25, "n": 1}


def test_rows_of_one_question_are_drawn_together():
    values, questions = [0.0, 1.0] * 40, [number // 4 for number in range(80)]
    same_in_each = bootstrap_pairs(list(zip(questions, values)))
    assert (same_in_each["low"], same_in_each["high"]) == (0.5, 0.5)
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
    assert (gap["mean"], gap["low"], gap["high"], gap["p_value"]) == (0.0, 0.0, 0.0, 1.0)
    with pytest.raises(ValueError, match="same questions"):
        paired_difference([1.0], [1.0, 0.0])
    with pytest.raises(ValueError, match="at least one"):
        paired_difference([], [])


def test_a_score_that_is_no_number_is_refused():
    for compute in (bootstrap_mean, lambda values: paired_difference([0.0, 0.0], values)):
        with pytest.raises(ValueError, match="NaN or infinite"):
            compute([1.0, math.nan])


def test_the_means_alone():
    metrics = {"a": {"b": bootstrap_mean([0.5]), "c": bootstrap_mean([])}, "confusion": {"x": 3}}
    assert flatten_means(metrics) == {"a/b": 0.5}


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
    assert (same["mean"], same["low"], same["high"], same["p_value"]) == (0.0, 0.0, 0.0, 1.0)
    ones = np.ones(80)
    means = paired_ratio_difference((above, ones), (better, ones))
    assert means == pytest.approx(paired_difference(above, better))
