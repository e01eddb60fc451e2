import itertools
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("matplotlib")
networkx = pytest.importorskip("networkx")

from tripletune.data_builders.world.picture import COLOURS, draw_record, lay_out  # noqa: E402
from tripletune.models.data.records import Action, Record, Step  # noqa: E402
from tripletune.models.data.triples import Triple  # noqa: E402


def record(*steps: tuple[Triple, ...]) -> Record:
    history = tuple(Step(f"Sub-query {number}?", triples) for number, triples in enumerate(steps))
    return Record("r", "q", "planning", "Costs $5 or $6?", Action.SUFFICIENT, history)


FILM = (Triple("Dune", "author", "Frank Herbert"), Triple("Dune", "kind", "novel"), Triple("Dune", "is a", "novel"))
AUTHOR = (
    Triple("Frank Herbert", "born in", "Tacoma"),
    Triple("東京", "見る", "مدينة"),
    Triple("Loop", "cites", "Loop"),
)


def test_names_are_drawn_once_and_predicates_between_two_names_together():
    drawing = lay_out(record(FILM, AUTHOR))
    names = {box.text: box for box in drawing.boxes if box.is_name}
    assert set(names) == {"Dune", "Frank Herbert", "novel", "Tacoma", "東京", "مدينة", "Loop"}
    assert names["Frank Herbert"].steps == [0, 1]
    assert names["Dune"].steps == [0]
    assert [box.text for box in drawing.boxes if not box.is_name] == [
        "author",
        "kind\nis a",
        "born in",
        "見る",
        "cites",
    ]
    ends = {(drawing.boxes[s].text, drawing.boxes[p].text, drawing.boxes[o].text, n) for s, p, o, n in drawing.arrows}
    assert ("Dune", "author", "Frank Herbert", 0) in ends
    assert ("Loop", "cites", "Loop", 1) in ends


WORDS = st.sampled_from(["Ann", "Ben", "a very long name of some institution in a city", "C", "Dee", "E F", "1984"])


@settings(max_examples=15, deadline=None)
@given(st.lists(st.lists(st.builds(Triple, WORDS, WORDS, WORDS), min_size=1, max_size=6), min_size=1, max_size=3))
def test_no_two_boxes_overlap(steps):
    drawing = lay_out(record(*map(tuple, steps)))
    for (one, here), (other, there) in itertools.combinations(zip(drawing.boxes, drawing.centres), 2):
        apart_x = abs(here[0] - there[0]) - (one.width + other.width) / 2
        apart_y = abs(here[1] - there[1]) - (one.height + other.height) / 2
        assert max(apart_x, apart_y) > -1e-6


def test_svg_holds_every_text_and_a_colour_for_each_step(tmp_path):
    path = tmp_path / "graph.svg"
    draw_record(record(FILM, AUTHOR), path)
    drawn = path.read_text(encoding="utf-8")
    for text in ("Dune", "Frank Herbert", "author", "Tacoma", "Costs $5 or $6?", "q_1: Sub-query 1?", "[SUFFICIENT]"):
        assert text in drawn
    assert all(colour.lower() in drawn for colour in COLOURS[:2])
    assert COLOURS[2].lower() not in drawn
    draw_record(record(FILM, AUTHOR), tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_bytes() == path.read_bytes()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["again.svg", "graph.svg"]


def test_png_is_a_picture(tmp_path):
    from matplotlib.image import imread

    draw_record(record(FILM), tmp_path / "graph.PNG")
    height, width, _ = imread(tmp_path / "graph.PNG", format="png").shape
    assert width > 600
    assert height > 200


def test_what_can_not_be_drawn_is_said(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"must end in \.png or \.svg"):
        draw_record(record(FILM), tmp_path / "graph.pdf")
    with pytest.raises(ValueError, match="no triples to draw"):
        draw_record(record(()), tmp_path / "graph.png")
    many = tuple(Triple("a", "r", str(number)) for number in range(151))
    with pytest.raises(ValueError, match="has 151 triples"):
        draw_record(record(many), tmp_path / "graph.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"tripletune\[plots\]"):
        draw_record(record(FILM), tmp_path / "graph.png")
