"""Expert iteration's steps are commands of the programs; rounds build on each other and continue where they stopped."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tripletune.data_builders.trajectories import TrajectoryOptions
from tripletune.eval.suites.questions import RunSpec
from tripletune.models.options import load_config, parse_command_line
from tripletune.recipes import expert_iteration
from tripletune.recipes.expert_iteration import ExpertConfig, run, steps
from tripletune.train.tasks.cirag_distill import StudentConfig

CONFIG = Path(__file__).resolve().parents[2] / "recipes" / "configs" / "smollm2_135m_expert_cpu.yaml"


def test_every_step_is_a_command_that_can_be_given_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CONFIG.parents[2])
    config = load_config(ExpertConfig, CONFIG)
    students, trained = [], []
    for _, command, _ in steps(config):
        words = shlex.split(command)
        if words[1:3] == ["eval", "run"]:
            given = RunSpec.parse(words[3:]).options
            students.append((given.integrator, given.student_seed, given.data))
        elif words[0] == "accelerate":
            student, _ = parse_command_line(StudentConfig, "", words[words.index("recipes/cirag_distill.py") + 1 :])
            trained.append((student.model.adapter, student.data.train, student.output_dir))
    home, start = config.output_dir, config.student
    second = f"{home}/round-1/student"
    assert [one[0] for one in students] == [start] * 5 + [second] * 5 + [f"{home}/round-2/student"]
    assert [one[1] for one in students] == [None, 0, 1, 2, 3] * 2 + [None]
    assert [one[2].endswith("test.jsonl") for one in students] == [True, *[False] * 4] * 2 + [True]
    assert trained[0] == (start, [f"{home}/round-1/trajectories"], second)
    assert trained[1][0] == second
    assert TrajectoryOptions(min_score=("exact_match=1",), min_recall=1, no_repairs=True, shortest=1).shortest == 1


def test_it_continues_and_refuses_other_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    called: list[tuple[str, bool]] = []

    def step(command: str, done: bool) -> int:
        called.append((command, done))
        if not done and "--output " in command:
            folder = Path(shlex.split(command)[-1])
            folder.mkdir(parents=True)
            (folder / "metrics.json").touch()
            (folder / "README.md").touch()
        return 7 if "tripletune train" in command else 0

    monkeypatch.setattr(expert_iteration, "run_step", step)
    words = ["--student", "s", "--loop", "l", "--questions", "q", "--exam", "e", "--train", "tripletune train x"]
    words += ["--samples", "2", "--rounds", "1", "--output_dir", str(tmp_path / "out")]
    assert [run(words), run(words)] == [7, 7]
    assert [done for _, done in called] == [False] * 5 + [True] * 4 + [False]
    assert run([*words, "--keep=--no-repairs"]) == 2
    assert "is of another run" in capsys.readouterr().err
