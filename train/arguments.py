"""Arguments of transformers' `TrainingArguments`, and of its subclasses in TRL, that follow from a run's settings.

Tested in `tests/train/test_config.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from tripletune.models.specs import best_dtype
from tripletune.train.resume import process_count
from tripletune.train.settings import AnyConfig, TrainSection

# Settings that have the same name in TrainingArguments.
_SAME_NAME = (
    "learning_rate", "adam_beta1", "adam_beta2", "weight_decay", "max_grad_norm", "logging_steps", "eval_steps",
    "save_steps", "save_total_limit", "ddp_timeout",
)  # fmt: skip

_BY_LAUNCHER = "the launcher shards models: accelerate launch --config_file recipes/accelerate/…"
_BY_COMPILE = "set train.torch_compile, which compiles each layer"
_ROUNDED = "the last evaluation would round the weights of the result: evaluate the result with tripletune eval"
# Arguments that would break what a run promises (exact resume, one loss for any number of processes, the result's
# weights), with their only accepted value, and why or what to do.
_FIXED: dict[str, tuple[Any, str]] = {
    "save_only_model": (False, "a resumed run would begin without optimiser and schedule"),
    "ignore_data_skip": (False, "a resumed run would learn from the first rows again"),
    "restore_callback_states_from_checkpoint": (False, "a resumed run would have the old save and stop settings"),
    "save_strategy": ("steps", "checkpoints follow train.save_steps and train.save_minutes"),
    "enable_jit_checkpoint": (False, "a run saves a checkpoint at SIGTERM by itself"),
    "resume_from_checkpoint": (None, "a run continues from its newest checkpoint (resume)"),
    "average_tokens_across_devices": (True, "several processes would have other losses than one"),
    "auto_find_batch_size": (False, "records per step would change in the middle of a run: set train.batch_size"),
    "load_best_model_at_end": (False, "set train.best_metric, which chooses the result"),
    "dataloader_in_order": (True, "rows would come in the order in which data-loading processes finish"),
    "dataloader_drop_last": (False, "rows of the last batch would be neither learned nor evaluated"),
    "label_smoothing_factor": (0.0, "it does not fit our losses: it changes eval_loss and knows no weights of records"),
    "eval_on_start": (False, "only a resumed run evaluates at its start"),
    "bf16_full_eval": (False, _ROUNDED),
    "fp16_full_eval": (False, _ROUNDED),
    "torch_compile": (False, _BY_COMPILE),
    "torch_compile_backend": (None, _BY_COMPILE),
    "torch_compile_mode": (None, _BY_COMPILE),
    "deepspeed": (None, _BY_LAUNCHER),
    "fsdp": (None, _BY_LAUNCHER),
    "fsdp_config": (None, _BY_LAUNCHER),
    "parallelism_config": (None, _BY_LAUNCHER),
}
# Entries of `accelerator_config` that change the rows of a step.
_FIXED_ACCELERATION: dict[str, tuple[Any, str]] = {
    "split_batches": (False, "train.batch_size is the number of rows per device"),
    "dispatch_batches": (None, "each process collates its own rows, since graphs can't be split"),
    "gradient_accumulation_kwargs": (None, "set train.gradient_accumulation or train.records_per_step"),
}


def broken_promises(arguments: Mapping[str, Any]) -> list[str]:
    """A problem for each argument that would break what a run promises; see `_FIXED`.

    None is accepted everywhere, since it leaves an argument at its default. The tests beside are
    `tests/train/test_config.py:test_arguments_that_break_a_promise_are_refused` and the one after it.
    """
    acceleration = arguments.get("accelerator_config")
    checked = [(arguments, _FIXED)]
    problems = []
    if isinstance(acceleration, dict):
        checked.append((acceleration, _FIXED_ACCELERATION))
    elif acceleration is not None:
        problems.append(
            "train.arguments: accelerator_config must be a mapping of names and values, so that it is checked"
        )
    for values, fixed in checked:
        for name, (accepted, reason) in fixed.items():
            value = values.get(name, accepted)
            if value is not None and value != accepted:
                problems.append(f"train.arguments: leave out {name} {value}: {reason}")
    return problems


def shared_arguments(config: AnyConfig, evaluates: bool = True) -> dict[str, Any]:
    """Return keyword arguments for `TrainingArguments` and its subclasses, for a run with or without evaluations.

    Our own settings win; `train.misfits` has refused those of `train.arguments` that would contradict them.
    """
    return config.train.arguments | own_arguments(config, evaluates)


def own_arguments(config: AnyConfig, evaluates: bool = True) -> dict[str, Any]:
    """Return the arguments that follow from our settings, so that `train.arguments` can't set them.

    Args:
        evaluates: Whether the run has validation rows. Without them, transformers refuses an `eval_strategy`.
    """
    train = config.train
    use_cpu = not torch.cuda.is_available()
    evaluates = evaluates and train.eval_steps is not None
    same_name = {name: getattr(train, name) for name in _SAME_NAME}
    return same_name | {
        "output_dir": config.output_dir,
        "run_name": config.run_name or Path(config.output_dir).name,
        "seed": config.seed,
        "data_seed": config.seed,
        "num_train_epochs": train.epochs,
        "max_steps": train.max_steps or -1,
        "per_device_train_batch_size": train.batch_size,
        "per_device_eval_batch_size": train.eval_batch_size,
        "gradient_accumulation_steps": train.micro_batches(process_count()),
        "warmup_steps": _warmup_steps_or_share(train),
        "lr_scheduler_type": train.scheduler,
        "lr_scheduler_kwargs": train.scheduler_arguments,
        "optim": train.optimizer or TrainingArguments.default_optim,
        "bf16": use_bf16(train.bf16),
        "activation_checkpointing": train.gradient_checkpointing,
        # A run that has begun wrongly shows it at once.
        "logging_first_step": True,
        # With the filter, transformers logs a loss that is not finite as 0.
        "logging_nan_inf_filter": False,
        "eval_strategy": "steps" if evaluates else "no",
        # Our evaluation sums losses by batch; the logits of all batches would fill the memory.
        "prediction_loss_only": True,
        "metric_for_best_model": train.best_metric,
        "greater_is_better": not train.lower_is_better(),
        "dataloader_num_workers": train.workers,
        "dataloader_pin_memory": not use_cpu,
        "use_cpu": use_cpu,
        "report_to": config.report_to,
        # transformers would push checkpoints with optimiser states, and its own card.
        "push_to_hub": False,
        # Collators read columns that the model's forward does not take, such as spans.
        "remove_unused_columns": False,
        # Else a batch would need every argument of the forward with "label" in its name, such as `label_weights`.
        "label_names": ["labels"],
        # The run's own lines show the same (`train.callbacks.LossLog`).
        "disable_tqdm": True,
        "log_level": "warning",
    }


def _warmup_steps_or_share(train: TrainSection) -> float:
    """The warm-up as transformers takes it: a number below 1 is a share of the optimiser steps, 1 is one step.

    So the ratio 1, all steps, becomes a number just below 1, which transformers rounds up to all steps.
    """
    if train.warmup_steps is not None:
        return train.warmup_steps
    return min(train.warmup_ratio, 0.999)


def use_bf16(choice: str) -> bool:
    """Whether to run in bfloat16 autocast; "auto" depends on the hardware."""
    if choice == "auto":
        return best_dtype() is torch.bfloat16
    return choice == "true"
