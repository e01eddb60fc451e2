"""Decoding on this machine: queues of requests, choice of tokens, and transformers' `generate`.

`GenerateBatch` handles cases that `models.local.continuous_batch` cannot: beams, encoder-decoders, limited attention,
sharded models. It batches requests of similar length, to keep padding small.

Tested in `tests/models/local/test_decoders.py`.
"""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from tripletune.core.calls import SetupError
from tripletune.models.local.requests import Request

ROWS = 32
# Token budget of a batch: rows times the tokens of the longest row, which is the size of its keys and values.
CELLS = 16_384
# Shapes: B rows, T tokens of the longest row, V tokens in the vocabulary.

# Sets the logits (B, V) of forbidden next tokens to minus infinity, in place, for example by a grammar.
Constraint = Callable[[torch.Tensor, Sequence[Request]], None]
# Turns the `inputs` of requests, row after row, into arguments of the model's `forward`.
Inputs = Callable[[Sequence[Any]], dict[str, Any]]


class Decoder:
    """A model that replies to requests: a `GenerateBatch` or a `ContinuousBatch`.

    One thread calls `run`; `add` and `stop` may be called from others meanwhile.

    Args:
        ends: End-of-sequence tokens.
        pad: Token for padding.
        rows: Maximum number of requests of a batch.
        cells: Maximum tokens of a batch (rows times the longest row); a single row may have more.
        constraint: Forbids next tokens.
        inputs: Turns other inputs of the model into arguments; these inputs may not be in shared prefixes.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        ends: Collection[int],
        pad: int,
        rows: int = ROWS,
        cells: int = CELLS,
        constraint: Constraint | None = None,
        inputs: Inputs | None = None,
    ) -> None:
        self.rows = rows
        self.cells = cells
        self._model = model
        self._ends = frozenset(ends)
        self._pad = pad
        self._constraint = constraint
        self._inputs = inputs
        # Other threads may append to the first queue; only the thread of `run` touches the second.
        self._arrived: deque[Request] = deque()
        self._waiting: deque[Request] = deque()
        self._stopped = False

    def add(self, request: Request) -> None:
        """Add a request to the queue, also while `run` works in another thread."""
        self._arrived.append(request)

    def run(self) -> list[Request]:
        """Work until a reply is done, and return the finished requests (none if no request waits).

        Raises:
            torch.OutOfMemoryError: A single request does not fit the device. Waiting requests are kept.
        """
        raise NotImplementedError

    def stop(self) -> None:
        """Make `run` return soon, also if it is running in another thread."""
        self._stopped = True

    def clear(self) -> None:
        """Drop all requests without a reply: after an error, the next call must not decode them."""
        self._arrived.clear()
        self._waiting.clear()

    def _queue_arrived(self) -> None:
        """Move the requests that arrived to the queue of `run`, and drop those whose reply nobody waits for."""
        arrived = [self._arrived.popleft() for _ in range(len(self._arrived))]
        queued = [*self._waiting, *arrived]
        self._waiting = deque(request for request in queued if not request.abandoned)

    def _queue_again_at_half_size(self, requests: Sequence[Request], rows: int) -> None:
        """Queue the requests again after the device ran out of memory, and halve rows and cells.

        The smaller size stays for all later batches, since the next ones would hit the same limit.

        Args:
            requests: The unfinished requests of the batch.
            rows: The rows of the batch.
        """
        self._waiting.extendleft(reversed(requests))
        if rows == 1:
            raise torch.OutOfMemoryError("one prompt and its reply don't fit the device's memory")
        self.rows = rows // 2
        self.cells = max(1, self.cells // 2)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def decode(decoder: Decoder, requests: Sequence[Request]) -> None:
    """Generate the replies of requests, and wait for them; each request then holds its tokens."""
    for request in requests:
        decoder.add(request)
    while decoder.run():
        pass


def next_token_scores(logits: torch.Tensor, requests: Sequence[Request], constraint: Constraint | None) -> torch.Tensor:
    """Turn `logits` (B, V), in place, into scores whose arg max is the next token of each unfinished request.

    The constraint comes before sampling, so that a forbidden token is never drawn. Requests that are scored keep a copy
    of their logits.

    Raises:
        SetupError: The logits are not finite, so every reply would be nonsense.
    """
    if not logits.amax(-1).isfinite().all():
        raise SetupError("the model's logits are not finite: the weights are damaged, or their dtype overflows")
    for row, request in enumerate(requests):
        if request.scored and not request.done:
            # A copy of what the model itself says: constraint and sampling change the row.
            request.latest = logits[row].clone()
    if constraint is not None:
        constraint(logits, requests)
    for row, request in enumerate(requests):
        if request.draw is not None and not request.done:
            logits[row] = request.draw(logits[row])
    return logits


class GenerateBatch(Decoder):
    """Reply to requests in batches with `generate`.

    Args:
        beams: Number of beams per reply; 1: greedy or sampled.
        options: Like `arguments`, those of `Decoder`, which checks them.
    """

    def __init__(self, *arguments: Any, beams: int = 1, **options: Any) -> None:
        """Take over from the model's generation settings only what is no choice: its start tokens.

        Sampling and penalties in these settings would change replies by values that nobody set here.
        """
        super().__init__(*arguments, **options)
        self.beams = beams
        # An encoder reads the prompt, and the decoder writes the reply from its own start token.
        self._is_encoder_decoder = bool(self._model.config.is_encoder_decoder)
        model_settings = self._model.generation_config
        self._settings = GenerationConfig(
            num_beams=beams,
            do_sample=False,
            eos_token_id=sorted(self._ends) or None,
            pad_token_id=self._pad,
            bos_token_id=model_settings.bos_token_id,
            decoder_start_token_id=model_settings.decoder_start_token_id,
            use_cache=True,
        )

    def run(self) -> list[Request]:
        """Reply to the oldest request and those batched with it; see `Decoder.run`.

        Without memory for the batch, its unfinished requests start again in smaller batches; `generate` cannot
        continue them.
        """
        while not self._stopped:
            self._queue_arrived()
            if not self._waiting:
                break
            batch = self._take_batch()
            try:
                self._generate_replies(batch)
                return batch
            except torch.OutOfMemoryError:
                done = [request for request in batch if request.done]
                unfinished = [request.restart() for request in batch if not request.done]
                self._queue_again_at_half_size(unfinished, len(batch))
                if done:
                    return done
        return []

    def _take_batch(self) -> list[Request]:
        """Take the oldest request and the requests nearest in length, as many as fit.

        The oldest is always taken, so that a request whose length is rare does not wait forever.
        """
        oldest = self._waiting[0]

        def distance(request: Request) -> tuple[int, bool]:
            """The difference in length; the oldest request comes first among equals."""
            return abs(len(request.prompt) - len(oldest.prompt)), request is not oldest

        # `generate` has one limit for all rows.
        candidates = sorted((request for request in self._waiting if request.limit == oldest.limit), key=distance)
        batch: list[Request] = []
        longest = 0
        for request in candidates[: self.rows]:
            longest = max(longest, len(request.prompt) + request.limit)
            if batch and (len(batch) + 1) * self.beams * longest > self.cells:
                break
            batch.append(request)
        self._waiting = deque(request for request in self._waiting if request not in batch)
        return batch

    @torch.inference_mode()
    def _generate_replies(self, batch: Sequence[Request]) -> None:
        """Generate the replies of a batch with one call of `generate`.

        Without beams, `_call_generate` has given the requests their tokens already; here they only end. So a request
        that was stopped early keeps what it had.
        """
        start = time.perf_counter()
        width = max(len(request.prompt) for request in batch)
        ids = torch.full((len(batch), width), self._pad)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(batch):
            size = len(request.prompt)
            if self._is_encoder_decoder:
                # An encoder counts positions from the start.
                place = slice(0, size)
            else:
                # A decoder continues after the prompt's end.
                place = slice(width - size, width)
            ids[row, place] = torch.tensor(request.prompt)
            mask[row, place] = 1
        output = self._call_generate(batch, ids, mask)
        # The output begins with the start token (encoder-decoder) or with the prompt (decoder).
        reply_start = 1 if self._is_encoder_decoder else width
        rows = output[:, reply_start:].tolist()
        seconds = (time.perf_counter() - start) / len(batch)
        for request, row in zip(batch, rows, strict=True):
            if self.beams > 1:
                # Beams change rows during generation, so their tokens are read at the end.
                for token in row:
                    if not request.done:
                        request.append(token, self._ends)
            request.done = True
            request.seconds += seconds

    def _call_generate(self, batch: Sequence[Request], ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Call `generate` for padded prompts (B, T); without beams, the requests get each token as it is chosen.

        Requests of a batch share the limit of the first. The model's own generation settings are replaced for the time
        of the call, since they would change replies by values that nobody set here.
        """
        model = self._model
        settings = copy.copy(self._settings)
        settings.max_new_tokens = batch[0].limit
        more: dict[str, Any] = {}
        if self._inputs is not None:
            values: list[Any] = []
            for request in batch:
                values += request.inputs.values()
            more |= self._inputs(values)
        if self.beams == 1:
            choice = LogitsProcessorList([lambda _, scores: next_token_scores(scores, batch, self._constraint)])
            end = StoppingCriteriaList([lambda ids, *_, **__: self._append_newest_tokens(batch, ids)])
            more |= {"logits_processor": choice, "stopping_criteria": end}
        # `generate` takes missing settings, such as a repetition penalty, from the model.
        model_settings = model.generation_config
        model.generation_config = GenerationConfig()
        try:
            return model.generate(
                input_ids=ids.to(model.device), attention_mask=mask.to(model.device), generation_config=settings, **more
            )
        finally:
            model.generation_config = model_settings

    def _append_newest_tokens(self, batch: Sequence[Request], ids: torch.Tensor) -> torch.Tensor:
        """Add the newest tokens of `ids` (B, T) to the replies; return whether each row has ended, (B,).

        `generate` goes on until all rows have ended, and writes padding into the others meanwhile, which is not added.
        """
        for request, token in zip(batch, ids[:, -1].tolist(), strict=True):
            if not request.done:
                request.append(token, self._ends)
        return torch.tensor([request.done or self._stopped for request in batch], device=ids.device)
