"""A training run of any task, from command line to result: check, load, tokenise, train, save.

`--dry-run` stops before training and shows the plan, the first row and its loss mask.
"""

from __future__ import annotations

import gc
import inspect
import logging
import math
import os
import re
import shlex
import subprocess
import sys
import typing
from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from tripletune.core import libraries
from tripletune.core.command_line import parse_command_line
from tripletune.core.data.records import IGNORED
from tripletune.core.hub import make_repository
from tripletune.core.options import ConfigError, misfits, not_one_of, to_yaml
from tripletune.core.plugins import load_from
from tripletune.core.program import run_program
from tripletune.core.tables import printable
from tripletune.models.run_folders import RESULT
from tripletune.train.tasks import TrainingTask

if __name__ == "train":
    raise ImportError("import it as tripletune.train; under its short name it would be loaded twice")

logger = logging.getLogger(__name__)
TASKS = "tripletune.train.tasks"
# Fields of PEFT's LoraConfig, arguments of a schedule, and training arguments that a run sets itself or has no use for.
_OURS_OF_LORA = ("r", "lora_alpha", "lora_dropout", "target_modules", "base_model_name_or_path", "revision",
                 "task_type", "peft_type", "peft_version", "auto_mapping", "inference_mode")  # fmt: skip
_OURS_OF_ARGUMENTS = ("gradient_checkpointing", "train_sampling_strategy")
_OURS_OF_SCHEDULES = ("optimizer", "num_warmup_steps", "num_training_steps", "last_epoch")
# Trains a task, from a checkpoint or from the start.
Steps = Callable[[Any, Path | None], None]


def main(name: str, description: str = "", argv: Sequence[str] | None = None, run: Steps | None = None) -> int:
    """Train the task in a module of `train/tasks/` from a command line, with a recipe's steps `run` or with `fit`."""

    def program() -> None:
        module = load_from(TASKS, name.replace("-", "_"), "training task")
        example = f"tripletune train {name.replace('_', '-')} {module.TASK.usage} --output_dir FOLDER --dry-run"
        about = description or module.__doc__ or ""
        config, dry_run = parse_command_line(module.TASK.Config, about, argv, example="" if description else example)
        train(module.TASK(config), dry_run, run)

    return run_program(
        program,
        form="%(asctime)s %(message)s",
        stopped="stopped; the same command continues from the newest checkpoint",
    )


def train(task: TrainingTask, dry_run: bool = False, run: Steps | None = None) -> None:
    """Check the task before anything is loaded, then do a dry run or train."""
    from accelerate import PartialState

    checkpoint = check(task, dry_run)
    if not dry_run:
        if checkpoint is None and task.config.resume and (Path(task.config.output_dir) / RESULT).is_file():
            logger.info("%s is finished; to train again, set --resume false", task.config.output_dir)
        else:
            (run or fit)(task, checkpoint)
        if task.config.push_to_hub and PartialState().is_main_process:
            push_result(task)
        return
    task.begin()
    if PartialState().is_main_process:
        sys.stdout.write(printable(dry_run_report(task)) + "\n")


def fit(task: TrainingTask, checkpoint: Path | None) -> None:
    """Load model and rows of any task, train and save; recipes write these steps out."""
    task.begin()
    engine = engine_of(task)
    engine.run(checkpoint)
    engine.save_result()


def push_result(task: TrainingTask) -> None:
    """Free the run's GPU memory, then export, verify and push the result with `tripletune checkpoints push`."""
    import torch

    task.model = None
    gc.collect()
    torch.cuda.empty_cache()
    folder, words = task.config.output_dir, ["checkpoints", "push", task.config.output_dir, task.config.push_to_hub]
    if subprocess.run([sys.executable, "-m", "tripletune", *words], check=False).returncode:
        raise OSError(f"{folder} is trained, but the push failed; push again with: tripletune {shlex.join(words)}")


def engine_of(task: TrainingTask) -> Any:
    """Return the task's own trainer, or else an engine; model and rows must be loaded."""
    from tripletune.train.engine import Engine

    return task.trainer() or Engine(
        task.model, task.train, task.collator(), task.config, validation=task.validation, task=task
    )


def check(task: TrainingTask, dry_run: bool) -> Path | None:
    """Check settings and data before anything is loaded, and return the checkpoint to continue from."""
    import torch

    from tripletune.train.resume import check_writable, checkpoint_to_continue, process_count, sharding

    config = task.config
    if config.model.attention.startswith(("flex", "flash")) and not torch.cuda.is_available():
        raise ValueError(f"model.attention {config.model.attention} needs a GPU, and there is none: use auto or blocks")
    if sharding() in ("ZeRO-3", "FSDP2") and config.model.quantization != "none":
        raise ValueError(
            "model.quantization: 4-bit weights can't be sharded: use recipes/accelerate/ddp.yaml or zero2.yaml"
        )
    if config.train.best_metric and task.sources[1] is None:
        raise ValueError("train.best_metric: there are no validation data: set data.validation, or leave it out")
    first = _start_process(config.train.ddp_timeout)
    config.train.micro_batches(process_count())
    if found := library_misfits(config):
        raise ConfigError(f"the configuration: {len(found)} problem(s)\n" + "\n".join(f"  - {one}" for one in found))
    check_writable(config.output_dir)
    for source in task.sources:
        if source is not None:
            source.check()
    if dry_run:
        return None
    if first:
        check_tracking(config.report_to)
        if config.push_to_hub:
            make_repository(config.push_to_hub, "model")
    return checkpoint_to_continue(config, task.digest)


