"""What a tracker is told: one run across kills, with settings, scalars, replies, and a result that can be used."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tripletune.core.config import to_yaml
from tripletune.models.run_folders import Preempted
from tripletune.train import train
from tripletune.train.callbacks import Keeper
from tripletune.train.misfits import check_tracking

ROOT = Path(__file__).resolve().parents[2]
KEY = "f00dfeed" * 5
SETTINGS = {
    "train.max_steps": 6, "train.save_steps": 2, "train.eval_steps": 2, "train.logging_steps": 1, "project": "ours",
    "train.gradient_accumulation": 1, "tags": ["small"], "artifacts": ["model", "dataset"],
}  # fmt: skip
# Trains in one process after the other, of which two are killed behind a step; what they import is imported once.
KILLED = """
import os, sys
import sentence_transformers, wandb
from tripletune.train import engine, main
from tripletune.train.callbacks import LossLog
original, codes = LossLog.on_step_end, []
for behind in (3, 5, 0):
    def on_step_end(self, args, state, control, **kwargs):
        original(self, args, state, control, **kwargs)
        state.global_step == behind and os.kill(os.getpid(), 9)
    LossLog.on_step_end = on_step_end
    if not (child := os.fork()):
        sys.exit(main("ras", argv=sys.argv[1:]))
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(codes)
"""


def records_of(file):
    """What a `.wandb` file holds, which is laid out as the logs of LevelDB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, whole = file.read_bytes(), 7, b""
    while place + 7 <= len(data):
        room = 32768 - place % 32768
        if room < 7:
            place += room
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # in one piece, or the last
            record = Record()
            record.ParseFromString(whole)
            yield record
        if kind in (0, 1, 4):
            whole = b""


def items(updates):
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in updates}


