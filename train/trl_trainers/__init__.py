"""TRL's trainers, with this engine's data order, logs and resume.

`DPOTrainer` trains a text model or a Graph-LLM on two given replies per prompt. `DistillationTrainer` samples the
student's replies to prompts; a teacher with another vocabulary is in `other_family.py`. Reinforcement learning is in
`grpo.py`.

Checkpoints lie only between two rollouts, in which a trainer samples replies. The seed of a reply depends on run, step,
row and call, so a resumed run samples the same replies.

Shapes: B rows (two per pair), T tokens of the longest row, N label tokens, V vocabulary.

Tested in `tests/train/test_preference.py` and `tests/train/tasks/test_student_task.py`.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerControl, TrainerState, TrainingArguments
from trl import DistillationConfig, DistillationTrainer, DPOConfig, DPOTrainer

from tripletune.core import libraries
from tripletune.core.data.records import IGNORED
from tripletune.models.losses import evaluating
from tripletune.train.arguments import shared_arguments
from tripletune.train.callbacks import StepLog
from tripletune.train.engine import EngineMixin
from tripletune.train.rows.cache import TEACHER
from tripletune.train.rows.pairs import pair_batch
from tripletune.train.tasks import TrainingTask

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers.utils import ModelOutput

    from tripletune.train.evaluation import Batch
    from tripletune.train.tasks.cirag_on_policy import OnPolicyTask

libraries.check_use("trainers of TRL")
REWARDS = "rewards.jsonl"


class TrlMixin(EngineMixin):
    """The common part of all TRL trainers, as their first base class."""

    def _prepare_inputs(self, inputs: Batch | list[dict[str, Any]]) -> Batch:
        """Prepare a batch as TRL does, and keep it: the `inputs` of a training step are the rows before the rollout."""
        self._batch = super()._prepare_inputs(inputs)
        return self._batch

    def _as_cast(self, model: torch.nn.Module) -> AbstractContextManager[None]:
        """Keep PEFT's casts: TRL's generation and hidden states bypass the forward that accelerate puts in autocast."""
        return nullcontext()

    def tokens_of(self, inputs: Batch) -> int:
        """Tokens of the prompts and of the replies generated for them, padding included."""
        return int(self._batch["prompt_ids"].numel() + self._batch["completion_ids"].numel())

    def label_tokens(self, inputs: Batch) -> torch.Tensor:
        """Tokens of the generated replies, which are what is learned from."""
        return inputs["completion_mask"].sum()

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Batch:
        """Make a rollout; if no token can be sampled, end the run as after a loss that is not finite."""
        try:
            output: dict[str, Any] = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        except RuntimeError as error:
            # The errors of torch and of `models.local.choose` if no token can be sampled.
            if not re.search("probability tensor|not finite", str(error)):
                raise
            self.losses.end(self.state, self.state.global_step)
        return output

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        """Save as the engine does, without TRL's reference adapter."""
        super()._save(output_dir, state_dict)
        # A copy of the initial adapter, which TRL makes again at each start.
        shutil.rmtree(Path(output_dir or self.args.output_dir) / "ref", ignore_errors=True)

    def _send_telemetry(self) -> None:
        """Send no telemetry, unlike TRL, whose trainers report their use."""


