"""The figures of the benchmark of large indexes, by hand on a few rows."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import wikipedia

ROWS = np.eye(12, dtype=np.float16)


def test_the_threshold_of_a_query_is_the_score_of_its_kth_best_row():
    vectors = np.array([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]], np.float16)
    queries = np.array([[1.0, 0.0], [0.0, 1.0]], np.float32)
    assert wikipedia._exact_thresholds(vectors, queries, 2) == pytest.approx([0.6, 0.8], abs=1e-3)


def test_recall_counts_found_rows_that_score_as_well_as_the_tenth():
    query = np.arange(12, 0, -1, dtype=np.float32)[None]
    least = wikipedia._exact_thresholds(ROWS, query, 10)
    searches = [
        wikipedia._MeasuredSearch({"name": "all"}, lambda query: [np.arange(10)]),
        wikipedia._MeasuredSearch({"name": "half"}, lambda query: [np.array([0, 1, 2, 3, 4, 10, 11])]),
    ]
    rows = wikipedia._measure_searches(searches, ROWS, query, least, repeats=1)
    assert [(row["name"], row["recall_10"]) for row in rows] == [("all", 1.0), ("half", 0.5)]


def test_a_graph_is_searched_with_its_own_view_for_the_rows_that_recall_counts():
    searched = []

    def search(query, count):
        searched.append((graph.hnsw.efSearch, count))
        return None, np.array([[3, 1]])

    graph = SimpleNamespace(hnsw=SimpleNamespace(efSearch=0), search=search)
    narrow, wide = wikipedia._graph_search(graph, 64), wikipedia._graph_search(graph, 256)
    assert [list(rows) for rows in narrow(ROWS[:1])] == [[3, 1]]
    wide(ROWS[:1])
    narrow(ROWS[:1])
    assert searched == [(64, 10), (256, 10), (64, 10)]


def test_made_passages_have_a_title_and_100_words():
    texts = ["Oslo: one two three", "Rome: four five"]
    passages = list(wikipedia.made_passages(texts, 20))
    assert {passage.split("\n")[0] for passage in passages} == {"Oslo", "Rome"}
    assert {len(passage.split("\n")[1].split()) for passage in passages} == {100}
    assert passages == list(wikipedia.made_passages(texts, 20))


def test_made_vectors_have_length_one_and_begin_with_the_real_ones(tmp_path):
    real = np.eye(4, dtype=np.float16)
    made = wikipedia._made_vectors(real, 9, tmp_path / "vectors.npy", seed=3)
    assert made.shape == (9, 4)
    assert (made[:4] == real).all()
    assert np.linalg.norm(made.astype(np.float32), axis=1) == pytest.approx(np.ones(9), abs=2e-3)


def test_a_repeated_index_has_the_rows_of_its_terms_in_every_copy():
    # Term 0 is in rows 0 and 2, term 1 in row 1.
    stored = {
        "indptr": np.array([0, 2, 3]),
        "indices": np.array([0, 2, 1], np.int32),
        "data": np.array([1.0, 2.0, 3.0], np.float32),
        "num_docs": 3,
    }
    index = wikipedia._repeated_index(stored, [0], copies=2)
    assert index.count == 6
    ranking = index.rank([0], 6)
    # A copy's scores are up to a tenth lower, so the rows of the higher score still come first.
    assert [row for row, _ in ranking[:2]] in ([2, 5], [5, 2])
    assert sorted(row for row, _ in ranking) == [0, 2, 3, 5]


def test_queries_are_measured_after_a_pass_that_warms_up():
    asked = Counter()

    def search(numbers, k):
        asked[tuple(numbers)] += 1
        return [(numbers[0], float(k))]

    measured = wikipedia._ask_all(search, [[4], [7]])
    assert measured.rankings == [[(4, 10.0)], [(7, 10.0)]]
    assert len(measured.milliseconds) == 2
    assert asked == {(4,): 2, (7,): 2}
