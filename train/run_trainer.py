"""What every training run needs of a trainer, whatever its model: a mixin over transformers' `Trainer`.

Data order that depends on seed and epoch alone, checkpoints without pickled settings, one exact loss line per optimiser
step, and progress in plain lines where there is no terminal.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
import zipfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft.helpers import disable_input_dtype_casting
from transformers import TrainerCallback
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from tripletune.models.loading import best_dtype
from tripletune.models.run_folders import check_weights
from tripletune.train.compiled import compile_layers
from tripletune.train.run_folder import save_run_settings
from tripletune.train.same_run import forget_checkpoints, only_run_in, set_result_aside
from tripletune.train.sampling import EpochSampler

if TYPE_CHECKING:
    from transformers import Trainer
else:
    Trainer = object

logger = logging.getLogger(__name__)
LOSS_FILE = "losses.jsonl"


def shared_arguments(config: Any, evaluates: bool = True) -> dict[str, Any]:
    """Keyword arguments of `TrainingArguments` and its kin that every run sets.

    Args:
        config: A run with `output_dir`, `run_name`, `seed`, `report_to` and the fields of `train.config.TrainSection`
            under `train`.
        evaluates: Whether there is anything to evaluate on; transformers refuses evaluations without.
    """
    train = config.train
    use_cpu = not torch.cuda.is_available()
    return {
        "output_dir": config.output_dir,
        "run_name": config.run_name or Path(config.output_dir).name,
        "seed": config.seed,
        "data_seed": config.seed,
        "num_train_epochs": train.epochs,
        "max_steps": train.max_steps or -1,
        "per_device_train_batch_size": train.batch_size,
        "per_device_eval_batch_size": train.eval_batch_size,
        "gradient_accumulation_steps": train.gradient_accumulation,
        "learning_rate": train.learning_rate,
        # A share below 1 counts optimiser steps, not micro-batches.
        "warmup_steps": train.warmup_ratio if train.warmup_ratio < 1 else 0.999,
        "lr_scheduler_type": train.scheduler,
        "adam_beta1": train.adam_beta1,
        "adam_beta2": train.adam_beta2,
        "weight_decay": train.weight_decay,
        "max_grad_norm": train.max_grad_norm,
        "bf16": use_bf16(train.bf16),
        "activation_checkpointing": train.gradient_checkpointing,
        "logging_steps": train.logging_steps,
        "logging_first_step": True,
        "eval_strategy": "steps" if train.eval_steps and evaluates else "no",
        "eval_steps": train.eval_steps,
        "prediction_loss_only": True,
        "save_steps": train.save_steps,
        "save_total_limit": train.save_total_limit,
        "dataloader_num_workers": train.workers,
        "dataloader_pin_memory": not use_cpu,
        "use_cpu": use_cpu,
        "report_to": config.report_to,
        "remove_unused_columns": False,
        "label_names": ["labels"],
        "deepspeed": train.deepspeed,
        "disable_tqdm": None if os.isatty(2) else True,
        "log_level": "warning",
    }


def use_bf16(choice: str) -> bool:
    """Whether to run in bfloat16 autocast: "auto" asks the hardware."""
    return best_dtype() is torch.bfloat16 if choice.lower() == "auto" else choice.lower() == "true"


class RunMixin(Trainer):
    """Put in front of a trainer class; call `begin_run` at the end of `__init__`.

    Rows of the training set need a column `length`, in tokens.
    """

    config: Any
    losses: LossLog
    _sampler: EpochSampler

    def begin_run(self, config: Any) -> None:
        """Set the loss log and the progress lines up.

        Args:
            config: The run; see `shared_arguments`.
        """
        self.config = config
        self.losses = LossLog(Path(config.output_dir) / LOSS_FILE, config.train.logging_steps)
        self.add_callback(self.losses)
        if self.args.disable_tqdm:
            # Where there is no terminal, one readable line in the place of transformers' printed dictionary.
            self.remove_callback(PrinterCallback)
            self.add_callback(PlainProgress())
        if config.train.torch_compile:
            base = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
            # Of a Graph-LLM the language model alone: graphs have another size in every batch.
            compile_layers(getattr(base, "language_model", base))

    def make_sampler(self, dataset: Any, batch_size: int) -> EpochSampler:
        """The order of the rows; `batch_size` counts the rows of an optimiser step."""
        lengths = dataset.with_format("numpy")["length"][:]
        return EpochSampler(lengths, batch_size, self.config.seed, self.config.train.group_by_length)

    def save_beside(self, folder: Path) -> None:
        """Write what a checkpoint needs to load by itself; called on the first process alone."""

    def _get_train_sampler(self, train_dataset: Any = None) -> EpochSampler:
        dataset = train_dataset if train_dataset is not None else self.train_dataset
        per_step = self.args.train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size
        self._sampler = self.make_sampler(dataset, per_step)
        return self._sampler

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if self.state.global_step >= self.state.max_steps:
            return  # a finished run that is started again, which would do one step more
        # Said here, because the epoch does not reach a sampler that is sharded and then skipped into by a resume.
        self._sampler.set_epoch(kwargs["epoch"])
        super()._run_epoch(*args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train, alone in the run folder."""
        with self._alone():
            return super().train(*args, **kwargs)

    def train_as_run(self, checkpoint: Path | None, train_digest: str) -> float:
        """Train, alone in the run folder, which then says what is trained in it.

        Args:
            checkpoint: Where to go on; None begins, and sets the result of an earlier run aside.
            train_digest: Fingerprint of the training data.

        Returns:
            The seconds of training in this process.

        Raises:
            ValueError: another process trains in the folder; nothing in it has been touched.
        """
        with self._alone():
            if self.is_world_process_zero():
                if not self.config.resume:
                    forget_checkpoints(self.config.output_dir)
                if checkpoint is None:
                    set_result_aside(self.config.output_dir)
                save_run_settings(self.config, train_digest)
            start = time.perf_counter()
            super().train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
            return time.perf_counter() - start

    def _alone(self) -> AbstractContextManager[None]:
        return only_run_in(self.args.output_dir) if self.is_world_process_zero() else nullcontext()

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """One micro-batch; its share of the step's loss goes to the loss log."""
        with self._as_cast(model):
            loss = super().training_step(model, inputs, num_items_in_batch)
        self.losses.add(loss, int(inputs["input_ids"].numel()))
        return loss

    def prediction_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """One batch of an evaluation."""
        with self._as_cast(model):
            return super().prediction_step(model, *args, **kwargs)

    def _as_cast(self, model: Any) -> AbstractContextManager[None]:
        # Adapter layers would copy their input to float32 and autocast would copy it back.
        return disable_input_dtype_casting(model) if self.args.bf16 else nullcontext()

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        folder = Path(output_dir or self.args.output_dir)
        if self.args.should_save:
            # A pickle that nothing here reads; the run's own YAML holds the settings.
            (folder / TRAINING_ARGS_NAME).unlink(missing_ok=True)
            # PEFT's empty model card; `tripletune checkpoints export` writes a full one.
            (folder / "README.md").unlink(missing_ok=True)
            self.save_beside(folder)


