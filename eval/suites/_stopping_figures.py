"""What each rule that stops searching scores and costs, beside fixed depths at equal cost, over one or several seeds.

The rules are in `eval/suites/_stopping_rules.py`. A rule that stops early costs less, so its score alone says little.
It is compared with fixed numbers of searches at equal cost: a mixture of the two fixed depths around the rule's mean
cost, which a user gets by drawing between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from tripletune.eval.controls import ControlTable
from tripletune.eval.statistics import (
    Difference,
    Interval,
    add_corrected_p_values,
    p_cell,
    seeds_difference,
    seeds_interval,
)
from tripletune.eval.suites import interval_cells
from tripletune.eval.suites._stopping_rules import Ladder, StoppingRule


@dataclass(slots=True, kw_only=True)
class RuleFigures:
    """What a rule scores and costs over all questions.

    Attributes:
        searches: Mean searches per question; `calls` are mean calls.
        scores: By metric.
        recall: Share of the supporting passages that was found; no values where these are not known.
        at_searches: By metric, the difference to fixed depths at equal searches; None for fixed depths and the bound.
        at_calls: The same at equal calls.
    """

    searches: Interval
    calls: Interval
    scores: dict[str, Interval]
    recall: Interval
    at_searches: dict[str, Difference] | None = None
    at_calls: dict[str, Difference] | None = None


class _OutcomeColumns(NamedTuple):
    """The outcomes of a rule: arrays of shape (questions,), of the scores by metric.

    Those of the recall have an entry for each question whose supporting passages are known.
    """

    searches: np.ndarray
    calls: np.ndarray
    scores: dict[str, np.ndarray]
    recalls: np.ndarray


class TrainedBench(NamedTuple):
    """The answers of one trained model at every depth, and the rules that choose among them.

    Fitted rules differ between models of other training seeds, since TASR is calibrated on the answers.
    """

    ladders: Sequence[Ladder]
    rules: Mapping[str, StoppingRule]


def compare_rules(
    benches: Sequence[TrainedBench],
    fixed: Mapping[str, StoppingRule],
    bound: Mapping[str, StoppingRule],
    metrics: Sequence[str],
) -> dict[str, RuleFigures]:
    """Score fixed depths, rules and the bound, and test each rule against the fixed depths at equal cost.

    p-values are corrected for all rules, metrics and both costs together (Holm).

    Args:
        benches: One for each training seed, over the same questions with the same rules. Of several, scores are means
            over the seeds, each rule is compared with the fixed depths of its own model, and intervals draw seeds and
            questions (`eval.statistics.seeds_interval`).
    """
    depths = {name: _columns_of_seeds(benches, [rule] * len(benches), metrics) for name, rule in fixed.items()}
    figures = {name: _mean_figures(seeds) for name, seeds in depths.items()}
    differences: list[Difference] = []
    for name in benches[0].rules:
        seeds = _columns_of_seeds(benches, [bench.rules[name] for bench in benches], metrics)
        of_rule = _mean_figures(seeds)
        of_rule.at_searches = {}
        of_rule.at_calls = {}
        for metric in metrics:
            of_rule.at_searches[metric] = _minus_fixed(seeds, list(depths.values()), metric, "searches")
            of_rule.at_calls[metric] = _minus_fixed(seeds, list(depths.values()), metric, "calls")
            differences += [of_rule.at_searches[metric], of_rule.at_calls[metric]]
        figures[name] = of_rule
    add_corrected_p_values(differences)
    for name, rule in bound.items():
        figures[name] = _mean_figures(_columns_of_seeds(benches, [rule] * len(benches), metrics))
    return figures


def at_equal_cost(cost: float, depths: Sequence[tuple[float, np.ndarray]]) -> np.ndarray:
    """The expected scores, shape (questions,), of drawing between the two fixed depths around a mean cost.

    A cost below the cheapest depth is compared with that depth, and one above the dearest with the dearest: the first
    comparison is hard on the rule, the second one cannot be made fairer.

    Args:
        depths: Mean cost and scores of each fixed depth.
    """
    ordered = sorted(depths, key=lambda depth: depth[0])
    if cost <= ordered[0][0]:
        return ordered[0][1]
    for (low, below), (high, above) in pairwise(ordered):
        if low < cost <= high:
            share = (cost - low) / (high - low)
            return (1 - share) * below + share * above
    return ordered[-1][1]


def _minus_fixed(
    own: Sequence[_OutcomeColumns], depths: Sequence[Sequence[_OutcomeColumns]], metric: str, cost: str
) -> Difference:
    """The paired difference "rule minus fixed depths at equal cost".

    Args:
        own: The rule's outcomes, by seed.
        depths: Those of each fixed depth, by seed.
        cost: "searches" or "calls".
    """
    of_rule = []
    of_fixed = []
    for seed, columns in enumerate(own):
        costs_and_scores = []
        for depth in depths:
            costs_and_scores.append((float(getattr(depth[seed], cost).mean()), depth[seed].scores[metric]))
        of_rule.append(_as_ratio(columns.scores[metric]))
        of_fixed.append(_as_ratio(at_equal_cost(float(getattr(columns, cost).mean()), costs_and_scores)))
    return seeds_difference(of_fixed, of_rule, range(len(own)))


def _columns_of_seeds(
    benches: Sequence[TrainedBench], rules: Sequence[StoppingRule], metrics: Sequence[str]
) -> list[_OutcomeColumns]:
    """The outcomes of a rule with each model; of each bench, `rules` has its own form of the rule."""
    columns = []
    for bench, rule in zip(benches, rules, strict=True):
        columns.append(_outcome_columns(bench.ladders, rule, metrics))
    return columns


def _as_ratio(values: np.ndarray) -> np.ndarray:
    """Values as numerators over denominators of 1, shape (2, questions): what the statistics of seeds take."""
    return np.array([values, np.ones_like(values)])


def _outcome_columns(ladders: Sequence[Ladder], rule: StoppingRule, metrics: Sequence[str]) -> _OutcomeColumns:
    """The outcomes of a rule on all questions; a failed question has scores of 0."""
    outcomes = [rule(ladder) for ladder in ladders]
    scores = {}
    for metric in metrics:
        scores[metric] = np.array([outcome.scores.get(metric, 0.0) for outcome in outcomes], np.float64)
    searches = np.array([outcome.searches for outcome in outcomes], np.float64)
    calls = np.array([outcome.calls for outcome in outcomes], np.float64)
    recalls: list[float] = []
    for ladder, outcome in zip(ladders, outcomes, strict=True):
        # Without a search, a depth has no recall, but nothing was found.
        if any(answered.recall is not None for answered in ladder.depths):
            recalls.append(outcome.recall or 0.0)
    return _OutcomeColumns(searches, calls, scores, np.array(recalls, np.float64))


def _mean_figures(seeds: Sequence[_OutcomeColumns]) -> RuleFigures:
    """The means of a rule's outcomes, without the differences to fixed depths, which `compare_rules` adds."""
    scores = {}
    for metric in seeds[0].scores:
        scores[metric] = seeds_interval([_as_ratio(columns.scores[metric]) for columns in seeds])
    return RuleFigures(
        searches=seeds_interval([_as_ratio(columns.searches) for columns in seeds], None),
        calls=seeds_interval([_as_ratio(columns.calls) for columns in seeds], None),
        scores=scores,
        recall=seeds_interval([_as_ratio(columns.recalls) for columns in seeds]),
    )


