"""The system of docs/guide/own_system.md, as a stranger adds it: from a package, and as a file of ours."""

import dataclasses
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli import read_lines, run
from tripletune.core import plugins
from tripletune.core.plugins import load_from
from tripletune.data_builders.world.oracle_replies import REPLIES
from tripletune.eval import Task, code_of_task
from tripletune.llm.question_client import load_prompts
from tripletune.rag import systems

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/guide/own_system.md").read_text(encoding="utf-8")
TWICE, MINE = (text.split("```")[0] for text in PAGE.split("```python\n")[1:])
REPLY = """
from tripletune.data_builders.world.oracle_replies import REPLIES

REPLIES["twice.reword"] = lambda oracle, messages: messages[-1]["content"]
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    assert run("build world", "--output", folder, "--train", 0, "--validation", 0, "--test", 4).code == 0
    return folder


@pytest.fixture
def package(tmp_path):
    """The package of the guide's system, installed beside its metadata."""
    home = tmp_path / "site"
    (home / "twice").mkdir(parents=True)
    (home / "twice/__init__.py").write_text(f"{TWICE}\n\n{REPLY}")
    (home / "twice/twice_reword.md").write_text("Reword the question.")
    about = home / "twice-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: twice\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[tripletune.rag.systems]\ntwice = twice\n")
    return home


@pytest.fixture
def evaluate(package, world, tmp_path, monkeypatch):
    """A function that runs `eval run --system twice` into one folder, each time as a new process would."""
    monkeypatch.syspath_prepend(str(package))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def forget():
        sys.modules.pop("twice", None)
        REPLIES.pop("twice.reword", None)
        plugins._added_modules.cache_clear()
        load_prompts.cache_clear()
        importlib.invalidate_caches()

    def evaluated(*words):
        forget()
        place = ("--data", world / "test.jsonl", "--corpus", world / "test.corpus.jsonl", "--oracle", world / "test")
        return run(
            "eval", "run", "--system", "twice", "--task", "hotpotqa", *place, "--output", tmp_path / "out", *words
        )

    yield evaluated
    forget()


