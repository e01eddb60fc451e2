"""Causal attention in blocks of queries, for training on a CPU (`model.attention: blocks`).

Each block is scored against the keys up to its own end only. Little more than half of all pairs are computed, one row
at a time, so the scores stay in the processor's cache. On a CPU the backward pass of torch's fused kernel takes several
times as long, and eager attention computes all pairs in float32. Several rows may be packed end to end into one row,
without padding. `python -m benchmarks training_step` measures this kernel.

Shapes: B rows, H query heads, K key heads, T tokens, D width of a head; R packed rows of at most L tokens each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from tripletune.core import libraries
from tripletune.models.losses import evaluating

BLOCKS = "blocks"
# Queries per block.
_SIZE = 96


def set_attention(model: Any, name: str) -> None:
    """Set the attention kernel of a language model: "blocks", or a kernel by its name in transformers."""
    if name == BLOCKS:
        libraries.check_use("attention in blocks")
        own = not (model._supports_sdpa and model._supports_attention_backend)
        if own or getattr(model.config.get_text_config(), "attention_dropout", None):
            what = "brings its own attention" if own else "has attention_dropout"
            raise ValueError(
                f"model.attention blocks: {type(model).__name__} {what}; set model.attention to eager or auto"
            )
    model.set_attn_implementation(name)


def lies_end_to_end(model: Any, longest: int) -> bool:
    """Whether a causal language model with the kernel "blocks" keeps rows apart, also in short attention windows."""
    text = model.config.get_text_config()
    sizes = (getattr(text, name, None) for name in ("sliding_window", "attention_chunk_size", "window_size"))
    windows = any(isinstance(size, int) and size < longest for size in sizes)
    if windows and set(getattr(text, "layer_types", None) or ()) != {"full_attention"}:
        return False
    mask = torch.arange(8, device=model.device) < torch.tensor([[[[8], [5]]]], device=model.device)
    return keeps_apart(model, mask)


@torch.no_grad()
def keeps_apart(model: Any, mask: Tensor | None = None) -> bool:
    """Whether no layer (convolution, state) of a causal language model mixes packed rows, tested with a tiny input.

    Rows are told apart by their positions or by `mask` (1, 1, R, L); see `block_attention`.
    """
    ids = (torch.arange(13, device=model.device)[None] + 1) % model.config.get_text_config().vocab_size
    positions = torch.tensor([[*range(8), *range(5)]], device=model.device)
    decoder = model.get_decoder()
    try:
        with evaluating(model):
            found = decoder(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False)
            expected = decoder(input_ids=ids[:, 8:], use_cache=False)
    except (TypeError, ValueError, RuntimeError):
        return False
    one, other = found.last_hidden_state[:, 8:].float(), expected.last_hidden_state.float()
    return bool((one - other).norm() < (1e-3 if model.dtype is torch.float32 else 5e-2) * other.norm())


def block_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute plain self-attention in blocks, and any other attention with torch's kernel (transformers' signature).

    Args:
        query: (B, H, T, D).
        key: (B, K, T, D), where K divides H; `value` has the same shape.
        attention_mask: (B or 1, 1, T, T), boolean or added to the scores, in which no token sees a later token; or
            (1, 1, R, L), which is true at the tokens of R packed rows; None if each token sees all earlier tokens.

    Returns:
        The output (B, T, H, D), and None instead of the attention weights.
    """
    length = query.shape[2]
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    if (
        key.shape[2] != length
        or dropout
        or not causal
        or any(kwargs.get(name) is not None for name in ("softcap", "position_bias"))
    ):
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if attention_mask is not None and attention_mask.dtype is torch.bool and attention_mask.shape[2] == length:
        attention_mask = torch.where(attention_mask, 0.0, torch.finfo(query.dtype).min)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return _attend(query, key, value, attention_mask, scaling)[0], None


