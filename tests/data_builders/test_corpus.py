from pathlib import Path

import pytest

from tests.cli import read_lines, run, write_lines
from tests.data_builders.rows import hotpot_row, shared
from tripletune.core.data.passages import Passage, passage_id, read_corpus
from tripletune.core.data.questions import Question
from tripletune.data_builders.corpus import CorpusOptions, build_corpus
from tripletune.data_builders.readers import get_reader
from tripletune.rag.triple_store import gold_links_in_file


def row(number, supporting=True):
    context = [
        [f"Town {number}", [f"Town {number} is here."]],
        # The same paragraph with other spaces and another spelling of é.
        ["Shared", ["A café  for all." if number % 2 else "A cafe\u0301 for all."]],
        ["Empty", [" "]],
    ]
    facts = [[f"Town {number}", 0], ["Shared", 0]] if supporting else []
    return hotpot_row(number, supporting_facts=facts, context=context)


@pytest.fixture
def file(tmp_path):
    return write_lines(tmp_path / "train.jsonl", [row(n) for n in range(20)] + [row(20, supporting=False), row(3)])


def options(file, **more):
    return CorpusOptions("hotpotqa", **({"train": file, "train_count": 5} | more))


def build(file, output, overwrite=False, **more):
    return build_corpus(options(file, **more), output, overwrite)


def test_all_paragraphs_of_the_drawn_questions_stand_in_the_corpus_once(file, tmp_path):
    manifest = build(file, tmp_path / "out")
    questions, gold = (
        read_lines(tmp_path / "out" / "train.jsonl"),
        gold_links_in_file(tmp_path / "out" / "train.gold.jsonl"),
    )
    corpus = {passage.title: passage for passage in read_corpus(tmp_path / "out" / "train.corpus.jsonl")}
    numbers = [question["_id"][2:] for question in questions]
    assert len(questions) == 5
    assert numbers == sorted(numbers, key=int)
    assert set(corpus) == {"Shared", *(f"Town {number}" for number in numbers)}
    for number in numbers:
        assert gold[f"id{number}"] == {corpus["Shared"].id, corpus[f"Town {number}"].id}
    assert all(one.id == passage_id(one.title, one.text) for one in corpus.values()), "as in a corpus without ids"
    assert manifest["splits"]["train"] | {"sha256": ""} == {
        "file": file, "sha256": "", "usable": 20,
        "left_out": {"no supporting document": 1, "question id seen before": 1},
        "questions": 5, "passages": 6, "copies": 4, "without_text": 5, "supporting": 10,
    }  # fmt: skip
    assert questions[0] == next(one for one in (row(n) for n in range(20)) if one["_id"] == questions[0]["_id"])


def test_ids_do_not_depend_on_the_draw(file, tmp_path):
    build(file, tmp_path / "few")
    build(file, tmp_path / "all", train_count=0)
    few, every = (
        {p.title: p.id for p in read_corpus(tmp_path / name / "train.corpus.jsonl")} for name in ("few", "all")
    )
    assert len(every) == 21
    few.pop("Shared"), every.pop("Shared")  # of copies, the first that is drawn names the passage
    assert few.items() <= every.items()


def test_questions_in_both_draws_are_counted_and_told(file, tmp_path, caplog):
    manifest = build(file, tmp_path / "out", train_count=0, evaluation=file, evaluation_count=4)
    assert manifest["splits"]["evaluation"]["also_in_train"] == 4
    assert "4 evaluation questions are also training questions" in caplog.text
    caplog.clear()
    other = write_lines(tmp_path / "dev.jsonl", [row(n) for n in range(30, 34)])
    manifest = build(file, tmp_path / "other", evaluation=other, evaluation_count=4)
    assert manifest["splits"]["evaluation"]["also_in_train"] == 0
    assert "also training questions" not in caplog.text


