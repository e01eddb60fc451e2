"""Graph encoder and projector learn alone before the language model reads them (`train.graph_warmup_steps`)."""

from __future__ import annotations

import logging
import random
from typing import Any

import torch

from tripletune.models.data.records import IGNORED

logger = logging.getLogger(__name__)
# Learning rate of the graph modules by themselves, which falls to zero.
WARMUP_RATE = 1e-3


def warm_up(model: Any, rows: Any, collate: Any, steps: int, seed: int) -> None:
    """Train the graph modules to say with one vector what the label says, before anything reads it.

    Read by a language model from scratch, the token is noise that it learns to overlook. The target is the mean
    embedding of the label's tokens but the last, which ends the sequence. All processes do the same.

    Args:
        model: The model with its adapter.
        rows: Tokenised records, one graph each.
        collate: The collator of training.
        steps: Steps of 16 records.
        seed: Seed of their choice.
    """
    base = model.get_base_model()
    parts, embed, rng = (base.graph_encoder, base.projector), base.get_input_embeddings(), random.Random(seed)
    optimizer = torch.optim.AdamW([p for part in parts for p in part.parameters() if p.requires_grad], WARMUP_RATE)
    for part in parts:
        part.train()
    for step in range(steps):
        batch = collate([rows[rng.randrange(len(rows))] for _ in range(16)])
        labels = batch["labels"].to(embed.weight.device)
        shown = (labels != IGNORED) & (labels.roll(-1, 1) != IGNORED)
        words = embed(labels.clamp(min=0)).float() * shown.unsqueeze(-1)
        target = words.sum(1) / shown.sum(1, keepdim=True).clamp(min=1)
        given = parts[1](parts[0](batch["graphs"])).float()
        # 4-bit weights are on the GPU before a launcher has moved the rest.
        loss = torch.nn.functional.mse_loss(given, target.detach().to(given.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.param_groups[0]["lr"] = WARMUP_RATE * (1 - step / steps)
        optimizer.step()
        if (step + 1) % 100 == 0 or step + 1 == steps:
            logger.info("graph warm-up, step %d/%d: squared error %.4g", step + 1, steps, loss.item())
