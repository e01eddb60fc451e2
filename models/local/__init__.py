"""Decoding on this machine: waiting prompts, choice of tokens, and transformers' `generate`.

`GenerateBatch` handles cases that `models.local.continuous_batch` cannot: beams, encoder-decoders, limited attention,
sharded models. It batches requests of similar length, to keep padding small.
"""

from __future__ import annotations

import copy
import secrets
import time
import zlib
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from tripletune.core.calls import Completion, Sampling, SetupError

ROWS = 32
# Token budget of a batch: rows times the tokens of the longest row, which is the size of its keys and values.
CELLS = 16_384
# Shapes: B rows, T tokens of the longest row, V tokens in the vocabulary.


class Draw:
    """Sample one reply with its own random generator, so that the rest of the batch has no influence.

    The arg max of log-probabilities plus Gumbel noise is a sample (Gumbel-max trick). The default seed is random.
    """

    def __init__(self, temperature: float, top_p: float = 1.0, seed: int | None = None) -> None:
        self._temperature, self._top_p = temperature, top_p
        self._seed = secrets.randbits(63) if seed is None else seed % 2**63
        self._generator: torch.Generator | None = None

    @classmethod
    def of(cls, sampling: Sampling, prompt: list[int]) -> Draw | None:
        """The sampling of the reply to a prompt, or None for greedy; prompts draw different numbers from one seed."""
        seed = sampling.seed if sampling.seed is None else zlib.crc32(repr((sampling.seed, prompt)).encode())
        return cls(sampling.temperature, sampling.top_p, seed) if sampling.temperature else None

    def restart(self) -> None:
        """Restart the random generator, so that it draws the same numbers again."""
        self._generator = None

    def __call__(self, scores: torch.Tensor) -> torch.Tensor:
        """Return scores (V,) whose arg max is the sampled token."""
        if self._generator is None:
            self._generator = torch.Generator(scores.device).manual_seed(self._seed)
        scores = scores.float() / self._temperature
        if self._top_p < 1:
            ordered, order = scores.softmax(-1).sort(dim=-1, descending=True)
            # A token is kept if the tokens before it don't reach top_p yet, so the first token is always kept.
            drop = ordered.cumsum(-1) - ordered >= self._top_p
            scores = scores.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), -torch.inf)
        noise = torch.empty_like(scores).exponential_(generator=self._generator)
        return scores - noise.clamp_min(torch.finfo(noise.dtype).tiny).log()


@dataclass(eq=False, slots=True)
class Request:
    """One prompt and its growing reply.

    Attributes:
        shared: Number of tokens at the start that other prompts share; they are read once.
        criterion: Stopping criterion, called after every token unless there are beams.
        inputs: Other inputs of the model, such as graphs, by position in the prompt.
        grows: Whether later prompts may continue this prompt or its reply, so that keys and values are kept.
        tokens: The reply so far, without the end-of-sequence token.
        end: The end-of-sequence token, if the model has ended the reply.
        stopped: Whether the stopping criterion ended the reply.
        abandoned: Set when nobody waits for the reply any more; the request is dropped at its next token.
        seconds: The request's share of the time of its steps.
    """

    prompt: list[int]
    limit: int
    shared: int = 0
    draw: Draw | None = None
    criterion: Callable[[Request], bool] | None = None
    inputs: dict[int, Any] = field(default_factory=dict)
    grows: bool = False
    data: Any = None
    tokens: list[int] = field(default_factory=list)
    end: int | None = None
    stopped: bool = False
    done: bool = False
    abandoned: bool = False
    seconds: float = 0.0

    def take(self, token: int, ends: Collection[int]) -> None:
        """Add the next token, or end the reply."""
        if token in ends:
            self.end, self.done = token, True
            return
        self.tokens.append(token)
        self.done = self.abandoned or len(self.tokens) >= self.limit
        if not self.done and self.criterion is not None and self.criterion(self):
            self.stopped = self.done = True

    @property
    def sequence(self) -> list[int]:
        """All tokens so far, of the prompt and the reply."""
        return self.prompt + self.tokens

    @property
    def read(self) -> list[Any]:
        """Everything that the model reads: `sequence`, with `inputs` at their positions."""
        whole: list[Any] = self.sequence
        for place, what in self.inputs.items():
            whole[place] = what
        return whole

    def completion(self, text: str) -> Completion:
        """The reply and its cost; `text` is the decoded reply."""
        return Completion(
            text=text,
            prompt_tokens=len(self.prompt),
            completion_tokens=len(self.tokens) + (self.end is not None),
            seconds=self.seconds,
            finish_reason="length" if self.end is None and not self.stopped else "stop",
        )

    def resume(self) -> Request:
        """Keep the reply so far, to read it again with the prompt; a sampled reply starts again."""
        return self if self.draw is None and not self.done else self.again()

    def again(self) -> Request:
        """Delete the reply so far."""
        self.tokens.clear()
        self.end, self.stopped, self.done = None, False, False
        if self.draw is not None:
            self.draw.restart()
        return self


# Sets the logits (B, V) of forbidden next tokens to minus infinity, in place, for example by a grammar.
Constraint = Callable[[torch.Tensor, Sequence[Request]], None]
# Turns the `inputs` of requests, row after row, into arguments of the model's `forward`.
Inputs = Callable[[Sequence[Any]], dict[str, Any]]


