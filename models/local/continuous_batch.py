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
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer

from tripletune.models.local.decoding import CELLS, ROWS, Request
from tripletune.models.local.key_value_cache import ROOM, ColumnLayer, column_layer, make_cache

# Prompt tokens that are read in one forward pass.
_READ_AT_ONCE = 4096
# Beginnings of prompts whose keys and values are kept.
_BEGINNINGS = 8
# Shapes: B rows, T columns (tokens of the longest row), V tokens in the vocabulary.


class Constraint(Protocol):
    """Which tokens a reply may go on with, for example those of a grammar."""

    def restrict(self, logits: torch.Tensor, requests: Sequence[Request]) -> None:
        """Set the logits (B, V) of tokens that may not come next to minus infinity, in place."""
        ...


class ContinuousBatch:
    """A decoder and the requests it works on.

    Args:
        model: A causal language model of transformers in eval mode.
        ends: Tokens that end a reply.
        pad: The token that stands where there is none; it is never looked at.
        rows: Most requests under way together.
        cells: Most tokens, rows times the longest, that are kept for them; one row may have more.
        prefix: Tokens that prompts begin with; those that do are read from there on. Where prompts have several
            beginnings, `Request.shared` tells of each.
        constraint: Which tokens may come next; None allows all.
        enough: Asked after every token; where it says so the reply ends.

    Raises:
        ValueError: rows or cells are below 1, or the model's attention does not keep all tokens (see `fits`).
    """

    def __init__(
        self,
        model: Any,
        ends: Collection[int],
        pad: int,
        rows: int = ROWS,
        cells: int = CELLS,
        prefix: Sequence[int] = (),
        constraint: Constraint | None = None,
        enough: Callable[[Request], bool] | None = None,
    ) -> None:
        if rows < 1 or cells < 1:
            raise ValueError(f"rows {rows}, cells {cells}: both must be at least 1")
        if not fits(model):
            raise ValueError(f"{type(model).__name__} forgets tokens (sliding window or recurrent): use `generate`")
        self.rows, self.cells = rows, cells
        self._model, self._ends, self._pad = model, frozenset(ends), pad
        self._constraint, self._enough = constraint, enough
        self._takes = set(inspect.signature(model.forward).parameters)
        self._prefix = tuple(prefix)
        # The one that was used last stands last.
        self._beginnings: dict[tuple[int, ...], list[ColumnLayer]] = {}
        self._arrived: deque[Request] = deque()
        self._waiting: deque[Request] = deque()
        self._batch: _Batch | None = None
        self._stopped = False

    def add(self, request: Request) -> None:
        """Let a request wait for its turn; it may be called while `run` works in another thread."""
        self._arrived.append(request)

    @torch.inference_mode()
    def run(self) -> list[Request]:
        """Work until a reply is done.

        Returns:
            The requests that are done now; none when there is nothing to do.

        Raises:
            torch.OutOfMemoryError: one row alone does not fit the device. What waits is kept.
        """
        done: list[Request] = []
        while not done and not self._stopped:
            while self._arrived:
                self._waiting.append(self._arrived.popleft())
            if not self._waiting and self._batch is None:
                break
            try:
                done = self._admit() if self._has_room() else []
                done += self._step()
            except torch.OutOfMemoryError:
                self._halve()
        return done

    def stop(self) -> None:
        """Make `run`, also one under way in another thread, return at its next token."""
        self._stopped = True

    def clear(self) -> None:
        """Forget all requests."""
        self._arrived.clear()
        self._waiting.clear()
        self._batch = None

    def _has_room(self) -> bool:
        if not self._waiting:
            return False
        if self._batch is None:
            return True
        going = [request for request in self._batch.requests if not request.done]
        # Joining copies what the batch holds, about what a step costs: not for a single row.
        return not going or (self.rows - len(going) >= max(1, self.rows // 8) and self._fitting(going) > 0)

    def _fitting(self, going: Sequence[Request]) -> int:
        """How many of the waiting requests may join: at least one when none is under way."""
        longest = max((len(one.prompt) + len(one.tokens) for one in going), default=0)
        count = read = 0
        for request in islice(self._waiting, self.rows - len(going)):
            longest = max(longest, len(request.prompt))
            read += len(request.prompt) - len(self._beginning(request))
            if (going or count) and ((len(going) + count + 1) * (longest + ROOM) > self.cells or read > _READ_AT_ONCE):
                break
            count += 1
        return count

    def _admit(self) -> list[Request]:
        """Read waiting prompts and let them join; those whose reply is done with its first token are given back."""
        going = [] if self._batch is None else [one for one in self._batch.requests if not one.done]
        new = [self._waiting.popleft() for _ in range(self._fitting(going))]
        if not new:
            return []
        start = time.perf_counter()
        try:
            joining = self._read(new)
            self._batch = _joined([one for one in (self._batch, *joining) if one is not None])
        except torch.OutOfMemoryError:
            self._waiting.extendleft(reversed([request.anew() for request in new]))
            raise
        for request in new:
            request.seconds += (time.perf_counter() - start) / len(new)
        return [request for request in new if request.done]

    def _read(self, new: list[Request]) -> list[_Batch]:
        """Batches of new requests with the first token of each reply, one for every beginning."""
        groups: dict[tuple[int, ...], list[Request]] = {}
        for request in new:
            groups.setdefault(self._beginning(request), []).append(request)
        return [self._read_after(beginning, group) for beginning, group in groups.items()]

    def _read_after(self, beginning: tuple[int, ...], new: list[Request]) -> _Batch:
        """The batch of requests whose prompts go on after `beginning`."""
        read_before = self._layers(beginning)
        skipped = len(beginning)
        width = max(len(request.prompt) for request in new) - skipped
        device = self._model.device
        ids = torch.full((len(new), width), self._pad)
        mask = torch.zeros((len(new), skipped + width), dtype=torch.bool)
        mask[:, :skipped] = True
        for row, request in enumerate(new):
            rest = request.prompt[skipped:]
            ids[row, width - len(rest) :] = torch.tensor(rest)
            mask[row, skipped + width - len(rest) :] = True
        positions = (mask.cumsum(1) - 1).clamp_min(0)[:, skipped:]
        layers = [layer.repeated(len(new), skipped + width + ROOM) for layer in read_before]
        cache = make_cache(layers)
        logits = self._forward(ids.to(device), mask.to(device), positions.to(device), cache)
        last = self._take(logits, new)
        return _Batch(new, cache, mask.to(device), last, positions[:, -1].to(device) + 1)

    def _beginning(self, request: Request) -> tuple[int, ...]:
        """The tokens of a prompt that are read once for all prompts that have them; none where it has nothing more."""
        size = request.shared
        if not size and tuple(request.prompt[: len(self._prefix)]) == self._prefix:
            size = len(self._prefix)
        return tuple(request.prompt[:size]) if size < len(request.prompt) else ()

    def _layers(self, beginning: tuple[int, ...]) -> list[ColumnLayer]:
        """Keys and values of a beginning, read now or before; none of an empty one."""
        if not beginning:
            return []
        layers = self._beginnings.pop(beginning, None)
        if layers is None:
            ids = torch.tensor([beginning], device=self._model.device)
            cache = make_cache([])
            positions = torch.arange(len(beginning), device=ids.device)[None]
            self._forward(ids, torch.ones_like(ids, dtype=torch.bool), positions, cache)
            layers = list(cache.layers)
        self._beginnings[beginning] = layers
        while len(self._beginnings) > _BEGINNINGS:
            del self._beginnings[next(iter(self._beginnings))]
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

    def _forward(self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Cache) -> torch.Tensor:
        """Logits (B, V) after the last column of `ids` (B, columns); `mask` (B, T) tells which columns are tokens."""
        more: dict[str, Any] = {"position_ids": positions, "logits_to_keep": 1}
        output = self._model(
            input_ids=ids,
            attention_mask=mask.long(),
            past_key_values=cache,
            use_cache=True,
            **{name: value for name, value in more.items() if name in self._takes},
        )
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def _take(self, logits: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
        """The likeliest next tokens (B,), added to the replies that are not done."""
        if self._constraint is not None:
            self._constraint.restrict(logits, requests)
        best = logits.argmax(dim=-1)
        for request, token in zip(requests, best.tolist()):
            if not request.done:
                request.take(token, self._ends)
                if self._enough is not None and not request.done and self._enough(request):
                    request.ended = request.done = True
        return best

    def _halve(self) -> None:
        """After the device ran out of memory: begin again with half the rows."""
        going = [] if self._batch is None else [one for one in self._batch.requests if not one.done]
        self._batch = None
        self._waiting.extendleft(reversed([request.anew() for request in going]))
        if self.rows == 1:
            raise torch.OutOfMemoryError("one prompt and its reply don't fit the device's memory")
        self.rows, self.cells = self.rows // 2, max(1, self.cells // 2)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def fits(model: Any) -> bool:
    """Whether every layer of a model keeps the keys and values of all tokens, which `ContinuousBatch` needs."""
    return all(type(layer) is DynamicLayer for layer in DynamicCache(config=model.config).layers)


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
    layers: list[ColumnLayer] = []
    for number in range(len(batches[0].cache.layers)):
        parts: list[Any] = [batch.cache.layers[number] for batch in batches]
        buffers = parts[0].empty(len(lengths), width + ROOM)
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
        layers.append(column_layer(buffers, width))
    return _Batch(
        [batch.requests[row] for batch, rows in zip(batches, kept) for row in rows],
        make_cache(layers),
        mask,
        torch.cat([batch.last[rows] for batch, rows in zip(batches, kept)]),
        torch.cat([batch.positions[rows] for batch, rows in zip(batches, kept)]),
    )
