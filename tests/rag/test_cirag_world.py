"""Acceptance of CIRAG on the fictional world: a teacher that knows the facts, BM25, and a reranker of common words."""

from collections import Counter

import pytest

from tests.rag.test_systems_world import answer_all, build, right
from tripletune.data_builders.world.build import WorldOptions, generate_world
from tripletune.llm.ledger import Ledger
from tripletune.llm.programs import statistics

OPTIONS = WorldOptions(
    seed=3, train=0, validation=0, test=60, common_knowledge=0, one_hop=0, two_hop=3, three_hop=2, four_hop=1,
    comparison=1, intersection=1,
)  # fmt: skip
CHAINS = ("2-hop", "3-hop", "4-hop")


@pytest.fixture(scope="module")
def world():
    return generate_world(OPTIONS, "test")


@pytest.fixture(scope="module")
def ledger(tmp_path_factory):
    """The file with the calls of all runs."""
    return tmp_path_factory.mktemp("ledger") / "calls.sqlite"


@pytest.fixture(scope="module")
def answer(world, ledger, tmp_path_factory):
    """`answer(max_rounds=2)`: the traces of all questions."""
    tools = build(world, tmp_path_factory.mktemp("index"))

    def run(**settings):
        with Ledger(ledger) as opened:
            return answer_all(world, "cirag", tools, opened, **settings)

    return run


@pytest.fixture(scope="module")
def traces(answer):
    return answer()


def test_95_percent_of_multi_hop_questions_are_answered(world, traces):
    hits = [hit for hit, one in zip(right(world, traces), world.questions) if one.kind in CHAINS]
    assert len(hits) >= 40
    assert sum(hits) / len(hits) >= 0.95


def test_rounds_and_calls_are_those_of_the_algorithm(world, traces):
    for question, trace, hit in zip(world.questions, traces, right(world, traces)):
        rounds = len(trace.steps)
        assert 1 <= rounds <= 4
        assert len(trace.actions) == rounds == len(trace.details["rounds"])
        passages = {passage["id"] for step in trace.steps for passage in step.passages}
        answers = len(trace.details["answers"])
        assert trace.tallies["calls.cirag.entities"] == trace.tallies["calls.cirag.triples"] == len(passages)
        assert trace.tallies["calls.cirag.integrate"] == rounds
        assert trace.calls == 2 * len(passages) + rounds + answers
        assert all(len(step.passages) <= 10 and len(step.triples) <= 30 for step in trace.steps)
        if trace.stop_reason == "no_question":
            # A perfect integrator never needs more rounds than hops, and one answer from triples is enough.
            assert rounds <= len(question.helpful)
            assert (trace.details["granularity"], answers) == ("triples", 1)
            assert hit


def test_queries_follow_the_gold_chain(world, traces):
    for question, trace in zip(world.questions, traces):
        if question.kind in CHAINS and trace.stop_reason == "no_question":
            assert trace.steps[0].query == question.text
            assert {step.query for step in trace.steps[1:]} <= set(question.subqueries)
            core = [tuple(row) for one in trace.details["rounds"] for row in one["core_triples"]]
            assert {(title, predicate) for title, predicate, _ in core} == set(
                zip(question.helpful, question.predicates)
            )


def test_no_reply_of_a_perfect_teacher_is_at_fault(traces):
    tallies = sum((Counter(trace.tallies) for trace in traces), Counter())
    faults = ("integration.", "answer.", "unreadable", "cut_off", "incomplete_json")
    assert not [name for name in tallies if name.startswith(faults)]
    assert sum(tallies[f"answered.{name}"] for name in ("triples", "sentences", "passages", "default")) == len(traces)


def test_the_ledger_reads_a_passage_once(world, traces, ledger):
    (row,) = (row for row in statistics(ledger) if row["role"] == "cirag.triples")
    assert row["calls"] <= len(world.articles)
    assert row["uses"] > row["calls"]


def test_one_round_and_single_granularities(world, answer):
    traces = answer(max_rounds=1, granularities=("passages",), extraction="joint", rerank=False)
    assert {len(trace.steps) for trace in traces} == {1}
    assert {trace.details["granularity"] for trace in traces} <= {"passages", "default"}
    assert "max_rounds" in {trace.stop_reason for trace in traces}
    assert any(len(step.triples) > 30 for trace in traces for step in trace.steps)
    assert all("calls.cirag.entities" not in trace.tallies for trace in traces)
    alone = answer(granularities=("sentences",))
    assert sum(right(world, alone)) / len(alone) >= 0.9


def test_more_rounds_answer_more_and_n_bounds_the_candidates(world, answer):
    shares = []
    for rounds in (1, 2, 3, 4):
        traces = answer(max_rounds=rounds)
        assert max(len(trace.steps) for trace in traces) <= rounds
        shares.append(sum(right(world, traces)) / len(traces))
    assert shares == sorted(shares)
    assert shares[0] < 0.6 < 0.9 < shares[-1]
    for count in (10, 100):
        most = max(len(step.triples) for trace in answer(candidates=count) for step in trace.steps)
        assert most == 10 if count == 10 else 30 < most <= 100
