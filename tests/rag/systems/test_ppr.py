"""The PageRank system on four passages, worked by hand."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from scipy.sparse import csr_array

from tests.cli import write_lines
from tests.fakes import Client
from tripletune.rag.search.retrievers import open_retriever
from tripletune.rag.search.triple_index import TripleIndex
from tripletune.rag.systems import Tools, find_system
from tripletune.rag.systems.ppr import (
    SYSTEM,
    PprOptions,
    _adjacency_of_corpus,
    _scaled_to_one,
    personalised_pagerank,
)
from tripletune.rag.triple_store import open_triples

PASSAGES = {
    "Ada": ("Ada wrote Glass Harbour.", [["Ada", "wrote", "Glass Harbour"]]),
    "Harbour": ("It plays in Velsund.", [["Glass Harbour", "set in", "Velsund"]]),
    "Velsund": ("A town by the sea.", [["velsund", "lies by", "the sea"]]),
    "Bo": ("Bo wrote songs.", [["Bo", "wrote", "songs"]]),
}


class Scaled:
    """A search whose scores have another scale: those of fused ranks are some hundredths, BM25's have no limit."""

    def __init__(self, inner, scale):
        self.inner, self.scale = inner, scale

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def __getitem__(self, row):
        return self.inner[row]

    def __len__(self):
        return len(self.inner)

    async def search(self, queries, k):
        return [[(row, self.scale * score) for row, score in found] for found in await self.inner.search(queries, k)]

    async def retrieve(self, query, k):
        return [replace(hit, score=self.scale * hit.score) for hit in await self.inner.retrieve(query, k)]


class Letters:
    """Names whose last words begin with the same letter are synonyms."""

    def encode(self, texts):
        return 2 * np.stack(
            [np.eye(26, dtype=np.float32)[ord(text.lower().split()[-1][0]) - ord("a")] for text in texts]
        )


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ppr")
    rows = [{"title": title, "text": text, "triples": triples} for title, (text, triples) in PASSAGES.items()]
    write_lines(folder / "all.jsonl", rows)
    retriever = open_retriever("bm25", folder / "all.jsonl", folder / "index")
    store = open_triples(folder / "all.jsonl", folder / "triples.sqlite")
    return Tools(
        retriever=retriever, store=store, reranker=Letters(),
        triples=TripleIndex("bm25", retriever.passages, store, folder / "index"),
    )  # fmt: skip


def run(tools, *replies, **settings):
    chat = Client(*replies)
    options = PprOptions(**{"synonyms": None} | settings)
    trace = asyncio.run(SYSTEM.run("Where?", "Glass Harbour of Ada", replace(tools, llm=chat), options))
    return trace, [(asked.role, asked.text) for asked in chat.asked]


def titles(trace):
    return [passage["title"] for passage in trace.steps[0].passages]


def test_edges(tools):
    edges = _adjacency_of_corpus(tools.triples, None, None).toarray()
    # Entities: Ada, Glass Harbour, Velsund (in both spellings), the sea, Bo, songs; then the passages.
    links = {(int(one), int(other)) for one, other in np.argwhere(edges) if one < other}
    assert links == {(0, 1), (1, 2), (2, 3), (4, 5)} | {(0, 6), (1, 6), (1, 7), (2, 7), (2, 8), (3, 8), (4, 9), (5, 9)}
    assert (edges == edges.T).all()
    with_synonyms = _adjacency_of_corpus(tools.triples, Letters(), 0.9).toarray()
    assert {(int(one), int(other)) for one, other in np.argwhere(with_synonyms != edges) if one < other} == {(3, 5)}


def test_the_walk_of_two_nodes_by_hand():
    """With s = 0.5 A s + 0.5 (1, 0) over one edge: s0 = 0.5 s1 + 0.5 and s1 = 0.5 s0, so s = (2/3, 1/3)."""
    edge = csr_array(np.array([[0.0, 1.0], [1.0, 0.0]]))
    assert personalised_pagerank(edge, np.array([3.0, 0.0]), 0.5) == pytest.approx([2 / 3, 1 / 3])
    # At a node without edges the walk restarts.
    assert personalised_pagerank(csr_array((2, 2)), np.array([1.0, 3.0]), 0.5) == pytest.approx([0.25, 0.75])
    assert _scaled_to_one(np.array([2.0, 6.0, 4.0])).tolist() == [0, 1, 0.5]
    assert _scaled_to_one(np.array([2.0, 2.0])).tolist() == [1, 1]


def test_the_walk_leads_past_what_the_question_names(tools):
    trace, asked = run(tools, "[1]", "Velsund", top_k=3, triples=2)
    assert (titles(trace), trace.answer) == (["Ada", "Harbour", "Velsund"], "Velsund")
    assert asked[0] == (
        "ppr.filter",
        "Facts:\n1. Ada wrote Glass Harbour\n2. Glass Harbour set in Velsund\n\nQuestion: Where?",
    )
    assert asked[1][0] == "ppr.answer"
    assert trace.steps[0].triples == [["Ada", "wrote", "Glass Harbour"]]
    assert len(trace.details["ranking"]) == 3, "no walk leads to Bo"


@pytest.mark.parametrize("of_triples", [0.001, 1000])
@pytest.mark.parametrize("of_passages", [0.001, 1000])
def test_the_walk_does_not_depend_on_the_scale_of_scores(tools, of_triples, of_passages):
    other = replace(tools, triples=Scaled(tools.triples, of_triples), retriever=Scaled(tools.retriever, of_passages))
    (wanted, _), (found, _) = (run(one, "[1, 2]", "x", top_k=4) for one in (tools, other))
    scores = [[passage["score"] for passage in trace.steps[0].passages] for trace in (wanted, found)]
    assert (titles(found), scores[1]) == (titles(wanted), pytest.approx(scores[0]))
    assert titles(found)[-1] == "Velsund", "which no search finds"


def test_without_a_triple_the_retrieval_stands(tools):
    trace, _ = run(tools, "[]", "x", top_k=4)
    assert (titles(trace), trace.steps[0].triples) == (["Ada", "Harbour"], [])


@pytest.mark.parametrize(
    ("reply", "reason"), [("none of them", "no_json"), ("[7, true]", "no_number"), ('[["Ada", "a", "b"]]', "no_number")]
)
def test_an_unreadable_filter_keeps_all_triples(tools, reply, reason):
    trace, _ = run(tools, reply, reply, "x", top_k=4)
    assert (titles(trace), trace.tallies[f"filter.{reason}"]) == (["Ada", "Harbour", "Velsund"], 1)


@pytest.mark.parametrize("reply", ["[2, 9]", '["2"]', "[[2]]", "[2.0]", '["2. Ada wrote"]'])
def test_numbers_of_kept_triples_in_other_forms(tools, reply):
    assert run(tools, reply, "x")[0].steps == run(tools, "[2]", "x")[0].steps


def test_all_triples_without_the_filter(tools):
    trace, asked = run(tools, "x", filter=False)
    assert [role for role, _ in asked] == ["ppr.answer"]
    assert len(trace.steps[0].triples) == 2


def test_ircot_over_the_graph_names_the_prompts_of_this_search_too():
    ircot = find_system("ircot")
    alone = ircot.files(ircot.options())
    over_graph = ircot.files(ircot.options(graph=True))
    assert "ppr_filter" not in alone
    assert over_graph == {**find_system("ppr").files(PprOptions()), **alone}
