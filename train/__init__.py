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
from tripletune.core.config import to_yaml
from tripletune.core.data.records import IGNORED
from tripletune.core.hub import make_repository
from tripletune.core.options import ConfigError, misfits, not_one_of
from tripletune.core.plugins import load_from
from tripletune.core.program import run_program
from tripletune.core.tables import printable
from tripletune.models.run_folders import RESULT
from tripletune.train.settings import RunConfig
from tripletune.train.tasks import TrainingTask

if __name__ == "train":
    raise ImportError("import it as tripletune.train; under its short name it would be loaded twice")

logger = logging.getLogger(__name__)
TASKS = "tripletune.train.tasks"
# Fields of PEFT's LoraConfig, training arguments, and arguments of a schedule that a run sets itself or has no use for.
_OWN_LORA_FIELDS = (
    "r", "lora_alpha", "lora_dropout", "target_modules", "base_model_name_or_path", "revision", "task_type",
    "peft_type", "peft_version", "auto_mapping", "inference_mode",
)  # fmt: skip
_OWN_ARGUMENTS = ("gradient_checkpointing", "train_sampling_strategy")
_OWN_SCHEDULE_ARGUMENTS = ("optimizer", "num_warmup_steps", "num_training_steps", "last_epoch")
# Optimisers that come with bitsandbytes.
_BITSANDBYTES = re.compile("bnb|paged|lion|ademamix|^adamw_8bit")
# W&B sends nothing in these modes, so it needs no key.
_OFFLINE = ("offline", "disabled", "dryrun")
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

    config = task.config
    checkpoint = check(task, dry_run)
    if dry_run:
        task.begin()
        if PartialState().is_main_process:
            sys.stdout.write(printable(dry_run_report(task)) + "\n")
        return
    is_finished = config.resume and (Path(config.output_dir) / RESULT).is_file()
    if is_finished and checkpoint is None:
        logger.info("%s is finished; to train again, set --resume false", config.output_dir)
    elif run is not None:
        run(task, checkpoint)
    else:
        fit(task, checkpoint)
    if config.push_to_hub and PartialState().is_main_process:
        push_result(task)


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
    folder = task.config.output_dir
    command = ["checkpoints", "push", folder, task.config.push_to_hub]
    finished = subprocess.run([sys.executable, "-m", "tripletune", *command], check=False)
    if finished.returncode != 0:
        raise OSError(f"{folder} is trained, but the push failed; push again with: tripletune {shlex.join(command)}")


def engine_of(task: TrainingTask) -> Any:
    """Return the task's own trainer, or else an engine; model and rows must be loaded."""
    from tripletune.train.engine import Engine

    trainer = task.trainer()
    if trainer is not None:
        return trainer
    return Engine(task.model, task.train, task.collator(), task.config, validation=task.validation, task=task)


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
    if config.train.best_metric and task.sources.validation is None:
        raise ValueError("train.best_metric: there are no validation data: set data.validation, or leave it out")
    is_main_process = _start_process(config.train.ddp_timeout)
    config.train.micro_batches(process_count())  # raises an error for numbers that do not fit
    problems = library_misfits(config)
    if problems:
        lines = "\n".join(f"  - {problem}" for problem in problems)
        raise ConfigError(f"the configuration: {len(problems)} problem(s)\n{lines}")
    check_writable(config.output_dir)
    for source in task.sources:
        if source is not None:
            source.check()
    if dry_run:
        return None
    if is_main_process:
        check_tracking(config.report_to)
        if config.push_to_hub:
            make_repository(config.push_to_hub, "model")
    return checkpoint_to_continue(config, task.digest)


def library_misfits(config: RunConfig) -> list[str]:
    """Settings that the installed PEFT and transformers would refuse."""
    libraries.check_use("settings of training")
    return [
        *_lora_misfits(config),
        *_argument_misfits(config),
        *_optimizer_misfits(config.train.optimizer),
        *_schedule_misfits(config),
        *_tracker_misfits(config.report_to),
    ]


