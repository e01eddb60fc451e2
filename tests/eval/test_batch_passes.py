"""A loop over a Batch API: passes, files that come back in parts, and what is counted as sent."""

import json
import re
from pathlib import Path

import pytest

from tests.cli import run, sql, write_lines

TOWNS = range(4)
USAGE = {"prompt_tokens": 100, "completion_tokens": 10}


@pytest.fixture
def words(tmp_path):
    """The words of `eval run` over four questions, whose loop takes two or three rounds of calls."""
    rows = []
    for town in TOWNS:
        context = [[f"Town{town}", [f"Town{town} lies on the River{town}."]], ["Shared", ["A page of all questions."]]]
        rows.append({
            "_id": f"h{town}", "question": f"Which river flows through Town{town}?", "answer": f"River{town}",
            "type": "bridge", "supporting_facts": [[f"Town{town}", 0]], "context": context,
        })  # fmt: skip
    data = write_lines(tmp_path / "hotpot.jsonl", rows)
    return [
        "--system", "ircot", "--task", "hotpotqa", "--data", data, "--teacher", "batch", "--teacher-model", "m",
        "--price", "2,10",
    ]  # fmt: skip


def evaluate(tmp_path, words, output="out"):
    return run("eval", "run", *words, "--ledger", tmp_path / "calls.sqlite", "--output", tmp_path / output)


def files(tmp_path):
    return sorted((tmp_path / "calls.sqlite.batch").glob("*"))


def requests(file):
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def reply_to(request):
    """A thought, then the answer in a thought, then the reader's answer."""
    user = request["body"]["messages"][-1]["content"]
    town = re.search(r"Question: Which river flows through Town(\d)", user)[1]
    if "There are no thoughts yet" in user:
        return f"Town{town} lies on a river."
    if "Thoughts so far" in user:
        return f"So the answer is: River{town}."
    return f"River{town}"


def answer(tmp_path, asked):
    """Import a file of replies to some requests."""
    lines = []
    for request in asked:
        choice = {"message": {"role": "assistant", "content": reply_to(request)}, "finish_reason": "stop"}
        body = {"choices": [choice], "usage": USAGE}
        lines.append({"custom_id": request["custom_id"], "response": {"status_code": 200, "body": body}, "error": None})
    path = write_lines(tmp_path / f"replies-{len(list(tmp_path.glob('replies-*')))}.jsonl", lines)
    ran = run("batch", "import", "--ledger", tmp_path / "calls.sqlite", "--replies", path)
    assert ran.code == 0, ran.err


def test_after_a_partial_import_the_next_pass_sends_only_what_is_new(tmp_path, words):
    first = evaluate(tmp_path, words)
    assert (first.code, len(files(tmp_path))) == (3, 1)
    assert "Pass 1: 0 of 4 questions are done, 4 wait." in first.err
    (file,) = files(tmp_path)
    asked = requests(file)
    assert len(asked) == 4
    answer(tmp_path, asked[:2])

    second = evaluate(tmp_path, words)
    assert second.code == 3
    assert "Pass 2: 0 of 4 questions are done, 4 wait." in second.err
    assert f"{file} (waiting: 2 of its 4 calls)" in second.err
    newer = files(tmp_path)[1:]
    assert f"New: send {newer[0]} to" in second.err
    new = requests(newer[0])
    assert len(new) == 2, "only the second thoughts of the two questions that have their first"
    assert all("Thoughts so far" in request["body"]["messages"][-1]["content"] for request in new)
    answer(tmp_path, [*asked[2:], *new])

    third = evaluate(tmp_path, words)
    assert (third.code, len(files(tmp_path))) == (3, 3)
    answer(tmp_path, requests(files(tmp_path)[2]))
    fourth = evaluate(tmp_path, words)
    assert fourth.code == 3
    assert "Pass 4: 2 of 4 questions are done, 2 wait." in fourth.err
    answer(tmp_path, requests(files(tmp_path)[3]))
    assert evaluate(tmp_path, words).code == 0

    keys = [request["custom_id"] for file in files(tmp_path) for request in requests(file)]
    assert len(keys) == len(set(keys)) == 12, "three calls per question, none of them twice"
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert metrics["metrics"]["exact_match"]["mean"] == 1.0
    cost = metrics["cost"]
    assert (cost["calls"], cost["cached_calls"]) == (12, 0), "what was imported was sent and paid"
    assert cost["dollars"] == pytest.approx(12 * (100 * 2 + 10 * 10) / 1e6 / 2), "at half the price"
    assert json.loads((tmp_path / "out" / "run.json").read_text())["backends"] == {"": "batch"}


def finish(tmp_path, words, output="out"):
    """Answer whatever waits until the run ends; returns what the last pass wrote."""
    for _ in range(9):
        ran = evaluate(tmp_path, words, output)
        if ran.code != 3:
            return ran
        answer(tmp_path, requests(files(tmp_path)[-1]))
    raise AssertionError("the run does not end")


def test_another_run_with_the_same_ledger_pays_only_for_its_own_calls(tmp_path, words):
    assert finish(tmp_path, words).code == 0
    # The earlier run's replies are older than this run.
    sql(tmp_path / "calls.sqlite", "UPDATE calls SET time = '2020-01-01T00:00:00Z'")
    assert finish(tmp_path, [*words, "--set", "max_answer_tokens=33"], "other").code == 0
    cost = json.loads((tmp_path / "other" / "metrics.json").read_text())["cost"]
    assert (cost["calls"], cost["cached_calls"]) == (12, 8)
    report = run("eval", "report", tmp_path / "out", "--output", tmp_path / "report", "--price", "2,10")
    assert report.code == 0, report.err
    page = json.loads((Path(tmp_path) / "report" / "report.json").read_text())
    (shown,) = page["groups"][0]["runs"]
    assert shown["figures"]["cost"]["dollars"]["mean"] == pytest.approx(1000 * 3 * 300 / 1e6 / 2)
    assert shown["figures"]["cost"]["sent"]["mean"] == 3
    assert "its replies came from a Batch API" in (tmp_path / "report" / "report.html").read_text()
