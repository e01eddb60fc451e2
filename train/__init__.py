"""A training run of any task, from command line to result: check, load, tokenise, train, save.

`--dry-run` stops before training and shows the plan, the first row and its loss mask (`dry_run.py`).
"""

from __future__ import annotations

import gc
import logging
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from tripletune.core.command_line import parse_command_line
from tripletune.core.files import write_json
from tripletune.core.hub import make_repository
from tripletune.core.options import ConfigError
from tripletune.core.plugins import load_from
from tripletune.core.program import run_program, signals_handled
from tripletune.core.tables import printable
from tripletune.models.run_folders import PREEMPTED, RESULT, STOP_SIGNALS, Preempted
from tripletune.train.dry_run import dry_run_report
from tripletune.train.misfits import check_tracking, library_misfits
from tripletune.train.tasks import TrainingTask

if TYPE_CHECKING:
    from tripletune.train.engine import EngineMixin

if __name__ == "train":
    raise ImportError("import it as tripletune.train; under its short name it would be loaded twice")

logger = logging.getLogger(__name__)
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
        stopped="stopped; the same command continues from the newest checkpoint, or begins again if there is none yet",
    )


@contextmanager
def stopped_by_signals(folder: Path) -> Iterator[None]:
    """End a run at once at a signal in the `with` block: while it loads, evaluates its result and saves.

    Between the first and the last step, `train.callbacks.Keeper` listens instead, which saves a checkpoint first.

    Args:
        folder: The run folder, which then holds `preempted.json`, if the run has begun to write there.

    Raises:
        Preempted: A signal came.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        """Leave the file for queues that do not see the exit code; no step is lost."""
        name = signal.Signals(number).name
        if folder.is_dir():
            write_json(folder / PREEMPTED, {"signal": name})
        raise Preempted(f"{name}: no step was under way; the same command continues the run")

    with signals_handled(STOP_SIGNALS, stop):
        yield


def train(task: TrainingTask, dry_run: bool = False, run: Steps | None = None) -> None:
    """Check the task before anything is loaded, then do a dry run or train.

    A finished run without checkpoints is left as it is, since training it again from the start would replace its
    result.
    """
    from accelerate import PartialState

    if dry_run:
        _dry_run(task)
        return
    config = task.config
    with stopped_by_signals(Path(config.output_dir)):
        checkpoint = checkpoint_after_checks(task)
        is_finished = config.resume and (Path(config.output_dir) / RESULT).is_file()
        if is_finished and checkpoint is None:
            logger.info("%s is finished; to train again, set --resume false", config.output_dir)
        elif run is not None:
            run(task, checkpoint)
        else:
            fit(task, checkpoint)
        if config.push_to_hub and PartialState().is_main_process:
            push_result(task)


def _dry_run(task: TrainingTask) -> None:
    """Check and load as a run does, and show what it would do."""
    from accelerate import PartialState

    checkpoint_after_checks(task, dry_run=True)
    task.begin()
    if task.config.train.best_metric:
        # The engine knows the names of its metrics, and refuses another one.
        engine_of(task)
    if PartialState().is_main_process:
        sys.stdout.write(printable(dry_run_report(task)) + "\n")


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


def checkpoint_after_checks(task: TrainingTask, dry_run: bool = False) -> Path | None:
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
