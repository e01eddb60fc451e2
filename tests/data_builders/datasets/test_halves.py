"""`data split`: what belongs together stays together, and rows stay as they are."""

import json

import pytest

from tests.cli import run, write_lines

CHATS = [
    {"messages": [{"role": "user", "content": f"Q{number % 10}"}, {"role": "assistant", "content": f"A{number}"}],
     "more": number}
    for number in range(20)
]  # fmt: skip
ROWS = {
    "chats": CHATS,
    "pairs": [{"text": f"Text {number % 10}.", "triples": []} for number in range(20)],
    "questions": [{"question": f"Is {number % 10} even?", "steps": [], "answer": str(number)} for number in range(20)],
    "records": [{"id": str(number), "question": f"IS {number % 10} even", "task": "answering"} for number in range(20)],
}


def contents(folder, split):
    return [json.loads(line) for line in (folder / f"{split}-00000.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("kind", ROWS)
def test_rows_that_belong_together_stay_together(kind, tmp_path):
    write_lines(tmp_path / "rows.jsonl", ROWS[kind])
    words = ["data", "split", tmp_path / "rows.jsonl", "--validation-fraction", 0.3]
    ran = run(*words, "--output", tmp_path / "out")
    assert (ran.code, ran.out.strip()) == (0, f"{tmp_path / 'out'}: train 14, validation 6")
    train, validation = contents(tmp_path / "out", "train"), contents(tmp_path / "out", "validation")
    assert sorted(map(str, train + validation)) == sorted(map(str, ROWS[kind]))
    positions = [ROWS[kind].index(row) % 10 for row in validation]
    assert len(set(positions)) == 3
    assert run(*words, "--output", tmp_path / "out").code == 2
    assert run(*words, "--output", tmp_path / "out", "--overwrite", "--seed", 1).code == 0
    assert contents(tmp_path / "out", "validation") != validation


def test_rows_without_question_text_or_chat_are_named(tmp_path):
    write_lines(tmp_path / "rows.jsonl", [{"number": 1}])
    assert "rows.jsonl:1: the row is no chat" in run("data", "split", tmp_path / "rows.jsonl", "--output", "x").error


@pytest.mark.parametrize("more", [{}, {"question_id": "1"}, {"question": "Q"}])
def test_chats_that_training_refuses_are_refused(more, tmp_path):
    """Whatever else stands in a row: a split that training can't read is no use."""
    turns = [{"role": "user", "content": "Q"}, {"role": "tool", "content": "T"}, {"role": "assistant", "content": "A"}]
    write_lines(tmp_path / "rows.jsonl", [CHATS[0], {"messages": turns, **more}])
    ran = run("data", "split", tmp_path / "rows.jsonl", "--output", tmp_path / "out")
    assert "rows.jsonl:2: the chat has a turn of the role 'tool'" in ran.error
