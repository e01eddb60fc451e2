"""The size that the project is kept to: lines, modules, the mean function, flags."""

import ast
import contextlib
import re
from pathlib import Path

import pytest

from tripletune.__main__ import PROGRAMS, main
from tripletune.models.program import names_in

ROOT = Path(__file__).parents[1]
ROOMS = ("benchmarks", "checkpoints", "data_builders", "eval", "models", "rag", "recipes", "serve", "train")
OWN = [
    *ROOT.glob("*.py"),
    *ROOT.glob("tripletune/*.py"),
    *(path for room in ROOMS for path in ROOT.glob(f"{room}/**/*.py")),
]


def lines_of(paths):
    return sum(path.read_text(encoding="utf-8").count("\n") for path in paths)


def test_lines_modules_and_functions():
    assert lines_of(OWN) <= 37_440
    assert len(OWN) <= 199
    assert lines_of(ROOT.glob("tests/**/*.py")) <= 28_640
    nodes = [node for path in OWN for node in ast.walk(ast.parse(path.read_text()))]
    sizes = [node.end_lineno - node.lineno + 1 for node in nodes if isinstance(node, ast.FunctionDef)]
    assert sum(sizes) / len(sizes) <= 11.8


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_flags_of_all_programs(monkeypatch, capsys):
    def flags(*words):
        monkeypatch.setattr("sys.argv", ["tripletune", *words, "--help"])
        with contextlib.suppress(SystemExit):
            main()
        text = capsys.readouterr().out
        choices = re.search(r"\{([a-z][a-z,-]+)\} \.\.\.", " ".join(text.split()))
        commands = names_in("tripletune.train.tasks") if words == ("train",) else choices and choices[1].split(",")
        if commands:
            return set().union(*(flags(*words, command.replace("_", "-")) for command in commands))
        return {(*words, flag) for flag in re.findall(r"^  (?:-\w(?: \w+)?, )?(--(?!help)\w[\w.-]*)", text, re.M)}

    found = set().union(*(flags(*name.split()) for name in PROGRAMS))
    assert 400 < len(found) <= 610
