"""`tripletune eval compare`: differences of runs to the first run, paired by question or text.

Each run may be several seeds of one system; then intervals and tests are about other seeds as well as other questions.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy as np
from rich.console import Console

from tripletune.core.files import check_new, write_json
from tripletune.core.options import convert, nearest
from tripletune.eval import find_metrics
from tripletune.eval.report.groups import baseline_first
from tripletune.eval.report.runs import output_folders
from tripletune.eval.report.seeds import SeedRuns, named_seeds, open_seeds
from tripletune.eval.report.setting import check_comparable, places_of_same_models, read_across_names, trained_weights
from tripletune.eval.results import SCORES, read_results, read_rows_with_added_scores
from tripletune.eval.statistics import (
    P_NOTE,
    Difference,
    Interval,
    add_corrected_p_values,
    bootstrap_ratio,
    p_cell,
    seeds_difference,
    seeds_interval,
    verdict,
)
from tripletune.eval.suites import interval_cells, show_table
from tripletune.eval.suites.extraction import KIND as EXTRACTION
from tripletune.eval.triples import Share, TextScores, shares_by_score

logger = logging.getLogger(__name__)
TRAINED_ONCE = (
    "the trained weights differ, and one of them was trained once. The verdict is about these weights; training again "
    "with other seeds may change it. To see that, compare several seeds of each: A,B,C D,E,F."
)
_COSTS = {"calls": "calls", "prompt_tokens": "tokens read", "completion_tokens": "tokens written"}
Unit = Literal["question", "text"]
# By item, then by score.
Ratios = dict[str, dict[str, Share]]


@dataclass(frozen=True, slots=True)
class RunScore:
    """One score of one system.

    Attributes:
        score: The mean of its seeds.
        seeds: The score of each seed.
        difference: `score` minus the first system's; None for the first system.
    """

    score: Interval
    seeds: list[float | None]
    difference: Difference | None


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """One system in a comparison.

    Attributes:
        folder: The folder, or the folders of the seeds with commas.
        name: The name that the command gives, else the system, or the model of an evaluation without systems.
        cost: Mean cost per item, by the names in `metrics.json`.
        failed: Number of failed items of all seeds.
        trainings_compared: False if it differs from the first system in trained weights, and one of the two was
            trained only once, so that a difference may be one between training seeds.
    """

    folder: str
    name: str
    cost: dict[str, float]
    failed: int
    trainings_compared: bool


@dataclass(frozen=True, slots=True)
class RunComparison:
    """The content of `--output`.

    Attributes:
        what: The task, or "extraction".
        unit: What is paired.
        items: Number of items that all runs have.
        runs: The systems in the order in which they were named.
        scores: By score, in the same order.
    """

    what: str
    unit: Unit
    items: int
    runs: list[ComparedRun]
    scores: dict[str, list[RunScore]]

    def to_json(self) -> dict[str, Any]:
        """The comparison as JSON values, which programs of users read: a renamed field is a change for them."""
        return asdict(self)


def compare(args: argparse.Namespace, console: Console) -> None:
    """`tripletune eval compare`: print a comparison, and write it to `args.output`; see `compare_folders`.

    The output is checked first, since it must not replace one of the runs.
    """
    folders: list[str] = []
    for spec in args.folders:
        folders += output_folders(spec)
    if args.output:
        sources: list[str] = []
        for spec in folders:
            sources += named_seeds(spec).folders
        check_new(args.output, sources)
    comparison = compare_folders(folders, args.metric, read_across_names(args.across), args.baseline)
    # The file comes before the output, so that a reader that closes the pipe, such as `head`, does not cost the file.
    if args.output:
        write_json(args.output, comparison.to_json())
    _print_comparison(comparison, console)


def compare_folders(
    folders: Sequence[str | Path],
    metric: str | None = None,
    across: Collection[str] = (),
    baseline: str | None = None,
) -> RunComparison:
    """Compare runs with the first run, question by question or text by text.

    Args:
        folders: Output folders, all of `tripletune eval run` or all of `extraction`; `A,B,C` are seeds of one system,
            and `NAME=FOLDER` names it.
        metric: The scores to compare, with commas, for `extraction` also the starts of several names; None takes the
            headline of the task, or all scores of `extraction`.
        across: Names of `setting.EQUAL` in which the runs may differ.
        baseline: Name, system or folder of the run that comes first.
    """
    systems = [open_seeds(str(spec)) for spec in folders]
    if baseline:
        systems = baseline_first(systems, [system.names for system in systems], baseline)
    task = _common_task(systems)
    check_comparable([system.runs for system in systems], across)
    unit: Unit = "text" if task == EXTRACTION else "question"
    # Of each system, the items of each seed.
    items = [_read_item_scores(system) for system in systems]
    common = _common_items(list(chain.from_iterable(items)), unit)
    if metric is None and task != EXTRACTION:
        metric = systems[0].heads[0].primary
    same_models = [places_of_same_models(systems[0].runs, system.runs) for system in systems]
    scores = {}
    for name, scored in _chosen_scores(list(chain.from_iterable(items)), common, metric).items():
        if len(scored) < len(common):
            logger.warning("%s: compared on %d of %d %ss", name, len(scored), len(common), unit)
        scores[name] = _compare_score(items, same_models, name, scored)
    differences = []
    for score in chain.from_iterable(scores.values()):
        if score.difference is not None:
            differences.append(score.difference)
    add_corrected_p_values(differences)
    runs = [_compared_run(system, systems[0]) for system in systems]
    return RunComparison(task, unit, len(common), runs, scores)


def _common_task(systems: Sequence[SeedRuns]) -> str:
    """The task of all runs, or "extraction"; scores of two tasks are not of the same questions.

    Raises:
        ValueError: The runs are of several tasks.
    """
    tasks: set[str] = set()
    for system in systems:
        for head in system.heads:
            tasks.add(head.task or head.evaluation)
    if len(tasks) > 1:
        raise ValueError(f"the runs are of different tasks ({', '.join(sorted(tasks))}): compare runs of one task")
    return tasks.pop()


def _read_item_scores(system: SeedRuns) -> list[Ratios]:
    """The scores of the items of each seed, read from the results.

    Raises:
        ValueError: A run has no rows, though it has metrics: its file was lost.
    """
    seeds = []
    for run, head in zip(system.runs, system.heads, strict=True):
        items = _text_scores(run.folder) if head.evaluation == EXTRACTION else _question_scores(run.folder)
        if not items:
            raise ValueError(f"{run.folder}: the results are empty; run the same command again")
        seeds.append(items)
    return seeds


def _text_scores(folder: str) -> Ratios:
    """The counts of each text as shares (correct triples of all), whose sums over texts give micro-averaged scores."""
    return {row["id"]: shares_by_score(TextScores.from_json(row)) for row in read_results(Path(folder) / SCORES)}


def _question_scores(folder: str) -> Ratios:
    """The scores of each question as shares of 1, so that texts and questions are compared by one function."""
    items = {}
    for row in read_rows_with_added_scores(folder, "scores"):
        items[row.id] = {name: Share(score, 1.0) for name, score in row.scores.items()}
    return items


def _common_items(runs: Sequence[Ratios], unit: Unit) -> list[str]:
    """Ids of the items that all runs have, in the order of the first run; only these can be paired.

    The order matters, because the bootstrap draws places: another order gives other intervals from the same seed.
    """
    shared = set(runs[0]).intersection(*runs[1:])
    common = [item for item in runs[0] if item in shared]
    if not common:
        raise ValueError(f"the runs have no {unit} in common: were they made from different data?")
    if any(len(items) != len(common) for items in runs):
        logger.warning("only %d %ss are compared: those that all runs have", len(common), unit)
    return common


def _chosen_scores(runs: Sequence[Ratios], common: Sequence[str], metric: str | None) -> dict[str, list[str]]:
    """The scores to compare, each with the items for which all runs have it.

    Args:
        runs: The scores of each run, all seeds of all systems.
        common: Ids of the items that all runs have.
        metric: Scores or families of scores as in `--metric`; None takes all.

    Raises:
        ValueError: There is no such score that all runs have for some item.
    """
    names: dict[str, None] = {}
    for item in common:
        names |= dict.fromkeys(runs[0][item])
    # Soft scores exist only on request, and scores of rankings only for questions with known gold passages.
    scored: dict[str, list[str]] = {}
    for name in names:
        items = [item for item in common if _all_have(runs, item, name)]
        if items:
            scored[name] = items
    if not scored:
        raise ValueError(
            "the runs have no score in common: add one with `tripletune eval score`, for runs that only retrieve "
            "for example --metrics recall@5"
        )
    if metric is None:
        return scored
    chosen: dict[str, list[str]] = {}
    for wanted in convert(metric, list[str]):
        of_name = {name: items for name, items in scored.items() if _is_named(name, wanted)}
        if not of_name:
            problem = f"no metric {wanted!r} that all runs have{nearest(wanted, list(scored))}"
            raise ValueError(f"{problem}: {', '.join(scored)} (`tripletune eval score` adds others to finished runs)")
        chosen |= of_name
    return chosen


def _all_have(runs: Sequence[Ratios], item: str, score: str) -> bool:
    """Whether every run has this score for this item, so that the item can be paired."""
    return all(score in items[item] for items in runs)


def _is_named(name: str, metric: str) -> bool:
    """Whether `metric` is a score itself or the family it belongs to, such as "exact" for "exact/micro/f1"."""
    return name == metric or name.startswith(f"{metric}/")


def _compare_score(
    systems: Sequence[Sequence[Ratios]], same_models: Sequence[list[int] | None], name: str, items: Sequence[str]
) -> list[RunScore]:
    """One score of each system on the same items, and its difference to the first system.

    The p-values are not corrected yet: `compare_folders` corrects those of all scores together.

    Args:
        systems: For each system the items of each seed, the first system being the reference.
        same_models: For each system `places_of_same_models` of the first system and it.
        name: The score.
        items: Ids of the items for which all runs have it; their order decides what the bootstrap draws.
    """
    scores: list[RunScore] = []
    first: list[np.ndarray] | None = None
    for seeds, places in zip(systems, same_models, strict=True):
        columns = [_numerators_and_denominators(seed, name, items) for seed in seeds]
        difference = None
        if first is None:
            first = columns
        else:
            difference = seeds_difference(first, columns, places)
        seed_means = [bootstrap_ratio(*column)["mean"] for column in columns]
        scores.append(RunScore(seeds_interval(columns), seed_means, difference))
    return scores


def _numerators_and_denominators(run: Ratios, name: str, items: Sequence[str]) -> np.ndarray:
    """Numerators and denominators of a score, shape (2, items), which is what `seeds_interval` reads."""
    return np.array([run[item][name] for item in items]).T


def _compared_run(system: SeedRuns, first: SeedRuns) -> ComparedRun:
    """What a comparison with the system `first` says about a system's runs.

    Costs are means over seeds, and only those that all seeds know. A difference between two trainings is only chance if
    a system was trained once, so the comparison says whether training seeds were compared.
    """
    names: set[str] = set()
    failed = 0
    costs: dict[str, list[float]] = {}
    for head in system.heads:
        names.add(head.name)
        failed += head.failed
        for name, value in head.cost.items():
            costs.setdefault(name, []).append(value)
    # A cost that one of the seeds does not know has no mean.
    cost = {name: fmean(values) for name, values in costs.items() if len(values) == len(system.heads)}
    own_trainings = {trained_weights(run) for run in system.runs}
    trainings_of_first = {trained_weights(run) for run in first.runs}
    compared = own_trainings == trainings_of_first or min(len(own_trainings), len(trainings_of_first)) > 1
    folders = ",".join(run.folder for run in system.runs)
    return ComparedRun(folders, system.name or ", ".join(sorted(names)), cost, failed, compared)


def _print_comparison(comparison: RunComparison, console: Console) -> None:
    """Print a comparison: the folders and costs of each system, then a table with a block of rows per score.

    The systems are numbered, since names and folders are too long for a table and two systems may share a name.
    """
    unit = comparison.unit
    for number, run in enumerate(comparison.runs, 1):
        costs = [f"{run.cost[name]:.1f} {title}" for name, title in _COSTS.items() if name in run.cost]
        console.print(f"run {number}: {run.folder} ({run.name}), per {unit}: {', '.join(costs) or '-'}")
    rows = []
    for name, of_runs in comparison.scores.items():
        for number, (run, of_run) in enumerate(zip(comparison.runs, of_runs, strict=True), 1):
            # The rows of one score stand below its name.
            title = "" if number > 1 else name
            score = interval_cells(of_run.score)
            rows.append((title, str(number), str(run.failed), *score, *_difference_cells(of_run.difference)))
    heads = ("score", "run", "failed", "mean", "95 % interval", "minus run 1", "95 % interval", "p", "than run 1")
    show_table(console, f"{comparison.what}, {comparison.items} {unit}s", heads, rows, f"{unit}s")
    _print_seeds_and_metrics(comparison.scores, console)
    trained_once = [str(number) for number, run in enumerate(comparison.runs, 1) if not run.trainings_compared]
    if trained_once:
        console.print(f"Run 1 against {', '.join(trained_once)}: {TRAINED_ONCE}")
    console.print(f"Differences to run 1 are paired by {unit}; {P_NOTE}.")
    if any(len(of_run.seeds) > 1 for of_run in chain.from_iterable(comparison.scores.values())):
        console.print(
            f"Of several seeds, seeds and {unit}s are drawn for interval and p (two-level bootstrap); runs of the same "
            "trained models are paired by model."
        )


def _difference_cells(difference: Difference | None) -> tuple[str, ...]:
    """The cells of a difference, empty for the first system, which has none."""
    if difference is None:
        return "", "", "", ""
    return (*interval_cells(difference, form="+z.1f"), p_cell(difference), verdict(difference))


def _print_seeds_and_metrics(scores: Mapping[str, Sequence[RunScore]], console: Console) -> None:
    """Print scores of single seeds, which show how much of a difference is chance, and what each metric measures."""
    metrics = find_metrics()
    for name, of_runs in scores.items():
        for number, of_run in enumerate(of_runs, 1):
            if len(of_run.seeds) > 1:
                means = ", ".join("-" if mean is None else f"{100 * mean:.1f}" for mean in of_run.seeds)
                console.print(f"run {number}, {name} of each seed: {means}.")
        if name in metrics:
            console.print(f"{name}: {metrics[name].explanation}.")
