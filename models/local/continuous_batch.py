"""Greedy decoding of many prompts with the batch kept full: a row that has ended makes room for the next prompt.

`generate` of transformers steps on until the longest reply of a batch has ended, and each step copies all keys and
values it has. Here rows that have ended are taken out, waiting prompts are read and join those that are under way, and
a new token is written into room left for it. What several prompts begin with is read once. Rows are aligned at their
newest token; each has its own positions, so in float32 a reply is the same in any company.

transformers has continuous batching of its own. It lays the tokens of all rows in one sequence, for kernels that pass
over the other rows' keys; the kernels of a CPU compute them and throw them away.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer

from tripletune.models.local import ROWS, Decoder, GenerateBatch, Request, choose

# Prompt tokens that are read in one forward pass.
_READ_AT_ONCE = 4096
# Prefixes of prompts whose keys and values are kept.
_PREFIXES = 8
# Columns that are added when a buffer is full: room for that many new tokens before all is copied again.
_ROOM = 64
# Shapes: B rows, T columns (tokens of the longest row), V tokens in the vocabulary, H heads, D numbers per head.


class ContinuousBatch(Decoder):
    """A causal language model and the requests it works on; see `Decoder`.

    Raises:
        ValueError: the model's attention does not keep all tokens (see `fits`).
    """

    def __init__(self, model: Any, *arguments: Any, **options: Any) -> None:
        if not fits(model):
            raise ValueError(f"{type(model).__name__} forgets tokens (sliding window or recurrent): use `generate`")
        super().__init__(model, *arguments, **options)
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._takes = set(inspect.signature(type(inner).forward).parameters)
        # The one that was used last stands last.
        self._prefixes: dict[tuple[int, ...], list[_ColumnLayer]] = {}
        self._batch: _Batch | None = None

    @torch.inference_mode()
    def run(self) -> list[Request]:
        """Work until a reply is done; see `Decoder.run`."""
        done: list[Request] = []
        while not done and not self._stopped:
            self._collect()
            if not self._waiting and self._batch is None:
                break
            try:
                done = self._admit() if self._has_room() else []
                done += self._step()
            except torch.OutOfMemoryError:
                going = [request.resume() for request in self._going()]
                self._batch = None
                self._halve(going, self.rows)
        return done

    def clear(self) -> None:
        """Forget all requests."""
        super().clear()
        self._batch = None

    def _going(self) -> list[Request]:
        return [] if self._batch is None else [request for request in self._batch.requests if not request.done]

    def _has_room(self) -> bool:
        if not self._waiting:
            return False
        if self._batch is None:
            return True
        going = self._going()
        # Joining copies what the batch holds, about what a step costs: not for a single row.
        return not going or (self.rows - len(going) >= max(1, self.rows // 8) and self._fitting(going) > 0)

    def _fitting(self, going: Sequence[Request]) -> int:
        """How many of the waiting requests may join: at least one when none is under way."""
        longest = max((len(one.sequence) for one in going), default=0)
        count = read = 0
        for request in islice(self._waiting, self.rows - len(going)):
            longest = max(longest, len(request.sequence))
            read += len(request.sequence) - len(self._prefix(request))
            if (going or count) and ((len(going) + count + 1) * (longest + _ROOM) > self.cells or read > _READ_AT_ONCE):
                break
            count += 1
        return count

    def _admit(self) -> list[Request]:
        """Read waiting prompts and let them join; those whose reply is done with its first token are given back."""
        going = self._going()
        new = [self._waiting.popleft() for _ in range(self._fitting(going))]
        if not new:
            return []
        start = time.perf_counter()
        try:
            groups: dict[tuple[int, ...], list[Request]] = {}
            for request in new:
                groups.setdefault(self._prefix(request), []).append(request)
            joining = [self._read(prefix, group) for prefix, group in groups.items()]
            self._batch = _joined([*([] if self._batch is None else [self._batch]), *joining])
        except torch.OutOfMemoryError:
            self._waiting.extendleft(reversed([request.resume() for request in new]))
            raise
        for request in new:
            request.seconds += (time.perf_counter() - start) / len(new)
        return [request for request in new if request.done]

    def _read(self, prefix: tuple[int, ...], new: list[Request]) -> _Batch:
        """The batch of requests whose prompts go on after `prefix`, with the next token of each reply."""
        read_before = self._layers(prefix)
        skipped = len(prefix)
        width = max(len(request.sequence) for request in new) - skipped
        device = self._model.device
        ids = torch.full((len(new), width), self._pad)
        mask = torch.zeros((len(new), skipped + width), dtype=torch.bool)
        mask[:, :skipped] = True
        for row, request in enumerate(new):
            rest = request.sequence[skipped:]
            ids[row, width - len(rest) :] = torch.tensor(rest)
            mask[row, skipped + width - len(rest) :] = True
        positions = (mask.cumsum(1) - 1).clamp_min(0)[:, skipped:]
        layers = [layer.repeated(len(new), skipped + width + _ROOM) for layer in read_before]
        cache = _make_cache(layers)
        more = self._inputs(new) if self._inputs is not None else {}
        logits = self._forward(ids.to(device), mask.to(device), positions.to(device), cache, **more)
        last = self._take(logits, new)
        return _Batch(new, cache, mask.to(device), last, positions[:, -1].to(device) + 1)

    def _prefix(self, request: Request) -> tuple[int, ...]:
        """The tokens of a prompt that are read once for all prompts that have them; none where it has nothing more."""
        return tuple(request.prompt[: request.shared]) if request.shared < len(request.prompt) else ()

    def _layers(self, prefix: tuple[int, ...]) -> list[_ColumnLayer]:
        """Keys and values of a prefix, read now or before; none of an empty one."""
        if not prefix:
            return []
        layers = self._prefixes.pop(prefix, None)
        if layers is None:
            ids = torch.tensor([prefix], device=self._model.device)
            cache = _make_cache([])
            positions = torch.arange(len(prefix), device=ids.device)[None]
            self._forward(ids, torch.ones_like(ids, dtype=torch.bool), positions, cache)
            layers = list(cache.layers)
        self._prefixes[prefix] = layers
        while len(self._prefixes) > _PREFIXES:
            del self._prefixes[next(iter(self._prefixes))]
        return layers

    def _step(self) -> list[Request]:
        """Write one more token of every reply under way; the requests that are done now."""
        batch = self._batch
        if batch is None:
            return []
        over = sum(request.done for request in batch.requests)
        if over == len(batch.requests):
            self._batch = None
            return []
        if over >= max(1, len(batch.requests) // 8):
            batch = self._batch = _joined([batch])
        start = time.perf_counter()
        going = [request for request in batch.requests if not request.done]
        batch.mask = torch.cat([batch.mask, batch.mask.new_ones(len(batch.requests), 1)], dim=1)
        logits = self._forward(batch.last[:, None], batch.mask, batch.positions[:, None], batch.cache)
        batch.last = self._take(logits, batch.requests)
        batch.positions = batch.positions + 1
        for request in going:
            request.seconds += (time.perf_counter() - start) / len(going)
        return [request for request in going if request.done]

    def _forward(
        self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Cache, **more: Any
    ) -> torch.Tensor:
        """Logits (B, V) after the last column of `ids` (B, columns); `mask` (B, T) tells which columns are tokens."""
        usual: dict[str, Any] = {"position_ids": positions, "logits_to_keep": 1}
        output = self._model(
            input_ids=ids,
            attention_mask=mask.long(),
            past_key_values=cache,
            use_cache=True,
            **{name: value for name, value in usual.items() if name in self._takes},
            **more,
        )
        logits: torch.Tensor = output.logits[:, -1].float()
        return logits

    def _take(self, logits: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
        """The next tokens (B,), added to the replies that are not done."""
        best = choose(logits, requests, self._constraint).argmax(dim=-1)
        for request, token in zip(requests, best.tolist()):
            if not request.done:
                request.take(token, self._ends)
        return best


def make_decoder(model: Any, ends: Collection[int], pad: int, rows: int = ROWS, beams: int = 1, **more: Any) -> Decoder:
    """The decoder for a model: continuous batches where it can have them, else `generate`; see `Decoder`."""
    if beams == 1 and fits(model):
        return ContinuousBatch(model, ends, pad, rows, **more)
    return GenerateBatch(model, ends, pad, max(1, rows // beams), beams=beams, **more)


def fits(model: Any) -> bool:
    """Whether `ContinuousBatch` can serve a model: a decoder whose layers keep the keys and values of all tokens.

    The processes that share the weights of one model take every step together, so it can't serve those.
    """
    if model.config.is_encoder_decoder or is_sharded(model):
        return False
    return all(type(layer) is DynamicLayer for layer in DynamicCache(config=model.config).layers)


def is_sharded(model: Any) -> bool:
    """Whether several processes share the weights of a model (ZeRO-3, FSDP2), so that all must call it together."""
    return any(hasattr(weight, "ds_id") or isinstance(weight, DTensor) for weight in model.parameters())


@dataclass(eq=False)
class _Batch:
    """Rows under way.

    Attributes:
        requests: One a row; some may be done.
        cache: Keys and values of all layers.
        mask: Which columns of a row are its tokens, (B, T).
        last: The newest token of each row, which is not in the cache yet, (B,).
        positions: Its place in the row, (B,).
    """

    requests: list[Request]
    cache: Cache
    mask: torch.Tensor
    last: torch.Tensor
    positions: torch.Tensor


def _joined(batches: Sequence[_Batch]) -> _Batch:
    """One batch of the rows that are not done, each aligned at its end, without the columns that no row needs."""
    kept = [[row for row, request in enumerate(batch.requests) if not request.done] for batch in batches]
    masks = [batch.mask[rows] for batch, rows in zip(batches, kept)]
    lengths = torch.cat([mask.sum(1) for mask in masks])
    # With no row left there is still a batch, of no rows.
    width = int(lengths.max()) if len(lengths) else 0
    mask = torch.arange(width, device=lengths.device)[None] >= width - lengths[:, None]
    layers: list[_ColumnLayer] = []
    for number in range(len(batches[0].cache.layers)):
        parts: list[Any] = [batch.cache.layers[number] for batch in batches]
        buffers = parts[0].empty(len(lengths), width + _ROOM)
        start = 0
        for part, rows, old in zip(parts, kept, masks):
            end = start + len(rows)
            if rows:
                # What stands in front of a short row is never looked at, but must be a number.
                columns = torch.zeros_like(mask[start:end], dtype=torch.long)
                row, column = old.nonzero(as_tuple=True)
                columns[mask[start:end]] = torch.tensor(rows, device=row.device)[row] * part.width + column
                part.chosen(columns, [buffer[start:end] for buffer in buffers])
            start = end
        layers.append(_column_layer(buffers, width))
    return _Batch(
        [batch.requests[row] for batch, rows in zip(batches, kept) for row in rows],
        _make_cache(layers),
        mask,
        torch.cat([batch.last[rows] for batch, rows in zip(batches, kept)]),
        torch.cat([batch.positions[rows] for batch, rows in zip(batches, kept)]),
    )


# Keys and values of rows under way, with room for new tokens, so that a step copies none of the old ones.


class _ColumnLayer(DynamicLayer):
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
            self._buffers = [one.new_empty((one.shape[0], end + _ROOM, *one.shape[2:])) for one in new]
        elif end > self._buffers[0].shape[1]:
            self._buffers = [_wider(buffer, start, end + _ROOM) for buffer in self._buffers]
        for buffer, one in zip(self._buffers, new):
            buffer[:, start:end] = one
        self._show(end)
        return self.keys, self.values  # type: ignore[return-value]

    def repeated(self, rows: int, columns: int) -> _ColumnLayer:
        """A layer of `rows` copies of this layer's only row, with buffers of that many columns."""
        buffers = [buffer.new_empty((rows, columns, *buffer.shape[2:])) for buffer in self._buffers]
        for buffer, mine in zip(buffers, self._buffers):
            buffer[:, : self._length] = mine[:, : self._length]
        return _column_layer(buffers, self._length)

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


def _column_layer(buffers: list[torch.Tensor], length: int) -> _ColumnLayer:
    """A layer on buffers for keys and values, each (B, columns, H, D), whose first `length` columns are filled."""
    layer = _ColumnLayer()
    layer._buffers = buffers
    layer._show(length)
    return layer


def _make_cache(layers: Sequence[_ColumnLayer]) -> Cache:
    """A cache of these layers; of empty ones, made as the model asks for them, when there are none."""
    return Cache(layers=list(layers)) if layers else Cache(layer_class_to_replicate=_ColumnLayer)


def _wider(buffer: torch.Tensor, length: int, columns: int) -> torch.Tensor:
    wider = buffer.new_empty((buffer.shape[0], columns, *buffer.shape[2:]))
    wider[:, :length] = buffer[:, :length]
    return wider
