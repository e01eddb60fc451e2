"""Causal attention in blocks of queries, for training on a CPU (`model.attention: blocks`).

Each block is scored against the keys up to its own end only. Little more than half of all pairs are computed, one row
at a time, so the scores stay in the processor's cache. On a CPU the backward pass of torch's fused kernel takes several
times as long, and eager attention computes all pairs in float32. Several rows may be packed end to end into one row,
without padding. `python -m benchmarks training_step` measures this kernel.

Shapes: B rows, H query heads, K key heads, T tokens, D width of a head; R packed rows of at most L tokens each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from tripletune.core import libraries
from tripletune.models.losses import evaluating

BLOCKS = "blocks"
# Queries per block, so few that the scores of a block stay in the cache of a CPU.
_QUERIES_PER_BLOCK = 96


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Set the attention kernel of a language model: "blocks", or a kernel by its name in transformers.

    Raises:
        ValueError: "blocks" for a model with attention of its own, which would never call the kernel, or with attention
            dropout, which `block_attention` leaves to torch's kernel, so that training would not use the blocks.
    """
    if name == BLOCKS:
        libraries.check_use("attention in blocks")
        obstacle = ""
        if not (model._supports_sdpa and model._supports_attention_backend):
            obstacle = "brings its own attention"
        elif getattr(model.config.get_text_config(), "attention_dropout", None):
            obstacle = "has attention_dropout"
        if obstacle:
            raise ValueError(
                f"model.attention blocks: {type(model).__name__} {obstacle}; set model.attention to eager or auto"
            )
    model.set_attn_implementation(name)


def lies_end_to_end(model: PreTrainedModel, longest: int) -> bool:
    """Whether a causal language model with the kernel "blocks" keeps rows apart, also in short attention windows.

    The mask of packed rows tells only where each row ends, so a token sees all earlier tokens of its row. A layer whose
    window is shorter than a row would then see more than in the family's own attention.

    Args:
        longest: Number of tokens of the longest row.
    """
    text = model.config.get_text_config()
    # Names of a window's size in different families.
    sizes = [getattr(text, name, None) for name in ("sliding_window", "attention_chunk_size", "window_size")]
    has_short_window = any(isinstance(size, int) and size < longest for size in sizes)
    # A family may name a window that no layer uses.
    uses_windows = set(getattr(text, "layer_types", None) or ()) != {"full_attention"}
    if has_short_window and uses_windows:
        return False
    # Two rows, of eight and five tokens.
    mask = torch.arange(8, device=model.device) < torch.tensor([[[[8], [5]]]], device=model.device)
    return keeps_apart(model, mask)


