import statistics as reference
from collections import Counter
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data_builders.rows import CHATS, PAIRS, counted
from tripletune.core.data.pairs import ExtractionPair
from tripletune.core.data.records import Action, Record, Step
from tripletune.core.data.triples import Triple
from tripletune.data_builders.datasets import SAMPLES, summary
from tripletune.data_builders.datasets.kinds import KINDS
from tripletune.data_builders.datasets.writer import BuildFacts

FACTS = BuildFacts("T", "S.", teachers={"x": "me"}, questions={"x": 2})


@pytest.fixture
def numbers():
    return counted()


def test_graphs_are_counted_by_distinct_names_and_doubled_distinct_triples(numbers):
    planning = numbers["lengths"]["planning"]
    assert planning["graph_nodes"] == {"count": 2, "min": 2, "mean": 2.5, "median": 2.5, "max": 3}
    assert planning["graph_edges"] == {"count": 2, "min": 2, "mean": 3.0, "median": 3.0, "max": 4}


def test_labels_lengths_and_splits(numbers):
    planning, answering = numbers["lengths"]["planning"], numbers["lengths"]["answering"]
    assert numbers["tasks"]["planning"] == {"records": 2, "[SUBQ]": 1, "[SUFFICIENT]": 1}
    assert planning["subqueries"]["mean"] == 1.0
    assert planning["subq_tokens"] == {"count": 1, "min": 4, "mean": 4.0, "median": 4.0, "max": 4}
    assert answering["output_tokens"]["max"] == 3
    assert numbers["splits"] == {"train": 4, "validation": 1}
    assert numbers["records"] == 5


def test_answer_in_triples_leaves_yes_and_no_out(numbers):
    assert numbers["sources"]["x"]["answering with triples"] == 2
    assert numbers["sources"]["x"]["yes/no answer"] == 1
    assert numbers["sources"]["x"]["answer in triples"] == 1
    assert "answering with triples" not in numbers["sources"]["y"]


def test_answers_are_looked_for_in_single_facts():
    # "b c" stands across the two facts, whichever comes first.
    step = Step("q", (Triple("a", "r", "b"), Triple("c", "r", "b")))
    texts = ("b c", "c r b")
    rows = [Record(text, "q", "answering", "Why?", Action.SUFFICIENT, (step,), answers=(text,)) for text in texts]
    assert counted(rows=rows)["sources"][""]["answer in triples"] == 1


def test_pairs_are_counted():
    numbers = counted("pairs")
    assert numbers["splits"] == {"train": 2, "validation": 1}
    counts = numbers["sources"][""]
    assert (counts["pairs"], counts["with facts"], counts["without facts"]) == (2, 1, 1)
    # Ada, London and Rome; Rome is not in its text.
    assert (counts["entities"], counts["entities in the text"]) == (3, 2)
    # "Ada: Ada was born in London.", "Hello there", "Oslo"
    assert numbers["lengths"]["all"]["source"] == {"count": 3, "min": 1, "mean": 3.0, "median": 2, "max": 6}
    assert [KINDS["pairs"].label(pair) for pair in PAIRS] == ["with facts", "only a name", "without facts"]
    sources, _ = KINDS["pairs"].tables(numbers, FACTS)
    assert sources.rows[0][-1] == "66.7%"


def test_trajectories_are_counted():
    numbers = counted("trajectories")
    assert numbers["trajectories"] == {"learned_turns": {"1": 2}, "models": {"teacher": 2}}
    assert numbers["lengths"]["all"]["whole"]["max"] == 6
    assert numbers["lengths"]["all"]["learned"]["max"] == 3
    assert KINDS["trajectories"].text(CHATS[0]) == ("user: Where is u?", "here it is")


@settings(deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1))
def test_summary_agrees_with_the_standard_library(values):
    found = summary(Counter(values))
    assert found["median"] == reference.median(values)
    assert found["mean"] == pytest.approx(reference.mean(values), abs=0.006)
    assert (found["min"], found["max"], found["count"]) == (min(values), max(values), len(values))


def test_samples_do_not_depend_on_the_order_of_reading():
    made = [ExtractionPair(f"r{n}", f"text {n}") for n in range(7)]
    found = {
        tuple(sample["id"] for sample in counted("pairs", order)["samples"]["without facts"])
        for order in list(permutations(made))[::500]
    }
    (kept,) = found
    assert len(kept) == SAMPLES
    assert kept != tuple(f"r{n}" for n in range(SAMPLES))


def test_table_stands_beside_the_paper(numbers):
    table, sources = KINDS["records"].tables(numbers, FACTS)
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["Queries"] == ["2", "129,902", "3", "78,164"]
    assert rows["[SUBQ]"] == ["1 (50.0%)", "71,676 (55.2%)", "-", "-"]
    assert rows["[SUBQ] tokens (min, mean, max)"][2] == "-"
    assert rows["Sub-queries (min, mean, max)"][:2] == ["0, 1, 2", "0, 0.8, 5"]
    assert sources.rows[0][:4] == ["x", "me", "2", "1"]
