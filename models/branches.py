"""Several prompts in one sequence: a trunk, and branches that go on from somewhere along it.

Records of one question begin alike. In one sequence their common beginning is computed once, and a mask lets every
token see exactly what it would see in a sequence of its own.

Shapes: B sequences, T tokens.
"""

from __future__ import annotations

import torch

TRUNK, PADDING = 0, -1


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
