"""Measure training on the CPU: our trainer and TRL's on the same rows.

Each variant has its own trainer. A pass is a call of the trainer's `train`, timed from the first batch to the last
step, without set-up and checkpoints.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import ENCODER, MODEL, Options, Result, Way, quiet, take_turns
from tripletune.core.config import load_config
from tripletune.core.options import setting
from tripletune.core.plugins import load_from
from tripletune.data_builders.subq.build import build
from tripletune.data_builders.subq.options import BuildOptions, Source
from tripletune.data_builders.world.build import WorldOptions, write_world
from tripletune.models.loading import load_causal_lm
from tripletune.models.lora import add_lora
from tripletune.models.specs import best_dtype
from tripletune.train import engine_of

_RECIPE = Path(__file__).resolve().parents[1] / "recipes/configs/smollm2_135m_ras_cpu.yaml"
_INTERLEAVED = {"data.prompt_order": "interleaved", "train.batch_size": 1}
_COMPILED = "-compiled"
_BEST = "trl-best"
# Changes to TRL's defaults: no activation checkpointing, and records of similar length in a batch.
_TRL_BEST = {"activation_checkpointing": False, "train_sampling_strategy": "group_by_length"}
# Rows of `speed` with our trainer, and the settings of the recipe that they change.
_OURS: dict[str, dict[str, Any]] = {
    "ours": {},
    "ours-text-alone": {"model.use_graph": False},
    "ours-interleaved": _INTERLEAVED,
    "ours-compiled": {"train.torch_compile": True},
    "ours-interleaved-compiled": {**_INTERLEAVED, "train.torch_compile": True},
}
_WAYS = ("trl-defaults", _BEST, f"{_BEST}{_COMPILED}", *_OURS)


@dataclass(frozen=True)
class TrainingOptions(Options):
    """Options of `training_step` and `speed`."""

    model: str = setting(MODEL, "language model: hub id, folder or pypi:package")
    steps: int = setting(4, "optimiser steps per pass", at_least=1)
    batch_size: int = setting(4, "records per step", at_least=1)


@dataclass(frozen=True)
class SpeedOptions(TrainingOptions):
    """Options of `speed`."""

    data: str | None = setting(None, "folder of RAS records (default: records of a fictional world)")
    ways: list[str] = setting(list(_WAYS), "rows of the table; compiled rows need a C++ compiler", choices=_WAYS)


def training_step(options: TrainingOptions) -> Result:
    """Measure how label-only logits, batches by length and shared sequences change a training step of the Graph-LLM.

    "Separate records" is the CPU recipe with one sequence per record, on records of a fictional world; each other row
    changes one setting. Tokens are the computed tokens, padding included.
    """
    quiet()
    variants: dict[str, dict[str, Any]] = {
        "separate records": {},
        "logits everywhere": {},
        "random batches": {"train.group_by_length": False},
        "interleaved": _INTERLEAVED,
        "sdpa attention": {"model.attention": "sdpa"},
        "attention in blocks": {"model.attention": "blocks"},
    }
    if _native_bf16():
        variants["float32"] = {"model.dtype": "float32", "train.bf16": "false"}
    count = options.steps * options.batch_size
    with tempfile.TemporaryDirectory() as scratch:
        settings = _settings(options, scratch) | {"model.attention": "eager"}
        tasks: list[Any] = []
        ways: list[Way] = []
        for name, changed in variants.items():
            task = _open_task({**settings, **changed})
            trainer = engine_of(task)
            if name == "logits everywhere":
                trainer.data_collator = _with_full_logits(task.collator())
            tasks.append(task)
            ways.append(_trainer_way(name, trainer))
        take_turns(ways, options.repeats)
        rows = []
        for way, task in zip(ways, tasks):
            rows.append(way.row("records", records=count, tokens=_computed_tokens(task)))
    for row in rows:
        row["time_against_first"] = row["seconds"] / rows[0]["seconds"]
    return Result(
        f"training steps of {options.batch_size} records, median of {options.repeats} pass(es)",
        "name records_per_second time_against_first tokens seconds peak_bytes peak_above_rest_bytes",
        rows,
        ["all but float32 in bfloat16" if _native_bf16() else "all in float32: this CPU has no native bfloat16"],
    )


def _with_full_logits(collate: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    """A collator whose batches make the model compute the logits of all tokens."""
    return lambda rows: {**collate(rows), "full_logits": True}


def speed(options: SpeedOptions) -> Result:
    """Compare our training step with TRL's `SFTTrainer` (without graph) on the same records, model, LoRA and optimiser.

    Every row counts the tokens of prompts and labels in the paper's order.
    """
    quiet()
    count = options.steps * options.batch_size
    with tempfile.TemporaryDirectory() as scratch:
        settings = _settings(options, scratch, options.data) | {"model.attention": "blocks"}
        text_task = _open_task({**settings, "model.use_graph": False})
        tokens = sum(text_task.train["length"])
        ways = [_speed_way(name, settings, text_task) for name in options.ways]
        take_turns(ways, options.repeats)
    rows = [way.row("records", "tokens", records=count, tokens=tokens) for way in ways]
    best = min((way.median for way in ways if way.name.startswith(_BEST)), default=None)
    for way, row in zip(ways, rows):
        row["times_trl_best"] = None if best is None else best / way.median
    return Result(
        f"{count} records of {tokens / count:.0f} tokens, {options.batch_size} per step, median of {options.repeats}",
        "name records_per_second tokens_per_second times_trl_best peak_above_rest_bytes",
        rows,
    )


def _native_bf16() -> bool:
    import torch

    return best_dtype() is torch.bfloat16


def _settings(options: TrainingOptions, scratch: str, data: str | None = None) -> dict[str, Any]:
    """Settings for one epoch of full steps in the paper's order, without evaluations and checkpoints.

    Args:
        scratch: Folder for the run, and for the records if there is no `data`.
    """
    count = options.steps * options.batch_size
    # A question gives about four records; these are a third more, so that there are enough.
    questions = max(8, count // 3)
    return {
        "output_dir": f"{scratch}/run",
        "seed": options.seed,
        "data.train": data or _records(options.seed, questions, scratch),
        "data.max_train_records": count,
        "data.prompt_order": "instruction_first",
        "model.base": options.model,
        "model.encoder": ENCODER,
        "model.lora_dropout": 0.0,
        "train.epochs": 1,
        "train.batch_size": options.batch_size,
        "train.gradient_accumulation": 1,
        "train.records_per_step": None,
        "train.eval_steps": None,
        "train.save_steps": 10**9,
        "train.logging_steps": 1000,
        "train.torch_compile": False,
    }


def _open_task(overrides: Mapping[str, Any]) -> Any:
    """The task of the CPU recipe, with model and rows loaded."""
    kind = load_from("tripletune.train.tasks", "ras", "training task").TASK
    task = kind(load_config(kind.Config, _RECIPE, overrides))
    task.begin()
    task.validation = None
    return task


def _trainer_way(name: str, trainer: Any) -> Way:
    """A pass of a trainer, timed from the first batch to the end of the last step."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        begun = seconds = 0.0

        def on_epoch_begin(self, *args: Any, **kwargs: Any) -> None:
            self.begun = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.seconds = time.perf_counter() - self.begun

    clock = Clock()
    trainer.add_callback(clock)

    def train() -> float:
        trainer.train()
        return clock.seconds

    return Way(name, train)


