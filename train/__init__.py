"""A training run of any task, from command line to result: check, load, tokenise, train, save.

`--dry-run` stops before training and shows the plan, the first row and its loss mask.
"""

from __future__ import annotations

import gc
import logging
import math
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tripletune.core.command_line import parse_command_line
from tripletune.core.config import to_yaml
from tripletune.core.data.records import IGNORED
from tripletune.core.hub import make_repository
from tripletune.core.options import ConfigError
from tripletune.core.plugins import load_from
from tripletune.core.program import run_program
from tripletune.core.tables import printable
from tripletune.models.run_folders import RESULT
from tripletune.train.misfits import check_tracking, library_misfits
from tripletune.train.tasks import TrainingTask

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tripletune.train.engine import EngineMixin

if __name__ == "train":
    raise ImportError("import it as tripletune.train; under its short name it would be loaded twice")

logger = logging.getLogger(__name__)
# A threshold of ours: more passes than this are more likely a slip than a plan.
_MANY_PASSES = 20
# The GPU of the estimated hours: its operations per second, and in words.
_GPU_OPERATIONS = 1.25e14
_GPU = "125 TFLOP/s (an A100 at 40 % of its bf16 peak)"
TASKS = "tripletune.train.tasks"
# Trains a task, from a checkpoint or from the start.
Steps = Callable[[Any, Path | None], None]


def main(name: str, description: str = "", argv: Sequence[str] | None = None, run: Steps | None = None) -> int:
    """Train the task in a module of `train/tasks/` from a command line, with a recipe's steps `run` or with `fit`.

    Args:
        name: The task, which is the name of its module.
        description: A recipe's text for `--help`, which has its own commands; "" takes the text of the module.
        argv: Words of the command line; None takes those of the process.
        run: The steps of a recipe.

    Returns:
        The exit code: 0, 2 for bad input, 75 after a stop from which the same command continues.
    """

    def train_from_arguments() -> None:
        """Read the command line and train; a recipe's own text replaces the general example of `--help`."""
        module = load_from(TASKS, name.replace("-", "_"), "training task")
        example = f"tripletune train {name.replace('_', '-')} {module.TASK.usage} --output_dir FOLDER --dry-run"
        about = description or module.__doc__ or ""
        config, dry_run = parse_command_line(module.TASK.Config, about, argv, example="" if description else example)
        train(module.TASK(config), dry_run=dry_run, run=run)

    return run_program(
        train_from_arguments,
        form="%(asctime)s %(message)s",
        stopped="stopped; the same command continues from the newest checkpoint",
    )


def train(task: TrainingTask, dry_run: bool = False, run: Steps | None = None) -> None:
    """Check the task before anything is loaded, then do a dry run or train.

    A finished run without checkpoints is left as it is, since training it again from the start would replace its
    result.
    """
    from accelerate import PartialState

    config = task.config
    checkpoint = check(task, dry_run)
    if dry_run:
        task.begin()
        if config.train.best_metric:
            # The engine knows the names of its metrics, and refuses another one.
            engine_of(task)
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
    """Free the run's GPU memory, then export, verify and push the result with `tripletune checkpoints push`.

    A process of its own, whose failure leaves the finished run as it is, and which the command in the error repeats.
    """
    import torch

    task.model = None
    gc.collect()
    torch.cuda.empty_cache()
    folder = task.config.output_dir
    command = ["checkpoints", "push", folder, task.config.push_to_hub]
    finished = subprocess.run([sys.executable, "-m", "tripletune", *command], check=False)
    if finished.returncode != 0:
        raise OSError(f"{folder} is trained, but the push failed; push again with: tripletune {shlex.join(command)}")


def engine_of(task: TrainingTask) -> EngineMixin:
    """Return the task's own trainer, or else an engine; model and rows must be loaded."""
    from tripletune.train.engine import Engine

    trainer = task.trainer()
    if trainer is not None:
        return trainer
    return Engine(task.model, task.train, task.collator(), task.config, validation=task.validation, task=task)


