"""Expert iteration's steps are commands of the programs; rounds build on each other and continue where they stopped."""

import shlex
from pathlib import Path

import pytest

from tripletune.core.command_line import parse_command_line
from tripletune.core.config import load_config
from tripletune.core.options import ConfigError
from tripletune.eval.__main__ import parser
from tripletune.recipes import _steps
from tripletune.recipes.expert_iteration import ExpertConfig, expert_steps, run
from tripletune.train.tasks.cirag_distill import StudentConfig

CONFIG = Path(__file__).resolve().parents[2] / "recipes" / "configs" / "smollm2_135m_expert_cpu.yaml"


def test_every_step_is_a_command_that_can_be_given_alone(monkeypatch):
    monkeypatch.chdir(CONFIG.parents[2])
    config = load_config(ExpertConfig, CONFIG)
    students, kept, trained = [], [], []
    for _, command, _ in expert_steps(config):
        words = shlex.split(command)
        if words[1:3] == ["eval", "run"]:
            given = parser(words[2:]).parse_args(words[2:])
            students.append((given.integrator, given.student_seed and int(given.student_seed), given.data))
        elif words[1:3] == ["build", "trajectories"]:
            kept.append(words[words.index("--ledger") + 2 : words.index("--overwrite")])
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
    assert kept == [shlex.split("--min-score exact_match=1 --no-repairs --min-recall 1.0 --shortest 1")] * 2


def test_a_graph_llm_and_a_sampled_teacher(monkeypatch):
    monkeypatch.chdir(CONFIG.parents[2])
    values = {
        "loop": {"system": "ras", "task": "hotpotqa", "teacher": {"backend": "openai", "model": "m"}},
        "questions": {"data": "q"}, "exam": {"data": "e"}, "student": "s", "draw": "teacher", "first_sample": 20,
        "keep": {"system": "ras", "records": True}, "train": {"recipe": "ras_multitask", "config": "c.yaml"},
    }  # fmt: skip
    commands = [command for _, command, _ in expert_steps(load_config(ExpertConfig, None, values))]
    assert "--model s" in commands[1]
    assert "--teacher-seed 20" in commands[1]
    assert "--teacher-temperature 1" in commands[1]
    assert "--system ras --records --min-score exact_match=1 --no-repairs" in commands[5]
    assert "recipes/ras_multitask.py --config c.yaml --model.adapter s --data.train" in commands[6]


def test_options_that_do_not_exist_are_named():
    values = {"loop": {"system": "cirag", "task": "hotpotqa", "candidats": 5}, "questions": "{data: q}"}
    values |= {"exam": {"data": "e"}, "student": "s", "train": {"config": "c.yaml"}}
    with pytest.raises(ConfigError, match=r"loop, questions: .*'candidats'.*did you mean candidates\?"):
        load_config(ExpertConfig, None, values)


def test_it_continues_and_refuses_other_settings(tmp_path, monkeypatch, capsys):
    called: list[tuple[str, bool]] = []

    def step(command, done):
        called.append((command, done))
        if not done and "--output " in command:
            words = shlex.split(command)
            folder = Path(words[words.index("--output") + 1])
            folder.mkdir(parents=True)
            (folder / "metrics.json").touch()
            (folder / "README.md").touch()
        return 7 if "accelerate" in command else 0

    monkeypatch.setattr(_steps, "run_command", step)
    words = ["--student", "s", "--loop", "{system: cirag, task: hotpotqa}", "--questions", "{data: q}"]
    words += ["--exam", "{data: e}", "--train.config", "c.yaml"]
    words += ["--samples", "2", "--rounds", "1", "--output_dir", str(tmp_path / "out")]
    assert [run(words), run(words)] == [7, 7]
    assert [done for _, done in called] == [False] * 5 + [True] * 4 + [False]
    assert run([*words, "--keep.shortest", "2"]) == 2
    assert "other settings or input files of the step 'Round 1: keep the best runs'" in capsys.readouterr().err
    assert run([*words[:-4], "--rounds", "2", *words[-2:]]) == 7, "more rounds continue"
    (tmp_path / "out" / "config.yaml").unlink()
    assert run(words) == 2
    assert "did not make" in capsys.readouterr().err
