"""Sampling and stop texts for `generate` of transformers, row by row: a reply does not depend on its neighbours."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import torch
from transformers import LogitsProcessor, StoppingCriteria

from tripletune.models.llm.client import Sampling


class Draw(LogitsProcessor):
    """Sampling with a random generator for each row.

    The arg max of log-probabilities plus Gumbel noise is a sample (the Gumbel-max trick), and the noise is drawn row
    by row, so that neighbours don't change it.
    """

    def __init__(self, sampling: Sampling, seeds: Sequence[int | None], device: torch.device) -> None:
        self.sampling = sampling
        self.generators = []
        for seed in seeds:
            generator = torch.Generator(device)
            generator.manual_seed(secrets.randbits(63) if seed is None else seed % 2**63)
            self.generators.append(generator)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Change (B, V) scores; `input_ids` (B, T) is not looked at."""
        scores = scores.float() / self.sampling.temperature
        if self.sampling.top_p < 1:
            ordered, order = scores.softmax(-1).sort(dim=-1, descending=True)
            # A token is kept if those before it don't reach top_p yet; so the first always is.
            drop = ordered.cumsum(-1) - ordered >= self.sampling.top_p
            scores = scores.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), -torch.inf)
        noise = torch.empty_like(scores)
        for row, generator in zip(noise, self.generators):
            row.exponential_(generator=generator)
        return scores - noise.clamp_min(torch.finfo(noise.dtype).tiny).log()


class Stop(StoppingCriteria):
    """Ends a row at a stop text, and the whole batch when nobody waits for it any more.

    Args:
        tokenizer: The model's tokenizer.
        stops: The texts.
        width: Tokens of the padded prompts.
        calls: The rows' calls; each has a `future` that is done when nobody waits for it.

    Attributes:
        ends: Row -> number of tokens it had written when a stop text appeared.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str], width: int, calls: Sequence[Any]) -> None:
        self.tokenizer, self.stops, self.width, self.calls = tokenizer, tuple(stops), width, calls
        self.ends: dict[int, int] = {}
        self.window = stop_window(self.stops)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """(B,) whether each row is at its end; `input_ids` is (B, T)."""
        rows = len(self.calls)
        if all(call.future.done() for call in self.calls):
            return torch.ones(rows, dtype=torch.bool, device=input_ids.device)
        if self.stops:
            written = input_ids.shape[1] - self.width
            tails = input_ids[:, -min(written, self.window) :].tolist()
            for row, tail in enumerate(tails):
                if row not in self.ends:
                    text = self.tokenizer.decode(tail, skip_special_tokens=True)
                    if any(stop in text for stop in self.stops):
                        self.ends[row] = written
        done = [row in self.ends for row in range(rows)]
        return torch.tensor(done, dtype=torch.bool, device=input_ids.device)


def stop_window(stops: Sequence[str]) -> int:
    """How many of the last tokens can hold a stop text that has just appeared."""
    # A character is at most four tokens (its bytes); a few more, so that the window's edge does not matter.
    return 4 * max(map(len, stops), default=0) + 8
