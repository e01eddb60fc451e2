"""What `--dry-run` prints: the settings, the rows, the steps, estimates of memory and time, and the first row's labels.

Estimates before training, since a run that lacks memory otherwise fails only at its longest row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from tripletune.core.config import to_yaml
from tripletune.core.data.records import IGNORED
from tripletune.train.tasks import TrainingTask

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A threshold of ours: more passes than this are more likely a slip than a plan.
_MANY_PASSES = 20
# The GPU of the estimated hours: its operations per second, and in words.
_GPU_OPERATIONS = 1.25e14
_GPU = "125 TFLOP/s (an A100 at 40 % of its bf16 peak)"


def dry_run_report(task: TrainingTask) -> str:
    """Return the text that a dry run prints; model and rows must be loaded.

    It shows what goes wrong without an error: settings, dropped rows, sizes of steps, memory, and the loss mask.
    """
    from tripletune.train.resume import process_count

    sections = {
        "resolved configuration": to_yaml(task.config),
        task.unit: "\n".join(task.counts()),
        "steps": "\n".join([_steps_in_words(task), task.step_size(process_count()), *task.notes()]),
        "memory (estimate)": str(estimate_memory(task)),
        "computation (estimate)": estimate_computation(task),
    }
    for heading, (ids, labels) in task.examples().items():
        sections[f"{heading}, learned tokens between ⟦ and ⟧"] = _with_marked_labels(ids, labels, task.tokenizer)
    lines = []
    for heading, text in sections.items():
        lines.append(heading)
        lines += [f"  {line}" for line in text.split("\n") if line]
    return "\n".join(lines)


class MemoryEstimate(NamedTuple):
    """The memory of training in bytes per device, before sharding.

    Attributes:
        states: Gradients and the optimiser's moments.
        trained_numbers: The number of trained parameters.
        rows: The rows of the largest micro-batch, as text.
    """

    frozen: int
    trained: int
    states: int
    activations: int
    trained_numbers: int
    rows: str

    @property
    def total(self) -> int:
        """The sum of all bytes."""
        return self.frozen + self.trained + self.states + self.activations

    def __str__(self) -> str:
        """The estimate as a dry run shows it, one size per line."""
        return "\n".join(
            [
                f"frozen weights        {_as_gigabytes(self.frozen)}",
                f"trained weights       {_as_gigabytes(self.trained)} ({self.trained_numbers:,} parameters)",
                f"gradients, optimiser  {_as_gigabytes(self.states)}",
                f"activations           {_as_gigabytes(self.activations)} for {self.rows}, roughly",
                f"total                 {_as_gigabytes(self.total)} per device",
            ]
        )


def estimate_memory(task: TrainingTask) -> MemoryEstimate:
    """Return the sizes of weights, gradients and optimiser states, and estimate activations for the longest row.

    An estimate before training, because a run that lacks memory otherwise fails only at its longest row.
    """
    train = task.config.train
    frozen_bytes = trained_bytes = trained_numbers = 0
    for weight in task.model.parameters():
        size = weight.numel() * weight.element_size()
        if weight.requires_grad:
            trained_bytes += size
            trained_numbers += weight.numel()
        else:
            frozen_bytes += size
    # A gradient and two moments of AdamW, each of the weight's type or a byte.
    moment_bytes = trained_numbers if "8bit" in (train.optimizer or "") else trained_bytes
    longest = _tokens_of_longest_row(task)
    rows = f"{train.batch_size}"
    sequences = train.batch_size
    if task.learns_from_pairs:
        rows += " x 2 replies"
        sequences *= 2
    return MemoryEstimate(
        frozen_bytes,
        trained_bytes,
        trained_bytes + 2 * moment_bytes,
        sequences * longest * _activation_bytes_per_token(task),
        trained_numbers,
        f"{rows} x {longest} tokens",
    )


def estimate_computation(task: TrainingTask) -> str:
    """Estimate the tokens and operations of the whole training, and hours of a GPU that is named.

    A forward takes two operations per token and weight, the backward as many to reach the first layers, and two more
    per trained weight (Kaplan et al., 2020, section 2.1); checkpointing repeats the forward. Of a pair, both replies
    are read, and once more without the adapter, for the reference of DPO. Attention is left out.
    """
    from tripletune.train.resume import process_count

    weights = trained = 0
    for weight in task.model.parameters():
        weights += weight.numel()
        trained += weight.numel() if weight.requires_grad else 0
    passes = 6 if task.config.train.gradient_checkpointing else 4
    tokens = _planned_steps(task) * task.rows_per_step(process_count()) * _mean_tokens(task)
    if task.learns_from_pairs:
        tokens *= 2
        passes += 2
    operations = tokens * (passes * weights + 2 * trained)
    hours = operations / _GPU_OPERATIONS / 3600
    shown_hours = f"{hours:,.0f}" if hours >= 10 else f"{hours:.2g}"
    return (
        f"{tokens:.2g} tokens, {operations:.2g} operations: {shown_hours} hours of one GPU with {_GPU}; a few steps "
        "measure yours"
    )


def _mean_tokens(task: TrainingTask) -> float:
    """Mean tokens of the training rows; packs have no column of lengths, but are filled to `train.pack_tokens`."""
    if "seq_lengths" in task.train.column_names:
        return float(task.config.train.pack_tokens)
    return float(task.train.with_format("numpy")["length"][:].mean())


def _tokens_of_longest_row(task: TrainingTask) -> int:
    """Tokens of the longest training row; packs have no column of lengths, but are filled to `train.pack_tokens`."""
    from tripletune.train.rows.cache import longest_row

    if "seq_lengths" in task.train.column_names:
        return int(task.config.train.pack_tokens)
    return longest_row(task.train)


def _activation_bytes_per_token(task: TrainingTask) -> int:
    """Estimate the bytes that a forward keeps for the backward, per token.

    About 34 bytes of half precision per number of the hidden width are kept per token and layer (Korthikanti et al.,
    2022, eq. 2, without the attention matrix, which fused attention does not store), or two with checkpointing.
    """
    from tripletune.train.arguments import use_bf16

    train = task.config.train
    kept_numbers = 1 if train.gradient_checkpointing else 17
    computes_in_half = use_bf16(train.bf16) or next(task.model.parameters()).element_size() == 2
    bytes_per_number = 2 if computes_in_half else 4
    text_config = task.model.config.get_text_config()
    return int(text_config.hidden_size * text_config.num_hidden_layers * kept_numbers * bytes_per_number)


def _with_marked_labels(ids: Sequence[int], labels: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text of a row, with its labels between ⟦ and ⟧, by which a user sees what has a loss."""
    if len(ids) != len(labels):  # source and target of an encoder-decoder
        target = [token for token in labels if token != IGNORED]
        return f"{tokenizer.decode(ids)}\n⟦{tokenizer.decode(target)}⟧"
    text = ""
    # Whole stretches are decoded, because a character may be several tokens.
    for is_learned, stretch in groupby(zip(ids, labels, strict=True), key=lambda pair: pair[1] != IGNORED):
        decoded = tokenizer.decode([token for token, _ in stretch])
        text += f"⟦{decoded}⟧" if is_learned else decoded
    return text


