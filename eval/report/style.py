"""One look for all plots: sizes, colours that colour-blind readers can tell apart, and PNG files without dates.

matplotlib is imported when the first plot is drawn, and without a display.
"""

from __future__ import annotations

import io
import logging
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

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
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.4,
    "lines.markersize": 5,
}


@contextmanager
def new_figure(height: float, columns: int = 1, **options: Any) -> Iterator[tuple[Figure, list[Axes]]]:
    """A figure in the common look, with its axes side by side.

    Args:
        height: In inches.
        columns: How many axes.
        **options: Of `Figure.subplots`.

    Raises:
        ValueError: matplotlib is missing.
    """
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            f"plots need {error.name}: pip install 'tripletune[plots]', or leave them out with --no-plots"
        ) from None
    # It tells of every font list it makes.
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    with matplotlib.rc_context(_LOOK):
        figure = Figure(figsize=(WIDTH, height), dpi=140, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(1, columns, squeeze=False, **options)
        yield figure, list(axes[0])


def png_of(figure: Figure) -> bytes:
    """A figure as PNG; the same figure gives the same bytes."""
    target = io.BytesIO()
    figure.savefig(target, format="png", metadata={"Software": None})
    return target.getvalue()


def error_sizes(values: Sequence[Mapping[str, Any]], times: float = 100) -> tuple[list[float], list[list[float]]]:
    """Means, and how far their intervals reach below and above them, as `errorbar` takes them."""
    means = [times * value["mean"] for value in values]
    # Rounding may put a bound on the wrong side of its mean by a hair.
    below = [max(0.0, times * (value["mean"] - value["low"])) for value in values]
    above = [max(0.0, times * (value["high"] - value["mean"])) for value in values]
    return means, [below, above]


def bars(axes: Axes, names: Sequence[str], parts: Mapping[str, Sequence[float]], label: str, digits: int = 0) -> None:
    """Stacked horizontal bars, one a name from the top down, with the size of every part that has room for it.

    Args:
        axes: Where.
        names: The bars.
        parts: By part, its size in each bar.
        label: What the axis counts.
        digits: Digits after the point of the sizes.
    """
    starts = [0.0] * len(names)
    whole = max((sum(sizes[n] for sizes in parts.values()) for n in range(len(names))), default=0.0) or 1.0
    for number, (part, sizes) in enumerate(parts.items()):
        colour = COLOURS[number % len(COLOURS)]
        # More parts than colours: the second time round they are hatched.
        hatch = "///" if number >= len(COLOURS) else None
        axes.barh(range(len(names)), sizes, left=starts, height=0.62, color=colour, label=part, hatch=hatch,
                  edgecolor="white", linewidth=0.6)  # fmt: skip
        for place, size in enumerate(sizes):
            if size >= 0.07 * whole:
                ink = "white" if number % len(COLOURS) in (0, 1, 2) else "black"
                axes.text(starts[place] + size / 2, place, f"{size:.{digits}f}", ha="center", va="center",
                          fontsize=8, color=ink)  # fmt: skip
        starts = [start + size for start, size in zip(starts, sizes)]
    axes.set_yticks(range(len(names)), [wrapped(name) for name in names])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(label)


def wrapped(name: str, width: int = 26) -> str:
    """A name on lines that leave room for the plot."""
    return "\n".join(textwrap.wrap(name, width)) or name
