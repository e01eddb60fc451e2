"""Graph warm-up: before training, the graph modules learn to write a token that resembles the label's words.

An option beyond RAS. The language model would learn to ignore the token of an untrained graph encoder.

Tested in `tests/train/tasks/test_ras_task.py`.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from tripletune.core.data.records import IGNORED
from tripletune.models.graph_llm import GraphLLM

if TYPE_CHECKING:
    from datasets import Dataset

    from tripletune.train.evaluation import Batch
    from tripletune.train.rows.cache import Row

logger = logging.getLogger(__name__)
# The learning rate falls linearly from here to zero.
_RATE = 1e-3
_RECORDS_PER_STEP = 16


def warm_up(model: GraphLLM, rows: Dataset, collate: Callable[[list[Row]], Batch], steps: int, seed: int) -> None:
    """Train graph encoder and projector to predict the mean embedding of the label's tokens.

    All processes do the same steps: before the trainer wraps the model, nothing would average their gradients.

    Args:
        rows: Training rows, each with one graph.
        collate: Makes a batch of rows.
    """
    rng = random.Random(seed)
    weights = []
    for module in (model.graph_encoder, model.projector):
        module.train()
        weights += [weight for weight in module.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, _RATE)
    for step in range(steps):
        batch = collate([rows[rng.randrange(len(rows))] for _ in range(_RECORDS_PER_STEP)])
        loss = _squared_error(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.param_groups[0]["lr"] = _RATE * (1 - step / steps)
        optimizer.step()
        if (step + 1) % 100 == 0 or step + 1 == steps:
            logger.info("graph warm-up, step %d/%d: squared error %.4g", step + 1, steps, loss.item())


def _squared_error(model: GraphLLM, batch: Batch) -> torch.Tensor:
    """Mean squared error between graph tokens, (B, H), and the mean embeddings of the labels' tokens, (B, H).

    Args:
        batch: `labels` (B, T), and `graphs` with B graphs.
    """
    embed = model.get_input_embeddings()
    # 4-bit weights are on the GPU before the launcher moves the other weights.
    labels = batch["labels"].to(embed.weight.device)
    # The last label token of a row, which ends the sequence, is left out.
    is_word = (labels != IGNORED) & (labels.roll(-1, 1) != IGNORED)
    words = embed(labels.clamp(min=0)).float() * is_word.unsqueeze(-1)
    target = words.sum(1) / is_word.sum(1, keepdim=True).clamp(min=1)
    graph_tokens = model.projector(model.graph_encoder(batch["graphs"])).float()
    return torch.nn.functional.mse_loss(graph_tokens, target.detach().to(graph_tokens.device))