class RewardLog(StepLog):
    """`rewards.jsonl`: the means of TRL's metrics since the last line, under our names.

    Args:
        names: TRL's names of the metrics by ours.
    """

    def __init__(self, task: TrainingTask, names: Mapping[str, str]) -> None:
        super().__init__(Path(task.config.output_dir) / REWARDS)
        self.names = names

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Write a line, if these are the logs of training steps, under our names, which `eval curve` draws.

        Only the main process writes, since all have the same figures.
        """
        # Only TRL's logs of training steps have an entropy under this name.
        if state.is_world_process_zero and logs and "entropy" in logs:
            row: dict[str, Any] = {"step": state.global_step}
            for own_name, trl_name in self.names.items():
                row[own_name] = logs.get(trl_name)
            self.append([row])


class PreferenceTrainer(TrlMixin, DPOTrainer):
    """Trains a model with an adapter on pairs of replies; the reference model has the initial adapter."""

    more_metrics = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins")

    def __init__(self, task: TrainingTask) -> None:
        """Make the trainer of a task whose model and rows are loaded; the model's forward is replaced."""
        base = task.model.get_base_model()
        # Taken before TRL replaces it with its own.
        forward = base.forward
        train = task.config.train
        super().__init__(
            model=task.model,
            args=DPOConfig(
                **shared_arguments(task.config, evaluates=task.validation is not None),
                loss_type=["sigmoid" if train.preference == "dpo" else train.preference],
                beta=train.beta,
                # No auxiliary loss for the router of a mixture of experts.
                router_aux_loss_coef=0.0,
            ),
            data_collator=partial(pair_batch, task.collator()),
            train_dataset=task.train,
            eval_dataset=task.validation,
            processing_class=task.tokenizer,
        )
        # TRL's own forward takes no graphs, and computes the logits of all tokens on a CPU.
        graph_encoder = getattr(base, "graph_encoder", torch.nn.Identity())
        base.forward = with_log_probs(forward, graph_encoder)
        # TRL copies only parameters, but the reference also needs the graph encoder's batch statistics.
        buffers = dict(task.model.named_buffers())
        for name, buffer in buffers.items():
            if ".ref." in name:
                buffer.copy_(buffers[name.replace(".ref.", ".default.")])
        self.add_callback(RewardLog(task, {name: name for name in self.more_metrics}))
        self.begin_run(task)

    def _prepare_dataset(self, dataset: Dataset, *args: Any) -> Dataset:
        """Leave the rows as they are: they are tokens already."""
        return dataset

    def _get_num_items_in_batch(self, batch_samples: list[Batch], device: torch.device) -> torch.Tensor:
        """The mean number of pairs of the step's micro-batches, over all processes; see `compute_loss`."""
        pairs = torch.tensor([float(self.label_tokens(batch)) for batch in batch_samples], device=device)
        return self.accelerator.reduce(pairs.mean(), "mean")

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: Batch,
        *args: Any,
        num_items_in_batch: torch.Tensor | None = None,
        **options: Any,
    ) -> Any:
        """TRL's loss; in training, all pairs of an optimiser step have the same weight, also in a small micro-batch.

        TRL averages over each micro-batch, so a pair in a small one would count more. An evaluation gives no
        `num_items_in_batch`; there `prediction_step` weights the batches.
        """
        if num_items_in_batch is None:
            return super().compute_loss(model, inputs, *args, **options)
        pairs = self.label_tokens(inputs)
        with self._gathering_by(partial(self._gather_pairs, has_pairs=bool(pairs))):
            loss = super().compute_loss(model, inputs, *args, **options)
        return loss * pairs / num_items_in_batch

    @contextmanager
    def _gathering_by(self, gather: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
        """Replace the accelerator's method by which TRL gathers rewards; `del` shows the class's again."""
        self.accelerator.gather = gather
        try:
            yield
        finally:
            del self.accelerator.gather

    def _gather_pairs(self, values: torch.Tensor, has_pairs: bool) -> torch.Tensor:
        """Gather a number per pair, of which processes may have different numbers in the last step of an epoch.

        Args:
            values: A number per pair, or a sum of all, whose size is the same everywhere.
            has_pairs: Whether this process has pairs, and not the filler of `train.rows.loading`.
        """
        gather = partial(type(self.accelerator).gather, self.accelerator)
        if not values.dim():
            return gather(values)
        kept = values if has_pairs else values[:0]
        gathered: torch.Tensor = gather(self.accelerator.pad_across_processes(kept, pad_index=math.nan))
        return gathered[~gathered.isnan()]

    def prediction_step(self, *args: Any, **options: Any) -> Any:
        """Evaluate one batch. Some processes may have a batch fewer, so TRL must not gather its rewards."""
        with self._gathering_by(lambda rewards: rewards):
            return super().prediction_step(*args, **options)

    def tokens_of(self, inputs: Batch) -> int:
        """Tokens of both replies with their prompts, padding included."""
        return int(inputs["input_ids"].numel())

    def label_tokens(self, inputs: Batch) -> torch.Tensor:
        """The number of pairs, which all have the same weight; the filler of `train.rows.loading` has no labels."""
        preferred = inputs["completion_mask"][: len(inputs["completion_mask"]) // 2]
        return preferred.any(1).sum()


def with_log_probs(forward: Callable[..., Any], graphs: torch.nn.Module) -> Callable[..., Any]:
    """Wrap a forward to return log-probabilities and more of label tokens, (B, T - 1), as `add_fused_lm_head` does.

    The graph encoder runs in evaluation mode: dropout and batch statistics would make policy and reference differ.

    Args:
        forward: The model's forward, which returns logits (B, T, V), or (N, V) if it computes only those of label
            tokens (`models.losses.learn_labels_only`).
        graphs: The graph encoder.
    """

    @wraps(forward)
    def forward_or_log_probs(*args: Any, fused_lm_head: bool = False, **inputs: Any) -> ModelOutput:
        """Call the model's own forward, unless TRL asks for log-probabilities with its argument `fused_lm_head`.

        TRL's own version of this computes all logits; here they are computed at label positions alone, and the result
        has 0 elsewhere, in shape (B, T - 1). Graph modules are in evaluation mode, so that the two models of a pair do
        not differ by dropout.
        """
        if not fused_lm_head:
            return forward(*args, **inputs)
        inputs.pop("attention_mask")  # padding stands on the right
        labels = inputs["labels"][:, 1:]
        is_label = labels != IGNORED
        with evaluating(graphs):
            logits = forward(*args, **inputs).logits
        logits = logits_at_labels(logits, is_label).float()
        log_probs = logits.log_softmax(-1)
        # These are only logged.
        fixed = log_probs.detach()
        values = {
            "log_probs": log_probs.gather(1, labels[is_label][:, None])[:, 0],
            "entropy": -(fixed.exp() * fixed).sum(-1),
            "mean_logits": logits.detach().mean(-1),
            "is_top1": fixed.argmax(-1) == labels[is_label],
        }
        in_rows = {
            name: value.new_zeros(is_label.shape).masked_scatter(is_label, value) for name, value in values.items()
        }
        output = libraries.take("trl.trainer.utils:FusedCausalLMOutput")
        return output(**in_rows)

    return forward_or_log_probs


def logits_at_labels(logits: torch.Tensor, is_label: torch.Tensor) -> torch.Tensor:
    """Return the logits of the N label tokens, (N, V), of a model that may compute those of all tokens.

    Args:
        logits: (B, T, V), or (N, V) if the model computes only those of label tokens.
        is_label: (B, T - 1), whether the next token has a label.
    """
    if logits.dim() == 2:
        return logits
    return logits[:, :-1][is_label]


class OnPolicyTrainer(TrlMixin, DistillationTrainer):
    """Trains a student on its own replies."""

    def __init__(self, task: OnPolicyTask) -> None:
        """Make the trainer of a task whose student, teacher and prompts are loaded."""
        train = task.config.train
        super().__init__(
            model=task.model,
            # TRL's loss needs a teacher with the student's logits.
            teacher_model=task.teacher if task.other_family is None else None,
            args=DistillationConfig(
                **shared_arguments(task.config, evaluates=task.validation is not None),
                beta=train.divergence,
                temperature=train.temperature,
                max_completion_length=train.max_reply_tokens,
            ),
            train_dataset=_prompt_columns(task.train),
            eval_dataset=None if task.validation is None else _prompt_columns(task.validation),
            processing_class=task.processor,
        )
        self.begin_run(task)

    def _tokenize_prompts(self, prompts: list[list[int]]) -> tuple[list[list[int]], None, dict[str, Any]]:
        """Leave the prompts as they are: they are tokens already, made by the loop's code."""
        return prompts, None, {}

    def _generate_single_turn(self, *args: Any, **options: Any) -> Any:
        """Generate without dropout, which would sample replies of another model than the student in use."""
        with evaluating(self.accelerator.unwrap_model(self.model)):
            return super()._generate_single_turn(*args, **options)


def _prompt_columns(rows: Dataset) -> Dataset:
    """Rows as TRL reads them: it would take other columns than `prompt` for images and the like."""
    columns = ["input_ids", "length", *(name for name in TEACHER if name in rows.column_names)]
    return rows.select_columns(columns).rename_column("input_ids", "prompt")
