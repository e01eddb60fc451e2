"""A run continues with what it was started with, and says what differs."""

import json
import math
import shutil
import sys
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

from tripletune.core.config import load_config
from tripletune.core.files import flatten
from tripletune.core.options import ConfigError
from tripletune.train import train
from tripletune.train.resume import check_same_run, checkpoint_to_continue, newest_checkpoint, save_run_settings
from tripletune.train.tasks.ras import GraphConfig, GraphTask

DATA = {"train_sha256": "aa"}


def begun(tmp_path, **changes):
    return load_config(GraphConfig, None, {"output_dir": str(tmp_path), **changes})


def goes_on(config, digest=DATA):
    try:
        check_same_run(config, digest)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(
    "change",
    [
        {"report_to": "wandb"},
        {"train.eval_steps": 7},
        {"train.save_total_limit": 9},
        {"train.gradient_checkpointing": True},
        {"data.train": "elsewhere/the/same"},
        {"train.batch_size": 1, "train.gradient_accumulation": 4},
        {"train.batch_size": 1, "train.records_per_step": 4},
        {"train.ddp_timeout": 60, "data.cache": "elsewhere"},
    ],
)
def test_how_it_is_watched_kept_and_computed_may_change(change, tmp_path):
    save_run_settings(begun(tmp_path), DATA)
    assert goes_on(begun(tmp_path, **change))
    assert not goes_on(begun(tmp_path, seed=1, **change))


@pytest.mark.parametrize(("lora", "tune"), [(True, "lora"), (False, "graph_token")])
@pytest.mark.parametrize("now", ["lora", "graph_token", "all"])
def test_a_run_of_before_goes_on_as_what_it_was(tmp_path, lora, tune, now):
    save_run_settings(begun(tmp_path), DATA)
    settings = yaml.safe_load((tmp_path / "config.yaml").read_text())
    del settings["model"]["tune"]
    settings["model"]["lora"] = lora
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    assert goes_on(begun(tmp_path, **{"model.tune": now})) == (now == tune)


@pytest.mark.parametrize(("now", "same"), [("me/base@v1", True), ("me/base", False), ("me/base@v2", False)])
def test_a_hub_revision_was_a_setting_of_its_own(tmp_path, now, same):
    save_run_settings(begun(tmp_path, **{"model.base": "me/base"}), DATA)
    settings = yaml.safe_load((tmp_path / "config.yaml").read_text())
    settings["model"]["revision"] = "v1"
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    assert goes_on(begun(tmp_path, **{"model.base": now})) == same
    with pytest.raises(ConfigError, match=r"revision.*model\.base"):
        begun(tmp_path, **{"model.revision": "v1"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train.learning_rate": 0.05}, "train.learning_rate was 1e-05 and is 0.05"),
        ({"model.lora_targets": "all-linear"}, "model.lora_targets was"),
        ({"data.prompt_order": "history_first"}, "data.prompt_order was 'instruction_first' and is 'history_first'"),
        ({"train.batch_size": 4}, "records per step were 4 on 1 process\(es\) and are 8 on 1"),
    ],
)
def test_what_is_learned_may_not(change, message, tmp_path):
    save_run_settings(begun(tmp_path), DATA)
    with pytest.raises(ValueError, match=message) as error:
        check_same_run(begun(tmp_path, **change), DATA)
    assert "--resume false" in str(error.value)
    assert "\n" not in str(error.value)


def test_other_data_under_the_same_name_are_noticed(tmp_path):
    save_run_settings(begun(tmp_path), DATA)
    with pytest.raises(ValueError, match="the content of the training data has changed"):
        check_same_run(begun(tmp_path), {"train_sha256": "bb"})


def begin(make_config, **change):
    task = GraphTask(make_config({"train.eval_steps": 1, **change}))
    return task.config, task.digest


