"""Draws the graph of a record or a text-to-triples pair: one colour a step, names in boxes, predicates on arrows.

The triples are laid out as small nodes of their own between subject and object, so predicates get room like names do.
Names that several steps share, the bridges of multi-hop questions, have a bold frame. Needs the extra `plots`.
"""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tripletune.models.data.pairs import ExtractionPair
from tripletune.models.data.records import Record
from tripletune.models.data.triples import Triple

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ENDINGS = (".png", ".svg")
# Okabe and Ito's colours, told apart by colour-blind readers too; dark ones first, since text is written in them.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
_BLACK = "#1A1A1A"
_NAME_SIZE, _PREDICATE_SIZE, _HEAD_SIZE = 9.0, 7.5, 10.0
_NAME_WIDTH, _PREDICATE_WIDTH = 20, 18
_GAP = 0.14
_ROUNDS = 400
_MOST_TRIPLES = 150


@dataclass
class Box:
    """A text in the drawing.

    Attributes:
        text: Its lines.
        size: Font size, in points.
        steps: The steps it occurs in.
        is_name: Whether it is a subject or object; else it is a predicate.
        width: Width of the text with its frame, in inches.
        height: Height of the text with its frame, in inches.
    """

    text: str
    size: float
    is_name: bool
    steps: list[int] = field(default_factory=list)
    width: float = 0.0
    height: float = 0.0

    def __post_init__(self) -> None:
        lines = self.text.split("\n")
        # The mean width of a letter is a little over half the font size; 72 points are an inch.
        self.width = max(len(line) for line in lines) * self.size * 0.60 / 72 + 0.14
        self.height = len(lines) * self.size * 1.25 / 72 + (0.14 if self.is_name else 0.04)


@dataclass
class Drawing:
    """Boxes, the arrows between them (subject to predicate to object), and where the boxes stand.

    Attributes:
        boxes: Names and predicates.
        arrows: By triple: the boxes of subject, predicate and object, and the step.
        centres: Middle of every box, in inches, of shape (boxes, 2).
    """

    boxes: list[Box]
    arrows: list[tuple[int, int, int, int]]
    centres: np.ndarray


def draw_record(record: Record, path: str | Path) -> None:
    """Draw the graph of a record into a PNG or SVG file, in one step.

    Raises:
        ValueError: the file has another ending, or the record has no triples or too many to be read in a picture.
        ImportError: matplotlib or networkx is missing.
    """
    if not any(step.triples for step in record.steps):
        raise ValueError(f"record {record.id!r} has no triples to draw; pick one with a history (--label sufficient)")
    _draw(f"record {record.id!r}", [step.triples for step in record.steps], _record_head(record), path)


def draw_pair(pair: ExtractionPair, path: str | Path) -> None:
    """Draw the triples of a text-to-triples pair into a PNG or SVG file, in one step.

    Raises:
        ValueError: as for `draw_record`.
        ImportError: as for `draw_record`.
    """
    if not pair.triples:
        raise ValueError(f"pair {pair.id!r} has no triples to draw; pick another (--number)")
    _draw(f"pair {pair.id!r}", [pair.triples], [(pair.source_text, _BLACK, "bold")], path)


def _draw(name: str, steps: Sequence[Sequence[Triple]], head: list[tuple[str, str, str]], path: str | Path) -> None:
    path = Path(path)
    if path.suffix.lower() not in ENDINGS:
        raise ValueError(f"picture {path}: its name must end in {' or '.join(ENDINGS)}")
    count = sum(len(set(triples)) for triples in steps)
    if count > _MOST_TRIPLES:
        raise ValueError(f"{name} has {count} triples; a picture of more than {_MOST_TRIPLES} can't be read")
    try:
        import matplotlib
        import networkx  # noqa: F401
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"a picture needs {error.name}: pip install 'tripletune[plots]'") from None
    drawing = _laid_out(steps)
    # SVG: text stays text, and the same record gives the same bytes.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "tripletune", "font.family": _fonts()}):
        figure = Figure(dpi=130)
        FigureCanvasAgg(figure)
        _paint(figure, head, drawing)
        scratch = path.with_name(f"{path.name}.tmp")
        ending = path.suffix.lower().removeprefix(".")
        metadata = {"Date": None} if ending == "svg" else {"Software": None}
        figure.savefig(scratch, format=ending, metadata=metadata)
    os.replace(scratch, path)


def lay_out(record: Record) -> Drawing:
    """Place the names and predicates of all steps so that no two overlap."""
    return _laid_out([step.triples for step in record.steps])


