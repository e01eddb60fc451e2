"""Causal attention in blocks of queries, for training on a CPU (`model.attention: blocks`).

A block's scores are computed for the keys up to its end alone, five eighths of all pairs, by two matrix products.
torch's fused kernel computes as few, but its backward pass takes several times as long on a CPU; eager attention
computes all pairs and keeps them in float32. `python -m benchmarks training_step` has a row for it.

Shapes: B rows, H heads of queries, K heads of keys, T tokens, D width of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

BLOCKS = "blocks"
_NUMBER = 4


def set_attention(model: Any, name: str) -> None:
    """Choose the attention kernel of a language model.

    Args:
        model: The language model.
        name: One of transformers' names, or "blocks".

    Raises:
        ValueError: the model does not take kernels by name.
    """
    if name == BLOCKS and not (model._supports_sdpa and model._supports_attention_backend):
        raise ValueError(f"model.attention blocks: {type(model).__name__} brings its own attention; set eager or auto")
    model.set_attn_implementation(name)


def block_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers' layers call it; what is not plain self-attention goes to torch's kernel.

    Args:
        module: The layer.
        query: (B, H, T, D).
        key: (B, K, T, D), K a divisor of H.
        value: Likewise.
        attention_mask: (B or 1, 1, T, T), boolean or added to the scores, which lets no token see a later one; None
            where each sees all before it.
        dropout: Of the attention weights.
        scaling: Of the scores.
        **kwargs: Passed to torch's kernel.

    Returns:
        (B, T, H, D), and None for the weights.
    """
    batch, heads, length, width = query.shape
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    if (
        key.shape[2] != length
        or not causal
        or any(kwargs.get(name) is not None for name in ("softcap", "position_bias"))
    ):
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    shared, groups = key.shape[1], heads // key.shape[1]
    if attention_mask is not None and attention_mask.dtype is torch.bool:
        attention_mask = torch.where(attention_mask, 0.0, torch.finfo(query.dtype).min)
    query = (query * (width**-0.5 if scaling is None else scaling)).view(batch, shared, groups, length, width)
    key, value = (one.reshape(batch * shared, length, one.shape[-1]) for one in (key, value))
    places = torch.arange(length, device=query.device)
    outputs = []
    for number in range(_NUMBER):
        begin, end = length * number // _NUMBER, length * (number + 1) // _NUMBER
        size = groups * (end - begin)
        queries = query[:, :, :, begin:end].reshape(batch * shared, size, width)
        scores = torch.bmm(queries, key[:, :end].transpose(1, 2)).view(batch, shared, groups, end - begin, end)
        if attention_mask is None:
            scores = scores.masked_fill(places[begin:end, None] < places[:end], torch.finfo(scores.dtype).min)
        else:
            scores = scores + attention_mask[:, :, None, begin:end, :end]
        # Computed in float32 inside, whatever the type of the scores.
        weights = nn.functional.dropout(scores.softmax(-1), dropout, module.training)
        mixed = torch.bmm(weights.view(batch * shared, size, end), value[:, :end])
        outputs.append(mixed.view(batch, heads, end - begin, value.shape[-1]))
    return torch.cat(outputs, 2).transpose(1, 2).contiguous(), None


AttentionInterface.register(BLOCKS, block_attention)
AttentionMaskInterface.register(BLOCKS, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
