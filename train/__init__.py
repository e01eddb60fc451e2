"""A training run from its command line to its result, alike for every task: check, load, tokenise, train, save.

`--dry-run` ends before training and says what a run would do, with its first row and the loss mask.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import Any

from tripletune.models.data.records import IGNORED
from tripletune.models.files import new_folder, write_json
from tripletune.models.options import parse_command_line, to_yaml
from tripletune.models.program import load_from, run_program
from tripletune.models.run_folders import FINAL, seconds_until
from tripletune.models.tables import printable
from tripletune.train.tasks import TrainingTask

logger = logging.getLogger(__name__)
TASKS = "tripletune.train.tasks"


def main(name: str, description: str = "", argv: Sequence[str] | None = None) -> int:
    """Train what a task's name says, as a command line says.

    Args:
        name: A module of `train/tasks/`.
        description: Help text; the module's own unless given.
        argv: The words of the command line; those of this process unless given.

    Returns:
        The exit code.
    """

    def program() -> None:
        module = load_from(TASKS, name.replace("-", "_"), "training task")
        config, dry_run = parse_command_line(module.TASK.Config, description or module.__doc__ or "", argv)
        train(module.TASK(config), dry_run)

    return run_program(
        program,
        form="%(asctime)s %(message)s",
        stopped="stopped; the same command continues from the newest checkpoint",
    )


def train(task: TrainingTask, dry_run: bool = False) -> None:
    """Do a whole run, or say what it would do.

    Args:
        task: The task, with its configuration.
        dry_run: Print the report instead of training.

    Raises:
        OSError: data or model are not there, or the run folder can't be written.
        ValueError: data are not well formed, or the folder holds another run.
    """
    from tripletune.train.resume import check_same_run, check_writable, newest_checkpoint, sharding

    config = task.config
    if sharding() in ("ZeRO-3", "FSDP2") and config.model.quantization != "none":
        raise ValueError(
            "model.quantization: weights of 4 bits can't be divided; take recipes/accelerate/ddp.yaml or zero2.yaml"
        )
    state = _start_process(config.train.ddp_timeout)
    config.train.micro_batches(state.num_processes)
    check_writable(config.output_dir)
    for source in task.sources:
        if source is not None:
            source.check()
    if state.is_main_process and not dry_run:
        check_tracking(config.report_to)
    checkpoint = newest_checkpoint(config.output_dir) if config.resume and not dry_run else None
    if checkpoint is not None:
        # Before the model is loaded, and before anything of the earlier start is written over.
        check_same_run(config, task.sources[0].digest)
    task.begin()
    for warning in task.warnings():
        logger.warning("%s", warning)
    if not dry_run:
        _train_and_save(task, checkpoint)
    elif state.is_main_process:
        sys.stdout.write(printable(dry_run_report(task)) + "\n")


def _train_and_save(task: TrainingTask, checkpoint: Path | None) -> None:
    from tripletune.train.batches import rows_meta
    from tripletune.train.engine import LOSS_FILE

    trainer = task.trainer()
    if checkpoint is None:
        task.prepare()
    else:
        logger.info("continuing from %s", checkpoint)
    trained = sum(p.numel() for p in task.model.parameters() if p.requires_grad)
    logger.info("training %s parameters on %d %s", f"{trained:,}", rows_meta(task.train)["rows"], task.unit)
    for note in (_counts("train", task.train), _counts("validation", task.validation), *task.notes()):
        logger.info("%s", note)
    if task.validation is None:
        logger.info("there are no validation data: nothing is evaluated")
    seconds = trainer.train_as_run(checkpoint, task.sources[0].digest)
    metrics = trainer.evaluate_at_the_end()
    folder, steps = Path(task.config.output_dir) / FINAL, trainer.state.global_step
    parts = {"train": (task.sources[0], task.train), "validation": (task.sources[1], task.validation)}
    result = {
        task.unit: rows_meta(task.train)["rows"],
        "steps": steps,
        # What it took before a kill counts too.
        "seconds": round(max(seconds, seconds_until(folder.parent / LOSS_FILE, steps)), 1),
        "data": {
            name: source and {"path": ", ".join(source.paths), "sha256": source.digest}
            for name, (source, _) in parts.items()
        },
        "tokenised": {name: rows_meta(rows) for name, (_, rows) in parts.items() if rows is not None},
        **task.facts(),
        "evaluation": metrics,
    }
    if trainer.is_world_process_zero():
        with new_folder(folder, ["*"], overwrite=True) as scratch:
            trainer.save_model(str(scratch))
            write_json(scratch / "training.json", result)
    else:
        trainer.save_model(str(folder))  # where weights are divided among the processes, all take part
    logger.info("trained for %d s; the result is in %s", seconds, folder)
    for name in sorted(metrics):
        logger.info("%s = %.4g", name, metrics[name])


def _start_process(timeout: int) -> Any:
    """accelerate's `PartialState`; processes but the first log warnings alone.

    The group of processes begins here, so the time that they wait for each other is set here and nowhere later.

    Raises:
        ValueError: one process would train on several GPUs.
    """
    import torch
    from accelerate import DistributedType, PartialState
    from transformers.utils import logging as transformers_logging

    state = PartialState(cpu=not torch.cuda.is_available(), timeout=timedelta(seconds=timeout))
    if state.distributed_type is DistributedType.NO and (devices := torch.cuda.device_count()) > 1:
        # transformers would wrap the model in `nn.DataParallel`, which hands all graphs to every copy.
        raise ValueError(
            f"one process sees {devices} GPUs: start one per GPU with accelerate launch --num_processes {devices}, or "
            "show it one with CUDA_VISIBLE_DEVICES=0"
        )
    if not state.is_main_process:
        logging.getLogger().setLevel(logging.WARNING)
    for name in ("datasets", "accelerate", "absl"):
        logging.getLogger(name).setLevel(logging.WARNING)
    transformers_logging.disable_progress_bar()
    how = "" if state.distributed_type is DistributedType.NO else f", {state.distributed_type.value}"
    logger.info("%d process(es) on %s%s", state.num_processes, state.device, how)
    return state


def dry_run_report(task: TrainingTask) -> str:
    """The dry run's text.

    Args:
        task: The task, its model loaded and its rows made.
    """
    parts = {
        "resolved configuration": to_yaml(task.config),
        task.unit: "\n".join([_counts("train", task.train), _counts("validation", task.validation)]),
        "steps": "\n".join([_steps(task), *task.notes()]),
        "memory (estimate)": memory_estimate(task),
        "first row, learned tokens between ⟦ and ⟧": _masked_text(*task.example(), task.processor),
    }
    lines = (line for head, text in parts.items() for line in (head, *(f"  {row}" for row in text.split("\n") if row)))
    return "\n".join(lines)


def memory_estimate(task: TrainingTask) -> str:
    """Weights, gradients and optimiser states exactly; activations roughly, for the longest row."""
    from tripletune.train.engine import use_bf16

    train, parameters = task.config.train, list(task.model.parameters())
    frozen = sum(p.numel() * p.element_size() for p in parameters if not p.requires_grad)
    weights = sum(p.numel() * p.element_size() for p in parameters if p.requires_grad)
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    # A gradient and two moments of AdamW, each of the weight's type.
    states = 3 * weights
    packs = "seq_lengths" in task.train.column_names
    longest = train.pack_tokens if packs else int(task.train.with_format("numpy")["length"][:].max())
    text = task.model.config.get_text_config()
    # About 34 bytes of half precision per number of the hidden width are kept per token and layer (Korthikanti et al.,
    # 2022, eq. 2, without the attention matrix, which fused attention does not store), or two with checkpointing.
    kept = 1 if train.gradient_checkpointing else 17
    width = 2 if use_bf16(train.bf16) or parameters[0].element_size() == 2 else 4
    activations = train.batch_size * longest * text.hidden_size * text.num_hidden_layers * kept * width
    return "\n".join(
        [
            f"frozen weights        {_gb(frozen)}",
            f"trained weights       {_gb(weights)} ({trained:,} parameters)",
            f"gradients + AdamW     {_gb(states)}",
            f"activations           {_gb(activations)} for {train.batch_size} x {longest} tokens, roughly",
            f"total                 {_gb(frozen + weights + states + activations)} per device",
        ]
    )


def _masked_text(ids: Sequence[int], labels: Sequence[int], processor: Any) -> str:
    tokenizer = getattr(processor, "tokenizer", processor)
    if len(ids) != len(labels):  # source and target of an encoder-decoder
        return f"{tokenizer.decode(ids)}\n⟦{tokenizer.decode([token for token in labels if token != IGNORED])}⟧"
    pieces = []
    # Whole stretches are decoded, because a character may be several tokens.
    for learned, stretch in groupby(zip(ids, labels), key=lambda pair: pair[1] != IGNORED):
        text = str(tokenizer.decode([token for token, _ in stretch]))
        pieces.append(f"⟦{text}⟧" if learned else text)
    return "".join(pieces)


def _counts(name: str, rows: Any) -> str:
    from tripletune.train.batches import rows_meta

    if rows is None:
        return f"{name}: none"
    counts = rows_meta(rows).items()
    listed = ", ".join(f"{what.replace('_', ' ') if what.islower() else what} {count:,}" for what, count in counts)
    packs = f", in {len(rows):,} packs" if "seq_lengths" in rows.column_names else ""
    return f"{name}: {listed}{packs}"


def _steps(task: TrainingTask) -> str:
    from tripletune.train.resume import process_count

    train, devices = task.config.train, process_count()
    per_step = train.batch_size * train.micro_batches(devices) * devices
    steps = train.max_steps or math.ceil(task.steps_per_epoch(per_step) * train.epochs)
    warmup = math.ceil(train.warmup_ratio * steps)
    return f"{steps} optimiser steps, {warmup} of them warm-up\n{task.step_size(devices)}"


def _gb(count: float) -> str:
    return f"{count / 1e9:8.3f} GB"


def check_tracking(report_to: Sequence[str]) -> None:
    """Make sure that a run can report to its trackers, before a model is loaded.

    Args:
        report_to: Trackers by name: "wandb", "tensorboard", "none".

    Raises:
        ValueError: a package is missing, or W&B has no login.
    """
    if "tensorboard" in report_to and not any(map(importlib.util.find_spec, ("tensorboard", "tensorboardX"))):
        raise ValueError(
            "report_to tensorboard: the package is not installed; pip install tensorboard, or leave it out"
        )
    if "wandb" not in report_to or os.environ.get("WANDB_MODE", "online") in ("offline", "disabled", "dryrun"):
        return
    import wandb

    try:
        # Looks for a key; asks for one where there is a terminal.
        wandb.login()
    except wandb.errors.UsageError as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ValueError(
            f"report_to wandb: {reason}. To keep the run's records here instead set WANDB_MODE=offline; without W&B: "
            "--report_to none"
        ) from None
