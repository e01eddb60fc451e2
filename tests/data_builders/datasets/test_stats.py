import statistics as reference
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data_builders.table_records import counted_records, records
from tripletune.data_builders.datasets.stats import (
    SAMPLES,
    Histogram,
    Samples,
    Statistics,
    sample_label,
    sample_labels,
    table_rows,
)
from tripletune.models.data.records import Action, Record, Step
from tripletune.models.data.triples import Triple


@pytest.fixture
def counted() -> dict:
    return counted_records()


def test_graphs_are_counted_by_distinct_names_and_doubled_distinct_triples(counted):
    planning = counted["tasks"]["planning"]
    assert planning["graph_nodes"] == {"count": 2, "min": 2, "mean": 2.5, "median": 2.5, "max": 3}
    assert planning["graph_edges"] == {"count": 2, "min": 2, "mean": 3.0, "median": 3.0, "max": 4}
    assert planning["record_nodes"]["max"] == 4
    assert planning["record_edges"]["max"] == 6


def test_labels_lengths_and_splits(counted):
    planning, answering = counted["tasks"]["planning"], counted["tasks"]["answering"]
    assert planning["actions"] == {"[SUBQ]": 1, "[SUFFICIENT]": 1}
    assert planning["subqueries"]["mean"] == 1.0
    assert planning["subq_tokens"] == {"count": 1, "min": 4, "mean": 4.0, "median": 4.0, "max": 4}
    assert answering["output_tokens"]["max"] == 3
    assert counted["splits"] == {"train": 4, "validation": 1}
    assert counted["records"] == 5


def test_answer_in_triples_leaves_yes_and_no_out(counted):
    assert counted["sources"]["x"]["answering with triples"] == 2
    assert counted["sources"]["x"]["yes/no answer"] == 1
    assert counted["sources"]["x"]["answer in triples"] == 1
    assert "answering with triples" not in counted["sources"]["y"]


def test_input_length_covers_instruction_and_history():
    bare, full = Statistics(), Statistics()
    first, second = records()[:2]
    bare.add(first, "train")
    full.add(second, "train")
    shortest = bare.to_json()["tasks"]["planning"]["input_tokens"]["min"]
    assert shortest > 12
    # Two steps: "[SUBQ] q", "Retrieved Graph Information:" and the triples, eight words a triple and its comma.
    assert full.to_json()["tasks"]["planning"]["input_tokens"]["min"] > shortest + 20


def test_table_stands_beside_the_paper(counted):
    rows = {row[0]: row[1:] for row in table_rows(counted)}
    assert rows["Queries"] == ("2", "129,902", "3", "78,164")
    assert rows["[SUBQ]"] == ("1 (50.0%)", "71,676 (55.2%)", "-", "-")
    assert rows["[SUBQ] tokens (min, mean, max)"][2] == "-"


@settings(deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1))
def test_histogram_agrees_with_the_standard_library(values):
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    summary = histogram.summary()
    assert summary["median"] == reference.median(values)
    assert summary["mean"] == pytest.approx(reference.mean(values), abs=0.006)
    assert (summary["min"], summary["max"], summary["count"]) == (min(values), max(values), len(values))


def test_empty_statistics_have_a_table():
    assert {row[1] for row in table_rows(Statistics().to_json())} == {"0", "-"}


def test_answers_are_looked_for_in_single_facts():
    # "b c" stands across the two facts, whichever comes first.
    step = Step("q", (Triple("a", "r", "b"), Triple("c", "r", "b")))
    counts = Statistics()
    for answer in ("b c", "c r b"):
        counts.add(Record("1", "q", "answering", "Why?", Action.SUFFICIENT, (step,), answers=(answer,)), "train")
    assert counts.to_json()["sources"][""]["answer in triples"] == 1


def test_words_of_instruction_and_input_are_counted_as_of_one_text():
    from tripletune.models.prompts.rendering import Instructions, render

    counts = Statistics()
    record = records()[1]
    counts.add(record, "train")
    prompt = f"{Instructions.load().of(record.task)}\n\n{render(record.input)}"
    assert counts.to_json()["tasks"]["planning"]["input_tokens"]["max"] == len(prompt.split())


def test_every_record_has_a_sample_label():
    assert {sample_label(record) for record in records()} <= set(sample_labels())
    assert [sample_label(record) for record in records()] == [
        "[SUBQ]",
        "[SUFFICIENT]",
        "answer after retrieval",
        "answer after retrieval",
        "answer without retrieval",
    ]


def test_samples_do_not_depend_on_the_order_of_reading():
    made = [Record(f"r{n}", "q", "planning", "Why?", Action.SUFFICIENT) for n in range(7)]
    found = set()
    for order in list(permutations(made))[::250]:
        samples = Samples()
        for record in order:
            samples.add(record)
        (kept,) = samples.to_json().values()
        found.add(tuple(sample["id"] for sample in kept))
    assert len(found) == 1
    assert len(next(iter(found))) == SAMPLES
    assert next(iter(found)) != tuple(f"r{n}" for n in range(SAMPLES))
