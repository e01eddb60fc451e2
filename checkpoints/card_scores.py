"""Scores for a model card: which score files are accepted, and their metrics as Markdown.

A score file is the `metrics.json` of an evaluation, whose settings lie beside it in `settings.json`.

Tested in `tests/checkpoints/test_card.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any, TypeGuard

from tripletune.core.files import flatten, read_json
from tripletune.core.tables import Table, code_span, plain
from tripletune.models.fingerprints import model_fingerprint
from tripletune.models.specs import resolve


def count_distinguishing_folders(files: Sequence[Path]) -> int:
    """The smallest number of folders that tells score files apart, which are all named metrics.json.

    The card shows so many folders of each path; the rest of a path is private.
    """
    folders = 1
    while len({file.parts[-folders - 1 :] for file in files}) < len(set(files)):
        folders += 1
    return folders


def refuse_scores_of_other_weights(file: Path, source: Path) -> None:
    """Raise an error if scores are of weights that this folder held before, for example of an earlier training.

    Only an evaluation of this very folder is checked: another copy, such as an earlier export, has a fingerprint of its
    own.
    """
    settings_file = file.with_name("settings.json")
    if not settings_file.is_file():
        return
    settings = read_json(settings_file)
    # The model stands in the settings, or in a section of a role.
    sections = [settings, *(section for section in settings.values() if isinstance(section, dict))]
    for section in sections:
        spec = section.get("spec") or section.get("model")
        weights = section.get("weights")
        # Evaluations of a model of the hub record no folder.
        if not weights or not isinstance(spec, str) or not Path(spec).is_dir():
            continue
        is_this_folder = Path(resolve(spec)).samefile(source)
        if is_this_folder and weights != model_fingerprint(source):
            raise ValueError(f"--scores {file} is of other weights, before {source} changed: evaluate it again")


def flat_metrics(content: dict[str, Any]) -> dict[str, Any]:
    """The metrics of an evaluation under flat names, without those of its controls."""
    own = {name: value for name, value in content.items() if name != "controls"}
    metrics: dict[str, Any] = flatten(own, ".")
    return metrics


def is_statistic_of_questions(value: object) -> TypeGuard[dict[str, Any]]:
    """Whether a metric is a table of statistics over at least one question; a count `n` that is absent is not 0.

    Which of them it has ("mean", "low", "high") is for the caller to ask.
    """
    return isinstance(value, dict) and bool(value.get("n", 1))


def scores_title(name: str, content: dict[str, Any]) -> str:
    """A score file's name as Markdown, with what was evaluated, so that no score is read for another task."""
    details = []
    if isinstance(content.get("data"), str):
        # Only the name of the folder or file, because its path is private.
        details.append(f"data {code_span(PurePath(content['data']).name)}")
    for key in ("system", "task", "split", "questions"):
        if content.get(key):
            details.append(f"{key} {code_span(content[key])}")
    title = code_span(name)
    if details:
        title += f" ({', '.join(details)})"
    return title


def table_of_scores(content: dict[str, Any], title: str) -> Table:
    """The means with their intervals, or the plain numbers of an evaluation without intervals.

    Beside means, the plain numbers of an evaluation are counts and settings, so they are left out.
    """
    means = []
    numbers = []
    for metric, value in flat_metrics(content).items():
        if is_statistic_of_questions(value) and isinstance(value.get("low"), (int, float)):
            interval = f"{value['low']:.4g} to {value['high']:.4g}"
            means.append([code_span(metric), f"{value['mean']:.4g}", interval, markdown_cell(value.get("n"))])
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            numbers.append([code_span(metric), markdown_cell(value)])
    if means:
        return Table(["metric", "mean", "95 % interval", "n"], means, title, cell=str)
    return Table(["metric", "value"], numbers, title, cell=str)


def markdown_cell(value: object) -> str:
    """A value as the Markdown of a cell: numbers have four digits, unless they have more before the point."""
    if isinstance(value, float) and abs(value) < 1000:
        return f"{value:.4g}"
    if isinstance(value, float):
        return str(value)
    return plain(value)
