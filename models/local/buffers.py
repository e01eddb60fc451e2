"""Keys and values of a batch of rows, in buffers with room for new tokens; see `models.local.continuous_batch`.

Shapes: B rows, T columns (tokens of the longest row), H heads, D numbers per head. CPU kernels read the keys of a head
one after another, so the dimension of columns comes after that of heads.

Tested in `tests/models/local/test_decoders.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import DynamicLayer


class BufferShape(NamedTuple):
    """Rows and columns of buffers."""

    rows: int
    columns: int


class RowSizes(NamedTuple):
    """A row of the buffers, and its number of tokens before and after a pass."""

    row: int
    before: int
    after: int


def zero_buffer(like: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """A buffer (rows, H, columns, D) of zeros, with H, D, type and device of `like`.

    Padding of short rows is never read, but must be finite: the mask gives it weight 0, and 0 times NaN is NaN.
    """
    return like.new_zeros((rows, like.shape[1], columns, like.shape[3]))


class PromptLayer(DynamicLayer):
    """Keys and values of one layer while prompts are read; missing buffers are created.

    Args:
        buffers: The layer's two buffers, or an empty list, to which they are added.
        shape: Size of new buffers.
        sizes: The rows that are read, in the order of the pass.
        past: Number of columns before the new tokens, at least `before` of each row.
    """

    def __init__(self, buffers: list[torch.Tensor], shape: BufferShape, sizes: Sequence[RowSizes], past: int) -> None:
        super().__init__()
        self._buffers = buffers
        self._shape = shape
        self._sizes = sizes
        self._past = past
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new keys and values (B, H, columns, D), aligned at their end; return those of all tokens.

        Buffers are created here, because only the states tell heads, width and type of the layer.
        """
        if not self._buffers:
            self._buffers += [zero_buffer(states, *self._shape) for states in (key_states, value_states)]
        keys = self._with_past(self._buffers[0], key_states)
        values = self._with_past(self._buffers[1], value_states)
        return keys, values

    def _with_past(self, buffer: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Write new keys or values to a buffer; return them behind those of earlier tokens, (B, H, past + new, D).

        Rows of a pass have different numbers of earlier tokens, so these end at column `past`, and what stands before
        them is zero; the mask of `ContinuousBatch._read_group` hides it.
        """
        whole = torch.cat([zero_buffer(new, len(new), self._past), new], 2)
        for (row, before, after), states in zip(self._sizes, whole, strict=True):
            states[:, self._past - before : self._past] = buffer[row, :, :before]
            buffer[row, :, before:after] = states[:, before - after :]
        return whole

    def get_seq_length(self) -> int:
        """Number of columns before the new tokens."""
        return self._past


class StepLayer(DynamicLayer):
    """Keys and values of one layer while each row gets a new token.

    `places` (B,) are the columns of the new tokens, `width` is the number of columns with them.
    """

    def __init__(self, buffers: list[torch.Tensor], places: torch.Tensor, width: int) -> None:
        super().__init__()
        self._buffers = buffers
        self._places = places
        self._width = width
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the keys and values (B, H, 1, D) of the new tokens; return those of all tokens.

        What comes back are views of the buffers, which is why a step copies nothing. Columns after a row's own tokens
        hold old values, which the mask hides.
        """
        count = len(self._places)
        rows = torch.arange(count, device=self._places.device)
        keys, values = self._buffers
        keys[rows, :, self._places] = key_states[:, :, 0]
        values[rows, :, self._places] = value_states[:, :, 0]
        return keys[:count, :, : self._width], values[:count, :, : self._width]

    def get_seq_length(self) -> int:
        """Number of columns before the new tokens."""
        return self._width - 1
