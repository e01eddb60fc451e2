import json

import pytest

from tests.data_builders.rows import counted
from tripletune.data_builders.datasets.card import BuildFacts, card_body, table, write_card
from tripletune.data_builders.datasets.rows import Statistics, get_kind
from tripletune.models.data.pairs import ExtractionPair
from tripletune.models.data.records import Action, Record, Step
from tripletune.models.data.triples import Triple

RECORDS = get_kind("records")


def body(facts: BuildFacts = BuildFacts("T", "S."), kind: str = "records", rows=None) -> str:  # noqa: B008
    return card_body(get_kind(kind), facts, counted(kind, rows))


def test_card_says_what_was_left_out_and_what_the_teacher_did():
    text = body(
        BuildFacts(
            "T", "S.", teachers={"x": "me | you"}, drops={"x": {"no reason": 7}}, files={"f": "0" * 64},
            options={"seed": 3}, repairs={"x": {"filter": 3}}, prompts={"filter.md": "a" * 64},
            models={"teacher": "big-model"}, notes=["A note."],
            calls={"filter": {"calls": 12_000, "input_tokens": 7}, "query": {"calls": 1}},
        )
    )  # fmt: skip
    for line in (
        "| x: no reason | 7 |", "| `seed` | `3` |", f"| `f` | `{'0' * 64}` |", "| train | 4 |", "me \\| you",
        "| x: filter | 3 |", f"| `filter.md` | `{'a' * 64}` |", "| teacher | big-model |", "A note.",
        "| stage | calls | input tokens |", "| filter | 12,000 | 7 |", "| query | 1 | - |",
        "white-space words, no tokenizer was given",
    ):  # fmt: skip
        assert line in text


def test_card_shows_samples_of_every_label():
    text = body()
    for heading in ("### [SUBQ]", "### [SUFFICIENT]", "### answer after retrieval", "### answer without retrieval"):
        assert heading in text
    assert "### [NO_RETRIEVAL]" not in text
    assert "[NO_RETRIEVAL]\nQuestion: How?\n=> a b c" in text
    assert "(S> a| P> r| O> b)" in text


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("pairs", ["# Pairs", "66.7%", "5,851,776", "=> (S> Oslo| P> is| O> Oslo)", "## Lengths"]),
        ("trajectories", ["| with 1 learned turns | 2 |", "| of teacher | 2 |", "=> here it is"]),
    ],
)
def test_other_kinds_have_the_same_card(kind, parts):
    text = body(kind=kind)
    for part in parts:
        assert part in text


def test_samples_stay_inside_their_fence_and_are_cut_in_the_middle():
    triples = tuple(Triple("x" * 50, "r", str(n)) for n in range(100))
    record = Record("1", "q", "planning", "End ``` here?", Action.SUFFICIENT, (Step("q", triples),))
    shown = body(rows=[record]).split("````text\n")[1].split("\n````")[0]
    assert shown.endswith("Question: End ``` here?\n=> [SUFFICIENT]")
    assert " characters ...]" in shown
    assert len(shown) < 2200


def test_text_of_data_becomes_no_markup():
    name = "a` <script>\n# H"
    pair = ExtractionPair(name, "x \x1b[31m y", source=name)
    text = body(BuildFacts("T", "S.", issues={name: 2}, options={name: "`"}), "pairs", [pair])
    assert "`` a` <script> # H ``" in text, "the code span of an id holds"
    assert "| a\\` \\<script> # H | 2 |" in text
    assert "| `` a` <script> # H `` | `` ` `` |" in text
    assert "\n# H" not in text
    assert "\x1b" not in text
    assert table(["[x](http://y)"], [["![x](y)"]]) == "| [x\\](http://y) |\n| --- |\n| ![x\\](y) |"


def test_facts_come_back_from_the_file(tmp_path):
    statistics = Statistics(RECORDS)
    statistics.add(Record("1", "q", "planning", "Why?", Action.SUFFICIENT), "train")
    facts = BuildFacts("T", "S.", repairs={"x": {"filter": 3}}, prompts={"p": "0"}, calls={"a": {"calls": 1}})
    write_card(tmp_path, facts, statistics, "jsonl")
    content = json.loads((tmp_path / "statistics.json").read_text())
    assert BuildFacts(**content["build"]) == facts
    assert content["statistics"] == statistics.to_json()
