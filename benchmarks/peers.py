"""Other trainers on the tokens of our runs: TRL's `SFTTrainer`, and transformers' `Trainer` with PEFT.

A peer gets a run's language model, LoRA, batches and optimiser. It reads the rows in the order of our sampler, which
puts rows of similar length into a batch, so that both sides pad alike and their losses can be compared step by step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple, TypedDict

import torch
from datasets import Dataset
from torch.utils.data import SequentialSampler
from transformers import (
    DataCollatorForSeq2Seq,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from trl import SFTConfig, SFTTrainer

from tripletune.models.loading import load_causal_lm
from tripletune.models.lora import add_lora
from tripletune.train.settings import RunConfig
from tripletune.train.tasks import TrainingTask

# Arguments of transformers that follow from settings of the same name.
_OPTIMISER = ("learning_rate", "adam_beta1", "adam_beta2", "weight_decay", "max_grad_norm", "warmup_ratio")


class TokenRow(TypedDict):
    """The tokens of a training row, and its labels, -100 where the prompt is."""

    input_ids: list[int]
    labels: list[int]


class AdaptedModel(NamedTuple):
    """A language model with LoRA, and its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


class _InOrder:
    """Reads the rows in their order; the first base class of a peer's trainer."""

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> SequentialSampler:
        """The sampler of the rows' order, whatever arguments the version of transformers passes."""
        return SequentialSampler(self.train_dataset)  # type: ignore[attr-defined]


class _Trl(_InOrder, SFTTrainer):  # type: ignore[misc]
    """TRL's `SFTTrainer`, which reads the rows in their order."""

    def _send_telemetry(self) -> None:
        """Send nothing."""


class _Transformers(_InOrder, Trainer):  # type: ignore[misc]
    """transformers' `Trainer`, which reads the rows in their order."""


class Clock(TrainerCallback):
    """Measures a call of `train` from its first batch to the end of its last step.

    Attributes:
        seconds: Of the last call.
        steps: Seconds of each step of the last call.
        losses: Of each step of the first call, if the trainer logs each step.
        limit: Seconds after which no further step begins.
    """

    def __init__(self, limit: float | None = None) -> None:
        self.limit = limit
        self.seconds = 0.0
        self.steps: list[float] = []
        self.losses: list[float] = []
        self._begun = 0.0
        self._step_begun = 0.0
        self._calls = 0

    def on_epoch_begin(self, *args: Any, **kwargs: Any) -> None:
        """Start the clock; set-up and checkpoints are not counted."""
        self._begun = time.perf_counter()
        self._step_begun = self._begun
        self._calls += 1
        self.steps = []

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Read the clock when the device has finished the step; tells `control` to stop after `limit`."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.steps.append(now - self._step_begun)
        self.seconds = now - self._begun
        self._step_begun = now
        if self.limit is not None and self.seconds > self.limit:
            control.should_training_stop = True

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Keep the losses of the first call: in later ones the weights are already trained."""
        if self._calls == 1 and logs and "loss" in logs:
            self.losses.append(float(logs["loss"]))


def rows_in_our_order(task: TrainingTask) -> list[TokenRow]:
    """Tokens and labels of a run's training rows, in the order in which the run's first epoch reads them."""
    order = list(task.sampler(task.train, task.rows_per_step(1)))
    rows: list[TokenRow] = []
    for number in order:
        row = task.train[number]
        rows.append({"input_ids": list(row["input_ids"]), "labels": list(row["labels"])})
    return rows


def arguments_of(config: RunConfig, **settings: Any) -> dict[str, Any]:
    """Arguments of transformers' `TrainingArguments` for one pass as a run makes it.

    Args:
        config: The settings of our run.
        **settings: Further arguments, which replace equal ones; `TrainingArguments` refuses unknown names.
    """
    train = config.train
    optimiser = {name: getattr(train, name) for name in _OPTIMISER}
    # The number of steps is not known here; a share below 1 is what transformers takes for it.
    optimiser["warmup_steps"] = optimiser.pop("warmup_ratio")
    return optimiser | {
        "output_dir": f"{config.output_dir}/peer",
        "per_device_train_batch_size": train.batch_size,
        "gradient_accumulation_steps": 1,
        "num_train_epochs": 1,
        "max_steps": train.max_steps or -1,
        "lr_scheduler_type": train.scheduler,
        "logging_steps": 1,
        "seed": config.seed,
        "use_cpu": not torch.cuda.is_available(),
        "dataloader_pin_memory": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **settings,
    }


def adapted_model(config: RunConfig, dtype: str, attention: str = "sdpa") -> AdaptedModel:
    """A run's language model with its LoRA, without dropout, so that losses can be compared."""
    torch.manual_seed(config.seed)
    chosen = config.model
    model, tokenizer = load_causal_lm(chosen.base, getattr(torch, dtype))
    model.set_attn_implementation(attention)
    adapted = add_lora(model, base=chosen.base, **chosen.lora_arguments() | {"dropout": 0.0})
    return AdaptedModel(adapted, tokenizer)


def adapter_values(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The values of a model's LoRA by the names of its layers, which are the same in every wrapper."""
    values = {}
    for name, weight in model.named_parameters():
        if ".lora_" in name:
            values[name[name.index("layers.") :]] = weight.detach().clone()
    return values


def copy_into_adapter(target: PreTrainedModel, values: dict[str, torch.Tensor]) -> None:
    """Give a peer's LoRA the values of our model's, whose random numbers were drawn in another order."""
    with torch.no_grad():
        for name, weight in target.named_parameters():
            if ".lora_" in name:
                weight.copy_(values[name[name.index("layers.") :]])


def trl_trainer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[TokenRow],
    config: RunConfig,
    **settings: Any,
) -> SFTTrainer:
    """TRL's `SFTTrainer`; `settings` go to `arguments_of`, and all that it does not set is TRL's default."""
    arguments = SFTConfig(**arguments_of(config, max_length=None, **settings))
    trainer = _Trl(model, arguments, train_dataset=Dataset.from_list(list(rows)), processing_class=tokenizer)
    trainer.remove_callback(PrinterCallback)
    return trainer


def transformers_trainer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[TokenRow],
    config: RunConfig,
    **settings: Any,
) -> Trainer:
    """transformers' `Trainer` with its own padding collator; `settings` go to `arguments_of`.

    It uses bfloat16 autocast where a run would.
    """
    from tripletune.train.arguments import use_bf16

    settings = {"bf16": use_bf16(config.train.bf16), **settings}
    arguments = TrainingArguments(**arguments_of(config, **settings))
    trainer = _Transformers(
        model,
        arguments,
        train_dataset=Dataset.from_list(list(rows)),
        data_collator=DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=-100),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer
