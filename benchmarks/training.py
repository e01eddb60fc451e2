"""What training costs: passes of real trainers over the same rows, side by side. Runs on the CPU.

Every way is a trainer of its own, and a pass is a call of its `train`, from the first batch to the end of the last
step, without set-up and checkpoints.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import ENCODER, MODEL, Options, Result, Way, batches, quiet, take_turns, tripletune
from tripletune.data_builders.world.build import WorldOptions, write_world
from tripletune.models.loading import best_dtype, resolve
from tripletune.models.options import load_config, setting
from tripletune.models.program import load_from

CONFIGS = Path(__file__).resolve().parents[1] / "recipes" / "configs"
RAS = CONFIGS / "smollm2_135m_ras_cpu.yaml"
_COLUMNS = (
    "name tokens_per_second time_against_first rows tokens padding_share seconds peak_bytes peak_above_rest_bytes"
)


@dataclass(frozen=True)
class TrainingOptions(Options):
    """What `training_step` and `speed` can be told."""

    model: str = setting(MODEL, "language model: hub id, folder or pypi:package")
    steps: int = setting(4, "optimiser steps of a pass", at_least=1)
    batch_size: int = setting(4, "records of a step", at_least=1)


@dataclass(frozen=True)
class StepOptions(TrainingOptions):
    """Options of `training_step`."""

    compile: bool = setting(False, "also measure compiled layers (needs a C++ compiler)")


@dataclass(frozen=True)
class LayoutOptions(Options):
    """Options of `distill_layout`."""

    model: str = setting(MODEL, "student: hub id, folder or pypi:package")
    data: str | None = setting(None, "folder or file of trajectories (without: those of a perfect teacher on a world)")
    trajectories: int = setting(24, "trajectories of a pass", at_least=1)
    batch_size: int = setting(2, "rows of a step", at_least=1)


def training_step(options: StepOptions) -> Result:
    """A training step of the Graph-LLM: what label-only logits, batches by length and shared prefixes are worth.

    "Separate records" is the CPU recipe without shared prefixes, on records of a fictional world; each other row
    changes one thing, shared prefixes and "interleaved" the order of the prompts too. Tokens are those computed,
    padding not counted; shared ones count once.
    """
    quiet()
    shared = {"train.shared_prefixes": True, "data.prompt_order": "history_first"}
    variants: dict[str, dict[str, Any]] = {
        "separate records": {},
        "logits everywhere": {},
        "random batches": {"train.group_by_length": False},
        "shared prefixes": shared,
        "interleaved": {**shared, "data.prompt_order": "interleaved"},
        "sdpa attention": {"model.attention": "sdpa"},
        "attention in blocks": {"model.attention": "blocks"},
    }
    if native_bf16():
        variants["float32"] = {"model.dtype": "float32", "train.bf16": "false"}
    if options.compile:
        variants["compiled layers"] = {"train.torch_compile": True}
        variants["compiled, shared prefixes"] = {**shared, "train.torch_compile": True}
    with tempfile.TemporaryDirectory() as scratch:
        count = options.steps * options.batch_size
        # A question gives about four records; a third more, so that there are enough.
        same = one_pass(scratch, options.seed, options.batch_size) | {
            "model.base": options.model, "model.encoder": ENCODER, "model.attention": "eager",
            "data.train": records(options.seed, max(8, count // 3), scratch), "data.max_train_records": count,
            "data.prompt_order": "instruction_first", "train.shared_prefixes": False, "train.torch_compile": False,
        }  # fmt: skip
        tasks = {name: open_task("ras", RAS, {**same, **changed}) for name, changed in variants.items()}
        rows = _measured(tasks, options.repeats, full_logits="logits everywhere")
    return Result(
        f"training steps of {options.batch_size} records, median of {options.repeats} pass(es)",
        _COLUMNS,
        rows,
        ["bfloat16 unless it says so" if native_bf16() else "all in float32: this CPU has no native bfloat16"],
    )


def distill_layout(options: LayoutOptions) -> Result:
    """All rounds of a CIRAG trajectory in one sequence against a sequence for each round.

    Both layouts learn the same tokens of the same trajectories with the same model.
    """
    quiet()
    with tempfile.TemporaryDirectory() as scratch:
        same = one_pass(scratch, options.seed, options.batch_size) | {
            "model.base": options.model, "data.max_train_records": options.trajectories,
            "data.train": [options.data or _trajectories(options, scratch)],
        }  # fmt: skip
        config = CONFIGS / "smollm2_135m_cirag_cpu.yaml"
        layouts = ("together", "separate")
        tasks = {rounds: open_task("cirag_distill", config, {**same, "data.rounds": rounds}) for rounds in layouts}
        rows = _measured(tasks, options.repeats)
        rounds = Counter(sum(one.learned) for one in tasks["together"].sources[0])
    fewer, faster = rows[1]["tokens"] / rows[0]["tokens"], rows[1]["seconds"] / rows[0]["seconds"]
    return Result(
        f"{sum(rounds.values())} trajectories: "
        + ", ".join(f"{count} of {number} round(s)" for number, count in sorted(rounds.items())),
        _COLUMNS,
        rows,
        [f"together takes {fewer:.2f} times fewer tokens and is {faster:.2f} times as fast"],
        {"tokens_ratio": fewer, "speed_ratio": faster},
    )


# Tasks and trainers ---------------------------------------------------------------------------------------------------


def native_bf16() -> bool:
    """Whether this processor multiplies bfloat16 natively."""
    import torch

    return best_dtype() is torch.bfloat16


def one_pass(scratch: str, seed: int, batch_size: int) -> dict[str, Any]:
    """Settings of one epoch of whole steps, without evaluations and checkpoints."""
    return {
        "output_dir": f"{scratch}/run", "seed": seed, "train.epochs": 1, "train.batch_size": batch_size,
        "train.gradient_accumulation": 1, "train.records_per_step": None, "train.eval_steps": None,
        "train.save_steps": 10**9, "train.logging_steps": 1000, "model.lora_dropout": 0.0,
    }  # fmt: skip


def open_task(name: str, config: str | Path, overrides: Mapping[str, Any]) -> Any:
    """A training task with its model loaded and its rows made."""
    kind = load_from("tripletune.train.tasks", name, "training task").TASK
    task = kind(load_config(kind.Config, config, overrides))
    task.begin()
    task.validation = None
    return task


def trainer_way(name: str, trainer: Any) -> Way:
    """A pass of a trainer of transformers or TRL, warmed up by one step."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        begun = seconds = 0.0
        limit = 0

        def on_epoch_begin(self, *args: Any, **kwargs: Any) -> None:
            self.begun = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.seconds = time.perf_counter() - self.begun
            control.should_training_stop |= bool(self.limit) and state.global_step >= self.limit

    clock = Clock()
    trainer.add_callback(clock)

    def train() -> float:
        trainer.train()
        return clock.seconds

    def warm_up() -> None:
        clock.limit = 1
        trainer.train()
        clock.limit = 0

    return Way(name, train, warm_up)