@dataclass(kw_only=True)
class SeedsFigures:
    """What the rules score on average over models of several training seeds; for the names see
    `eval.suites.stopping.StoppingMetrics`.
    """

    number: int
    rules: dict[str, RuleFigures]
    rules_table: ControlTable
    rules_differences_table: ControlTable


def rules_table(figures: dict[str, RuleFigures], metrics: Sequence[str]) -> ControlTable:
    """Heads and rows of the table of rules: costs, recall and scores.

    The recall says whether a rule that answers worse has found less.
    """
    has_recall = any(of_rule.recall["n"] for of_rule in figures.values())
    heads = ["rule", "searches", "calls"]
    if has_recall:
        heads.append("recall")
    heads += metrics
    rows = []
    for name, of_rule in figures.items():
        row = [name, f"{of_rule.searches['mean']:.2f}", f"{of_rule.calls['mean']:.2f}"]
        if has_recall:
            row.append(interval_cells(of_rule.recall)[0])
        row += ["{} ({})".format(*interval_cells(of_rule.scores[metric])) for metric in metrics]
        rows.append(row)
    return ControlTable(heads, rows)


def differences_table(figures: dict[str, RuleFigures]) -> ControlTable:
    """Heads and rows of the differences between rules and fixed depths at equal cost, with p, a row for each score."""
    rows = []
    for name, of_rule in figures.items():
        if of_rule.at_searches is None or of_rule.at_calls is None:
            continue
        for metric, at_searches in of_rule.at_searches.items():
            rows.append([name, metric, _difference_cell(at_searches), _difference_cell(of_rule.at_calls[metric])])
    return ControlTable(["rule", "score", "at equal searches", "at equal calls"], rows)


def _difference_cell(difference: Difference) -> str:
    """A difference with its interval and p."""
    mean, interval = interval_cells(difference, form="+z.1f")
    return f"{mean} ({interval}), p {p_cell(difference)}"
