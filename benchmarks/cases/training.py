"""What training costs: passes of real trainers over the same rows, side by side. Runs on the CPU.

Every way is a trainer of its own, and a pass is a call of its `train`, from the first batch to the end of the last
step, without set-up and checkpoints.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from benchmarks.harness import (
    ENCODER,
    MODEL,
    Options,
    Result,
    Way,
    batches,
    quiet,
    take_turns,
)
from tripletune.data_builders.world.build import WorldOptions, write_world
from tripletune.models.loading import best_dtype, resolve
from tripletune.models.options import load_config, setting
from tripletune.models.program import load_from

_CONFIGS = Path(__file__).resolve().parents[2] / "recipes" / "configs"
_TABLE = {
    "variant": ("name", "{}"),
    "tokens/s": ("tokens_per_second", "{:.0f}"),
    "time": ("time_against_first", "x {:.2f}"),
    "rows": ("rows", "{}"),
    "tokens": ("tokens", "{}"),
    "padding": ("padding_share", "{:.0%}"),
    "seconds": ("seconds", "{:.2f}"),
    "peak GB": ("peak_bytes", "GB"),
    "above rest GB": ("peak_above_rest_bytes", "GB"),
}


@dataclass(frozen=True)
class StepOptions(Options):
    """Options of `training_step`."""

    model: str = setting(MODEL, "language model: hub id, folder or pypi:package")
    encoder: str = setting(ENCODER, "sentence encoder")
    steps: int = setting(4, "optimiser steps of a pass", at_least=1)
    batch_size: int = setting(4, "records of a step", at_least=1)
    compile: bool = setting(False, "also measure compiled layers (needs a C++ compiler)")


@dataclass(frozen=True)
class LayoutOptions(Options):
    """Options of `distill_layout`."""

    model: str = setting(MODEL, "student: hub id, folder or pypi:package")
    data: str | None = setting(None, "folder or file of trajectories (without: those of a perfect teacher on a world)")
    encoder: str = setting(ENCODER, "ranks triples where trajectories are made")
    trajectories: int = setting(24, "trajectories of a pass", at_least=1)
    candidates: int = setting(10, "candidates per round where they are made", at_least=1)
    top_k: int = setting(3, "passages per round where they are made", at_least=1)
    batch_size: int = setting(2, "rows of a step", at_least=1)


@dataclass(frozen=True)
class ExtractorOptions(Options):
    """Options of `extractor_training`."""

    model: str = setting(MODEL, "decoder: hub id, folder or pypi:package")
    data: str | None = setting(None, "text-to-triples pairs (without: those of a fictional world)")
    config: str = setting(str(_CONFIGS / "smollm2_135m_t2t_cpu.yaml"), "recipe of our side")
    pairs: int = setting(64, "pairs of a pass", at_least=1)
    max_tokens: int = setting(640, "longest pair, instruction included", at_least=32)
    batch_size: int = setting(8, "pairs in a batch of ours, as in TRL's", at_least=1)
    pack_tokens: int = setting(1024, "tokens of a pack", at_least=32)
    lora_rank: int = setting(16, "of the adapter on all linear layers", at_least=1)


def training_step(options: StepOptions) -> Result:
    """A training step of the Graph-LLM: what label-only logits, batches by length and shared prefixes are worth.

    "As trained" is the CPU recipe on records of a fictional world; each other row changes one thing, shared prefixes
    the order of the prompts too. Tokens are those computed, padding not counted; shared ones count once.
    """
    quiet()
    for spec in (options.model, options.encoder):  # a missing package is the likeliest trouble
        resolve(spec)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        records = options.steps * options.batch_size
        # A question gives about four records; a third more, so that there are enough.
        write_world(WorldOptions(options.seed, max(8, records // 3), 0, 0), scratch / "world")
        world = scratch / "world" / "train"
        _tripletune("build", "subq", "--source", f"hotpotqa:{world}.jsonl:{world}.teacher.jsonl", "--split-name",
                    "train", "--output", scratch / "records")  # fmt: skip
        same = _pass_settings(scratch, options.seed, options.batch_size) | {
            "model.base": options.model, "model.encoder": options.encoder, "model.attention": "eager",
            "data.train": str(scratch / "records"), "data.max_train_records": records,
            "data.prompt_order": "instruction_first", "train.shared_prefixes": False, "train.torch_compile": False,
        }  # fmt: skip
        shared = {"train.shared_prefixes": True, "data.prompt_order": "history_first"}
        variants: dict[str, dict[str, Any]] = {
            "as trained": {},
            "logits everywhere": {},
            "random batches": {"train.group_by_length": False},
            "shared prefixes": shared,
            "sdpa attention": {"model.attention": "sdpa"},
        }
        if _native_bf16():
            variants["float32"] = {"model.dtype": "float32", "train.bf16": "false"}
        if options.compile:
            variants["compiled layers"] = {"train.torch_compile": True}
            variants["compiled, shared prefixes"] = {**shared, "train.torch_compile": True}
        config = str(_CONFIGS / "smollm2_135m_ras_cpu.yaml")
        tasks = {name: _task("ras", config, {**same, **changed}) for name, changed in variants.items()}
        difference = _loss_difference(tasks["as trained"])
        ways = [_way(name, task.trainer(), full_logits=name == "logits everywhere") for name, task in tasks.items()]
        take_turns(ways, options.repeats)
        rows = _rows(ways, list(tasks.values()))
    return Result(
        f"training steps of {options.batch_size} records, median of {options.repeats} pass(es)",
        _TABLE,
        rows,
        [
            "all in float32: this CPU has no native bfloat16" if not _native_bf16() else "bfloat16 unless it says so",
            f"losses of label-only and full logits differ by {difference:.1e} (dropout off, float32)",
        ],
        {"loss_difference_label_only_against_full_logits": difference},
    )


def distill_layout(options: LayoutOptions) -> Result:
    """All rounds of a CIRAG trajectory in one sequence against a sequence for each round.

    Both layouts learn the same tokens of the same trajectories with the same model.
    """
    quiet()
    resolve(options.model)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        place = options.data or _trajectories(options, scratch)
        same = _pass_settings(scratch, options.seed, options.batch_size) | {
            "model.base": options.model, "data.train": [place], "data.max_train_records": options.trajectories,
        }  # fmt: skip
        config = str(_CONFIGS / "smollm2_135m_cirag_cpu.yaml")
        tasks = {
            rounds: _task("cirag_distill", config, {**same, "data.rounds": rounds})
            for rounds in ("together", "separate")
        }
        losses = _loss_of_one(tasks, next(iter(tasks["together"].sources[0])))
        ways = [_way(name, task.trainer()) for name, task in tasks.items()]
        take_turns(ways, options.repeats)
        rows = _rows(ways, list(tasks.values()))
        rounds = Counter(str(sum(one.learned)) for one in tasks["together"].sources[0])
    fewer, faster = rows[1]["tokens"] / rows[0]["tokens"], rows[1]["seconds"] / rows[0]["seconds"]
    return Result(
        f"{sum(rounds.values())} trajectories: "
        + ", ".join(f"{count} of {number} round(s)" for number, count in sorted(rounds.items())),
        _TABLE,
        rows,
        [
            f"together takes {fewer:.2f} times fewer tokens and is {faster:.2f} times as fast",
            f"summed loss of one trajectory in float32: {losses['together']:.4f} together, "
            f"{losses['separate']:.4f} separate",
        ],
        {"rounds": dict(rounds), "summed_loss_of_one_trajectory": losses, "tokens_ratio": fewer, "speed_ratio": faster},
    )


def extractor_training(options: ExtractorOptions) -> Result:
    """Training the extractor against TRL with its own defaults: the same pairs, the same LoRA, real trainers.

    TRL's side is `SFTTrainer` with what `SFTConfig` defaults to: batches of 8 in random order, activation
    checkpointing, no packing, the output layer at every position. Tokens are those of the texts, padding not counted.
    """
    from datasets import disable_progress_bars

    quiet()
    disable_progress_bars()
    resolve(options.model)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        pairs = _pairs(options, scratch)
        same = _pass_settings(scratch, options.seed, options.batch_size) | {
            "model.base": options.model, "model.lora_rank": options.lora_rank, "data.train": str(pairs),
            "model.lora_alpha": 2 * options.lora_rank, "model.lora_targets": ["all-linear"],
            "data.max_source_tokens": 10_000, "data.max_target_tokens": 10_000,
        }  # fmt: skip
        packed = {"train.packing": True, "train.pack_tokens": options.pack_tokens, "train.batch_size": 1}
        ours = {
            "ours, similar lengths": _task("text_to_triples", options.config, same),
            "ours, packed": _task("text_to_triples", options.config, {**same, **packed}),
        }
        kinds: list[Literal["float32", "bfloat16"]] = ["float32", *(["bfloat16"] if _native_bf16() else [])]
        titles = {"float32": "TRL's defaults", "bfloat16": "TRL's defaults, bfloat16 weights"}
        ways = [_way(titles[dtype], _trl_trainer(options, pairs, scratch, dtype)) for dtype in kinds]
        ways += [_way(name, task.trainer()) for name, task in ours.items()]
        take_turns(ways, options.repeats)
        first, *_ = ours.values()
        tokens = sum(first.train["length"])
        learned = sum(sum(label != -100 for label in labels) for labels in first.train["labels"])
    rows = [way.row(tokens_per_second=round(tokens / way.median, 2)) for way in ways]
    for row in rows:
        row["rate_against_first"] = round(row["tokens_per_second"] / rows[0]["tokens_per_second"], 3)
    return Result(
        f"one pass over {options.pairs} pairs, median of {options.repeats}",
        {
            "variant": ("name", "{}"),
            "tokens/s": ("tokens_per_second", "{:.0f}"),
            "rate": ("rate_against_first", "x {:.2f}"),
            "seconds": ("seconds", "{:.1f}"),
            "peak GB": ("peak_bytes", "GB"),
        },
        rows,
        [f"a pass has {tokens} tokens of text, {learned} of them learned; padding is not counted"],
        {"tokens_of_a_pass": tokens, "label_tokens_of_a_pass": learned},
    )


# Tasks and trainers ---------------------------------------------------------------------------------------------------


def _native_bf16() -> bool:
    import torch

    return best_dtype() is torch.bfloat16


def _tripletune(*words: object) -> None:
    """Run a program as anybody would; what it prints goes to standard error."""
    done = subprocess.run([sys.executable, "-m", "tripletune", *map(str, words)], stdout=sys.stderr, check=False)
    if done.returncode:
        raise ValueError(f"tripletune {words[0]} {words[1]} ended with exit code {done.returncode}; see above")


def _pass_settings(scratch: Path, seed: int, batch_size: int) -> dict[str, Any]:
    """One epoch of whole steps, without evaluations and checkpoints."""
    return {
        "output_dir": str(scratch / "run"), "seed": seed, "train.epochs": 1, "train.batch_size": batch_size,
        "train.gradient_accumulation": 1, "train.eval_steps": None, "train.save_steps": 10**9,
        "train.logging_steps": 1000, "model.lora_dropout": 0.0,
    }  # fmt: skip


def _task(name: str, config: str | Path, overrides: dict[str, Any]) -> Any:
    """A training task with its model loaded and its rows made."""
    from tripletune.train.run import make_rows

    kind = load_from("tripletune.train.tasks", name, "training task").TASK
    task = kind(load_config(kind.Config, config, overrides))
    task.model, task.processor = task.load()
    make_rows(task)
    task.validation = None
    return task


def _way(name: str, trainer: Any, full_logits: bool = False) -> Way:
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
    if full_logits:
        collate = trainer.data_collator
        trainer.data_collator = lambda rows: {**collate(rows), "full_logits": True}

    def train() -> float:
        trainer.train()
        return clock.seconds

    def warm_up() -> None:
        clock.limit = 1
        trainer.train()
        clock.limit = 0

    return Way(name, train, warm_up)


def _rows(ways: Sequence[Way], tasks: Sequence[Any]) -> list[dict[str, Any]]:
    """Rows of the table: tokens that are computed, and padding, of one pass."""
    from tripletune.models.training import PADDING

    found = []
    for way, task in zip(ways, tasks, strict=True):
        size = task.config.train.batch_size
        collate = task.collator()
        cells = tokens = 0
        for numbers in batches(task.sampler(task.train, size, size), size):
            picked = [task.train[number] for number in numbers]
            batch = collate(picked)
            cells += batch["input_ids"].numel()
            shared = "branches" in batch
            tokens += int((batch["branches"] != PADDING).sum()) if shared else sum(row["length"] for row in picked)
        row = way.row(rows=len(task.train), tokens=tokens, padding_share=round(1 - tokens / cells, 4))
        row["tokens_per_second"] = round(tokens / way.median, 2)
        row["samples_per_second"] = round(len(task.train) / way.median, 4)
        row["time_against_first"] = round(way.median / ways[0].median, 3)
        found.append(row)
    return found


def _loss_difference(task: Any) -> float:
    import torch

    model = copy.deepcopy(task.model).float().eval()
    size = min(len(task.train), task.config.train.batch_size)
    batch = task.collator()([task.train[number] for number in range(size)])
    with torch.no_grad():
        return abs(float(model(**batch).loss) - float(model(**batch, full_logits=True).loss))


def _loss_of_one(tasks: dict[str, Any], trajectory: Any) -> dict[str, float]:
    """Cross-entropy summed over the learned tokens of a trajectory in each layout, in float32."""
    import torch

    first, *_ = tasks.values()
    model = copy.deepcopy(first.model).float().eval()
    losses = {}
    for name, task in tasks.items():
        rows = list(task.encoder.rows([trajectory], Counter()))
        with torch.no_grad():
            losses[name] = sum(float(model(**task.collator()([row]), num_items_in_batch=1).loss) for row in rows)
    return losses


def _trl_trainer(options: ExtractorOptions, pairs: Path, scratch: Path, dtype: str) -> Any:
    import torch
    from datasets import Dataset
    from transformers.trainer_callback import PrinterCallback
    from trl import SFTConfig, SFTTrainer

    from tripletune.models.data.pairs import NO_FACTS, extraction_chat, load_instruction, read_pairs
    from tripletune.models.loading import add_lora, load_causal_lm

    class Quiet(SFTTrainer):
        def _send_telemetry(self) -> None:
            return

    chats = [
        {
            "prompt": extraction_chat(pair.source_text, load_instruction()),
            "completion": [{"role": "assistant", "content": pair.target or NO_FACTS}],
        }
        for pair in read_pairs(str(pairs), None)
    ]
    torch.manual_seed(options.seed)
    model, tokenizer = load_causal_lm(options.model, getattr(torch, dtype))
    adapted = add_lora(
        model, rank=options.lora_rank, alpha=2 * options.lora_rank, dropout=0.0, targets=("all-linear",),
        base=options.model,
    )  # fmt: skip
    # Everything else is what TRL defaults to; the batch is named, because it is the same on both sides.
    settings = SFTConfig(
        output_dir=str(scratch / dtype),
        per_device_train_batch_size=8,
        num_train_epochs=1,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=options.seed,
        dataloader_pin_memory=False,
    )
    trainer = Quiet(adapted, settings, train_dataset=Dataset.from_list(chats), processing_class=tokenizer)
    trainer.remove_callback(PrinterCallback)
    return trainer


# Data -----------------------------------------------------------------------------------------------------------------


def _trajectories(options: LayoutOptions, scratch: Path) -> str:
    """A perfect teacher's trajectories on questions of two, three and four hops, by the usual commands."""
    resolve(options.encoder)
    world = WorldOptions(
        options.seed, options.trajectories, 0, 0, common_knowledge=0,
        one_hop=0, two_hop=1, three_hop=1, four_hop=1, comparison=0, intersection=0,
    )  # fmt: skip
    write_world(world, scratch / "world")
    train = f"{scratch}/world/train"
    _tripletune(
        "eval", "run", "--system", "cirag", "--task", "hotpotqa", "--data", f"{train}.jsonl", "--corpus",
        f"{train}.corpus.jsonl", "--oracle", train, "--encoder", options.encoder, "--set",
        f"candidates={options.candidates}", "--top-k", options.top_k, "--output", scratch / "teacher",
    )  # fmt: skip
    _tripletune("build", "trajectories", "--results", scratch / "teacher", "--output", scratch / "trajectories")
    return str(scratch / "trajectories")


