"""The demo's commands are those of the programs; a demo that was stopped continues where it was."""

import importlib.util
import shlex
import sys
from pathlib import Path

import pytest

from tripletune.__main__ import PROGRAMS
from tripletune.recipes._steps import RecipeStep

ROOT = Path(__file__).parents[2]


@pytest.fixture
def demo(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("demo", ROOT / "recipes" / "demo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "HOME", tmp_path)
    monkeypatch.setattr(sys, "argv", ["demo"])
    return module


def test_every_step_names_a_program(demo):
    for _, command, _ in demo.STEPS:
        program, *words = shlex.split(command)
        assert program == "accelerate" or " ".join(words[:2]) in PROGRAMS or words[0] in PROGRAMS


def test_more_seeds_are_more_steps_that_end_in_one_report(demo):
    assert demo.steps_of_seeds(1) == demo.STEPS
    steps = demo.steps_of_seeds(3)[len(demo.STEPS) :]
    for _, command, _ in steps:
        words = shlex.split(command)
        assert words[0] == "accelerate" or " ".join(words[1:3]) in PROGRAMS or words[1] in PROGRAMS
    assert [step.command.count("--seed 10") for step in steps] == [1, 0, 1, 0, 0]
    assert steps[-1].command.count("/after") == 3


def test_what_was_done_is_not_done_again_and_a_failed_step_ends_the_demo(demo, tmp_path, monkeypatch, capfd):
    (tmp_path / "done").touch()
    steps = [
        RecipeStep("One", "tripletune nothing", "done"),
        RecipeStep("Two", "tripletune --help", "two"),
        RecipeStep("Three", "tripletune x", ""),
    ]
    monkeypatch.setattr(demo, "STEPS", steps)
    with pytest.raises(SystemExit, match="exit code 2"):
        demo.main()
    out = capfd.readouterr().out
    assert "  $ tripletune nothing\n  done before" in out
    assert "usage: tripletune" in out
