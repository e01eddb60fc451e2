"""GEAR's beam search worked by hand, and PageRank against networkx."""

import asyncio
import math
from types import SimpleNamespace

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array

from tests.fakes import Client
from tripletune.core.data.passages import Passage
from tripletune.core.data.records import Step
from tripletune.core.data.triples import Triple
from tripletune.llm.reading.questions import next_question
from tripletune.rag.systems import Tools
from tripletune.rag.systems._beams import Beam, breadth_first, diverse_beam_search
from tripletune.rag.systems.gear import GearOptions, _Gear
from tripletune.rag.systems.ppr import personalised_pagerank


class Graph:
    """Triples of one-letter entities; neighbours share a letter."""

    def __init__(self, *triples):
        self.triples = [Triple(*text.split()) for text in triples]

    def __getitem__(self, row):
        return self.triples[row]

    def neighbours(self, row):
        mine = {self[row].subject, self[row].object}
        return [n for n, t in enumerate(self.triples) if n != row and mine & {t.subject, t.object}]


def search(graph, scores, seeds, **options):
    """Beam search whose similarities are looked up by text; the texts that were compared."""
    asked = []

    async def similarity(query, texts):
        asked.append(list(texts))
        return [scores[text] for text in texts]

    return asyncio.run(diverse_beam_search("q", seeds, graph, similarity, GearOptions(**options))), asked


# 0 and 1 are seeds. 0 leads to 2, 3 (over b), 1 to 4 (over d).
GRAPH = Graph("a p b", "c p d", "b q e", "b r f", "d s g")
SCORES = {
    "a p b": 0.9, "c p d": 0.5,
    "a p b. b q e": 0.6, "a p b. b r f": 0.55, "c p d. d s g": 0.8,
}  # fmt: skip


def test_scores_penalty_and_order_by_hand():
    beams, asked = search(GRAPH, SCORES, [1, 0], width=3, gamma=2)
    # The best extension of a beam keeps its score, the second weighs exp(-1/2).
    assert [beam.rows for beam in beams] == [(0, 2), (1, 4), (0, 3)]
    assert [beam.score for beam in beams] == pytest.approx([0.9 + 0.6, 0.5 + 0.8, (0.9 + 0.55) * math.exp(-0.5)])
    assert asked == [["a p b", "c p d"], ["a p b. b q e", "a p b. b r f", "c p d. d s g"]]
    assert breadth_first(beams) == [0, 1, 2, 4, 3]


def test_without_diversity_one_beam_may_win_twice():
    beams, _ = search(GRAPH, SCORES, [0, 1], width=2, gamma=0)
    assert [beam.rows for beam in beams] == [(0, 2), (0, 3)]
    beams, _ = search(GRAPH, SCORES, [0, 1], width=2)
    assert [beam.rows for beam in beams] == [(0, 2), (1, 4)], "gamma is twice the width: exp(-1/4)"


def test_gamma_bounds_the_penalty():
    many = Graph("a p b", *(f"b q x{n}" for n in range(6)))
    scores = {"a p b": 1.0} | {f"a p b. b q x{n}": 1 - n / 100 for n in range(6)}
    beams, _ = search(many, scores, [0], width=10, gamma=2)
    weights = [beam.score / (1 + scores[f"a p b. b q x{beam.rows[1] - 1}"]) for beam in beams]
    assert weights == pytest.approx([1, math.exp(-0.5), *[math.exp(-1)] * 4])


def test_scores_below_zero_are_lowered_by_a_penalty_too():
    scores = {"a p b": -0.5, "a p b. b q e": -0.1, "a p b. b r f": -0.2}
    beams, _ = search(GRAPH, scores, [0], width=3, gamma=1)
    # Weighted from -0.7, the lowest score of the step: -0.7 stays what it is.
    assert [beam.rows for beam in beams] == [(0, 2), (0, 3)]
    assert [beam.score for beam in beams] == pytest.approx([-0.6, -0.7])


def test_visited_triples_are_skipped_and_the_cap_keeps_those_with_words_of_the_query():
    line = Graph("a p b", "b p c", "c p d")
    scores = {"a p b": 0.5, "b p c": 0.4, "b p c. c p d": 0.3}
    beams, _ = search(line, scores, [0, 1], width=5)
    assert [beam.rows for beam in beams] == [(1, 2)], "0 and 1 are in beams of the step before"
    hub = Graph("a p b", "b x c", "b q d", "b x e")
    beams, asked = search(hub, {"a p b": 1, "a p b. b q d": 1}, [0], neighbours=1)
    assert [beam.rows for beam in beams] == [(0, 2)]
    assert asked[1] == ["a p b. b q d"]


def test_a_crowded_entity_does_not_hold_up_the_event_loop():
    hub = Graph("a p b", *(f"b {'q' if n == 15_000 else 'r'} x{n}" for n in range(20_000)))
    gaps = []

    async def similarity(query, texts):
        return [1.0] * len(texts)

    async def main():
        search = asyncio.create_task(diverse_beam_search("q", [0], hub, similarity, GearOptions(neighbours=3)))
        while not search.done():
            last = asyncio.get_running_loop().time()
            await asyncio.sleep(0.001)
            gaps.append(asyncio.get_running_loop().time() - last)
        return await search

    assert [beam.rows for beam in asyncio.run(main())] == [(0, 1), (0, 2), (0, 15_001)]
    assert len(gaps) > 5, "it goes on beside the search"


