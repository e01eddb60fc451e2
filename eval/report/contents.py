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
from tripletune.eval.report.setting import setting_rows
from tripletune.eval.results import RunSettings


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
    """

    system: str
    finished: bool
    unshared: list[str]
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
    """

    task: str
    metrics: list[str]
    told: str
    setting: list[list[str]]
    runs: list[ReportedRun]
    pairs: dict[str, Matrix]

    @property
    def headline(self) -> str:
        """The score that stands for the others."""
        return self.metrics[0]

    @property
    def title(self) -> str:
        """The title of the group in all outputs."""
        questions = max(run.expected or run.questions for run in self.runs)
        title = f"{self.task}, {questions:,} questions"
        return f"{title}, {self.told}" if self.told else title

    @property
    def column(self) -> str:
        """The head of the group's column in a table of all tasks."""
        head = f"{self.task} {self.headline}"
        return f"{head}, {self.told}" if self.told else head


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
        """The content of `report.json`."""
        return asdict(self)


def build_report(runs: Sequence[Run], groups: Sequence[Group], title: str = "") -> Report:
    """Compute all figures of a report.

    Args:
        runs: All output folders; those without questions are other evaluations.
        groups: The runs with questions.
    """
    made = [_reported_group(group) for group in groups]
    others = []
    for run in runs:
        if run.rows.empty:
            about = _about(run, run.name or run.folder)
            others.append(OtherEvaluation(**about, metrics=run.metrics or None))
    missing: list[str] = []
    for group in made:
        for reported in group.runs:
            name = f"{reported.name} on {group.task}" if len(made) > 1 else reported.name
            missing += _missing(reported, name)
    missing += [_unfinished(other, other.name) for other in others if other.metrics is None]
    return Report(title=title, groups=made, others=others, missing=list(dict.fromkeys(missing)))


def _reported_group(group: Group) -> ReportedGroup:
    runs = []
    for run, name in zip(group.runs, group.names):
        unshared = [score for score in run.scores if score not in group.metrics]
        figures = figures_of(run)
        about = _about(run, name)
        runs.append(ReportedRun(**about, system=run.system, finished=run.finished, unshared=unshared, figures=figures))
    return ReportedGroup(
        task=group.runs[0].task,
        metrics=group.metrics,
        told=group.told,
        setting=setting_rows(group.runs, group.names),
        runs=runs,
        pairs=compare_pairs(group),
    )


def _about(run: Run, name: str) -> dict[str, Any]:
    """The fields of `ReportedFolder`."""
    return {
        "name": name,
        "folder": run.folder,
        "command": run.about.command or None,
        "settings": run.settings.to_json(),
        "questions": run.results,
        "expected": run.about.questions,
    }


def _unfinished(run: ReportedFolder, name: str) -> str:
    of = f" of {run.expected:,}" if run.expected else ""
    return (
        f"{name} is not finished: it has {run.questions:,}{of} questions. Its figures count only these; run its "
        "command again to continue."
    )


def _missing(run: ReportedRun, name: str) -> Iterator[str]:
    figures = run.figures
    if not run.finished:
        yield _unfinished(run, name)
    if figures.errors:
        yield f"{name}: {figures.errors:,} questions failed; they count as 0 in every score and recall."
    if not figures.recall and figures.rounds.mean["mean"]:
        yield f"{name} has no gold links (--gold), so the recall of its passages is not known."
    if run.unshared:
        yield f"{name} has {', '.join(run.unshared)}, which other runs of the task lack: score those, too."
