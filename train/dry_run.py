"""What a run would do, said before the bill: `--dry-run` with one row and its loss mask, and whether trackers work."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from tripletune.models.data.records import IGNORED
from tripletune.models.options import to_yaml
from tripletune.train.batches import rows_meta
from tripletune.train.engine import use_bf16
from tripletune.train.resume import process_count
from tripletune.train.task import TrainingTask


def dry_run_report(task: TrainingTask) -> str:
    """The dry run's text.

    Args:
        task: The task, its model loaded and its rows made.
    """
    parts = {
        "resolved configuration": to_yaml(task.config),
        task.unit: "\n".join([_counts("train", task.train), _counts("validation", task.validation)]),
        "steps": "\n".join([_steps(task), *task.notes()]),
        "memory (estimate)": memory_estimate(task),
        "first row, learned tokens between ⟦ and ⟧": _masked_text(*task.example(), task.processor),
    }
    lines = (line for head, text in parts.items() for line in (head, *(f"  {row}" for row in text.split("\n") if row)))
    return "\n".join(lines)


def memory_estimate(task: TrainingTask) -> str:
    """Weights, gradients and optimiser states exactly; activations roughly, for the longest row."""
    train, parameters = task.config.train, list(task.model.parameters())
    frozen = sum(p.numel() * p.element_size() for p in parameters if not p.requires_grad)
    weights = sum(p.numel() * p.element_size() for p in parameters if p.requires_grad)
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    # A gradient and two moments of AdamW, each of the weight's type.
    states = 3 * weights
    packs = "seq_lengths" in task.train.column_names
    longest = train.pack_tokens if packs else int(task.train.with_format("numpy")["length"][:].max())
    text = task.model.config.get_text_config()
    # About 34 bytes of half precision per number of the hidden width are kept per token and layer (Korthikanti et al.,
    # 2022, eq. 2, without the attention matrix, which fused attention does not store), or two with checkpointing.
    kept = 1 if train.gradient_checkpointing else 17
    width = 2 if use_bf16(train.bf16) or parameters[0].element_size() == 2 else 4
    activations = train.batch_size * longest * text.hidden_size * text.num_hidden_layers * kept * width
    return "\n".join(
        [
            f"frozen weights        {_gb(frozen)}",
            f"trained weights       {_gb(weights)} ({trained:,} parameters)",
            f"gradients + AdamW     {_gb(states)}",
            f"activations           {_gb(activations)} for {train.batch_size} x {longest} tokens, roughly",
            f"total                 {_gb(frozen + weights + states + activations)} per device",
        ]
    )


def _masked_text(ids: Sequence[int], labels: Sequence[int], processor: Any) -> str:
    tokenizer = getattr(processor, "tokenizer", processor)
    if len(ids) != len(labels):  # source and target of an encoder-decoder
        return f"{tokenizer.decode(ids)}\n⟦{tokenizer.decode([token for token in labels if token != IGNORED])}⟧"
    pieces = []
    # Whole stretches are decoded, because a character may be several tokens.
    for learned, stretch in groupby(zip(ids, labels), key=lambda pair: pair[1] != IGNORED):
        text = str(tokenizer.decode([token for token, _ in stretch]))
        pieces.append(f"⟦{text}⟧" if learned else text)
    return "".join(pieces)


def _counts(name: str, rows: Any) -> str:
    if rows is None:
        return f"{name}: none"
    counts = rows_meta(rows).items()
    listed = ", ".join(f"{what.replace('_', ' ') if what.islower() else what} {count:,}" for what, count in counts)
    packs = f", in {len(rows):,} packs" if "seq_lengths" in rows.column_names else ""
    return f"{name}: {listed}{packs}"


def _steps(task: TrainingTask) -> str:
    train, devices = task.config.train, process_count()
    per_device = train.batch_size * train.gradient_accumulation
    steps = train.max_steps or math.ceil(task.steps_per_epoch(per_device * devices) * train.epochs)
    warmup = math.ceil(train.warmup_ratio * steps)
    what = "packs" if "seq_lengths" in task.train.column_names else task.unit
    where = "per device" if devices == 1 else f"on each of {devices} devices"
    return f"{steps} optimiser steps of {per_device} {what} {where}, {warmup} of them warm-up"


def _gb(count: float) -> str:
    return f"{count / 1e9:8.3f} GB"


def check_tracking(report_to: Sequence[str]) -> None:
    """Make sure that a run can report to its trackers, before a model is loaded.

    Args:
        report_to: Trackers by name: "wandb", "tensorboard", "none".

    Raises:
        ValueError: a package is missing, or W&B has no login.
    """
    if "tensorboard" in report_to and not (_installed("tensorboard") or _installed("tensorboardX")):
        raise ValueError(
            "report_to tensorboard: the package is not installed; pip install tensorboard, or leave it out"
        )
    if "wandb" not in report_to:
        return
    if not _installed("wandb"):
        raise ValueError("report_to wandb: the package is not installed; pip install wandb, or leave it out")
    if os.environ.get("WANDB_MODE", "online") in ("offline", "disabled", "dryrun"):
        return
    import wandb

    try:
        # Looks for a key; asks for one where there is a terminal.
        wandb.login()
    except wandb.errors.UsageError as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ValueError(
            f"report_to wandb: {reason}. To keep the run's records here instead set WANDB_MODE=offline; without W&B: "
            "--report_to none"
        ) from None


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