def _lora_misfits(config: RunConfig) -> list[str]:
    from peft import LoraConfig

    hints = typing.get_type_hints(LoraConfig)
    # Other initialisations need data or random numbers: a checkpoint would be loaded onto another base.
    hints["init_lora_weights"] = bool | Literal["gaussian", "olora", "orthogonal", "pissa"]
    return misfits("model.lora_options", config.model.lora_options, hints, _OWN_LORA_FIELDS, type(config))


def _argument_misfits(config: RunConfig) -> list[str]:
    from transformers import TrainingArguments

    from tripletune.train.arguments import broken_promises, own_arguments

    arguments = config.train.arguments
    hints = typing.get_type_hints(TrainingArguments)
    # `push_to_hub` of ours pushes the result, not checkpoints.
    hints = {name: hint for name, hint in hints.items() if not name.startswith("hub_")}
    problems = misfits("train.arguments", arguments, hints, (*own_arguments(config), *_OWN_ARGUMENTS), type(config))
    return problems + broken_promises(arguments)


def _optimizer_misfits(optimizer: str | None) -> list[str]:
    if optimizer is None:
        return []
    names = [member.value for member in libraries.take("transformers.training_args:OptimizerNames")]
    if optimizer not in names:
        return [not_one_of("train.optimizer", optimizer, names)]
    if _BITSANDBYTES.search(optimizer) and not find_spec("bitsandbytes"):
        return [f"train.optimizer {optimizer} needs bitsandbytes: pip install 'tripletune[qlora]'"]
    return []


def _schedule_misfits(config: RunConfig) -> list[str]:
    from transformers import SchedulerType

    name = config.train.scheduler
    given = config.train.scheduler_arguments
    names = [member.value for member in SchedulerType]
    if name not in names:
        return [not_one_of("train.scheduler", name, names)]
    parameters = inspect.signature(_schedule(name), eval_str=True).parameters
    hints: dict[str, Any] = {}
    missing = []
    for argument, parameter in parameters.items():
        hints[argument] = Any if parameter.annotation is parameter.empty else parameter.annotation
        is_needed = parameter.default is parameter.empty
        if is_needed and argument not in _OWN_SCHEDULE_ARGUMENTS and argument not in given:
            missing.append(argument)
    problems = misfits("train.scheduler_arguments", given, hints, _OWN_SCHEDULE_ARGUMENTS, type(config))
    for argument in missing:
        problems.append(f"train.scheduler {name} needs {argument} in train.scheduler_arguments")
    return problems


def _schedule(name: str) -> Callable[..., Any]:
    """The class or function that makes a schedule of transformers."""
    from torch.optim.lr_scheduler import ReduceLROnPlateau
    from transformers import GreedyLR, SchedulerType

    # These two follow the loss, and transformers makes them without the table of functions.
    if name == "reduce_lr_on_plateau":
        return ReduceLROnPlateau
    if name == "greedy":
        return GreedyLR  # type: ignore[no-any-return]
    makers = libraries.take("transformers.optimization:TYPE_TO_SCHEDULER_FUNCTION")
    return makers[SchedulerType(name)]  # type: ignore[no-any-return]


def _tracker_misfits(report_to: Sequence[str]) -> list[str]:
    names = ["none", *libraries.take("transformers.integrations:INTEGRATION_TO_CALLBACK")]
    return [not_one_of("report_to", name, names) for name in report_to if name not in names]


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
    how = ""
    if state.distributed_type is not DistributedType.NO:
        how = f", {state.distributed_type.value}"
    logger.info("%d process(es) on %s%s", state.num_processes, state.device, how)
    return bool(state.is_main_process)


def dry_run_report(task: TrainingTask) -> str:
    """Return the text that a dry run prints; model and rows must be loaded."""
    from tripletune.train.resume import process_count

    sections = {
        "resolved configuration": to_yaml(task.config),
        task.unit: "\n".join(task.counts()),
        "steps": "\n".join([_steps(task), task.step_size(process_count()), *task.notes()]),
        "memory (estimate)": memory_estimate(task),
        "first row, learned tokens between ⟦ and ⟧": _masked_text(*task.example(), task.processor),
    }
    lines = []
    for heading, text in sections.items():
        lines.append(heading)
        lines += [f"  {line}" for line in text.split("\n") if line]
    return "\n".join(lines)


