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

Tested in `tests/models/local/test_decoders.py`.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from tripletune.core import libraries
from tripletune.models.local import ROWS, Decoder, GenerateBatch, next_token_scores
from tripletune.models.local.buffers import BufferShape, PromptLayer, RowSizes, StepLayer, zero_buffer
from tripletune.models.local.fitting import can_batch_continuously
from tripletune.models.local.requests import Request, common_prefix_length

libraries.check_use("decoding")

# Maximum prompt tokens per forward pass.
_READ_AT_ONCE = 4096
# Maximum padding tokens in one pass over prompts; more padding costs more than another pass.
_PADDED = 64
# Minimum number of columns that are added to full buffers, as room for new tokens before the next copy.
_ROOM = 64
# Shapes: B rows, T columns (tokens of the longest row), V tokens in the vocabulary, H heads, D numbers per head.


@dataclass(eq=False)
class _KeptText:
    """A text that was read.

    Attributes:
        model_inputs: T tokens, or other inputs at the places of their tokens; see `Request.model_inputs`.
        layers: Each layer's keys and values, both (H, T, D).
    """

    model_inputs: list[Any]
    layers: list[list[torch.Tensor]]


class _BegunRequest(NamedTuple):
    """A request whose first tokens were read before.

    Attributes:
        request: The request.
        kept: The text that it continues; None: nothing is read yet.
        size: Number of tokens that it takes from `kept`.
    """

    request: Request
    kept: _KeptText | None
    size: int

    @property
    def unread(self) -> list[int]:
        """The tokens that the model must still read."""
        return self.request.sequence[self.size :]


