"""Acceptance of the systems on the fictional world: a teacher that knows the facts, but uses only what it is shown."""

from __future__ import annotations

import asyncio
import json

import pytest

from tripletune.data_builders.world.build import WorldOptions, generate_world
from tripletune.data_builders.world.oracle import WorldOracle
from tripletune.models.data.records import Passage, normalize_answer
from tripletune.models.llm.ledger_client import LedgerClient
from tripletune.rag.retrievers import open_retriever
from tripletune.rag.systems import Tools, load_system, make_options
from tripletune.rag.triple_store import open_triples

OPTIONS = WorldOptions(
    seed=5, train=0, validation=0, test=60, common_knowledge=0, one_hop=0, two_hop=3, three_hop=3, four_hop=0,
    comparison=1, intersection=0,
)  # fmt: skip
LOOPS = ("ras", "ircot", "react", "self_ask")


@pytest.fixture(scope="module")
def world():
    return generate_world(OPTIONS, "test")


@pytest.fixture(scope="module")
def removed(world):
    """The second hop's article of some questions."""
    return {question.helpful[1] for question in world.questions[::6]}


def build(world, folder, without=()):
    """Retriever and triples of the world's articles, without some of them."""
    for name, triples in (("corpus", False), ("triples", True)):
        rows = (row for row in world.article_rows(triples=triples) if row["title"] not in without)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    retriever = open_retriever("bm25", folder / "corpus.jsonl", folder / "index")
    return Tools(retriever=retriever, store=open_triples(folder / "triples.jsonl", folder / "triples.sqlite"))


@pytest.fixture(scope="module")
def whole(world, tmp_path_factory):
    return build(world, tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def partial(world, removed, tmp_path_factory):
    return build(world, tmp_path_factory.mktemp("partial"), removed)


def answer_all(world, name, tools, **settings):
    """Answer every question; the traces in order."""
    from dataclasses import replace

    system = load_system(name)
    options = make_options(system, settings)

    async def run():
        client = LedgerClient(WorldOracle(world))
        calls = []
        for number, question in enumerate(world.questions):
            gold = tuple(Passage(title, world.articles[title].text) for title in question.helpful)
            mine = replace(tools, llm=client, gold=gold, question_id=f"q{number}")
            calls.append(system.run(question.text, question.text, mine, options))
        return await asyncio.gather(*calls)

    return asyncio.run(run())


def right(world, traces):
    return [normalize_answer(t.answer) == normalize_answer(q.answer) for q, t in zip(world.questions, traces)]


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_finds_the_chain(world, whole, name):
    traces = answer_all(world, name, whole)
    for kind, least in (("2-hop", 0.95), ("3-hop", 0.9)):
        found = [hit for hit, question in zip(right(world, traces), world.questions) if question.kind == kind]
        assert len(found) >= 20
        assert sum(found) / len(found) >= least, (name, kind)


@pytest.mark.parametrize("name", LOOPS)
def test_without_a_hop_exactly_the_questions_that_need_it_fail(world, whole, partial, removed, name):
    before = right(world, answer_all(world, name, whole, top_k=10))
    after = right(world, answer_all(world, name, partial, top_k=10))
    for question, could, can in zip(world.questions, before, after):
        assert can == (could and not removed & set(question.helpful)), question


def test_calls_are_those_of_the_papers(world, whole):
    for trace in answer_all(world, "ircot", whole):
        searches = len(trace.steps)
        assert trace.tallies == {"calls.ircot.think": searches, "calls.ircot.answer": 1, "answered_by_reader": 1}
    for trace in answer_all(world, "ircot", whole, reader=False):
        assert trace.calls == len(trace.steps) + (trace.stop_reason != "sufficient")
    for trace in answer_all(world, "react", whole):
        assert trace.tallies["calls.react.act"] == len(trace.steps) + 1
        assert ("calls.react.answer" in trace.tallies) == (trace.stop_reason != "sufficient")
    for question, trace in zip(world.questions, answer_all(world, "self_ask", whole)):
        if trace.stop_reason == "sufficient":
            assert len(question.helpful) <= len(trace.steps) == trace.tallies["calls.self_ask.answer"]
        assert trace.tallies["calls.self_ask.follow_up"] == len(trace.steps) + 1


def test_bounds_of_retrieval(world, whole):
    assert all(right(world, answer_all(world, "gold_passages", whole)))
    assert sum(right(world, answer_all(world, "random_passages", whole, top_k=3))) <= 2
    assert not any(right(world, answer_all(world, "no_retrieval", whole)))
    once = answer_all(world, "standard", whole)
    assert {(trace.calls, len(trace.steps), trace.stop_reason) for trace in once} == {(1, 1, "single_pass")}
    again = answer_all(world, "random_passages", whole, top_k=3)
    assert [t.steps[0].passages for t in again] == [
        t.steps[0].passages for t in answer_all(world, "random_passages", whole, top_k=3)
    ]
