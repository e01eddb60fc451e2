"""Groups of comparable runs, their names, and comparisons within a group.

A `Group` holds runs with the same task, scores and question file that agree in all shared settings
(`eval/report/setting.py`); tables compare the group's first run with the others. A run is named after its difference to
the first run, unless the command names it (NAME=FOLDER).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from tripletune.core.files import flatten
from tripletune.eval.report.runs import Run
from tripletune.eval.report.setting import EQUAL, differing_settings, shared_in_words, shared_settings
from tripletune.eval.results import RunSettings
from tripletune.eval.statistics import Difference, add_corrected_p_values, paired_table, verdict
from tripletune.rag.results import fields_as_json

T = TypeVar("T")
# Settings that are digests of a file; the name of a run says that they differ, without the digest.
_DIGESTS = ("corpus", "triples", "gold", "data")
# Settings that belong to the corpus, so that over other questions they tell nothing more.
_OF_CORPUS = ("corpus", "triples", "gold")
# Row i, column j: "run i minus run j"; None on the diagonal, and for two runs without a common question.
Matrix = list[list[Difference | None]]


@dataclass(frozen=True, slots=True)
class Group:
    """Runs of one task over one file of questions, the reference first, each with its name.

    `told` says in words which settings distinguish the group from the task's other groups.
    """

    runs: tuple[Run, ...]
    names: tuple[str, ...]
    told: str = ""

    @property
    def metrics(self) -> list[str]:
        """The scores that all runs have, the headline first.

        Runs that only retrieve have no scores of answers, but keep their columns beside runs that answer.
        """
        shared = set(self.runs[0].scores)
        for run in self.runs:
            shared &= set(run.scores)
        names = [name for name in self.runs[0].scores if name in shared]
        known = []
        for name in names:
            is_known = [run.rows[name].notna().any() for run in self.runs]
            if any(is_known):
                known.append(name)
        return known or names


def group_runs(runs: Sequence[Run], across: Collection[str] = (), baseline: str | None = None) -> list[Group]:
    """Sort runs into groups and name them, in the given order; runs whose name, system or folder is `baseline` lead.

    Runs over other questions are never in one group, so only those over the same questions are compared setting by
    setting.
    """
    if baseline:
        runs = baseline_first(runs, [(run.name, run.system, Path(run.folder).name) for run in runs], baseline)
    sets: list[list[Run]] = []
    for over_same_questions in _by_question_file(runs):
        _share_hops(over_same_questions)
        sets += _comparable_sets(over_same_questions, across)
    groups = []
    for members in sets:
        of_task = [other for other in sets if other[0].task == members[0].task]
        groups.append(Group(tuple(members), _names_of_runs(members), _distinguishing_settings(members, of_task)))
    return groups


def baseline_first(items: Sequence[T], names: Sequence[Collection[str]], baseline: str) -> list[T]:
    """The items that `--baseline` names, then all others, since differences are to the first one.

    Args:
        items: Runs, or systems.
        names: What each of them may be called.
        baseline: One of these names.
    """
    leading = []
    following = []
    for item, of_item in zip(items, names, strict=True):
        if baseline in of_item:
            leading.append(item)
        else:
            following.append(item)
    if not leading:
        raise ValueError(f"--baseline {baseline}: no run has this name, system or folder")
    return leading + following


def _by_question_file(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs with the same task, scores and questions, in the order of their first runs; only these are ever compared."""
    families: dict[str, list[Run]] = {}
    for run in runs:
        # A task file of the same name may have been changed between two runs.
        key = json.dumps([run.task, run.settings.task.metrics, run.settings.data])
        families.setdefault(key, []).append(run)
    return list(families.values())


def _share_hops(runs: Sequence[Run]) -> None:
    """Write into `rows` of runs without gold links the numbers of hops that other runs over the same questions know.

    The number belongs to the question, but a run over another corpus has it only with `--gold`. Without it, the tables
    by number of hops would leave out that run.
    """
    hops = {}
    for run in runs:
        for question, number in zip(run.rows["id"], run.rows["hops"], strict=True):
            if pd.notna(number):
                hops[question] = number
    for run in runs:
        run.rows["hops"] = run.rows["id"].map(hops)