def memory_estimate(task: TrainingTask) -> str:
    """Return the sizes of weights, gradients and optimiser states, and estimate activations for the longest row."""
    from tripletune.train.arguments import use_bf16
    from tripletune.train.rows.cache import longest_row

    train = task.config.train
    frozen_bytes = trained_bytes = trained_numbers = 0
    for weight in task.model.parameters():
        size = weight.numel() * weight.element_size()
        if weight.requires_grad:
            trained_bytes += size
            trained_numbers += weight.numel()
        else:
            frozen_bytes += size
    # A gradient and two moments of AdamW, each of the weight's type or a byte.
    moment_bytes = trained_numbers if "8bit" in (train.optimizer or "") else trained_bytes
    state_bytes = trained_bytes + 2 * moment_bytes
    longest = train.pack_tokens if "seq_lengths" in task.train.column_names else longest_row(task.train)
    # About 34 bytes of half precision per number of the hidden width are kept per token and layer (Korthikanti et al.,
    # 2022, eq. 2, without the attention matrix, which fused attention does not store), or two with checkpointing.
    kept_numbers = 1 if train.gradient_checkpointing else 17
    computes_in_half = use_bf16(train.bf16) or next(task.model.parameters()).element_size() == 2
    bytes_per_number = 2 if computes_in_half else 4
    text_config = task.model.config.get_text_config()
    numbers_per_token = text_config.hidden_size * text_config.num_hidden_layers * kept_numbers
    activation_bytes = train.batch_size * longest * numbers_per_token * bytes_per_number
    total = frozen_bytes + trained_bytes + state_bytes + activation_bytes
    return "\n".join(
        [
            f"frozen weights        {_gb(frozen_bytes)}",
            f"trained weights       {_gb(trained_bytes)} ({trained_numbers:,} parameters)",
            f"gradients, optimiser  {_gb(state_bytes)}",
            f"activations           {_gb(activation_bytes)} for {train.batch_size} x {longest} tokens, roughly",
            f"total                 {_gb(total)} per device",
        ]
    )


def _masked_text(ids: Sequence[int], labels: Sequence[int], processor: Any) -> str:
    """Return the text of a row, with its learned stretches between ⟦ and ⟧."""
    tokenizer = getattr(processor, "tokenizer", processor)
    if len(ids) != len(labels):  # source and target of an encoder-decoder
        target = [token for token in labels if token != IGNORED]
        return f"{tokenizer.decode(ids)}\n⟦{tokenizer.decode(target)}⟧"
    text = ""
    # Whole stretches are decoded, because a character may be several tokens.
    for is_learned, stretch in groupby(zip(ids, labels), key=lambda pair: pair[1] != IGNORED):
        decoded = tokenizer.decode([token for token, _ in stretch])
        text += f"⟦{decoded}⟧" if is_learned else decoded
    return text


def _steps(task: TrainingTask) -> str:
    from tripletune.train.resume import process_count

    train = task.config.train
    steps = train.max_steps
    if steps is None:
        steps = math.ceil(task.steps_per_epoch(task.rows_per_step(process_count())) * train.epochs)
    warmup = math.ceil(train.warmup_ratio * steps)
    return f"{steps} optimiser steps, {warmup} of them warm-up"


def _gb(size: float) -> str:
    """A size in bytes as text."""
    return f"{size / 1e9:8.3f} GB"


def check_tracking(report_to: Sequence[str]) -> None:
    """Make sure that a run can report to its trackers."""
    callbacks = libraries.take("transformers.integrations:INTEGRATION_TO_CALLBACK")
    for name in set(report_to) - {"none", "wandb"}:
        try:
            callbacks[name]()
        except (RuntimeError, ValueError, ImportError) as error:
            # The error says what is missing, and ends with a full stop.
            raise ValueError(f"report_to {name}: {error} Or leave {name} out.") from None
    if "wandb" not in report_to or os.environ.get("WANDB_MODE") in _OFFLINE:
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
