"""`tripletune eval curve`: the learning curve of a training run (RAS, figure 15; rewards of GRPO), as PNG.

matplotlib is imported late and without a display. Colour-blind readers can tell the colours apart. The file has no
date.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from tripletune.core.data.fields import checked
from tripletune.core.data.jsonl import read_jsonl

Rows = Sequence[Mapping[str, Any]]

# Okabe and Ito's colours, and markers that tell the lines apart in grey prints.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
MARKERS = ("o", "s", "^", "D", "v", "P")
_LOOK: Any = {"font.family": ["DejaVu Sans"], "font.size": 9, "axes.grid": True, "grid.color": "#DDDDDD"}
# Panel -> name of each score in the file -> its name on the picture. Planning scores are those with history, since
# without history all plans are the paper's q_0.
PANELS: dict[str, dict[str, str]] = {
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
LOSSES, EVALUATIONS, REWARDS = "losses.jsonl", "evaluations.jsonl", "rewards.jsonl"
# Values that every step of a run can have -> title; all except the loss are in `rewards.jsonl`.
_EACH_STEP = {"loss": "loss", "reward": "reward", "tokens": "tokens of a run", "kl": "KL divergence",
               "rewards/margins": "margin of rewards"}  # fmt: skip


def read_curve(folder: str | Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Read a run's `losses.jsonl`, joined with `rewards.jsonl`, and `evaluations.jsonl`, by step.

    The folder may be of a checkpoint or of a killed run.
    """
    places = [Path(folder), Path(folder).parent]
    files = [[one / LOSSES, one / EVALUATIONS] for one in places]
    found = next((both for both in files if any(file.is_file() for file in both)), None)
    if found is None:
        raise FileNotFoundError(f"{folder} holds no {LOSSES} and no {EVALUATIONS}: give the output folder of a run")
    losses, evaluations, rewards = (
        [_logged(*line) for line in read_jsonl(file, partial=True)] if file.is_file() else []
        for file in (*found, found[0].with_name(REWARDS))
    )
    if not losses and not evaluations:
        raise ValueError(f"{found[0].parent}: the run has done no step yet")
    of_step = {row["step"]: row for row in rewards}
    losses = [{n: row[n] for n in ("step", "loss") if n in row} | of_step.get(row["step"], {}) for row in losses]
    return losses, sorted(evaluations, key=lambda row: row["step"])


def _logged(where: str, row: Mapping[str, Any]) -> dict[str, Any]:
    checked(row, where, {"step": int, "loss?": float})
    return {name: value for name, value in row.items() if isinstance(value, (int, float))}


def draw_curve(losses: Rows, evaluations: Rows) -> bytes:
    """A learning curve as PNG: loss, rewards, ROUGE and triple F1 over steps; the same rows give the same bytes."""
    import matplotlib
    from cycler import cycler
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # matplotlib logs every font list that it builds.
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    panels, picture = panels_of(evaluations), io.BytesIO()
    with matplotlib.rc_context(_LOOK | {"axes.prop_cycle": cycler(color=COLOURS, marker=MARKERS)}):
        drawn = {name: [row for row in losses if name in row] for name in _EACH_STEP}
        shown = [name for name, rows in drawn.items() if name == "loss" or rows]
        figure = Figure(figsize=(3.5 * max(2, len(shown)), 2.6), dpi=140, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(1, len(shown) + len(panels), squeeze=False)[0]
        for name, axis in zip(shown, axes):
            axis.set_title(_EACH_STEP[name])
            rows, size = drawn[name], max(1, len(drawn[name]) // _STRETCHES)
            if parts := [rows[start : start + size] for start in range(0, len(rows), size)]:
                means = ([fmean(row[key] for row in part) for part in parts] for key in ("step", name))
                axis.plot(*means, marker="", label="training")
        points = [(row["step"], row["loss"]) for row in evaluations if "loss" in row]
        if points:
            axes[0].plot(*zip(*points), label="validation")
        for panel, axis in zip(panels, axes[len(shown) :]):
            axis.set_title(f"{panel} (x 100)")
            for name, label in panels[panel].items():
                points = [(row["step"], 100 * row[name]) for row in evaluations if name in row]
                axis.plot(*zip(*points), label=label)
            # This leaves room for the legend and for marks at the top.
            axis.margins(y=0.12)
            axis.set_ylim(bottom=0)
        for axis in axes:
            axis.legend()
            axis.set_xlabel("optimiser steps")
        figure.savefig(picture, format="png", metadata={"Software": None})
    return picture.getvalue()


def panels_of(evaluations: Rows) -> dict[str, dict[str, str]]:
    """The panels of `PANELS` that have scores, or one panel with all other scores."""
    names = {name for row in evaluations for name in row}
    found = {
        panel: {name: label for name, label in scores.items() if name in names} for panel, scores in PANELS.items()
    }
    others = sorted(names - {"step", "epoch", "loss", MALFORMED_OUTPUT})
    return {panel: scores for panel, scores in found.items() if scores} or (
        {"scores": {name: name for name in others}} if others else {}
    )