@pytest.mark.parametrize(
    ("name", "file"),
    [("model.base", "chat_template.jinja"), ("model.encoder", "config.json"), ("data.planning_prompt", "")],
)
def test_models_and_files_are_their_content(name, file, make_config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if file:
        shutil.copytree(flatten(asdict(make_config()), ".")[name], "own")
    else:
        Path("own").write_text("Plan.")
    save_run_settings(*begin(make_config, **{name: "own"}))
    (shutil.copytree if file else shutil.copyfile)("own", "copy")
    for same in ("own", "./own", "own/" if file else "own", str(tmp_path / "own"), "copy"):
        check_same_run(*begin(make_config, **{name: same}))
    with (Path("own") / file).open("a") as changed:
        changed.write(" ")
    with pytest.raises(ValueError, match=f"the content of {name} own has changed"):
        check_same_run(*begin(make_config, **{name: "own"}))
    environment = tmp_path / "run" / "environment.json"
    about = json.loads(environment.read_text())
    del about[name]  # as earlier versions left it
    environment.write_text(json.dumps(about))
    check_same_run(*begin(make_config, **{name: "own"}))
    with pytest.raises(ValueError, match=f"{name} was 'own' and is 'copy'"):
        check_same_run(*begin(make_config, **{name: "copy"}))


@pytest.mark.parametrize("best", [None, "loss", "f1"])
def test_what_chooses_the_result_stays(best, make_config):
    change = {"train.best_metric": best}
    save_run_settings(*begin(make_config, **change))
    scores = {**change, "train.eval_max_new_tokens": 5, "train.eval_batch_size": 1}
    with pytest.raises(ValueError, match="eval_max_new_tokens was") if best == "f1" else nullcontext():
        check_same_run(*begin(make_config, **scores))
    config, _ = begin(make_config, **change)
    with (Path(config.data.train[0]) / "validation-00000.jsonl").open("a") as changed:
        changed.write("\n")
    with pytest.raises(ValueError, match="the content of the validation data has changed") if best else nullcontext():
        check_same_run(config, GraphTask(config).digest)


def test_a_finished_run_without_checkpoints_stays(make_task, tmp_path, caplog):
    steps = {"train.max_steps": 1, "train.gradient_accumulation": 1}
    train(make_task("text_to_triples", steps))
    run = tmp_path / "run"
    shutil.rmtree(run / "checkpoint-1")
    before = (run / "final" / "training.json").stat()
    caplog.set_level("INFO")
    train(make_task("text_to_triples", steps))
    assert f"{run} is finished; to train again, set --resume false" in caplog.text
    assert (run / "final" / "training.json").stat() == before
    with pytest.raises(ValueError, match="seed was 42 and is 1"):
        train(make_task("text_to_triples", steps | {"seed": 1}))
    train(make_task("text_to_triples", steps | {"seed": 1, "resume": False}))
    assert (run / "final.previous" / "training.json").stat().st_mtime_ns == before.st_mtime_ns


def test_settings_that_an_earlier_version_did_not_have_are_no_difference(tmp_path):
    save_run_settings(begun(tmp_path), DATA)
    saved = yaml.safe_load((tmp_path / "config.yaml").read_text())
    del saved["data"]["long_labels"], saved["train"]["records_per_step"]
    saved["train"]["gradient_accumulation"] = 2
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(saved))
    assert goes_on(begun(tmp_path))
    assert not goes_on(begun(tmp_path, **{"data.long_labels": "skip"}))


@pytest.mark.parametrize(("change", "fits"), [({}, True), ({"train.answer_weight": 2.0}, False)])
def test_losses_that_an_earlier_version_weighed_otherwise_are_not_continued(change, fits, tmp_path):
    config = begun(tmp_path, **change)
    save_run_settings(config, DATA)
    about = json.loads((tmp_path / "environment.json").read_text())
    del about["rows_grouped"]
    (tmp_path / "environment.json").write_text(json.dumps(about))
    assert goes_on(config) == fits