def test_a_killed_run_is_one_offline_run_of_wandb(make_config, make_task, tmp_path):
    config = make_config({**SETTINGS, "report_to": ["wandb"]})
    (tmp_path / "run.yaml").write_text(to_yaml(config))
    away = {
        "WANDB_DIR": str(tmp_path),
        "WANDB_DATA_DIR": str(tmp_path / "data"),
        "WANDB_CACHE_DIR": str(tmp_path / "c"),
    }
    secret = {"WANDB_MODE": "offline", "WANDB_API_KEY": KEY, "HF_TOKEN": f"hf_{KEY}"}
    # A service of W&B that an earlier test has left would outlive the kills, and hold the run's id.
    ours = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
    done = subprocess.run(
        [sys.executable, "-c", KILLED, "--config", str(tmp_path / "run.yaml")],
        env={**ours, **away, **secret, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "[-9, -9, 0]", done.stderr
    folders = sorted(tmp_path.glob("wandb/offline-run-*"), key=lambda folder: folder.stat().st_mtime)
    assert len(folders) == 3
    assert len({folder.name.rpartition("-")[2] for folder in folders}) == 1, "one run"
    # The last file holds all of it.
    records = list(records_of(next(folders[-1].glob("*.wandb"))))
    known, rows = {}, []
    for record in records:
        known |= items(record.config.update)
        rows += [items(record.history.item)] if record.WhichOneof("record_type") == "history" else []
    run = next(record.run for record in records if record.WhichOneof("record_type") == "run")
    assert (run.project, list(run.tags), run.run_id) == ("ours", ["small"], folders[0].name.rpartition("-")[2])
    assert [Path(place).name for place in known["data.train"]] == ["records"]
    assert {"git_revision", "sha256.train", "train.answer_weight", "processes", "rows.train.planning SUBQ"} <= {*known}
    losses = [row["train/global_step"] for row in rows if "train/loss" in row]
    assert losses == [1, 2, 3, 4, 5, 6]
    assert all("train/tokens_per_second" in row for row in rows if "train/loss" in row)
    assert [row["train/global_step"] for row in rows if "eval/planning/action_accuracy" in row] == [2, 4, 6]
    tables = [row for row in rows if {"eval/samples", "eval/samples._type"} & row.keys()]
    assert [row["train/global_step"] for row in tables] == [2, 4, 6]
    shown = [json.loads(file.read_text()) for file in folders[-1].rglob("*.table.json")]
    assert all(one["columns"] == ["step", "prompt", "expected", "reply"] and one["data"] for one in shown)
    assert sorted({one["data"][0][0] for one in shown}) == [2, 4, 6]
    artifacts = {
        record.artifact.type: record.artifact for record in records if record.WhichOneof("record_type") == "artifact"
    }
    places = {kind: {item.path: item.local_path for item in one.manifest.contents} for kind, one in artifacts.items()}
    assert places["dataset"].keys() == {"train/train-00000.jsonl", "validation/validation-00000.jsonl"}
    for place, file in places["model"].items():
        (tmp_path / "loaded" / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "loaded" / place).write_bytes(Path(file).read_bytes())
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]
    from tripletune.llm.graph_generator import load_generator

    records = [record.input for record in make_task("ras").sources[0]]
    found, final = (load_generator(tmp_path / name).generate_many(records[:3], 5) for name in ("loaded", "run/final"))
    assert [one.text for one in found] == [one.text for one in final]
    later = {"model.adapter": str(tmp_path / "loaded"), "output_dir": str(tmp_path / "later"), "train.max_steps": 1}
    train(make_task("ras", later))
    assert (tmp_path / "later" / "final").is_dir()


def test_a_killed_run_is_one_run_of_mlflow(make_task, tmp_path, monkeypatch, killed_behind):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    with killed_behind(3):
        train(make_task("ras", {**SETTINGS, "report_to": ["mlflow"]}))
    # At the end of the process, MLflow would call the run FINISHED.
    (run,) = mlflow.search_runs(experiment_names=["ours"], output_format="list")
    assert (run.info.status, mlflow.active_run()) == ("KILLED", None)
    train(make_task("ras", {**SETTINGS, "report_to": ["mlflow"]}))
    (run,) = mlflow.search_runs(experiment_names=["ours"], output_format="list")
    assert run.info.status == "FINISHED"
    assert {"git_revision", "rows.train.planning SUBQ"} <= run.data.params.keys()
    client = mlflow.MlflowClient()
    assert [one.step for one in client.get_metric_history(run.info.run_id, "eval_loss")] == [2, 4, 6]
    found = {one.path for place in ("", "model") for one in client.list_artifacts(run.info.run_id, place)}
    assert found >= {"samples.jsonl", "dataset", "model/adapter_model.safetensors", "model/tokenizer.json"}


def test_a_run_of_the_caller_in_mlflow_stays_open(make_task, tmp_path, monkeypatch, killed_behind):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    mlflow.set_experiment("of the caller")
    with mlflow.start_run() as run:
        with killed_behind(3):
            train(make_task("ras", {**SETTINGS, "report_to": ["mlflow"]}))
        assert mlflow.active_run().info.run_id == run.info.run_id
        train(make_task("ras", {**SETTINGS, "report_to": ["mlflow"]}))
        assert mlflow.active_run().info.run_id == run.info.run_id
    assert mlflow.get_run(run.info.run_id).info.status == "FINISHED"


def test_wandb_is_told_that_a_signal_stopped_a_run(make_task, tmp_path, monkeypatch, offline_wandb):
    settings = {**SETTINGS, "report_to": ["wandb"]}
    on_step_end = Keeper.on_step_end

    def stop(self, args, state, control, **kwargs):
        if state.global_step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        on_step_end(self, args, state, control, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(Preempted):
        patch.setattr(Keeper, "on_step_end", stop)
        train(make_task("ras", settings))
    assert offline_wandb.run is None, "a later training would log into it"
    ends: dict[str, Any] = {}
    until = time.monotonic() + 60
    # W&B's service, a process of its own, makes the file and writes the last records a little later.
    while "exit" not in ends and time.monotonic() < until:
        time.sleep(0.2)
        for file in tmp_path.glob("wandb/offline-run-*/*.wandb"):
            ends = {record.WhichOneof("record_type"): record for record in records_of(file)}
    assert ends["exit"].exit.exit_code == 75
    assert "preempting" in ends
    with offline_wandb.init() as run:
        train(make_task("ras", settings))
        assert offline_wandb.run is run, "the caller's run stays open"


def test_a_tracker_that_is_not_installed_is_reported():
    missing = next(name for name in ("neptune", "clearml", "comet_ml") if name not in sys.modules)
    with pytest.raises(ValueError, match=rf"report_to {missing}: .*install.*Or leave {missing} out\.") as error:
        check_tracking([missing])
    assert "\n" not in str(error.value)
