"""Decode many prompts greedily in a full batch, in which a waiting prompt replaces a finished row.

`generate` of transformers runs until the longest reply of a batch has ended, and each step copies all keys and values.
Here each row has a place in buffers with room for new tokens. When a row ends, the last row moves to its place, and
waiting prompts are read into free places. A prefix that prompts share is read once. Each row has its own positions, so
in float32 a reply does not depend on other rows.

An iterative system makes calls in rounds. If a prompt continues a prompt of an earlier round (`Request.grows`), only
its new tokens are read. For this, keys and values of finished rows are kept, up to as many tokens as a batch may have;
the least recently used are dropped first.

Transformers also has continuous batching. It puts the tokens of all rows into one sequence, for kernels that skip the
keys of other rows; on a CPU, kernels would compute these keys and discard the results.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer

from tripletune.core import libraries
from tripletune.models.local import ROWS, Decoder, GenerateBatch, Request, choose
from tripletune.models.losses import evaluating

libraries.check_use("decoding")

# Maximum prompt tokens per forward pass.
_READ_AT_ONCE = 4096
# Maximum padding tokens in one pass over prompts; more padding costs more than another pass.
_PADDED = 64
# Minimum number of columns that are added to full buffers, as room for new tokens before the next copy.
_ROOM = 64
# Shapes: B rows, T columns (tokens of the longest row), V tokens in the vocabulary, H heads, D numbers per head.
# CPU kernels read the keys of a head one after another, so the dimension of columns comes after that of heads.


class ContinuousBatch(Decoder):
    """Reply to requests with a causal language model that `fits`; see `Decoder`."""

    def __init__(self, model: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(model, *arguments, **options)
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._takes = set(inspect.signature(type(inner).forward).parameters)
        self._cache_argument = libraries.cache_argument()
        # Running requests, one per row of the buffers, which hold keys and values (B, H, T, D) of each layer.
        self._going: list[Request] = []
        self._done: list[Request] = []
        self._forget()

    @torch.inference_mode()
    def run(self) -> list[Request]:
        """Work until a reply is done; see `Decoder.run`."""
        while not self._done and not self._stopped:
            self._collect()
            if not self._waiting and not self._going:
                break
            try:
                # Reading a few prompts together takes hardly longer than reading one.
                free = self.rows - len(self._going)
                if self._waiting and (not self._going or (free >= max(1, self.rows // 8) and self._fitting() > 0)):
                    self._admit()
                self._step()
            except torch.OutOfMemoryError:
                going = [request.resume() for request in self._going if not request.done]
                self._forget()
                self._halve(going, self.rows)
        done, self._done = self._done, []
        return done

    def clear(self) -> None:
        """Drop all requests."""
        super().clear()
        self._forget()
        self._done = []

    def _forget(self) -> None:
        # In order of use; the most recently used is last.
        self._kept: list[_Kept] = []
        self._going = []
        self._shape = (0, 0)
        self._buffers: list[list[torch.Tensor]] = [[] for _ in DynamicCache(config=self._model.config).layers]

    def _fitting(self) -> int:
        """The number of waiting requests that may join the batch; at least one if the batch is empty."""
        longest = max((len(one.sequence) for one in self._going), default=0)
        count = read = 0
        for request in islice(self._waiting, self.rows - len(self._going)):
            longest = max(longest, len(request.sequence))
            read += len(request.sequence) - max(request.shared, self._begun(request)[1])
            rows = len(self._going) + count + 1
            if rows > 1 and (rows * (longest + _ROOM) > self.cells or read > _READ_AT_ONCE):
                break
            count += 1
        return count

    def _admit(self) -> None:
        new = [self._waiting.popleft() for _ in range(self._fitting())]
        start, rows = time.perf_counter(), len(self._going) + len(new)
        try:
            for request in new:
                beginning = request.prompt[: request.shared]
                if len(beginning) < len(request.prompt) and self._begun(request)[1] < len(beginning):
                    self._read([(Request(beginning, 1, grows=True), None, 0)], rows)
                    self._done.pop()
            for group in _alike([self._take_on(request) for request in new]):
                self._read(group, rows)
        except torch.OutOfMemoryError:
            again = [request.resume() for request in new if not request.done and request not in self._going]
            self._waiting.extendleft(reversed(again))
            raise
        for request in new:
            request.seconds += (time.perf_counter() - start) / len(new)

    def _read(self, group: Sequence[_Begun], rows: int) -> None:
        """Read the new tokens of requests, and choose each next token; `rows` requests will finally be running."""
        past = max(size for _, _, size in group)
        width = max(len(request.sequence) - size for request, _, size in group)
        device = self._model.device
        ids = torch.full((len(group), width), self._pad)
        mask = torch.zeros((len(group), past + width), dtype=torch.bool)
        for row, (request, _, size) in enumerate(group):
            rest = request.sequence[size:]
            ids[row, width - len(rest) :] = torch.tensor(rest)
            mask[row, past - size : past] = True
            mask[row, past + width - len(rest) :] = True
        positions = (mask.cumsum(1) - 1).clamp_min(0)[:, past:]
        unread = [what for request, _, size in group for place, what in request.inputs.items() if place >= size]
        more = self._inputs(unread) if self._inputs is not None else {}
        self._make_room(rows, max(len(request.sequence) for request, _, _ in group))
        sizes = []
        for row, (request, kept, size) in enumerate(group, len(self._going)):
            for buffer, part in zip(chain(*self._buffers), [] if kept is None else chain(*kept.layers)):
                buffer[row, :, :size] = part[:, :size]
            sizes.append((row, size, len(request.sequence)))
        cache = Cache(layers=[_Reading(buffers, self._shape, sizes, past) for buffers in self._buffers])
        logits = self._forward(ids.to(device), mask.to(device), positions.to(device), cache, **more)
        self._going += [request for request, _, _ in group]
        self._take(logits)

    def _make_room(self, rows: int, columns: int) -> None:
        """Copy the running rows to larger buffers if the buffers are too small."""
        if rows <= self._shape[0] and columns <= self._shape[1]:
            return
        count, held = len(self._going), max((len(request.sequence) for request in self._going), default=0)
        held = min(held, self._shape[1])
        columns = max(columns, held)
        columns = max(columns + _ROOM, min(2 * columns, self.cells // rows))
        rows = max(rows, min(self._shape[0], self.cells // columns))
        self._shape = rows, columns
        for buffers in self._buffers:
            for place, old in enumerate(buffers):
                buffers[place] = _zeros(old, rows, columns)
                buffers[place][:count, :, :held] = old[:count, :, :held]

    def _begun(self, request: Request) -> tuple[_Kept | None, int]:
        """The kept keys and values of a request's longest prefix, and its length; at least one token stays unread."""
        read, best, size = request.read[:-1], None, 0
        for kept in self._kept:
            common = _common(kept.read, read)
            if common > size:
                best, size = kept, common
        return best, size

    def _take_on(self, request: Request) -> _Begun:
        """Return a request with its kept prefix; the prefix is dropped from the kept ones if the request extends it."""
        kept, size = self._begun(request)
        if kept is not None:
            self._kept.remove(kept)
            if not request.grows or size < len(kept.read) or size == request.shared:
                self._kept.append(kept)
        return request, kept, size

    def _step(self) -> None:
        going = list(self._going)
        if not going:
            return
        start = time.perf_counter()
        device = self._model.device
        ids = torch.tensor([[request.tokens[-1]] for request in going], device=device)
        # Keys and values of the newest token are not computed yet.
        places = torch.tensor([len(request.sequence) - 1 for request in going], device=device)
        # On a CPU, add an unused column: transformers drops a mask that hides nothing, and without a mask torch's
        # kernel takes six times as long in bfloat16 if heads share keys.
        width = max(len(request.sequence) for request in going) + (device.type == "cpu")
        self._make_room(len(going), width)
        cache = Cache(layers=[_Rows(buffers, places, width) for buffers in self._buffers])
        mask = torch.arange(width, device=device)[None] <= places[:, None]
        self._take(self._forward(ids, mask, places[:, None], cache))
        for request in going:
            request.seconds += (time.perf_counter() - start) / len(going)

    def _forward(
        self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Cache, **more: Any
    ) -> torch.Tensor:
        """Compute logits (B, V) after the last column of `ids` (B, columns); `mask` (B, T) is true for tokens."""
        inputs: dict[str, Any] = {self._cache_argument: cache, **more}
        if "position_ids" in self._takes:
            inputs["position_ids"] = positions
        if "logits_to_keep" in self._takes:
            inputs["logits_to_keep"] = 1
        output = self._model(input_ids=ids, attention_mask=mask.long(), use_cache=True, **inputs)
        return output.logits[:, -1].float()

    def _take(self, logits: torch.Tensor) -> None:
        """Add the next token to each of the last B running replies; `logits` is (B, V)."""
        first = len(self._going) - len(logits)
        tokens = choose(logits, self._going[first:], self._constraint).argmax(dim=-1).tolist()
        # Go backwards, so that a row that moves already has its token.
        for row in reversed(range(first, len(self._going))):
            request, read = self._going[row], self._going[row].read
            request.take(tokens[row - first], self._ends)
            if request.done:
                if request.grows:
                    parts = [[buffer[row, :, : len(read)].clone() for buffer in both] for both in self._buffers]
                    self._kept.append(_Kept(read, parts))
                self._done.append(request)
                last = self._going.pop()
                if row < len(self._going):  # the last row takes the place of this one
                    self._going[row] = last
                    for buffer in chain(*self._buffers):
                        buffer[row, :, : len(last.sequence)] = buffer[len(self._going), :, : len(last.sequence)]
        while sum(len(kept.read) for kept in self._kept) > self.cells:
            del self._kept[0]


