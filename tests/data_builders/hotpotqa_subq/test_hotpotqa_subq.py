import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from tripletune.data_builders.hotpotqa_subq import build as hotpotqa_subq
from tripletune.data_builders.hotpotqa_subq.build import BuildOptions, build, main
from tripletune.data_builders.hotpotqa_subq.labelling import LabelOptions, gives_away_answer, label_question
from tripletune.data_builders.hotpotqa_subq.questions import DropReason, Question, UnlabelledQuestion
from tripletune.data_builders.hotpotqa_subq.sources import Source
from tripletune.models.data.passages import Passage
from tripletune.models.data.records import read_records
from tripletune.models.data.triples import Triple

QUESTION = Question(
    id="q1",
    question="Where was the author of Dune born?",
    answers=("Tacoma", "Tacoma, Washington"),
    passages=(Passage("Dune", "By Frank Herbert."), Passage("Other", "x"), Passage("Frank Herbert", "Of Tacoma.")),
    supporting=(0, 2),
    type="bridge",
    source="hotpotqa",
)


class FakeTeacher:
    name = "fake"

    def __init__(self, documents=(0, 2), subqueries=("Who wrote Dune?", "Where was Herbert born?"), empty=None):
        self.documents, self.asked, self.empty = list(documents), list(subqueries), empty

    async def helpful_documents(self, question):
        return self.documents

    async def subqueries(self, question, documents):
        return self.asked

    async def triples(self, question, document):
        fact = Triple(question.passages[document].title, "is", "here")
        return [] if document == self.empty else [fact, fact]


def label(teacher, direct=False, question=QUESTION, **options):
    return asyncio.run(label_question(question, teacher, direct, LabelOptions(**options)))


def test_two_documents_give_three_planning_records_and_one_answer():
    records = label(FakeTeacher())
    assert [record.label for record in records] == [
        "[SUBQ] Where was the author of Dune born?",
        "[SUBQ] Where was Herbert born?",
        "[SUFFICIENT]",
        "Tacoma",
    ]
    assert [[step.query for step in record.steps] for record in records] == [
        [],
        [QUESTION.question],
        [QUESTION.question, "Where was Herbert born?"],
        [QUESTION.question, "Where was Herbert born?"],
    ]
    assert records[-1].steps[0].triples == (Triple("Dune", "is", "here"),)
    assert records[-1].steps[1].text == "Frank Herbert\nOf Tacoma."
    assert [record.id for record in records] == [
        "hotpotqa:q1:plan0",
        "hotpotqa:q1:plan1",
        "hotpotqa:q1:plan2",
        "hotpotqa:q1:answer",
    ]
    assert {record.question_id for record in records} == {"q1"}


def test_generated_first_subquery_is_label_and_query():
    records = label(FakeTeacher(), first_subquery="generated")
    assert records[0].label == "[SUBQ] Who wrote Dune?"
    assert records[1].steps[0].query == "Who wrote Dune?"


def test_one_document_is_enough():
    records = label(FakeTeacher(documents=[2], subqueries=["Where was Herbert born?"]))
    assert [record.action.value for record in records] == ["[SUBQ]", "[SUFFICIENT]", "[SUFFICIENT]"]


def test_direct_answer_leaves_the_chain_out():
    planning, answering = label(FakeTeacher(), direct=True)
    assert (planning.label, planning.steps) == ("[NO_RETRIEVAL]", ())
    assert (answering.label, answering.action.value, answering.steps) == ("Tacoma", "[NO_RETRIEVAL]", ())


@pytest.mark.parametrize(
    ("teacher", "reason"),
    [
        (FakeTeacher(documents=[], subqueries=[]), DropReason.NO_HELPFUL),
        (FakeTeacher(subqueries=["Only one?"]), DropReason.NO_SUBQUERY),
        (FakeTeacher(empty=2), DropReason.NO_TRIPLES),
        (FakeTeacher(subqueries=["Who wrote Dune?", "Is Tacoma his town?"]), DropReason.ANSWER_IN_SUBQUERY),
    ],
)
def test_what_cannot_be_labelled(teacher, reason):
    with pytest.raises(UnlabelledQuestion) as caught:
        label(teacher)
    assert caught.value.reason is reason


def question_with(text, *answers):
    return Question("q", text, answers, (), (), "", "test")