def library_misfits(config: Any) -> list[str]:
    """Settings that the installed PEFT and transformers would refuse."""
    from peft import LoraConfig
    from torch.optim.lr_scheduler import ReduceLROnPlateau
    from transformers import GreedyLR, SchedulerType, TrainingArguments

    from tripletune.train.engine import own_arguments

    libraries.check_use("settings of training")
    model, train, kind = config.model, config.train, type(config)
    # Other initialisations need data or random numbers: a checkpoint would be loaded onto another base.
    inits = bool | Literal["gaussian", "olora", "orthogonal", "pissa"]
    hints = {**typing.get_type_hints(LoraConfig), "init_lora_weights": inits}
    found = misfits("model.lora_options", model.lora_options, hints, _OURS_OF_LORA, kind)
    hints, own = typing.get_type_hints(TrainingArguments), (*own_arguments(config), *_OURS_OF_ARGUMENTS)
    hints = {name: hint for name, hint in hints.items() if not name.startswith("hub_")}
    found += misfits("train.arguments", train.arguments, hints, own, kind)
    # Smoothing changes `eval_loss` and knows no weights of records; only a resumed run evaluates at its start.
    refused = (name for name in ("label_smoothing_factor", "eval_on_start") if train.arguments.get(name))
    found += [f"train.arguments: {name} does not fit our losses and evaluations; leave it out" for name in refused]
    optimizer_names = libraries.take("transformers.training_args:OptimizerNames")
    optimizers, schedulers = ([one.value for one in names] for names in (optimizer_names, SchedulerType))
    if train.optimizer not in (None, *optimizers):
        found.append(not_one_of("train.optimizer", train.optimizer, optimizers))
    elif re.search("bnb|paged|lion|ademamix|^adamw_8bit", train.optimizer or "") and not find_spec("bitsandbytes"):
        found.append(f"train.optimizer {train.optimizer} needs bitsandbytes: pip install 'tripletune[qlora]'")
    if train.scheduler not in schedulers:
        return [*found, not_one_of("train.scheduler", train.scheduler, schedulers)]
    maker = {"reduce_lr_on_plateau": ReduceLROnPlateau, "greedy": GreedyLR}.get(train.scheduler)
    makers = libraries.take("transformers.optimization:TYPE_TO_SCHEDULER_FUNCTION")
    maker = maker or makers[SchedulerType(train.scheduler)]
    takes = inspect.signature(maker, eval_str=True).parameters
    hints = {name: Any if one.annotation is one.empty else one.annotation for name, one in takes.items()}
    found += misfits("train.scheduler_arguments", train.scheduler_arguments, hints, _OURS_OF_SCHEDULES)
    given = (*_OURS_OF_SCHEDULES, *train.scheduler_arguments)
    missing = (name for name, one in takes.items() if one.default is one.empty and name not in given)
    return found + [f"train.scheduler {train.scheduler} needs {name} in train.scheduler_arguments" for name in missing]


def _start_process(timeout: int) -> bool:
    """Create the process group and return whether this is the main process; other processes log only warnings.

    The group's time-out can be set only here.
    """
    import datasets
    import torch
    from accelerate import DistributedType, PartialState
    from transformers.utils import logging as transformers_logging

    state = PartialState(cpu=not torch.cuda.is_available(), timeout=timedelta(seconds=timeout))
    if not state.is_main_process:
        logging.getLogger().setLevel(logging.WARNING)
    for name in ("datasets", "accelerate", "absl"):
        logging.getLogger(name).setLevel(logging.WARNING)
    transformers_logging.disable_progress_bar()
    datasets.disable_progress_bars()
    how = "" if state.distributed_type is DistributedType.NO else f", {state.distributed_type.value}"
    logger.info("%d process(es) on %s%s", state.num_processes, state.device, how)
    return bool(state.is_main_process)


def dry_run_report(task: TrainingTask) -> str:
    """Return the text that a dry run prints; model and rows must be loaded."""
    parts = {
        "resolved configuration": to_yaml(task.config),
        task.unit: "\n".join(task.counts()),
        "steps": "\n".join([_steps(task), *task.notes()]),
        "memory (estimate)": memory_estimate(task),
        "first row, learned tokens between ⟦ and ⟧": _masked_text(*task.example(), task.processor),
    }
    lines = (line for head, text in parts.items() for line in (head, *(f"  {row}" for row in text.split("\n") if row)))
    return "\n".join(lines)


def memory_estimate(task: TrainingTask) -> str:
    """Return the sizes of weights, gradients and optimiser states, and estimate activations for the longest row."""
    from tripletune.train.engine import use_bf16

    train, parameters = task.config.train, list(task.model.parameters())
    frozen = sum(p.numel() * p.element_size() for p in parameters if not p.requires_grad)
    weights = sum(p.numel() * p.element_size() for p in parameters if p.requires_grad)
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    # A gradient and two moments of AdamW, each of the weight's type or a byte.
    states = weights + 2 * (trained if "8bit" in (train.optimizer or "") else weights)
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
            f"gradients, optimiser  {_gb(states)}",
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
    """Make sure that a run can report to its trackers."""
    callbacks = libraries.take("transformers.integrations:INTEGRATION_TO_CALLBACK")
    for name in set(report_to) - {"none", "wandb"}:
        try:
            callbacks[name]()
        except (RuntimeError, ValueError, ImportError) as error:
            raise ValueError(f"report_to {name}: {error} Or leave {name} out.") from None
    if "wandb" not in report_to or os.environ.get("WANDB_MODE", "online") in ("offline", "disabled", "dryrun"):
        return
    import wandb

    try:
        # It looks for a key, and asks for one on a terminal.
        wandb.login()
    except wandb.errors.UsageError as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ValueError(
            f"report_to wandb: {reason}. To log on this machine alone, set WANDB_MODE=offline; to train without W&B, "
            "set --report_to none"
        ) from None
