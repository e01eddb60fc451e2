"""Evaluations of a run: losses over all label tokens, scores of replies, and the step whose weights are the best.

`eval_loss` is the mean over the label tokens of a whole evaluation, on all processes together and without weights.

Tested in `tests/train/test_engine.py` and `tests/train/test_callbacks.py`.
"""

from __future__ import annotations

import logging
import math
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader

from tripletune.core import libraries
from tripletune.core.data.records import IGNORED
from tripletune.models.run_folders import Preempted
from tripletune.train.callbacks import Keeper, LossLog, StepLog, scores_of, weights_broken
from tripletune.train.settings import AnyConfig
from tripletune.train.tasks import TrainingTask

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import Trainer as Mixed
else:
    Mixed = object

logger = logging.getLogger(__name__)
# A model's inputs by name: tensors, and for a Graph-LLM the graphs of PyG.
Batch = dict[str, Any]


class Evaluation(NamedTuple):
    """The metrics of an evaluation, with the prefix `eval_`, and the optimiser step before it."""

    step: int
    metrics: dict[str, float]


class EvaluationMixin(Mixed):
    """The evaluations of `train.engine.EngineMixin`, before a trainer's own."""

    task: TrainingTask
    config: AnyConfig
    keeper: Keeper
    losses: LossLog
    evaluations: StepLog
    last_evaluation: Evaluation | None = None
    # Names of an evaluation's metrics that TRL adds to `_metrics` as means of a batch.
    more_metrics: tuple[str, ...] = ()
    _metrics: dict[str, dict[str, list[float]]]
    # Of the running evaluation, on this process: sum of losses and number of label tokens, (2,), by metric.
    _sums: dict[str, torch.Tensor]
    # Batches of this process that the running evaluation has still to count.
    _to_count: int

    def _as_cast(self, model: nn.Module) -> AbstractContextManager[None]:
        """Call a model without PEFT's casts of inputs, if the run computes in bfloat16.

        Adapter layers would copy their input to float32, and autocast would copy it back.
        """
        if not self.args.bf16:
            return nullcontext()
        disable_input_dtype_casting = libraries.take("peft.helpers:disable_input_dtype_casting")
        return disable_input_dtype_casting(model)  # type: ignore[no-any-return]

    def get_eval_dataloader(self, eval_dataset: Dataset | None = None) -> DataLoader[Batch]:
        """Deal batches to the processes in turn, in the order of the rows; no row counts twice.

        A process with one batch fewer repeats one of the first batches, so that all call the model equally often: with
        a sharded model, a process with one call more would wait for the others for ever. `_to_count` tells
        `prediction_step` how many batches of this process are no repetition.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        size = self.args.eval_batch_size
        rank = self.args.process_index
        world = self.args.world_size
        batches = [list(range(start, min(start + size, len(dataset)))) for start in range(0, len(dataset), size)]
        rounds = math.ceil(len(batches) / world)
        self._to_count = len(range(rank, len(batches), world))
        return DataLoader(
            dataset,
            batch_sampler=[batches[number % len(batches)] for number in range(rank, rounds * world, world)],
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
        )

    def prediction_step(
        self, model: nn.Module, inputs: Batch, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor, None, None]:
        """Evaluate one batch, and weight its loss by its number of label tokens.

        transformers would average over batches, so that a token in a batch with few labels would count more. The sums
        go to `_sums`, from which `evaluation_loop` makes the means.
        """
        inputs = self._prepare_inputs(inputs)
        # `eval_loss` is without weights, so that runs with different weights can be compared.
        inputs.pop("label_weights", None)
        parts = inputs.pop("label_parts", None)
        sums = {}
        with torch.no_grad(), self._as_cast(model), self.compute_loss_context_manager():
            if parts is None:
                loss = self.compute_loss(model, inputs)
            else:
                loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
                sums = self._sums_of_parts(outputs.logits, inputs["labels"], parts)
        tokens = self.label_tokens(inputs).double()
        sums["loss"] = torch.stack([loss.double() * tokens, tokens])
        for name in self.more_metrics:
            # TRL appends the batch's mean to this list, and would report a mean of means.
            mean = self._metrics["eval"].pop(name)[-1]
            sums[name] = torch.stack([mean * tokens, tokens])
        # The batches after these are repetitions; see `get_eval_dataloader`.
        if self._to_count > 0:
            for name, batch_sum in sums.items():
                self._sums[name] += batch_sum.cpu()
        self._to_count -= 1
        return loss.detach(), None, None

    def _sums_of_parts(
        self, logits: torch.Tensor, labels: torch.Tensor, parts: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Return sum of losses and number of tokens, (2,), for each of the task's `loss_parts`.

        Args:
            logits: (N, V) at the N label tokens.
            labels: (B, T), -100 where nothing is learned.
            parts: (B, T), the index of each label token's part.
        """
        # The first token of a row is not predicted, so labels and parts are shifted by one.
        is_label = labels[:, 1:] != IGNORED
        targets = labels[:, 1:][is_label]
        part_of_target = parts[:, 1:][is_label]
        losses = nn.functional.cross_entropy(logits.float(), targets, reduction="none").double()
        sums = {}
        for index, part in enumerate(self.task.loss_parts):
            in_part = part_of_target == index
            sums[f"loss_{part}"] = torch.stack([losses[in_part].sum(), in_part.sum().double()])
        return sums

    def label_tokens(self, inputs: Batch) -> torch.Tensor:
        """Number of label tokens of a batch, by which its loss is weighted; a scalar tensor on the batch's device."""
        return (inputs["labels"] != IGNORED).sum()

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        """Run transformers' loop; return the mean loss over all processes' label tokens and the task's scores.

        A model whose loss is not finite cannot generate replies, so it gets no scores.
        """
        names = ["loss", *(f"loss_{part}" for part in self.task.loss_parts), *self.more_metrics]
        self._sums = {name: torch.zeros(2, dtype=torch.double) for name in names}
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        sums = torch.stack(list(self._sums.values())).to(self.args.device)
        if self.args.world_size > 1:
            torch.distributed.all_reduce(sums)
        for name, (loss, tokens) in zip(names, sums.tolist(), strict=True):
            if tokens:
                output.metrics[f"{metric_key_prefix}_{name}"] = loss / tokens
        if math.isfinite(output.metrics[f"{metric_key_prefix}_loss"]):
            with self.keeper.interruptible(self.args):
                scores = self.task.score(self.accelerator.unwrap_model(self.model))
            for name, value in scores.items():
                output.metrics[f"{metric_key_prefix}_{name}"] = value
        return output

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Return the loss on the validation rows and the task's scores, and write them to `evaluations.jsonl`.

        With broken weights the run ends here; an infinite loss alone may come from a single validation row.
        """
        # Compiled layers run uncompiled, because every step of a generation has another shape.
        compiled = self.config.train.torch_compile
        with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
            metrics: dict[str, float] = super().evaluate(*args, **kwargs)
        if self.is_world_process_zero():
            # A resumed run may evaluate a step again, whose line is replaced.
            row = {"step": self.state.global_step, "epoch": self.state.epoch or 0.0}
            self.evaluations.keep_until(self.state.global_step - 1)
            self.evaluations.append([row | scores_of(metrics)])
        if not math.isfinite(metrics["eval_loss"]):
            # All processes come here, since the loss is the mean over all of them.
            if weights_broken(self.model):
                self.losses.end(self.state, self.state.global_step)
            logger.warning("eval_loss is not finite, but the weights are: look for a faulty validation row")
        self.last_evaluation = Evaluation(self.state.global_step, metrics)
        return metrics

    def _evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate during training; see transformers' `Trainer._evaluate`.

        A signal and an end of patience only set flags, so that transformers ends the run after it has saved.
        """
        try:
            metrics: dict[str, float] = super()._evaluate(*args, **kwargs)
        except Preempted:
            # The run saves a checkpoint and ends; the evaluation runs when the run continues.
            self.control.should_save = True
            self.control.should_training_stop = True
            return {}
        self._determine_best_metric(metrics)
        if self.out_of_patience():
            self.control.should_training_stop = True
            train = self.config.train
            logger.info(
                "training stops at step %d: no %s of the last %d evaluations is better than that of step %d, whose "
                "weights are the result (train.patience)",
                self.state.global_step,
                train.best_metric,
                train.patience,
                self.state.best_global_step or 0,
            )
        return metrics

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any = None) -> bool:
        """Whether an evaluation is the best; transformers fails if it lacks the metric, as one without scores does."""
        name = self.config.train.best_metric
        if not name or f"eval_{name}" not in metrics:
            return False
        is_best = bool(super()._determine_best_metric(metrics, trial))
        if is_best:
            # transformers saves the best step only at `save_steps`.
            self.control.should_save = True
        return is_best

    def out_of_patience(self) -> bool:
        """Whether the last `train.patience` evaluations with the metric were no better than an earlier evaluation.

        Counted from the trainer's state, which a checkpoint holds, so a resumed run stops at the same step.
        """
        patience = self.config.train.patience
        if patience is None:
            return False
        name = f"eval_{self.config.train.best_metric}"
        best_step = self.state.best_global_step or 0
        without_improvement = [step for step, row in self.evaluated_steps().items() if name in row and step > best_step]
        return len(without_improvement) >= patience

    def evaluated_steps(self) -> dict[int, dict[str, float]]:
        """The metrics of all evaluations, also of those before a resume, by optimiser step."""
        return {int(row["step"]): row for row in self.state.log_history if "eval_loss" in row}
