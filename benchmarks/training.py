"""Measure training on the CPU: settings of our trainer, and what `benchmarks.speed` shares.

Each variant has its own trainer. A pass is a call of the trainer's `train`, timed from the first batch to the last
step, without set-up and checkpoints.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import ENCODER, MODEL, Options, Result, Way, hide_progress_of_libraries, take_turns
from tripletune.core.config import load_config
from tripletune.core.options import setting
from tripletune.core.plugins import load_from
from tripletune.data_builders.subq.build import build
from tripletune.data_builders.subq.options import BuildOptions, Source
from tripletune.data_builders.world.build import WorldOptions, write_world
from tripletune.models.specs import best_dtype
from tripletune.train import engine_of
from tripletune.train.tasks import TrainingTask

if TYPE_CHECKING:
    from transformers import Trainer

RECIPES = Path(__file__).resolve().parents[1] / "recipes/configs"
INTERLEAVED = {"data.prompt_order": "interleaved", "train.batch_size": 1}
# From the rows of a batch to its tensors by name.
Collator = Callable[[list[dict[str, Any]]], dict[str, Any]]


@dataclass(frozen=True)
class TrainingOptions(Options):
    """Options of `training_step` and `speed`."""

    model: str = setting(MODEL, "language model: hub id, folder or pypi:package")
    steps: int = setting(4, "optimiser steps per pass", at_least=1)
    batch_size: int = setting(4, "records per step", at_least=1)


def training_step(options: TrainingOptions) -> Result:
    """Measure how label-only logits, batches by length and shared sequences change a training step of the Graph-LLM.

    "Separate records" is the CPU recipe with one sequence per record, on records of a fictional world; each other row
    changes one setting. Tokens are the computed tokens, padding included.
    """
    hide_progress_of_libraries()
    variants: dict[str, dict[str, Any]] = {
        "separate records": {},
        "logits everywhere": {},
        "random batches": {"train.group_by_length": False},
        "interleaved": INTERLEAVED,
        "sdpa attention": {"model.attention": "sdpa"},
        "attention in blocks": {"model.attention": "blocks"},
    }
    if native_bf16():
        variants["float32"] = {"model.dtype": "float32", "train.bf16": "false"}
    count = options.steps * options.batch_size
    with tempfile.TemporaryDirectory() as scratch:
        settings = recipe_settings(options, scratch) | {"model.attention": "eager"}
        tasks: list[TrainingTask] = []
        ways: list[Way] = []
        for name, changed in variants.items():
            task = open_task({**settings, **changed})
            trainer = engine_of(task)
            if name == "logits everywhere":
                trainer.data_collator = _with_full_logits(task.collator())
            tasks.append(task)
            ways.append(trainer_way(name, trainer))
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
        ["all but float32 in bfloat16" if native_bf16() else "all in float32: this CPU has no native bfloat16"],
    )


def _with_full_logits(collate: Collator) -> Collator:
    """A collator whose batches make the model compute the logits of all tokens."""
    return lambda rows: {**collate(rows), "full_logits": True}


def native_bf16() -> bool:
    """Whether this processor computes in bfloat16; else it would be emulated, and slower than float32."""
    import torch

    return best_dtype() is torch.bfloat16


def recipe_settings(options: TrainingOptions, scratch: str, data: str | None = None) -> dict[str, Any]:
    """Settings for one epoch of records in the paper's order; see `pass_settings`.

    Args:
        scratch: Folder for the run, and for the records if there is no `data`.
    """
    # A question gives about four records; these are a third more, so that there are enough.
    questions = max(8, options.steps * options.batch_size // 3)
    return pass_settings(options, scratch) | {
        "data.train": data or _build_records(options.seed, questions, scratch),
        "data.prompt_order": "instruction_first",
        "model.encoder": ENCODER,
    }


def pass_settings(options: TrainingOptions, scratch: str) -> dict[str, Any]:
    """Settings of any task for one epoch of full steps, without evaluations and checkpoints."""
    return {
        "output_dir": f"{scratch}/run",
        "seed": options.seed,
        "data.max_train_records": options.steps * options.batch_size,
        "model.base": options.model,
        "model.lora_dropout": 0.0,
        "train.epochs": 1,
        "train.batch_size": options.batch_size,
        "train.gradient_accumulation": 1,
        "train.records_per_step": None,
        "train.eval_steps": None,
        "train.save_steps": 10**9,
        "train.logging_steps": 1,
        "train.torch_compile": False,
    }


def open_task(overrides: Mapping[str, Any], name: str = "ras", recipe: str = "smollm2_135m_ras_cpu") -> TrainingTask:
    """A task with the settings of a recipe, and with model and rows loaded."""
    kind = load_from("tripletune.train.tasks", name, "training task").TASK
    task = kind(load_config(kind.Config, RECIPES / f"{recipe}.yaml", overrides))
    task.begin()
    task.validation = None
    return task


def trainer_way(name: str, trainer: Trainer, losses: dict[str, list[float]] | None = None) -> Way:
    """A pass of a trainer, timed from the first batch to the end of the last step; a pass writes into `losses`."""
    from benchmarks import peers

    clock = peers.Clock()
    trainer.add_callback(clock)

    def train() -> float:
        """Train once, and return the seconds of the clock."""
        trainer.train()
        if losses is not None:
            losses[name] = clock.losses
        return clock.seconds

    return Way(name, train)


def _computed_tokens(task: TrainingTask) -> int:
    """The number of tokens that a pass computes, padding included."""
    size = task.config.train.batch_size
    collate = task.collator()
    order = list(task.sampler(task.train, size))
    tokens = 0
    for start in range(0, len(order), size):
        batch = [task.train[number] for number in order[start : start + size]]
        tokens += collate(batch)["input_ids"].numel()
    return tokens


def _build_records(seed: int, questions: int, scratch: str) -> str:
    """Write the records of a fictional world, and return their folder."""
    write_world(WorldOptions(seed, questions, 0, 0), f"{scratch}/world")
    world, folder = f"{scratch}/world/train", f"{scratch}/records"
    build([Source.parse(f"hotpotqa:{world}.jsonl:{world}.teacher.jsonl")], BuildOptions(folder, split_name="train"))
    return folder
