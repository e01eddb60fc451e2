"""The run folder, which holds the settings, checkpoints and logs of one run.

Training continues only with the settings and data of its start: weights that were trained with two learning rates, or
on two data sets, would match no configuration.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import platform
import shutil
import sys
import time
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from tripletune.core.config import read_yaml, to_yaml
from tripletune.core.files import LOGS, check_folder, few, flatten, read_json, short_value, write_json, write_text
from tripletune.core.options import default_of, leaves
from tripletune.core.program import code_version, versions
from tripletune.models.run_folders import (
    FINAL,
    PREEMPTED,
    RESULT,
    RUN_SETTINGS,
    check_finite,
    check_weights,
    stored_weights,
)
from tripletune.models.specs import with_revision
from tripletune.train.settings import AnyConfig

logger = logging.getLogger(__name__)
SETTINGS = RUN_SETTINGS
ENVIRONMENT = "environment.json"
LOSS_FILE = "losses.jsonl"
EVALUATIONS = "evaluations.jsonl"
# Keys of `environment.json`: the number of processes, what is sharded among them, the number of rows grouped by length,
# and the digests of data and of a task from another package.
PROCESSES = "processes"
SHARDING = "sharding"
GROUPED = "rows_grouped"
TRAIN_SHA256 = "train_sha256"
VALIDATION_SHA256 = "validation_sha256"
CODE_SHA256 = "code_sha256"
_IN_WORDS = {
    TRAIN_SHA256: "the training data",
    VALIDATION_SHA256: "the validation data",
    CODE_SHA256: "the task's code",
}
PACKAGES = (
    "torch", "transformers", "peft", "accelerate", "torch-geometric", "datasets", "sentence-transformers", "trl",
)  # fmt: skip
# Settings that may change between two starts: they change how a run is logged, saved and computed, not what it learns.
_FREE = {
    "output_dir", "run_name", "report_to", "resume", "project", "entity", "group", "tags", "artifacts",
    "push_to_hub",
    "data.train", "data.validation", "data.validation_split", "data.max_validation_records", "data.cache",
    "train.gradient_checkpointing", "train.torch_compile", "train.logging_steps", "train.workers", "train.ddp_timeout",
    "model.attention", "train.patience", "train.eval_steps", "train.eval_batch_size",
    # Of these three, only their product counts: `check_same_run` compares the records per step.
    "train.batch_size", "train.gradient_accumulation", "train.records_per_step",
}  # fmt: skip
# Settings by flat name, such as "train.epochs".
_Flat = Mapping[str, Any]


def grouped_rows(config: AnyConfig, continues: bool) -> int:
    """Return the number of rows grouped by length: a micro-batch on all processes at the start of the run.

    A continued run keeps the number of its start, although it may have other micro-batches or processes: with another
    number, the epoch in which it continues would have another order, and rows would come twice or never
    (`tests/train/test_engine.py:test_a_run_goes_on_in_its_order_in_other_micro_batches`).
    """
    processes = process_count()
    rows = int(config.train.batch_size * processes)
    file = Path(config.output_dir) / ENVIRONMENT
    if not continues or not file.is_file():
        return rows
    # Earlier versions, which recorded no number, grouped the rows of an optimiser step.
    return int(read_json(file).get(GROUPED) or rows * config.train.micro_batches(processes))


def save_run_settings(config: AnyConfig, digest: Mapping[str, str], grouped: int | None = None) -> None:
    """Write the resolved configuration, git revision, versions and `TrainingTask.digest` into the run folder.

    `check_same_run` compares them with the settings of a later start.
    """
    folder = Path(config.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    about = {
        "command": sys.argv,
        "git_revision": code_version().get("commit"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions(PACKAGES),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        PROCESSES: process_count(),
        SHARDING: sharding(),
        GROUPED: grouped,
        **digest,
    }
    write_json(folder / ENVIRONMENT, about)  # first, because this file marks the folder as a run folder
    write_text(folder / SETTINGS, to_yaml(config))


def check_same_run(config: AnyConfig, digest: Mapping[str, str]) -> None:
    """Make sure that the run folder's checkpoints have these settings, data, models and files.

    A folder without the two files of settings says nothing about its run, so there is nothing to compare.

    Raises:
        ValueError: Something that decides what is learned has changed.
    """
    folder = Path(config.output_dir)
    if not (folder / SETTINGS).is_file() or not (folder / ENVIRONMENT).is_file():
        return
    environment = read_json(folder / ENVIRONMENT)
    saved = _saved_settings(folder)
    # A setting that the run's version did not have counts as its default.
    before = {**flatten(dataclasses.asdict(type(config)()), "."), **saved}
    now = flatten(dataclasses.asdict(config), ".")
    changes = [
        # If contents are known, names do not count.
        *_changed_settings(config, saved, before, now, free=_FREE | (environment.keys() & digest.keys())),
        *_changed_by_versions(saved, now, environment),
        *_changed_step_size(config, before, now, environment[PROCESSES]),
        *_changed_sharding(environment),
        *_changed_contents(now, digest, environment),
    ]
    if changes:
        raise ValueError(
            f"{folder} holds checkpoints of another run: {few(changes)}. Give another --output_dir, or --resume false "
            "to start again in this folder; to continue that run, give the settings of its start"
        )


def _saved_settings(folder: Path) -> dict[str, Any]:
    """Read the settings of a run folder by flat name; those of earlier versions under today's names.

    Resuming compares them with today's settings, so a setting that is renamed needs a line here, or old runs can't go
    on.
    """
    saved: dict[str, Any] = flatten(read_yaml(folder / SETTINGS), ".")
    lora = saved.pop("model.lora", None)  # of revision b3f73d5
    if lora:
        saved["model.tune"] = "lora"
    elif lora is not None:
        saved["model.tune"] = "graph_token" if "model.use_graph" in saved else "all"
    # Until revision a95bc5e4 hub revisions were settings of their own.
    for name, old_name in (("model.base", "model.revision"), ("train.teacher", "train.teacher_revision")):
        revision = saved.pop(old_name, None)
        if revision:
            saved[name] = with_revision(str(saved[name]), str(revision))
    return saved


def _changed_settings(
    config: AnyConfig, saved: Iterable[str], before: _Flat, now: _Flat, free: Collection[str]
) -> Iterator[str]:
    """Yield a line for each changed setting, except those that may change.

    Args:
        saved: Names of the settings in the run folder.
        before: Settings of the run's start.
        free: Names of settings that may change.
    """
    # Settings of scores count if a score chooses the result.
    chosen_by_score = not (config.train.best_metric or "loss").startswith("loss")
    free_beginnings: tuple[str, ...] = ("train.save_", "train.eval_")
    if chosen_by_score:
        free_beginnings = ("train.save_",)
    # Entries that were removed from a mapping count too.
    mappings = tuple(f"{name}." for name, item in leaves(type(config)).items() if isinstance(default_of(item), dict))
    removed = [name for name in saved if name not in now and name.startswith(mappings)]
    for name in (*now, *removed):
        may_change = name in free or name.startswith(free_beginnings)
        if may_change or before.get(name) == now.get(name):
            continue
        yield f"{name} was {short_value(before.get(name))} and is {short_value(now.get(name))}"


def _changed_by_versions(saved: _Flat, now: _Flat, environment: Mapping[str, Any]) -> Iterator[str]:
    """Yield what an earlier version of TripleTune did in another way with the same settings."""
    # Revision b3f73d5 made other rows from these settings.
    made_by_old_version = "train.shared_prefixes" in saved
    is_interleaved = now.get("data.prompt_order") == "interleaved"
    if saved.get("train.shared_prefixes") or (made_by_old_version and is_interleaved):
        yield "an earlier version made the rows in another way"
    weights = [now.get(f"train.{name}") for name in ("loss_per", "action_weight", "answer_weight")]
    has_own_weights = weights not in ([None, None, None], ["token", 1, 1])
    if has_own_weights and GROUPED not in environment:
        yield "an earlier version weighted the losses in another way"


def _changed_step_size(config: AnyConfig, before: _Flat, now: _Flat, processes_before: int) -> Iterator[str]:
    """Yield a line if an optimiser step takes another number of records: the learning rate was chosen for the old one.

    The product of batch size, micro-batches and processes is compared, so a run may continue on another number of
    devices.
    """
    processes = process_count()
    rows_before = _rows_per_step(before, processes_before, config.train.default_accumulation)
    rows = _rows_per_step(now, processes, config.train.default_accumulation)
    if rows_before != rows:
        yield (f"records per step were {rows_before} on {processes_before} process(es) and are {rows} on {processes}")


def _rows_per_step(settings: _Flat, processes: int, default_accumulation: int) -> int:
    """Rows per optimiser step on all devices together, by the settings of a stored run or of this one.

    It must say the same as `TrainingTask.rows_per_step`, or a run would be refused that takes the same steps.
    """
    if settings["train.records_per_step"]:
        return int(settings["train.records_per_step"])
    micro_batches = settings["train.gradient_accumulation"] or default_accumulation
    return int(settings["train.batch_size"] * micro_batches * processes)


def _changed_sharding(environment: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line if the saved optimiser states can't be read: each kind of sharding saves them in other files."""
    kind_before = environment.get(SHARDING, "")
    processes_before = environment[PROCESSES]
    kind = sharding()
    processes = process_count()
    # ZeRO saves one file per process.
    needs_same_processes = kind.startswith("ZeRO")
    if kind_before != kind or (needs_same_processes and processes_before != processes):
        before = f"{kind_before or 'DDP or one process'} on {processes_before}"
        now = f"{kind or 'DDP or one process'} on {processes}"
        yield f"optimiser states were saved with {before} process(es), and this run uses {now}"