class Decoder:
    """A model that replies to requests: a `GenerateBatch` or a `ContinuousBatch`.

    Args:
        cells: Maximum tokens of a batch (rows times the longest row); a single row may have more.
        inputs: Turns other inputs of the model into arguments; these inputs may not be in shared prefixes.
    """

    def __init__(
        self,
        model: Any,
        ends: Collection[int],
        pad: int,
        rows: int = ROWS,
        cells: int = CELLS,
        constraint: Constraint | None = None,
        inputs: Inputs | None = None,
    ) -> None:
        self.rows, self.cells = rows, cells
        self._model, self._ends, self._pad = model, frozenset(ends), pad
        self._constraint, self._inputs = constraint, inputs
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
        """Drop all requests."""
        self._arrived.clear()
        self._waiting.clear()

    def _collect(self) -> None:
        arrived = [self._arrived.popleft() for _ in range(len(self._arrived))]
        self._waiting = deque(one for one in (*self._waiting, *arrived) if not one.abandoned)

    def _halve(self, requests: Sequence[Request], rows: int) -> None:
        """Queue the requests again after the device ran out of memory, and halve rows and cells."""
        self._waiting.extendleft(reversed(requests))
        if rows == 1:
            raise torch.OutOfMemoryError("one prompt and its reply don't fit the device's memory")
        self.rows, self.cells = rows // 2, max(1, self.cells // 2)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def decode(decoder: Decoder, requests: Sequence[Request]) -> None:
    """Generate the replies of requests, and wait for them."""
    for request in requests:
        decoder.add(request)
    while decoder.run():
        pass


def choose(logits: torch.Tensor, requests: Sequence[Request], constraint: Constraint | None) -> torch.Tensor:
    """Return scores (B, V) whose arg max is the next token of each unfinished request; `logits` are changed."""
    if not logits.amax(-1).isfinite().all():
        raise SetupError("the model's logits are not finite: the weights are damaged, or their dtype overflows")
    if constraint is not None:
        constraint(logits, requests)
    for row, request in enumerate(requests):
        if request.draw is not None and not request.done:
            logits[row] = request.draw(logits[row])
    return logits


class GenerateBatch(Decoder):
    """Reply to requests in batches with `generate`, also with beams; see `Decoder`."""

    def __init__(self, *arguments: Any, beams: int = 1, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.beams = beams
        self._reads_apart = bool(self._model.config.is_encoder_decoder)
        own = self._model.generation_config
        self._settings = GenerationConfig(
            num_beams=beams,
            do_sample=False,
            eos_token_id=sorted(self._ends) or None,
            pad_token_id=self._pad,
            bos_token_id=own.bos_token_id,
            decoder_start_token_id=own.decoder_start_token_id,
            use_cache=True,
        )

    def run(self) -> list[Request]:
        """Reply to the oldest request and those batched with it; see `Decoder.run`."""
        while not self._stopped:
            self._collect()
            if not self._waiting:
                break
            batch = self._next()
            try:
                self._reply(batch)
                return batch
            except torch.OutOfMemoryError:
                self._halve([request.again() for request in batch if not request.done], len(batch))
                if done := [request for request in batch if request.done]:
                    return done
        return []

    def _next(self) -> list[Request]:
        """Take the oldest request and the requests nearest in length, as many as fit."""
        oldest = self._waiting[0]
        alike = [one for one in self._waiting if one.limit == oldest.limit]
        alike.sort(key=lambda one: (abs(len(one.prompt) - len(oldest.prompt)), one is not oldest))
        batch: list[Request] = []
        longest = 0
        for request in alike[: self.rows]:
            longest = max(longest, len(request.prompt) + request.limit)
            if batch and (len(batch) + 1) * self.beams * longest > self.cells:
                break
            batch.append(request)
        self._waiting = deque(request for request in self._waiting if request not in batch)
        return batch

    @torch.inference_mode()
    def _reply(self, batch: Sequence[Request]) -> None:
        start = time.perf_counter()
        model = self._model
        width = max(len(request.prompt) for request in batch)
        ids = torch.full((len(batch), width), self._pad)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(batch):
            size = len(request.prompt)
            # A decoder continues after the prompt's end; an encoder counts positions from the start.
            place = slice(0, size) if self._reads_apart else slice(width - size, width)
            ids[row, place] = torch.tensor(request.prompt)
            mask[row, place] = 1
        settings = copy.copy(self._settings)
        settings.max_new_tokens = batch[0].limit
        more: dict[str, Any] = {}
        if self._inputs is not None:
            more |= self._inputs([what for request in batch for what in request.inputs.values()])
        if self.beams == 1:
            # Beams change rows during generation, so they are read at the end.
            choice = LogitsProcessorList([lambda _, scores: choose(scores, batch, self._constraint)])
            end = StoppingCriteriaList([lambda ids, *_, **__: self._take(batch, ids)])
            more |= {"logits_processor": choice, "stopping_criteria": end}
        # `generate` takes missing settings, such as a repetition penalty, from the model.
        own, model.generation_config = model.generation_config, GenerationConfig()
        try:
            output = model.generate(
                input_ids=ids.to(model.device), attention_mask=mask.to(model.device), generation_config=settings, **more
            )
        finally:
            model.generation_config = own
        # The output begins with the start token (encoder-decoder) or with the prompt (decoder).
        written = output[:, 1 if self._reads_apart else width :].tolist()
        seconds = (time.perf_counter() - start) / len(batch)
        for request, row in zip(batch, written):
            for token in row if self.beams > 1 else []:
                if not request.done:
                    request.take(token, self._ends)
            request.done = True
            request.seconds += seconds

    def _take(self, batch: Sequence[Request], ids: torch.Tensor) -> torch.Tensor:
        """Add the newest tokens of `ids` (B, T) to the replies; return whether each row has ended, (B,)."""
        for request, token in zip(batch, ids[:, -1].tolist()):
            if not request.done:
                request.take(token, self._ends)
        return torch.tensor([request.done or self._stopped for request in batch], device=ids.device)
