"""Signals and the clock make a run save; what it says of itself on the way."""

import json
import logging
import os
import re
import shutil
import signal

import pytest
import torch
from safetensors.torch import load_file

from tests.cli import read_lines
from tripletune.checkpoints.card import collect_provenance, render_card
from tripletune.core.files import read_json
from tripletune.models.run_folders import Preempted
from tripletune.train import train
from tripletune.train.callbacks import Keeper
from tripletune.train.engine import EngineMixin
from tripletune.train.resume import newest_checkpoint
from tripletune.train.settings import TrainSection

STEPS = {"train.gradient_accumulation": 1, "train.max_steps": 6, "train.eval_steps": 3, "train.logging_steps": 1}


def logs_of(folder):
    files = (folder / "losses.jsonl", folder / "evaluations.jsonl")
    return [read_lines(file, "seconds") if file.exists() else [] for file in files]


# A signal in a step, in one that is evaluated, in an evaluation, in the last step.
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
@pytest.mark.parametrize(
    ("event", "step"), [("on_step_begin", 1), ("on_step_begin", 2), ("on_prediction_step", 3), ("on_step_begin", 5)]
)
def test_a_signal_saves_and_the_run_continues_exactly(name, event, step, make_task, tmp_path, monkeypatch):
    def start(folder):
        train(make_task("ras", {**STEPS, "train.save_steps": 100, "output_dir": str(tmp_path / folder)}))

    start("whole")
    handler, original = signal.getsignal(signal.SIGTERM), getattr(Keeper, event)

    def sent(self, args, state=None, control=None, **kwargs):
        if state is not None and state.global_step == step:
            os.kill(os.getpid(), getattr(signal, name))
        return original(self, args, state, control, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(Preempted, match=f"{name}: a checkpoint is saved") as stopped:
        patch.setattr(Keeper, event, sent)
        start("parts")
    assert stopped.value.exit_code == 75
    assert read_json(tmp_path / "parts" / "preempted.json") == {"signal": name}
    assert signal.getsignal(signal.SIGTERM) is handler
    last = step + (event == "on_step_begin")
    assert newest_checkpoint(tmp_path / "parts") == tmp_path / "parts" / f"checkpoint-{last}"
    assert not (tmp_path / "parts" / "final").exists()
    assert len(logs_of(tmp_path / "parts")[1]) == (last > 3), "no evaluation keeps the machine waiting"
    start("parts")
    assert not (tmp_path / "parts" / "preempted.json").exists()
    assert logs_of(tmp_path / "parts") == logs_of(tmp_path / "whole")


def send_at(task, monkeypatch, moment, send):
    """Send a signal when the run reaches a moment outside of its steps."""
    if moment == "loading":
        load = task.load

        def load_and_send():
            send()
            return load()

        monkeypatch.setattr(task, "load", load_and_send)
    elif moment == "saving":
        monkeypatch.setattr(task, "save", lambda folder: send() if "final" in str(folder) else None)
    else:
        real = task.generate_replies
        monkeypatch.setattr(task, "generate_replies", lambda model: (send(), real(model))[1])


# Without `eval_steps`, the only evaluation comes after the last checkpoint.
@pytest.mark.parametrize(("moment", "eval_steps"), [("loading", 3), ("replies", None), ("replies", 3), ("saving", 3)])
def test_a_signal_outside_of_the_steps_ends_the_run_at_once(moment, eval_steps, make_task, tmp_path, monkeypatch):
    settings = {**STEPS, "train.save_steps": 100, "train.eval_steps": eval_steps, "train.eval_generate_records": 2}

    def task_of(folder):
        return make_task("ras", {**settings, "output_dir": str(tmp_path / folder)})

    train(task_of("whole"))
    handler, after = signal.getsignal(signal.SIGTERM), []

    def send():
        os.kill(os.getpid(), signal.SIGTERM)
        after.append("the moment went on")

    with (
        monkeypatch.context() as patch,
        pytest.raises(Preempted, match=r"SIGTERM: .* the same command cont") as stopped,
    ):
        task = task_of("parts")
        send_at(task, patch, moment, send)
        train(task)
    assert stopped.value.exit_code == 75
    assert after == []
    assert read_json(tmp_path / "parts" / "preempted.json") == {"signal": "SIGTERM"}
    assert signal.getsignal(signal.SIGTERM) is handler
    assert not (tmp_path / "parts" / "final").exists()
    train(task_of("parts"))
    assert not (tmp_path / "parts" / "preempted.json").exists()
    assert logs_of(tmp_path / "parts") == logs_of(tmp_path / "whole")
    assert (tmp_path / "parts" / "final" / "training.json").exists()


def test_minutes_save_and_later_settings_count(make_task, tmp_path, killed_behind):
    rare = {**STEPS, "train.save_steps": 100, "train.save_total_limit": None}
    with killed_behind(3):
        train(make_task("ras", {**rare, "train.save_minutes": 1e-9}))
    assert sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]
    train(make_task("ras", {**rare, "train.save_steps": 5, "train.eval_steps": 4}))
    assert (tmp_path / "run" / "checkpoint-5").exists()
    assert not (tmp_path / "run" / "checkpoint-3").exists()
    assert [row["step"] for row in logs_of(tmp_path / "run")[1]] == [4, 6]


