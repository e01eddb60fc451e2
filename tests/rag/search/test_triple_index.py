import asyncio
import logging

import numpy as np
import pytest

from tests.cli import write_lines
from tripletune.core.data.triples import Triple
from tripletune.rag.search.embedding import Embedder
from tripletune.rag.search.index import PassageStore
from tripletune.rag.search.triple_index import TripleIndex, entity_key
from tripletune.rag.triple_store import open_triples

STATED = [
    ("Ada", [["Ada", "born in", "Kelm"], ["Ada", "wrote", "Notes"]]),
    ("Kelm", [["Kelm", "lies on", "Sarn"], ["Ada", "born in", "Kelm"], ["kelm", "is", "town"]]),
    ("Sarn", [["The Sarn", "flows to", "Sea"]]),
    ("Osterby", None),
    ("Notes", [["Notes", "is", "book"], ["Notes", "is", "book"]]),
]


@pytest.fixture
def opened(tmp_path):
    def open_index(kind="bm25", embedder=None, stated=STATED):
        corpus, triples = tmp_path / "corpus.jsonl", tmp_path / "triples.jsonl"
        rows = [{"title": title, "text": f"About {title}.", "triples": found} for title, found in stated]
        write_lines(corpus, ({"title": r["title"], "text": r["text"]} for r in rows))
        write_lines(triples, (r for r in rows if r["triples"] is not None))
        store = open_triples(triples, tmp_path / "triples.sqlite")
        passages = PassageStore(corpus, tmp_path / "index", overwrite=True)
        return TripleIndex(kind, passages, store, tmp_path / "index", embedder)

    return open_index


def test_a_row_is_a_statement_with_all_its_passages(opened, caplog):
    with caplog.at_level(logging.WARNING):
        index = opened()
    assert [index[row] for row in (5, 0)] == [Triple("Notes", "is", "book"), Triple("Ada", "born in", "Kelm")]
    assert len(index) == 6
    assert [index.passages_of(row).tolist() for row in range(6)] == [[0, 1], [0], [1], [1], [2], [4]]
    assert [index.rows_of(position).tolist() for position in range(5)] == [[0, 1], [2, 0, 3], [4], [], [5]]
    assert "1 of 5 passages have no extraction" in caplog.text


def test_neighbours_share_an_entity_whatever_its_spelling(opened):
    index = opened()
    assert entity_key("The Sarn") == entity_key("sarn!")
    assert entity_key("$1,500") == entity_key("1500")
    assert len({*map(entity_key, ("C", "C++", "C#", "$1.5 million", "$15 million"))}) == 5
    assert len({*map(entity_key, ("A. Penhale", "Penhale", "Hepatitis A", "Hepatitis", "A"))}) == 5
    assert entity_key("Xi An") != entity_key("Xi")
    assert entity_key("A Man") == entity_key("the man")
    assert entity_key("U.S.A.") == entity_key("USA")
    assert entity_key("A.B. Smith") == entity_key("AB Smith")
    assert [index.neighbours(row).tolist() for row in range(6)] == [[1, 2, 3], [0, 5], [0, 3, 4], [0, 2], [2], [1]]


def test_rows_about_a_name_are_those_of_its_entity(opened):
    index = opened()
    rows = {name: asyncio.run(index.about(name)).tolist() for name in ("KELM", "the Sarn", "Notes", "Sarn Kelm", "Ode")}
    assert rows == {"KELM": [0, 2, 3], "the Sarn": [2, 4], "Notes": [1, 5], "Sarn Kelm": [], "Ode": []}


def test_it_is_opened_again_and_built_again_for_other_triples(opened, tmp_path):
    opened()
    stamp = (tmp_path / "index" / "triples" / "rows" / "manifest.json").stat().st_mtime_ns
    again = opened()
    assert (tmp_path / "index" / "triples" / "rows" / "manifest.json").stat().st_mtime_ns == stamp
    assert [row for row, _ in asyncio.run(again.search(["born Kelm"], 1))[0]] == [0]
    other = opened(stated=[("Ada", [["Ada", "died in", "Osterby"]])])
    assert (len(other), other[0]) == (1, Triple("Ada", "died in", "Osterby"))
    with pytest.raises(ValueError, match="no passage has a triple"):
        opened(stated=[("Ada", [])])


def test_only_new_triples_are_embedded(opened):
    seen = []

    def encode(texts, kind):
        seen.extend(texts)
        return np.array([[text.count(letter) for letter in "abcdefghijklmnopqrstuvwxyz"] for text in texts])

    opened("dense", Embedder("counting", encode))
    seen.clear()
    stated = [*STATED[1:], ("Bo", [["Bo", "keeps", "bees"], ["Ada", "wrote", "Notes"]])]
    index = opened("dense", Embedder("counting", encode), stated)
    assert seen == ["width", "Bo keeps bees"]
    for row, triple in enumerate(index):
        assert [found for found, _ in asyncio.run(index.search([" ".join(triple.as_list())], 1))[0]] == [row]