@torch.no_grad()
def keeps_apart(model: PreTrainedModel, mask: Tensor | None = None) -> bool:
    """Whether no layer (convolution, state) of a causal language model mixes packed rows, tested with a tiny input.

    Rows are told apart by their positions or by `mask` (1, 1, R, L); see `block_attention`.
    """
    # A row of eight tokens and a row of five tokens, packed into one.
    ids = (torch.arange(13, device=model.device)[None] + 1) % model.config.get_text_config().vocab_size
    positions = torch.tensor([[*range(8), *range(5)]], device=model.device)
    decoder = model.get_decoder()
    try:
        with evaluating(model):
            packed = decoder(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False)
            alone = decoder(input_ids=ids[:, 8:], use_cache=False)
    except (TypeError, ValueError, RuntimeError):
        # A decoder that takes no positions, or not this mask, cannot tell packed rows apart.
        return False
    hidden_packed = packed.last_hidden_state[:, 8:].float()
    hidden_alone = alone.last_hidden_state.float()
    # Rounding differs more in 16 bits.
    tolerance = 1e-3 if model.dtype is torch.float32 else 5e-2
    return bool((hidden_packed - hidden_alone).norm() < tolerance * hidden_alone.norm())


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

    transformers passes `kwargs`, which differ between families; those that the blocks would have to obey are checked
    below, and torch's kernel gets them all.

    Args:
        query: (B, H, T, D).
        key: (B, K, T, D), where K divides H; `value` has the same shape.
        attention_mask: (B or 1, 1, T, T), boolean or added to the scores, in which no token sees a later token; or
            (1, 1, R, L), which is true at the tokens of R packed rows; None if each token sees all earlier tokens.

    Returns:
        The output (B, T, H, D), and None instead of the attention weights.
    """
    length = query.shape[2]
    is_causal = kwargs.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    has_cache = key.shape[2] != length
    changes_scores = kwargs.get("softcap") is not None or kwargs.get("position_bias") is not None
    # The blocks compute one square, causal pass. Keys of a cache, dropout, attention in both directions, and scores
    # that a family changes before the softmax need the general kernel.
    if has_cache or dropout or not is_causal or changes_scores:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    # Autocast does not look inside custom operators such as `_attend_in_blocks`.
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query = query.to(dtype)
        key = key.to(dtype)
        value = value.to(dtype)
    if _is_square(attention_mask, length) and attention_mask.dtype is torch.bool:
        attention_mask = torch.where(attention_mask, 0.0, torch.finfo(query.dtype).min)
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    output, _ = _attend_in_blocks(query, key, value, attention_mask, scaling)
    return output, None


def _is_square(mask: Tensor | None, length: int) -> TypeGuard[Tensor]:
    """Whether a mask has a row and a column per token, which `_attend_in_blocks` adds to the scores.

    Any other mask (1, 1, R, L) marks the tokens of R packed rows, all of them in one row of the batch. `length` is T.
    """
    return mask is not None and mask.shape[2] == length


class AttentionBlock(NamedTuple):
    """A block of queries, and the keys that it sees.

    Attributes:
        row: Number of the row in the batch.
        key_start: Column of the first key: 0, or where a packed row begins.
        query_start: Column of the first query.
        end: Column after the last query, which is also the last key.
        queries: The scaled queries, (K, H / K * (end - query_start), D).
        room: The block's place in the buffer of attention weights.
    """

    row: int
    key_start: int
    query_start: int
    end: int
    queries: Tensor
    room: slice


# Custom operators, because `torch.compile` would otherwise build a kernel per block, and a gradient per slice.
@torch.library.custom_op("tripletune::attend_in_blocks", mutates_args=())
def _attend_in_blocks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float
) -> tuple[Tensor, Tensor]:
    """Return the output (B, T, H, D) and one buffer with the attention weights of all blocks.

    The weights are kept for the backward pass, of each block only those of keys up to its end. A mask with a row per
    query is added to the scores; any other mask holds lengths of packed rows, and attention is causal.
    """
    output, kept = _output_to_fill(query, key, value, mask)
    for row, key_start, query_start, end, queries, room in attention_blocks(query, key, mask, scaling):
        # (K, H / K * queries of the block, keys of the block), and the same numbers as (H, queries, keys).
        scores = torch.bmm(queries, key[row, :, key_start:end].mT)
        scores_of_heads = scores.view(-1, end - query_start, end - key_start)
        if _is_square(mask, query.shape[2]):
            # With such a mask no rows are packed, so the keys of every block begin at column 0 (`attention_blocks`).
            scores_of_heads += mask[row % len(mask), :, query_start:end, :end]
        else:
            is_later = torch.ones(end - query_start, end - query_start, dtype=torch.bool, device=query.device).triu(1)
            scores_of_heads[..., query_start - key_start :].masked_fill_(is_later, torch.finfo(scores.dtype).min)
        # Softmax computes in float32 internally, whatever the type of the scores.
        weights = torch.softmax(scores, -1, out=kept[room].view(scores.shape))
        mixed = torch.bmm(weights, value[row, :, key_start:end])
        output[row, query_start:end] = mixed.view(query.shape[1], end - query_start, -1).transpose(0, 1)
    return output, kept


@_attend_in_blocks.register_fake
def _output_to_fill(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
    """Allocate the output and the buffer of weights that `_attend_in_blocks` fills; `torch.compile` runs this instead.

    The buffer has room for the whole square of each row. The blocks need little more than half of it, but their exact
    size would depend on the lengths of packed rows, which are numbers in the mask that a compiler cannot see.
    """
    batch, heads, length, _width = query.shape
    rows = batch
    longest = length
    if mask is not None and not _is_square(mask, length):
        rows, longest = mask.shape[2:]
    output = query.new_empty(batch, length, heads, value.shape[3])
    return output, query.new_empty(rows * heads * longest * longest)


@torch.library.custom_op("tripletune::attend_in_blocks_backward", mutates_args=())
def _differentiate_in_blocks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kept: Tensor, gradient: Tensor, scaling: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value; `gradient` (B, T, H, D) is that of the output.

    The blocks and their order are those of `_attend_in_blocks`, whose weights are in `kept`.
    """
    of_query = torch.empty_like(query)
    # Several blocks add to the gradient of one key.
    of_key = torch.zeros_like(key)
    of_value = torch.zeros_like(value)
    for row, key_start, query_start, end, queries, room in attention_blocks(query, key, mask, scaling):
        weights = kept[room].view(*queries.shape[:2], -1)
        outer = gradient[row, query_start:end].transpose(0, 1).reshape(*queries.shape[:2], -1)
        of_value[row, :, key_start:end] += torch.bmm(weights.mT, outer)
        of_weights = torch.bmm(outer, value[row, :, key_start:end].mT)
        of_scores = torch._softmax_backward_data(of_weights, weights, -1, weights.dtype)
        of_key[row, :, key_start:end] += torch.bmm(of_scores.mT, queries)
        inner = torch.bmm(of_scores, key[row, :, key_start:end]).mul_(scaling)
        of_query[row, :, query_start:end] = inner.view(query.shape[1], end - query_start, -1)
    return of_query, of_key, of_value


