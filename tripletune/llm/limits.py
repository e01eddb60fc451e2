"""Limits on calls at once, on calls per minute and on tokens per minute.

Rates are limited by leaky buckets (aiolimiter) that hold five seconds of calls, so calls are spread over the minute and
not sent in one burst. The calls of a minute exceed the rate by at most 8 %; a long run keeps the rate. Before a call,
its tokens are estimated as hosted services do: one token per four bytes of the messages, plus the reply's limit. Later
calls make up for the difference between the estimate and the real number.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext

from aiolimiter import AsyncLimiter

from tripletune.core.calls import Message, Sampling

_BURST_SECONDS = 5.0
# The estimate of a call's tokens: bytes of text per token, and tokens that a message takes besides its text.
_BYTES_PER_TOKEN = 4
_TOKENS_PER_MESSAGE = 4


class Limits:
    """Limits of one client in one event loop; `None` means no limit.

    Retries count as requests. Tokens are those of prompts and replies.

    Attributes:
        timeout: Seconds for one attempt at a call.
    """

    def __init__(
        self,
        concurrency: int | None = None,
        requests_per_minute: float | None = None,
        tokens_per_minute: float | None = None,
        timeout: float | None = None,
    ) -> None:
        self.timeout = timeout
        self._slots = asyncio.Semaphore(concurrency) if concurrency is not None else nullcontext()
        self._requests = _bucket(requests_per_minute)
        self._tokens = _bucket(tokens_per_minute)
        self._turn = asyncio.Lock()
        # Used tokens minus the tokens taken from the bucket.
        self._owed = 0.0

    @asynccontextmanager
    async def permit(self, messages: Sequence[Message], sampling: Sampling) -> AsyncIterator[Callable[[int], None]]:
        """Wait until a call may be sent; the block makes the call and reports its tokens to the yielded function."""
        async with self._slots:
            # The rates come after the slot, so that a call within the rates is sent at once.
            if self._requests is not None:
                await self._requests.acquire()
            if self._tokens is None:
                yield lambda tokens: None
                return
            estimate = _estimated_tokens(messages, sampling)
            await self._acquire_tokens(self._tokens, estimate)
            used = estimate

            def report(tokens: int) -> None:
                """Note the real number; a call that fails reports none, and its estimate stands."""
                nonlocal used
                used = tokens

            try:
                yield report
            finally:
                self._owed += used - estimate

    async def _acquire_tokens(self, bucket: AsyncLimiter, tokens: int) -> None:
        """Wait until the bucket has given the tokens of a call and what earlier calls used beyond their estimates."""
        # One call at a time, because the bucket serves small amounts first, so a long prompt could wait forever.
        async with self._turn:
            wanted = self._owed + tokens
            self._owed = min(wanted, 0.0)
            while wanted > 0:
                # A call may be larger than the bucket, so its tokens are taken in several steps.
                taken = min(wanted, bucket.max_rate)
                await bucket.acquire(taken)
                wanted -= taken


def _estimated_tokens(messages: Sequence[Message], sampling: Sampling) -> int:
    """An upper estimate of a call's tokens, made before it is sent: its messages, and the longest reply."""
    size = sum(len(message["content"].encode("utf-8", "replace")) for message in messages)
    return math.ceil(size / _BYTES_PER_TOKEN) + _TOKENS_PER_MESSAGE * len(messages) + sampling.max_tokens


def _bucket(per_minute: float | None) -> AsyncLimiter | None:
    """A leaky bucket with this rate; None if there is no limit."""
    if per_minute is None:
        return None
    # A bucket must hold at least one call.
    seconds = max(_BURST_SECONDS, 60 / per_minute)
    return AsyncLimiter(per_minute * seconds / 60, seconds)