def make_decoder(model: Any, ends: Collection[int], pad: int, rows: int = ROWS, beams: int = 1, **more: Any) -> Decoder:
    """Create the decoder for a model: continuous batches if the model `fits`, else `generate`; see `Decoder`."""
    if beams == 1 and fits(model):
        return ContinuousBatch(model, ends, pad, rows, **more)
    return GenerateBatch(model, ends, pad, max(1, rows // beams), beams=beams, **more)


def fits(model: Any) -> bool:
    """Whether `ContinuousBatch` can run a model: a decoder whose layers keep the keys and values of all tokens.

    It can't run a sharded model, because processes that share weights must take every step together.
    """
    if model.config.is_encoder_decoder or is_sharded(model):
        return False
    # The cache of GPT-Neo does not show that its layers have windows.
    if "local" in getattr(model.config.get_text_config(), "attention_layers", ()):
        return False
    return all(type(layer) is DynamicLayer for layer in DynamicCache(config=model.config).layers)


@torch.no_grad()
def has_attention(model: Any) -> bool:
    """Whether a causal language model keeps keys and values of tokens in the cache that `generate` gives it.

    State-space models take a cache, too, so a tiny input shows whether the model writes keys and values.
    """
    cache, argument = DynamicCache(config=model.config.get_text_config(decoder=True)), libraries.cache_argument()
    if all(cache.is_linear):
        return False
    ids = torch.arange(1, 4, device=model.device)[None] % model.config.get_text_config().vocab_size
    try:
        with evaluating(model):
            model(input_ids=ids, use_cache=True, **{argument: cache})
    except (AttributeError, TypeError, ValueError):
        # A model with its own kind of cache.
        return False
    return bool(cache.get_seq_length() == ids.shape[1])


def is_sharded(model: Any) -> bool:
    """Whether several processes share the weights of a model (ZeRO-3, FSDP2), so that all must call it together."""
    return any(hasattr(weight, "ds_id") or isinstance(weight, DTensor) for weight in model.parameters())


@dataclass(eq=False)
class _Kept:
    """T tokens (or inputs) that were read, and each layer's keys and values, both (H, T, D)."""

    read: list[Any]
    layers: list[list[torch.Tensor]]


# A request, the kept prefix that it continues, and the number of tokens it takes from this prefix.
_Begun = tuple[Request, _Kept | None, int]


def _common(one: list[Any], other: list[Any]) -> int:
    """Length of two lists' common prefix."""
    same, size = 0, min(len(one), len(other))
    while same < size:
        middle = (same + size + 1) // 2
        if one[same:middle] == other[same:middle]:
            same = middle
        else:
            size = middle - 1
    return same


def _alike(begun: Sequence[_Begun]) -> list[list[_Begun]]:
    """Group requests of similar length, to keep padding small."""
    groups: list[list[_Begun]] = []
    longest = padded = 0
    for unread, one in sorted(((len(one[0].sequence) - one[2], one) for one in begun), key=lambda pair: -pair[0]):
        padded += longest - unread
        if not groups or padded > _PADDED:
            groups.append([])
            longest, padded = unread, 0
        groups[-1].append(one)
    return groups


def _zeros(like: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """A buffer of zeros, since padding of short rows is never read, but must be finite."""
    return like.new_zeros((rows, like.shape[1], columns, like.shape[3]))


class _Reading(DynamicLayer):
    """Keys and values of one layer while prompts are read; missing buffers are created.

    `sizes` has each row's number, and its number of tokens before the pass (at most `past`) and after it.
    """

    def __init__(
        self, buffers: list[torch.Tensor], shape: tuple[int, int], sizes: list[tuple[int, int, int]], past: int
    ) -> None:
        super().__init__()
        self._buffers, self._shape, self._sizes, self._past = buffers, shape, sizes, past
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new keys and values (B, H, columns, D), aligned at their end; return those of all tokens."""
        if not self._buffers:
            self._buffers += [_zeros(new, *self._shape) for new in (key_states, value_states)]
        keys, values = (self._whole(*pair) for pair in zip(self._buffers, (key_states, value_states)))
        return keys, values

    def _whole(self, buffer: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        whole = torch.cat([_zeros(new, len(new), self._past), new], 2)
        for (row, before, after), mine in zip(self._sizes, whole):
            mine[:, self._past - before : self._past] = buffer[row, :, :before]
            buffer[row, :, before:after] = mine[:, before - after :]
        return whole

    def get_seq_length(self) -> int:
        return self._past


class _Rows(DynamicLayer):
    """Keys and values of one layer while each row gets a new token.

    `places` (B,) are the columns of the new tokens, `width` is the number of columns with them.
    """

    def __init__(self, buffers: list[torch.Tensor], places: torch.Tensor, width: int) -> None:
        super().__init__()
        self._buffers, self._places, self._width = buffers, places, width
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the keys and values (B, H, 1, D) of the new tokens; return those of all tokens."""
        rows = torch.arange(len(self._places), device=self._places.device)
        for buffer, new in zip(self._buffers, (key_states, value_states)):
            buffer[rows, :, self._places] = new[:, :, 0]
        keys, values = (buffer[: len(rows), :, : self._width] for buffer in self._buffers)
        return keys, values

    def get_seq_length(self) -> int:
        return self._width - 1
