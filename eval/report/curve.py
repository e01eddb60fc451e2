"""`tripletune eval curve`: the learning curve of a run: loss, ROUGE and triple F1 over steps (RAS, figure 15).

Drawn from two files of the run's folder: `losses.jsonl` (a line per optimiser step) and `evaluations.jsonl` (a line per
evaluation). A run that still trains, or was killed, is drawn as far as it got. Needs the extra `plots`.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

LOSSES, EVALUATIONS = "losses.jsonl", "evaluations.jsonl"
PICTURE = "learning_curve.png"
# What is drawn together, by name of the panel: the score's name in the file and on the picture.
PANELS: dict[str, dict[str, str]] = {
    "ROUGE": {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"},
    "triple F1": {"exact/micro/f1": "exact", "normalised/micro/f1": "normalised", "soft/micro/f1": "soft"},
}
_MALFORMED = {"malformed_output": "malformed output"}
# The training loss jumps from step to step; it is drawn as means of so many stretches.
_STRETCHES = 60
_HEIGHT = 2.6


@dataclass(frozen=True, slots=True)
class Curve:
    """What is known of a run's course.

    Attributes:
        steps: Optimiser steps with a loss.
        losses: Their losses.
        evaluations: `{"step", "loss", score: value}` of every evaluation, in the order of steps.
    """

    steps: tuple[int, ...]
    losses: tuple[float, ...]
    evaluations: tuple[Mapping[str, float], ...]

    @property
    def panels(self) -> dict[str, dict[str, str]]:
        """The panels of `PANELS` that have scores; where there are none of them, one with the scores there are."""
        names = {name for row in self.evaluations for name in row}
        found = {
            panel: {name: label for name, label in scores.items() if name in names} for panel, scores in PANELS.items()
        }
        found = {panel: scores for panel, scores in found.items() if scores}
        if not found:
            others = sorted(names - {"step", "epoch", "loss", *_MALFORMED})
            found = {"scores": {name: name for name in others}} if others else {}
        return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("run", metavar="RUN", help="output folder of a training run")
    parser.add_argument("--output", metavar="FILE.png", help=f"the picture (default: RUN/{PICTURE})")


def run(args: argparse.Namespace, console: Console) -> int:
    """Draw the curve and print the evaluations.

    Raises:
        FileNotFoundError: the folder is no run.
        ValueError: a file is damaged, there is nothing to draw, or matplotlib is missing.
    """
    output = Path(args.output or Path(args.run_folder) / PICTURE)
    if output.suffix.lower() != ".png":
        raise ValueError(f"--output {output}: its name must end in .png")
    curve = read_curve(args.run_folder)
    picture = draw_curve(curve)
    output.parent.mkdir(parents=True, exist_ok=True)
    scratch = output.with_name(output.name + ".tmp")
    scratch.write_bytes(picture)
    os.replace(scratch, output)
    _show(curve, console)
    console.print(f"written to {output}", markup=False)
    return 0


def read_curve(folder: str | Path) -> Curve:
    """Read the course of a run.

    Args:
        folder: The run's output folder, or a checkpoint in it.

    Raises:
        FileNotFoundError: there are neither losses nor evaluations.
        ValueError: a line is not what it should be, or there is nothing in the files.
    """
    folder = Path(folder)
    place = next((one for one in (folder, folder.parent) if _files(one)), None)
    if place is None:
        raise FileNotFoundError(f"{folder} holds no {LOSSES} and no {EVALUATIONS}: give the output folder of a run")
    losses = _rows(place / LOSSES)
    evaluations = sorted(_rows(place / EVALUATIONS), key=lambda row: row["step"])
    if not losses and not evaluations:
        raise ValueError(f"{place}: the run has done no step yet")
    return Curve(
        tuple(int(row["step"]) for row in losses), tuple(float(row["loss"]) for row in losses), tuple(evaluations)
    )


def draw_curve(curve: Curve) -> bytes:
    """The picture as PNG; the same curve gives the same bytes.

    Raises:
        ValueError: matplotlib is missing.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ValueError(f"a learning curve needs {error.name}: pip install 'tripletune[plots]'") from None
    from tripletune.eval.report.plots import COLOURS, MARKERS, new_figure, png_of

    panels = curve.panels
    with new_figure(_HEIGHT, 1 + len(panels)) as (figure, axes):
        first = axes[0]
        first.set_title("loss")
        if curve.steps:
            steps, means = _stretches(curve.steps, curve.losses)
            first.plot(steps, means, color=COLOURS[0], label="training")
        points = [(row["step"], row["loss"]) for row in curve.evaluations if "loss" in row]
        if points:
            first.plot(*zip(*points), color=COLOURS[1], marker=MARKERS[0], label="validation")
        first.legend()
        for panel, axis in zip(panels, axes[1:]):
            axis.set_title(f"{panel} (x 100)")
            for number, (name, label) in enumerate(panels[panel].items()):
                points = [(row["step"], 100 * row[name]) for row in curve.evaluations if name in row]
                mark, colour = MARKERS[number % len(MARKERS)], COLOURS[number % len(COLOURS)]
                axis.plot(*zip(*points), color=colour, marker=mark, label=label)
            # Room for the legend, and for marks at the top.
            axis.margins(y=0.12)
            axis.set_ylim(bottom=0)
            axis.legend()
        for axis in axes:
            axis.set_xlabel("optimiser steps")
        return png_of(figure)


def _show(curve: Curve, console: Console) -> None:
    """Print the evaluations as a table."""
    if not curve.evaluations:
        console.print("the run has no evaluation yet: only its training loss is drawn")
        return
    scores = {name: label for panel in curve.panels.values() for name, label in panel.items()}
    scores |= {name: label for name, label in _MALFORMED.items() if any(name in row for row in curve.evaluations)}
    table = Table(title="evaluations while training; scores are times 100")
    for heading in ("step", "loss", *scores):
        table.add_column(heading, justify="right")
    for row in curve.evaluations:
        cells = [f"{100 * row[name]:.1f}" if name in row else "-" for name in scores]
        table.add_row(str(row["step"]), f"{row['loss']:.4f}" if "loss" in row else "-", *cells)
    console.print(table)


def _files(folder: Path) -> bool:
    return (folder / LOSSES).is_file() or (folder / EVALUATIONS).is_file()


def _rows(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file; a last one that a kill cut off is left out."""
    if not path.is_file():
        return []
    rows = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row["step"], int) or isinstance(row["step"], bool):
                raise ValueError("step is not a whole number")
            row = {name: value for name, value in row.items() if isinstance(value, (int, float))}
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}:{number}: not a line of a run's log ({error!r})") from None
        rows.append(row)
    if path.name == LOSSES and any("loss" not in row for row in rows):
        raise ValueError(f"{path}: a line has no loss; is it the log of a run?")
    return rows


def _stretches(steps: Sequence[int], losses: Sequence[float]) -> tuple[list[float], list[float]]:
    """Mean step and mean loss of each stretch."""
    size = max(1, len(steps) // _STRETCHES)
    parts = [slice(start, start + size) for start in range(0, len(steps), size)]
    return [_mean(steps[part]) for part in parts], [_mean(losses[part]) for part in parts]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
