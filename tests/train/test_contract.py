"""What holds for everything that can be trained: one loss, its logs, exact resume, early refusals, a dry run."""

import json
import random
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from tests.cli import read_lines
from tests.fakes import damaged
from tests.train.test_grpo import make as make_grpo  # noqa: F401
from tests.train.test_grpo import world  # noqa: F401
from tripletune.core.plugins import names_in
from tripletune.models.run_folders import first_not_finite, stored_weights, weight_files
from tripletune.train import TASKS, engine_of, train
from tripletune.train.callbacks import Diverged
from tripletune.train.engine import EngineMixin
from tripletune.train.resume import newest_checkpoint

INTERLEAVED = {"data.prompt_order": "interleaved", "train.batch_size": 1}
PACKED = {"train.packing": True, "train.pack_tokens": 512, "train.batch_size": 1}
# Each way in which a task can train; a new task gets a line, and tiny data in `conftest.py:make_task`.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "ras": ("ras", {}, {}),
    "ras, interleaved": ("ras", INTERLEAVED, {}),
    "ras, all weights": ("ras", {"model.tune": "all"}, {"family": "smollm2"}),
    "text_to_triples": ("text_to_triples", {}, {}),
    "text_to_triples, encoder-decoder": ("text_to_triples", {}, {"seq2seq": True}),
    "text_to_triples, packed": ("text_to_triples", PACKED, {}),
    "text_to_triples, all weights": ("text_to_triples", {"model.tune": "all"}, {}),
    "chat": ("chat", {}, {}),
    "chat, everything": ("chat", {"data.learn": "everything"}, {}),
    "cirag_distill": ("cirag_distill", {}, {}),
    "cirag_on_policy": ("cirag_on_policy", {}, {}),
    "cirag_on_policy, other vocabulary": ("cirag_on_policy", {"train.max_reply_tokens": 12}, {"other": True}),
}
EACH = pytest.mark.parametrize("case", CASES)
STEPS = {"train.gradient_accumulation": 1, "train.max_steps": 6, "train.save_steps": 2, "train.eval_steps": 3}


def made(make, case, overrides=None):
    name, own, options = CASES[case]
    return make(name, {**own, **(overrides or {})}, **options)


@pytest.fixture(scope="module")
def whole():
    """Folders of uninterrupted runs, by case and number of steps."""
    return {}


def test_every_task_is_here():
    # Reinforcement learning has no rows with labels, and no evaluation: test_grpo.py.
    assert {name for name, _, _ in CASES.values()} | {"grpo"} == set(names_in(TASKS))


@EACH
def test_a_run_its_logs_and_its_result(case, make_task, tmp_path, monkeypatch, whole):
    evaluated: list[int] = []
    original = EngineMixin.evaluation_loop

    def loop(self, *args, **kwargs):
        evaluated.append(self.state.global_step)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(EngineMixin, "evaluation_loop", loop)
    task = made(make_task, case, STEPS)
    # The steps that the recipe shows, where it does; a resumed run below is one of `tripletune train`.
    recipe = {"ras": "ras_multitask"}.get(CASES[case][0], CASES[case][0])
    train(task, run=getattr(import_module(f"tripletune.recipes.{recipe}"), "run", None))
    assert evaluated == [3, 6], "the last step's evaluation is not repeated"
    whole[case, 6] = folder = tmp_path / "run"
    found = read_lines(folder / "losses.jsonl", "seconds")
    assert [line["step"] for line in found] == [1, 2, 3, 4, 5, 6]
    evaluations = read_lines(folder / "evaluations.jsonl", "seconds")
    assert [line["step"] for line in evaluations] == [3, 6]
    assert len(evaluations[0]) > 3, "scores of generated replies stand beside the loss"
    result = json.loads((folder / "final" / "training.json").read_text())
    assert result["steps"] == 6
    assert result["evaluation"]["eval_loss"] == evaluations[-1]["loss"]
    assert result["data"]["train"]["sha256"] == task.sources[0].digest
    assert not list(folder.rglob("training_args.bin"))
    assert not list(folder.rglob("README.md"))