class LossLog(TrainerCallback):
    """`losses.jsonl`: loss, tokens and seconds of every optimiser step, exact and without gaps after a resume."""

    def __init__(self, path: Path, flush_every: int) -> None:
        self.path = path
        self.flush_every = flush_every
        self._step: list[torch.Tensor] = []
        self._tokens = 0
        self._lines: list[tuple[int, torch.Tensor, int, float]] = []
        self._time = time.perf_counter()

    def add(self, loss: torch.Tensor, tokens: int) -> None:
        """Record one micro-batch."""
        self._step.append(loss.detach())
        self._tokens += tokens

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Forget lines of steps that will be done again."""
        self._time = time.perf_counter()
        if state.is_world_process_zero and self.path.exists():
            kept = [line for line in self.path.read_text().splitlines() if _step_of(line, state.global_step)]
            scratch = self.path.with_suffix(".tmp")
            scratch.write_text("".join(line + "\n" for line in kept))
            os.replace(scratch, self.path)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the line of a step."""
        now = time.perf_counter()
        loss, tokens = torch.stack(self._step).sum(), self._tokens
        if args.world_size > 1:
            # Each process has seen its own records; its loss is already multiplied by the number of processes.
            both = torch.stack([loss.double() / args.world_size, loss.new_tensor(tokens, dtype=torch.double)])
            torch.distributed.all_reduce(both)
            loss, tokens = both[0], int(both[1])
        self._lines.append((state.global_step, loss, tokens, now - self._time))
        self._time, self._step, self._tokens = now, [], 0
        # Before a checkpoint and not after it: a kill between the two would leave a gap that no resume fills.
        if control.should_save or len(self._lines) >= self.flush_every:
            self._flush(state)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write what is left."""
        self._flush(state)

    def _flush(self, state: Any) -> None:
        if state.is_world_process_zero and self._lines:
            with self.path.open("a") as out:
                for step, loss, tokens, seconds in self._lines:
                    line = {"step": step, "loss": loss.item(), "tokens": tokens, "seconds": round(seconds, 3)}
                    out.write(json.dumps(line) + "\n")
        self._lines = []


def _step_of(line: str, last: int) -> bool:
    try:
        return bool(json.loads(line)["step"] <= last)
    except (ValueError, KeyError, TypeError):
        return False  # cut off by a kill; the step is done again


class PlainProgress(TrainerCallback):
    """One line per log event where there is no terminal for a progress bar."""

    def __init__(self) -> None:
        self._start: tuple[float, int] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock at the step training begins or resumes at."""
        self._start = (time.perf_counter(), state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        """Write the line."""
        if not state.is_world_process_zero or logs is None or "loss" not in logs or self._start is None:
            return
        began, first = self._start
        done = max(state.global_step - first, 1)
        left = (time.perf_counter() - began) / done * (state.max_steps - state.global_step)
        logger.info(
            "step %d/%d  loss %.3f  learning rate %.2e  about %d min %02d s left",
            state.global_step,
            state.max_steps,
            logs["loss"],
            logs.get("learning_rate", math.nan),
            left // 60,
            left % 60,
        )


def newest_checkpoint(output_dir: str | Path) -> Path | None:
    """The newest checkpoint that was written to its end (its trainer state is written last) and is still whole."""
    found = []
    for folder in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        try:
            state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
            found.append((int(state["global_step"]), folder))
        except (OSError, ValueError, KeyError):
            logger.warning("%s was not written to its end and is passed over", folder)
    for _, folder in sorted(found, reverse=True):
        try:
            _check_files(folder)
            return folder
        except (OSError, ValueError) as error:
            logger.warning("%s is passed over: %s", folder, error)
    return None


def _check_files(folder: Path) -> None:
    """Look for files that a full disk or a broken copy has cut off; headers alone are read.

    Raises:
        ValueError: a file is cut off.
    """
    for file in folder.glob("*.safetensors"):
        check_weights(file)
    for file in [*folder.glob("*.pt"), *folder.glob("*.pth")]:
        if not zipfile.is_zipfile(file):
            raise ValueError(f"{file} is cut off or damaged")
