import ast
import asyncio
import importlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.cli import read_lines, run

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture(scope="module", autouse=True)
def beside_the_examples():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        yield


@pytest.fixture(scope="module")
def company(beside_the_examples):
    return importlib.import_module("company")


@pytest.fixture(scope="module")
def make(beside_the_examples):
    return importlib.import_module("make")


def test_documents_are_those_of_the_table(company, tmp_path):
    company.write_documents(tmp_path)
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert written == {path.name: path.read_text() for path in (EXAMPLES / "documents").iterdir()}
    assert len(written) == 20


def test_the_notebook_runs_and_the_recorded_teacher_answers_every_call(make, company, tmp_path, monkeypatch):
    shutil.copytree(EXAMPLES, tmp_path / "examples", ignore=shutil.ignore_patterns("runs"))
    monkeypatch.chdir(tmp_path / "examples")
    monkeypatch.setenv("PATH", os.environ["PATH"])  # the notebook changes it
    names, commands, said = dict[str, Any](), [], ""
    for cell in json.loads(Path("own_documents.ipynb").read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if source.startswith("!tripletune "):
            _, first, *words = source.replace("\\\n", "").format(**names).split()
            commands.append({first, *words})
            words += ["--set", "teacher.attempts=1"] * ("--llm" in words)
            ran = run(*([f"build {words.pop(0)}"] if first == "build" else [first]), *words)
            assert ran.code == 0, f"{ran.err}\nAfter a change of prompts or documents: python examples/make.py record"
            said += ran.err
        elif cell["cell_type"] == "code":
            ended = eval(compile(source, "cell", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
            _ = ended and asyncio.run(ended)
        assert not cell.get("outputs")
    home = names["home"]
    assert "qa: 112 questions labelled, 0 left out" in said
    # Triples, questions and records are made as the recipe makes them.
    assert commands[2:5] == [{*one.split()[1:]} for one in make.road(home, calls="calls")[2:5]]
    assert names["trace"].answer in names["question"]["answers"]
    assert len(names["trace"].steps) == 2

    facts = {(company.key(s), p, o) for _, rows in company.SENTENCES for s, p, o in rows}
    for row in [row for split in ("train", "test") for row in read_lines(f"{home}/questions/{split}.jsonl")]:
        if row["type"].endswith("hop"):
            found = {
                name
                for *_, name, _ in company.things()
                if company.name_in_sentence(name) in row["steps"][0]["question"]
            }
            for _ in row["steps"]:
                found = {o for s, _, o in facts if s in {company.key(name) for name in found}}
            assert row["answers"][0] in found
