"""Two processes give the rows and scores of one, also where some were killed: in one start of Python."""

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli import read_lines, write_lines
from tests.conftest import _writer
from tests.recipes.command_lines import ROOT
from tripletune.eval.__main__ import main
from tripletune.eval.result_log import ProcessPart, ResultLog

KILLED = 2


@pytest.fixture
def in_two_processes(tmp_path):
    """Runs command lines in two processes, which may be killed."""
    log = (tmp_path / "log").open("w+")
    words = [sys.executable, "-m", "tests.eval.suites.launched"]
    with subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True) as it:

        def start(*commands, killed=0):
            with socket.socket() as found:
                found.bind(("localhost", 0))
                port = found.getsockname()[1]
            print(json.dumps([port, killed, commands]), file=it.stdin, flush=True)
            assert json.loads(it.stdout.readline()) == [-9 if killed else 0] * 2, Path(log.name).read_text()[-2000:]

        yield start


@pytest.fixture
def commands(tmp_path, make_graph_llm, records):
    """What is evaluated, each in a folder of its name."""
    model, processor = make_graph_llm()
    model.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    _writer(tmp_path / "records")(records, "validation")
    towns = [(f"Town{n}", f"River{n}", f"Town{n} lies on the River{n}.") for n in range(9)]
    questions = [
        {"_id": town, "question": f"Which river flows through {town}?", "answer": river, "type": "bridge",
         "supporting_facts": [[town, 0]], "context": [[town, [fact]]]}
        for town, river, fact in towns
    ]  # fmt: skip
    triples = [{"title": town, "text": fact, "triples": [[town, "lies on", river]]} for town, river, fact in towns]
    for name, rows in (("questions", questions), ("triples", triples)):
        write_lines(tmp_path / f"{name}.jsonl", rows)
    shared = ["--model", str(tmp_path / "model"), "--max-plan-tokens", "6", "--max-answer-tokens", "6"]
    files = ["--data", str(tmp_path / "questions.jsonl"), "--triples", str(tmp_path / "triples.jsonl")]
    return {
        "records": ["records", "--data", str(tmp_path / "records"), "--controls", "--training-data",
                    str(tmp_path / "records" / "validation-00000.jsonl"), *shared],
        "run": ["run", "--system", "ras", "--task", "hotpotqa", *files, *shared],
    }  # fmt: skip


def to(folder, command):
    return [*command, "--output", str(folder)]


def outcome(folder):
    """Rows, scores and settings, without times."""

    def timeless(value):
        if isinstance(value, dict):
            return {key: timeless(one) for key, one in value.items() if "seconds" not in key}
        return [timeless(one) for one in value] if isinstance(value, list) else value

    assert not list(folder.glob("results.*.jsonl")), "what processes have written is in one file"
    rows = read_lines(folder / "results.jsonl")
    metrics, settings = (json.loads((folder / f"{name}.json").read_text()) for name in ("metrics", "settings"))
    return timeless([rows, {name: value for name, value in metrics.items() if name != "session"}, settings])


@pytest.mark.slow
def test_two_processes_give_what_one_does_also_after_a_kill(tmp_path, commands, in_two_processes):
    wanted = {}
    for name, command in commands.items():
        assert main(to(tmp_path / f"{name}_by_one", command)) == 0
        wanted[name] = outcome(tmp_path / f"{name}_by_one")
    assert len({row["reply"] for row in wanted["records"][0]}) > 2
    in_two_processes(to(tmp_path / "killed", commands["records"]), killed=KILLED)
    for name, whole in (("results.jsonl", KILLED), ("results.*.1.jsonl", KILLED + 1)):
        (file,) = (tmp_path / "killed").glob(name)
        assert len(file.read_text().splitlines()) == whole + 1
    shutil.copytree(tmp_path / "killed", tmp_path / "later")
    two = {f"{name}_by_two": command for name, command in commands.items()} | {"later": commands["records"]}
    in_two_processes(*(to(tmp_path / name, command) for name, command in two.items()))
    assert main(to(tmp_path / "killed", commands["records"])) == 0
    for name in ("records_by_two", "later", "killed"):
        assert outcome(tmp_path / name) == wanted["records"]
    assert outcome(tmp_path / "run_by_two") == wanted["run"]
    session = json.loads((tmp_path / "later" / "metrics.json").read_text())["session"]
    assert session["records"] == len(wanted["records"][0]) - 2 * KILLED - 1


def test_rows_of_another_run_are_not_taken_in(tmp_path):
    def opened(limit, **options):
        return ResultLog(tmp_path, {"limit": limit}, **options)

    def left_behind(*names):
        first = opened(1)
        other = opened(1, part=ProcessPart(1, set()))
        for name in names:
            other.append({"id": name, "error": "no memory" if name == "failed" else ""})
        first.close(), other.close()

    left_behind("a")
    later = opened(2)
    assert later.done == set()
    later.close()
    fresh = opened(1, overwrite=True)
    assert fresh.done == set()
    fresh.close()
    left_behind("b", "failed")
    again = opened(1, retry_errors=True)
    assert again.done == {"b"}
    again.close()
