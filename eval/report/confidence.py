"""What a confidence is worth: calibration, and the risk of the answers that a threshold lets through.

Calibration compares a confidence with the share of right answers among answers that are so sure (the expected
calibration error of Naeini et al., 2015, with bins of equal width). Risk and coverage (Geifman and El-Yaniv, 2017) say
what an owner of documents chooses with `--abstain`: how many questions get an answer, and how good these answers are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tripletune.eval.statistics import Interval, bootstrap_mean

# Bins of equal width from 0 to 1.
BINS = 5
# Shares of the questions that are answered in a table of risk and coverage.
COVERAGES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)


@dataclass(frozen=True, slots=True)
class ConfidenceBin:
    """Answers whose confidence is from `low` up to `high`, which belongs to the last bin only.

    Attributes:
        confidence: Their mean confidence; None without answers.
        score: Their mean score.
    """

    low: float
    high: float
    questions: int
    confidence: float | None
    score: Interval


@dataclass(frozen=True, slots=True)
class CoveragePoint:
    """What a threshold lets through.

    Attributes:
        threshold: Answers with at least this confidence are given.
        coverage: Share of the questions that get an answer.
        score: Mean score of these answers; one minus it is their risk.
    """

    threshold: float
    coverage: float
    score: Interval


@dataclass(frozen=True, slots=True)
class ConfidenceFigures:
    """What one measure of confidence is worth.

    Attributes:
        questions: Answered questions with a score and this measure.
        error: Expected calibration error: mean distance of confidence and score over the bins, weighted by answers.
        area: Mean risk over all coverages; less is better, and a confidence that says nothing has the risk of all
            answers.
        risk: The risk of all answers.
        bins: The calibration.
        curve: Points from all questions down to a tenth of them, each threshold once.
    """

    questions: int
    error: float
    area: float
    risk: float
    bins: list[ConfidenceBin]
    curve: list[CoveragePoint]


def confidence_figures(confidences: Sequence[float], scores: Sequence[float]) -> ConfidenceFigures | None:
    """The figures of one measure, from confidence and score of each answer; None without answers."""
    if not len(confidences):
        return None
    sure = np.asarray(confidences, np.float64)
    right = np.asarray(scores, np.float64)
    bins = calibration_bins(sure, right)
    error = 0.0
    for answers in bins:
        if answers.confidence is not None and answers.score["mean"] is not None:
            error += answers.questions / len(sure) * abs(answers.confidence - answers.score["mean"])
    return ConfidenceFigures(
        questions=len(sure),
        error=error,
        area=area_under_risk(sure, right),
        risk=float(1 - right.mean()),
        bins=bins,
        curve=coverage_curve(sure, right),
    )


def calibration_bins(sure: np.ndarray, right: np.ndarray) -> list[ConfidenceBin]:
    """Confidence and score in bins of equal width; both arrays have the shape (answers,)."""
    places = np.minimum((sure * BINS).astype(int), BINS - 1)
    bins = []
    for place in range(BINS):
        chosen = places == place
        confidence = float(sure[chosen].mean()) if chosen.any() else None
        score = bootstrap_mean(right[chosen])
        bins.append(ConfidenceBin(place / BINS, (place + 1) / BINS, int(chosen.sum()), confidence, score))
    return bins


def coverage_curve(sure: np.ndarray, right: np.ndarray) -> list[CoveragePoint]:
    """The thresholds that give at least each of `COVERAGES`; equal confidences are answered together."""
    ordered = np.sort(sure)[::-1]
    points: dict[float, CoveragePoint] = {}
    for coverage in COVERAGES:
        # Rounded first: 0.3 times 10 is more than 3 in binary numbers.
        answered = int(np.ceil(round(coverage * len(ordered), 9)))
        threshold = float(ordered[answered - 1])
        is_given = sure >= threshold
        score = bootstrap_mean(right[is_given])
        points[threshold] = CoveragePoint(threshold, float(is_given.mean()), score)
    return list(points.values())


def area_under_risk(sure: np.ndarray, right: np.ndarray) -> float:
    """The mean risk of the k surest answers over all k; answers that are equally sure count in every order alike."""
    total = 0.0
    risk_before = 0.0
    before = 0
    for confidence in np.unique(sure)[::-1]:
        risks = 1 - right[sure == confidence]
        numbers = np.arange(1, len(risks) + 1)
        total += float(((risk_before + numbers * risks.mean()) / (before + numbers)).sum())
        risk_before += float(risks.sum())
        before += len(risks)
    return total / len(sure)