@pytest.mark.parametrize("terminal", [True, False])
def test_one_form_of_log_with_evaluations(terminal, make_task, tmp_path, monkeypatch, caplog, capfd):
    monkeypatch.setattr("os.isatty", lambda file: terminal)
    with caplog.at_level(logging.INFO):
        train(make_task("ras", STEPS))
    lines = [line for line in caplog.messages if line.startswith(("step", "evaluation"))]
    step = r"step \d/6  loss \S+  gradient norm \S+  learning rate \S+  [\d,]+ tokens/s  about \d:\d\d:\d\d left"
    evaluation = r"evaluation at step [36]/6  loss \d\.\d{3}  .*planning/action_accuracy \d\.\d{3}.*"
    patterns = [step] * 3 + [evaluation] + [step] * 3 + [evaluation]
    assert len(lines) == len(patterns)
    assert all(map(re.fullmatch, patterns, lines))
    announced = [line for line in caplog.messages if line.startswith("writing")]
    assert len(announced) == 2
    assert re.fullmatch(r"writing \d+ replies to evaluate, up to \d+ tokens each", announced[0])
    # The scores stand between what they are scores of, and the result with the next command.
    measured = caplog.messages.index("the result has losses on 4 validation records, scores of 4 replies:")
    end = caplog.messages[measured:]
    assert "eval_planning/action_accuracy = " in "\n".join(end[1:-2])
    run = tmp_path / "run"
    assert re.fullmatch(rf"trained for \d+ s; the result is in {run / 'final'}", end[-2])
    command = f'tripletune ask "QUESTION" --model {run} --corpus CORPUS --triples TRIPLES'
    assert end[-1] == f"next: {command}   (scores: eval run)"
    assert "%|" not in capfd.readouterr().err.split("tokens/s")[-1]


@pytest.fixture
def scored(monkeypatch):
    """Lets replies be the right ones at some steps alone, while the loss goes its way."""

    def at(*steps):
        begin_run = EngineMixin.begin_run

        def begin(self, task):
            begin_run(self, task)
            right, real = [task.prompt_and_expected(one)[1] for one in task.scored], task.generate_replies
            task.generate_replies = lambda model: right if self.state.global_step in steps else real(model)

        monkeypatch.setattr(EngineMixin, "begin_run", begin)

    return at


BEST = {
    **STEPS, "train.max_steps": 8, "train.eval_steps": 1, "train.save_steps": 3, "train.save_total_limit": 1,
    "train.best_metric": "planning/action_accuracy",
}  # fmt: skip


@pytest.mark.parametrize("patience", [None, 3])
def test_the_best_step_is_kept_through_kills_and_becomes_the_result(
    patience, make_task, tmp_path, scored, killed_behind, caplog
):
    def start(folder, **more):
        train(make_task("ras", {**BEST, "train.patience": patience, "output_dir": str(tmp_path / folder), **more}))
        return tmp_path / folder

    scored(2)
    caplog.set_level("INFO")
    whole, steps = start("whole"), 8 if patience is None else 5
    for step in (4, steps):
        with killed_behind(step):
            start("parts")
    parts = start("parts")
    assert logs_of(parts) == logs_of(whole)
    assert [row["step"] for row in logs_of(whole)[0]] == list(range(1, steps + 1))
    results = [json.loads((folder / "final" / "training.json").read_text()) for folder in (whole, parts)]
    assert results[0] | {"seconds": 0} == results[1] | {"seconds": 0}
    assert (results[0]["weights_of_step"], results[0]["steps"]) == (2, steps)
    assert results[0]["highest_planning/action_accuracy"] == 1
    assert results[0]["evaluation"]["eval_planning/action_accuracy"] == 1
    assert results[0]["stopped_early"] == (patience is not None)
    end = (
        "training stops at step 5: no planning/action_accuracy of the last 3 evaluations is better than that of step 2"
    )
    assert (end in caplog.text) == (patience is not None)
    found = [load_file(folder / "adapter_model.safetensors") for folder in (whole / "final", parts / "checkpoint-2")]
    assert all(torch.equal(weight, found[1][name]) for name, weight in found[0].items())
    assert "weights of step | 2" in render_card(collect_provenance(whole / "final"), "adapter", "x")
    # The same once more, though nothing is left but to write the result; and a stopped run has ended.
    shutil.rmtree(parts / "final")
    start("parts")
    assert json.loads((parts / "final" / "training.json").read_text())["weights_of_step"] == 2
    assert logs_of(parts) == logs_of(whole)


def test_a_metric_that_is_not_there_is_refused(make_task):
    with pytest.raises(ValueError, match=r"'planning/action' is not one of loss, .*did you mean planning/action_acc"):
        train(make_task("ras", {**BEST, "train.best_metric": "planning/action"}))
    with pytest.raises(ValueError, match=r"train\.best_metric needs train\.eval_steps"):
        make_task("ras", {**BEST, "train.eval_steps": None})
    with pytest.raises(ValueError, match="there are no validation data"):
        train(make_task("ras", {**BEST, "data.validation_split": "none"}))


def test_a_run_does_not_stop_for_a_metric_that_does_not_come(make_task, write_records, records, tmp_path):
    run = {**BEST, "train.best_metric": "loss_answering", "train.patience": 2, "train.eval_generate_records": 0}
    task = make_task("ras", {**run, "output_dir": str(tmp_path / "run")})
    write_records([one for one in records if not one.answers][:3], "validation")
    train(task)
    assert [set(row) for row in logs_of(tmp_path / "run")[1]] == [{"step", "epoch", "loss", "loss_planning"}] * 8
    with pytest.raises(ValueError, match=r"'loss_answering' is not one of loss, loss_planning \("):
        train(make_task("ras", {**run, "data.tasks": ["planning"], "output_dir": str(tmp_path / "other")}))


@pytest.mark.parametrize(("name", "lowest"), [("loss", True), ("planning/malformed", True), ("answering/f1", False)])
def test_which_way_is_better(name, lowest):
    assert TrainSection(best_metric=name).lower_is_better() == lowest
    assert TrainSection(best_metric=f"eval_{name}").best_metric == name
    assert not TrainSection(best_metric=name, best_is="highest").lower_is_better()
