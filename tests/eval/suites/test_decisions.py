import json

import pytest

from tests.cli import read_lines, write_lines
from tripletune.core.calls import Backend, CallError, Completion, Message
from tripletune.core.data.pairs import Trajectory
from tripletune.core.data.triples import Triple
from tripletune.eval.__main__ import main
from tripletune.eval.suites.decisions import DecisionSuite, decision_cases, score_reply, summarise_decisions
from tripletune.rag.systems.cirag.integration import Decision, Round, decision_text, messages_of


def facts(number, count=3):
    return tuple(Triple(f"Ada {number}", "saw", f"Kelm {n}") for n in range(count))


def trajectory(name, question="q", teacher="m"):
    """Two rounds: one triple kept and a query, then two kept and the end."""
    first = Decision("One helps.", facts(0)[:1], "Where is Kelm 0?")
    last = decision_text(Decision("Enough.", facts(1)[:2], ""))
    turns = (*messages_of("Go.", "Who?", facts(1), [Round(facts(0), first)]), Message(role="assistant", content=last))
    flags = tuple(turn["role"] == "assistant" for turn in turns)
    return Trajectory(name, question, "cirag.integrate", teacher, turns, flags)


def says(query, *core, thought="So."):
    return decision_text(Decision(thought, core, query))


def test_a_case_is_a_round_with_the_teachers_history():
    one = trajectory("t")
    first, last = decision_cases([one])
    assert (first.id, last.id, last.round) == ("t@1", "t@2", 2)
    assert (first.messages, last.messages) == (one.messages[:2], one.messages[:4])
    assert first.candidates == facts(0)
    assert (first.gold.query, last.gold.query) == ("Where is Kelm 0?", "")
    assert last.gold.core == facts(1)[:2]
    only_last = Trajectory("t", "q", one.role, "m", one.messages, (False,) * 4 + (True,))
    assert [case.id for case in decision_cases([only_last])] == ["t@2"]


def test_trajectories_that_hold_no_decisions():
    one = trajectory("t")
    turns = [dict(turn) for turn in one.messages]
    turns[2]["content"] = "I keep all."
    with pytest.raises(ValueError, match="decision 1 cannot be read"):
        list(decision_cases([Trajectory("t", "q", one.role, "m", tuple(turns), one.learned)]))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"has role cirag\.answer\.triples"):
        list(decision_cases([Trajectory("t", "q", "cirag.answer.triples", "m", one.messages, one.learned)]))


@pytest.mark.parametrize(
    ("round_", "reply", "scores"),
    [
        (1, says("Where is Kelm 0?", *facts(0)[:1]), (1, 1, 1, 0)),
        (1, says("Where is the town Kelm 0?", *facts(0)[:2]), (2 / 3, 8 / 9, 1, 0)),
        (1, says("Where is Kelm 0?"), (0, 1, 1, 0)),
        (1, says("", *facts(0)[:1]), (1, 0, 0, 0)),
        (1, "no idea", (0, 0, 0, 1)),
        (1, "", (0, 0, 0, 1)),
        (2, says("", *facts(1)[:2]), (1, None, 1, 0)),
        (2, says("Where is Kelm 0?", *facts(1)[:1]), (2 / 3, None, 0, 0)),
        # Of another round, and invented: the loop drops both.
        (2, says("", *facts(0)[:1], *facts(1)[:1], Triple("a", "b", "c")), (2 / 3, None, 1, 0)),
    ],
)
def test_scores_of_a_reply(round_, reply, scores):
    case = list(decision_cases([trajectory("t")]))[round_ - 1]
    row = score_reply(case, reply)
    found = [row.scores.get(name) for name in ("core_f1", "query_f1", "stop_accuracy", "malformed")]
    assert found == [None if score is None else pytest.approx(score) for score in scores]


def test_summary_counts_and_draws_questions():
    cases = list(decision_cases([trajectory("a", "q1"), trajectory("b", "q2", "other")]))
    replies = [says("Where is Kelm 0?", *facts(0)[:1]), "???", says("", *facts(0)[:1]), says("", *facts(1)[:2])]
    rows = [score_reply(case, reply) for case, reply in zip(cases, replies)]
    summary = summarise_decisions(rows)
    assert (summary.decisions, summary.questions, summary.errors) == (4, 2, 0)
    assert summary.confusion == {
        "stop": {"stop": 1, "go_on": 0, "malformed": 1},
        "go_on": {"stop": 1, "go_on": 1, "malformed": 0},
    }
    assert summary.metrics["stop_accuracy"]["mean"] == 0.5
    assert summary.metrics["query_f1"] | {"low": 0, "high": 0} == {"mean": 0.5, "low": 0, "high": 0, "n": 2}
    assert summary.metrics["malformed"]["mean"] == 0.25
    assert summary.by_round["1"]["core_f1"]["mean"] == 1.0
    assert summary.by_teacher["other"]["stop_accuracy"]["mean"] == 0.5
    assert summary.faults["missing_question"] == 1


class Student(Backend):
    """Keeps the first candidate and stops in every round; fails where the prompt holds the word it fears."""

    def __init__(self, fears="never"):
        self.fears, self.prompts = fears, []  # type: ignore[var-annotated]

    def count_tokens(self, messages):
        return sum(len(message["content"].split()) for message in messages)

    async def complete(self, messages, sampling):
        self.prompts.append(list(messages))
        if self.fears in messages[-1]["content"]:
            raise CallError("too long")
        return Completion(says("", *facts(int("Ada 1" in messages[-1]["content"]))[:1]), 7, 3)


@pytest.fixture
def data(tmp_path):
    rows = [trajectory(f"t{n}", f"q{n}").to_json() for n in range(3)]
    write_lines(tmp_path / "data" / "validation-00000.jsonl", rows)
    return tmp_path / "data"


@pytest.fixture
def student(monkeypatch):
    made = Student()
    monkeypatch.setattr(DecisionSuite, "open", lambda self: setattr(self, "backend", made))
    return made


def command(data, tmp_path, *more, model=None):
    named = ["--model", model or str(tmp_path), "--output", str(tmp_path / "out")]
    return ["decisions", "--data", str(data), *named, *more]


def test_the_command_goes_on_where_it_was(data, tmp_path, student):
    assert main(command(data, tmp_path)) == 0
    rows = read_lines(tmp_path / "out" / "results.jsonl")
    assert [row["id"] for row in rows] == [f"t{n}@{number}" for n in range(3) for number in (1, 2)]
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert (metrics["decisions"], metrics["split"]) == (6, "validation")
    assert metrics["metrics"]["stop_accuracy"]["mean"] == 0.5
    assert metrics["metrics"]["core_f1"]["mean"] == pytest.approx((1 + 2 / 3) / 2)
    assert len(student.prompts) == 6
    assert main(command(data, tmp_path)) == 0
    assert len(student.prompts) == 6


def test_long_prompts_are_shortened_and_failures_stay(data, tmp_path, student):
    student.fears = "Ada 1"
    limit = student.count_tokens(trajectory("t").messages[:4]) - 1
    assert main(command(data, tmp_path, "--max-prompt-tokens", str(limit), "--limit", "4")) == 4
    rows = read_lines(tmp_path / "out" / "results.jsonl")
    assert [row["candidates_left_out"] for row in rows] == [0, 0, 0, 0]
    assert [row["error"] for row in rows] == ["", "CallError: too long", "", "CallError: too long"]
    assert rows[1]["scores"] == {"core_f1": 0.0, "stop_accuracy": 0.0, "malformed": 1.0}
    assert all(student.count_tokens(prompt) <= limit for prompt in student.prompts)
