"""`tripletune eval curve`: the learning curve of a training run (RAS, figure 15; rewards of GRPO), as PNG.

matplotlib is imported late and without a display. Colour-blind readers can tell the colours apart. The file has no
date.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from tripletune.core.data.fields import checked
from tripletune.core.data.jsonl import read_jsonl

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# What a training run logged, by name, at one step each; "step" is the number of optimiser steps.
Logged = dict[str, float]

# Okabe and Ito's colours, and markers that tell the lines apart in grey prints.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
MARKERS = ("o", "s", "^", "D", "v", "P")
_LOOK: Any = {"font.family": ["DejaVu Sans"], "font.size": 9, "axes.grid": True, "grid.color": "#DDDDDD"}
# Panel -> name of each score in the file -> its name on the picture. Planning scores are those with history, since
# without history all plans are the paper's q_0.
Panels = dict[str, dict[str, str]]
PANELS: Panels = {
    "ROUGE": {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"},
    "triple F1": {"exact/micro/f1": "exact", "normalised/micro/f1": "normalised", "soft/micro/f1": "soft"},
    "planning": {
        "planning/action_accuracy_with_history": "action accuracy",
        "planning/subquery_f1_with_history": "sub-query F1",
    },
    "answering": {"answering/exact_match": "exact match", "answering/f1": "F1"},
    "pairs": {"rewards/accuracies": "better reply gained more"},
}
MALFORMED_OUTPUT = "malformed_output"
# The training loss jumps from step to step, so it is drawn as the means of this many stretches.
_STRETCHES = 60
LOSSES = "losses.jsonl"
EVALUATIONS = "evaluations.jsonl"
REWARDS = "rewards.jsonl"
# Values that every step of a run can have -> title; all except the loss are in `rewards.jsonl`.
_EACH_STEP = {
    "loss": "loss",
    "reward": "reward",
    "tokens": "tokens of a run",
    "kl": "KL divergence",
    "rewards/margins": "margin of rewards",
}


class Curve(NamedTuple):
    """What a training run logged: at each step its loss and rewards, and its evaluations, both in order of steps."""

    losses: list[Logged]
    evaluations: list[Logged]


def read_curve(folder: str | Path) -> Curve:
    """Read a run's `losses.jsonl`, joined with `rewards.jsonl`, and `evaluations.jsonl`, by step.

    The folder may be of a checkpoint or of a killed run.
    """
    run = _run_folder(Path(folder))
    losses = _read_logged(run / LOSSES)
    evaluations = _read_logged(run / EVALUATIONS)
    if not losses and not evaluations:
        raise ValueError(f"{run}: the run has done no step yet")
    rewards = {row["step"]: row for row in _read_logged(run / REWARDS)}
    joined = []
    for row in losses:
        # Of the losses' file only the loss is drawn; it also has rates and norms.
        drawn = {name: row[name] for name in ("step", "loss") if name in row}
        joined.append(drawn | rewards.get(row["step"], {}))
    return Curve(joined, sorted(evaluations, key=lambda row: row["step"]))


def _run_folder(folder: Path) -> Path:
    """The folder of the logs: the given one, or the one that a checkpoint lies in."""
    for place in (folder, folder.parent):
        if (place / LOSSES).is_file() or (place / EVALUATIONS).is_file():
            return place
    raise FileNotFoundError(f"{folder} holds no {LOSSES} and no {EVALUATIONS}: give the output folder of a run")


def _read_logged(file: Path) -> list[Logged]:
    """The numbers of each line; no lines if there is no such file, since only some runs log rewards or evaluations.

    A last line that a kill has cut off is ignored, so that the curve of a running or killed training can be drawn.
    """
    rows: list[Logged] = []
    if not file.is_file():
        return rows
    for where, row in read_jsonl(file, partial=True):
        checked(row, where, {"step": int, "loss?": float})
        rows.append({name: value for name, value in row.items() if isinstance(value, (int, float))})
    return rows


def draw_curve(losses: Sequence[Logged], evaluations: Sequence[Logged]) -> bytes:
    """A learning curve as PNG: loss, rewards, ROUGE and triple F1 over steps; the same rows give the same bytes.

    The panels stand in a row: first a panel for each value that every step logs, of which the loss is always there,
    then those of `panels_of`.

    Args:
        losses: Values of each step, in order of steps.
        evaluations: Scores from 0 to 1, drawn times 100, and losses, in order of steps.
    """
    import matplotlib
    from cycler import cycler
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # matplotlib logs every font list that it builds.
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    panels = panels_of(evaluations)
    logged = _names_in(losses)
    # The loss has a panel even before the first step, for the losses of evaluations.
    each_step = [name for name in _EACH_STEP if name == "loss" or name in logged]
    picture = io.BytesIO()
    with matplotlib.rc_context(_LOOK | {"axes.prop_cycle": cycler(color=COLOURS, marker=MARKERS)}):
        figure = Figure(figsize=(3.5 * max(2, len(each_step)), 2.6), dpi=140, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(1, len(each_step) + len(panels), squeeze=False)[0]
        for name, axis in zip(each_step, axes):
            _draw_training(axis, name, losses)
        if "loss" in _names_in(evaluations):
            axes[0].plot(*_points_of(evaluations, "loss"), label="validation")
        for (panel, scores), axis in zip(panels.items(), axes[len(each_step) :], strict=True):
            _draw_scores(axis, panel, scores, evaluations)
        for axis in axes:
            axis.legend()
            axis.set_xlabel("optimiser steps")
        figure.savefig(picture, format="png", metadata={"Software": None})
    return picture.getvalue()


def _draw_training(axis: Axes, name: str, losses: Sequence[Logged]) -> None:
    """Draw on `axis` a value that every step has, as means of stretches of steps, since single steps jump."""
    axis.set_title(_EACH_STEP[name])
    steps, values = _points_of(losses, name)
    if not steps:
        return
    size = max(1, len(steps) // _STRETCHES)
    mean_steps = []
    mean_values = []
    for start in range(0, len(steps), size):
        mean_steps.append(fmean(steps[start : start + size]))
        mean_values.append(fmean(values[start : start + size]))
    axis.plot(mean_steps, mean_values, marker="", label="training")


def _draw_scores(axis: Axes, panel: str, scores: dict[str, str], evaluations: Sequence[Logged]) -> None:
    """Draw on `axis` the scores of a panel, by their names in the file and on the picture."""
    axis.set_title(f"{panel} (x 100)")
    for name, label in scores.items():
        steps, values = _points_of(evaluations, name)
        axis.plot(steps, [100 * value for value in values], label=label)
    # This leaves room for the legend and for marks at the top.
    axis.margins(y=0.12)
    axis.set_ylim(bottom=0)


class _Points(NamedTuple):
    """The points of a line: values at steps, one for one."""

    steps: list[float]
    values: list[float]


def _points_of(rows: Sequence[Logged], name: str) -> _Points:
    """Steps and values of a name, for the rows that have it; the others leave no gap in the line."""
    steps = []
    values = []
    for row in rows:
        if name in row:
            steps.append(row["step"])
            values.append(row[name])
    return _Points(steps, values)


def _names_in(rows: Sequence[Logged]) -> set[str]:
    """All names that some row has: not every step has an evaluation, nor every evaluation the same scores."""
    names: set[str] = set()
    for row in rows:
        names.update(row)
    return names


def panels_of(evaluations: Sequence[Logged]) -> Panels:
    """The panels of `PANELS` that have scores, or one panel with all other scores.

    A training task that somebody adds logs names that `PANELS` does not have; its scores are drawn all the same.
    """
    names = _names_in(evaluations)
    panels: Panels = {}
    for panel, scores in PANELS.items():
        drawn = {name: label for name, label in scores.items() if name in names}
        if drawn:
            panels[panel] = drawn
    if panels:
        return panels
    others = sorted(names - {"step", "epoch", "loss", MALFORMED_OUTPUT})
    if others:
        panels["scores"] = dict(zip(others, others, strict=True))
    return panels
