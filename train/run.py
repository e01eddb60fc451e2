"""A training run from its command line to its result: check, load, tokenise, train, save. Alike for every task."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tripletune.models.files import write_json
from tripletune.models.options import parse_command_line
from tripletune.models.program import load_from, names_in, printable, run_program
from tripletune.models.run_folders import FINAL, seconds_until
from tripletune.train.task import TrainingTask

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
    from tripletune.train.dry_run import check_tracking, dry_run_report
    from tripletune.train.resume import check_same_run, check_writable, newest_checkpoint

    config = task.config
    state = _start_process()
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
    task.model, task.processor = task.load()
    # The first process tokenises; the others find the files when it is done.
    with state.main_process_first():
        make_rows(task)
    for warning in task.warnings():
        logger.warning("%s", warning)
    if not dry_run:
        _train_and_save(task, checkpoint)
    elif state.is_main_process:
        sys.stdout.write(printable(dry_run_report(task)) + "\n")


def make_rows(task: TrainingTask) -> None:
    """Tokenise the data of a task whose model is loaded, or open what an earlier run left in the cache."""
    cache = Path(task.config.output_dir) / "cache"
    training, validation = task.sources
    task.train = task.rows(training, cache)
    task.validation = task.rows(validation, cache) if validation is not None else None


def _train_and_save(task: TrainingTask, checkpoint: Path | None) -> None:
    from tripletune.train.batches import rows_meta
    from tripletune.train.engine import LOSS_FILE

    trainer = task.trainer()
    if checkpoint is not None:
        logger.info("continuing from %s", checkpoint)
    trained = sum(p.numel() for p in task.model.parameters() if p.requires_grad)
    logger.info("training %s parameters on %d %s", f"{trained:,}", len(task.train), task.unit)
    if task.validation is None:
        logger.info("there are no validation data: nothing is evaluated")
    seconds = trainer.train_as_run(checkpoint, task.sources[0].digest)
    metrics = trainer.evaluate_at_the_end()
    folder = Path(task.config.output_dir) / FINAL
    trainer.save_model(str(folder))
    if trainer.is_world_process_zero():
        steps = trainer.state.global_step
        both = dict(zip(("train", "validation"), task.sources))
        rows = {"train": task.train} | ({"validation": task.validation} if task.validation is not None else {})
        result = {
            task.unit: len(task.train),
            "steps": steps,
            # What it took before a kill counts too.
            "seconds": round(max(seconds, seconds_until(folder.parent / LOSS_FILE, steps)), 1),
            "data": {
                name: source and {"path": ", ".join(source.paths), "sha256": source.digest}
                for name, source in both.items()
            },
            "tokenised": {name: rows_meta(found) for name, found in rows.items()},
            **task.facts(),
            "evaluation": metrics,
        }
        write_json(folder / "training.json", result)
    logger.info("trained for %d s; the result is in %s", seconds, folder)
    for name in sorted(metrics):
        logger.info("%s = %.4g", name, metrics[name])


def _start_process() -> Any:
    """accelerate's `PartialState`; processes but the first log warnings alone."""
    import torch
    from accelerate import DistributedType, PartialState
    from transformers.utils import logging as transformers_logging

    state = PartialState(cpu=not torch.cuda.is_available())
    if not state.is_main_process:
        logging.getLogger().setLevel(logging.WARNING)
    for name in ("datasets", "accelerate", "absl"):
        logging.getLogger(name).setLevel(logging.WARNING)
    transformers_logging.disable_progress_bar()
    how = "" if state.distributed_type is DistributedType.NO else f", {state.distributed_type.value}"
    logger.info("%d process(es) on %s%s", state.num_processes, state.device, how)
    return state


def usage() -> str:
    """The tasks, by name."""
    listed = "".join(f"  {name.replace('_', '-')}\n" for name in names_in(TASKS))
    return f"usage: tripletune train TASK [--config FILE] [--SECTION.FIELD VALUE ...] [--dry-run]\n\ntasks:\n{listed}"