@pytest.mark.parametrize(
    ("subquery", "question", "expected"),
    [
        ("When did Bob die?", question_with("Who died first, Ann or Bob?", "Bob"), False),
        ("Is there no lake?", question_with("Are both lakes?", "no"), False),
        ("Is there no fjord?", question_with("Which country?", "Norway", "NO"), False),
        ("Where is Oslo, Norge?", question_with("Which country?", "Norway", "Norge"), True),
        ("What are the Normans?", question_with("Who?", "Norman"), False),
    ],
)
def test_gives_away_answer(subquery, question, expected):
    assert gives_away_answer(subquery, question) is expected


def hotpot_row(number: int, question: str | None = None) -> dict:
    return {
        "_id": f"id{number}",
        "question": question or f"Question number {number}?",
        "answer": f"answer {number}",
        "type": "bridge",
        "supporting_facts": [["A", 0]],
        "context": [["A", [f"Text {number}."]], ["B", ["Other."]]],
    }


def teacher_row(number: int, **more) -> dict:
    return {
        "_id": f"id{number}",
        "helpful": ["A"],
        "subqueries": [{"title": "A", "question": "What of A?"}],
        "triples": {"A": [["A", "is", f"answer {number}"]]},
    } | more


def write(path: Path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def source(tmp_path):
    rows = [hotpot_row(n) for n in range(60)] + [hotpot_row(n, f"question NUMBER {n - 60}") for n in range(60, 120)]
    file = write(tmp_path / "q.jsonl", [*rows, hotpot_row(0), hotpot_row(999)])
    teacher = [teacher_row(n, closed_book="x") for n in range(119)] + [{"_id": "id119", "direct": True}]
    return Source("hotpotqa", "hotpotqa", file, write(tmp_path / "t.jsonl", teacher))


def test_build_splits_by_question_and_counts_what_is_left_out(tmp_path, source):
    build([source], BuildOptions(str(tmp_path / "out"), validation_fraction=0.3, seed=1))
    sides = {split: list(read_records(tmp_path / "out", split)) for split in ("train", "validation")}
    ids = {split: {record.question_id for record in records} for split, records in sides.items()}
    assert ids["train"] | ids["validation"] == {f"id{n}" for n in range(120)}
    assert not ids["train"] & ids["validation"]
    # Questions n and n + 60 have the same words, so they share a side.
    assert all((f"id{n}" in ids["train"]) == (f"id{n + 60}" in ids["train"]) for n in range(60))
    assert 20 < len(ids["validation"]) < 55
    direct = [r for records in sides.values() for r in records if r.question_id == "id119"]
    assert [r.action.value for r in direct] == ["[NO_RETRIEVAL]", "[NO_RETRIEVAL]"]
    facts = json.loads((tmp_path / "out" / "statistics.json").read_text())["build"]
    assert facts["drops"] == {"hotpotqa": {"question id seen before": 1, "no annotation for the question": 1}}
    assert facts["questions"] == {"hotpotqa": 120}
    assert len(facts["files"]) == 2


def test_build_does_not_depend_on_concurrency_and_moves_with_the_seed(tmp_path, source):
    def contents(name, **options):
        build([source], BuildOptions(str(tmp_path / name), validation_fraction=0.3, **options))
        return [r.id for split in ("train", "validation") for r in read_records(tmp_path / name, split)]

    first = contents("a", concurrency=1)
    assert contents("b", concurrency=50) == first
    assert contents("c", seed=5) != first


def test_split_name_puts_everything_on_one_side(tmp_path, source):
    build([source], BuildOptions(str(tmp_path / "out"), split_name="dev", limit=5))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "README.md",
        "dev-00000.jsonl",
        "statistics.json",
    ]


def test_stored_direct_answers_decide_by_normalised_match(tmp_path, source):
    answers = [{"question_id": f"id{n}", "answer": "The Answer 1!" if n == 1 else "answer 1"} for n in range(4)]
    file = write(tmp_path / "a.jsonl", answers)
    build([source], BuildOptions(str(tmp_path / "out"), split_name="train", limit=4, direct_answers=file))
    direct = {r.question_id for r in read_records(tmp_path / "out") if r.action.value == "[NO_RETRIEVAL]"}
    assert direct == {"id1"}
    with pytest.raises(ValueError, match="have none for question 'id4'"):
        build([source], BuildOptions(str(tmp_path / "b"), limit=5, direct_answers=file))
    assert not (tmp_path / "b").exists()