def test_passages_are_gathered_from_triples_until_there_are_k():
    """GEAR, eq. 10: the first rows all come from one passage, and 3 different ones are asked for."""

    class Triples:
        passages = ()

        async def search(self, queries, k):
            return [[(row, 1 / (row + 1)) for row in range(20)][:k] for _ in queries]

        def passages_of(self, row):
            return [max(0, row - 15)]

    tools = Tools(llm=Client(), retriever=object(), triples=Triples(), reranker=SimpleNamespace(scores=None))
    agent = _Gear("q", tools, GearOptions(top_k=3))
    assert asyncio.run(agent.passages_by_triples(["x", "y"], 3)) == [[(0, 0.0), (1, 0.0), (2, 0.0)]] * 2
    assert asyncio.run(agent.passages_by_triples(["x"], 9)) == [[(n, 0.0) for n in range(5)]], "all that there are"
    assert asyncio.run(agent.passages_by_triples([], 3)) == []


def test_passages_that_were_read_for_a_question_are_not_read_again():
    chat = Client('["a", "p", "b"]', "NONE", '["c", "q", "d"]')
    triples = SimpleNamespace(passages=[])
    tools = Tools(llm=chat, retriever=object(), triples=triples, reranker=SimpleNamespace(scores=None))
    agent = _Gear("Who?", tools, GearOptions())
    first, second, third = [Passage(title, "text") for title in "xyz"]
    read = asyncio.run(agent.read_proximal_triples("Who?", [first, second]))
    assert read == [Triple("a", "p", "b")]
    assert asyncio.run(agent.read_proximal_triples("Who?", [second, first], read)) == read, "another order"
    assert asyncio.run(agent.read_proximal_triples("Who?", [second], read)) == read, "less of them"
    assert len(chat.asked) == 1
    assert asyncio.run(agent.read_proximal_triples("Where?", [first, second])) == [], "another question"
    assert asyncio.run(agent.read_proximal_triples("Who?", [first, second, third], read)) == [Triple("c", "q", "d")]


def test_the_next_question_is_asked_with_those_before_in_view():
    chat = Client("When?")
    triples = SimpleNamespace(passages=[])
    tools = Tools(llm=chat, retriever=object(), triples=triples, reranker=SimpleNamespace(scores=None))
    agent = _Gear("Who?", tools, GearOptions())
    for query in ("Who?", "Where?"):
        agent.trace.add_step(Step(query), [])
    agent.trace.add_action("Answerable: No", "not_answerable")
    assert asyncio.run(agent.next_query("no year")) == "When?"
    assert chat.asked[0].text.endswith("Question: Who?\n\nReason: no year\n\nAsked before:\nWho?\nWhere?")


def test_a_beam_without_neighbours_and_no_seeds():
    alone = Graph("a p b", "c p d")
    assert search(alone, {"a p b": 0.5}, [0])[0] == [Beam((0,), 0.5)]
    assert search(alone, {}, [])[0] == []
    assert breadth_first([]) == []


def test_a_query_after_an_introduction():
    for reply in ("Which?", "Here is the next question:\n\nWhich?", "**Question:** Which?", "Next question: Which?\nx"):
        assert next_question(reply) == "Which?"


def test_three_triples_and_the_cheap_score():
    line = Graph("a p b", "b p c", "c p d")
    scores = {"a p b": 0.9, "b p c": 0.3, "c p d": 0.6}
    ((beam,), asked) = search(line, scores, [0], length=3, scoring="mean")
    assert beam.rows == (0, 1, 2)
    assert beam.score == pytest.approx(0.9 + (0.9 + 0.3) / 2 + (0.9 + 0.3 + 0.6) / 3)
    assert {text for texts in asked for text in texts} == set(scores), "triples alone are compared"


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7), st.integers(1, 5)), min_size=1, max_size=20), st.data())
def test_pagerank_is_that_of_networkx(edges, data):
    graph = nx.DiGraph()
    graph.add_nodes_from(range(8))
    graph.add_weighted_edges_from(edges)
    seeds = np.array(data.draw(st.lists(st.integers(0, 3), min_size=8, max_size=8).filter(any)), dtype=float)
    adjacency = csr_array(nx.to_scipy_sparse_array(graph, dtype=float))
    wanted = nx.pagerank(graph, 0.5, personalization=dict(enumerate(seeds)), tol=1e-12, max_iter=1000)
    found = personalised_pagerank(adjacency, seeds, 0.5, 1e-12)
    assert found == pytest.approx([wanted[node] for node in range(8)], abs=1e-9)
    assert found.sum() == pytest.approx(1)


def test_pagerank_by_hand():
    # Two nodes with an edge each way, started at the first: x = 1/2 y + 1/2, y = 1/2 x.
    scores = personalised_pagerank(csr_array(np.array([[0.0, 1.0], [1.0, 0.0]])), np.array([2.0, 0.0]), 0.5)
    assert scores == pytest.approx([2 / 3, 1 / 3])
