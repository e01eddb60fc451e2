"""A training step of the Graph-LLM beside TRL's, on the same records with the same model, LoRA and optimiser.

Runs on the CPU. TRL's side is its `SFTTrainer` without the graph, which it does not know.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks import ENCODER, Result, Way, quiet, take_turns
from benchmarks.training import (
    INTERLEAVED,
    TrainingOptions,
    native_bf16,
    one_pass,
    open_task,
    records,
    trainer_way,
)
from tripletune.models.loading import load_causal_lm
from tripletune.models.lora import add_lora
from tripletune.models.options import setting
from tripletune.train import engine_of

_COMPILED = "-compiled"
_BEST = "trl-best"
# Beside TRL's defaults: no activation checkpointing, and records of similar length in a batch.
_TRL_BEST = {"activation_checkpointing": False, "train_sampling_strategy": "group_by_length"}
_PAPER = {
    "data.prompt_order": "instruction_first", "train.torch_compile": False,
    "model.attention": "blocks",
}  # fmt: skip
_OURS: dict[str, dict[str, Any]] = {
    "ours": {},
    "ours-text-alone": {"model.use_graph": False},
    "ours-interleaved": INTERLEAVED,
    "ours-compiled": {"train.torch_compile": True},
    "ours-interleaved-compiled": {**INTERLEAVED, "train.torch_compile": True},
}
_WAYS = ("trl-defaults", _BEST, f"{_BEST}{_COMPILED}", *_OURS)


@dataclass(frozen=True)
class SpeedOptions(TrainingOptions):
    """Options of `speed`."""

    data: str | None = setting(None, "folder of RAS records (without: those of a fictional world)")
    ways: list[str] = setting(list(_WAYS), "rows of the table; compiled ones need a C++ compiler", choices=_WAYS)


def speed(options: SpeedOptions) -> Result:
    """A training step of ours beside TRL's `SFTTrainer`.

    Tokens are those of prompts and labels in the paper's order, for all rows alike. FLOPs are those of the matrix
    products that a pass makes, against what this machine makes of one large product.
    """
    quiet()
    with tempfile.TemporaryDirectory() as scratch:
        count = options.steps * options.batch_size
        same = one_pass(scratch, options.seed, options.batch_size) | _PAPER | {
            "model.base": options.model, "model.encoder": ENCODER, "data.max_train_records": count,
            "data.train": options.data or records(options.seed, max(8, count // 3), scratch),
        }  # fmt: skip
        text = open_task({**same, "model.use_graph": False})
        tokens, ways = sum(text.train["length"]), []
        counted: dict[str, int] = {}
        for name in options.ways:
            way = _way(name, same, text)
            if not name.endswith(_COMPILED):
                way.warm_up = _counting(way.work, name, counted)
            ways.append(way)
        take_turns(ways, options.repeats)
    peak = _peak("bfloat16" if native_bf16() else "float32")
    rows = []
    for way in ways:
        row = way.row("records", "tokens", records=count, tokens=tokens)
        row["flops_per_second"] = counted.get(way.name.removesuffix(_COMPILED), 0) / row["seconds"] or None
        row["of_peak_share"] = row["flops_per_second"] and row["flops_per_second"] / peak
        rows.append(row)
    best = min((row["seconds"] for row in rows if row["name"].startswith(_BEST)), default=None)
    for row in rows:
        row["times_trl_best"] = best and best / row["seconds"]
    return Result(
        f"{count} records of {tokens / count:.0f} tokens, {options.batch_size} a step, median of {options.repeats}",
        "name records_per_second tokens_per_second times_trl_best of_peak_share peak_above_rest_bytes",
        rows,
        [f"a large matrix product makes {peak / 1e9:.0f} GFLOP/s here"],
    )


def _way(name: str, same: Mapping[str, Any], text: Any) -> Way:
    """One row: a pass of it and the way to it."""
    if name in _OURS:
        task = open_task({**same, **_OURS[name]})
        return trainer_way(name, engine_of(task))
    rows = [{name: row[name] for name in ("input_ids", "labels")} for row in text.train]
    if not name.startswith(_BEST):
        return trainer_way(name, _trl_trainer(rows, text.config, "float32"))
    dtype, compiled = "bfloat16" if native_bf16() else "float32", name.endswith(_COMPILED)
    return trainer_way(name, _trl_trainer(rows, text.config, dtype, torch_compile=compiled, **_TRL_BEST))


def _trl_trainer(rows: list[dict[str, Any]], config: Any, dtype: str, **settings: Any) -> Any:
    """TRL's `SFTTrainer` with a run's model, LoRA, batch and learning rate; else TRL's defaults, or `settings`."""
    import torch
    from datasets import Dataset
    from transformers.trainer_callback import PrinterCallback
    from trl import SFTConfig, SFTTrainer

    class Quiet(SFTTrainer):
        def _send_telemetry(self) -> None:
            return

    torch.manual_seed(config.seed)
    chosen = config.model
    model, tokenizer = load_causal_lm(chosen.base, getattr(torch, dtype))
    adapted = add_lora(model, rank=chosen.lora_rank, alpha=chosen.lora_alpha, dropout=0.0,
                       targets=chosen.lora_targets, base=chosen.base)  # fmt: skip
    arguments = SFTConfig(
        output_dir=f"{config.output_dir}/trl", per_device_train_batch_size=config.train.batch_size, num_train_epochs=1,
        use_cpu=True, save_strategy="no", report_to="none", disable_tqdm=True, seed=config.seed,
        dataloader_pin_memory=False, learning_rate=config.train.learning_rate, max_length=None, **settings,
    )  # fmt: skip
    trainer = Quiet(adapted, arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    trainer.remove_callback(PrinterCallback)
    return trainer


def _counting(work: Callable[[], object], name: str, counted: dict[str, int]) -> Callable[[], None]:
    """A pass in which the FLOPs of all matrix products are counted."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from tripletune.models.attention import attention_blocks

    def attention(products: int, query: Any, key: Any, value: Any, mask: Any, *_: Any, **__: Any) -> int:
        pairs = sum(kept.stop - kept.start for *_, kept in attention_blocks(query, key, mask, 1.0))
        return 2 * products * pairs * query.shape[-1]

    forward, backward = partial(attention, 2), partial(attention, 4)
    forward._get_raw = backward._get_raw = True  # type: ignore[attr-defined]
    ours = {torch.ops.tripletune.attend_in_blocks: forward, torch.ops.tripletune.attend_in_blocks_backward: backward}

    def warm_up() -> None:
        with FlopCounterMode(display=False, custom_mapping=ours) as counter:
            work()
        counted[name] = counter.get_total_flops()

    return warm_up


def _peak(dtype: str, size: int = 4096) -> float:
    """FLOP/s of the fastest of five products of two large matrices."""
    import torch

    one, other = torch.randn(2, size, size, dtype=getattr(torch, dtype))
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        one @ other
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)
