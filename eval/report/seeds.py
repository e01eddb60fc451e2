"""Runs that differ in a seed alone: one row of a report, with intervals over seeds and questions.

One training is one draw: two seeds of equal settings differ by several points, and a test over questions takes this for
a difference between systems. So the seeds of a system are averaged, and seeds and questions are drawn together
(`eval.statistics.seeds_interval`). `run.json` says how a model was trained, and with which seed. The same
holds for the replies of one model that are drawn with several seeds. For `eval compare`, the command names the seeds of
a system (`open_seeds`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tripletune.eval.report.groups import Group
from tripletune.eval.report.runs import Run, named_folder, read_run_without_questions, why_unfinished
from tripletune.eval.report.setting import are_seeds, places_of_same_models, same_training
from tripletune.eval.results import METRICS, MetricsHead
from tripletune.eval.statistics import (
    Difference,
    Interval,
    add_corrected_p_values,
    bootstrap_ratio,
    seeds_difference,
    seeds_interval,
    verdict,
)
from tripletune.eval.suites.extraction import KIND as EXTRACTION


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedRow:
    """A system with the seeds that it was trained with, or that its replies were drawn with; one seed is a run alone.

    Attributes:
        name: The name of its first run.
        runs: The names of its runs.
        seeds: Their training seeds, or if these are equal, those of their replies; empty if they are not known.
        scores: By metric, the mean of the seeds.
        of_seeds: By metric, the score of each seed.
        differences: By metric, its difference to the first system; None for the first.
    """

    name: str
    runs: list[str]
    seeds: list[int]
    scores: dict[str, Interval]
    of_seeds: dict[str, list[float | None]]
    differences: dict[str, Difference | None]


@dataclass(frozen=True, slots=True)
class SeedRuns:
    """One system to compare: its finished runs, which differ in their seeds, and what their `metrics.json` says.

    `name` is the one that the command gives it; "" if it gives none.
    """

    name: str
    runs: list[Run]
    heads: list[MetricsHead]

    @property
    def names(self) -> set[str]:
        """What `--baseline` may call the system: its name, its system or model, and the names of its folders."""
        names = {self.name}
        names |= {head.name for head in self.heads}
        names |= {Path(run.folder).name for run in self.runs}
        return names


class NamedSeeds(NamedTuple):
    """The folders of one system's seeds, and the system's name in a comparison; "" if the command gives none."""

    name: str
    folders: list[str]


def named_seeds(spec: str) -> NamedSeeds:
    """The name and folders of NAME=A,B,C, or of A,B,C alone, whose own names may have a "="."""
    folders = folders_of_seeds(spec)
    if all(Path(folder).exists() for folder in folders):
        return NamedSeeds("", folders)
    name, path = named_folder(spec)
    return NamedSeeds(name, folders_of_seeds(path))


def folders_of_seeds(spec: str | Path) -> list[str]:
    """The folders of `A,B,C`; the name of a single folder may have a comma.

    Raises:
        ValueError: A folder is named twice, which would count one seed as two.
    """
    if Path(spec).exists():
        return [str(spec)]
    folders = str(spec).split(",")
    for folder, count in Counter(Path(folder).resolve() for folder in folders).items():
        if count > 1:
            raise ValueError(f"{spec}: the folder {folder} is named {count} times; name each seed once")
    return folders


def open_seeds(spec: str) -> SeedRuns:
    """The finished runs of one system, without their items, which are read only after the settings were compared.

    Only finished runs are compared: the questions that a stopped run has answered are not a random sample.
    """
    runs = []
    heads = []
    name, folders = named_seeds(spec)
    for folder in folders:
        run = read_run_without_questions(folder)
        if not (Path(folder) / METRICS).is_file():
            raise FileNotFoundError(why_unfinished(run))
        head = MetricsHead.from_json(run.metrics)
        if head.evaluation != EXTRACTION and not head.task:
            raise ValueError(f"{folder} is not the output of a finished `tripletune eval run` or `extraction`")
        runs.append(run)
        heads.append(head)
    return SeedRuns(name, runs, heads)


def seed_rows(group: Group) -> list[SeedRow]:
    """The systems of a group; empty if none has several seeds, since then the runs say the same.

    Only questions that all runs have are compared.
    """
    systems = _places_by_system(group.runs)
    if all(len(places) == 1 for places in systems):
        return []
    columns = {metric: _score_columns(group, metric) for metric in group.metrics}
    rows: list[SeedRow] = []
    runs_of_first = [group.runs[place] for place in systems[0]]
    for places in systems:
        same_models = places_of_same_models(runs_of_first, [group.runs[place] for place in places])
        scores = {}
        of_seeds = {}
        differences: dict[str, Difference | None] = {}
        for metric, of_runs in columns.items():
            seeds = [of_runs[place] for place in places]
            scores[metric] = seeds_interval(seeds)
            of_seeds[metric] = [bootstrap_ratio(*seed)["mean"] for seed in seeds]
            differences[metric] = None
            if rows:
                seeds_of_first = [of_runs[place] for place in systems[0]]
                differences[metric] = seeds_difference(seeds_of_first, seeds, same_models)
        rows.append(
            SeedRow(
                name=group.names[places[0]],
                runs=[group.names[place] for place in places],
                seeds=_seeds_of([group.runs[place] for place in places]),
                scores=scores,
                of_seeds=of_seeds,
                differences=differences,
            )
        )
    for metric in group.metrics:
        _add_corrections_and_verdicts([row.differences[metric] for row in rows])
    return rows


def _places_by_system(runs: Sequence[Run]) -> list[list[int]]:
    """The places of the runs of each system, which differ in the seed of one kind: of the training, or of the replies.

    Replies of one training are not drawn independently of each other, so the two kinds are never mixed in one row.
    """
    systems: list[list[int]] = []
    for place, run in enumerate(runs):
        for places in systems:
            members = [*(runs[other] for other in places), run]
            if _are_trainings(members) or _are_drawings(members):
                places.append(place)
                break
        else:
            systems.append([place])
    return systems


def _are_trainings(runs: Sequence[Run]) -> bool:
    """Whether runs have models of one training with different seeds; the same model twice is no other seed."""
    for first, second in combinations(runs, 2):
        if not same_training(first, second) or first.about.trainings == second.about.trainings:
            return False
    return are_seeds(runs)


def _are_drawings(runs: Sequence[Run]) -> bool:
    """Whether runs differ in nothing but the seed that replies are drawn with, so also in no model."""
    seeds = set()
    settings = []
    for run in runs:
        seeds.add(_seed_of_replies(run))
        sampling = run.settings.sampling
        without_seed = None if sampling is None else sampling._replace(seed=None)
        settings.append(replace(run.settings, sampling=without_seed, student_seed=None).to_json())
    # Runs without a seed may be copies of one run.
    return None not in seeds and len(seeds) == len(runs) and all(other == settings[0] for other in settings)


def _seed_of_replies(run: Run) -> int | None:
    """The seed that replies are drawn with: of the Graph-LLM, else of the chat model; None if nothing is drawn."""
    settings = run.settings
    if settings.student_seed is not None:
        return settings.student_seed
    if settings.sampling is None or not settings.sampling.temperature:
        return None
    return settings.sampling.seed


def _seeds_of(runs: Sequence[Run]) -> list[int]:
    """The training seed of each run, or if the runs are of one training, the seed of its replies.

    Of several models in a run, this is the seed of the first one.
    """
    trainings = [list(run.about.trainings.values()) for run in runs]
    if len(runs) > 1 and all(other == trainings[0] for other in trainings):
        return [seed for seed in map(_seed_of_replies, runs) if seed is not None]
    return [of_run[0].seed for of_run in trainings if of_run]


def _score_columns(group: Group, metric: str) -> list[np.ndarray]:
    """Scores and counts of each run on the questions that all runs have, shape (2, questions)."""
    tables = [run.rows.set_index("id")[metric].dropna() for run in group.runs]
    shared = set(tables[0].index).intersection(*(table.index for table in tables[1:]))
    common = [question for question in tables[0].index if question in shared]
    columns = []
    for table in tables:
        scores = table.loc[common].to_numpy(np.float64)
        columns.append(np.array([scores, np.ones_like(scores)]))
    return columns


def _add_corrections_and_verdicts(differences: Sequence[Difference | None]) -> None:
    """Add corrected p-values and verdicts to the differences of one metric, which are one column of a table."""
    present = [difference for difference in differences if difference is not None]
    add_corrected_p_values(present)
    for difference in present:
        difference["verdict"] = verdict(difference)
