"""Cells of all tables of a report: intervals, numbers, and names of runs with the caveats about their figures."""

from __future__ import annotations

from collections.abc import Sequence

from tripletune.core.tables import Table
from tripletune.eval.report.contents import ReportedRun
from tripletune.eval.statistics import Difference, Interval
from tripletune.eval.suites import interval_cells

Runs = Sequence[ReportedRun]
# Sentences and tables, in the order in which they are shown.
Blocks = list[str | Table]


def interval_cell(value: Interval | Difference | None, times: float = 100, digits: int = 1, sign: str = "") -> str:
    """A mean with its interval; a dash if there is none.

    Args:
        times: Factor; scores are shown times 100, numbers such as calls as they are.
        digits: Digits behind the point.
        sign: "+" writes the sign of positive numbers, too, as differences need it.
    """
    if value is None or not value["n"]:
        return "-"
    return "{} ({})".format(*interval_cells(value, times, f"{sign}z.{digits}f"))


def with_caveats(text: str, run: ReportedRun) -> str:
    """A text about a run, with the questions of an unfinished run and the number that failed."""
    caveats = []
    if not run.finished:
        caveats.append(asked_of(run))
    if run.figures.errors:
        caveats.append(f"{run.figures.errors:,} failed")
    return f"{text} ({', '.join(caveats)})" if caveats else text


def name_of(run: ReportedRun) -> str:
    """The name of a run for tables, with the caveats about its figures."""
    return with_caveats(run.name, run)


def asked_of(run: ReportedRun) -> str:
    """How many questions a run has answered, and of how many if it is not finished."""
    answered = f"{run.questions:,}"
    if run.finished:
        return answered
    return f"{answered} of {run.expected:,}" if run.expected else f"{answered}, not finished"


def number_cell(value: float | None, digits: int = 1) -> str:
    """A number for tables; a dash if it is not known."""
    return "-" if value is None else f"{value:,.{digits}f}"