def _steps_in_words(task: TrainingTask) -> str:
    """Describe the number of optimiser steps; it is rounded up as transformers rounds it.

    A dry run has no trainer, whose number this must equal: a schedule is planned with it.
    """
    from tripletune.train.resume import process_count

    train = task.config.train
    steps = _planned_steps(task)
    warmup = math.ceil(train.warmup_ratio * steps)
    if train.warmup_steps is not None:
        warmup = min(train.warmup_steps, steps)
    text = f"{steps} optimiser steps, "
    if warmup:
        text += f"{warmup} of them warm-up, the first at learning rate 0 (as transformers does it)"
    else:
        text += "none of them warm-up"
    if train.max_steps is not None:
        passes = steps / task.steps_per_epoch(task.rows_per_step(process_count()))
        text += f"; {passes:,.3g} passes over the data"
        if passes > _MANY_PASSES:
            text += ". Is train.max_steps meant? train.epochs sets the passes; measure the hours with a few steps"
    return text


def _planned_steps(task: TrainingTask) -> int:
    """The number of optimiser steps: `train.max_steps`, or what `train.epochs` make."""
    from tripletune.train.resume import process_count

    train = task.config.train
    if train.max_steps is not None:
        return int(train.max_steps)
    return math.ceil(task.steps_per_epoch(task.rows_per_step(process_count())) * train.epochs)


def _as_gigabytes(size: float) -> str:
    """A size in bytes as text, in units of 10^9 bytes, padded so that a column of sizes is aligned."""
    return f"{size / 1e9:8.3f} GB"