def _changed_contents(now: _Flat, digest: Mapping[str, str], environment: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each data set, model or file whose digest is not that of the run's start.

    A digest that the start did not record, as earlier versions did not, counts as the same.
    """
    for name, content in digest.items():
        if environment.get(name, content) != content:
            in_words = _IN_WORDS.get(name) or f"{name} {now[name]}"
            change = f"the content of {in_words} has changed"
            if name == TRAIN_SHA256 and now.get("data.validation"):
                change += " (training rows that are also in data.validation are left out)"
            yield change


def checkpoint_to_continue(config: AnyConfig, digest: Mapping[str, str]) -> Path | None:
    """Return the newest checkpoint of this run in the run folder; None for a new run, or without checkpoints.

    A finished run without checkpoints is compared too: its result would be taken for one of the new settings.
    """
    check_writable(config.output_dir)
    if not config.resume:
        return None
    checkpoint = newest_checkpoint(config.output_dir)
    folder = Path(config.output_dir)
    has_result = (folder / RESULT).is_file()
    if checkpoint is None and any(folder.glob("checkpoint-*")):
        logger.warning("no checkpoint of %s is complete and undamaged: the run starts at step 0", config.output_dir)
    elif checkpoint is None and (folder / LOSS_FILE).is_file() and not has_result:
        logger.warning(
            "%s was stopped before its first checkpoint (train.save_steps %s): the run starts at step 0",
            config.output_dir,
            config.train.save_steps,
        )
    if checkpoint is not None or has_result:
        check_same_run(config, digest)
    return checkpoint


def newest_checkpoint(output_dir: str | Path) -> Path | None:
    """The newest complete, undamaged checkpoint (its trainer state is written last).

    Reading weights takes long, so damage is looked for from the newest checkpoint on, and only until one is whole.
    """
    checkpoints = []
    for folder in Path(output_dir).glob("checkpoint-*"):
        try:
            state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
            checkpoints.append((int(state["global_step"]), folder))
        except (OSError, ValueError, KeyError):
            logger.warning("%s is incomplete and is skipped", folder)
    for _, folder in sorted(checkpoints, reverse=True):
        try:
            _check_undamaged(folder)
        except (OSError, ValueError) as error:
            logger.warning("%s is skipped: %s", folder, error)
        else:
            return folder
    return None


def _check_undamaged(checkpoint: Path) -> None:
    """Raise an error if a full disk or a failed copy has cut files off, or if weights are not finite.

    Files of optimiser and random states (`.pt`) are zip archives, whose directory of contents stands at the end, so a
    file that was cut off is no archive.
    """
    for file in checkpoint.glob("*.safetensors"):
        check_weights(file)
    for file in checkpoint.glob("*.pt*"):
        if not zipfile.is_zipfile(file):
            raise ValueError(f"{file} is cut off or damaged")
    check_finite(stored_weights(checkpoint), checkpoint)


def put_earlier_run_aside(config: AnyConfig, continues: bool) -> None:
    """Remove an earlier run's checkpoints and rename its result to `final.previous`; the folder must be locked.

    Trainers delete the checkpoints of the smallest steps first; these would be the new run's. The earlier result must
    not be mistaken for a result of the new settings.
    """
    folder = Path(config.output_dir)
    (folder / PREEMPTED).unlink(missing_ok=True)
    if not config.resume:
        for checkpoint in sorted(folder.glob("checkpoint-*")):
            if checkpoint.is_dir():
                logger.info("removing %s: the run starts again", checkpoint)
                shutil.rmtree(checkpoint)
    result = folder / FINAL
    if not continues and result.is_dir():
        aside = result.with_name(f"{FINAL}.previous")
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(result, aside)
        logger.info("the result of the earlier run is now in %s", aside)


def check_writable(output_dir: str | Path) -> None:
    """Make the run folder before anything is loaded; refuse a folder that holds other files."""
    folder = Path(output_dir)
    check_folder(output_dir, ("cache", PREEMPTED, *LOGS), True, continues=ENVIRONMENT)
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"output_dir {folder} can't be written: name another folder")


def process_count() -> int:
    """The number of training processes; one process with several GPUs is refused."""
    from accelerate import DistributedType, PartialState

    state = PartialState()
    devices = torch.cuda.device_count()
    if state.distributed_type is DistributedType.NO and devices > 1:
        # transformers would wrap the model in `nn.DataParallel`, which hands all graphs to every copy.
        raise ValueError(
            f"one process sees {devices} GPUs: start one process per GPU (accelerate launch --num_processes {devices}),"
            " or make one GPU visible (CUDA_VISIBLE_DEVICES=0)"
        )
    return int(state.num_processes)


def sharding() -> str:
    """How accelerate's launcher shards a model's states: "ZeRO-2", "ZeRO-3", "FSDP2", or "".

    Read from the launcher's variables, because checks need it before accelerate has made its plug-ins.
    """
    if _launcher_sets("ACCELERATE_USE_DEEPSPEED"):
        return f"ZeRO-{os.environ.get('ACCELERATE_DEEPSPEED_ZERO_STAGE', '2')}"
    if not _launcher_sets("ACCELERATE_USE_FSDP"):
        return ""
    _check_fsdp("fsdp_version", "2", "FSDP1 is not supported")
    _check_fsdp("fsdp_state_dict_type", "FULL_STATE_DICT", "with any other type the result would hold no weights")
    return "FSDP2"


def _launcher_sets(variable: str) -> bool:
    """Whether `accelerate launch` has switched something on, for which it writes "true"."""
    return os.environ.get(variable, "").lower() == "true"


def _check_fsdp(name: str, needed: str, reason: str) -> None:
    """Raise an error if a setting of FSDP in the launcher's file has another value than the only one that works."""
    value = os.environ.get(name.upper())
    if value != needed:
        raise ValueError(
            f"the launcher's {name} is {value}, but must be {needed}: {reason}; see recipes/accelerate/fsdp2.yaml"
        )
