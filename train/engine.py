"""The training engine: transformers' `Trainer` with exact resume, one loss everywhere, and its own logs.

The loss of a batch is `models.losses.label_loss`, divided by the number of label tokens of the whole optimiser step, or
by the sum of their weights, across devices and micro-batches. The order of the data depends only on seed and epoch. The
engine trains any model on any rows; a task (`train.tasks.TrainingTask`) adds scores, samplers and files.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedTokenizerBase, PrinterCallback, Trainer, TrainingArguments

from tripletune.core import libraries
from tripletune.core.data.records import IGNORED
from tripletune.core.files import lock_folder
from tripletune.core.options import not_one_of, require
from tripletune.models.compilation import compile_layers
from tripletune.models.losses import target_loss
from tripletune.train import resume
from tripletune.train.arguments import shared_arguments
from tripletune.train.callbacks import Keeper, LossLog, StepLog
from tripletune.train.evaluation import Batch
from tripletune.train.result import ResultMixin
from tripletune.train.rows.cache import Row, rows_meta
from tripletune.train.rows.loading import even_loader
from tripletune.train.rows.sampling import EpochSampler
from tripletune.train.settings import AnyConfig
from tripletune.train.tasks import TrainingTask
from tripletune.train.tracking import Reports

if TYPE_CHECKING:
    from datasets import Dataset
    from torch.utils.data import DataLoader, Sampler


logger = logging.getLogger(__name__)
libraries.check_use("training")
# Beginnings of `train.resume.sharding`, with the beginnings of the names of the classes that then wrap a model.
_WRAPPERS = {"ZeRO": "DeepSpeedEngine", "FSDP2": "FSDP"}


@contextmanager
def restored_random_states() -> Iterator[None]:
    """Restore the global random states at the end of the block.

    A run that is evaluated, logged or saved in between must draw the same dropout and order as one that is not
    (`tests/train/test_contract.py:test_a_run_that_is_watched_is_the_run_that_is_not`).
    """
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


class EngineMixin(ResultMixin):
    """The engine as the first base class of a trainer; call `begin_run` at the end of `__init__`."""

    def begin_run(self, task: TrainingTask) -> None:
        """Set up logs and progress lines, and compile on request.

        Called after `Trainer.__init__`, since it adds callbacks to the trainer's handler and wraps the trainer's
        methods.
        """
        config = task.config
        self.task = task
        self.config = config
        self._check_best_metric()
        folder = Path(config.output_dir)
        self.losses = LossLog(folder / resume.LOSS_FILE, config.train.logging_steps)
        self.evaluations = StepLog(folder / resume.EVALUATIONS)
        self.keeper = Keeper(config.train.save_minutes, task.together)
        self.reports = Reports(task, self.args)
        # In this order: if `keeper` asks for a checkpoint, `losses` writes its lines before the checkpoint is saved.
        for callback in (self.keeper, self.losses, self.evaluations, self.reports):
            self.add_callback(callback)
        # The loss log prints lines instead of this callback's dictionaries.
        self.remove_callback(PrinterCallback)
        if config.train.torch_compile:
            self._compile_layers()
        # Logs, evaluations, checkpoints and callbacks must not change the random states of training.
        self.callback_handler.call_event = restored_random_states()(self.callback_handler.call_event)
        for name in ("log", "evaluate", "save_model", "_save_checkpoint"):
            setattr(self, name, restored_random_states()(getattr(self, name)))

    def _compile_layers(self) -> None:
        """Compile the layers; a Graph-LLM's graph modules stay as they are: graphs have another size in each batch."""
        model = self.model
        if hasattr(model, "language_model"):
            model = model.language_model
        compile_layers(model)

    def _check_best_metric(self) -> None:
        """Make sure that an evaluation has the metric that chooses the result.

        A mistyped name would otherwise be noticed at the end of a run, whose best step is then lost.
        """
        metric = self.config.train.best_metric
        has_own_scores = type(self.task).score is not TrainingTask.score  # whose names are not known yet
        if not metric or has_own_scores:
            return
        names = [*self.task.metric_names(), *self.more_metrics]
        if metric not in names:
            raise ValueError(not_one_of("train.best_metric", metric, names))

    # Training

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare as transformers does, and make sure that the launcher's sharding has reached the model.

        With a changed file of settings, the launcher may start processes that each train a whole model by itself.
        """
        prepared = super()._prepare_for_training(*args, **kwargs)
        # Only now has the launcher wrapped the model as its settings say.
        wrapper = type(self.model_wrapped).__name__
        sharding = resume.sharding()
        if sharding.startswith("ZeRO"):
            libraries.check_use("ZeRO")
        if not wrapper.startswith(_WRAPPERS.get(sharding.partition("-")[0], "")):
            raise ValueError(
                f"the launcher's settings ask for {sharding}, but the module in training is a {wrapper} on "
                f"{self.args.world_size} process(es): launch with an unchanged file of recipes/accelerate"
            )
        logger.info("%s; the module in training is a %s", self.task.step_size(self.args.world_size), wrapper)
        return prepared

    def get_train_dataloader(self) -> DataLoader[Batch]:
        """The loader of transformers; on several processes, one that repeats no row at the end of an epoch.

        Rollouts have whole steps only, so their rows are never repeated.
        """
        sampler = self._get_train_sampler()
        if self.args.world_size == 1 or not isinstance(sampler, EpochSampler):
            return super().get_train_dataloader()
        return even_loader(self, sampler)

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler[int]:
        """The task's sampler, kept so that `_run_epoch` can set its epoch."""
        dataset = train_dataset if train_dataset is not None else self.train_dataset
        per_step = self.args.train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size
        self._sampler = self.task.sampler(dataset, per_step)
        return self._sampler

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Train for an epoch, in the order of that epoch; do nothing if the run has already ended."""
        if self.state.global_step >= self.state.max_steps or self.out_of_patience():
            self.control.should_training_stop = True
            return  # a finished run that is started again would do one more step
        # Set here, because accelerate does not pass the epoch to a sampler that is sharded or skipped into by a resume.
        self._sampler.set_epoch(kwargs["epoch"])
        super()._run_epoch(*args, **kwargs)

    def run(self, checkpoint: Path | Literal["newest"] | None = "newest") -> dict[str, float]:
        """Train in the locked run folder, save the settings there, and evaluate.

        Args:
            checkpoint: Where to continue; "newest" finds the run's newest checkpoint, None starts from the beginning.

        Returns:
            The metrics of the result's evaluation; empty for a run without validation rows.
        """
        task = self.task
        # Data and models are read for it, so it is made once.
        digest = task.digest
        if checkpoint == "newest":
            checkpoint = resume.checkpoint_to_continue(self.config, digest)
        if checkpoint is None:
            task.prepare()
        else:
            logger.info("continuing from %s", checkpoint)
        # Before `train`, which asks the task for its sampler.
        continues = checkpoint is not None
        task.grouped = resume.grouped_rows(self.config, continues)
        self._log_plan()
        self._train_in_folder(checkpoint, digest)
        if self.eval_dataset is None:
            return {}
        with self.reports.ended_by_errors():
            is_evaluated = self.last_evaluation is not None and self.last_evaluation.step == self.state.global_step
            if not is_evaluated:
                self._determine_best_metric(self.evaluate())
            # After the last evaluation, whose step may be the best one.
            self._take_best()
        return self._last_metrics()

    def _train_in_folder(self, checkpoint: Path | None, digest: dict[str, str]) -> None:
        """Train with the run folder locked, and keep the seconds for `training.json`.

        An earlier result is put aside and the settings are written before the first step, so a run that is killed in it
        can be recognised and continued.
        """
        continues = checkpoint is not None
        with self._locked_folder():
            if self.is_world_process_zero():
                resume.put_earlier_run_aside(self.config, continues)
                resume.save_run_settings(self.config, digest, self.task.grouped)
                self.reports.open(self.callback_handler.callbacks)
            start = time.perf_counter()
            with self.reports.ended_by_errors(), self.keeper.listening(self.args):
                self.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
            self._seconds = time.perf_counter() - start

    def _log_plan(self) -> None:
        """Log what will be trained, so that a log shows it without the run folder."""
        task = self.task
        trained = sum(weight.numel() for weight in self.model.parameters() if weight.requires_grad)
        logger.info("training %s parameters on %d %s", f"{trained:,}", rows_meta(task.train)["rows"], task.unit)
        for line in (*task.counts(), *task.notes()):
            logger.info("%s", line)

    def _locked_folder(self) -> AbstractContextManager[object]:
        """Lock the run folder on the main process, so that no other run writes to it."""
        if not self.is_world_process_zero():
            return nullcontext()
        folder = self.config.output_dir
        return lock_folder(
            folder, f"another process trains in {folder}: wait for it or stop it, or give another --output_dir"
        )

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as in transformers, and add the speed to the loss."""
        if "loss" in logs:
            logs = logs | self.losses.speed(self.state)
        super().log(logs, *args, **kwargs)

    def training_step(
        self, model: nn.Module, inputs: Batch, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Train on one micro-batch, and add its share of the step's loss to the loss log.

        The log sums the shares at the end of the step (`LossLog.on_step_end`); transformers' own log has only means
        over `logging_steps` steps.
        """
        with self._as_cast(model):
            loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
        self.losses.add_loss(loss, self.tokens_of(inputs))
        return loss

    def _get_num_items_in_batch(self, batch_samples: list[Batch], device: torch.device) -> torch.Tensor | int | None:
        """The divisor of the step's loss: the sum of the label tokens' weights, or the number of label tokens.

        transformers counts label tokens, so with weights their sum is computed here, over all devices.
        """
        if not batch_samples or "label_weights" not in batch_samples[0]:
            return super()._get_num_items_in_batch(batch_samples, device)
        weights = []
        for batch in batch_samples:
            # The first token of a row is not predicted, so it has no loss.
            is_label = batch["labels"][:, 1:] != IGNORED
            weights.append(batch["label_weights"][:, 1:][is_label].sum())
        return self.accelerator.reduce(torch.stack(weights).sum().to(device))

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> torch.Tensor | float | None:
        """The norm as transformers computes it, kept for the loss log, which has every step, not only logged ones."""
        self.losses.norm = super()._get_grad_norm(*args, **kwargs)
        return self.losses.norm

    def tokens_of(self, inputs: Batch) -> int:
        """Tokens of a training batch, padding included."""
        tokens = inputs["input_ids"] if "input_ids" in inputs else inputs["labels"]
        return int(tokens.numel())


class Engine(EngineMixin, Trainer):
    """Trains a model on rows.

    Args:
        model: Any module whose forward takes a batch and returns a `loss`.
        rows: A `datasets.Dataset`; with a column `length`, a batch has rows of similar length.
        collator: Makes a batch of rows, with `labels` (-100 where nothing is learned).
        config: The training's settings.
        validation: Rows for evaluations; None: there are none.
        task: Adds scores, the order of the rows, and files of a checkpoint. It gets this model and these rows, since
            its methods read them there, whether the task made them itself or the caller did.
    """

    def __init__(
        self,
        model: nn.Module,
        rows: Dataset,
        collator: Callable[[list[Row]], Batch],
        config: AnyConfig,
        *,
        validation: Dataset | None = None,
        task: TrainingTask | None = None,
    ) -> None:
        """Check the settings, and make the trainer; `task` gets the model and the rows."""
        require(config)
        task = task or TrainingTask(config)
        task.model = model
        task.train = rows
        task.validation = validation
        is_encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
        super().__init__(
            model=model,
            args=TrainingArguments(**shared_arguments(config, evaluates=validation is not None)),
            data_collator=collator,
            train_dataset=rows,
            eval_dataset=validation,
            processing_class=task.processor if isinstance(task.processor, PreTrainedTokenizerBase) else None,
            # Encoder-decoders average over each micro-batch, which gives the tokens of short ones too much weight.
            compute_loss_func=target_loss if is_encoder_decoder else None,
        )
        self.begin_run(task)

    def compute_loss(self, model: nn.Module, inputs: Batch, *args: Any, **kwargs: Any) -> Any:
        """Compute transformers' loss without label parts, on a copy, because transformers removes the labels."""
        without_parts = {name: value for name, value in inputs.items() if name != "label_parts"}
        return super().compute_loss(model, without_parts, *args, **kwargs)
