import asyncio
import json

import numpy as np
import pytest

from tripletune.core.calls import Backend
from tripletune.data_builders.world.build import WorldOptions, write_world
from tripletune.eval.__main__ import main
from tripletune.eval.costs import Costs
from tripletune.eval.result_log import watch_for_other_evaluations
from tripletune.llm.backends.anthropic import read_message
from tripletune.llm.ledger import Ledger
from tripletune.llm.ledger_client import LedgerClient
from tripletune.llm.programs import statistics
from tripletune.llm.question_client import QuestionClient
from tripletune.rag import Trace
from tripletune.rag.costs import Cost, Usage, costs_by_role, read_prices
from tripletune.rag.results import StoredTrace
from tripletune.rag.search.embedding import Embedder


def lengths(texts, kind):
    return np.array([[len(text), len(text.split())] for text in texts], np.float32)


def test_a_cost_without_a_price_counts_nothing_in_a_sum():
    known = Cost(Usage(1, 10, 2), Usage(), 0.5, 0.25)
    unknown = Cost(Usage(2, 20, 4), Usage(), None, None)
    both = known + unknown
    assert (both.total, both.dollars, both.cached_dollars) == (Usage(3, 30, 6), 0.5, 0.25)
    assert (unknown + unknown).dollars is None
    assert (known + known).dollars == 1.0


@pytest.mark.parametrize("system", ["thrag", "cirag", "ircot"])
def test_sent_and_cached_calls_indexing_apart(system, tmp_path, monkeypatch, capsys):
    write_world(WorldOptions(seed=5, train=0, validation=0, test=4, one_hop=0), tmp_path)
    monkeypatch.setattr("tripletune.rag.search.opened.open_embedder", lambda *how: Embedder("lengths", lengths))
    files = {"data": "jsonl", "corpus": "corpus.jsonl", "triples": "triples.jsonl"}
    words = [word for name, end in files.items() for word in (f"--{name}", f"{tmp_path}/test.{end}")]
    words += ["--encoder", "vectors", "--oracle", f"{tmp_path}/test", "--ledger", f"{tmp_path}/ledger.sqlite"]
    words += ["--system", system, "--task", "hotpotqa", "--price", "1,10", "--price", f"{system}.answer=0,0"]
    words += ["--price", f"{system}.anwser=1,1", "--price", "gear.read=1,1"]
    found = []
    for output in ("one", "two"):
        assert main(["run", *words, "--output", str(tmp_path / output)]) == 0
        found.append(json.loads((tmp_path / output / "metrics.json").read_text()))
    first, again = found
    stored = statistics(tmp_path / "ledger.sqlite")
    for name in ("calls", "prompt_tokens", "completion_tokens"):
        sent = sum(one[part][name] - one[part][f"cached_{name}"] for one in found for part in ("cost", "indexing"))
        assert sent == sum(row[name] for row in stored), "what was sent is what the ledger holds"
        assert again["cost"][name] == again["cost"][f"cached_{name}"] == first["cost"][name]
    reads = ("cirag.entities", "cirag.triples", "thrag.extract")
    # Indexing is what reading each passage once costs, whoever had the replies; so is answering, the questions' own.
    for name in ("calls", "prompt_tokens", "completion_tokens"):
        index = sum(row[name] for row in stored if row["role"].startswith(reads))
        assert index == first["indexing"][name] == again["indexing"][name] == again["indexing"][f"cached_{name}"]
        assert first["indexing"][f"cached_{name}"] == 0
        assert first["cost"][name] == again["cost"][name]
    assert bool(index) == (system != "ircot")
    for part in (first["cost"], first["indexing"]):
        assert part["weighted_tokens"] == part["prompt_tokens"] + 4 * part["completion_tokens"]
    # The page's plot and its bars, and the second run's, have one figure for it.
    assert main(["report", str(tmp_path / "one"), str(tmp_path / "two"), "--output", str(tmp_path / "report")]) == 0
    (group,) = json.loads((tmp_path / "report" / "report.json").read_text())["groups"]
    for figures in (run["figures"] for run in group["runs"]):
        for name in ("calls", "tokens_read", "tokens_written", "weighted_tokens"):
            every = sum(role[name] for role in figures["roles"].values())
            assert every == pytest.approx(figures["cost"][name]["mean"])
        assert figures["indexing"]["weighted_tokens"] == first["indexing"]["weighted_tokens"]
    paid = [row for row in stored if not row["role"].startswith(f"{system}.answer")]
    dollars = sum(row["prompt_tokens"] + 10 * row["completion_tokens"] for row in paid) / 1e6
    costs_by_role = sum(first[part]["dollars"] - first[part]["cached_dollars"] for part in ("cost", "indexing"))
    assert costs_by_role == pytest.approx(dollars)
    shown = capsys.readouterr()
    assert "of the calls were not sent, since the ledger had the reply" in shown.out
    assert f"--price {system}.anwser=…: unknown role; this run used {system}." in shown.err
    assert "gear.read" not in shown.err
    assert set(first["roles"]) == {row["role"] for row in stored}


