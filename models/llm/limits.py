"""How many calls may be under way, and how many calls and tokens may be sent a minute.

Rates are leaky buckets (aiolimiter) that hold five seconds' worth: calls are spread over the minute instead of being
sent in one burst at its start. Any minute has at most 8 % more than the rate, and a long run has the rate.

Tokens are estimated before a call, one per four bytes of the messages plus the longest reply that was asked for, as
hosted services do. When the reply is there, the difference to the real number is made up for by the calls after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from typing import Any

from aiolimiter import AsyncLimiter

from tripletune.models.llm.client import Message, Sampling

_BURST_SECONDS = 5.0
_BYTES_A_TOKEN, _TOKENS_A_MESSAGE = 4, 4


def estimate_tokens(messages: Sequence[Message], sampling: Sampling) -> int:
    """Tokens that a call may cost: its messages and the longest reply."""
    size = sum(len(message["content"].encode("utf-8", "replace")) for message in messages)
    return -(-size // _BYTES_A_TOKEN) + _TOKENS_A_MESSAGE * len(messages) + sampling.max_tokens


class Permit:
    """Leave to send one call; tell it what the call really cost.

    Attributes:
        tokens: Tokens of the call; the estimate until `used` is called.
    """

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def used(self, tokens: int) -> None:
        """Set the real number of tokens, 0 for a call that was turned away."""
        self.tokens = tokens


class Limits:
    """The limits of one client; `None` means no limit. Use one object in one event loop.

    Args:
        concurrency: Most calls under way.
        requests_per_minute: Most attempts sent a minute; retries count.
        tokens_per_minute: Most tokens a minute, prompts and replies together.
        timeout: Seconds after which an attempt is given up.

    Raises:
        ValueError: a limit is not above 0.
    """

    def __init__(
        self,
        concurrency: int | None = None,
        requests_per_minute: float | None = None,
        tokens_per_minute: float | None = None,
        timeout: float | None = None,
    ) -> None:
        given = {
            "concurrency": concurrency,
            "requests_per_minute": requests_per_minute,
            "tokens_per_minute": tokens_per_minute,
            "timeout": timeout,
        }
        for name, value in given.items():
            if value is not None and not value > 0:
                raise ValueError(f"{name} {value}: it must be above 0; leave it out for no limit")
        self.timeout = timeout
        self._slots = asyncio.Semaphore(concurrency) if concurrency is not None else None
        self._requests = _bucket(requests_per_minute) if requests_per_minute is not None else None
        self._tokens = _TokenRate(tokens_per_minute) if tokens_per_minute is not None else None

    @asynccontextmanager
    async def permit(self, messages: Sequence[Message], sampling: Sampling) -> AsyncIterator[Permit]:
        """Wait until a call may be sent; the block is the call.

        Args:
            messages: The chat, for the estimate.
            sampling: Its longest reply.
        """
        slot: Any = self._slots or nullcontext()
        async with slot:
            # The rates come after the slot: what has passed them is sent at once.
            if self._requests is not None:
                await self._requests.acquire()
            if self._tokens is None:
                yield Permit(0)
                return
            estimate = estimate_tokens(messages, sampling)
            await self._tokens.acquire(estimate)
            permit = Permit(estimate)
            try:
                yield permit
            finally:
                self._tokens.correct(permit.tokens - estimate)


class _TokenRate:
    """A token bucket that remembers what calls really cost.

    Attributes:
        owed: Tokens that went out beyond what was taken from the bucket; negative when too much was taken.
    """

    def __init__(self, per_minute: float) -> None:
        self._bucket = _bucket(per_minute)
        self._turn = asyncio.Lock()
        self.owed = 0.0

    async def acquire(self, tokens: int) -> None:
        # One at a time: the bucket serves small amounts first, and a long prompt would wait for ever.
        async with self._turn:
            wanted = self.owed + tokens
            self.owed = min(wanted, 0.0)
            while wanted > 0:
                # A call may be larger than the bucket: it is taken in parts.
                part = min(wanted, self._bucket.max_rate)
                await self._bucket.acquire(part)
                wanted -= part

    def correct(self, difference: float) -> None:
        self.owed += difference


def _bucket(per_minute: float) -> AsyncLimiter:
    # A bucket must hold at least one call.
    seconds = max(_BURST_SECONDS, 60 / per_minute)
    return AsyncLimiter(per_minute * seconds / 60, seconds)