@pytest.mark.parametrize(("processes", "batch", "fits"), [(2, 2, True), (2, 4, False), (1, 2, False), (1, 4, True)])
def test_the_records_of_a_step_count_all_processes(tmp_path, processes, batch, fits, monkeypatch):
    monkeypatch.setattr("tripletune.train.resume.process_count", lambda: 2)
    save_run_settings(begun(tmp_path, **{"train.batch_size": 2}), DATA)
    monkeypatch.setattr("tripletune.train.resume.process_count", lambda: processes)
    config = begun(tmp_path, **{"train.batch_size": batch})
    if fits:
        check_same_run(config, DATA)
        # Said in one number, it does not depend on the processes.
        save_run_settings(begun(tmp_path, **{"train.records_per_step": 8}), DATA)
        assert goes_on(begun(tmp_path, **{"train.records_per_step": 8}))
        assert not goes_on(begun(tmp_path, **{"train.records_per_step": 16}))
        return
    with pytest.raises(ValueError, match=r"records per step were 8 on 2 process\(es\) and are"):
        check_same_run(config, DATA)


def test_the_run_folder_says_what_ran(make_config, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123-secret")
    monkeypatch.setenv("HF_TOKEN", "4567-secret")
    monkeypatch.setattr(sys, "argv", ["ras_multitask.py", "--seed", "1"])
    config = make_config({"seed": 1})
    save_run_settings(config, DATA)
    folder = Path(config.output_dir)
    resolved = yaml.safe_load((folder / "config.yaml").read_text())
    assert resolved["seed"] == 1
    assert resolved["train"]["warmup_ratio"] == 0.15
    about = json.loads((folder / "environment.json").read_text())
    assert about["command"] == ["ras_multitask.py", "--seed", "1"]
    assert about["versions"]["torch"]
    assert "secret" not in "".join(path.read_text() for path in folder.iterdir() if path.is_file())


def test_a_run_that_was_stopped_before_its_first_checkpoint_says_that_it_starts_again(make_config, caplog):
    config = make_config({"train.save_steps": 50})
    save_run_settings(config, DATA)
    assert checkpoint_to_continue(config, DATA) is None
    assert not caplog.text
    (Path(config.output_dir) / "losses.jsonl").write_text('{"step": 1}\n')
    assert checkpoint_to_continue(config, DATA) is None
    assert "stopped before its first checkpoint (train.save_steps 50): the run starts at step 0" in caplog.text


def test_a_run_without_a_whole_checkpoint_says_that_it_starts_again(make_config, caplog):
    config = make_config({})
    save_run_settings(config, DATA)
    (Path(config.output_dir) / "checkpoint-2").mkdir()
    assert checkpoint_to_continue(config, DATA) is None
    assert "is complete and undamaged: the run starts at step 0" in caplog.text


def test_a_checkpoint_without_its_end_is_passed_over(tmp_path):
    assert newest_checkpoint(tmp_path) is None
    assert newest_checkpoint(tmp_path / "nowhere") is None
    for step in (9, 10, 100):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint-100"
    (tmp_path / "checkpoint-100" / "trainer_state.json").write_text('{"global_st')
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint-10"
    (tmp_path / "checkpoint-10" / "trainer_state.json").unlink()
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint-9"


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "optimizer.pt", "rng_state.pth", "weight"])
def test_a_checkpoint_with_a_damaged_file_is_passed_over(name, tmp_path, caplog):
    for step in (1, 2):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        save_file({"weight": torch.zeros(64)}, folder / "adapter_model.safetensors")
        torch.save({"state": torch.zeros(64)}, folder / "optimizer.pt")
        torch.save({"state": torch.zeros(64)}, folder / "rng_state.pth")
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint-2"
    file = tmp_path / "checkpoint-2" / name
    if name == "weight":
        save_file({name: torch.tensor([0.0, -math.inf])}, file.with_name("adapter_model.safetensors"))
    else:
        file.write_bytes(file.read_bytes()[:-40])
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint-1"
    assert f"{tmp_path / 'checkpoint-2'} is skipped" in caplog.text
    assert name in caplog.text