# Records of the first case come in six steps an epoch: also killed behind the border of two, and in the second. Dropout
# is on, and evaluations draw random numbers of their own.
@pytest.mark.parametrize(
    ("case", "steps", "saved", "killed"), [*((case, 6, 2, 5) for case in CASES), ("ras", 12, 6, 7), ("ras", 12, 8, 9)]
)
def test_a_resumed_run_is_the_uninterrupted_run(case, steps, saved, killed, make_task, tmp_path, killed_behind, whole):
    settings = {**STEPS, "train.max_steps": steps, "train.save_steps": saved}
    if (case, steps) not in whole:
        whole[case, steps] = tmp_path / "whole"
        train(made(make_task, case, {**settings, "output_dir": str(tmp_path / "whole")}))

    parts = made(make_task, case, {**settings, "output_dir": str(tmp_path / "parts")})
    with killed_behind(killed):
        train(parts)
    last = killed // saved * saved
    assert newest_checkpoint(parts.config.output_dir) == tmp_path / "parts" / f"checkpoint-{last}"
    train(made(make_task, case, {**settings, "output_dir": str(tmp_path / "parts")}))
    for name in ("losses.jsonl", "evaluations.jsonl"):
        assert read_lines(tmp_path / "parts" / name, "seconds") == read_lines(whole[case, steps] / name, "seconds")
    folders = (whole[case, steps], tmp_path / "parts")
    one, other = (load_file(weight_files(folder / "final")[0]) for folder in folders)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def restless(*_, **__):
    random.random(), np.random.rand(), torch.rand(1)


# Dropout is on. The second run is watched in every way, by watchers that draw at every turn, killed, and left alone.
@pytest.mark.parametrize("case", [*CASES, "grpo"])
def test_a_run_that_is_watched_is_the_run_that_is_not(case, make_task, make_grpo, tmp_path, monkeypatch, killed_behind):  # noqa: F811
    pytest.importorskip("tensorboard")

    def begin(name, **settings):
        settings = {"train.max_steps": 6, "output_dir": str(tmp_path / name)} | {
            f"train.{setting}": value for setting, value in settings.items()
        }
        return make_grpo(settings) if case == "grpo" else made(make_task, case, settings)

    alone = {"logging_steps": 100, "save_steps": 4}
    train(begin("alone", **alone))
    watched = begin("watched", logging_steps=1, save_steps=2, **({} if case == "grpo" else {"eval_steps": 1}))
    watched.config.report_to = ["tensorboard"]
    begin_run, score, save = EngineMixin.begin_run, watched.score, watched.save
    events = dict.fromkeys((name for name in dir(TrainerCallback) if name.startswith("on_")), restless)

    def watch(self, task):
        begin_run(self, task)
        self.add_callback(type("Watcher", (TrainerCallback,), events)())

    monkeypatch.setattr(EngineMixin, "begin_run", watch)
    watched.score = lambda model: restless() or score(model)
    watched.save = lambda folder: restless() or save(folder)
    with killed_behind(5):
        train(watched)
    monkeypatch.setattr(EngineMixin, "begin_run", begin_run)
    train(begin("watched", **alone))
    one, other = (read_lines(tmp_path / name / "losses.jsonl", "seconds") for name in ("alone", "watched"))
    assert one == other
    files = (weight_files(tmp_path / name / "final")[0] for name in ("alone", "watched"))
    weights, others = map(load_file, files)
    assert all(torch.equal(others[name], weight) for name, weight in weights.items())


# By what is read, and by what is learned: a step so long that the next one computes nothing.
@pytest.mark.parametrize("wrong", ["base", "step"])
@pytest.mark.parametrize("case", [*CASES, "grpo"])
def test_a_run_that_is_not_finite_ends_without_a_result(case, wrong, make_task, make_grpo, tmp_path, tiny_model):  # noqa: F811
    change: dict[str, Any] = {"train.weight_decay": 1e30, "train.save_steps": 1}
    words = rf"not finite since step \d+ .*{tmp_path}/run/checkpoint-\d+\. Lower train\.learning_rate"
    if wrong == "base":
        base = tiny_model("t5" if "encoder-decoder" in case else "llama")
        change, words = {"model.base": str(damaged(base, tmp_path / "base"))}, "base: weights are not finite"
    change |= {"train.max_steps": 6, "train.gradient_accumulation": 1}
    with pytest.raises((Diverged, ValueError), match=words):
        train(make_grpo(change) if case == "grpo" else made(make_task, case, {"train.eval_steps": 3, **change}))
    assert not (tmp_path / "run" / "final").exists()
    for file in (tmp_path / "run").rglob("*.json*"):
        for line in file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]:
            json.loads(line, parse_constant=lambda word, file=file: pytest.fail(f"{file}: {word}"))
    last = newest_checkpoint(tmp_path / "run")
    assert last is None or first_not_finite(stored_weights(last)) == ""


