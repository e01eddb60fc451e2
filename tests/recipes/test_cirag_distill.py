"""The distillation recipe as people run it: a whole run, a real kill, and one clear message for every bad input.

Training a decoder needs TRL; what comes before it is tested without.
"""

from __future__ import annotations

import json
import logging
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tripletune.models.data.passages import Passage
from tripletune.models.data.trajectories import Trajectory
from tripletune.models.data.triples import Triple
from tripletune.models.options import load_config, problems, to_yaml
from tripletune.rag.systems.cirag.integration import Decision, Round, messages_of, write_decision
from tripletune.rag.triples.sentences import Fact
from tripletune.train.tasks.cirag_distill import StudentConfig
from tripletune.train.tasks.cirag_on_policy import OnPolicyConfig

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "cirag_distill.py"
PASSAGE = Passage("Kelm", "Kelm is a town.")
Config = Callable[..., StudentConfig]
Call = Callable[[list[str]], str]
STEPS = {"train.max_steps": 6, "train.save_steps": 2, "train.eval_steps": 3}

# Runs the recipe and kills this process, as `kill -9` does, after a step.
KILLER = """
import os, runpy, signal, sys
step = int(sys.argv[1])
sys.argv = sys.argv[2:]
from tripletune.train.engine import LossLog
original = LossLog.on_step_end
def on_step_end(self, args, state, control, **kwargs):
    original(self, args, state, control, **kwargs)
    if state.global_step == step:
        os.kill(os.getpid(), signal.SIGKILL)
LossLog.on_step_end = on_step_end
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def facts(name: str, count: int = 2) -> tuple[Fact, ...]:
    return tuple(Fact(Triple(name, "saw", f"Kelm {n}"), PASSAGE, "") for n in range(count))


def trajectory(number: int, teacher: str = "oracle") -> Trajectory:
    """Two rounds with short turns."""
    name = f"Ada {number}"
    first = Decision("One.", facts(name)[:1], f"Who is {name}?")
    turns = (
        *messages_of("Go.", f"Whom did {name} see?", facts(f"Bo {number}"), [Round(facts(name), first)]),
        {"role": "assistant", "content": write_decision(Decision("All.", facts(f"Bo {number}")[:1], ""))},
    )
    flags = tuple(turn["role"] == "assistant" for turn in turns)
    return Trajectory(f"q{number}:0", f"q{number}", "cirag.integrate", teacher, turns, flags)  # type: ignore[arg-type]


def write(folder: Path, split: str, rows: list[Trajectory]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row.to_json(), ensure_ascii=False) + "\n" for row in rows)
    (folder / f"{split}-00000.jsonl").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Eight questions to train on, two of them validation's by mistake, and two to validate with."""
    folder = write(tmp_path / "data", "train", [trajectory(n) for n in range(8)])
    return write(folder, "validation", [trajectory(n) for n in (0, 1, 8)])


@pytest.fixture
def make_distill_config(tmp_path: Path, tiny_llama: Path, data: Path) -> Config:
    """A run on a tiny model that takes a second."""

    def make(overrides: dict[str, Any] | None = None) -> StudentConfig:
        values = {
            "output_dir": str(tmp_path / "run"),
            "model.base": str(tiny_llama),
            "model.dtype": "float32",
            "model.lora_rank": 4,
            "model.lora_dropout": 0.1,
            "data.train": [str(data)],
            "data.max_tokens": 1024,
            "data.max_prompt_tokens": 900,
            "train.batch_size": 2,
            "train.learning_rate": 0.01,
            "train.bf16": "false",
            "train.logging_steps": 1,
            "train.eval_generate_records": 2,
            "train.eval_max_new_tokens": 4,
            **(overrides or {}),
        }
        return load_config(StudentConfig, None, values)

    return make


def command_line(config: StudentConfig, tmp_path: Path) -> list[str]:
    path = tmp_path / f"{Path(config.output_dir).name}.yaml"
    path.write_text(to_yaml(config))
    return [str(RECIPE), "--config", str(path)]


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Call]:
    """Runs the recipe's command line in this process and returns its error message ("" for success)."""
    handlers, level = logging.root.handlers[:], logging.root.level

    def call(argv: list[str]) -> str:
        monkeypatch.setattr(sys, "argv", argv)
        code = 0
        try:
            runpy.run_path(argv[0], run_name="__main__")
        except SystemExit as stop:
            code = int(stop.code or 0)
        if code == 0:
            return ""
        errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert (code, len(errors)) == (2, 1)
        return errors[0]

    yield call
    logging.root.handlers[:], logging.root.level = handlers, level


