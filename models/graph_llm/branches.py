"""Several prompts in one sequence: a trunk, and branches that go on from somewhere along it.

Records of one question begin alike. In one sequence their common beginning is computed once, and a mask lets every
token see exactly what it would see in a sequence of its own.

Shapes: B sequences, T tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

TRUNK, PADDING = 0, -1
_FULL = "full_attention"


def branch_mask(branches: torch.Tensor, shared: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Who sees whom: a token sees the earlier ones of its own branch and the trunk up to where it branched off.

    Args:
        branches: (B, T) number of the branch each token belongs to, `TRUNK` and `PADDING` among them.
        shared: (B, T) how many tokens of the trunk a token's branch goes on from; not used in the trunk itself.
        dtype: Of the result.

    Returns:
        (B, 1, T, T), to be added to attention scores: 0 where a query (third axis) sees a key (fourth axis), else the
        smallest number.
    """
    places = torch.arange(branches.shape[1], device=branches.device)
    own = (branches.unsqueeze(2) == branches.unsqueeze(1)) & (places.unsqueeze(1) >= places)
    trunk = (branches.unsqueeze(1) == TRUNK) & (places < shared.unsqueeze(2))
    mask = torch.zeros(own.shape, dtype=dtype, device=branches.device)
    return mask.masked_fill(~(own | trunk), torch.finfo(dtype).min).unsqueeze(1)


def check_branches(model: Any, longest: int) -> None:
    """Make sure that in a language model the mask alone decides what a token sees.

    Args:
        model: A causal language model.
        longest: Tokens of the longest sample.

    Raises:
        ValueError: it has attention windows that a sample does not fit into, or layers that mix tokens in another way
            than by attention (convolutions, states), or it takes no mask or positions of our own.
    """
    name, text = type(model).__name__, model.config.get_text_config()
    for window in ("sliding_window", "attention_chunk_size", "window_size"):
        size = getattr(text, window, None)
        if isinstance(size, int) and size < longest and set(getattr(text, "layer_types", None) or ()) != {_FULL}:
            raise ValueError(
                f"train.shared_prefixes: {name} has layers that see {size} tokens ({window}), samples have up to "
                f"{longest}, and the mask of shared prefixes knows no window; set it to false"
            )
    # Weights that lie on several devices can't be tried here.
    if not is_deepspeed_zero3_enabled() and not _agrees(model, text.vocab_size):
        raise ValueError(
            f"train.shared_prefixes: {name} does not compute the same for a sample that shares its beginning with "
            "another; set it to false"
        )


@torch.no_grad()
def _agrees(model: Any, vocabulary: int) -> bool:
    """Whether the last of three samples in one row gives what it gives by itself."""
    places = [(TRUNK, 0, range(8)), (1, 5, range(5, 8)), (2, 3, range(3, 8))]
    rows = [[(branch, shared, place) for place in span] for branch, shared, span in places]
    branches, shared, positions = torch.tensor([entry for row in rows for entry in row], device=model.device).T[:, None]
    ids = (torch.arange(branches.shape[1], device=model.device)[None] + 1) % vocabulary
    alone = torch.cat([ids[:, :3], ids[:, -5:]], -1)
    decoder, was_training = model.get_decoder(), model.training
    model.eval()
    try:
        mask = branch_mask(branches, shared, model.dtype)
        found = decoder(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False)
        expected = decoder(input_ids=alone, use_cache=False)
    except (TypeError, ValueError, RuntimeError):
        return False
    finally:
        model.train(was_training)
    one, other = found.last_hidden_state[:, -5:].float(), expected.last_hidden_state[:, -5:].float()
    return bool((one - other).norm() < (1e-3 if model.dtype is torch.float32 else 5e-2) * other.norm())
