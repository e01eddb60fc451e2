"""Metrics, found by their place: every public function of a module in this folder is a metric of that name.

A new one is one file: `def NAME(prediction: str, answers: Sequence[str]) -> float`, whose docstring begins with the
sentence that tables print about it. Then a task's YAML can name it.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tripletune.models.program import names_in


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric with the sentence that tables print about it."""

    score: Callable[[str, Sequence[str]], float]
    explanation: str


def find_metrics() -> dict[str, Metric]:
    """All metrics, by name."""
    found = {}
    for module in (importlib.import_module(f"{__name__}.{name}") for name in names_in(__name__)):
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if function.__module__ == module.__name__ and not name.startswith("_"):
                found[name] = Metric(function, (inspect.getdoc(function) or name).splitlines()[0].rstrip("."))
    return found


def score_answer(prediction: str, answers: Sequence[str], metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Score one prediction with several metrics.

    Raises:
        ValueError: there is no gold answer, or a metric gives no finite number.
    """
    scores = {name: float(metric.score(prediction, answers)) for name, metric in metrics.items()}
    wrong = {name: score for name, score in scores.items() if not math.isfinite(score)}
    if wrong:
        raise ValueError(f"metric {next(iter(wrong))} gives {wrong} for {prediction!r}: a score is a finite number")
    return scores
