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
    said: list[str] = []
    for command in make.road(str(tmp_path), calls=str(make.RECORDED)):
        _, first, second, *words = command.split()
        if first not in ("ledger", "build", "rag"):
            break
        asks = ["--set", "teacher.attempts=1"] if "--llm" in words else []
        program = [f"{first} {second}"] if first == "build" else [first, second]
        ran = run(*program, *words, *asks)
        assert ran.code == 0, f"{ran.err}\nAfter a change of prompts or documents: python examples/make.py record"
        said += ran.err.splitlines()
    assert [line for line in said if "labelled" in line] == [
        f"qa: {count} questions labelled, 0 left out" for count in (240, 80)
    ]

    facts = {(make.key(s), p, o) for _, rows in make.SENTENCES for s, p, o in rows}
    for row in read_lines(tmp_path / "questions/train.jsonl") + read_lines(tmp_path / "questions/test.jsonl"):
        if row["type"].endswith("hop"):
            names = {name for *_, name, _ in make.things() if make.called(name) in row["steps"][0]["question"]}
            for _ in row["steps"]:
                names = {o for s, _, o in facts if s in {make.key(name) for name in names}}
            assert row["answers"][0] in names