def check(task: TrainingTask, dry_run: bool) -> Path | None:
    """Check settings and data before anything is loaded, and return the checkpoint to continue from.

    Loading takes minutes, so everything that can fail is tried before it: first what needs no process group, then what
    needs it, then the data, and last the services that the run reports to. `tests/train/test_contract.py` makes sure
    that nothing is loaded before an error.
    """
    from tripletune.train.resume import check_writable, checkpoint_to_continue, process_count

    config = task.config
    _check_surroundings(task)
    # From here on there is a process group: the number of processes decides the micro-batches of a step.
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
        # A dry run neither continues a run nor reports to a service, so neither can make it fail.
        return None
    if is_main_process:
        check_tracking(config.report_to)
        if config.push_to_hub:
            make_repository(config.push_to_hub, "model")
    return checkpoint_to_continue(config, task.digest)


def _check_surroundings(task: TrainingTask) -> None:
    """Refuse settings that do not fit this machine, its launcher or the data.

    The sections' own `check` finds only what is wrong everywhere; they are read without torch, and know no files.
    """
    import torch

    from tripletune.train.resume import sharding

    config = task.config
    needs_gpu = config.model.attention.startswith(("flex", "flash"))
    if needs_gpu and not torch.cuda.is_available():
        raise ValueError(f"model.attention {config.model.attention} needs a GPU, and there is none: use auto or blocks")
    if sharding() in ("ZeRO-3", "FSDP2") and config.model.quantization != "none":
        raise ValueError(
            "model.quantization: 4-bit weights can't be sharded: use recipes/accelerate/ddp.yaml or zero2.yaml"
        )
    if config.train.best_metric and task.sources.validation is None:
        raise ValueError(
            "train.best_metric: there are no validation data: set data.validation or data.validation_share, or leave "
            "train.best_metric out"
        )


def _start_process(timeout: int) -> bool:
    """Create the process group and return whether this is the main process; other processes log only warnings.

    The group's time-out can be set only here: transformers finds the group made, and leaves it as it is. Libraries that
    log below warnings (`absl` by way of rouge_score) would put their lines between those of the run.
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
    """Return the text that a dry run prints; model and rows must be loaded.

    It shows what goes wrong without an error: settings, dropped rows, sizes of steps, memory, and the loss mask.
    """
    from tripletune.train.resume import process_count

    sections = {
        "resolved configuration": to_yaml(task.config),
        task.unit: "\n".join(task.counts()),
        "steps": "\n".join([_steps(task), task.step_size(process_count()), *task.notes()]),
        "memory (estimate)": str(estimate_memory(task)),
        "computation (estimate)": estimate_computation(task),
        "first row, learned tokens between ⟦ and ⟧": _with_marked_labels(*task.example(), task.tokenizer),
    }
    lines = []
    for heading, text in sections.items():
        lines.append(heading)
        lines += [f"  {line}" for line in text.split("\n") if line]
    return "\n".join(lines)


class MemoryEstimate(NamedTuple):
    """The memory of training in bytes per device, before sharding.

    Attributes:
        states: Gradients and the optimiser's moments.
        trained_numbers: The number of trained parameters.
        rows: The rows of the largest micro-batch, as text.
    """

    frozen: int
    trained: int
    states: int
    activations: int
    trained_numbers: int
    rows: str

    @property
    def total(self) -> int:
        """The sum of all bytes."""
        return self.frozen + self.trained + self.states + self.activations

    def __str__(self) -> str:
        return "\n".join(
            [
                f"frozen weights        {_gb(self.frozen)}",
                f"trained weights       {_gb(self.trained)} ({self.trained_numbers:,} parameters)",
                f"gradients, optimiser  {_gb(self.states)}",
                f"activations           {_gb(self.activations)} for {self.rows}, roughly",
                f"total                 {_gb(self.total)} per device",
            ]
        )


def estimate_memory(task: TrainingTask) -> MemoryEstimate:
    """Return the sizes of weights, gradients and optimiser states, and estimate activations for the longest row.

    An estimate before training, because a run that lacks memory otherwise fails only at its longest row.
    """
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
    longest = _tokens_of_longest_row(task)
    return MemoryEstimate(
        frozen_bytes,
        trained_bytes,
        trained_bytes + 2 * moment_bytes,
        train.batch_size * longest * _activation_bytes_per_token(task),
        trained_numbers,
        f"{train.batch_size} x {longest} tokens",
    )


def estimate_computation(task: TrainingTask) -> str:
    """Estimate the tokens and operations of the whole training, and hours of a GPU that is named.

    A forward takes two operations per token and weight, the backward as many to reach the first layers, and two more
    per trained weight (Kaplan et al., 2020, section 2.1); checkpointing repeats the forward. Attention is left out.
    """
    from tripletune.train.resume import process_count

    weights = trained = 0
    for weight in task.model.parameters():
        weights += weight.numel()
        trained += weight.numel() if weight.requires_grad else 0
    passes = 6 if task.config.train.gradient_checkpointing else 4
    tokens = _planned_steps(task) * task.rows_per_step(process_count()) * _mean_tokens(task)
    operations = tokens * (passes * weights + 2 * trained)
    hours = operations / _GPU_OPERATIONS / 3600
    shown_hours = f"{hours:,.0f}" if hours >= 10 else f"{hours:.2g}"
    return (
        f"{tokens:.2g} tokens, {operations:.2g} operations: {shown_hours} hours of one GPU with {_GPU}; a few steps "
        "measure yours"
    )


def _mean_tokens(task: TrainingTask) -> float:
    """Mean tokens of the training rows; packs have no column of lengths, but are filled to `train.pack_tokens`."""
    if "seq_lengths" in task.train.column_names:
        return float(task.config.train.pack_tokens)
    return float(task.train.with_format("numpy")["length"][:].mean())


def _tokens_of_longest_row(task: TrainingTask) -> int:
    """Tokens of the longest training row; packs have no column of lengths, but are filled to `train.pack_tokens`."""
    from tripletune.train.rows.cache import longest_row

    if "seq_lengths" in task.train.column_names:
        return int(task.config.train.pack_tokens)
    return longest_row(task.train)


def _activation_bytes_per_token(task: TrainingTask) -> int:
    """Estimate the bytes that a forward keeps for the backward, per token.

    About 34 bytes of half precision per number of the hidden width are kept per token and layer (Korthikanti et al.,
    2022, eq. 2, without the attention matrix, which fused attention does not store), or two with checkpointing.
    """
    from tripletune.train.arguments import use_bf16

    train = task.config.train
    kept_numbers = 1 if train.gradient_checkpointing else 17
    computes_in_half = use_bf16(train.bf16) or next(task.model.parameters()).element_size() == 2
    bytes_per_number = 2 if computes_in_half else 4
    text_config = task.model.config.get_text_config()
    return int(text_config.hidden_size * text_config.num_hidden_layers * kept_numbers * bytes_per_number)


def _with_marked_labels(ids: Sequence[int], labels: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text of a row, with its labels between ⟦ and ⟧, by which a user sees what has a loss."""
    if len(ids) != len(labels):  # source and target of an encoder-decoder
        target = [token for token in labels if token != IGNORED]
        return f"{tokenizer.decode(ids)}\n⟦{tokenizer.decode(target)}⟧"
    text = ""
    # Whole stretches are decoded, because a character may be several tokens.
    for is_learned, stretch in groupby(zip(ids, labels, strict=True), key=lambda pair: pair[1] != IGNORED):
        decoded = tokenizer.decode([token for token, _ in stretch])
        text += f"⟦{decoded}⟧" if is_learned else decoded
    return text


