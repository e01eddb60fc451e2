"""What a report holds: the types of `report.json`, and how they are made from runs.

Tables (`eval/report/tables.py`) and the page are made from these figures alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tripletune.eval.report.figures import RunFigures, figures_of
from tripletune.eval.report.groups import Group, Matrix, compare_pairs
from tripletune.eval.report.runs import Run
from tripletune.eval.report.seeds import SeedRow, seed_rows
from tripletune.eval.report.setting import trained_weights
from tripletune.eval.report.setting_rows import setting_rows
from tripletune.eval.results import RunSettings
from tripletune.eval.statistics import Difference, add_corrected_p_values

_TRAINED_ONCE = (
    "a run has one set of trained weights, so differences between runs with other weights may be those between "
    "training seeds. Train each system with several seeds: their runs become one row. `tripletune eval compare A,B,C "
    "D,E,F` also compares seeds of models that lie outside of their run folders."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedFolder:
    """An output folder in a report.

    Attributes:
        command: The words of its command line; None if they are not known.
        settings: `settings.json`.
        questions: Number of items with a result.
        expected: Number of items of the whole run; None if it is not known.
    """

    name: str
    folder: str
    command: list[str] | None
    settings: dict[str, Any]
    questions: int
    expected: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedRun(ReportedFolder):
    """A run of `eval run`.

    Attributes:
        unshared: Scores that other runs of its group lack.
        unreadable: A sentence for each role of which too many replies could not be read.
    """

    system: str
    finished: bool
    unshared: list[str]
    unreadable: list[str]
    figures: RunFigures

    @property
    def has_stored_triples(self) -> bool:
        """Whether its triples were made before, so that its costs are without those of reading the corpus."""
        settings = RunSettings.from_json(self.settings)
        return bool(settings.triples) and not settings.reads_passages


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherEvaluation(ReportedFolder):
    """Another evaluation, whose `metrics.json` is shown as it stands; None if it did not end."""

    metrics: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedGroup:
    """Runs that are compared with each other.

    Attributes:
        metrics: The scores that all runs have, the headline first.
        told: The settings that distinguish this group from the task's other groups, in words.
        setting: Settings and their values in words; see `setting_rows`.
        pairs: By metric, the differences of all pairs of runs.
        seeds: The systems, if one of them has several seeds.
    """

    task: str
    metrics: list[str]
    told: str
    setting: list[list[str]]
    runs: list[ReportedRun]
    pairs: dict[str, Matrix]
    seeds: list[SeedRow]

    @property
    def headline(self) -> str:
        """The score that stands for the others."""
        return self.metrics[0]

    @property
    def title(self) -> str:
        """The title of the group in all outputs."""
        questions = max(run.expected or run.questions for run in self.runs)
        return self._with_told(f"{self.task}, {questions:,} questions")

    @property
    def column(self) -> str:
        """The head of the group's column in a table of all tasks."""
        return self._with_told(f"{self.task} {self.headline}")

    @property
    def names(self) -> list[str]:
        """The names of its runs."""
        return [run.name for run in self.runs]

    @property
    def questions(self) -> int:
        """The most questions with a result that a run has."""
        return max(run.questions for run in self.runs)

    def run_named(self, name: str) -> ReportedRun | None:
        """The run with a name; None if the group has no such run."""
        for run in self.runs:
            if run.name == name:
                return run
        return None

    def to_first(self, metric: str) -> list[Difference | None]:
        """For each run, its difference to the first run, corrected for this column alone; None if there is none.

        These are copies: `pairs` keeps the correction for the whole matrix.
        """
        column: list[Difference | None] = []
        for row in self.pairs[metric]:
            column.append(None if row[0] is None else row[0].copy())
        add_corrected_p_values(difference for difference in column if difference is not None)
        return column

    def _with_told(self, text: str) -> str:
        """A text with the settings that tell this group from the task's other groups, if there are any."""
        return f"{text}, {self.told}" if self.told else text


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All figures of a report.

    Attributes:
        missing: Sentences on figures that are missing, and why.
    """

    title: str
    groups: list[ReportedGroup]
    others: list[OtherEvaluation]
    missing: list[str]

    def to_json(self) -> dict[str, Any]:
        """The content of `report.json` and of the page's data; a field renamed here must be renamed in `page.js`."""
        return asdict(self)


