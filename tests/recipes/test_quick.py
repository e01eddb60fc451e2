"""Test of the first thing that a new user runs."""

import subprocess
import sys


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