def _laid_out(steps: Sequence[Sequence[Triple]]) -> Drawing:
    import networkx as nx

    boxes: list[Box] = []
    names: dict[str, int] = {}
    arrows: list[tuple[int, int, int, int]] = []
    graph = nx.Graph()

    def name_box(name: str, step: int) -> int:
        if name not in names:
            names[name] = len(boxes)
            boxes.append(Box(_wrapped(name, _NAME_WIDTH), _NAME_SIZE, True))
        if step not in boxes[names[name]].steps:
            boxes[names[name]].steps.append(step)
        return names[name]

    for number, triples in enumerate(steps):
        grouped: dict[tuple[str, str], list[str]] = {}
        for triple in dict.fromkeys(triples):
            grouped.setdefault((triple.subject, triple.object), []).append(triple.predicate)
        for (subject, object_), predicates in grouped.items():
            ends = name_box(subject, number), name_box(object_, number)
            middle = len(boxes)
            text = "\n".join(_wrapped(predicate, _PREDICATE_WIDTH) for predicate in predicates)
            boxes.append(Box(text, _PREDICATE_SIZE, False, [number]))
            graph.add_edge(ends[0], middle)
            graph.add_edge(middle, ends[1])
            arrows.append((ends[0], middle, ends[1], number))
    parts = [_component(graph.subgraph(part), boxes) for part in nx.connected_components(graph)]
    return Drawing(boxes, arrows, _packed(parts, boxes))


def _component(graph: Any, boxes: Sequence[Box]) -> dict[int, np.ndarray]:
    """Centres of one connected part, in inches, its boxes apart."""
    import networkx as nx

    nodes = sorted(graph.nodes)
    # Sorted nodes and edges make the layout, which starts from a circle, the same in every process.
    ordered = nx.Graph()
    ordered.add_nodes_from(nodes)
    ordered.add_edges_from(sorted(tuple(sorted(edge)) for edge in graph.edges))
    layout = nx.kamada_kawai_layout(ordered)
    centres = np.array([layout[node] for node in nodes])
    area = sum((boxes[node].width + 2 * _GAP) * (boxes[node].height + 2 * _GAP) for node in nodes)
    # Boxes are wider than high, so the drawing is too.
    centres = centres * math.sqrt(area) * np.array([0.75, 0.5])
    sizes = np.array([[boxes[node].width, boxes[node].height] for node in nodes])
    return dict(zip(nodes, _pushed_apart(centres, sizes)))


