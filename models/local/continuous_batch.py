"""Greedy decoding of many prompts with the batch kept full: a row that has ended makes room for the next prompt.

`generate` of transformers steps on until the longest reply of a batch has ended, and each step copies all keys and
values it has. Here rows that have ended are taken out, waiting prompts are read and join those that are under way, and
a new token is written into room left for it. What several prompts begin with is read once. Rows are aligned at their
newest token; each has its own positions, so in float32 a reply is the same in any company.

An iterative system asks in rounds, and where a prompt begins as one of an earlier round (`Request.grows`), it is read
on from there: the keys and values of rows that have ended are kept, of as many tokens as a batch may have, those that
were used last for longest.

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
# Padding of prompts that are read in one pass, in tokens: more of it costs more than another pass.
_PADDED = 64
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
        self._kept: list[_Kept] = []
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
                self._batch, self._kept = None, []
                self._halve(going, self.rows)
        return done

    def clear(self) -> None:
        """Forget all requests."""
        super().clear()
        self._batch, self._kept = None, []

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
            read += len(request.sequence) - max(request.shared, self._begun(request)[1])
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
            self._read_shared(new)
            joining = [self._read(group) for group in _alike([self._take_on(request) for request in new])]
            self._batch = _joined([*([] if self._batch is None else [self._batch]), *joining])
        except torch.OutOfMemoryError:
            self._waiting.extendleft(reversed([request.resume() for request in new]))
            raise
        for request in new:
            request.seconds += (time.perf_counter() - start) / len(new)
        return [request for request in new if request.done]

    def _read(self, group: Sequence[_Begun]) -> _Batch:
        """The batch of requests that go on from what was kept, with the next token of each reply."""
        new = [request for request, _, _ in group]
        past = max(size for _, _, size in group)
        width = max(len(request.sequence) - size for request, _, size in group)
        device = self._model.device
        ids = torch.full((len(new), width), self._pad)
        mask = torch.zeros((len(new), past + width), dtype=torch.bool)
        for row, (request, _, size) in enumerate(group):
            rest = request.sequence[size:]
            ids[row, width - len(rest) :] = torch.tensor(rest)
            mask[row, past - size : past] = True
            mask[row, past + width - len(rest) :] = True
        positions = (mask.cumsum(1) - 1).clamp_min(0)[:, past:]
        ids, mask, positions = ids.to(device), mask.to(device), positions.to(device)
        cache = _make_cache(_layers(group, past, width + _ROOM))
        batch = _Batch(new, cache, mask, ids[:, -1], positions[:, -1] + 1)
        unread = [what for request, _, size in group for place, what in request.inputs.items() if place >= size]
        more = self._inputs(unread) if self._inputs is not None else {}
        self._take(batch, self._forward(ids, mask, positions, cache, **more))
        return batch

    def _read_shared(self, new: Sequence[Request]) -> None:
        """Read what prompts have in common with others and was not read yet."""
        for request in new:
            beginning = request.prompt[: request.shared]
            if len(beginning) < len(request.prompt) and self._begun(request)[1] < len(beginning):
                self._read([(Request(beginning, 1, grows=True), None, 0)])

    def _begun(self, request: Request) -> tuple[_Kept | None, int]:
        """What was kept of the longest beginning of a request, and its tokens; at least one token is left to read."""
        read, best, size = request.read[:-1], None, 0
        for kept in self._kept:
            common = _common(kept.read, read)
            if common > size:
                best, size = kept, common
        return best, size

    def _take_on(self, request: Request) -> _Begun:
        """A request with what it goes on from, whose place it takes if it needs all of it."""
        kept, size = self._begun(request)
        if kept is not None:
            self._kept.remove(kept)
            if not request.grows or size < len(kept.read) or size == request.shared:
                self._kept.append(kept)
        return request, kept, size

    def _keep(self, request: Request, batch: _Batch, row: int) -> None:
        """Keep the keys and values of a row whose reply is done."""
        read = request.read
        columns = batch.mask[row].nonzero()[: len(read), 0]
        layers: list[Any] = batch.cache.layers
        self._kept.append(_Kept(read[: len(columns)], [layer.columns(row, columns) for layer in layers]))
        while sum(len(kept.read) for kept in self._kept) > self.cells:
            del self._kept[0]

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
        self._take(batch, logits)
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

    def _take(self, batch: _Batch, logits: torch.Tensor) -> None:
        """Add the next tokens to the replies that are not done, and keep what was read of those that are now."""
        batch.last = choose(logits, batch.requests, self._constraint).argmax(dim=-1)
        for row, (request, token) in enumerate(zip(batch.requests, batch.last.tolist())):
            if not request.done:
                request.take(token, self._ends)
                if request.done and request.grows:
                    self._keep(request, batch, row)


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


@dataclass(eq=False)
class _Kept:
    """What was read.

    Attributes:
        read: T tokens, or what stands in their places; see `Request.read`.
        layers: Keys and values of each layer, (T, H, D) both.
    """

    read: list[Any]
    layers: list[list[torch.Tensor]]


# A request, what it goes on from, and how many tokens of that.
_Begun = tuple[Request, _Kept | None, int]


def _common(one: list[Any], other: list[Any]) -> int:
    """How many items two lists begin with alike."""
    same, size = 0, min(len(one), len(other))
    while same < size:
        middle = (same + size + 1) // 2
        if one[same:middle] == other[same:middle]:
            same = middle
        else:
            size = middle - 1
    return same


def _alike(begun: Sequence[_Begun]) -> list[list[_Begun]]:
    """Groups of about as much to read, so that little is padded."""
    groups: list[list[_Begun]] = []
    longest = padded = 0
    for unread, one in sorted(((len(one[0].sequence) - one[2], one) for one in begun), key=lambda pair: -pair[0]):
        padded += longest - unread
        if not groups or padded > _PADDED:
            groups.append([])
            longest, padded = unread, 0
        groups[-1].append(one)
    return groups


def _layers(group: Sequence[_Begun], past: int, room: int) -> list[_ColumnLayer]:
    """Layers with what the rows of a group go on from, aligned at the end of `past` columns; none without any."""
    longest = max(group, key=lambda begun: begun[2])[1]
    layers = []
    for number, parts in enumerate([] if longest is None else longest.layers):
        # What stands in front of a short row is never looked at, but must be a number.
        buffers = [part.new_zeros((len(group), past + room, *part.shape[1:])) for part in parts]
        for row, (_, kept, size) in enumerate(group):
            for buffer, part in zip(buffers, [] if kept is None else kept.layers[number]):
                buffer[row, past - size : past] = part[:size]
        layers.append(_column_layer(buffers, past))
    return layers


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

    def columns(self, row: int, columns: torch.Tensor) -> list[torch.Tensor]:
        """Keys and values of some columns of a row."""
        return [buffer[row, columns] for buffer in self._buffers]

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
