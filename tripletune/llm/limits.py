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
from contextlib import asynccontextmanager

from aiolimiter import AsyncLimiter

from tripletune.core.calls import Message, Sampling

_BURST_SECONDS = 5.0
# The estimate of a call's tokens: bytes of text per token, and tokens that a message takes besides its text.
_BYTES_PER_TOKEN = 4
_TOKENS_PER_MESSAGE = 4


class Limits:
    """Limits of one client in one event loop; `None` means no limit.

    Retries count as requests. Tokens are those of prompts and replies.

    Args:
        requests_per_minute: Maximum requests sent per minute.
        tokens_per_minute: Maximum tokens per minute.

    Attributes:
        concurrency: Maximum calls at once.
        timeout: Seconds for one attempt at a call.
    """

    def __init__(
        self,
        concurrency: int | None = None,
        requests_per_minute: float | None = None,
        tokens_per_minute: float | None = None,
        timeout: float | None = None,
    ) -> None:
        """Make the slots and buckets; calls at once may be lowered later (`note_late`), rates never change."""
        self.concurrency = concurrency
        self.timeout = timeout
        self._slots = asyncio.Semaphore(concurrency) if concurrency is not None else None
        # Number of slots, without the surplus: those that are taken away when they become free.
        self._total = concurrency or 0
        self._surplus = 0
        # Calls in progress, and the most of them since the last reduction.
        self._running = 0
        self._peak = 0
        # Attempts that ran out of time since the last reduction, as long as no call was ever answered.
        self._late = 0
        self._has_reply = False
        self._requests = _leaky_bucket(requests_per_minute)
        self._tokens = _leaky_bucket(tokens_per_minute)
        self._turn = asyncio.Lock()
        # Used tokens minus the tokens taken from the bucket.
        self._owed = 0.0

    @asynccontextmanager
    async def permit(self, messages: Sequence[Message], sampling: Sampling) -> AsyncIterator[Callable[[int], None]]:
        """Wait until a call may be sent; the block makes the call and reports its tokens to the yielded function.

        The tokens of a call are known only after it, so an estimate is taken from the rate first, and the difference is
        settled with later calls.
        """
        async with self._hold_slot():
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

    def note_reply(self) -> None:
        """Note that the server has answered a call."""
        self._has_reply = True

    async def note_late(self) -> int | None:
        """Note that an attempt ran out of time.

        Once as many attempts as there were calls at once have run out of time, and no call was ever answered, the
        number of calls at once is halved: a slow server may answer fewer calls in time. Returns the new number.
        """
        self._late += 1
        if self._has_reply or self._slots is None or self._late < self._peak or self._peak < 2:
            return None
        self.concurrency = self._peak // 2
        await self._reduce_slots(self._slots, self.concurrency)
        self._late = 0
        self._peak = 0
        return self.concurrency

    async def _reduce_slots(self, slots: asyncio.Semaphore, calls: int) -> None:
        """Take all slots but `calls` away: free slots now, the others when their calls end."""
        self._surplus += self._total - calls
        self._total = calls
        while self._surplus and not slots.locked():
            await slots.acquire()
            self._surplus -= 1

    @asynccontextmanager
    async def _hold_slot(self) -> AsyncIterator[None]:
        """Wait until there are fewer calls in progress than `concurrency`.

        After the number of slots was lowered, the next calls that end give theirs up (`_surplus`).
        """
        if self._slots is None:
            yield
            return
        await self._slots.acquire()
        self._running += 1
        self._peak = max(self._peak, self._running)
        try:
            yield
        finally:
            self._running -= 1
            if self._surplus:
                self._surplus -= 1
            else:
                self._slots.release()

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


def _leaky_bucket(per_minute: float | None) -> AsyncLimiter | None:
    """A leaky bucket with this rate; None if there is no limit.

    It lets through what `_BURST_SECONDS` allow at once, so that calls come evenly over a minute.
    """
    if per_minute is None:
        return None
    # A bucket must hold at least one call.
    seconds = max(_BURST_SECONDS, 60 / per_minute)
    return AsyncLimiter(per_minute * seconds / 60, seconds)
