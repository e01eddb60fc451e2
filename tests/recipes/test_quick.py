"""Test of the first thing that a new user runs."""

import re
import subprocess
import sys

from tests.cli import run
from tests.test_docs import Command, troubles_of
from tripletune.recipes._quick import _NEXT


def test_the_quick_demo_shows_both_searches_and_the_answer_from_any_folder(tmp_path):
    command = [sys.executable, "-m", "tripletune", "demo", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    lines = [line.strip() for line in done.stdout.splitlines()]
    searches = [line for line in lines if line.startswith("search ")]
    assert searches == [
        "search    Who directed The Orchard of Tiruva?",
        "search    When was Maria Bulmira born?",
    ]
    assert "triple    Maria Bulmira | Birth year | 1932" in lines
    assert "Answer: 1932" in lines
    assert done.stderr == ""
    assert list(tmp_path.iterdir()) == [], "it leaves nothing behind"
    commands = re.findall(r"^  (tripletune .*?)  +", done.stdout.partition("What comes next:")[2], re.MULTILINE)
    assert len(commands) == 3
    assert [trouble for command in commands for trouble in troubles_of(Command("demo --quick", command))] == []


def test_the_command_for_own_documents_runs_as_the_quick_demo_prints_it(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "note.md").write_text("# Note\n\nThe Orchard of Tiruva is a film.\n")
    (words,) = re.findall(r"^  tripletune build passages (.*?)  +", _NEXT, re.MULTILINE)
    places = {"FOLDER": tmp_path / "mine", "runs/mine": tmp_path / "passages"}
    done = run("build passages", *[places.get(word, word) for word in words.split()])
    assert done.code == 0, done.err
    assert "1 passage" in done.err + done.out
