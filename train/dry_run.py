"""`--dry-run`: what a run would do, and one decoded batch with its loss mask, so that mistakes show before the bill."""

from __future__ import annotations

import math
from collections import Counter
from itertools import groupby
from typing import Any

from tripletune.models.graph_llm.processor import GraphLLMProcessor
from tripletune.models.loading import parse_dtype
from tripletune.train.collate import IGNORED
from tripletune.train.config import RunConfig, to_yaml
from tripletune.train.dataset import RecordSource
from tripletune.train.run import RunData, make_collator, sources
from tripletune.train.same_run import process_count
from tripletune.train.sampling import QuestionSampler
from tripletune.train.shared_prefixes import share_prefixes


def report(config: RunConfig, model: Any, processor: GraphLLMProcessor, data: RunData) -> str:
    """The dry run's text.

    Args:
        config: The run.
        model: The adapted model.
        processor: Its processor.
        data: Tokenised data.
    """
    train, validation = sources(config)
    first = [data.train[0]]
    if config.train.shared_prefixes:
        rows = (data.train[number] for number in range(1, min(len(data.train), config.train.batch_size)))
        first += [row for row in rows if row["question"] == first[0]["question"]]
    batch = make_collator(config, processor, data.table)(first)
    return "\n".join(
        [
            "resolved configuration",
            _indent(to_yaml(config)),
            "records",
            _indent(_counts("train", train)),
            _indent(_counts("validation", validation) if validation else "validation: none"),
            "steps",
            _indent(_steps(config, len(data.train))),
            *([_indent(_shared_tokens(config, processor, data))] if config.train.shared_prefixes else []),
            "memory (estimate)",
            _indent(memory_estimate(config, model, data)),
            "first batch, learned tokens between ⟦ and ⟧",
            _indent(_masked_text(batch["input_ids"][0].tolist(), batch["labels"][0].tolist(), processor)),
        ]
    )


def memory_estimate(config: RunConfig, model: Any, data: RunData) -> str:
    """Weights, gradients and optimiser states exactly; activations roughly, for the longest record."""
    frozen = sum(p.numel() * p.element_size() for p in model.parameters() if not p.requires_grad)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    text = model.get_base_model().config.text_config
    longest = max(data.train.with_format("numpy")["length"][:])
    tokens = int(longest) * config.train.batch_size
    # About 34 numbers of the hidden width are kept per token and layer (Korthikanti et al., 2022, eq. 2, without
    # the attention matrix, which fused attention does not store), or one with checkpointing.
    kept = 1 if config.train.gradient_checkpointing else 17
    width = 2 if parse_dtype(config.model.dtype).itemsize == 2 else 4
    activations = tokens * text.hidden_size * text.num_hidden_layers * kept * width
    lines = [
        f"frozen weights        {_gb(frozen)}",
        f"trained weights       {_gb(trained * 4)} ({trained:,} parameters)",
        f"gradients + AdamW     {_gb(trained * 12)}",
        f"activations           {_gb(activations)} for {config.train.batch_size} x {longest} tokens, roughly",
        f"total                 {_gb(frozen + trained * 16 + activations)} a device",
    ]
    return "\n".join(lines)


def _counts(name: str, source: RecordSource) -> str:
    kinds = Counter(f"{record.task} {record.action.value}" for record in source)
    listed = ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items()))
    return f"{name}: {sum(kinds.values())} ({listed})"


def _steps(config: RunConfig, records: int) -> str:
    devices = process_count()
    per_step = config.train.batch_size * config.train.gradient_accumulation
    steps = config.train.max_steps or math.ceil(math.ceil(records / (per_step * devices)) * config.train.epochs)
    warmup = math.ceil(config.train.warmup_ratio * steps)
    where = "a device" if devices == 1 else f"on each of {devices} devices"
    return f"{steps} optimiser steps of {per_step} records {where}, {warmup} of them warm-up"


def _shared_tokens(config: RunConfig, processor: GraphLLMProcessor, data: RunData) -> str:
    """What shared prefixes save in the first batches, of a thousand at most."""
    size, columns = config.train.batch_size, data.train.with_format("numpy")
    order = list(QuestionSampler(columns["length"][:], columns["question"][:], size, config.seed))[: 1000 * size]
    shared = apart = 0
    for at in range(0, len(order), size):
        rows = [data.train[number] for number in order[at : at + size]]
        apart += sum(row["length"] for row in rows)
        shared += sum(len(sequence.tokens) for sequence in share_prefixes(rows, processor.graph_token_id))
    share = f"{shared:,} tokens in the place of {apart:,} ({shared / apart:.0%})"
    return f"shared prefixes: {share} in the first {len(order)} records"


def _masked_text(ids: list[int], labels: list[int], processor: GraphLLMProcessor) -> str:
    # Whole stretches are decoded, because a character may be several tokens.
    pieces = []
    for learned, stretch in groupby(zip(ids, labels), key=lambda pair: pair[1] != IGNORED):
        text = str(processor.tokenizer.decode([token for token, _ in stretch]))
        pieces.append(f"⟦{text}⟧" if learned else text)
    return "".join(pieces)


def _gb(count: float) -> str:
    return f"{count / 1e9:8.3f} GB"


def _indent(text: str) -> str:
    return "\n".join("  " + line for line in text.rstrip().splitlines())
