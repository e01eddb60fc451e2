"""The recipe as people run it: golden losses, real kills, and one clear message for every bad input."""

import json
from pathlib import Path

import pytest
from accelerate import PartialState
from safetensors.torch import load_file

from tests.recipes.command_lines import command_line, lines, run

RECIPE = "ras_multitask"
# Three optimiser steps an epoch: ten steps are three epochs and a bit. All kinds of dropout are on.
STEPS = {"train.max_steps": 10, "train.save_steps": 4, "train.eval_steps": 3, "data.max_validation_records": 2}

# Runs the recipe in two processes that kill themselves, as `kill -9` does: one behind a step, one while it writes a
# checkpoint. Each time the run's folder is copied.
KILLER = """
import os, runpy, shutil, signal, sys
import sentence_transformers
from transformers import TrainerState
from tripletune.models import graph_llm
from tripletune.train.callbacks import LossLog

def kill():
    os.kill(os.getpid(), signal.SIGKILL)

original = LossLog.on_step_end, TrainerState.save_to_json

def on_step_end(self, args, state, control, **kwargs):
    original[0](self, args, state, control, **kwargs)
    if state.global_step == 7:
        kill()

def save_to_json(self, path):
    if self.global_step == 8:
        with open(path, "w") as half:
            half.write('{"global_step": 8, "log_his')
        kill()
    original[1](self, path)

folder, *sys.argv = sys.argv[1:]
for kind, name, patched in ((LossLog, "on_step_end", on_step_end), (TrainerState, "save_to_json", save_to_json)):
    child = os.fork()
    if not child:
        setattr(kind, name, patched)
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        finally:
            os._exit(1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    shutil.copytree(folder, f"{folder}_{name}")
"""


def test_a_tracked_run_and_its_result(make_config, tmp_path, records, run_recipe):
    pytest.importorskip("tensorboard")
    settings = {**STEPS, "train.max_steps": 6, "model.graph_dropout": 0.0, "model.lora_dropout": 0.0}
    config, key = make_config({**settings, "report_to": ["tensorboard"], "run_name": "named"}), "f00dfeed" * 5
    done = run(command_line(RECIPE, config), HF_TOKEN="hf_" + key)
    assert done.returncode == 0, done.stderr
    found = lines(config)
    assert [line["step"] for line in found] == list(range(1, 7))
    assert found[-1]["loss"] < found[0]["loss"]
    folder = Path(config.output_dir) / "final"
    result = json.loads((folder / "training.json").read_text())
    assert (result["steps"], result["records"]) == (6, len(records))
    assert "eval_planning/action_accuracy" in result["evaluation"]

    # The tracker is told, and no key is written.
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.name.startswith("events.out.tfevents") for path in written)
    assert not [path for path in written if key.encode() in path.read_bytes()]
    assert key not in done.stdout + done.stderr

    # Another process, another folder, no tracker, other modules loaded: the same numbers to the last digit.
    again = make_config({**settings, "output_dir": str(tmp_path / "again")})
    assert run_recipe(command_line(RECIPE, again)) == ""
    assert lines(again) == found


@pytest.mark.slow
def test_kills_leave_no_trace(make_config, tmp_path, run_recipe, caplog):
    whole = make_config({**STEPS, "output_dir": str(tmp_path / "whole")})
    assert run_recipe(command_line(RECIPE, whole)) == ""

    killed = make_config({**STEPS, "output_dir": str(tmp_path / "killed")})
    arguments, folder = command_line(RECIPE, killed), tmp_path / "killed"
    done = run(["-c", KILLER, str(folder), *arguments])
    # DeepSpeed, where it is installed, writes lines of its own there.
    assert done.stdout.splitlines().count("-9") == 2, done.stderr
    # In the middle of the third epoch, three steps behind a checkpoint that stands in the middle of the second.
    first = make_config({"output_dir": str(tmp_path / "killed_on_step_end")})
    assert [line["step"] for line in lines(first)] == list(range(1, 8))
    assert [path.name for path in Path(first.output_dir).glob("checkpoint-*")] == ["checkpoint-4"]
    # While the next checkpoint is being written: all of it is there but the end of its last file.
    assert "continuing from" in done.stderr
    assert (folder / "checkpoint-8" / "adapter_model.safetensors").exists()
    # A line cut off in the middle, as a machine that lost power would leave it.
    with (folder / "losses.jsonl").open("a") as log:
        log.write('{"step": 8, "lo')

    caplog.clear()
    with caplog.at_level("INFO"):
        assert run_recipe(arguments) == ""
    assert "checkpoint-8 is incomplete and is skipped" in caplog.text
    assert "continuing from" in caplog.text
    assert lines(killed) == lines(whole)
    assert len(lines(killed)) == 10
    one, other = (load_file(tmp_path / name / "final" / "adapter_model.safetensors") for name in ("whole", "killed"))
    assert one.keys() == other.keys()
    assert all(one[name].equal(other[name]) for name in one)
    # And once more: there is nothing left to do, and nothing changes.
    assert run_recipe(arguments) == ""
    assert lines(killed) == lines(whole)


def test_the_group_of_processes_waits_as_long_as_it_is_told(make_config, run_recipe, monkeypatch):
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    for name, value in {**ranks, "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)

    def init_process_group(**options):
        raise ValueError(f"begun with {options['timeout']}")

    monkeypatch.setattr("torch.distributed.init_process_group", init_process_group)
    PartialState._reset_state()
    said = run_recipe(command_line(RECIPE, make_config({"train.ddp_timeout": 12345})))
    PartialState._reset_state()
    assert said == "error: begun with 3:25:45"


def test_a_run_goes_on_with_its_own_settings_or_starts_anew(make_config, tmp_path, run_recipe):
    config = make_config({"train.max_steps": 4, "train.save_steps": 2})
    arguments = command_line(RECIPE, config)
    assert run_recipe(arguments) == ""
    first = lines(config)
    said = run_recipe([*arguments, "--train.learning_rate", "0.02", "--train.max_steps", "3"])
    assert "train.max_steps was 4 and is 3; train.learning_rate was 0.01 and is 0.02" in said
    assert lines(config) == first
    shorter = ["--resume", "false", "--train.max_steps", "3", "--train.save_steps", "1"]
    assert run_recipe([*arguments, *shorter]) == ""
    # Of the two checkpoints that are kept none is of the earlier run.
    found = sorted(path.name for path in Path(config.output_dir).glob("checkpoint-*"))
    assert found == ["checkpoint-2", "checkpoint-3"]
    assert [line["step"] for line in lines(config)] == [1, 2, 3]


def test_bad_input_is_one_clear_message(make_config, run_recipe):
    config = make_config()
    with (Path(config.data.train[0]) / "train-00000.jsonl").open("a") as file:
        file.write('{"id": "1", "question\n')
    assert "train-00000.jsonl:13: not valid JSON" in run_recipe(command_line(RECIPE, config))
    config = make_config({"model.lora_targets": ["query_key_value"]})
    assert "['query_key_value'] do not exist" in run_recipe(command_line(RECIPE, config))
    assert not (Path(config.output_dir) / "final").exists()
