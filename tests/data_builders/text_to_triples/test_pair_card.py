import pytest

from tripletune.data_builders.datasets.card import BuildFacts
from tripletune.data_builders.text_to_triples.card import (
    PairStatistics,
    pair_card_body,
    pair_features,
    pair_kind,
    pair_schema,
)
from tripletune.models.data.pairs import ExtractionPair
from tripletune.models.data.triples import Triple

PAIRS = [
    ExtractionPair(
        "a", "Ada was born in London.", "Ada", (Triple("Ada", "born in", "London"), Triple("Ada", "x", "Rome"))
    ),
    ExtractionPair("b", "Hello there"),
    ExtractionPair("c", "Oslo", "", (Triple("Oslo", "is", "Oslo"),)),
]


@pytest.fixture
def numbers():
    statistics = PairStatistics()
    for pair in PAIRS:
        statistics.add(pair, "validation" if pair.id == "b" else "train")
    return statistics.to_json()


def test_counts_by_hand(numbers):
    assert numbers["splits"] == {"train": 2, "validation": 1}
    counts = numbers["sources"][""]
    assert (counts["with facts"], counts["without facts"], counts["only a name"]) == (1, 1, 1)
    # Ada, London, Rome and Oslo; Rome is not in its text.
    assert (counts["entities"], counts["entities in the text"]) == (4, 3)
    # "Ada: Ada was born in London.", "Hello there", "Oslo"
    assert numbers["lengths"]["source"] == {"count": 3, "min": 1, "mean": 3.0, "median": 2, "max": 6}
    assert numbers["lengths"]["triples"]["max"] == 2
    assert numbers["longer_than_the_paper_cuts"] is None


def test_samples_do_not_depend_on_the_order():
    pairs = [ExtractionPair(f"id{n}", f"text {n}") for n in range(30)]
    one, two = PairStatistics(), PairStatistics()
    for first, second in zip(pairs, reversed(pairs)):
        one.add(first, "train")
        two.add(second, "train")
    assert one.to_json()["samples"] == two.to_json()["samples"]


def test_the_card_shows_what_was_counted(numbers):
    facts = BuildFacts("Title", "Summary.", drops={"s": {"gone": 3}}, options={"seed": 0}, notes=["A note."])
    card = pair_card_body(facts, numbers)
    for shown in ("# Title", "A note.", "| s: gone | 3 |", "75.0%", "5,851,776", "=> (S> Oslo| P> is| O> Oslo)"):
        assert shown in card


def test_kinds_and_features():
    assert [pair_kind(pair) for pair in PAIRS] == ["with facts", "without facts", "only a name"]
    assert [feature["name"] for feature in pair_features()] == pair_schema().names
