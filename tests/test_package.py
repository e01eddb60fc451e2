"""The package, built and installed beside a user's own `models/`, `train.py` and `eval.py`, runs the README example."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile

import pytest
import yaml

from tests.outside.commands import PAGES, QUICK, commands_of_pages
from tests.outside.environment import CLEAN, ROOT, build, build_wheel, install
from tests.outside.inputs import write_documents, write_inputs

pytestmark = pytest.mark.slow
PASSAGES = [("Glass Harbour", "A novel by Ida Morn."), ("Ida Morn", "Born in Velsund.")]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("build")
    return build_wheel(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def bare(wheel, tmp_path_factory):
    return install(wheel, tmp_path_factory.mktemp("bare"))


@pytest.fixture
def project(tmp_path):
    """A user's own project, whose names are those of our folders."""
    folder = tmp_path / "project"
    (folder / "models").mkdir(parents=True)
    for name in ("models/__init__.py", "train.py", "eval.py"):
        (folder / name).write_text("raise RuntimeError('the user code of this name was imported')\n")
    return folder


@pytest.fixture
def files(project, make_graph_llm):
    """What the commands read: a model, a corpus with triples, one question."""
    from tripletune.models.graph_llm import add_adapter

    llm, processor = make_graph_llm()
    adapted = add_adapter(llm)
    adapted.save_pretrained(project / "model")
    llm.config.save_pretrained(project / "model")
    processor.save_pretrained(project / "model")
    rows = [{"title": title, "text": text} for title, text in PASSAGES]
    facts = [[["Glass Harbour", "Author", "Ida Morn"]], [["Ida Morn", "Birthplace", "Velsund"]]]
    (project / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    triples = ({**row, "triples": found} for row, found in zip(rows, facts))
    (project / "triples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in triples))
    question = {"_id": "q1", "question": "Where was the author of Glass Harbour born?", "answer": "Velsund",
                "type": "bridge", "supporting_facts": [["Ida Morn", 0]],
                "context": [[title, [text]] for title, text in PASSAGES]}  # fmt: skip
    (project / "questions.jsonl").write_text(json.dumps(question) + "\n")
    return project


def test_a_wheel_holds_nothing_but_tripletune(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"tripletune"}
    held = {name for name in names if name.startswith("tripletune/")}
    ours = [path.resolve() for path in (ROOT / "tripletune").iterdir() if path.is_symlink()]
    wanted = [path for folder in ours for kind in ("*.py", "*.yaml", "*.md") for path in folder.rglob(kind)]
    assert {f"tripletune/{path.relative_to(ROOT)}" for path in wanted} <= held
    assert "tripletune/py.typed" in held


def test_one_version_everywhere(wheel, bare):
    version = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["version"]
    assert {path.name for path in wheel.parent.iterdir()} == {
        f"tripletune-{version}.tar.gz", f"tripletune-{version}-py3-none-any.whl"
    }  # fmt: skip
    shown = subprocess.run([bare / "tripletune", "--version"], env=CLEAN, capture_output=True, text=True, check=True)
    assert shown.stdout.startswith(f"tripletune {version}")
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


# In one process, which imports the libraries once: the README's example, and then a command.
BOTH = """
import runpy, sys
runpy.run_path("example.py", run_name="__main__")
import tripletune
print(tripletune.__file__)
sys.argv[0] = "tripletune"
runpy.run_module("tripletune", run_name="__main__", alter_sys=True)
"""


def test_the_readme_example_and_an_evaluation_run_beside_a_users_own_folders(bare, files):
    example = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)[0]
    for theirs, ours in {
        "runs/demo/export": "model",
        "runs/demo/exam/test.corpus.jsonl": "corpus.jsonl",
        "runs/demo/exam/test.triples.jsonl": "triples.jsonl",
    }.items():
        assert theirs in example
        example = example.replace(theirs, ours)
    (files / "example.py").write_text(example)
    (files / "both.py").write_text(BOTH)
    words = ["eval", "run", "--system", "ras", "--task", "hotpotqa", "--data", "questions.jsonl", "--triples",
             "triples.jsonl", "--model", "model", "--output", "out", "--max-rounds", "1", "--max-plan-tokens", "4",
             "--max-answer-tokens", "4"]  # fmt: skip
    done = subprocess.run(
        [bare / "python", "both.py", *words], cwd=files, env=CLEAN, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert str(bare.parent) in done.stdout
    assert json.loads((files / "out" / "metrics.json").read_text())["questions"] == 1


# Runs commands in one process, which imports the libraries once.
TOUR = """
import json, runpy, sys
for words in json.load(open("tour.json")):
    sys.argv = list(words)
    code = 0
    try:
        runpy.run_module("tripletune", run_name="__main__", alter_sys=True)
    except SystemExit as stop:
        code = stop.code or 0
    if code:
        sys.exit(f"exit code {code}: {' '.join(words)}")
"""


@pytest.mark.model
def test_the_quick_commands_of_readme_and_guide_run_outside_the_clone(bare, tmp_path):
    """`python -m tests.outside` runs all of them."""
    commands = [command.text for command in commands_of_pages(PAGES, "http://127.0.0.1:9/v1")]
    quick = [text for text in commands if text.startswith(QUICK) and " --teacher " not in text and "--llm" not in text]
    assert len(quick) > 25

    def run(texts):
        (tmp_path / "tour.json").write_text(json.dumps(list(map(shlex.split, texts))))
        command = [bare / "python", "-c", TOUR]
        ran = subprocess.run(command, cwd=tmp_path, env=CLEAN, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr[-2000:]

    write_documents(tmp_path)
    # The other inputs are made of README's world.
    (world, *_) = [place for place, text in enumerate(quick) if text.startswith("tripletune build world")]
    run(quick[: world + 1])
    write_inputs(tmp_path)
    run(quick[world + 1 :])


def test_a_checkout_without_links_imports_and_builds_no_wheel(tmp_path):
    checkout = tmp_path / "checkout"
    shutil.copytree(ROOT / "models", checkout / "models", ignore=shutil.ignore_patterns("__pycache__"))
    (checkout / "tripletune").mkdir()
    shutil.copy(ROOT / "tripletune/__init__.py", checkout / "tripletune")
    shutil.copytree(ROOT / "tripletune/core", checkout / "tripletune/core")
    # As git writes a link where `core.symlinks` is false.
    (checkout / "tripletune/models").write_text("../models")

    def imported(name):
        return subprocess.run(
            [sys.executable, "-c", f"import {name}; print({name}.__file__)"], cwd=checkout,
            env={**os.environ, "PYTHONPATH": str(checkout)}, capture_output=True, text=True, check=False,
        )  # fmt: skip

    assert imported("tripletune.models.losses").stdout.strip() == str(checkout / "models/losses.py")
    assert "ImportError: import the package as tripletune.models" in imported("models.losses").stderr
    pytest.importorskip("build")
    failed = build(checkout)
    assert failed.returncode != 0
    assert "the links in tripletune/ are missing" in failed.stdout
    assert not list(tmp_path.glob("**/*.whl"))