def _comparable_sets(runs: Sequence[Run], across: Collection[str]) -> list[list[Run]]:
    """Sets of runs that agree in all shared settings; every two runs that agree are together in one of the sets.

    A run may be in several sets, because a setting that one of two runs does not have counts as agreement: a run
    without search agrees with runs over two corpora, which do not agree with each other.
    """
    agreeing: list[set[int]] = [set() for _ in runs]
    for first, second in combinations(range(len(runs)), 2):
        if not differing_settings(runs[first], runs[second], across):
            agreeing[first].add(second)
            agreeing[second].add(first)
    sets: list[set[int]] = []
    for place, others in enumerate(agreeing):
        for other in sorted(others):
            pair = {place, other}
            if not any(pair <= members for members in sets):
                sets.append(_with_all_that_agree(pair, agreeing))
        if not others:
            sets.append({place})
    return [list(map(runs.__getitem__, sorted(members))) for members in sets]


def _with_all_that_agree(pair: set[int], agreeing: Sequence[set[int]]) -> set[int]:
    """The pair and each further run, in order, that agrees with all runs before it."""
    members = set(pair)
    for place, others in enumerate(agreeing):
        if members <= others:
            members.add(place)
    return members


def _distinguishing_settings(members: Sequence[Run], sets: Sequence[Sequence[Run]]) -> str:
    """The settings that distinguish the set of runs `members`, which is one of `sets`, from the others, in words.

    Settings in which all sets of a task are equal are left out, so that titles name only what tells groups apart.
    """
    settings = _settings_of_set(members)
    others = list(map(_settings_of_set, sets))
    words = []
    for name in EQUAL:
        if name in settings and any(_tells_apart(name, settings, other) for other in others):
            first = next(run for run in members if getattr(shared_settings(run), name))
            words.append(f"{name} {shared_in_words(first, name)}")
    return ", ".join(words)