def test_it_answers_is_kept_apart_from_a_changed_one_and_says_when_nothing_was_asked(evaluate, package, tmp_path):
    first = evaluate()
    assert first.code == 0, first.err
    assert "had results" not in first.out
    rows = read_lines(tmp_path / "out/results.jsonl")
    assert [len(row["trace"]["steps"]) for row in rows] == [2] * 4
    assert rows[0]["trace"]["tallies"] == {"calls.twice.answer": 1, "calls.twice.reword": 1}
    settings = json.loads((tmp_path / "out/settings.json").read_text())
    assert list(settings["files"]) == [
        "twice/__init__.py", "twice/twice_reword.md", "answer_passages", "answer_closed_book",
    ]  # fmt: skip
    assert settings["options"]["reword_tokens"] == 64

    again = evaluate()
    assert again.code == 0
    assert "4 of 4 questions had results; none was asked" in again.out
    assert "per second" not in again.out

    lines = (tmp_path / "out/results.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "out/results.jsonl").write_text("".join(lines[:1]))
    assert "1 of 4 questions had results; 3 were asked" in evaluate().out

    (package / "twice/twice_reword.md").write_text("Say it in other words.")
    changed = evaluate()
    assert changed.code == 2
    assert "results of another run: files.twice/twice_reword.md has changed" in changed.err

    refused = evaluate("--max-plan-tokens", "20", "--set", "evidence=text")
    assert refused.code == 2
    assert "no option 'max_plan_tokens'" in refused.err
    assert "no option 'evidence'" in refused.err


def test_the_package_of_the_guide_is_installed_with_its_prompts(tmp_path):
    script = next(block for block in PAGE.split("```bash\n") if block.startswith("mkdir")).split("```")[0]
    script = script.replace(
        "pip install", f"{sys.executable} -m pip install -q --no-deps --no-build-isolation --target site"
    )
    (tmp_path / "twice/twice").mkdir(parents=True)
    (tmp_path / "twice/twice/__init__.py").write_text(TWICE)
    done = subprocess.run(["bash", "-ec", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site/twice/twice_reword.md").read_text().startswith("Reword the question")
    (about,) = (tmp_path / "site").glob("twice-*.dist-info")
    assert (about / "entry_points.txt").read_text().split("\n")[:2] == ["[tripletune.rag.systems]", "twice = twice"]


def test_a_package_without_its_prompts_is_reported_as_such(evaluate, package):
    (package / "twice/twice_reword.md").unlink()
    failed = evaluate()
    assert failed.code == 2
    assert "lacks the prompt twice_reword.md: an installed package needs its prompts as package data" in failed.err


def test_the_retriever_of_the_guide_is_a_system_without_a_model(package, world, tmp_path, monkeypatch):
    (package / "mine.py").write_text(MINE)
    (package / "twice-1.0.dist-info/entry_points.txt").write_text("[tripletune.rag.systems]\nmine = mine\n")
    monkeypatch.syspath_prepend(str(package))
    plugins._added_modules.cache_clear()
    place = ("--data", world / "test.jsonl", "--corpus", world / "test.corpus.jsonl", "--output", tmp_path / "out")
    try:
        done = run("eval", "run", "--system", "mine", "--task", "hotpotqa", "--top-k", "3", *place)
        assert done.code == 0, done.err
        assert "first@5" in json.loads((tmp_path / "out/metrics.json").read_text())["recall"]
        rows = read_lines(tmp_path / "out/results.jsonl")
        # BM25 finds only passages that share a word with the question.
        assert max(len(row["trace"]["steps"][0]["passages"]) for row in rows) == 3
        assert "found passages are not in" not in done.err
        refused = run("eval", "run", "--system", "mine", "--task", "hotpotqa", *place, "--llm", "openai:m")
        assert "--system mine calls no model" in refused.err

        sys.modules.pop("mine", None)
        hit = 'Retrieved(Passage(hit.passage.title, hit.passage.text, "wrong"), 1.0)'
        imports = (
            "from tripletune.core.data.passages import Passage\nfrom tripletune.rag.search.retrievers import Retrieved"
        )
        wrong_ids = MINE.replace("ranked[: options.top_k]", f"[{hit} for hit in ranked]")
        (package / "mine.py").write_text(f"{imports}\n{wrong_ids}")
        wrong = run("eval", "run", "--system", "mine", "--task", "hotpotqa", *place, "--overwrite")
        assert "1 of 1 found passages are not in" in wrong.err
        assert "for example 'wrong'" in wrong.err
    finally:
        sys.modules.pop("mine", None)
        plugins._added_modules.cache_clear()


def test_the_guide_explains_every_argument_of_a_system():
    explained = re.findall(r"^\| `(\w+)` \|", PAGE.split("## The arguments")[1].split("## ")[0], re.MULTILINE)
    assert sorted(explained) == sorted(item.name for item in dataclasses.fields(systems.System))


def test_custom_prompts_count_by_their_content_and_bad_ones_end_the_run_once(evaluate, tmp_path):
    custom = tmp_path / "custom"
    custom.mkdir()
    (custom / "twice_reword.md").write_text("Reword!")
    words = ("--set", f"prompts={custom}")
    assert evaluate(*words).code == 0
    (custom / "twice_reword.md").write_text("Reword it!")
    assert "files.prompts/twice_reword.md has changed" in evaluate(*words).err

    (custom / "ras_plan_chat.md").write_text("Plan.")
    ended = evaluate(*words, "--overwrite")
    assert ended.code == 2
    assert ended.err.count("there is no prompt with this name") == 1
    assert "the prompts are twice_reword.md, answer_passages.md, answer_closed_book.md" in ended.err
    assert "each has its own folder: --set SYSTEM.prompts=FOLDER" in ended.err


def test_a_bug_shows_its_traceback_once_and_its_place_in_each_row(evaluate, package, tmp_path):
    code = package / "twice/__init__.py"
    code.write_text(code.read_text().replace("options.reword_tokens", "options.nothing"))
    failed = evaluate()
    assert failed.code == 1
    assert failed.err.count("Traceback (most recent call last)") == 1
    assert "options.nothing" in failed.err
    line = 1 + code.read_text()[: code.read_text().index("options.nothing")].count("\n")
    errors = {row["trace"]["error"] for row in read_lines(tmp_path / "out/results.jsonl")}
    problem = "AttributeError: 'TwiceOptions' object has no attribute 'nothing'"
    assert errors == {f"{problem} (twice/__init__.py, line {line})"}


def test_a_role_that_the_oracle_does_not_know_ends_the_run(evaluate, package):
    code = package / "twice/__init__.py"
    code.write_text(code.read_text().replace(REPLY, ""))
    failed = evaluate()
    assert failed.code != 0
    assert failed.err.count("no reply for the role twice.reword: add a function to REPLIES") == 1


@pytest.mark.parametrize("words", [("--teacher-seed", "1"), ("--teacher-temperature", "0.7")])
def test_an_oracle_has_no_seeds(evaluate, words):
    refused = evaluate(*words)
    assert refused.code == 2
    assert "runs of several seeds would be copies" in refused.err


def test_a_role_that_the_oracle_does_not_know_stops_no_other_system(evaluate, package, tmp_path):
    code = package / "twice/__init__.py"
    code.write_text(code.read_text().replace(REPLY, ""))
    assert evaluate("--systems", "twice,ircot").code != 0
    rows = read_lines(tmp_path / "out/hotpotqa/ircot/results.jsonl")
    assert [row["trace"]["error"] for row in rows] == [""] * 4


def test_a_readers_and_a_metrics_code_belong_to_the_task_and_a_trainings_code_to_its_run(evaluate, package):
    (package / "twice/scores.py").write_text("def shared_words(prediction, answers):\n    return 0.5\n")
    (package / "twice/rows.py").write_text("def read_questions(location, issues=None, source=''):\n    yield from ()\n")
    (package / "twice/training.py").write_text(
        "from tripletune.train.tasks.text_to_triples import PairTask\n\n\nclass TASK(PairTask):\n    pass\n"
    )
    groups = {"eval.metrics": "scores", "data_builders.readers": "rows", "train.tasks": "training"}
    points = [f"[tripletune.{group}]\ntwice_{module} = twice.{module}" for group, module in groups.items()]
    (package / "twice-1.0.dist-info/entry_points.txt").write_text("\n".join(points))
    plugins._added_modules.cache_clear()

    assert code_of_task(Task("mine", "qa", ("f1",))) == {}
    scored = code_of_task(Task("mine", "qa", ("f1", "shared_words")))
    assert "twice/scores.py" in scored
    assert "twice/rows.py" not in scored
    assert "twice/rows.py" in code_of_task(Task("mine", "twice_rows", ("f1",)))

    task = load_from("tripletune.train.tasks", "twice_training", "training task").TASK
    before = plugins.code_of_class("tripletune.train.tasks", task)
    (package / "twice/training.py").write_text("# another\n")
    assert plugins.code_of_class("tripletune.train.tasks", task) != before != ""
    assert plugins.code_of_class("tripletune.train.tasks", task.__mro__[1]) == ""


def test_a_system_that_declares_no_files_has_those_that_its_options_name(world, tmp_path, monkeypatch):
    folder = tmp_path / "systems"
    folder.mkdir()
    code = TWICE.replace(
        "reword_tokens: int", 'examples: str = setting("", "file of examples")\n    reword_tokens: int'
    )
    (folder / "twice.py").write_text(f"{code}\n\n{REPLY}")
    (folder / "twice_reword.md").write_text("Reword the question.")
    (tmp_path / "examples.txt").write_text("An example.")
    monkeypatch.setattr(systems, "__path__", [*systems.__path__, str(folder)])
    place = ("--data", world / "test.jsonl", "--corpus", world / "test.corpus.jsonl", "--oracle", world / "test")
    words = ("--system", "twice", "--task", "hotpotqa", *place, "--output", tmp_path / "out")
    words += ("--set", f"examples={tmp_path / 'examples.txt'}")
    try:
        done = run("eval", "run", *words)
        assert done.code == 0, done.err
        files = json.loads((tmp_path / "out/settings.json").read_text())["files"]
        names = ["twice.py", "twice_reword.md", "examples", "answer_passages", "answer_closed_book"]
        assert [Path(name).name for name in files] == names
        (tmp_path / "examples.txt").write_text("Another example.")
        assert "files.examples has changed" in run("eval", "run", *words).err
    finally:
        sys.modules.pop("tripletune.rag.systems.twice", None)
        REPLIES.pop("twice.reword", None)
        del systems.twice