def test_only_a_corpus_is_replaced_and_only_when_asked(file, tmp_path):
    """Defect 4: a user's `train.jsonl` in the output folder was written over."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "train.jsonl").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(FileExistsError, match=r"did not make \(train\.jsonl\)"):
            build(file, tmp_path / "out", overwrite)
    assert (tmp_path / "out" / "train.jsonl").read_text() == "mine"
    build(file, tmp_path / "other")
    build(file, tmp_path / "other", overwrite=True, train_count=6)
    assert len(read_lines(tmp_path / "other" / "train.jsonl")) == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name --train, --evaluation or both"),
        (["--train", "FILE"], "cannot draw 1000 questions, since only 20 can be used (no supporting document: 1"),
    ],
)
def test_bad_input_gives_one_line_and_exit_code_2(file, tmp_path, arguments, message):
    given = [file if word == "FILE" else word for word in arguments]
    ran = run("build corpus", "--reader", "hotpotqa", "--output", tmp_path / "out", *given)
    assert ran.code == 2
    assert message in ran.error


@pytest.mark.parametrize(
    ("reader", "name"),
    [("hotpotqa", "hotpotqa_train"), ("two_wiki", "2wikimultihopqa_train"), ("musique", "musique_ans_train")],
)
def test_real_benchmarks(reader, name, tmp_path):
    source = str(shared(f"{name}.jsonl"))
    build_corpus(CorpusOptions(reader, train=source, train_count=20), tmp_path / "o")
    corpus = {passage.id: passage for passage in read_corpus(tmp_path / "o" / "train.corpus.jsonl")}
    gold = gold_links_in_file(tmp_path / "o" / "train.gold.jsonl")
    questions = list(get_reader(reader)(str(tmp_path / "o" / "train.jsonl")))
    assert len(questions) == len(gold) == 20
    for question in questions:
        wanted = {" ".join(question.passages[index].text.split()) for index in question.supporting}
        assert {" ".join(corpus[name].text.split()) for name in gold[question.id]} == wanted


@pytest.mark.parametrize(
    ("reading", "message"),
    [
        ("own", ""),
        ("made_up", "no field of this row is the id of the question that reader 'mine' gives, 'made-up'"),
        ("few", "jsonl:2: reader 'mine' gives no question for this row"),
        ("many", "reader 'mine' gives more questions than the file has rows"),
    ],
)
def test_a_reader_of_ones_own_gives_a_question_per_row(tmp_path, monkeypatch, reading, message):
    rows = [{"key": n, "text": f"Where is Town {n}?", "gold": "here"} for n in range(3)]
    source = write_lines(tmp_path / "mine.jsonl", rows)

    def read_questions(location):
        count = {"few": 1, "many": 4}.get(reading, 3)
        for row in [*read_lines(location), {"key": 3, "text": "Where?", "gold": "here"}][:count]:
            identity = "made-up" if reading == "made_up" else str(row["key"])
            passages = (Passage(f"Town {row['key']}", "It is here."),)
            yield Question(identity, row["text"], (row["gold"],), passages, (0,), type="", source="mine")

    monkeypatch.setattr("tripletune.data_builders.corpus.get_reader", lambda name: read_questions)
    chosen = CorpusOptions("mine", train=source, train_count=0)
    if message:
        with pytest.raises(ValueError, match=message):
            build_corpus(chosen, tmp_path / "out")
    else:
        build_corpus(chosen, tmp_path / "out")
        assert read_lines(tmp_path / "out" / "train.jsonl") == rows


def test_the_benchmarks_file_is_never_written_over(file, tmp_path):
    before = Path(file).read_bytes()
    with pytest.raises(ValueError, match="is, holds or lies in the input"):
        build(file, tmp_path)
    evaluation = write_lines(tmp_path / "evaluation.corpus.jsonl", [row(1)])
    with pytest.raises(ValueError, match="is, holds or lies in the input"):
        build(file, tmp_path / "out" / "..", train=None, evaluation=evaluation, evaluation_count=1)
    assert Path(file).read_bytes() == before
    assert not (tmp_path / "corpus.json").exists()
