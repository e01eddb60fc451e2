"""Tables of how sure answers are: is a confidence right, and what does a threshold of `--abstain` let through?"""

from __future__ import annotations

from tripletune.core.tables import Table
from tripletune.eval.report.cells import Blocks, Runs, interval_cell, name_of
from tripletune.eval.report.confidence import BINS, COVERAGES, ConfidenceFigures
from tripletune.rag.systems._confidence import MEASURES


def confidence_blocks(runs: Runs, headline: str) -> Blocks:
    """Abstentions, calibration, and risk and coverage of each measure; nothing for runs that note no confidence."""
    blocks = _abstention_blocks(runs, headline)
    blocks += _calibration_blocks(runs, headline)
    return blocks + _coverage_blocks(runs, headline)


def _abstention_blocks(runs: Runs, headline: str) -> Blocks:
    """How many answers were withheld, and how good the given ones are."""
    rows = []
    for run in runs:
        if run.figures.withheld:
            share = 1 - run.figures.withheld / run.questions
            cells = [
                name_of(run),
                f"{run.figures.withheld:,}",
                f"{100 * share:.1f}",
                interval_cell(run.figures.answered),
            ]
            rows.append(cells)
    if not rows:
        return []
    head = ["run", "I don't know", "answered", f"{headline} of the answered"]
    return [Table(head, rows), "In the other tables, an answer that was withheld counts as a wrong one."]


def _calibration_blocks(runs: Runs, headline: str) -> Blocks:
    """Score by confidence: of a calibrated confidence, both are equal in every bin."""
    rows = []
    for run in runs:
        for measure, figures in run.figures.confidence.items():
            rows.append(
                [name_of(run), measure, f"{figures.questions:,}", f"{100 * figures.error:.1f}", *_bin_cells(figures)]
            )
    if not rows:
        return []
    head = ["run", "confidence", "answers", "calibration error"]
    head += [f"{100 * place // BINS} to {100 * (place + 1) // BINS}" for place in range(BINS)]
    explained = "; ".join(f"{name}: {meaning}" for name, meaning in MEASURES.items())
    sentence = (
        f"Cells: {headline} of the answers whose confidence is in the range of the column, and their number. "
        f"{explained}."
    )
    return ["Is the confidence right?", Table(head, rows), sentence]


def _bin_cells(figures: ConfidenceFigures) -> list[str]:
    """Score and number of the answers in each bin."""
    return [f"{interval_cell(answers.score)}, n {answers.questions}" for answers in figures.bins]


def _coverage_blocks(runs: Runs, headline: str) -> Blocks:
    """Score of the surest answers at each coverage, with the threshold that lets them through."""
    rows = []
    for run in runs:
        for measure, figures in run.figures.confidence.items():
            # Equal confidences are answered together, so that a coverage may be reached by a larger one's threshold.
            cells = [name_of(run), measure, f"{100 * figures.area:.1f}"]
            for coverage in COVERAGES:
                reached = [point for point in figures.curve if point.coverage >= coverage - 1e-9]
                point = min(reached, key=lambda point: point.coverage)
                cells.append(f"{interval_cell(point.score)}, from {point.threshold:.2f}")
            rows.append(cells)
    if not rows:
        return []
    head = ["run", "confidence", "mean risk", *(f"{100 * coverage:.0f} % answered" for coverage in COVERAGES)]
    sentence = (
        f"Cells: {headline} of the surest answers, and the confidence from which they are given: --abstain 0.5 "
        "--confidence support gives answers from 0.50 on. Mean risk: of wrong answers, over all shares; a confidence "
        "that says nothing has the same score in every column. The thresholds were chosen on these questions: on "
        "others, a threshold lets through another share."
    )
    return ["What does a threshold let through?", Table(head, rows), sentence]
