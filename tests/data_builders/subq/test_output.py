"""A teacher whose replies are unusable: the build ends with a card, counts and examples, and says so."""

import json

import pytest

from tests.cli import read_lines, run, write_lines
from tests.data_builders.rows import hotpot_row
from tests.data_builders.subq_replies import WorldTeacher
from tests.fakes import Backend
from tripletune.core.data.questions import DropReason
from tripletune.data_builders.datasets.writer import DROPPED
from tripletune.data_builders.subq import __main__ as command_line
from tripletune.data_builders.subq import command
from tripletune.data_builders.subq.build import EXAMPLES, LONGEST_REPLY
from tripletune.llm.ledger import Ledger
from tripletune.llm.ledger_client import LedgerClient

QUESTIONS = 12
RAMBLE = "Dune, a novel | by\nFrank ``` Herbert. " * 20
BAD = {
    # The number of a question says what its teacher does wrong.
    0: "I am not sure.",
    1: '{"documents": [7], "answerable": true}',
    2: '{"documents": [], "answerable": false}',
    3: RAMBLE,
}


def bad_reply(messages):
    return BAD[int(messages[1]["content"].split("?")[0].split()[-1]) % 4]


@pytest.fixture
def build(tmp_path, monkeypatch):
    """Runs a build and gives its exit code."""
    source = write_lines(tmp_path / "q.jsonl", [hotpot_row(n) for n in range(QUESTIONS)])
    backend = Backend("openai:m", bad_reply)
    monkeypatch.setattr(command, "open_client", lambda llm: LedgerClient(backend, Ledger(llm.ledger)))
    teacher = ["--teacher", "openai", "--teacher-model", "m", "--teacher-ledger", str(tmp_path / "l.sqlite")]
    given = ["--source", f"hotpotqa:{source}", "--output", str(tmp_path / "out"), *teacher]
    return lambda *more: command_line.main([*given, *more])


def test_a_build_without_records_has_a_card_that_says_why(tmp_path, build, capsys):
    assert build() == 4
    folder = tmp_path / "out"
    # A logging handler of an earlier test may complain beside it.
    (error,) = [line for line in capsys.readouterr().err.splitlines() if "no question could be labelled" in line]
    assert (
        f"{folder} has no records, since no question could be labelled (6 x a teacher's reply cannot be read;" in error
    )
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", DROPPED, "statistics.json"]
    content = json.loads((folder / "statistics.json").read_text(encoding="utf-8"))
    assert content["statistics"]["records"] == 0
    found = content["build"]
    assert found["drops"]["hotpotqa"] == {
        DropReason.NO_HELPFUL.value: 3,
        DropReason.UNREADABLE_REPLY.value: 6,
        DropReason.WRONG_DOCUMENTS.value: 3,
    }
    # Two replies each, the second after a repair turn; a judgement is no bad reply.
    assert found["refused"]["hotpotqa"] == {
        f"subq.filter: {DropReason.UNREADABLE_REPLY.value}": 12,
        f"subq.filter: {DropReason.WRONG_DOCUMENTS.value}": 6,
    }
    assert found["calls"]["subq.filter"] == {"calls": QUESTIONS}
    assert {len(examples) for examples in found["examples"].values()} == {EXAMPLES}
    card = (folder / "README.md").read_text(encoding="utf-8")
    for part in (
        "**No records: no question could be labelled.**",
        "| hotpotqa: a teacher's reply cannot be read | 6 |",
        "| hotpotqa: subq.filter: a teacher's reply cannot be read | 12 |",
        "### A teacher's reply cannot be read",
        "There is no document 7: they are numbered from 1 to 1.",
        "    I am not sure.",
    ):
        assert part in card
    # The fence is longer than any run of backticks in a reply.
    assert "````text" in card


def test_every_left_out_question_is_a_line(tmp_path, build):
    build()
    lines = read_lines(tmp_path / "out" / DROPPED)
    assert [line["question_id"] for line in lines] == [f"id{n}" for n in range(QUESTIONS)]
    assert "no JSON object" in lines[3].pop("detail")
    assert lines[3] == {
        "source": "hotpotqa", "question_id": "id3", "question": "Question number 3?", "stage": "subq.filter",
        "reason": "a teacher's reply cannot be read", "reply": RAMBLE[:LONGEST_REPLY],
    }  # fmt: skip
    assert lines[2]["reply"] == BAD[2]
    assert lines[2]["reason"] == DropReason.NO_HELPFUL.value


def test_commands_on_a_data_set_without_records_say_so(tmp_path, build):
    build()
    for name, code in (("stats", 0), ("validate", 1), ("peek", 2)):
        ran = run("data", name, tmp_path / "out")
        assert ran.code == code
        assert "has no records" in ran.out + ran.err
    # It can be replaced like any data set.
    assert build("--overwrite") == 4


@pytest.mark.parametrize(("bad", "code"), [(1, 0), (2, 1)])
def test_a_teacher_that_cannot_be_read_too_often_ends_with_1(tmp_path, monkeypatch, capsys, bad, code):
    teacher = WorldTeacher(tmp_path, train=11, seed=1)
    spoiled = list(teacher.rows)[:bad]

    def reply(messages):
        first = messages[1]["content"].split("\n", 1)[0]
        return "<html>busy</html>" if first.split(": ", 1)[1] in spoiled else teacher.reply({"messages": messages})

    monkeypatch.setattr(command, "open_client", lambda llm: LedgerClient(Backend("openai:m", reply)))
    given = ["--source", f"hotpotqa:{tmp_path / 'questions.jsonl'}", "--output", str(tmp_path / "out")]
    assert command_line.main([*given, "--teacher", "openai", "--teacher-model", "m"]) == code
    assert (f"{bad} of 11 questions are left out" in capsys.readouterr().err) == bool(code)
    assert (tmp_path / "out" / "README.md").is_file()


def test_the_card_counts_steps_that_have_only_triples(tmp_path):
    """Training with `data.evidence text` refuses them, but the build is over by then."""
    steps = [{"question": "Who wrote Dune?", "answer": "Ann", "triples": [["Dune", "author", "Ann"]]}]
    source = write_lines(tmp_path / "q.jsonl", [{"id": "q", "question": "Who?", "answers": ["Ann"], "steps": steps}])
    built = run("build subq", "--source", f"qa:{source}", "--output", tmp_path / "out", "--split-name", "train")
    assert built.code == 0, built.error
    (note,) = [
        note
        for note in json.loads((tmp_path / "out/statistics.json").read_text())["build"]["notes"]
        if "no text" in note
    ]
    assert note == "Source qa: 2 steps have triples and no text, so training refuses `data.evidence text` on them."
