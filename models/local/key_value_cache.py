"""Keys and values of rows under way, with room for new tokens, so that a step copies none of the old ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

# Columns that are added when a buffer is full: room for that many new tokens before all is copied again.
ROOM = 64
# Shapes: B rows, T columns (tokens of the longest row), H heads, D numbers a head.


class ColumnLayer(DynamicLayer):
    """Keys and values of one layer, (B, columns, H, D), in buffers with room for more columns."""

    def __init__(self) -> None:
        super().__init__()
        self._buffers: list[torch.Tensor] = []
        self._length = 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the keys and values (B, H, columns, D) of new columns; all of them come back."""
        new = [key_states.transpose(1, 2), value_states.transpose(1, 2)]
        start, end = self._length, self._length + key_states.shape[-2]
        if not self._buffers:
            self._buffers = [one.new_empty((one.shape[0], end + ROOM, *one.shape[2:])) for one in new]
        elif end > self._buffers[0].shape[1]:
            self._buffers = [_wider(buffer, start, end + ROOM) for buffer in self._buffers]
        for buffer, one in zip(self._buffers, new):
            buffer[:, start:end] = one
        self._show(end)
        return self.keys, self.values  # type: ignore[return-value]

    def repeated(self, rows: int, columns: int) -> ColumnLayer:
        """A layer of `rows` copies of this layer's only row, with buffers of that many columns."""
        buffers = [buffer.new_empty((rows, columns, *buffer.shape[2:])) for buffer in self._buffers]
        for buffer, mine in zip(buffers, self._buffers):
            buffer[:, : self._length] = mine[:, : self._length]
        return column_layer(buffers, self._length)

    def chosen(self, columns: torch.Tensor, buffers: Sequence[torch.Tensor]) -> None:
        """Copy columns, numbered through all rows' buffers, to the start of `buffers`; `columns` is (B, T)."""
        for mine, target in zip(self._buffers, buffers):
            found = mine.flatten(0, 1).index_select(0, columns.flatten())
            target[:, : columns.shape[1]] = found.view(*columns.shape, *mine.shape[2:])

    @property
    def width(self) -> int:
        """Columns of the buffers."""
        return int(self._buffers[0].shape[1])

    def empty(self, rows: int, columns: int) -> list[torch.Tensor]:
        """New buffers like this layer's."""
        return [buffer.new_empty((rows, columns, *buffer.shape[2:])) for buffer in self._buffers]

    def _show(self, length: int) -> None:
        self._length = length
        self.keys, self.values = (buffer[:, :length].transpose(1, 2) for buffer in self._buffers)
        self.is_initialized = True


def column_layer(buffers: list[torch.Tensor], length: int) -> ColumnLayer:
    """A layer on buffers for keys and values, each (B, columns, H, D), whose first `length` columns are filled."""
    layer = ColumnLayer()
    layer._buffers = buffers
    layer._show(length)
    return layer


def make_cache(layers: Sequence[ColumnLayer]) -> Cache:
    """A cache of these layers; of empty ones, made as the model asks for them, when there are none."""
    return Cache(layers=list(layers)) if layers else Cache(layer_class_to_replicate=ColumnLayer)


def _wider(buffer: torch.Tensor, length: int, columns: int) -> torch.Tensor:
    wider = buffer.new_empty((buffer.shape[0], columns, *buffer.shape[2:]))
    wider[:, :length] = buffer[:, :length]
    return wider
