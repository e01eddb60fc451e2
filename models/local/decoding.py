"""A prompt that waits for its reply, how its tokens are chosen, and decoding with `generate` of transformers.

`GenerateBatch` is for what `models.local.continuous_batch` can't do: beams, encoder-decoders, models whose attention
forgets, and models that are sharded over processes. Requests of similar length run together, so that little is padded.
"""

from __future__ import annotations

import copy
import secrets
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

ROWS = 32
# Token budget of a batch: rows times the tokens of the longest, which is what its keys and values take.
CELLS = 16_384
# Shapes: B rows, T tokens of the longest row, V tokens in the vocabulary.


class Draw:
    """Sampling of one reply, with a random generator of its own: neighbours in the batch don't change it.

    The arg max of log-probabilities plus Gumbel noise is a sample (the Gumbel-max trick).

    Args:
        temperature: Above 0.
        top_p: Nucleus sampling; 1 keeps every token.
        seed: None draws one.
    """

    def __init__(self, temperature: float, top_p: float = 1.0, seed: int | None = None) -> None:
        self._temperature, self._top_p = temperature, top_p
        self._seed = secrets.randbits(63) if seed is None else seed % 2**63
        self._generator: torch.Generator | None = None

    def restart(self) -> None:
        """Draw the same numbers again."""
        self._generator = None

    def __call__(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores (V,) whose arg max is the token that was drawn."""
        if self._generator is None:
            self._generator = torch.Generator(scores.device).manual_seed(self._seed)
        scores = scores.float() / self._temperature
        if self._top_p < 1:
            ordered, order = scores.softmax(-1).sort(dim=-1, descending=True)
            # A token is kept if those before it don't reach top_p yet; so the first always is.
            drop = ordered.cumsum(-1) - ordered >= self._top_p
            scores = scores.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), -torch.inf)
        noise = torch.empty_like(scores).exponential_(generator=self._generator)
        return scores - noise.clamp_min(torch.finfo(noise.dtype).tiny).log()


@dataclass(eq=False, slots=True)
class Request:
    """One prompt and its reply as it is written.

    Attributes:
        prompt: Its tokens; at least one.
        limit: Most tokens of the reply; at least 1.
        shared: How many tokens at the start of the prompt other prompts begin with too, so that they are read once.
        draw: How the reply is sampled; None is greedy.
        criterion: Stopping criterion, asked after every token where there are no beams.
        data: What else the model reads of it, such as graphs.
        tokens: The reply so far, without the token that ends it.
        ended: Whether the model has ended the reply.
        stopped: Whether the stopping criterion has; else it was cut off at the limit.
        done: Whether nothing more will be written.
        abandoned: Set by who no longer waits for it: it is dropped at its next token.
        seconds: Its share of the time: that of each step, divided by the rows under way.

    Raises:
        ValueError: the prompt is empty, or the limit below 1.
    """

    prompt: list[int]
    limit: int
    shared: int = 0
    draw: Draw | None = None
    criterion: Callable[[Request], bool] | None = None
    data: Any = None
    tokens: list[int] = field(default_factory=list)
    ended: bool = False
    stopped: bool = False
    done: bool = False
    abandoned: bool = False
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if not self.prompt or self.limit < 1:
            raise ValueError(f"a request needs a prompt and a limit of at least 1, found {self.limit}")

    def take(self, token: int, ends: Collection[int]) -> None:
        """Add the next token, or end the reply."""
        if token in ends:
            self.ended = self.done = True
            return
        self.tokens.append(token)
        self.done = self.abandoned or len(self.tokens) >= self.limit
        if not self.done and self.criterion is not None and self.criterion(self):
            self.stopped = self.done = True

    def again(self) -> Request:
        """Forget what was written."""
        self.tokens.clear()
        self.ended = self.stopped = self.done = False
        if self.draw is not None:
            self.draw.restart()
        return self


class Constraint(Protocol):
    """Which tokens a reply may go on with, for example those of a grammar."""

    def restrict(self, logits: torch.Tensor, requests: Sequence[Request]) -> None:
        """Set the logits (B, V) of tokens that may not come next to minus infinity, in place."""
        ...


class Decoder(Protocol):
    """A model that replies to requests: `GenerateBatch`, or `ContinuousBatch`."""

    def add(self, request: Request) -> None:
        """Let a request wait for its turn; it may be called while `run` works in another thread."""
        ...

    def run(self) -> list[Request]:
        """Work until a reply is done; gives the requests that are done now, none when there is nothing to do."""
        ...

    def stop(self) -> None:
        """Make `run`, also one under way in another thread, return soon."""
        ...

    def clear(self) -> None:
        """Forget all requests."""
        ...


# What a model reads besides tokens when it reads the prompts of requests: further arguments of its `forward`.
Inputs = Callable[[Sequence[Request]], dict[str, Any]]


def decode(decoder: Decoder, requests: Sequence[Request]) -> None:
    """Write the replies of requests, and wait for them."""
    for request in requests:
        decoder.add(request)
    while decoder.run():
        pass


def choose(logits: torch.Tensor, requests: Sequence[Request], constraint: Constraint | None) -> torch.Tensor:
    """Scores (B, V) whose arg max is the next token of each request that is not done; `logits` are changed."""
    if constraint is not None:
        constraint.restrict(logits, requests)
    for row, request in enumerate(requests):
        if request.draw is not None and not request.done:
            logits[row] = request.draw(logits[row])
    return logits


def context_length(model: Any) -> int | None:
    """Most tokens of prompt and reply together; None where the model sets no bound."""
    if model.config.is_encoder_decoder:
        return None
    length = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return int(length) if length else None


class GenerateBatch:
    """A model and the requests that wait for it; the interface is that of `ContinuousBatch`.

    Args:
        model: A causal or encoder-decoder model of transformers in eval mode.
        ends: Tokens that end a reply.
        pad: The token that prompts are padded with.
        rows: Most requests in one batch; with beams each is as many rows.
        cells: Most rows times tokens of the longest prompt and reply in one batch; one request may have more.
        beams: Beams of beam search; 1 is greedy.
        constraint: Which tokens may come next, where there are no beams; None allows all.
        inputs: What else the model reads with the prompts.
    """

    def __init__(
        self,
        model: Any,
        ends: Collection[int],
        pad: int,
        rows: int = ROWS,
        cells: int = CELLS,
        beams: int = 1,
        constraint: Constraint | None = None,
        inputs: Inputs | None = None,
    ) -> None:
        self.rows, self.cells, self.beams = rows, cells, beams
        self._model, self._ends, self._pad = model, sorted(ends), pad
        self._constraint, self._inputs = constraint, inputs
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
        """As in `Decoder`."""
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
                self._waiting.extendleft(reversed([request.again() for request in batch]))
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
        """As in `Decoder`."""
        self._waiting.clear()

    def _next(self) -> list[Request]:
        """The oldest request and those nearest in length, as many as fit."""
        waiting = [self._waiting.popleft() for _ in range(len(self._waiting))]
        waiting = [one for one in waiting if not one.abandoned] or waiting[:1]
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
        stop = [] if self.beams > 1 else [_Written(batch, self._ends, lambda: self._stopped)]
        settings = copy.copy(self._settings)
        settings.max_new_tokens = batch[0].limit
        with _without_own_settings(self._model):
            output = self._model.generate(
                input_ids=ids.to(device),
                attention_mask=mask.to(device),
                generation_config=settings,
                logits_processor=LogitsProcessorList([] if self.beams > 1 else [_Chosen(batch, self._constraint)]),
                stopping_criteria=StoppingCriteriaList(stop),
                **(self._inputs(batch) if self._inputs is not None else {}),
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


class _Chosen(LogitsProcessor):
    """`choose` for the rows of `generate`."""

    def __init__(self, batch: Sequence[Request], constraint: Constraint | None) -> None:
        self.batch, self.constraint = batch, constraint

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Change (B, V) scores; `input_ids` (B, T) is not looked at."""
        return choose(scores, self.batch, self.constraint)


class _Written(StoppingCriteria):
    """Adds every token to its request as it is written, and says which rows are done."""

    def __init__(self, batch: Sequence[Request], ends: Collection[int], stopped: Callable[[], bool]) -> None:
        self.batch, self.ends, self.stopped = batch, ends, stopped

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """(B,) whether each row is at its end; `input_ids` is (B, T)."""
        for request, token in zip(self.batch, input_ids[:, -1].tolist()):
            if not request.done:
                request.take(token, self.ends)
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
