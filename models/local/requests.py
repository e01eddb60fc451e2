"""A prompt with its growing reply, and the random numbers of a sampled reply.

Shapes: V tokens in the vocabulary.

Tested in `tests/models/local/test_decoders.py`.
"""

from __future__ import annotations

import secrets
import zlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch

from tripletune.core.calls import Completion, Sampling, TokenScores


class Draw:
    """Sample one reply with its own random generator, so that the rest of the batch has no influence.

    The arg max of log-probabilities plus Gumbel noise is a sample (Gumbel-max trick). The default seed is random.
    """

    def __init__(self, temperature: float, top_p: float = 1.0, seed: int | None = None) -> None:
        self._temperature = temperature
        self._top_p = top_p
        if seed is None:
            self._seed = secrets.randbits(63)
        else:
            self._seed = seed % 2**63
        self._generator: torch.Generator | None = None

    @classmethod
    def of(cls, sampling: Sampling, prompt: list[int]) -> Draw | None:
        """The sampling of the reply to a prompt, or None for greedy; prompts draw different numbers from one seed.

        With the same numbers for all prompts of a run, unlucky draws would hit all of them alike.
        """
        if not sampling.temperature:
            return None
        seed = sampling.seed
        if seed is not None:
            seed = zlib.crc32(repr((seed, prompt)).encode())
        return cls(sampling.temperature, sampling.top_p, seed)

    def restart(self) -> None:
        """Restart the random generator, so that it draws the same numbers again."""
        self._generator = None

    def __call__(self, scores: torch.Tensor) -> torch.Tensor:
        """Return scores (V,) whose arg max is the sampled token.

        The generator is made at the first call, since only the scores tell its device, and goes on from token to token.
        """
        if self._generator is None:
            self._generator = torch.Generator(scores.device).manual_seed(self._seed)
        scores = scores.float() / self._temperature
        if self._top_p < 1:
            ordered, order = scores.softmax(-1).sort(dim=-1, descending=True)
            # A token is kept if the tokens before it don't reach top_p yet, so the first token is always kept.
            drop = ordered.cumsum(-1) - ordered >= self._top_p
            scores = scores.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), -torch.inf)
        # Minus the logarithm of an exponential number is Gumbel noise; a number of 0 would make it infinite.
        noise = torch.empty_like(scores).exponential_(generator=self._generator)
        return scores - noise.clamp_min(torch.finfo(noise.dtype).tiny).log()


@dataclass(eq=False, slots=True)
class Request:
    """One prompt and its growing reply.

    Attributes:
        prompt: The prompt's tokens.
        limit: Maximum number of tokens of the reply.
        shared: Number of tokens at the start that other prompts share; they are read once.
        draw: How tokens are sampled; None: greedily.
        criterion: Stopping criterion, called after every token unless there are beams.
        inputs: Other inputs of the model, such as graphs, by position in the prompt.
        grows: Whether later prompts may continue this prompt or its reply, so that keys and values are kept.
        schema: JSON schema, as JSON text, that a grammar keeps the reply to.
        scored: Whether the tokens' log-probabilities and margins are noted; see `core.calls.TokenScores`.
        data: Anything that the caller wants back with the reply.
        tokens: The reply so far, without the end-of-sequence token.
        end: The end-of-sequence token, if the model has ended the reply.
        stopped: Whether the stopping criterion ended the reply.
        done: Whether the reply is finished.
        abandoned: Set when nobody waits for the reply any more; the request is dropped at its next token.
        seconds: The request's share of the time of its steps.
        latest: The logits (V,) from which the next token of a scored request is chosen, before sampling.
        logprobs: The log-probability of each token of a scored reply.
        margins: The difference of the two largest log-probabilities at each token of a scored reply.
    """

    prompt: list[int]
    limit: int
    shared: int = 0
    draw: Draw | None = None
    criterion: Callable[[Request], bool] | None = None
    inputs: dict[int, Any] = field(default_factory=dict)
    grows: bool = False
    schema: str | None = None
    scored: bool = False
    data: Any = None
    tokens: list[int] = field(default_factory=list)
    end: int | None = None
    stopped: bool = False
    done: bool = False
    abandoned: bool = False
    seconds: float = 0.0
    latest: torch.Tensor | None = None
    logprobs: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)

    def append(self, token: int, ends: Collection[int]) -> None:
        """Add the next token, or end the reply.

        The limit is checked before the criterion, which may decode the whole reply.
        """
        if token in ends:
            self.end = token
            self.done = True
            return
        self.tokens.append(token)
        if self.latest is not None:
            best, second = self.latest.topk(2).values
            logprob = self.latest[token] - self.latest.logsumexp(-1)
            self.logprobs.append(float(logprob))
            self.margins.append(float(best - second))
            self.latest = None
        self.done = self.abandoned or len(self.tokens) >= self.limit
        if not self.done and self.criterion is not None and self.criterion(self):
            self.stopped = True
            self.done = True

    @property
    def sequence(self) -> list[int]:
        """All tokens so far, of the prompt and the reply."""
        return self.prompt + self.tokens

    @property
    def model_inputs(self) -> list[Any]:
        """Everything that the model reads: `sequence`, with `inputs` at their positions."""
        whole: list[Any] = self.sequence
        for place, value in self.inputs.items():
            whole[place] = value
        return whole

    def completion(self, text: str) -> Completion:
        """The reply and its cost; `text` is the decoded reply.

        The end token counts as written, as servers count it. "length" tells callers that a reply may lack its end.
        """
        has_ended = self.end is not None
        return Completion(
            text=text,
            prompt_tokens=len(self.prompt),
            completion_tokens=len(self.tokens) + has_ended,
            seconds=self.seconds,
            finish_reason="stop" if has_ended or self.stopped else "length",
            scores=TokenScores.of(self.logprobs, self.margins),
        )

    def keep_or_restart(self) -> Request:
        """Keep the reply so far, to read it again with the prompt; restart a sampled reply. Return the request itself.

        The generator of a sampled reply may have drawn a token that was lost with the batch, so the reply would no
        longer be the one of its seed.
        """
        if self.done or self.draw is not None:
            return self.restart()
        return self

    def restart(self) -> Request:
        """Delete the reply so far, begin its random numbers again, and return the request itself.

        A repeated request thus replies alike.
        """
        self.tokens.clear()
        self.logprobs.clear()
        self.margins.clear()
        self.latest = None
        self.end = None
        self.stopped = False
        self.done = False
        if self.draw is not None:
            self.draw.restart()
        return self


def common_prefix_length(first: list[Any], second: list[Any]) -> int:
    """Length of the common prefix of two `Request.model_inputs`, by bisection.

    Comparing slices is faster than a loop, and prompts have thousands of tokens.
    """
    same = 0
    largest = min(len(first), len(second))
    while same < largest:
        middle = (same + largest + 1) // 2
        if first[same:middle] == second[same:middle]:
            same = middle
        else:
            largest = middle - 1
    return same
