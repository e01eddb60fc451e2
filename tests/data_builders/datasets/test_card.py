import hashlib

import pytest

from tests.data_builders.table_records import counted_records, records
from tripletune.data_builders.datasets.card import BuildFacts, Statistics, card_body, file_digest, write_card
from tripletune.models.data.records import Action, Record, Step
from tripletune.models.data.triples import Triple


@pytest.fixture
def counted() -> dict:
    return counted_records()


def test_card_says_what_was_left_out_and_with_what(counted):
    facts = BuildFacts(
        "T", "S.", teachers={"x": "me | you"}, drops={"x": {"no reason": 7}}, files={"f": "0" * 64}, options={"seed": 3}
    )
    body = card_body(facts, counted)
    for line in ("| x: no reason | 7 |", "| `seed` | `3` |", f"| `f` | `{'0' * 64}` |", "| train | 4 |"):
        assert line in body
    assert "me \\| you" in body
    assert "white-space words, no tokenizer was given" in body


def test_card_says_what_the_teacher_did(counted):
    facts = BuildFacts(
        "T",
        "S.",
        repairs={"x": {"filter": 3}},
        prompts={"filter.md": "a" * 64},
        models={"teacher": "big-model"},
        calls={"filter": {"calls": 12_000, "input_tokens": 7}, "query": {"calls": 1}},
    )
    body = card_body(facts, counted)
    for line in (
        "| x: filter | 3 |",
        f"| `filter.md` | `{'a' * 64}` |",
        "| teacher | `big-model` |",
        "| stage | calls | input tokens |",
        "| filter | 12,000 | 7 |",
        "| query | 1 | - |",
    ):
        assert line in body


def test_card_shows_samples_of_every_label(counted):
    body = card_body(BuildFacts("T", "S."), counted)
    for heading in ("### [SUBQ]", "### [SUFFICIENT]", "### answer after retrieval", "### answer without retrieval"):
        assert heading in body
    assert "### [NO_RETRIEVAL]" not in body
    assert "[NO_RETRIEVAL]\nQuestion: Why?\n=> a b c" in body
    assert "(S> a| P> r| O> b)" in body


def test_samples_stay_inside_their_fence_and_are_cut_in_the_middle():
    statistics = Statistics()
    triples = tuple(Triple("x" * 50, "r", str(n)) for n in range(100))
    statistics.add(Record("1", "q", "planning", "End ``` here?", Action.SUFFICIENT, (Step("q", triples),)), "train")
    body = card_body(BuildFacts("T", "S."), statistics.to_json())
    shown = body.split("````text\n")[1].split("\n````")[0]
    assert shown.endswith("Question: End ``` here?\n=> [SUFFICIENT]")
    assert " characters ...]" in shown
    assert len(shown) < 2200


def test_facts_come_back_from_the_file(tmp_path):
    import json

    statistics = Statistics()
    statistics.add(records()[0], "train")
    facts = BuildFacts("T", "S.", repairs={"x": {"filter": 3}}, prompts={"p": "0"}, calls={"a": {"calls": 1}})
    write_card(tmp_path, facts, statistics, "jsonl")
    content = json.loads((tmp_path / "statistics.json").read_text())
    assert BuildFacts(**content["build"]) == facts
    assert content["statistics"] == statistics.to_json()


def test_file_digest(tmp_path):
    (tmp_path / "f").write_bytes(b"abc")
    assert file_digest(tmp_path / "f") == hashlib.sha256(b"abc").hexdigest()
