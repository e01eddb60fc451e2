"""`tripletune doctor` and `--version`, completion, and what other installed packages add."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes import Client
from tripletune import doctor
from tripletune.core.calls import CallError
from tripletune.core.options import CONFIGS, load_config
from tripletune.core.program import code_version

ROOT = Path(__file__).resolve().parents[1]
SYSTEM = '''
"""Answers with the question."""
from tripletune.rag import Trace
from tripletune.rag.systems import LoopOptions, System

async def run(question, search, tools, options):
    return Trace(question, answer=question.upper(), stop_reason="single_pass")

SYSTEM = System("shout", run, needs_corpus=lambda options: False, model="none")
'''


def tripletune(*words, **environment):
    known = {**os.environ, **environment}
    known["PYTHONPATH"] = os.pathsep.join([environment.get("PYTHONPATH", ""), str(ROOT)])
    command = [sys.executable, "-m", "tripletune", *words]
    return subprocess.run(command, capture_output=True, text=True, env=known, check=False)


@pytest.fixture
def plugin(tmp_path):
    """The folder of an installed package that adds a system, and one that can't be imported."""
    about = tmp_path / "shouting-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: shouting\nVersion: 1.0\n")
    lines = ["[tripletune.rag.systems]", "shout = shouting.loop", "broken = shouting.gone", "ras = shouting.loop"]
    (about / "entry_points.txt").write_text("\n".join(lines))
    (tmp_path / "shouting").mkdir()
    (tmp_path / "shouting/loop.py").write_text(SYSTEM)
    return str(tmp_path)


def test_another_package_adds_a_system(plugin):
    done = tripletune("ask", "why?", "--system", "shout", PYTHONPATH=plugin)
    assert done.stdout.splitlines()[-1] == "Answer: WHY?", done.stderr
    done = tripletune("ask", "why?", "--system", "broken", PYTHONPATH=plugin)
    assert done.returncode == 2
    assert done.stderr.startswith("error: system 'broken' can't be loaded (shouting.gone of the package shouting)")
    done = tripletune("ask", "why?", "--system", "ras", PYTHONPATH=plugin)
    assert "--system ras needs triples" in done.stderr, "no package takes the place of a system here"


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("tripletune as", {"ask"}),
        ("tripletune build ", {"corpus", "pairs", "passages", "questions", "subq", "trajectories", "world"}),
        ("tripletune train cirag-o", {"cirag-on-policy"}),
        ("tripletune train ras --train.epo", {"--train.epochs"}),
        ("tripletune eval comp", {"compare"}),
        ("tripletune eval run --retr", {"--retriever"}),
        ("tripletune ledger ex", {"export"}),
        ("tripletune ask --retriever b", {"bm25"}),
    ],
)
def test_the_tab_key_offers_programs_commands_options_and_choices(line, offered, tmp_path):
    pytest.importorskip("argcomplete")
    out = tmp_path / "offered"
    about = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_STDOUT_FILENAME": str(out)}
    done = tripletune(**about, COMP_LINE=line, COMP_POINT=str(len(line)), COMP_TYPE="9")
    assert {word.strip() for word in out.read_text().splitlines()} == offered, done.stderr


def test_a_configuration_that_comes_along_has_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    from tripletune.train.tasks.ras import TASK

    by_name = load_config(TASK.Config, "smollm2_135m_ras_demo")
    assert by_name == load_config(TASK.Config, CONFIGS / "smollm2_135m_ras_demo.yaml")
    with pytest.raises(FileNotFoundError, match=r"no such file, and .*did you mean smollm2_135m_ras_demo"):
        load_config(TASK.Config, "smollm2_135m_ras_dem")
    with pytest.raises(FileNotFoundError, match=r"no such configuration file: x\.yaml"):
        load_config(TASK.Config, "x.yaml")


def test_the_version_names_code_and_libraries():
    done = tripletune("--version")
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert (done.returncode, names) == (0, ["tripletune", "python", "torch", "transformers"])
    assert " ".join(code_version().values()) in done.stdout.splitlines()[0]


def rows_of(capsys, *words):
    code = doctor.main(words)
    lines = capsys.readouterr().out.splitlines()
    return code, {line[9:31].strip(): (line[:8].strip(), line[32:]) for line in lines}


def test_doctor_says_what_is_missing_and_what_to_do(monkeypatch, capsys, tmp_path):
    wanted = ["numpy>=1", "absent>=2", "pyyaml>=999", "ray[data]>=2; extra == 'ray'", "other; sys_platform == 'none'"]
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: wanted)
    there = {"numpy": "2.1", "pyyaml": "6.0"}
    monkeypatch.setattr(doctor, "versions", lambda names: {name: there.get(name, "not installed") for name in names})
    code, rows = rows_of(capsys)
    assert code == 1
    assert rows["numpy"] == ("ok", "2.1")
    assert rows["absent"] == ("broken", "not installed: pip install 'absent>=2'")
    assert rows["pyyaml"] == ("broken", "6.0: pip install 'pyyaml>=999'")
    assert rows["[ray]"] == ("missing", "ray not installed: pip install 'tripletune[ray]'")
    assert "other" not in rows
    assert rows["cpu"][0] == rows["temporary"][0] == "ok"


@pytest.mark.parametrize(
    ("reply", "state", "said"),
    [
        ("yes", "ok", "replies 'yes'"),
        (CallError("401. What to do: check the key"), "broken", "check the key"),
    ],
)
def test_doctor_asks_a_model_once(monkeypatch, capsys, reply, state, said):
    client = Client(reply)
    monkeypatch.setattr(doctor, "open_client", lambda options: client)
    monkeypatch.setattr(doctor, "_packages", lambda: ())
    code, rows = rows_of(capsys, "--llm", "openai:m@http://127.0.0.1:1/v1")
    assert rows["model"][0] == state
    assert said in rows["model"][1]
    assert (code, len(client.asked), client.closed) == (int(state == "broken"), 1, True)