def _measured(tasks: Mapping[str, Any], repeats: int, full_logits: str = "") -> list[dict[str, Any]]:
    """Rows of the table: tokens that are computed, and padding, of one pass; one task computes logits everywhere."""
    from tripletune.models.losses import PADDING

    trainers = {name: task.trainer() for name, task in tasks.items()}
    if full_logits:
        collate = trainers[full_logits].data_collator
        trainers[full_logits].data_collator = lambda rows: {**collate(rows), "full_logits": True}
    ways = [trainer_way(name, trainer) for name, trainer in trainers.items()]
    take_turns(ways, repeats)
    found: list[dict[str, Any]] = []
    for way, task in zip(ways, tasks.values(), strict=True):
        size, collator = task.config.train.batch_size, task.collator()
        cells = tokens = 0
        for numbers in batches(task.sampler(task.train, size, size), size):
            picked = [task.train[number] for number in numbers]
            batch = collator(picked)
            cells += batch["input_ids"].numel()
            shared = "record_of" in batch
            tokens += int((batch["record_of"] != PADDING).sum()) if shared else sum(row["length"] for row in picked)
        found.append(way.row("rows", "tokens", rows=len(task.train), tokens=tokens, padding_share=1 - tokens / cells))
        found[-1]["time_against_first"] = found[-1]["seconds"] / found[0]["seconds"]
    return found


# Data -----------------------------------------------------------------------------------------------------------------


def records(seed: int, questions: int, scratch: str) -> str:
    """Folder of the records of a fictional world, made by the usual command."""
    write_world(WorldOptions(seed, questions, 0, 0), f"{scratch}/world")
    world = f"{scratch}/world/train"
    tripletune("build", "subq", "--source", f"hotpotqa:{world}.jsonl:{world}.teacher.jsonl", "--split-name", "train",
               "--output", f"{scratch}/records")  # fmt: skip
    return f"{scratch}/records"


def _trajectories(options: LayoutOptions, scratch: str) -> str:
    """A perfect teacher's trajectories on questions of two, three and four hops, by the usual commands."""
    resolve(ENCODER)
    world = WorldOptions(
        options.seed, options.trajectories, 0, 0, common_knowledge=0,
        one_hop=0, two_hop=1, three_hop=1, four_hop=1, comparison=0, intersection=0,
    )  # fmt: skip
    write_world(world, f"{scratch}/world")
    train = f"{scratch}/world/train"
    tripletune(
        "eval", "run", "--system", "cirag", "--task", "hotpotqa", "--data", f"{train}.jsonl", "--corpus",
        f"{train}.corpus.jsonl", "--oracle", train, "--encoder", ENCODER, "--set", "candidates=10", "--top-k", 3,
        "--output", f"{scratch}/teacher",
    )  # fmt: skip
    tripletune("build", "trajectories", "--results", f"{scratch}/teacher", "--output", f"{scratch}/trajectories")
    return f"{scratch}/trajectories"