def test_ctrl_c_ends_the_direct_answer_pass_after_its_batch(tmp_path, source, monkeypatch, request):
    # A shell lets what it starts in the background ignore the signal.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, handler))
    stopped, answered = threading.Event(), []

    class Model:
        def __init__(self, model_spec, *_):
            self.model_spec, self.batch_size = model_spec, 8

        def answer(self, questions):
            os.kill(os.getpid(), signal.SIGINT)
            # The pass is told to stop while this batch is at work, not after the last one.
            assert stopped.wait(60)
            answered.extend(questions)
            return questions

    monkeypatch.setattr(hotpotqa_subq, "DirectAnswerTest", Model)
    monkeypatch.setattr(hotpotqa_subq, "threading", SimpleNamespace(Event=lambda: stopped))
    with pytest.raises(KeyboardInterrupt):
        build([source], BuildOptions(str(tmp_path / "out"), direct_answer_model="m"))
    assert len(answered) == 8
    assert len((tmp_path / "out.direct_answers.jsonl").read_text().splitlines()) == 8


def test_failed_build_leaves_the_old_data_set(tmp_path, source):
    output = tmp_path / "out"
    build([source], BuildOptions(str(output), limit=3, split_name="train"))
    before = (output / "train-00000.jsonl").read_bytes()
    broken = write(tmp_path / "broken.jsonl", [hotpot_row(0), {"_id": "x"}])
    with pytest.raises(ValueError, match=r"broken\.jsonl:2"):
        build([Source("hotpotqa", "hotpotqa", broken, source.annotations)], BuildOptions(str(output), overwrite=True))
    assert (output / "train-00000.jsonl").read_bytes() == before
    assert not (tmp_path / "out.partial").exists()


def test_no_question_left_is_an_error(tmp_path, source):
    other = write(tmp_path / "o.jsonl", [hotpot_row(5000)])
    with pytest.raises(ValueError, match="hotpotqa: 1 x no annotation for the question"):
        build([Source("hotpotqa", "hotpotqa", other, source.annotations)], BuildOptions(str(tmp_path / "out")))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("two_wiki:f.json", Source("two_wiki", "two_wiki", "f.json", None)),
        ("world=hotpotqa:f:t", Source("world", "hotpotqa", "f", "t")),
    ],
)
def test_source_on_the_command_line(text, expected):
    assert Source.parse(text) == expected


@pytest.mark.parametrize("text", ["hotpotqa", "hotpotqa:", "a:b:c:d", "=hotpotqa:f", "x=:f", "hotpotqa:f:"])
def test_source_in_another_form(text):
    with pytest.raises(ValueError, match="write it as READER:FILE"):
        Source.parse(text)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--source", "nope:f:t"], "there is no question reader 'nope'"),
        (["--source", "hotpotqa:gone.jsonl:gone.teacher.jsonl"], "no such file: gone.teacher.jsonl"),
        (["--source", "two_wiki:gone.json", "--validation-fraction", "1"], "validation fraction 1.0"),
        (["--source", "two_wiki:gone.json", "--shard-size", "0"], "shard size 0"),
        (["--source", "two_wiki:a.json", "--source", "two_wiki:b.json"], "two sources are called 'two_wiki'"),
    ],
)
def test_bad_command_line_is_one_line_and_exit_code_2(tmp_path, capsys, extra, message):
    with pytest.raises(SystemExit) as caught:
        main(["--output", str(tmp_path / "out"), *extra])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_module_runs_and_reports_a_malformed_line(tmp_path, source):
    broken = tmp_path / "broken.jsonl"
    broken.write_text(json.dumps(hotpot_row(0)) + "\n{oops\n")
    command = [sys.executable, "-m", "tripletune.data_builders.hotpotqa_subq", "--output", str(tmp_path / "out")]
    run = subprocess.run(
        [*command, "--source", f"hotpotqa:{broken}:{source.annotations}"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 2
    assert (
        run.stderr
        == f"error: {broken}:2: not valid JSON (Expecting property name enclosed in double quotes at column 2)\n"
    )
