from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tripletune.data_builders.readers import get_reader
from tripletune.data_builders.readers.claims import NOT_BINARY
from tripletune.eval.task import load_task, task_questions

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"


def read(tmp_path, reader, *rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(get_reader(reader)(str(path)))


def test_answers_in_every_layout_are_lists(tmp_path):
    rows = [
        {"id": 17, "question": "Q1?", "possible_answers": ["Max Born", "Max Born", " Born "]},
        {"id": 18, "question": "Q2?", "possible_answers": '["Max Born", "Born"]'},
        {"question_id": "t1", "question": "Q3?", "answer": {"value": "Oslo", "aliases": ["Oslo", "Kristiania"]}},
        {"question": "Q4?", "answers": ["1971"]},
        {"question": "Q5?", "answer": "Oslo"},
        {"question": "Q6?", "answer": "[sic]"},
    ]
    questions = read(tmp_path, "short_form", *rows)
    assert [question.answers for question in questions] == [
        ("Max Born", "Born"),
        ("Max Born", "Born"),
        ("Oslo", "Kristiania"),
        ("1971",),
        ("Oslo",),
        ("[sic]",),
    ]
    assert [question.id for question in questions[:3]] == ["17", "18", "t1"]
    assert len(questions[3].id) == 16
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: the row has no gold answer"):
        read(tmp_path, "short_form", {"question": "Q?", "answers": [""]})


def test_choices_become_letters(tmp_path):
    lettered = {"text": ["ice", "fire"], "label": ["A", "B"]}
    numbered = {"text": ["ice", "fire"], "label": ["1", "2"]}
    first, second = read(
        tmp_path,
        "multiple_choice",
        {"id": "x", "question": "Hot?", "choices": lettered, "answerKey": "B"},
        {"id": "y", "question": "Hot?", "choices": numbered, "answerKey": "2"},
    )
    assert first.question == second.question == "Hot? A: ice B: fire"
    assert first.answers == second.answers == ("B",)
    with pytest.raises(ValueError, match="answerKey 'C' is not one of the labels A, B"):
        read(tmp_path, "multiple_choice", {"id": "x", "question": "Hot?", "choices": lettered, "answerKey": "C"})
    with pytest.raises(ValueError, match="of one length"):
        read(tmp_path, "multiple_choice", {"id": "x", "question": "Hot?", "choices": ["a"], "answerKey": "A"})


def test_only_true_and_false_claims(tmp_path):
    path = tmp_path / "claims.jsonl"
    labels = ["true", "False", "mixture", "unproven", 0, 2, 1]
    path.write_text(
        "".join(json.dumps({"claim_id": n, "claim": "c", "label": x}) + "\n" for n, x in enumerate(labels, 1))
    )
    issues: Counter[str] = Counter()
    questions = list(get_reader("claims")(str(path), issues))
    assert [question.answers[0] for question in questions] == ["true", "false", "false", "true"]
    assert issues == {NOT_BINARY: 3}


@pytest.mark.parametrize(
    ("task", "file", "count"),
    [
        ("popqa", "popqa.jsonl", 300),
        ("triviaqa", "triviaqa.jsonl", 200),
        ("arc", "arc_challenge.jsonl", 299),
        ("arc", "arc_easy.jsonl", 400),
        ("pubhealth", "pubhealth.jsonl", 135),
        ("hotpotqa", "hotpotqa_dev.jsonl", 240),
        ("2wikimultihopqa", "2wikimultihopqa_dev.jsonl", 64),
        ("musique", "musique_ans_dev.jsonl", 80),
    ],
)
def test_real_files(task, file, count):
    path = DATA / file
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    assert sum(1 for _ in task_questions(load_task(task), str(path))) == count
