import importlib.util
from pathlib import Path

import pytest

from tests.cli import read_lines, run

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture(scope="module")
def make():
    spec = importlib.util.spec_from_file_location("make", EXAMPLES / "make.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_documents_are_those_of_the_table(make, monkeypatch, tmp_path):
    monkeypatch.setattr(make, "DOCUMENTS", tmp_path)
    make.write_documents()
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert written == {path.name: path.read_text() for path in (EXAMPLES / "documents").iterdir()}
    assert len(written) == 20


def test_the_recorded_teacher_answers_every_call_and_is_right(make, tmp_path):
    ledger, corpus, triples = tmp_path / "ledger.sqlite", tmp_path / "passages", tmp_path / "triples.sqlite"
    teacher = "--llm", "openai:tarnbeck-teacher@http://127.0.0.1:9/v1", "--teacher-ledger", ledger
    run("ledger", "import", ledger, EXAMPLES / "teacher.jsonl.gz")
    run("build passages", "--documents", EXAMPLES / "documents", "--output", corpus)
    teacher += "--set", "teacher.attempts=1"
    read = run("rag", "extract", "--corpus", corpus, "--output", triples, *teacher)
    assert read.code == 0, "a prompt or document has changed: python examples/make.py record"
    files = "--corpus", corpus, "--triples", triples, "--output", tmp_path / "made"
    made = run("build questions", *files, *make.QUESTIONS.split(), *teacher)
    assert made.out.endswith(": train 240, test 80\n"), made.err

    facts = {(make.key(s), p, o) for _, rows in make.SENTENCES for s, p, o in rows}
    for row in read_lines(tmp_path / "made" / "train.jsonl") + read_lines(tmp_path / "made" / "test.jsonl"):
        if row["type"].endswith("hop"):
            names = {name for *_, name, _ in make.things() if make.called(name) in row["steps"][0]["question"]}
            for _ in row["steps"]:
                names = {o for s, _, o in facts if s in {make.key(name) for name in names}}
            assert row["answers"][0] in names