def _pushed_apart(centres: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Move overlapping boxes apart, each pair along the axis on which it overlaps least.

    Args:
        centres: Middles of the boxes, of shape (boxes, 2).
        sizes: Widths and heights, of shape (boxes, 2).
    """
    centres = centres.copy()
    for _ in range(_ROUNDS):
        offset = centres[:, None, :] - centres[None, :, :]
        overlap = (sizes[:, None, :] + sizes[None, :, :]) / 2 + _GAP - np.abs(offset)
        clash = (overlap > 1e-6).all(axis=2)
        np.fill_diagonal(clash, False)
        if not clash.any():
            break
        axis = overlap.argmin(axis=2)
        for i, j in zip(*np.nonzero(np.triu(clash))):
            k = axis[i, j]
            direction = 1.0 if offset[i, j, k] >= 0 else -1.0
            move = direction * overlap[i, j, k] / 2
            centres[i, k] += move / 2
            centres[j, k] -= move / 2
    return centres


def _packed(parts: list[dict[int, np.ndarray]], boxes: Sequence[Box]) -> np.ndarray:
    """Set the connected parts beside and below each other, the largest first."""
    centres = np.zeros((len(boxes), 2))
    frames = []
    for part in parts:
        places = np.array(list(part.values()))
        halves = np.array([(boxes[node].width / 2, boxes[node].height / 2) for node in part])
        low, high = (places - halves).min(axis=0), (places + halves).max(axis=0)
        frames.append((part, low, high - low))
    frames.sort(key=lambda frame: (-frame[2][1], -frame[2][0], min(frame[0])))
    widest = max(max(size[0] for _, _, size in frames), 1.6 * math.sqrt(sum(size.prod() for _, _, size in frames)))
    x = y = row_height = 0.0
    for part, low, size in frames:
        if x > 0 and x + size[0] > widest:
            x, y, row_height = 0.0, y - row_height - 0.4, 0.0
        for node, centre in part.items():
            centres[node] = (centre[0] - low[0] + x, y - (low[1] + size[1] - centre[1]))
        x += size[0] + 0.4
        row_height = max(row_height, size[1])
    return centres


def _paint(figure: Figure, head: list[tuple[str, str, str]], drawing: Drawing) -> None:
    sizes = np.array([[box.width, box.height] for box in drawing.boxes])
    low = (drawing.centres - sizes / 2).min(axis=0) - 0.2
    high = (drawing.centres + sizes / 2).max(axis=0) + 0.2
    width = max(high[0] - low[0], 6.5)
    head = [(_wrapped(text, int(width * 11.5), most_lines=4), colour, weight) for text, colour, weight in head]
    head_height = sum(text.count("\n") + 1 for text, _, _ in head) * _HEAD_SIZE * 1.3 / 72 + 0.15
    height = high[1] - low[1] + head_height
    figure.set_size_inches(width, height)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    middle = (low[0] + high[0]) / 2
    axes.set_xlim(middle - width / 2, middle + width / 2)
    axes.set_ylim(low[1], low[1] + height)
    axes.set_axis_off()
    y = low[1] + height - 0.12
    for text, colour, weight in head:
        axes.text(
            middle - width / 2 + 0.15, y, text, color=colour, fontsize=_HEAD_SIZE, weight=weight, va="top",
            linespacing=1.2, parse_math=False,
        )  # fmt: skip
        y -= (text.count("\n") + 1) * _HEAD_SIZE * 1.3 / 72
    patches = [_paint_box(axes, box, centre) for box, centre in zip(drawing.boxes, drawing.centres)]
    # Frames know their place only when they were drawn once.
    figure.canvas.draw()
    for subject, predicate, object_, step in drawing.arrows:
        for start, end, style in ((subject, predicate, "-"), (predicate, object_, "-|>")):
            axes.annotate(
                "", drawing.centres[end], drawing.centres[start], zorder=1,
                arrowprops={
                    "arrowstyle": style, "color": _colour(step), "linewidth": 1.1, "mutation_scale": 11,
                    "shrinkA": 0, "shrinkB": 0, "patchA": patches[start], "patchB": patches[end],
                },
            )  # fmt: skip


def _paint_box(axes: Axes, box: Box, centre: np.ndarray) -> Any:
    colour = _colour(box.steps[0])
    shared = len(box.steps) > 1
    if box.is_name:
        frame = {
            "boxstyle": "round,pad=0.35", "facecolor": "#FFF3C4" if shared else _pale(colour), "edgecolor": colour,
            "linewidth": 2.4 if shared else 1.0,
        }  # fmt: skip
    else:
        frame = {"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none"}
    text = axes.text(
        centre[0], centre[1], box.text, ha="center", va="center", fontsize=box.size, bbox=frame, zorder=3,
        color=_BLACK if box.is_name else colour, weight="bold" if shared else "normal",
        style="normal" if box.is_name else "italic", linespacing=1.15, parse_math=False,
    )  # fmt: skip
    return text.get_bbox_patch()


def _record_head(record: Record) -> list[tuple[str, str, str]]:
    """Question, the sub-query of every step in its colour, and the label: text, colour and weight."""
    shared = len({n for step in record.steps for t in step.triples for n in (t.subject, t.object)}) != sum(
        len({n for t in step.triples for n in (t.subject, t.object)}) for step in record.steps
    )
    lines = [(f"Question: {record.question}", _BLACK, "bold")]
    lines += [(f"q_{number}: {step.query}", _colour(number), "normal") for number, step in enumerate(record.steps)]
    lines.append((f"=> {record.label}", _BLACK, "normal"))
    if shared:
        lines.append(("bold frame: a name that several steps share", "#666666", "normal"))
    return lines


def _wrapped(text: str, width: int, most_lines: int = 5) -> str:
    lines = textwrap.wrap(" ".join(text.split()), width, max_lines=most_lines, placeholder=" …")
    return "\n".join(lines) or "…"


def _colour(step: int) -> str:
    return COLOURS[step % len(COLOURS)]


def _pale(colour: str) -> str:
    parts = (int(colour[position : position + 2], 16) for position in (1, 3, 5))
    return "#" + "".join(f"{round(255 - (255 - part) * 0.14):02X}" for part in parts)


def _fonts() -> list[str]:
    """DejaVu, which comes with matplotlib, and what is installed for scripts that it lacks."""
    from matplotlib import font_manager

    installed = {font.name for font in font_manager.fontManager.ttflist}
    others = ("Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans Arabic", "Noto Sans Devanagari", "Arial Unicode MS")
    return ["DejaVu Sans", *(name for name in others if name in installed)]
