"""The training engine: transformers' `Trainer` with exact resume, one loss everywhere, and its own logs.

The loss of a batch is `models.losses.label_loss`, divided by the number of label tokens of the whole optimiser step, or
by the sum of their weights, across devices and micro-batches. `eval_loss` is the mean over the label tokens of a whole
evaluation, without weights. The order of the data depends only on seed and epoch. The engine trains any model on any
rows; a task (`train.tasks.TrainingTask`) adds scores, samplers and files.
"""

from __future__ import annotations

import logging
import math
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase, PrinterCallback, Trainer, TrainingArguments

from tripletune.core import libraries
from tripletune.core.data.records import IGNORED
from tripletune.core.files import finite, lock_folder, new_folder, write_json
from tripletune.core.options import not_one_of, require
from tripletune.models.loading import best_dtype, restore_base
from tripletune.models.losses import target_loss
from tripletune.models.run_folders import FINAL, check_finite, seconds_until, stored_weights
from tripletune.train import resume
from tripletune.train.batches import rows_meta
from tripletune.train.callbacks import Keeper, Preempted
from tripletune.train.tasks import EngineConfig, RunConfig, TrainingTask
from tripletune.train.tracking import Reports

if TYPE_CHECKING:
    from transformers import Trainer as Mixed
else:
    Mixed = object

logger = logging.getLogger(__name__)
libraries.check_use("training")
disable_input_dtype_casting = libraries.take("peft.helpers:disable_input_dtype_casting")
TRAINING_ARGS_NAME = libraries.take("transformers.trainer:TRAINING_ARGS_NAME")
# Settings that have the same name in TrainingArguments.
_ALIKE = ("learning_rate", "adam_beta1", "adam_beta2", "weight_decay", "max_grad_norm", "logging_steps", "eval_steps",
          "save_steps", "save_total_limit", "ddp_timeout")  # fmt: skip
# Beginnings of `train.resume.sharding`, with the beginnings of the names of the classes that then wrap a model.
_WRAPPERS = {"ZeRO": "DeepSpeedEngine", "FSDP2": "FSDP"}


def shared_arguments(config: Any, evaluates: bool = True) -> dict[str, Any]:
    """Return keyword arguments for `TrainingArguments` and its subclasses, for a run with or without evaluations."""
    return config.train.arguments | own_arguments(config, evaluates)


def own_arguments(config: Any, evaluates: bool = True) -> dict[str, Any]:
    """Return the arguments that follow from our settings, so that `train.arguments` can't set them."""
    train = config.train
    use_cpu = not torch.cuda.is_available()
    return {name: getattr(train, name) for name in _ALIKE} | {
        "output_dir": config.output_dir,
        "run_name": config.run_name or Path(config.output_dir).name,
        "seed": config.seed,
        "data_seed": config.seed,
        "num_train_epochs": train.epochs,
        "max_steps": train.max_steps or -1,
        "per_device_train_batch_size": train.batch_size,
        "per_device_eval_batch_size": train.eval_batch_size,
        "gradient_accumulation_steps": train.micro_batches(resume.process_count()),
        # A share below 1 counts optimiser steps, not micro-batches.
        "warmup_steps": train.warmup_ratio if train.warmup_ratio < 1 else 0.999,
        "lr_scheduler_type": train.scheduler,
        "lr_scheduler_kwargs": train.scheduler_arguments,
        "optim": train.optimizer or TrainingArguments.default_optim,
        "bf16": use_bf16(train.bf16),
        "activation_checkpointing": train.gradient_checkpointing,
        "logging_first_step": True,
        # With the filter, transformers logs a loss that is not finite as 0.
        "logging_nan_inf_filter": False,
        "eval_strategy": "steps" if train.eval_steps and evaluates else "no",
        "prediction_loss_only": True,
        "metric_for_best_model": train.best_metric,
        "greater_is_better": not train.lower_is_better(),
        "dataloader_num_workers": train.workers,
        "dataloader_pin_memory": not use_cpu,
        "use_cpu": use_cpu,
        "report_to": config.report_to,
        # transformers would push checkpoints with optimiser states, and its own card.
        "push_to_hub": False,
        "remove_unused_columns": False,
        "label_names": ["labels"],
        "disable_tqdm": True,
        "log_level": "warning",
    }