def _steps(task: TrainingTask) -> str:
    """Describe the number of optimiser steps; it is rounded up as transformers rounds it.

    A dry run has no trainer, whose number this must equal: a schedule is planned with it.
    """
    from tripletune.train.resume import process_count

    train = task.config.train
    steps = _planned_steps(task)
    warmup = math.ceil(train.warmup_ratio * steps)
    if train.warmup_steps is not None:
        warmup = min(train.warmup_steps, steps)
    text = f"{steps} optimiser steps, "
    if warmup:
        text += f"{warmup} of them warm-up, the first at learning rate 0 (as transformers does it)"
    else:
        text += "none of them warm-up"
    if train.max_steps is not None:
        passes = steps / task.steps_per_epoch(task.rows_per_step(process_count()))
        text += f"; {passes:,.3g} passes over the data"
        if passes > _MANY_PASSES:
            text += ". Is train.max_steps meant? train.epochs sets the passes; measure the hours with a few steps"
    return text


def _planned_steps(task: TrainingTask) -> int:
    """The number of optimiser steps."""
    from tripletune.train.resume import process_count

    train = task.config.train
    if train.max_steps is not None:
        return int(train.max_steps)
    return math.ceil(task.steps_per_epoch(task.rows_per_step(process_count())) * train.epochs)


def _gb(size: float) -> str:
    """A size in bytes as text, in units of 10^9 bytes, padded so that a column of sizes is aligned."""
    return f"{size / 1e9:8.3f} GB"
