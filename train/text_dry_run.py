"""`--dry-run` of the runs on plain text: what a run would do, and its first row with the learned tokens marked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import groupby
from typing import Any

from tripletune.train.config import to_yaml
from tripletune.train.same_run import process_count
from tripletune.train.text_config import TextRunConfig
from tripletune.train.text_rows import IGNORED, rows_meta


def text_report(config: TextRunConfig, model: Any, tokenizer: Any, train: Any, validation: Any = None) -> str:
    """The dry run's text.

    Args:
        config: The run.
        model: The model as it would be trained.
        tokenizer: Its tokenizer.
        train: Training rows of `train.text_rows.cached_rows`, or packs of them.
        validation: Likewise, or None.
    """
    first = train[0]
    parts = {
        "resolved configuration": to_yaml(config),
        "rows": "\n".join([_counts("train", train), _counts("validation", validation)]),
        "steps": _steps(config, train),
        "memory (estimate)": memory_estimate(config, model, train),
        "first row, learned tokens between ⟦ and ⟧": marked_text(first, tokenizer),
    }
    return "\n".join(line for head, text in parts.items() for line in (head, _indent(text)))


def memory_estimate(config: TextRunConfig, model: Any, train: Any) -> str:
    """Weights, gradients and optimiser states exactly; activations roughly, for the longest row."""
    frozen = sum(p.numel() * p.element_size() for p in model.parameters() if not p.requires_grad)
    weights = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    # A gradient and two moments of AdamW, each of the weight's type.
    states = 3 * weights
    longest = longest_row(config, train)
    text = model.config.get_text_config()
    # About 34 numbers of the hidden width are kept per token and layer (Korthikanti et al., 2022, eq. 2, without the
    # attention matrix, which fused attention does not store), or one with checkpointing.
    kept = 1 if config.train.gradient_checkpointing else 17
    tokens = config.train.batch_size * longest
    activations = tokens * text.hidden_size * text.num_hidden_layers * kept * 4
    return "\n".join(
        [
            f"frozen weights        {_gb(frozen)}",
            f"trained weights       {_gb(weights)} ({trained:,} parameters)",
            f"gradients + AdamW     {_gb(states)}",
            f"activations           {_gb(activations)} for {config.train.batch_size} x {longest} tokens, roughly",
            f"total                 {_gb(frozen + weights + states + activations)} a device",
        ]
    )


def longest_row(config: TextRunConfig, train: Any) -> int:
    """Tokens of the longest row; of a full pack where rows are packed."""
    if "seq_lengths" in train.column_names:
        return config.train.pack_tokens
    return int(train.with_format("numpy")["length"][:].max())


def marked_text(row: Mapping[str, Any], tokenizer: Any) -> str:
    """A row as text, what is learned between ⟦ and ⟧; of a pack its first sample."""
    ids, labels = list(row["input_ids"]), list(row["labels"])
    if len(ids) != len(labels):
        target = [token for token in labels if token != IGNORED]
        return f"{tokenizer.decode(ids)}\n⟦{tokenizer.decode(target)}⟧"
    if row.get("seq_lengths"):
        ids, labels = ids[: row["seq_lengths"][0]], labels[: row["seq_lengths"][0]]
    pieces = []
    # Whole stretches are decoded, because a character may be several tokens.
    for learned, stretch in groupby(zip(ids, labels), key=lambda pair: pair[1] != IGNORED):
        text = str(tokenizer.decode([token for token, _ in stretch]))
        pieces.append(f"⟦{text}⟧" if learned else text)
    return "".join(pieces)


def _counts(name: str, rows: Any) -> str:
    if rows is None:
        return f"{name}: none"
    meta = rows_meta(rows)
    listed = ", ".join(f"{what.replace('_', ' ')} {count:,}" for what, count in meta.items())
    packs = f", in {len(rows):,} packs" if "seq_lengths" in rows.column_names else ""
    return f"{name}: {listed}{packs}"


def _steps(config: TextRunConfig, rows: Any) -> str:
    devices = process_count()
    per_step = config.train.batch_size * config.train.gradient_accumulation
    # Nothing is learned of prompts for on-policy distillation; those that do not fill a step are left out of an epoch.
    whole, rest = divmod(len(rows), per_step * devices)
    in_epoch = whole + (rest > 0 and rows_meta(rows)["label_tokens"] > 0)
    steps = config.train.max_steps or math.ceil(in_epoch * config.train.epochs)
    warmup = math.ceil(config.train.warmup_ratio * steps)
    what = "packs" if "seq_lengths" in rows.column_names else "rows"
    where = "a device" if devices == 1 else f"on each of {devices} devices"
    return f"{steps} optimiser steps of {per_step} {what} {where}, {warmup} of them warm-up"


def _gb(count: float) -> str:
    return f"{count / 1e9:8.3f} GB"


def _indent(text: str) -> str:
    return "\n".join("  " + line for line in text.rstrip().splitlines())