def use_bf16(choice: str) -> bool:
    """Whether to run in bfloat16 autocast; "auto" depends on the hardware."""
    return best_dtype() is torch.bfloat16 if choice == "auto" else choice == "true"


@contextmanager
def unnoticed() -> Iterator[None]:
    """Restore the global random states at the end of the block."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


class EngineMixin(Mixed):
    """The engine as the first base class of a trainer; call `begin_run` at the end of `__init__`."""

    task: TrainingTask
    # The optimiser step of the last evaluation, and its metrics.
    last_evaluation: tuple[int, dict[str, float]] | None = None
    # Names of an evaluation's metrics that TRL adds to `_metrics` as means of a batch.
    more_metrics: tuple[str, ...] = ()
    _metrics: dict[str, dict[str, list[float]]]
    # Of the running evaluation: sums of losses and of label tokens (total and per part), and this process's batches.
    _sums: torch.Tensor
    _to_count: int

    def begin_run(self, task: TrainingTask) -> None:
        """Set up logs and progress lines, and compile on request."""
        config = task.config
        self.task, self.config = task, config
        self.losses = resume.LossLog(Path(config.output_dir) / resume.LOSS_FILE, config.train.logging_steps)
        self.evaluations = resume.StepLog(Path(config.output_dir) / resume.EVALUATIONS)
        metric = config.train.best_metric
        unknown = type(task).score is not TrainingTask.score  # whose names are not known yet
        if metric and not unknown and metric not in (known := [*task.metric_names(), *self.more_metrics]):
            raise ValueError(not_one_of("train.best_metric", metric, known))
        self.keeper = Keeper(config.train.save_minutes, task.together)
        # In this order: if `keeper` asks for a checkpoint, `losses` writes its lines before the checkpoint is saved.
        self.reports = Reports(task, self.args)
        for callback in (self.keeper, self.losses, self.evaluations, self.reports):
            self.add_callback(callback)
        # The loss log prints lines instead of this callback's dictionaries.
        self.remove_callback(PrinterCallback)
        if config.train.torch_compile:
            # Of a Graph-LLM, only the language model: graphs have another size in every batch.
            compile_layers(getattr(self.model, "language_model", self.model))
        # Logs, evaluations, checkpoints and callbacks must not change the random states of training.
        own = [(self, name) for name in ("log", "evaluate", "save_model", "_save_checkpoint")]
        for owner, name in [(self.callback_handler, "call_event"), *own]:
            setattr(owner, name, unnoticed()(getattr(owner, name)))

    # Training

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_for_training(*args, **kwargs)
        # Check that the launcher has wrapped the model as its settings say.
        kind, wanted = type(self.model_wrapped).__name__, resume.sharding()
        if wanted.startswith("ZeRO"):
            libraries.check_use("ZeRO")
        if not kind.startswith(_WRAPPERS.get(wanted.partition("-")[0], "")):
            raise ValueError(
                f"the launcher's settings ask for {wanted}, but the module in training is a {kind} on "
                f"{self.args.world_size} process(es): launch with an unchanged file of recipes/accelerate"
            )
        logger.info("%s; the module in training is a %s", self.task.step_size(self.args.world_size), kind)
        return prepared

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        dataset = train_dataset if train_dataset is not None else self.train_dataset
        per_step = self.args.train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size
        self._sampler = self.task.sampler(dataset, per_step)
        return self._sampler

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if self.state.global_step >= self.state.max_steps or self.impatient():
            self.control.should_training_stop = True
            return  # a finished run that is started again would do one more step
        # Set here, because accelerate does not pass the epoch to a sampler that is sharded or skipped into by a resume.
        self._sampler.set_epoch(kwargs["epoch"])
        super()._run_epoch(*args, **kwargs)

    def run(self, checkpoint: Path | Literal["newest"] | None = "newest") -> dict[str, float]:
        """Train in the locked run folder, save the settings there, and evaluate."""
        task, digest = self.task, self.task.digest
        if checkpoint == "newest":
            checkpoint = resume.checkpoint_to_continue(self.config, digest)
        if checkpoint is None:
            task.prepare()
        else:
            logger.info("continuing from %s", checkpoint)
        task.grouped = resume.grouped_rows(self.config, checkpoint is not None)
        trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        logger.info("training %s parameters on %d %s", f"{trained:,}", rows_meta(task.train)["rows"], task.unit)
        for note in (*task.counts(), *task.notes()):
            logger.info("%s", note)
        refusal = (
            f"another process trains in {self.config.output_dir}: wait for it or stop it, or give another --output_dir"
        )
        with (self.is_world_process_zero() and lock_folder(self.config.output_dir, refusal)) or nullcontext():
            if self.is_world_process_zero():
                resume.clear(self.config, checkpoint is not None)
                resume.save_run_settings(self.config, digest, task.grouped)
                self.reports.open(self.callback_handler.callbacks)
            start = time.perf_counter()
            with self.keeper.listening(self.args):
                self.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
            self._seconds = time.perf_counter() - start
        if self.eval_dataset is None:
            return {}
        # The last step may have been evaluated during training.
        if (self.last_evaluation or (None,))[0] != self.state.global_step:
            self._determine_best_metric(self.evaluate())
        self._take_best()
        return (self.last_evaluation or (0, {}))[1]

    def _take_best(self) -> None:
        """Load the weights of the best step and make that step's evaluation the last evaluation."""
        best, state, metric = self.state.best_global_step, self.state, self.config.train.best_metric
        if metric and best is None:
            logger.warning("train.best_metric: no evaluation has %s, so the last step is the result", metric)
        if best in (None, state.global_step):
            return
        state.best_model_checkpoint = str(Path(self.config.output_dir) / f"checkpoint-{best}")
        if not Path(state.best_model_checkpoint).is_dir():
            raise FileNotFoundError(f"{state.best_model_checkpoint}, which has the best {metric}, no longer exists")
        self._load_best_model()
        self.last_evaluation = best, self._evaluated()[best]

    def save_result(self) -> None:
        """Write the trained model and its `training.json` to `final/`."""
        task, folder, steps = self.task, Path(self.config.output_dir) / FINAL, self.state.global_step
        parts = {"train": (task.sources[0], task.train), "validation": (task.sources[1], task.validation)}
        metrics = (self.last_evaluation or (0, {}))[1]
        result = {
            task.unit: rows_meta(task.train)["rows"],
            "steps": steps,
            # The seconds before a kill count too.
            "seconds": round(max(self._seconds, seconds_until(folder.parent / resume.LOSS_FILE, steps)), 1),
            "data": {
                name: source and {"path": ", ".join(source.paths), "sha256": source.digest}
                for name, (source, _) in parts.items()
            },
            "tokenised": {name: rows_meta(rows) for name, (_, rows) in parts.items() if rows is not None},
            **task.facts(),
            **self._choice(),
            "evaluation": {f"eval_{name}": value for name, value in resume.scores_of(metrics).items()},
        }
        if self.is_world_process_zero():
            with new_folder(folder, ["*"], overwrite=True) as scratch:
                self.save_model(str(scratch))
                if start := getattr(self.accelerator.unwrap_model(self.model), "start", None):
                    restore_base(scratch, start)
                check_finite(stored_weights(scratch), folder)
                write_json(scratch / "training.json", finite(result))
            self.reports.keep(folder)
        else:
            self.save_model(str(folder))  # all processes take part in saving sharded weights
        logger.info("trained for %d s; the result is in %s", self._seconds, folder)
        for name in sorted(metrics):
            logger.info("%s = %.4g", name, metrics[name])

    def _choice(self) -> dict[str, Any]:
        """Return the step with the best metric, for `training.json`."""
        state, metric = self.state, self.config.train.best_metric
        if metric is None or state.best_global_step is None:
            return {}
        return {
            "weights_of_step": state.best_global_step,
            f"{'lowest' if self.config.train.lower_is_better() else 'highest'}_{metric}": state.best_metric,
            "evaluations": len(self._evaluated()),
            "stopped_early": state.global_step < state.max_steps,
        }

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as in transformers, and add the speed to the loss."""
        super().log(logs | self.losses.speed(self.state) if "loss" in logs else logs, *args, **kwargs)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Train on one micro-batch, and add its share of the step's loss to the loss log."""
        with self._as_cast(model):
            loss = super().training_step(model, inputs, num_items_in_batch)
        self.losses.add_loss(loss, self.tokens_of(inputs))
        return loss

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        if not batch_samples or "label_weights" not in batch_samples[0]:
            return super()._get_num_items_in_batch(batch_samples, device)
        weights = [one["label_weights"][:, 1:][one["labels"][:, 1:] != IGNORED].sum() for one in batch_samples]
        return self.accelerator.reduce(torch.stack(weights).sum().to(device))

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        self.losses.norm = super()._get_grad_norm(*args, **kwargs)
        return self.losses.norm

    def tokens_of(self, inputs: Any) -> int:
        """Tokens of a training batch, padding included."""
        return int(inputs.get("input_ids", inputs["labels"]).numel())

    def _as_cast(self, model: Any) -> AbstractContextManager[None]:
        # Adapter layers would copy their input to float32 and autocast would copy it back.
        return disable_input_dtype_casting(model) if self.args.bf16 else nullcontext()

    # Evaluation

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Deal batches to the processes in turn, in the order of the rows; no row counts twice.

        A process with one batch fewer repeats one of the first batches, so that all call the model equally often.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        size, rank, world = self.args.eval_batch_size, self.args.process_index, self.args.world_size
        batches = [range(at, min(at + size, len(dataset))) for at in range(0, len(dataset), size)]
        rounds = -(-len(batches) // world)
        self._to_count = len(range(rank, len(batches), world))
        return DataLoader(
            dataset,
            batch_sampler=[batches[number % len(batches)] for number in range(rank, rounds * world, world)],
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
        )

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor, None, None]:
        """Evaluate one batch, and weight its loss by its number of label tokens."""
        inputs = self._prepare_inputs(inputs)
        inputs.pop("label_weights", None)
        parts, sums = inputs.pop("label_parts", None), []
        with torch.no_grad(), self._as_cast(model), self.compute_loss_context_manager():
            if parts is None:
                loss = self.compute_loss(model, inputs)
            else:
                loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
                keep = inputs["labels"][:, 1:] != IGNORED
                targets, parts = inputs["labels"][:, 1:][keep], parts[:, 1:][keep]
                losses = nn.functional.cross_entropy(outputs.logits.float(), targets, reduction="none").double()
                own = [parts == part for part in range(len(self.task.loss_parts))]
                sums = [torch.stack([losses[one].sum(), one.sum()]) for one in own]
        more = [self._metrics["eval"].pop(name)[-1] for name in self.more_metrics]
        if self._to_count > 0:
            tokens = self.label_tokens(inputs).double()
            for row, mean in enumerate(more, len(self._sums) - len(more)):
                self._sums[row] += torch.stack([mean * tokens, tokens]).cpu()
            self._sums[: len(sums) + 1] += torch.stack([torch.stack([loss.double() * tokens, tokens]), *sums]).cpu()
        self._to_count -= 1
        return loss.detach(), None, None

    def label_tokens(self, inputs: Any) -> torch.Tensor:
        """Label tokens of a batch."""
        return (inputs["labels"] != IGNORED).sum()

    def _evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        try:
            metrics: dict[str, float] = super()._evaluate(*args, **kwargs)
        except Preempted:
            # The run saves a checkpoint and ends; the evaluation runs when the run continues.
            self.control.should_save = self.control.should_training_stop = True
            return {}
        self._determine_best_metric(metrics)
        self.control.should_training_stop |= self.impatient()
        return metrics

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any = None) -> bool:
        # transformers saves the best step only at `save_steps`, and fails if an evaluation lacks the metric.
        name = self.config.train.best_metric
        found = bool(name) and f"eval_{name}" in metrics and super()._determine_best_metric(metrics, trial)
        if found:
            self.control.should_save = True
        return found

    def impatient(self) -> bool:
        """Whether the last `train.patience` evaluations with the metric were no better than an earlier evaluation."""
        name, best = f"eval_{self.config.train.best_metric}", self.state.best_global_step or 0
        since = [step for step, row in self._evaluated().items() if name in row and step > best]
        return len(since) >= (self.config.train.patience or math.inf)

    def _evaluated(self) -> dict[int, dict[str, float]]:
        return {int(row["step"]): row for row in self.state.log_history if "eval_loss" in row}

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        """Run transformers' loop; return the mean loss over all processes' label tokens and the task's scores."""
        names = ["loss", *(f"loss_{part}" for part in self.task.loss_parts), *self.more_metrics]
        self._sums = torch.zeros(len(names), 2, dtype=torch.double)
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        sums = self._sums.to(self.args.device)
        if self.args.world_size > 1:
            torch.distributed.all_reduce(sums)
        for name, (loss, tokens) in zip(names, sums.tolist()):
            if tokens:
                output.metrics[f"{metric_key_prefix}_{name}"] = loss / tokens
        self.keeper.on_prediction_step(self.args)
        if math.isfinite(output.metrics[f"{metric_key_prefix}_loss"]):
            scores = self.task.score(self.accelerator.unwrap_model(self.model))
            output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in scores.items()})
        return output

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Return the loss on the validation rows and the task's scores, and write them to `evaluations.jsonl`."""
        # Compiled layers run uncompiled, because every step of a generation has another shape.
        compiled = self.config.train.torch_compile
        with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
            metrics: dict[str, float] = super().evaluate(*args, **kwargs)
        if self.is_world_process_zero():
            row = {"step": self.state.global_step, "epoch": self.state.epoch or 0.0}
            self.evaluations.keep_until(self.state.global_step - 1)
            self.evaluations.append([row | resume.scores_of(metrics)])
        broken = not math.isfinite(metrics["eval_loss"])
        if broken and resume.weights_broken(self.model):
            self.losses.end(self.state, self.state.global_step)
        if broken:
            logger.warning("eval_loss is not finite, but the weights are: look for a faulty validation row")
        self.last_evaluation = self.state.global_step, metrics
        return metrics

    # Saving

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        folder = Path(output_dir or self.args.output_dir)
        if self.args.should_save:
            # A pickle that nothing here reads; the run's own YAML holds the settings.
            (folder / TRAINING_ARGS_NAME).unlink(missing_ok=True)
            # PEFT's empty model card; `tripletune checkpoints export` writes a full one.
            (folder / "README.md").unlink(missing_ok=True)
            self.task.save(folder)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write no card; `tripletune checkpoints export` writes it."""


class Engine(EngineMixin, Trainer):
    """Trains a model on rows.

    Args:
        model: Any module whose forward takes a batch and returns a `loss`.
        rows: A `datasets.Dataset`; with a column `length`, a batch has rows of similar length.
        collator: Makes a batch of rows, with `labels` (-100 where nothing is learned).
        task: Adds scores, the order of the rows, and files of a checkpoint.
    """

    def __init__(
        self,
        model: nn.Module,
        rows: Any,
        collator: Callable[[list[dict[str, Any]]], dict[str, Any]],
        config: EngineConfig | RunConfig,
        *,
        validation: Any = None,
        task: TrainingTask | None = None,
    ) -> None:
        require(config)
        task = task or TrainingTask(config)
        task.model, task.train, task.validation = model, rows, validation
        settings = getattr(model, "config", None)
        super().__init__(
            model=model,
            args=TrainingArguments(**shared_arguments(config, validation is not None)),
            data_collator=collator,
            train_dataset=rows,
            eval_dataset=validation,
            processing_class=task.processor if isinstance(task.processor, PreTrainedTokenizerBase) else None,
            # Encoder-decoders average over each micro-batch, which gives the tokens of short ones too much weight.
            compute_loss_func=target_loss if getattr(settings, "is_encoder_decoder", False) else None,
        )
        self.begin_run(task)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute transformers' loss without label parts, on a copy, because transformers removes the labels."""
        inputs = {name: value for name, value in inputs.items() if name != "label_parts"}
        return super().compute_loss(model, inputs, *args, **kwargs)


def compile_layers(model: nn.Module, backend: str = "inductor") -> int:
    """Compile each layer of a language model in place and return their number; names and weights do not change.

    All layers of a stack share one compiled code, so compiling takes seconds instead of minutes. accelerate's
    `compile_regions` would also compile embeddings and output layer, whose shapes change with every batch.
    """
    compilers = os.environ.get("CXX", "g++"), "clang++"
    if backend == "inductor" and not torch.cuda.is_available() and not any(map(shutil.which, compilers)):
        raise ValueError(
            "train.torch_compile needs a C++ compiler (g++, clang++ or $CXX): install one, or leave torch_compile out"
        )
    layers = list(_layers(model))
    if not layers:
        raise ValueError(f"train.torch_compile: {type(model).__name__} has no stack of equal layers to compile")
    for layer in layers:
        # Lengths change with every batch, so sizes are dynamic from the start, not only after a second compilation.
        layer.compile(backend=backend, dynamic=True)
    return len(layers)


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """The layers of the outermost stacks."""
    if isinstance(module, nn.ModuleList) and len({type(child) for child in module}) == 1:
        yield from module
        return
    for child in module.children():
        yield from _layers(child)