# Custom operators, because `torch.compile` would otherwise build a kernel per block, and a gradient per slice.
@torch.library.custom_op("tripletune::attend_in_blocks", mutates_args=())
def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float) -> tuple[Tensor, Tensor]:
    """Return the output (B, T, H, D) and one buffer with the attention weights of all blocks."""
    output, kept = _empty(query, key, value, mask)
    for row, start, begin, end, queries, room in attention_blocks(query, key, mask, scaling):
        scores = torch.bmm(queries, key[row, :, start:end].mT)
        whole = scores.view(-1, end - begin, end - start)
        if mask is not None and mask.shape[2] == query.shape[2]:
            whole += mask[row % len(mask), :, begin:end, :end]
        else:
            later = torch.ones(end - begin, end - begin, dtype=torch.bool, device=query.device).triu(1)
            whole[..., begin - start :].masked_fill_(later, torch.finfo(scores.dtype).min)
        # Softmax computes in float32 internally, whatever the type of the scores.
        weights = torch.softmax(scores, -1, out=kept[room].view(scores.shape))
        mixed = torch.bmm(weights, value[row, :, start:end])
        output[row, begin:end] = mixed.view(query.shape[1], end - begin, -1).transpose(0, 1)
    return output, kept


@_attend.register_fake
def _empty(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
    batch, heads, length, _width = query.shape
    rows, longest = (batch, length) if mask is None or mask.shape[2] == length else mask.shape[2:]
    return query.new_empty(batch, length, heads, value.shape[3]), query.new_empty(rows * heads * longest * longest)


@torch.library.custom_op("tripletune::attend_in_blocks_backward", mutates_args=())
def _differentiate(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kept: Tensor, gradient: Tensor, scaling: float
) -> tuple[Tensor, Tensor, Tensor]:
    of_query, of_key, of_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for row, start, begin, end, queries, room in attention_blocks(query, key, mask, scaling):
        weights = kept[room].view(*queries.shape[:2], -1)
        outer = gradient[row, begin:end].transpose(0, 1).reshape(*queries.shape[:2], -1)
        of_value[row, :, start:end] += torch.bmm(weights.mT, outer)
        of_weights = torch.bmm(outer, value[row, :, start:end].mT)
        of_scores = torch._softmax_backward_data(of_weights, weights, -1, weights.dtype)
        of_key[row, :, start:end] += torch.bmm(of_scores.mT, queries)
        inner = torch.bmm(of_scores, key[row, :, start:end]).mul_(scaling)
        of_query[row, :, begin:end] = inner.view(query.shape[1], end - begin, -1)
    return of_query, of_key, of_value


_differentiate.register_fake(lambda *inputs: tuple(torch.empty_like(one) for one in inputs[:3]))


def attention_blocks(
    query: Tensor, key: Tensor, mask: Tensor | None, scaling: float
) -> Iterator[tuple[int, int, int, int, Tensor, slice]]:
    """Yield for each block its row, start of keys, start and end of queries, scaled queries and slice of weights."""
    batch, heads, length, width = query.shape
    rows = [(row, 0, length) for row in range(batch)]
    if mask is not None and mask.shape[2] != length:
        ends = mask.sum(-1).cumsum(-1).flatten().tolist()
        rows = [(0, start, end) for start, end in zip([0, *ends], ends, strict=False) if end > start]
    at = 0
    for row, start, last in rows:
        number = max(1, round((last - start) / _SIZE))
        for block in range(number):
            begin, end = (start + (last - start) * one // number for one in (block, block + 1))
            queries = (query[row, :, begin:end] * scaling).reshape(key.shape[1], -1, width)
            size = heads * (end - begin) * (end - start)
            yield row, start, begin, end, queries, slice(at, at + size)
            at += size


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.scaling = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    return (*_differentiate(*ctx.saved_tensors, gradient, ctx.scaling), None, None)


_attend.register_autograd(_backward, setup_context=_keep)
AttentionInterface.register(BLOCKS, block_attention)
AttentionMaskInterface.register(BLOCKS, sdpa_mask)