@pytest.mark.parametrize(
    ("price", "sent"),
    [("3,15", 0.00504), ("3,15,0.6", 0.00504 + 9800 * 0.3e-6), ("r=3,15", 0.00504), ("x=3,15", None)],
)
def test_the_providers_cache_has_its_own_price(tmp_path, price, sent):
    """200 new, 9,800 cached and 100 written tokens, from the response over the ledger to the dollars of a trace."""
    usage = {"input_tokens": 200, "cache_read_input_tokens": 9800, "output_tokens": 100}
    reply = read_message({"content": [{"type": "text", "text": "x"}], "stop_reason": "end_turn", "usage": usage})

    class Model(Backend):
        model = "fake:m"

        async def complete(self, messages, sampling):
            return reply

    async def ask(trace):
        async with LedgerClient(Model(), Ledger(tmp_path / "ledger.sqlite")) as client:
            await QuestionClient(client, trace).chat([{"role": "user", "content": "q"}], role="r")

    first, again = Trace("q"), Trace("q")
    asyncio.run(ask(first))
    asyncio.run(ask(again))
    for trace, spared in ((first, 0.0), (again, 1.0)):
        found = costs_by_role(StoredTrace.of(trace), read_prices([price]))["r"].to_json()
        assert (found["prompt_tokens"], found["cached_prompt_tokens"]) == (10_000, 10_000 * spared)
        assert found.get("dollars") == (sent and pytest.approx(sent))
        if sent:
            assert found["cached_dollars"] == pytest.approx(sent * spared)


def test_costs_of_an_older_run_are_those_of_each_question():
    counts = {"calls": 2, "prompt_tokens": 50, "completion_tokens": 5}
    tallies = {"calls.cirag.entities": 2}
    trace = {**counts, "tallies": tallies, "details": {"tokens": {"cirag.entities": [50, 5]}}}
    costs = Costs({})
    for _ in range(2):
        assert costs.add(StoredTrace.from_json(trace)).total.calls == 0
    assert {name: costs.indexing.to_json()[name] for name in counts} == {name: 2 * one for name, one in counts.items()}


def test_a_call_that_two_questions_note_is_counted_once():
    def trace(*calls, sent):
        tokens = [sum(one[1] for one in calls), sum(one[2] for one in calls)]
        cached = [len(calls) - sent, *(tokens if not sent else [0, 0])]
        details = {"tokens": {"cirag.entities": tokens}, "read": {"cirag.entities": [list(one) for one in calls]}}
        counts = {"calls": len(calls), "prompt_tokens": tokens[0], "completion_tokens": tokens[1]}
        tallies = {"calls.cirag.entities": len(calls)}
        values = {**counts, "tallies": tallies, "details": details, "cached": {"cirag.entities": cached}}
        return StoredTrace.from_json(values)

    costs = Costs(read_prices(["1,10"]))
    costs.add(trace(("a", 100, 10), ("b", 50, 5), sent=2))
    costs.add(trace(("b", 50, 5), sent=0))
    costs.add(trace(("", 7, 1), ("", 7, 1), sent=2))
    expected = {"calls": 4, "prompt_tokens": 164, "completion_tokens": 17, "cached_calls": 0, "cached_prompt_tokens": 0}
    indexing = costs.indexing.to_json()
    assert {name: indexing[name] for name in expected} == expected
    assert indexing["dollars"] == pytest.approx((164 + 170) / 1e6)


def test_only_one_run_at_a_time_has_the_machine(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with watch_for_other_evaluations() as first:
        assert first()
        with watch_for_other_evaluations() as second:
            assert not second()
        assert not first(), "another one was there, though it has gone"
    with watch_for_other_evaluations() as third:
        assert third()
