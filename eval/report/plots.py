"""The plots of a report, drawn from its figures, and the learning curve of a training run (RAS, figure 15).

One look for all, with colours that colour-blind readers can tell apart, and PNG files without dates. matplotlib is
imported when the first plot is drawn, and without a display.
"""

from __future__ import annotations

import io
import logging
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from tripletune.eval.report.page import Runs, ablation_name, option_title
from tripletune.eval.report.runs import COSTS, LEVELS
from tripletune.models.data.records import read_jsonl

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart by colour-blind readers too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
# A second sign beside the colour, for prints in grey.
MARKERS = ("o", "s", "^", "D", "v", "P")
WIDTH = 7.0
_LOOK: Any = {
    "font.family": ["DejaVu Sans"],
    "font.size": 9,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
}
# What is drawn together in a learning curve, by name of the panel: the score's name in the file and on the picture.
PANELS: dict[str, dict[str, str]] = {
    "ROUGE": {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"},
    "triple F1": {"exact/micro/f1": "exact", "normalised/micro/f1": "normalised", "soft/micro/f1": "soft"},
}
MALFORMED_OUTPUT = "malformed_output"
# The training loss jumps from step to step; it is drawn as means of so many stretches.
_STRETCHES = 60
LOSSES, EVALUATIONS = "losses.jsonl", "evaluations.jsonl"
# Section ("<group number>/<name>"), file, caption, PNG; a plotting function gives the ends of the first two.
Plot = tuple[str, str, str, bytes]
# Inches for a row.
_BAR = 0.42


def draw_plots(report: Mapping[str, Any]) -> list[Plot]:
    """Draw all plots of a report.

    Raises:
        ValueError: matplotlib is missing.
    """
    plots = []
    tasks = [group["task"] for group in report["groups"]]
    for number, group in enumerate(report["groups"]):
        stem = re.sub(r"\W+", "-", group["task"])
        if tasks.count(group["task"]) > 1:
            stem += f"-{1 + tasks[:number].count(group['task'])}"
        for section, name, caption, png in _plots(group):
            plots.append((f"{number}/{section}", f"{stem}-{name}.png", f"{group['task']}: {caption}", png))
    return plots


def read_curve(folder: str | Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Read the course of a run: the lines of `losses.jsonl`, one per step, and of `evaluations.jsonl`, by their steps.

    Args:
        folder: The run's output folder, or a checkpoint in it; a run that was killed is read as far as it got.

    Raises:
        FileNotFoundError: there are neither losses nor evaluations.
        ValueError: a line is not what it should be, or there is nothing in the files.
    """
    places = [Path(folder), Path(folder).parent]
    files = [[one / LOSSES, one / EVALUATIONS] for one in places]
    found = next((both for both in files if any(file.is_file() for file in both)), None)
    if found is None:
        raise FileNotFoundError(f"{folder} holds no {LOSSES} and no {EVALUATIONS}: give the output folder of a run")
    losses, evaluations = (
        [_logged(*line) for line in read_jsonl(file, partial=True)] if file.is_file() else [] for file in found
    )
    if not losses and not evaluations:
        raise ValueError(f"{found[0].parent}: the run has done no step yet")
    if any("loss" not in row for row in losses):
        raise ValueError(f"{found[0]}: a line has no loss; is it the log of a run?")
    return losses, sorted(evaluations, key=lambda row: row["step"])


def _logged(where: str, row: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(row.get("step"), int):
        raise ValueError(f"{where}: not a line of a run's log: its step is no whole number")
    return {name: value for name, value in row.items() if isinstance(value, (int, float))}


def _plots(group: Mapping[str, Any]) -> Iterator[Plot]:
    runs = [run for run in group["runs"] if run["figures"]]
    if not runs:
        return
    names = [run["name"] for run in runs]
    yield "scores", "scores", "scores, with 95 % intervals", _score_plot(runs, names, group["metrics"])
    if group["ablations"]:
        shown = [group["runs"][place] for place in group["ablations"]["order"] if group["runs"][place]["figures"]]
        names = [ablation_name(run) for run in shown]
        png = _score_plot(shown, names, group["metrics"])
        yield "ablations", "ablations", "ablations, with 95 % intervals", png
    for number, sweep in enumerate(group["sweeps"]):
        before = sum(one["option"] == sweep["option"] for one in group["sweeps"][:number])
        members = [group["runs"][place] for place in sweep["runs"]]
        found = _sweep(members, sweep, group["metrics"], f"-{before + 1}" if before else "")
        if found is not None:
            yield found
    yield from _granularity(runs)
    yield from _recall(runs)
    yield from _calls(runs)
    yield from _latency(runs, group["metrics"][0])


def _score_plot(runs: Runs, names: Sequence[str], metrics: Sequence[str]) -> bytes:
    with _new_figure(0.9 + (_BAR + 0.1 * (len(metrics) - 1)) * len(runs)) as (figure, (axes,)):
        for number, metric in enumerate(metrics):
            shift = 0.2 * (number - (len(metrics) - 1) / 2)
            places = [place + shift for place in range(len(runs))]
            _points(axes, places, [run["figures"]["scores"][metric] for run in runs], metric, number, across=True)
        _name_rows(axes, names)
        return _finished(figure, axes, x="score x 100")


def _sweep(runs: Runs, sweep: Mapping[str, Any], metrics: Sequence[str], ending: str) -> Plot | None:
    pairs = [(value, run) for value, run in zip(sweep["values"], runs) if run["figures"]]
    if len(pairs) < 2:
        return None
    title, values = option_title(sweep["option"]), [value for value, _ in pairs]
    with _new_figure(3.2) as (figure, (axes,)):
        step = min(b - a for a, b in pairwise(values))
        for number, metric in enumerate(metrics):
            # Side by side, so that the intervals can be told apart.
            places = [value + 0.06 * step * (number - (len(metrics) - 1) / 2) for value in values]
            scores = [run["figures"]["scores"][metric] for _, run in pairs]
            _points(axes, places, scores, metric, number, line="-")
        axes.set_xticks(values, [f"{value:g}" for value in values])
        axes.set_xlabel(title)
        name = f"sweep-{sweep['option'].replace('_', '-')}{ending}"
        return "sweeps", name, f"scores by {title}, with 95 % intervals", _finished(figure, axes, y="score x 100")


def _granularity(runs: Runs) -> Iterator[Plot]:
    known = [run for run in runs if run["figures"]["granularity"]]
    if not known:
        return
    parts = {level: [100 * run["figures"]["granularity"][level]["share"]["mean"] for run in known] for level in LEVELS}
    png = _bar_plot(known, parts, "share of the questions, %")
    yield "granularity", "granularity", "what the answer was given from", png


def _calls(runs: Runs) -> Iterator[Plot]:
    known = [run for run in runs if run["figures"]["roles"]]
    roles = dict.fromkeys(role for run in known for role in run["figures"]["roles"])
    for key in COSTS if known else ():
        parts = {role: [run["figures"]["roles"].get(role, {}).get(key, 0.0) for run in known] for role in roles}
        title = f"{key.replace('_', ' ')} per question"
        png = _bar_plot(known, parts, title, 1 if key == "calls" else 0)
        yield "cost", key.replace("_", "-"), f"{title}, by role", png


def _bar_plot(runs: Runs, parts: Mapping[str, Sequence[float]], label: str, digits: int = 0) -> bytes:
    """Stacked horizontal bars, one per run from the top down, with the size of every part that has room for it."""
    starts = [0.0] * len(runs)
    whole = max(map(sum, zip(*parts.values()))) or 1.0
    with _new_figure(0.8 + _BAR * len(runs) + 0.2 * -(-len(parts) // 3)) as (figure, (axes,)):
        for number, (part, sizes) in enumerate(parts.items()):
            colour = COLOURS[number % len(COLOURS)]
            # More parts than colours: the second time round they are hatched.
            hatch = "///" if number >= len(COLOURS) else None
            bars = axes.barh(range(len(runs)), sizes, left=starts, height=0.62, color=colour, label=part, hatch=hatch,
                             edgecolor="white", linewidth=0.6)  # fmt: skip
            ink = "white" if number % len(COLOURS) in (0, 1, 2) else "black"
            shown = [f"{size:.{digits}f}" if size >= 0.07 * whole else "" for size in sizes]
            axes.bar_label(bars, shown, label_type="center", fontsize=8, color=ink)
            starts = [start + size for start, size in zip(starts, sizes)]
        _name_rows(axes, [run["name"] for run in runs])
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(label)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=min(len(parts), 3))
        return _png_of(figure)


def _recall(runs: Runs) -> Iterator[Plot]:
    known = [run for run in runs if run["figures"]["recall"]]
    if not known:
        return
    with _new_figure(max(3.2, 0.23 * len(known))) as (figure, (axes,)):
        for number, run in enumerate(known):
            found = run["figures"]["recall"]["by_round"]
            places = [int(key) + 0.04 * (number - (len(known) - 1) / 2) for key in found]
            _points(axes, places, list(found.values()), run["name"], number, line="-")
        axes.set_xticks(range(1, 1 + max(len(run["figures"]["recall"]["by_round"]) for run in known)))
        axes.set_xlabel("rounds")
        png = _finished(figure, axes, y="supporting passages found, %")
        yield "recall", "recall", "supporting passages found up to each round, with 95 % intervals", png


def _latency(runs: Runs, metric: str) -> Iterator[Plot]:
    """Quality against time (figure 6 of the CIRAG paper)."""
    if len(runs) < 2:
        return
    with _new_figure(max(3.4, 0.23 * len(runs))) as (figure, (axes,)):
        for number, run in enumerate(runs):
            x, across = _error_sizes([run["figures"]["latency"]["mean"]], 1)
            y, up = _error_sizes([run["figures"]["scores"][metric]])
            axes.errorbar(x, y, xerr=across, yerr=up, capsize=2.5, label=run["name"], linestyle="none", **_sign(number))
        axes.set_xlabel("seconds per question, as measured")
        axes.set_xlim(left=0)
        png = _finished(figure, axes, y=f"{metric} x 100")
        yield "latency", "latency", f"{metric} against seconds per question, with 95 % intervals", png


def draw_curve(losses: Runs, evaluations: Runs) -> bytes:
    """A learning curve as PNG: loss, ROUGE and triple F1 over steps; the same rows give the same bytes.

    Raises:
        ValueError: matplotlib is missing.
    """
    panels = panels_of(evaluations)
    with _new_figure(2.6, 1 + len(panels)) as (figure, axes):
        first = axes[0]
        first.set_title("loss")
        size = max(1, len(losses) // _STRETCHES)
        parts = [losses[start : start + size] for start in range(0, len(losses), size)]
        if parts:
            means = ([fmean(row[key] for row in part) for part in parts] for key in ("step", "loss"))
            first.plot(*means, color=COLOURS[0], label="training")
        points = [(row["step"], row["loss"]) for row in evaluations if "loss" in row]
        if points:
            first.plot(*zip(*points), color=COLOURS[1], marker=MARKERS[0], label="validation")
        first.legend()
        for panel, axis in zip(panels, axes[1:]):
            axis.set_title(f"{panel} (x 100)")
            for number, (name, label) in enumerate(panels[panel].items()):
                points = [(row["step"], 100 * row[name]) for row in evaluations if name in row]
                axis.plot(*zip(*points), label=label, **_sign(number))
            # Room for the legend, and for marks at the top.
            axis.margins(y=0.12)
            axis.set_ylim(bottom=0)
            axis.legend()
        for axis in axes:
            axis.set_xlabel("optimiser steps")
        return _png_of(figure)


def panels_of(evaluations: Runs) -> dict[str, dict[str, str]]:
    """The panels of `PANELS` that have scores; where there are none of them, one with the scores there are."""
    names = {name for row in evaluations for name in row}
    found = {
        panel: {name: label for name, label in scores.items() if name in names} for panel, scores in PANELS.items()
    }
    others = sorted(names - {"step", "epoch", "loss", MALFORMED_OUTPUT})
    return {panel: scores for panel, scores in found.items() if scores} or (
        {"scores": {name: name for name in others}} if others else {}
    )


def _points(
    axes: Axes, places: Sequence[float], values: Runs, label: str, number: int, across: bool = False, line: str = "none"
) -> None:
    """Means with their intervals, at places on the other axis."""
    means, sizes = _error_sizes(values)
    at: Any = {"x": means, "y": places, "xerr": sizes} if across else {"x": places, "y": means, "yerr": sizes}
    axes.errorbar(**at, capsize=2.5, label=label, linestyle=line, **_sign(number))


def _sign(number: int) -> dict[str, Any]:
    """Colour and marker of a point; the pairs come again after all 36 of them."""
    turn, colour = divmod(number, len(COLOURS))
    return {"color": COLOURS[colour], "marker": MARKERS[(colour + turn) % len(MARKERS)]}


def _name_rows(axes: Axes, names: Sequence[str]) -> None:
    # On lines that leave room for the plot.
    axes.set_yticks(range(len(names)), ["\n".join(textwrap.wrap(name, 26)) or name for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)


def _finished(figure: Figure, axes: Axes, x: str = "", y: str = "") -> bytes:
    """The figure with its axis of percentages named: at least ten points, and nothing far beyond 0 and 100."""
    low, high = axes.get_xlim() if x else axes.get_ylim()
    high = min(102.0, max(high, low + 10))
    limits = (max(-2.0, min(low, high - 10)), high)
    if x:
        axes.set_xlabel(x)
        axes.set_xlim(limits)
    else:
        axes.set_ylabel(y)
        axes.set_ylim(limits)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), labelspacing=0.7)
    return _png_of(figure)


@contextmanager
def _new_figure(height: float, columns: int = 1) -> Iterator[tuple[Figure, list[Axes]]]:
    """A figure in the common look, `height` inches high, with its axes side by side."""
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            f"plots need {error.name}: pip install 'tripletune[plots]'; a report can leave them out with --no-plots"
        ) from None
    # It tells of every font list it makes.
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    with matplotlib.rc_context(_LOOK):
        figure = Figure(figsize=(WIDTH, height), dpi=140, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(1, columns, squeeze=False)
        yield figure, list(axes[0])


def _png_of(figure: Figure) -> bytes:
    """A figure as PNG; the same figure gives the same bytes."""
    target = io.BytesIO()
    figure.savefig(target, format="png", metadata={"Software": None})
    return target.getvalue()


def _error_sizes(values: Runs, times: float = 100) -> tuple[list[float], list[list[float]]]:
    """Means, and how far their intervals reach below and above them, as `errorbar` takes them."""
    means = [times * value["mean"] for value in values]
    # Rounding may put a bound on the wrong side of its mean by a hair.
    below = [max(0.0, times * (value["mean"] - value["low"])) for value in values]
    above = [max(0.0, times * (value["high"] - value["mean"])) for value in values]
    return means, [below, above]