def lines(config: StudentConfig, name: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (Path(config.output_dir) / name).read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def test_a_run_and_its_student(make_distill_config: Config, tmp_path: Path, in_process: Call) -> None:
    pytest.importorskip("trl", reason="TRL is not installed")
    other = write(tmp_path / "other", "train", [trajectory(n, "gpt") for n in (20, 21)])
    config = make_distill_config({**STEPS, "model.lora_dropout": 0.0})
    config.data.train.append(str(other))
    assert in_process(command_line(config, tmp_path)) == ""
    found = lines(config, "losses.jsonl")
    assert [line["step"] for line in found] == list(range(1, 7))
    assert found[-1]["loss"] < found[0]["loss"]
    evaluations = lines(config, "evaluations.jsonl")
    assert [line["step"] for line in evaluations] == [3, 6]
    assert {"loss", "core_f1", "stop_accuracy", "malformed"} <= evaluations[0].keys()
    folder = Path(config.output_dir) / "final"
    result = json.loads((folder / "training.json").read_text())
    assert (result["steps"], result["rows"]) == (6, 8)
    assert result["teachers"] == {"gpt": 2, "oracle": 6}
    assert result["tokenised"]["train"]["rounds"] == 16
    assert json.loads((folder / "student.json").read_text())["max_prompt_tokens"] == 900
    assert (folder / "prompt.md").read_text() == "Go.\n"

    # The student in the place where the loop loads it from.
    from tripletune.models.loading import load_causal_lm

    model, tokenizer = load_causal_lm(config.output_dir)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert tokenizer.chat_template

    from tripletune.checkpoints.__main__ import main as checkpoints

    exported = tmp_path / "exported"
    assert checkpoints(["export", config.output_dir, "--output", str(exported)]) == 0
    assert (exported / "prompt.md").read_text() == "Go.\n"
    assert "trajectories of `gpt` | 2" in (exported / "README.md").read_text()


@pytest.mark.slow
def test_a_kill_leaves_no_trace(make_distill_config: Config, tmp_path: Path, in_process: Call) -> None:
    pytest.importorskip("trl", reason="TRL is not installed")
    whole = make_distill_config({**STEPS, "output_dir": str(tmp_path / "whole")})
    assert in_process(command_line(whole, tmp_path)) == ""
    killed = make_distill_config({**STEPS, "output_dir": str(tmp_path / "killed")})
    arguments = command_line(killed, tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", KILLER, "3", *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == -9, done.stderr
    assert [line["step"] for line in lines(killed, "losses.jsonl")] == [1, 2, 3]
    assert in_process(arguments) == ""
    for name in ("losses.jsonl", "evaluations.jsonl"):
        assert lines(killed, name) == lines(whole, name)
    one, other = (load_file(tmp_path / name / "final" / "adapter_model.safetensors") for name in ("whole", "killed"))
    assert all(one[name].equal(other[name]) for name in one | other)


def test_a_dry_run_trains_nothing(
    make_distill_config: Config, tmp_path: Path, in_process: Call, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_distill_config()
    assert in_process([*command_line(config, tmp_path), "--dry-run", "--train.epochs", "5"]) == ""
    shown = capsys.readouterr().out
    assert "epochs: 5.0" in shown
    # Six trajectories: two questions are validation's.
    assert "rounds 12" in shown
    assert "15 optimiser steps of 2 rows" in shown
    assert shown.count("⟦[[## thought ##]]") == shown.count("<|im_end|>⟧") == 2
    assert not (Path(config.output_dir) / "losses.jsonl").exists()
    assert not (Path(config.output_dir) / "final").exists()


def test_a_dry_run_says_which_rounds_are_too_long(
    make_distill_config: Config, tmp_path: Path, in_process: Call, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_distill_config({"data.max_tokens": 400, "data.max_prompt_tokens": 390})
    assert in_process([*command_line(config, tmp_path), "--dry-run"]) == ""
    assert "6 of 12 rounds do not fit into data.max_tokens and are left out" in capsys.readouterr().err


def no_data(config: StudentConfig) -> None:
    config.data.train = ["/nowhere/data"]


def no_shards(config: StudentConfig) -> None:
    config.data.train_split = "test"


def bad_line(config: StudentConfig) -> None:
    path = Path(config.data.train[0]) / "train-00000.jsonl"
    path.write_text(path.read_text() + '{"id": "1", "mess\n')


def no_trajectory(config: StudentConfig) -> None:
    (Path(config.data.train[0]) / "train-00000.jsonl").write_text('{"id": "1"}\n')


def held_out(config: StudentConfig) -> None:
    write(Path(config.data.train[0]), "validation", [trajectory(n) for n in range(9)])


def no_room(config: StudentConfig) -> None:
    config.data.max_tokens, config.data.max_prompt_tokens = 80, 70


def no_template(config: StudentConfig) -> None:
    base = Path(config.output_dir).parent / "bare"
    base.mkdir()
    for path in Path(config.model.base).iterdir():
        if path.name != "chat_template.jinja":
            (base / path.name).write_bytes(path.read_bytes())
    settings = json.loads((base / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (base / "tokenizer_config.json").write_text(json.dumps(settings))
    config.model.base = str(base)


def thinking_template(config: StudentConfig) -> None:
    path = Path(config.output_dir).parent / "template.jinja"
    path.write_text("{% for m in messages %}<think></think>{{ m.content }}<|im_end|>{% endfor %}")
    config.data.chat_template = str(path)


def no_such_model(config: StudentConfig) -> None:
    config.model.base = "/nowhere/model"


def wrong_targets(config: StudentConfig) -> None:
    config.model.lora_targets = ["query_key_value"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (no_data, "no such file or folder: /nowhere/data"),
        (no_shards, "no test*.jsonl"),
        (bad_line, "train-00000.jsonl:9: not valid JSON"),
        (no_trajectory, "train-00000.jsonl:1: the trajectory lacks question_id"),
        (held_out, "holds no trajectories but those of validation questions"),
        (no_room, "rounds_too_long 12"),
        (no_template, "has no chat template"),
        (thinking_template, "data.chat_template"),
        (no_such_model, "'/nowhere/model': there is no such folder"),
        (wrong_targets, "['query_key_value'] do not exist"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_bad_input_is_one_clear_message(
    damage: Callable[[StudentConfig], None],
    message: str,
    make_distill_config: Config,
    tmp_path: Path,
    in_process: Call,
) -> None:
    config = make_distill_config()
    damage(config)
    said = in_process(command_line(config, tmp_path))
    assert message in said
    assert not (Path(config.output_dir) / "final").exists()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"data.rounds": "apart"}, "data.rounds: 'apart' is not one of together, separate"),
        ({"data.learn": "all"}, "data.learn: 'all' is not one of decisions, everything"),
        ({"data.train": []}, "data.train: name at least one folder"),
        ({"data.train": ["a=1.5"]}, "data.train: 'a=1.5': the share must be above 0 and at most 1"),
        ({"data.max_prompt_tokens": 8192}, "data.max_prompt_tokens: 8192 must be above 0 and below data.max_tokens"),
        (
            {"data.max_tokens": 1024},
            "data.max_prompt_tokens is not set, and data.max_tokens 1024 leaves prompts only 1",
        ),
        ({"data.chat_template": "/nowhere.jinja"}, "data.chat_template: there is no file /nowhere.jinja"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_settings_that_make_no_sense(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="problem") as raised:
        load_config(StudentConfig, None, setting)
    assert message in str(raised.value)


def test_settings_of_on_policy_that_make_no_sense() -> None:
    setting = {"train.divergence": 1.2, "train.packing": True, "data.rounds": "separate", "data.learn": "everything"}
    with pytest.raises(ValueError, match="problem") as raised:
        load_config(OnPolicyConfig, None, setting)
    for message in (
        "train.divergence: 1.2 must be at least 0 and at most 1",
        "train.teacher: name the teacher",
        "nothing to pack",
        "data.rounds",
        "data.learn",
    ):
        assert message in str(raised.value)


def test_the_defaults_are_the_papers() -> None:
    config = StudentConfig()
    assert problems(config) == []
    assert (config.model.lora_rank, config.train.epochs, config.train.batch_size) == (64, 2, 2)
    assert (config.train.learning_rate, config.data.learn, config.data.rounds) == (2e-4, "decisions", "together")