class ContinuousBatch(Decoder):
    """Reply to requests with a causal language model that `can_batch_continuously`; see `Decoder`."""

    def __init__(self, model: PreTrainedModel, *arguments: Any, **options: Any) -> None:
        super().__init__(model, *arguments, **options)
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        # What the family's own `forward` takes; training replaces that of the instance.
        self._takes = set(inspect.signature(type(inner).forward).parameters)
        self._cache_argument = libraries.cache_argument()
        # Running requests, one per row of the buffers, which hold keys and values (B, H, T, D) of each layer.
        self._running: list[Request] = []
        self._done: list[Request] = []
        self._drop_all_state()

    @torch.inference_mode()
    def run(self) -> list[Request]:
        """Work until a reply is done; see `Decoder.run`.

        Without memory, all keys and values are dropped. Running requests are read again with their replies so far.
        """
        while not self._done and not self._stopped:
            self._queue_arrived()
            if not self._waiting and not self._running:
                break
            try:
                if self._should_admit():
                    self._admit_waiting()
                self._decode_step()
            except torch.OutOfMemoryError:
                unfinished = [request.keep_or_restart() for request in self._running if not request.done]
                self._drop_all_state()
                self._queue_again_at_half_size(unfinished, self.rows)
        done = self._done
        self._done = []
        return done

    def _should_admit(self) -> bool:
        """Whether waiting prompts are read now; a batch that runs waits until an eighth of its rows is free.

        Reading a few prompts together takes hardly longer than reading one.
        """
        if not self._waiting:
            return False
        if not self._running:
            return True
        free = self.rows - len(self._running)
        return free >= max(1, self.rows // 8) and self._count_fitting() > 0

    def clear(self) -> None:
        """Drop all requests."""
        super().clear()
        self._drop_all_state()
        self._done = []

    def _drop_all_state(self) -> None:
        """Drop the running requests, the kept texts and all buffers, at the start and when memory has run out."""
        # In order of use; the most recently used is last.
        self._kept: list[_KeptText] = []
        self._running = []
        # Rows and columns of the buffers, which are created when the first prompt is read.
        self._shape = BufferShape(0, 0)
        layers = DynamicCache(config=self._model.config).layers
        self._buffers: list[list[torch.Tensor]] = [[] for _ in layers]

    def _count_fitting(self) -> int:
        """The number of waiting requests that may join the batch; at least one if the batch is empty.

        Requests join in the order of their arrival: if a later, shorter one were preferred, a long one might never fit.
        """
        longest = max((len(request.sequence) for request in self._running), default=0)
        count = unread = 0
        for request in islice(self._waiting, self.rows - len(self._running)):
            longest = max(longest, len(request.sequence))
            unread += len(request.sequence) - max(request.shared, self._with_longest_kept(request).size)
            rows = len(self._running) + count + 1
            exceeds_memory = rows * (longest + _ROOM) > self.cells
            exceeds_pass = unread > _READ_AT_ONCE
            if rows > 1 and (exceeds_memory or exceeds_pass):
                break
            count += 1
        return count

    def _admit_waiting(self) -> None:
        """Read the waiting prompts that fit, and choose the first token of each reply.

        Prompts of similar length are read together; a pass over all of them would compute mostly padding.
        """
        start = time.perf_counter()
        new = [self._waiting.popleft() for _ in range(self._count_fitting())]
        rows = len(self._running) + len(new)
        try:
            for request in new:
                prefix = request.prompt[: request.shared]
                is_read = self._with_longest_kept(request).size >= len(prefix)
                # A prompt that is nothing but the prefix is read as it is.
                if len(prefix) < len(request.prompt) and not is_read:
                    # Read the shared prefix once, as a request of its own that is kept.
                    self._read_group([_BegunRequest(Request(prefix, 1, grows=True), None, 0)], rows)
                    self._done.pop()
            for group in _group_by_length([self._take_on(request) for request in new]):
                self._read_group(group, rows)
        except torch.OutOfMemoryError:
            # `run` puts the requests that were already read back.
            not_read = [
                request.keep_or_restart() for request in new if not request.done and request not in self._running
            ]
            self._waiting.extendleft(reversed(not_read))
            raise
        for request in new:
            request.seconds += (time.perf_counter() - start) / len(new)

    def _read_group(self, group: Sequence[_BegunRequest], rows: int) -> None:
        """Read the new tokens of requests, and choose each next token; `rows` requests will finally be running.

        The columns of the pass are the tokens that were read before, which end at column `past`, and the new tokens,
        which end at the last column; each row is padded before and between them. Positions count a row's own tokens, so
        padding changes none.

        The order matters: buffers get room before kept keys are copied into them, and requests join `_running` after
        the pass, because their rows are counted from its end.
        """
        past = max(begun.size for begun in group)
        ids, mask = self._aligned_tokens(group, past)
        positions = (mask.cumsum(1) - 1).clamp_min(0)[:, past:]
        self._make_room(rows, max(len(begun.request.sequence) for begun in group))
        row_sizes: list[RowSizes] = []
        for row, begun in enumerate(group, len(self._running)):
            if begun.kept is not None:
                self._copy_kept(begun.kept, begun.size, row)
            row_sizes.append(RowSizes(row, begun.size, len(begun.request.sequence)))
        cache = Cache(layers=[PromptLayer(buffers, self._shape, row_sizes, past) for buffers in self._buffers])
        more = self._unread_inputs(group)
        device = self._model.device
        logits = self._next_logits(ids.to(device), mask.to(device), positions.to(device), cache, **more)
        self._running += [begun.request for begun in group]
        self._append_tokens(logits)

    def _aligned_tokens(self, group: Sequence[_BegunRequest], past: int) -> tuple[torch.Tensor, torch.Tensor]:
        """New tokens of requests (B, W), on the right, and which columns hold tokens (B, `past` + W).

        `_read_group` says how the columns lie.
        """
        width = max(len(begun.unread) for begun in group)
        ids = torch.full((len(group), width), self._pad)
        mask = torch.zeros((len(group), past + width), dtype=torch.bool)
        for row, begun in enumerate(group):
            unread = begun.unread
            ids[row, width - len(unread) :] = torch.tensor(unread)
            mask[row, past - begun.size : past] = True
            mask[row, past + width - len(unread) :] = True
        return ids, mask

    def _unread_inputs(self, group: Sequence[_BegunRequest]) -> dict[str, Any]:
        """Arguments of `forward` for the other inputs (such as graphs) among the new tokens of requests."""
        if self._inputs is None:
            return {}
        unread = []
        for begun in group:
            unread += [value for place, value in begun.request.inputs.items() if place >= begun.size]
        return self._inputs(unread)

    def _copy_kept(self, kept: _KeptText, size: int, row: int) -> None:
        """Copy keys and values of the first `size` tokens of a kept text into a row of the buffers."""
        for buffers, kept_layer in zip(self._buffers, kept.layers, strict=True):
            for buffer, kept_states in zip(buffers, kept_layer, strict=True):
                buffer[row, :, :size] = kept_states[:, :size]

    def _make_room(self, rows: int, columns: int) -> None:
        """Copy the running rows, which are the first ones, to larger buffers if the buffers are too small."""
        if rows <= self._shape.rows and columns <= self._shape.columns:
            return
        count = len(self._running)
        longest = max((len(request.sequence) for request in self._running), default=0)
        # Keys and values of the newest token are not computed yet, so its column may still be missing.
        held = min(longest, self._shape.columns)
        columns = max(columns, held)
        # Double the columns where the budget of cells allows it, so that buffers are seldom copied.
        columns = max(columns + _ROOM, min(2 * columns, self.cells // rows))
        rows = max(rows, min(self._shape.rows, self.cells // columns))
        self._shape = BufferShape(rows, columns)
        for buffers in self._buffers:
            for place, old in enumerate(buffers):
                buffers[place] = zero_buffer(old, rows, columns)
                buffers[place][:count, :, :held] = old[:count, :, :held]

    def _with_longest_kept(self, request: Request) -> _BegunRequest:
        """A request with the kept text that has its longest prefix, whose keys and values are copied.

        The last token is read again, because its pass gives the logits of the first token of the reply.
        """
        wanted = request.model_inputs[:-1]
        longest = _BegunRequest(request, None, 0)
        for kept in self._kept:
            size = common_prefix_length(kept.model_inputs, wanted)
            if size > longest.size:
                longest = _BegunRequest(request, kept, size)
        return longest

    def _take_on(self, request: Request) -> _BegunRequest:
        """Return a request with its kept prefix; the prefix is dropped from the kept ones if the request extends it.

        A prefix that stays moves to the end of the kept texts, because the first ones are dropped when memory is short.
        """
        begun = self._with_longest_kept(request)
        if begun.kept is not None:
            # The request itself is kept later if it grows, and then holds the whole prefix.
            extends_it = request.grows and begun.size == len(begun.kept.model_inputs) and begun.size != request.shared
            self._kept.remove(begun.kept)
            if not extends_it:
                self._kept.append(begun.kept)
        return begun

    def _decode_step(self) -> None:
        """Choose the next token of all running replies, the first rows of the buffers, in one forward pass."""
        going = list(self._running)
        if not going:
            return
        start = time.perf_counter()
        device = self._model.device
        ids = torch.tensor([[request.tokens[-1]] for request in going], device=device)
        # Keys and values of the newest token are not computed yet.
        places = torch.tensor([len(request.sequence) - 1 for request in going], device=device)
        width = max(len(request.sequence) for request in going)
        if device.type == "cpu":
            # Add an unused column: transformers drops a mask that hides nothing, and without a mask torch's kernel
            # takes six times as long in bfloat16 if heads share keys.
            width += 1
        self._make_room(len(going), width)
        cache = Cache(layers=[StepLayer(buffers, places, width) for buffers in self._buffers])
        mask = torch.arange(width, device=device)[None] <= places[:, None]
        self._append_tokens(self._next_logits(ids, mask, places[:, None], cache))
        for request in going:
            request.seconds += (time.perf_counter() - start) / len(going)

    def _next_logits(
        self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Cache, **more: Any
    ) -> torch.Tensor:
        """Compute logits (B, V) after the last column of `ids` (B, columns); `mask` (B, T) is true for tokens.

        Not every family takes positions, or computes logits of only some columns. `more` are other inputs, as graphs.
        """
        inputs: dict[str, Any] = {self._cache_argument: cache, **more}
        if "position_ids" in self._takes:
            inputs["position_ids"] = positions
        if "logits_to_keep" in self._takes:
            inputs["logits_to_keep"] = 1
        output = self._model(input_ids=ids, attention_mask=mask.long(), use_cache=True, **inputs)
        return output.logits[:, -1].float()

    def _append_tokens(self, logits: torch.Tensor) -> None:
        """Add the next token to each of the last B running replies; those that end leave; `logits` is (B, V).

        A reply that leaves may be kept as a prefix for later prompts; the oldest kept ones go when they hold more than
        `cells` tokens together.
        """
        first = len(self._running) - len(logits)
        tokens = next_token_scores(logits, self._running[first:], self._constraint).argmax(dim=-1).tolist()
        # Go backwards, so that a row that moves already has its token.
        for row in reversed(range(first, len(self._running))):
            request = self._running[row]
            # Without the new token, whose keys and values are not computed yet.
            read = request.model_inputs
            request.append(tokens[row - first], self._ends)
            if request.done:
                if request.grows:
                    self._keep_row(row, read)
                self._done.append(request)
                self._free_row(row)
        while sum(len(kept.model_inputs) for kept in self._kept) > self.cells:
            del self._kept[0]

    def _keep_row(self, row: int, read: list[Any]) -> None:
        """Keep keys and values of the tokens that a row has read, for later prompts that continue them."""
        layers = []
        for buffers in self._buffers:
            layers.append([buffer[row, :, : len(read)].clone() for buffer in buffers])
        self._kept.append(_KeptText(read, layers))

    def _free_row(self, row: int) -> None:
        """Drop the request of a row; the last row takes its place, so that the running rows stay the first ones."""
        last = self._running.pop()
        if row == len(self._running):
            return
        self._running[row] = last
        for buffer in chain(*self._buffers):
            buffer[row, :, : len(last.sequence)] = buffer[len(self._running), :, : len(last.sequence)]


def make_decoder(
    model: PreTrainedModel, ends: Collection[int], pad: int, rows: int = ROWS, beams: int = 1, **more: Any
) -> Decoder:
    """Create the decoder for a model: `ContinuousBatch` if it can run the model, else `GenerateBatch`.

    `more` are other arguments of `Decoder`, which checks them.
    """
    if beams == 1 and can_batch_continuously(model):
        return ContinuousBatch(model, ends, pad, rows, **more)
    return GenerateBatch(model, ends, pad, max(1, rows // beams), beams=beams, **more)


def _group_by_length(requests: Sequence[_BegunRequest]) -> list[list[_BegunRequest]]:
    """Group requests with a similar number of unread tokens, longest first, to keep padding small.

    A group is read in one pass, so a new group is begun where its padding would cost more than another pass.
    """
    groups: list[list[_BegunRequest]] = []
    longest = padded = 0
    for begun in sorted(requests, key=lambda begun: -len(begun.unread)):
        unread = len(begun.unread)
        padded += longest - unread
        if not groups or padded > _PADDED:
            groups.append([])
            longest = unread
            padded = 0
        groups[-1].append(begun)
    return groups
