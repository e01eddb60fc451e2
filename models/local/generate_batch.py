"""Decoding with `generate` of transformers for what `models.continuous_batch` can't do: beams, encoder-decoders, and
models whose attention forgets. Requests of similar length run together, so that little is padded.
"""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from tripletune.models.local.decoding import CELLS, ROWS, Request


class GenerateBatch:
    """A model and the requests that wait for it; the interface is that of `models.continuous_batch.ContinuousBatch`.

    Args:
        model: A causal or encoder-decoder model of transformers in eval mode.
        ends: Tokens that end a reply.
        pad: The token that prompts are padded with.
        rows: Most requests in one batch; with beams each is as many rows.
        cells: Most rows times tokens of the longest prompt and reply in one batch; one request may have more.
        beams: Beams of beam search; 1 is greedy.
        processors: Makes the logits processors of a batch, which say which tokens may come next.
        enough: Asked after every token where there are no beams; where it says so the reply ends.

    Raises:
        ValueError: rows, cells or beams are below 1.
    """

    def __init__(
        self,
        model: Any,
        ends: Collection[int],
        pad: int,
        rows: int = ROWS,
        cells: int = CELLS,
        beams: int = 1,
        processors: Callable[[], list[Any]] = list,
        enough: Callable[[Request], bool] | None = None,
    ) -> None:
        if min(rows, cells, beams) < 1:
            raise ValueError(f"rows {rows}, cells {cells}, beams {beams}: all must be at least 1")
        self.rows, self.cells, self.beams = rows, cells, beams
        self._model, self._ends, self._pad = model, sorted(ends), pad
        self._processors, self._enough = processors, enough
        self._reads_apart = bool(model.config.is_encoder_decoder)
        own = model.generation_config
        self._settings = GenerationConfig(
            num_beams=beams,
            do_sample=False,
            eos_token_id=self._ends or None,
            pad_token_id=pad,
            bos_token_id=own.bos_token_id,
            decoder_start_token_id=own.decoder_start_token_id,
            use_cache=True,
        )
        self._waiting: deque[Request] = deque()
        self._stopped = False

    def add(self, request: Request) -> None:
        """Let a request wait for its turn; it may be called while `run` works in another thread."""
        self._waiting.append(request)

    def run(self) -> list[Request]:
        """Reply to the oldest request and those that fit it.

        Returns:
            The requests that are done now; none when there is nothing to do.

        Raises:
            torch.OutOfMemoryError: one request alone does not fit the device. What waits is kept.
        """
        while self._waiting and not self._stopped:
            batch = self._next()
            try:
                self._reply(batch)
                return batch
            except torch.OutOfMemoryError:
                self._waiting.extendleft(reversed([request.anew() for request in batch]))
                if len(batch) == 1:
                    raise
                self.rows, self.cells = max(1, len(batch) // 2), max(1, self.cells // 2)
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
        return []

    def stop(self) -> None:
        """Make `run` start no further batch, and one under way without beams end at its next token."""
        self._stopped = True

    def clear(self) -> None:
        """Forget all requests."""
        self._waiting.clear()

    def _next(self) -> list[Request]:
        """The oldest request and those nearest in length, as many as fit."""
        waiting = [self._waiting.popleft() for _ in range(len(self._waiting))]
        oldest = waiting[0]
        alike = [one for one in waiting if one.limit == oldest.limit]
        alike.sort(key=lambda one: (abs(len(one.prompt) - len(oldest.prompt)), one is not oldest))
        batch: list[Request] = []
        longest = 0
        for request in alike[: self.rows]:
            longest = max(longest, len(request.prompt) + request.limit)
            if batch and (len(batch) + 1) * self.beams * longest > self.cells:
                break
            batch.append(request)
        chosen = set(map(id, batch))
        self._waiting.extend(request for request in waiting if id(request) not in chosen)
        return batch

    @torch.inference_mode()
    def _reply(self, batch: Sequence[Request]) -> None:
        start = time.perf_counter()
        device = self._model.device
        width = max(len(request.prompt) for request in batch)
        ids = torch.full((len(batch), width), self._pad)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(batch):
            size = len(request.prompt)
            # A decoder writes on where its prompt ends; an encoder counts positions from the start.
            place = slice(0, size) if self._reads_apart else slice(width - size, width)
            ids[row, place] = torch.tensor(request.prompt)
            mask[row, place] = 1
        # Beams change places while they are written, so they are read at the end.
        stop = [] if self.beams > 1 else [_Written(batch, self._ends, self._enough, lambda: self._stopped)]
        settings = copy.copy(self._settings)
        settings.max_new_tokens = batch[0].limit
        with _without_own_settings(self._model):
            output = self._model.generate(
                input_ids=ids.to(device),
                attention_mask=mask.to(device),
                generation_config=settings,
                logits_processor=LogitsProcessorList(self._processors()),
                stopping_criteria=StoppingCriteriaList(stop),
            )
        # An encoder-decoder gives its start token back, a decoder the prompt.
        written = output[:, 1 if self._reads_apart else width :].tolist()
        seconds = (time.perf_counter() - start) / len(batch)
        for request, row in zip(batch, written):
            for token in [] if stop else row:
                if not request.done:
                    request.take(token, self._ends)
            request.done = True
            request.seconds += seconds


class _Written(StoppingCriteria):
    """Adds every token to its request as it is written, and says which rows are done."""

    def __init__(
        self,
        batch: Sequence[Request],
        ends: Collection[int],
        enough: Callable[[Request], bool] | None,
        stopped: Callable[[], bool],
    ) -> None:
        self.batch, self.ends, self.enough, self.stopped = batch, ends, enough, stopped

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """(B,) whether each row is at its end; `input_ids` is (B, T)."""
        for request, token in zip(self.batch, input_ids[:, -1].tolist()):
            if not request.done:
                request.take(token, self.ends)
                if self.enough is not None and not request.done and self.enough(request):
                    request.ended = request.done = True
        done = [request.done or self.stopped() for request in self.batch]
        return torch.tensor(done, dtype=torch.bool, device=input_ids.device)


@contextmanager
def _without_own_settings(model: Any) -> Iterator[None]:
    """`generate` takes what it is not given from the model's settings, such as a repetition penalty."""
    own, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own