@_differentiate_in_blocks.register_fake
def _gradients_to_fill(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients without content: `torch.compile` learns shapes and types from them, and computes nothing for it."""
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def attention_blocks(query: Tensor, key: Tensor, mask: Tensor | None, scaling: float) -> Iterator[AttentionBlock]:
    """Yield the blocks of all rows; packed rows are parts of row 0 of the batch.

    Forward and backward pass call this function with the same arguments, so a block has the same `room` in both.
    """
    batch, heads, length, width = query.shape
    # Number in the batch, first column and column after the last, of each row.
    rows = [(row, 0, length) for row in range(batch)]
    if mask is not None and not _is_square(mask, length):
        ends = mask.sum(-1).cumsum(-1).flatten().tolist()
        rows = [(0, start, end) for start, end in zip([0, *ends], ends, strict=False) if end > start]
    used = 0
    for row, start, last in rows:
        count = max(1, round((last - start) / _QUERIES_PER_BLOCK))
        for block in range(count):
            begin = start + (last - start) * block // count
            end = start + (last - start) * (block + 1) // count
            queries = (query[row, :, begin:end] * scaling).reshape(key.shape[1], -1, width)
            size = heads * (end - begin) * (end - start)
            yield AttentionBlock(row, start, begin, end, queries, slice(used, used + size))
            used += size


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save in `ctx` what `_gradients_of_attend` needs: the inputs, and the attention weights, the second output.

    `ctx` is torch's record of the call, whose public type does not name the saved tensors. Without materialised
    gradients, no zeros are made for the attention weights, which have no gradient.
    """
    *tensors, ctx.scaling = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.set_materialize_grads(False)


def _gradients_of_attend(ctx: Any, gradient: Tensor, _of_weights: None) -> tuple[Tensor | None, ...]:
    """The gradients of `_attend_in_blocks`'s arguments: query, key, value; None for mask and scaling.

    Args:
        ctx: What `_save_for_backward` has saved.
        gradient: (B, T, H, D), that of the output.
    """
    return (*_differentiate_in_blocks(*ctx.saved_tensors, gradient, ctx.scaling), None, None)


_attend_in_blocks.register_autograd(_gradients_of_attend, setup_context=_save_for_backward)
AttentionInterface.register(BLOCKS, block_attention)
AttentionMaskInterface.register(BLOCKS, sdpa_mask)