class Scores:
    """An embedder under which the cosine of a query and a row is the hundredth that the query names for the row."""

    def __init__(self, **queries):
        self.queries = queries

    def __call__(self, texts, kind):
        if kind == "text":
            self.rows = list(texts)
            return np.eye(7)[: len(texts)]
        vectors = np.zeros((len(texts), 7))
        for vector, text in zip(vectors, texts):
            vector[:6] = np.array(self.queries[text]) / 100
            vector[6] = np.sqrt(1 - (vector[:6] ** 2).sum())
        return vectors


def test_adaptive_retrieval_by_hand(opened):
    """T2RAG, algorithm 2. One pool of (row, score): a row counts with its best score, ties go by row:

    query a: 3: .50, 0: .30, 5: .20          query b: 4: .40, 0: .35, 5: .20, 1: .10

    sorted:  3 (.50) Kelm | 4 (.40) Sarn | 0 (.35) Ada, Kelm | 5 (.20) Notes | 1 (.10) Ada | 2 (.0) Kelm
    """
    index = opened("dense", Embedder("scores", Scores(a=[30, 0, 0, 50, 0, 20], b=[35, 10, 0, 0, 40, 20])))

    def gather(k, candidates=6):
        rows, passages = asyncio.run(index.gather(["a", "b"], k, candidates))
        return rows, {position: round(score, 2) for position, score in passages.items()}

    assert gather(1) == ([3], {1: 0.5})
    assert gather(2) == ([3, 4], {1: 0.5, 2: 0.4})
    # Kelm is there already, so that row 0 brings Ada alone.
    assert gather(3) == ([3, 4, 0], {1: 0.5, 2: 0.4, 0: 0.35})
    assert gather(9) == ([3, 4, 0, 5, 1, 2], {1: 0.5, 2: 0.4, 0: 0.35, 4: 0.2})
    assert gather(9, candidates=1) == ([3, 4], {1: 0.5, 2: 0.4})


def test_a_proposition_of_several_passages_takes_one_place_before_others_have_theirs(opened):
    """Row 0 is stated by passages 0 and 1, row 4 by passage 2."""
    index = opened("dense", Embedder("scores", Scores(a=[60, 0, 0, 0, 50, 0])))
    rows, passages = asyncio.run(index.gather(["a"], 2, 2))
    assert (rows, list(passages)) == ([0, 4], [0, 2])
    assert list(asyncio.run(index.gather(["a"], 3, 2)).passages) == [0, 2, 1], "its other passage follows"
    rows, passages = asyncio.run(index.gather(["a"], 2, 2, all_passages=True))
    assert (rows, list(passages)) == ([0], [0, 1])


def test_a_proposition_that_is_found_again_takes_no_second_place(opened):
    """Two queries find row 0, of passages 0 and 1; and rows 0 and 1 are one text, cut in two ways."""
    index = opened("dense", Embedder("scores", Scores(a=[60, 0, 0, 0, 50, 0], b=[60, 0, 0, 0, 50, 0])))
    rows, passages = asyncio.run(index.gather(["a", "b"], 2, 2))
    assert (rows, list(passages)) == ([0, 4], [0, 2])
    assert list(asyncio.run(index.gather(["a", "b"], 3, 2)).passages) == [0, 2, 1], "its other passage follows"

    kelm_is_twice = [
        ("Kelm", [["Kelm", "is", "a town in Sarn"]]),
        ("Sarn", [["Kelm", "is a town in", "Sarn"]]),
        ("Ada", [["Ada", "was born in", "Kelm"]]),
    ]
    index = opened("dense", Embedder("scores", Scores(a=[60, 60, 50, 0, 0, 0])), kelm_is_twice)
    rows, passages = asyncio.run(index.gather(["a"], 2, 3))
    assert (rows, list(passages)) == ([0, 2], [0, 2]), "one proposition is shown once"


def test_no_more_passages_than_asked_for(opened):
    index = opened("dense", Embedder("scores", Scores(a=[90, 0, 0, 0, 0, 0])))
    assert asyncio.run(index.gather(["a"], 1, 6)) == ([0], {0: pytest.approx(0.9, abs=1e-3)})


@pytest.mark.parametrize("kind", ["bm25", "hybrid"])
def test_scores_of_different_queries_are_shares_where_they_mean_nothing_beside_each_other(opened, kind):
    """The best row of a short query goes before the second of a long one, whose BM25 scores are all higher."""
    queries = ["Ada born Kelm", "town"]
    scores = Embedder("scores", Scores(**dict.fromkeys(queries, [0] * 6)))
    index = opened(kind, scores, [*STATED, ("Bo", [["Ada", "born near", "Kelm"]])])
    (long, short) = asyncio.run(index.search(queries, 6))
    assert (long[0][0], short[0][0]) == (0, 3)
    assert long[1][1] > short[0][1] or kind == "hybrid"
    rows, passages = asyncio.run(index.gather(queries, 9, 6))
    assert (rows[:2], passages[0], passages[1]) == ([0, 3], 1, 1)