def _tells_apart(name: str, settings: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    """Whether a setting tells two sets of runs apart; a setting that one of them lacks does not."""
    if name not in others:
        return False
    # Over other questions, another corpus tells nothing more.
    is_told_by_data = name in _OF_CORPUS and settings.get("data") != others.get("data")
    return settings[name] != others[name] and not is_told_by_data


def _settings_of_set(members: Sequence[Run]) -> dict[str, Any]:
    """The shared settings of a set of runs, each from the first run that has it: the others that have it agree."""
    settings: dict[str, Any] = {}
    for run in members:
        for name, value in fields_as_json(shared_settings(run)).items():
            if value and name not in settings:
                settings[name] = value
    return settings


def compare_pairs(group: Group) -> dict[str, Matrix]:
    """For each metric, a matrix that compares all pairs of runs on the questions that both runs have.

    The p-values are corrected for the pairs of one metric, which a reader of its table sees together.
    """
    tables = [run.rows.set_index("id") for run in group.runs]
    matrices = {}
    for metric in group.metrics:
        matrices[metric] = _matrix_of([table[metric].dropna() for table in tables])
    return matrices


def _matrix_of(scores: Sequence[pd.Series]) -> Matrix:
    """A matrix of the differences between all pairs of runs, in one metric; `scores` has a run's scores by question.

    Only one half is computed and corrected: the other half holds the same comparisons with the signs turned, which must
    not count twice among the tests of the table.
    """
    differences = _differences_of_pairs(scores)
    add_corrected_p_values(differences.values())
    matrix: Matrix = [[None] * len(scores) for _ in scores]
    for (first, second), difference in differences.items():
        difference["verdict"] = verdict(difference)
        matrix[second][first] = difference
        matrix[first][second] = _swapped_difference(difference)
    return matrix


def _differences_of_pairs(scores: Sequence[pd.Series]) -> dict[tuple[int, int], Difference]:
    """Differences "second minus first" of all pairs of runs with common questions, by the places of both runs.

    Each pair is compared on all questions that both have. Runs with the same questions, which most are, share one
    computation, so that they also share the drawn samples of the bootstrap.
    """
    questions = [frozenset(column.index) for column in scores]
    # Most runs have all questions, and are compared at once.
    usual, _ = Counter(questions).most_common(1)[0]
    differences: dict[tuple[int, int], Difference] = {}
    if usual:
        complete = [place for place, of_run in enumerate(questions) if of_run == usual]
        differences |= _differences_on(usual, scores, complete)
    for first, second in combinations(range(len(scores)), 2):
        # Only comparisons with a stopped run lack the questions that this run lacks.
        common = questions[first] & questions[second]
        if common and (first, second) not in differences:
            differences |= _differences_on(common, scores, (first, second))
    return differences


def _differences_on(
    questions: Collection[str], scores: Sequence[pd.Series], places: Sequence[int]
) -> dict[tuple[int, int], Difference]:
    """Differences of the runs at some places on questions that all of them have.

    The questions are sorted, since the bootstrap draws places: another order would give other intervals from the same
    seed.
    """
    order = sorted(questions)
    return paired_table({place: scores[place].loc[order].to_numpy() for place in places})


def _swapped_difference(difference: Difference) -> Difference:
    """The difference "first minus second" of a difference "second minus first"."""
    turned = difference.copy()
    turned["mean"] = -difference["mean"]
    turned["low"] = -difference["high"]
    turned["high"] = -difference["low"]
    turned["verdict"] = verdict(turned)
    return turned


def _names_of_runs(runs: Sequence[Run]) -> tuple[str, ...]:
    """The names of a group's runs; equal names get the folders in brackets, so that no two rows look alike.

    A run without a name is called by the settings in which it differs from the first one. Equal names are counted
    before any is changed.
    """
    names = [run.name or _name_by_difference(runs[0].settings, run.settings) for run in runs]
    counts = Counter(names)
    for place, run in enumerate(runs):
        if counts[names[place]] > 1:
            names[place] = f"{names[place]} ({run.folder})"
    return tuple(names)


def _name_by_difference(reference: RunSettings, settings: RunSettings) -> str:
    """The system, and how a run of the reference's system differs from the reference."""
    words = [settings.system]
    if settings.system == reference.system:
        for name, value in _differing_values(reference, settings).items():
            # The digest of another run's results says nothing that `control` does not say.
            if name != "control_run":
                words.append(_difference_in_words(name, value))
    return ", ".join(dict.fromkeys(words))


def _differing_values(reference: RunSettings, settings: RunSettings) -> dict[str, Any]:
    """Settings by dotted name that differ from the reference's, without fingerprints of models that differ by name."""
    before = _flat_settings(reference)
    now = _flat_settings(settings)
    differing = {}
    fingerprints = set()
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            differing[name] = now.get(name)
            fingerprints |= {f"{name.removesuffix('.spec')}.weights", f"{name}_weights"}
    return {name: value for name, value in differing.items() if name not in fingerprints}


def _flat_settings(settings: RunSettings) -> dict[str, Any]:
    """Settings by dotted name; also the parts of the sampling have names, as "0.7,1.0,2" would say little."""
    values = settings.to_json()
    if settings.sampling is not None:
        values["sampling"] = settings.sampling._asdict()
    return flatten(values, ".")


def _difference_in_words(name: str, value: object) -> str:
    """A differing setting for the name of a run.

    Contents that a digest or a folder stands for are only called "other", since a digest says nothing to a reader. Of
    an absolute path the last three parts suffice to tell runs apart.
    """
    if name.startswith("files.") or name == "options.prompts":
        return "other prompts"
    if name in _DIGESTS or name.startswith("task.") or name.endswith("weights"):
        return f"other {name.replace('_', ' ')}"
    short = name.removeprefix("options.").removesuffix(".spec")
    if value is None:
        return f"no {short}"
    if isinstance(value, (list, tuple)):
        value = ",".join(map(str, value))
    if isinstance(value, str) and Path(value).is_absolute():
        value = "/".join(Path(value).parts[-3:])
    return f"{short}={value}"
