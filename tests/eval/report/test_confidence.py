"""Calibration, and risk and coverage, against values computed by hand."""

import numpy as np
import pytest

from tripletune.eval.report.confidence import area_under_risk, calibration_bins, confidence_figures, coverage_curve

# Four answers: 0.95 right, 0.9 wrong, 0.5 right, 0.1 wrong.
SURE = np.array([0.9, 0.5, 0.95, 0.1])
RIGHT = np.array([0.0, 1.0, 1.0, 0.0])


def test_calibration_compares_confidence_and_score_in_bins():
    bins = calibration_bins(SURE, RIGHT)
    assert [(answers.low, answers.questions, answers.score["mean"]) for answers in bins] == [
        (0.0, 1, 0.0), (0.2, 0, None), (0.4, 1, 1.0), (0.6, 0, None), (0.8, 2, 0.5),
    ]  # fmt: skip
    assert bins[4].confidence == pytest.approx(0.925)
    # 1/4 * |0.1 - 0| + 1/4 * |0.5 - 1| + 2/4 * |0.925 - 0.5|
    assert confidence_figures(SURE, RIGHT).error == pytest.approx(0.025 + 0.125 + 0.2125)
    assert calibration_bins(np.array([1.0, 0.2]), np.array([1.0, 0.0]))[4].questions == 1, "1 is in the last bin"
    assert calibration_bins(np.array([1.0, 0.2]), np.array([1.0, 0.0]))[1].questions == 1


def test_a_perfect_confidence_has_no_error():
    assert confidence_figures([1.0, 0.0], [1.0, 0.0]).error == 0
    assert confidence_figures([], []) is None


def test_the_curve_has_each_threshold_with_what_it_lets_through():
    curve = coverage_curve(SURE, RIGHT)
    assert [(point.threshold, point.coverage, point.score["mean"]) for point in curve] == [
        (0.1, 1.0, 0.5), (0.5, 0.75, pytest.approx(2 / 3)), (0.9, 0.5, 0.5), (0.95, 0.25, 1.0),
    ]  # fmt: skip
    tied = coverage_curve(np.array([0.5, 0.5, 0.2]), np.array([1.0, 0.0, 0.0]))
    assert [(point.threshold, point.coverage) for point in tied] == [(0.2, 1.0), (0.5, pytest.approx(2 / 3))]
    ten = coverage_curve(np.linspace(0.1, 1, 10), np.ones(10))
    assert [point.coverage for point in ten] == pytest.approx([1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1])


def test_the_area_is_the_mean_risk_of_the_surest_answers():
    # Surest first: right, wrong, right, wrong, so the risks are 0, 1/2, 1/3, 2/4.
    assert area_under_risk(SURE, RIGHT) == pytest.approx((0 + 1 / 2 + 1 / 3 + 1 / 2) / 4)
    # Two answers that are equally sure, one of them right: in either order the mean risk of the first is 1/2.
    assert area_under_risk(np.array([0.5, 0.5]), np.array([1.0, 0.0])) == pytest.approx(0.5)
    # After a right one: risks 0, (1/2) / 2 and 1 / 3.
    tied = area_under_risk(np.array([0.9, 0.5, 0.5]), np.array([1.0, 1.0, 0.0]))
    assert tied == pytest.approx((0 + 1 / 4 + 1 / 3) / 3)
    same = confidence_figures([0.4] * 4, RIGHT)
    assert same.area == pytest.approx(same.risk) == 0.5