def _computed_tokens(task: Any) -> int:
    """The number of tokens that a pass computes, padding included."""
    size = task.config.train.batch_size
    collate = task.collator()
    order = list(task.sampler(task.train, size))
    tokens = 0
    for start in range(0, len(order), size):
        batch = [task.train[number] for number in order[start : start + size]]
        tokens += collate(batch)["input_ids"].numel()
    return tokens


def _records(seed: int, questions: int, scratch: str) -> str:
    """Write the records of a fictional world, and return their folder."""
    write_world(WorldOptions(seed, questions, 0, 0), f"{scratch}/world")
    world, folder = f"{scratch}/world/train", f"{scratch}/records"
    build([Source.parse(f"hotpotqa:{world}.jsonl:{world}.teacher.jsonl")], BuildOptions(folder, split_name="train"))
    return folder


def _speed_way(name: str, settings: Mapping[str, Any], text_task: Any) -> Way:
    """A row of `speed`; TRL's rows read the tokens of `text_task`, our task without a graph."""
    if name in _OURS:
        task = _open_task({**settings, **_OURS[name]})
        return _trainer_way(name, engine_of(task))
    rows = []
    for row in text_task.train:
        rows.append({"input_ids": row["input_ids"], "labels": row["labels"]})
    if not name.startswith(_BEST):
        return _trainer_way(name, _trl_trainer(rows, text_task.config, "float32"))
    dtype = "bfloat16" if _native_bf16() else "float32"
    compiled = name.endswith(_COMPILED)
    trainer = _trl_trainer(rows, text_task.config, dtype, torch_compile=compiled, **_TRL_BEST)
    return _trainer_way(name, trainer)


def _trl_trainer(rows: list[dict[str, Any]], config: Any, dtype: str, **settings: Any) -> Any:
    """TRL's `SFTTrainer` with a run's model, LoRA, batch size and learning rate; other settings are TRL's."""
    import torch
    from datasets import Dataset
    from transformers import PrinterCallback
    from trl import SFTConfig, SFTTrainer

    class Quiet(SFTTrainer):
        def _send_telemetry(self) -> None:
            return

    torch.manual_seed(config.seed)
    chosen = config.model
    model, tokenizer = load_causal_lm(chosen.base, getattr(torch, dtype))
    adapted = add_lora(model, base=chosen.base, **chosen.lora() | {"dropout": 0.0})
    arguments = SFTConfig(
        output_dir=f"{config.output_dir}/trl",
        per_device_train_batch_size=config.train.batch_size,
        num_train_epochs=1,
        learning_rate=config.train.learning_rate,
        max_length=None,
        seed=config.seed,
        use_cpu=True,
        dataloader_pin_memory=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **settings,
    )
    trainer = Quiet(adapted, arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    trainer.remove_callback(PrinterCallback)
    return trainer
