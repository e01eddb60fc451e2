"""The plots of a report, drawn from its figures: scores, ablations, sweeps, granularities, recall, cost and latency."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from tripletune.eval.report.figures import COSTS, LEVELS
from tripletune.eval.report.pages import ablation_name, option_title
from tripletune.eval.report.style import COLOURS, MARKERS, bars, error_sizes, new_figure, png_of, wrapped

Runs = Sequence[Mapping[str, Any]]
# What a plotting function gives: section, end of the file's name, caption, PNG.
Plot = tuple[str, str, str, bytes]
# Inches for a row.
_BAR = 0.42
_FOUND = "supporting passages found, %"


def draw(report: Mapping[str, Any]) -> tuple[list[dict[str, str]], dict[str, bytes]]:
    """Draw all plots of a report.

    Returns:
        What the page says about them (`file`, `section`, `caption`), and the PNG files by name.

    Raises:
        ValueError: matplotlib is missing.
    """
    told: list[dict[str, str]] = []
    files: dict[str, bytes] = {}
    tasks = [group["task"] for group in report["groups"]]
    for number, group in enumerate(report["groups"]):
        stem = re.sub(r"\W+", "-", group["task"])
        if tasks.count(group["task"]) > 1:
            stem += f"-{1 + tasks[:number].count(group['task'])}"
        for section, name, caption, png in _plots(group):
            file = f"{stem}-{name}.png"
            files[file] = png
            told.append({"file": file, "section": f"{number}/{section}", "caption": f"{group['task']}: {caption}"})
    return told, files


def _plots(group: Mapping[str, Any]) -> Iterator[Plot]:
    runs = [run for run in group["runs"] if run["figures"]]
    if not runs:
        return
    yield from _scores(runs, group["metrics"])
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


def _scores(runs: Runs, metrics: Sequence[str]) -> Iterator[Plot]:
    png = _score_plot(runs, [run["name"] for run in runs], metrics)
    yield "scores", "scores", "scores, with 95 % intervals", png


def _score_plot(runs: Runs, names: Sequence[str], metrics: Sequence[str]) -> bytes:
    with new_figure(0.9 + (_BAR + 0.1 * (len(metrics) - 1)) * len(runs)) as (figure, (axes,)):
        for number, metric in enumerate(metrics):
            shift = 0.2 * (number - (len(metrics) - 1) / 2)
            means, sizes = error_sizes([run["figures"]["scores"][metric] for run in runs])
            axes.errorbar(means, [place + shift for place in range(len(runs))], xerr=sizes, capsize=2.5,
                          label=metric, **_sign(number))  # fmt: skip
        _name_rows(axes, names)
        axes.set_xlabel("score x 100")
        axes.set_xlim(_limits(axes.get_xlim()))
        _legend(axes)
        return png_of(figure)


def _sweep(runs: Runs, sweep: Mapping[str, Any], metrics: Sequence[str], ending: str) -> Plot | None:
    pairs = [(value, run) for value, run in zip(sweep["values"], runs) if run["figures"]]
    if len(pairs) < 2:
        return None
    with new_figure(3.2) as (figure, (axes,)):
        values = [value for value, _ in pairs]
        step = min(b - a for a, b in pairwise(values))
        for number, metric in enumerate(metrics):
            means, sizes = error_sizes([run["figures"]["scores"][metric] for _, run in pairs])
            # Side by side, so that the intervals can be told apart.
            places = [value + 0.06 * step * (number - (len(metrics) - 1) / 2) for value in values]
            axes.errorbar(places, means, yerr=sizes, marker=MARKERS[number], color=COLOURS[number], capsize=2.5,
                          label=metric)  # fmt: skip
        axes.set_xticks(values, [f"{value:g}" for value in values])
        axes.set_xlabel(option_title(sweep["option"]))
        axes.set_ylabel("score x 100")
        axes.set_ylim(_limits(axes.get_ylim()))
        _legend(axes)
        caption = f"scores by {option_title(sweep['option'])}, with 95 % intervals"
        return "sweeps", f"sweep-{sweep['option'].replace('_', '-')}{ending}", caption, png_of(figure)


def _granularity(runs: Runs) -> Iterator[Plot]:
    known = [run for run in runs if run["figures"]["granularity"]]
    if not known:
        return
    parts = {level: [100 * run["figures"]["granularity"][level]["share"]["mean"] for run in known] for level in LEVELS}
    png = _bar_plot(known, parts, "share of the questions, %")
    yield "granularity", "granularity", "what the answer was given from", png


def _calls(runs: Runs) -> Iterator[Plot]:
    known = [run for run in runs if run["figures"]["roles"]]
    if not known:
        return
    for key in COSTS:
        told = [run for run in known if all(one[key] is not None for one in run["figures"]["roles"].values())]
        if not told:
            continue
        roles = dict.fromkeys(role for run in told for role in run["figures"]["roles"])
        parts = {role: [run["figures"]["roles"].get(role, {}).get(key, 0.0) for run in told] for role in roles}
        title = f"{key.replace('_', ' ')} a question"
        png = _bar_plot(told, parts, title, 1 if key == "calls" else 0)
        yield "cost", key.replace("_", "-"), f"{title}, by role", png


def _bar_plot(runs: Runs, parts: Mapping[str, Sequence[float]], label: str, digits: int = 0) -> bytes:
    legend_lines = -(-len(parts) // 3)
    with new_figure(0.8 + _BAR * len(runs) + 0.2 * legend_lines) as (figure, (axes,)):
        bars(axes, [run["name"] for run in runs], parts, label, digits)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=min(len(parts), 3))
        return png_of(figure)


def _recall(runs: Runs) -> Iterator[Plot]:
    known = [run for run in runs if run["figures"]["recall"]]
    if not known:
        return
    paint = _recall_lines if len(known) <= len(COLOURS) else _recall_rows
    caption = "supporting passages found up to each round, with 95 % intervals"
    yield "recall", "recall", caption, paint(known, max(len(run["figures"]["recall"]["by_round"]) for run in known))


def _recall_lines(runs: Runs, rounds: int) -> bytes:
    with new_figure(3.2) as (figure, (axes,)):
        for number, run in enumerate(runs):
            found = run["figures"]["recall"]["by_round"]
            means, sizes = error_sizes(list(found.values()))
            shift = 0.04 * (number - (len(runs) - 1) / 2)
            axes.errorbar([int(key) + shift for key in found], means, yerr=sizes, capsize=2.5, label=run["name"],
                          marker=MARKERS[number], color=COLOURS[number])  # fmt: skip
        axes.set_xticks(range(1, rounds + 1))
        axes.set_xlim(0.6, rounds + 0.4)
        axes.set_xlabel("rounds")
        axes.set_ylabel(_FOUND)
        axes.set_ylim(_limits(axes.get_ylim()))
        _legend(axes)
        return png_of(figure)


def _recall_rows(runs: Runs, rounds: int) -> bytes:
    """A row a run, a sign a round: for more runs than lines can be told apart."""
    with new_figure(0.9 + _BAR * len(runs)) as (figure, (axes,)):
        for number in range(1, rounds + 1):
            places = [place for place, run in enumerate(runs) if str(number) in run["figures"]["recall"]["by_round"]]
            values = [runs[place]["figures"]["recall"]["by_round"][str(number)] for place in places]
            means, sizes = error_sizes(values)
            shift = 0.12 * (number - (rounds + 1) / 2)
            axes.errorbar(means, [place + shift for place in places], xerr=sizes, capsize=2.5,
                          label=f"after round {number}", **_sign(number - 1))  # fmt: skip
        _name_rows(axes, [run["name"] for run in runs])
        axes.set_xlabel(_FOUND)
        axes.set_xlim(_limits(axes.get_xlim()))
        _legend(axes)
        return png_of(figure)


def _latency(runs: Runs, metric: str) -> Iterator[Plot]:
    """Quality against time (figure 6 of the CIRAG paper)."""
    if len(runs) < 2:
        return
    with new_figure(max(3.4, 0.23 * len(runs))) as (figure, (axes,)):
        for number, run in enumerate(runs):
            x, across = error_sizes([run["figures"]["latency"]["mean"]], 1)
            y, up = error_sizes([run["figures"]["scores"][metric]])
            axes.errorbar(x, y, xerr=across, yerr=up, capsize=2.5, label=run["name"], **_sign(number))
        axes.set_xlabel("seconds a question, as measured")
        axes.set_ylabel(f"{metric} x 100")
        axes.set_xlim(left=0)
        axes.set_ylim(_limits(axes.get_ylim()))
        _legend(axes)
        yield "latency", "latency", f"{metric} against seconds a question, with 95 % intervals", png_of(figure)


def _sign(number: int) -> dict[str, Any]:
    """Colour and marker of a point; the pairs come again after all 36 of them."""
    turn, colour = divmod(number, len(COLOURS))
    return {"color": COLOURS[colour], "marker": MARKERS[(colour + turn) % len(MARKERS)], "linestyle": "none"}


def _name_rows(axes: Any, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), [wrapped(name) for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)


def _limits(found: tuple[float, float]) -> tuple[float, float]:
    """Limits of an axis of percentages: at least ten points, and nothing beyond 0 and 100 but room for a marker."""
    high = min(102.0, max(found[1], found[0] + 10))
    return max(-2.0, min(found[0], high - 10)), high


def _legend(axes: Any) -> None:
    place: Callable[..., Any] = axes.legend
    place(loc="center left", bbox_to_anchor=(1.01, 0.5), labelspacing=0.7)