@pytest.mark.parametrize("case", ["ras", "text_to_triples", *(case for case in CASES if "on_policy" in case)])
def test_weights_and_autocast_of_bfloat16_train(case, make_task):
    half = {"train.bf16": "true", "model.dtype": "bfloat16", "train.max_steps": 2, "train.gradient_accumulation": 1}
    task = made(make_task, case, half)
    train(task)
    assert all(line["loss"] != 0 for line in read_lines(Path(task.config.output_dir) / "losses.jsonl"))


@pytest.mark.parametrize("case", [case for case in CASES if "all weights" in case])
def test_all_weights_of_a_base_with_an_adapter_train(case, make_task, adapted):
    model = made(make_task, case, {"model.base": str(adapted)}).open_model()
    assert all(weight.requires_grad for weight in model.parameters())


# So it does not depend on the batch size. The replies of on-policy distillation are drawn.
@pytest.mark.parametrize("case", [case for case in CASES if "on_policy" not in case])
def test_the_evaluation_loss_is_a_mean_over_label_tokens(case, begin_task):
    found = []
    for size in (1, 2, 5):
        trainer = engine_of(made(begin_task, case, {"train.eval_batch_size": size}))
        trainer.task.score = lambda model: {}
        found.append(trainer.evaluate()["eval_loss"])
    assert found == pytest.approx([found[0]] * 3, rel=1e-5)


@EACH
def test_what_cannot_work_is_refused_before_anything_is_loaded(case, make_task, tmp_path, monkeypatch):
    def load(self):
        raise AssertionError("loaded")

    kind = type(made(make_task, case))
    with monkeypatch.context() as patch:
        patch.setattr(kind, "load", load)
        (tmp_path / "file").write_text("x")
        with pytest.raises(FileExistsError, match=r"file is a file"):
            train(made(make_task, case, {"output_dir": str(tmp_path / "file")}))
        for name in ("config.yaml", "losses.jsonl"):
            (tmp_path / name).mkdir()
            (tmp_path / name / name).write_text("mine")
            with pytest.raises(FileExistsError, match=f"did not make .{name}"):
                train(made(make_task, case, {"output_dir": str(tmp_path / name)}))
        with pytest.raises(OSError, match="file"):
            train(made(make_task, case, {"output_dir": str(tmp_path / "file" / "run")}))
    train(made(make_task, case, {"train.max_steps": 1, "train.save_steps": 1, "train.eval_batch_size": 4}))
    monkeypatch.setattr(kind, "load", load)
    with pytest.raises(ValueError, match=r"checkpoints of another run: train\.learning_rate was 0\.01 and is 0\.05"):
        train(made(make_task, case, {"train.max_steps": 1, "train.learning_rate": 0.05}))
    with pytest.raises(AssertionError, match="loaded"):
        train(made(make_task, case, {"train.max_steps": 1, "train.save_steps": 9, "train.eval_batch_size": 3}))


@EACH
def test_a_dry_run_says_what_the_run_does(case, make_task, tmp_path, capsys):
    task = made(make_task, case, {"train.epochs": 1.5})
    train(task, dry_run=True)
    shown = capsys.readouterr().out
    assert "learning_rate: 0.01" in shown
    assert "validation: rows" in shown
    assert shown.count("⟦") == shown.count("⟧")
    assert ("⟧" in shown.rsplit("first row", 1)[1].split("\n", 1)[1]) == ("on_policy" not in case)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["cache"]
    again = made(make_task, case, {"train.epochs": 1.5})
    train(again)
    steps = json.loads((tmp_path / "run" / "final" / "training.json").read_text())["steps"]
    assert f"  {steps} optimiser steps, " in shown
