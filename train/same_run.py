"""A run folder holds one run: what it was started with is compared before training goes on in it.

Weights that go on under another learning rate, or on other records, are no run that anybody could describe, and
`training.json` would name settings and data that the first steps never saw.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import yaml

from tripletune.models.files import lock_folder
from tripletune.models.run_folders import FINAL

logger = logging.getLogger(__name__)

SETTINGS, ENVIRONMENT = "config.yaml", "environment.json"
# Keys of `environment.json`: the training data's digest, and the processes of the run.
TRAIN_DIGEST, PROCESSES = "train_sha256", "processes"
# What may change between two starts: how a run is watched, kept and computed, not what is learned.
_FREE = {
    "output_dir", "run_name", "report_to", "resume",
    "data.train", "data.validation", "data.validation_split", "data.max_validation_records",
    "train.gradient_checkpointing", "train.torch_compile", "train.logging_steps", "train.workers", "train.deepspeed",
    "model.attention",
}  # fmt: skip
_FREE_BEGINNINGS = ("train.eval_", "train.save_")
# Less memory for the same step: only their product counts.
_PER_STEP = ("train.batch_size", "train.gradient_accumulation")


def check_same_run(config: Any, train_digest: str) -> None:
    """Make sure that the checkpoints in the run folder are of the run that is to go on.

    Args:
        config: The run, a dataclass with `output_dir`.
        train_digest: Fingerprint of the training data; its path may change, its content may not.

    Raises:
        ValueError: the folder was begun with other settings or other data.
    """
    folder = Path(config.output_dir)
    before, now = _stored_settings(folder / SETTINGS), dict(_flat(dataclasses.asdict(config)))
    if before is None:
        return
    # Before there were such options, runs were trained without.
    before = {"data.prompt_order": "instruction_first", "train.shared_prefixes": False} | before
    shared = now.get("train.shared_prefixes", False)
    changed = [
        f"{name} was {before[name]!r} and is {now[name]!r}"
        for name in now
        if name in before and before[name] != now[name] and not _is_free(name, shared)
    ]
    about = _stored_environment(folder / ENVIRONMENT)
    processes = about.get(PROCESSES) or process_count()  # an earlier version kept no count
    per_step = _per_step(before, processes), _per_step(now, process_count())
    if per_step[0] != per_step[1]:
        changed.append(
            f"records a step were {per_step[0]} on {processes} process(es) and are {per_step[1]} on {process_count()}"
        )
    if about.get(TRAIN_DIGEST) not in (None, train_digest):
        changed.append("the training data have another content")
    if changed:
        raise ValueError(
            f"{folder} holds checkpoints of another run: {'; '.join(changed)}. Give another --output_dir, "
            "--resume false to start anew here, or what the run was begun with to go on"
        )


def forget_checkpoints(output_dir: str | Path) -> None:
    """Remove the checkpoints of an earlier run, which a new one in their folder would be mixed up with.

    Trainers delete the checkpoints with the smallest steps first: those of the new run. Hold the folder meanwhile.
    """
    for folder in sorted(Path(output_dir).glob("checkpoint-*")):
        if folder.is_dir():
            logger.info("removing %s: the run starts anew", folder)
            shutil.rmtree(folder)


def set_result_aside(output_dir: str | Path) -> None:
    """Rename the result of an earlier run to `final.previous`: beside the settings of a new one it would pass for its.

    Hold the folder meanwhile.
    """
    result = Path(output_dir) / FINAL
    if result.is_dir():
        aside = result.with_name(f"{FINAL}.previous")
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(result, aside)
        logger.info("the result of the earlier run is now in %s", aside)


def process_count() -> int:
    """How many processes train together."""
    from accelerate import PartialState

    return int(PartialState().num_processes)


@contextmanager
def only_run_in(output_dir: str | Path) -> Iterator[None]:
    """Hold a run folder, in which two processes would mix their checkpoints and loss logs.

    The system lets go of it when the process ends in any way. Where there are no such locks nothing is held.

    Raises:
        ValueError: another process holds it.
    """
    folder = Path(output_dir)
    lock = lock_folder(
        folder, f"another process trains in {folder}: wait for it or stop it, or give another --output_dir"
    )
    with lock or nullcontext():
        yield


def write_text(path: Path, text: str) -> None:
    """Write a file in one step."""
    scratch = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    scratch.write_text(text, encoding="utf-8")
    os.replace(scratch, path)


def _is_free(name: str, shared_prefixes: bool) -> bool:
    # Records that share a prefix are in one micro-batch, whose size then makes their order.
    return name in _FREE or (name in _PER_STEP and not shared_prefixes) or name.startswith(_FREE_BEGINNINGS)


def _stored_settings(path: Path) -> dict[str, Any] | None:
    try:
        stored = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None
    return dict(_flat(stored)) if isinstance(stored, dict) else None


def _stored_environment(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _per_step(settings: dict[str, Any], processes: int) -> int | None:
    sizes = [settings.get(name) for name in _PER_STEP]
    if not all(isinstance(size, int) for size in sizes):
        return None
    return sizes[0] * sizes[1] * processes  # type: ignore[operator]