def build_report(runs: Sequence[Run], groups: Sequence[Group], title: str = "") -> Report:
    """Compute all figures of a report.

    Args:
        runs: All output folders; those without questions are other evaluations.
        groups: The runs with questions.
    """
    reported_groups = []
    missing: list[str] = []
    without_gold: list[str] = []
    for group in groups:
        reported_group = _reported_group(group)
        reported_groups.append(reported_group)
        trainings = {trained_weights(run) for run in group.runs if any(trained_weights(run))}
        if len(trainings) > 1 and not _have_trainings(reported_group.seeds, group):
            missing.append(f"{reported_group.title}: {_TRAINED_ONCE}")
        for reported in reported_group.runs:
            # The task matters only if there are several.
            name = reported.name
            if len(groups) > 1:
                name += f" on {reported_group.task}"
            missing += _missing_sentences(reported, name)
            if not reported.figures.recall and reported.figures.rounds.mean["mean"]:
                without_gold.append(name)
    if without_gold:
        missing.append(
            "Without gold links (`supporting`, or --gold), the recall of passages is not known: "
            f"{', '.join(without_gold)}."
        )
    others = []
    for run in runs:
        if not run.rows.empty:
            continue
        other = OtherEvaluation(**_folder_fields(run, run.name or run.folder), metrics=run.metrics or None)
        others.append(other)
        if other.metrics is None:
            missing.append(_unfinished_sentence(other, other.name))
    # A run that is in several groups is missing the same in each.
    return Report(title=title, groups=reported_groups, others=others, missing=list(dict.fromkeys(missing)))


def _reported_group(group: Group) -> ReportedGroup:
    """The figures of a group; a score that only some runs have is named with its run, since it can't be compared.

    This computes all intervals and tests of the group, which takes most of a report's time.
    """
    runs = []
    for run, name in zip(group.runs, group.names, strict=True):
        # A run that only retrieves has columns of the task's scores, without any value.
        unshared = [score for score in run.scores if score not in group.metrics and run.rows[score].notna().any()]
        figures = figures_of(run)
        fields = _folder_fields(run, name)
        reported = ReportedRun(
            **fields,
            system=run.system,
            finished=run.finished,
            unshared=unshared,
            unreadable=[replies.sentence for replies in run.unreadable if not run.settings.asks_oracle(replies.role)],
            figures=figures,
        )
        runs.append(reported)
    return ReportedGroup(
        task=group.runs[0].task,
        metrics=group.metrics,
        told=group.told,
        setting=setting_rows(group.runs, group.names),
        runs=runs,
        pairs=compare_pairs(group),
        seeds=seed_rows(group),
    )


def _have_trainings(systems: Sequence[SeedRow], group: Group) -> bool:
    """Whether every system of a group was trained with several seeds, so that no verdict is about one training.

    Replies of one model that were drawn with several seeds are of one training.
    """
    weights = {name: trained_weights(run) for name, run in zip(group.names, group.runs, strict=True)}
    for system in systems:
        trainings = {weights[name] for name in system.runs}
        if len(trainings) == 1:
            return False
    return bool(systems)


def _folder_fields(run: Run, name: str) -> dict[str, Any]:
    """The arguments that each kind of `ReportedFolder` has; `name` is the run's name in its group."""
    return {
        "name": name,
        "folder": run.folder,
        "command": run.about.command or None,
        "settings": run.settings.to_json(),
        "questions": run.results,
        "expected": run.about.questions,
    }


def _unfinished_sentence(run: ReportedFolder, name: str) -> str:
    """The sentence about a run that was stopped, whose figures could be taken for those of all questions."""
    answered = f"{run.questions:,}"
    if run.expected:
        answered += f" of {run.expected:,}"
    return (
        f"{name} is not finished: it has {answered} questions. Its figures count only these; run its command again to "
        "continue."
    )


def _missing_sentences(run: ReportedRun, name: str) -> Iterator[str]:
    """Yield sentences on what a run's figures lack, each with what to do; tables show only a dash for them.

    `name` is the run's name, with its task if the report has several.
    """
    figures = run.figures
    if not run.finished:
        yield _unfinished_sentence(run, name)
    if figures.errors:
        yield f"{name}: {figures.errors:,} questions failed; they count as 0 in every score and recall."
    if figures.recall and figures.without_search:
        yield f"{name}: {figures.without_search:,} questions were answered without a search; their recall counts as 0."
    for sentence in run.unreadable:
        yield f"{name}: {sentence}"
    if run.unshared:
        yield f"{name} has {', '.join(run.unshared)}, which other runs of the task lack: score those, too."
