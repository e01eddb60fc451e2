"""Arguments of transformers' `TrainingArguments`, and of its subclasses in TRL, that follow from a run's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from tripletune.models.specs import best_dtype
from tripletune.train.resume import process_count
from tripletune.train.settings import AnyConfig

# Settings that have the same name in TrainingArguments.
_SAME_NAME = (
    "learning_rate", "adam_beta1", "adam_beta2", "weight_decay", "max_grad_norm", "logging_steps", "eval_steps",
    "save_steps", "save_total_limit", "ddp_timeout",
)  # fmt: skip


def shared_arguments(config: AnyConfig, evaluates: bool = True) -> dict[str, Any]:
    """Return keyword arguments for `TrainingArguments` and its subclasses, for a run with or without evaluations."""
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
        # transformers takes a number below 1 as a share of the optimiser steps, but 1 as one step.
        "warmup_steps": train.warmup_ratio if train.warmup_ratio < 1 else 0.999,
        "lr_scheduler_type": train.scheduler,
        "lr_scheduler_kwargs": train.scheduler_arguments,
        "optim": train.optimizer or TrainingArguments.default_optim,
        "bf16": use_bf16(train.bf16),
        "activation_checkpointing": train.gradient_checkpointing,
        "logging_first_step": True,
        # With the filter, transformers logs a loss that is not finite as 0.
        "logging_nan_inf_filter": False,
        "eval_strategy": "steps" if evaluates else "no",
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
    if choice == "auto":
        return best_dtype() is torch.bfloat16
    return choice == "true"