def _pairs(options: ExtractorOptions, scratch: Path) -> Path:
    """The pairs of a pass. Both sides get texts whole: what one of them would cut is left out."""
    from tripletune.models.data.pairs import NO_FACTS, ExtractionPair, load_instruction, read_pairs
    from tripletune.models.data.records import read_jsonl
    from tripletune.models.data.triples import triples_from_json
    from tripletune.models.loading import load_tokenizer

    def of_world() -> Iterator[ExtractionPair]:
        write_world(WorldOptions(options.seed, max(60, 2 * options.pairs), 0, 0), scratch / "world")
        for where, row in read_jsonl(scratch / "world" / "train.triples.jsonl"):
            triples = triples_from_json(row["triples"], where)
            yield ExtractionPair(row["title"], row["text"], row["title"], triples, "world")

    given = options.data
    source = read_pairs(given, "train" if Path(given).is_dir() else None) if given else of_world()
    tokenizer, instruction = load_tokenizer(options.model), load_instruction()

    def length(pair: ExtractionPair) -> int:
        return len(tokenizer(f"{instruction}\n{pair.source_text}\n{pair.target or NO_FACTS}")["input_ids"])

    short = (pair for pair in source if length(pair) <= options.max_tokens)
    found = list(islice(short, options.pairs))
    if len(found) < options.pairs:
        raise ValueError(f"there are only {len(found)} pairs of at most {options.max_tokens} tokens; lower --pairs")
    path = scratch / "pairs.jsonl"
    path.write_text("".join(json.dumps(pair.to_json()) + "\n" for pair in found), encoding="utf-8")
    return path
