"""A prompt that waits for its reply, and what every way of decoding it needs to know."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Protocol

from tripletune.models.llm import chat

ROWS = 32
# Rows times the tokens of the longest one: what the keys and values of a batch take. Short texts share it with many.
CELLS = 16_384


@dataclass(eq=False, slots=True)
class Request:
    """One prompt and its reply as it is written.

    Attributes:
        prompt: Its tokens; at least one.
        limit: Most tokens of the reply; at least 1.
        shared: How many tokens at the start of the prompt other prompts begin with too, so that they are read once.
        tokens: The reply so far, without the token that ends it.
        ended: Whether the model has ended the reply; else it was cut off at the limit.
        done: Whether nothing more will be written.
        seconds: Its share of the time: that of each step, divided by the rows under way.

    Raises:
        ValueError: the prompt is empty, or the limit below 1.
    """

    prompt: list[int]
    limit: int
    shared: int = 0
    tokens: list[int] = field(default_factory=list)
    ended: bool = False
    done: bool = False
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if not self.prompt or self.limit < 1:
            raise ValueError(f"a request needs a prompt and a limit of at least 1, found {self.limit}")

    def take(self, token: int, ends: Collection[int]) -> None:
        """Add the next token, or end the reply."""
        if token in ends:
            self.ended = self.done = True
        else:
            self.tokens.append(token)
            self.done = len(self.tokens) >= self.limit

    def anew(self) -> Request:
        """Forget what was written."""
        self.tokens.clear()
        self.ended = self.done = False
        return self


class Decoder(Protocol):
    """A model that replies to requests: `models.continuous_batch.ContinuousBatch` or `models.generate_batch`'s."""

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


def end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Every token that ends a reply of a model; see `models.llm.chat.end_tokens`."""
    return chat.end_tokens(tokenizer, model.generation_config)


def context_length(model: Any) -> int | None:
    """Most tokens of prompt and reply together; None where the model sets no bound."""
    length = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return int(length) if length else None
