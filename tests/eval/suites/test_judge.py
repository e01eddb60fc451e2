import json

import pytest
from rich.console import Console

from tests.cli import write_lines
from tests.fakes import Client
from tripletune.core.calls import UnusableReply
from tripletune.core.options import problems
from tripletune.eval.running import run_suites
from tripletune.eval.suites._verdicts import CRITERIA, read_winners
from tripletune.eval.suites.judge import JudgeOptions, JudgeSuite
from tripletune.llm.backends import LLMOptions


def run(tmp_path, name, *answers, error=None, **settings):
    rows = [{"id": f"q{n}", "question": f"Q{n}?", "prediction": one, "scores": {}} for n, one in enumerate(answers)]
    write_lines(
        tmp_path / name / "results.jsonl", [{**one, "error": (error or {}).get(n, "")} for n, one in enumerate(rows)]
    )
    whole = {"system": "standard", "task": {"name": "qa"}, "data": "d", "retriever": "bm25", "options": {"top_k": 5}}
    (tmp_path / name / "settings.json").write_text(json.dumps({**whole, **settings}))
    return str(tmp_path / name)


def judged(tmp_path, answer, monkeypatch, **more):
    client = Client(answer=answer)
    monkeypatch.setattr("tripletune.eval.suites.judge.open_client", lambda options: client)
    options = JudgeOptions(data=str(tmp_path / "a"), other=str(tmp_path / "b"), output=str(tmp_path / "out"), **more)
    code = run_suites([JudgeSuite(options, LLMOptions(model="judge"))], Console())
    return code, json.loads((tmp_path / "out" / "metrics.json").read_text()), client


def verdict(place):
    return json.dumps(dict.fromkeys(CRITERIA, place))


def test_the_better_answer_wins_in_both_orders_and_a_place_wins_half(tmp_path, monkeypatch):
    run(tmp_path, "a", "good", "good", "same", "x")
    run(tmp_path, "b", "bad", "bad", "same", "y")

    def answer(asked):
        if "Q3?" in asked.text:  # the judge that likes what it reads first
            return verdict(1)
        return verdict(1 if asked.text.index("good") < asked.text.index("bad") else 2)

    code, metrics, client = judged(tmp_path, answer, monkeypatch)
    assert (code, len(client.asked)) == (0, 6), "equal answers need no judge"
    # Two wins, a tie, and a judge that contradicts itself.
    assert metrics["win_rate"]["overall"]["mean"] == pytest.approx((1 + 1 + 0.5 + 0.5) / 4)
    assert metrics["agreement"]["overall"]["mean"] == pytest.approx(3 / 4)
    assert metrics["counts"]["unreadable_replies"] == 0
    again, _, idle = judged(tmp_path, answer, monkeypatch)
    assert (again, idle.asked) == (0, [])


def test_replies_that_cannot_be_read_are_counted_and_left_out(tmp_path, monkeypatch, capsys):
    run(tmp_path, "a", "good", "good", "good", "more")
    run(tmp_path, "b", "bad", "bad", "", error={2: "TimeoutError"})
    unread = ("Q0?", "Answer 1:\n(no answer)")

    def answer(asked):
        return "I like both." if any(one in asked.messages[1]["content"] for one in unread) else verdict("Answer 1")

    _, metrics, client = judged(tmp_path, answer, monkeypatch, repairs=1)
    assert metrics["counts"] == {
        "questions": 3, "errors": 0, "without_verdict": 2, "unreadable_replies": 3, "failed_answers": 1, "left_out": 1,
    }  # fmt: skip
    assert "3 questions, 1 of them failed in a run, 1 left out that only one run has, 2 left out" in " ".join(
        capsys.readouterr().out.split()
    )
    assert metrics["win_rate"]["overall"] == metrics["win_rate"]["diversity"]
    assert metrics["win_rate"]["overall"]["n"] == 1
    assert client.roles.count("judge.pair.repair") == 3


@pytest.mark.parametrize("across", [None, "teacher", "model", "model,top_k"])
def test_runs_that_differ_in_more_than_the_system_are_not_judged(tmp_path, monkeypatch, across):
    run(tmp_path, "a", "good", teacher="openai:m")
    run(tmp_path, "b", "good", teacher="openai:n", options={"top_k": 10})
    answer = lambda asked: verdict(1)  # noqa: E731
    if across == "model,top_k":
        assert judged(tmp_path, answer, monkeypatch, across=across)[0] == 0
        return
    with pytest.raises(ValueError, match=r"did you mean|differ in .*top_k|one of"):
        judged(tmp_path, answer, monkeypatch, across=across)


def test_runs_of_other_questions_are_refused(tmp_path):
    run(tmp_path, "a", "good")
    other = run(tmp_path, "b", "bad")
    (tmp_path / "b" / "results.jsonl").write_text('{"id": "q0", "question": "Another?", "prediction": "x"}\n')
    options = JudgeOptions(data=str(tmp_path / "a"), other=other, output=str(tmp_path / "out"))
    with pytest.raises(ValueError, match="differs in"):
        JudgeSuite(options, LLMOptions(model="judge"))


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1, 1), ("2", -1), (0, 0), ("Answer 1", 1), ("[Answer 2]", -1), ("tie", 0), ({"Winner": "Answer 2"}, -1),
     ("Answer 1, since it names 2 causes", 1), ("Answer 2 is better than 1", -1), ("Answer 1 and 2 are equal", 0)],
)  # fmt: skip
def test_winners_are_read_in_the_forms_that_models_write(value, expected):
    reply = {"Overall explanation": "Not 1 but 2", "Overall Winner": value}
    assert read_winners(f"Well: {json.dumps(reply)}", ["overall"]) == {"overall": expected}
    with pytest.raises(UnusableReply, match="diversity"):
        read_winners(json.dumps({"overall": value}), ["overall", "diversity"])


def test_a_run_beside_itself_is_refused(tmp_path):
    options = JudgeOptions(
        data=str(tmp_path / "a"), other=str(tmp_path / "b" / ".." / "a"), output=str(tmp_path / "out")
    )
    assert "is the same run as --data" in problems(options)[0]
