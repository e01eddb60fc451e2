"""The client for loops and builders: it adds a ledger, limits and retries to one backend.

Rates are limited by leaky buckets (aiolimiter) that hold five seconds of calls, so calls are spread over the minute and
not sent in one burst. The calls of a minute exceed the rate by at most 8 %; a long run keeps the rate. Before a call,
its tokens are estimated as hosted services do: one token per four bytes of the messages, plus the reply's limit. Later
calls make up for the difference between the estimate and the real number.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from aiolimiter import AsyncLimiter

from tripletune.core.calls import (
    CALL_ROLE,
    TIMED_OUT,
    Backend,
    CallError,
    Completion,
    LLMClient,
    Message,
    RepliesPending,
    Sampling,
    SetupError,
    TransientError,
    redact,
)
from tripletune.core.sqlite import UnusableFile
from tripletune.llm.ledger import Call, Ledger, NoLedger, make_call
from tripletune.llm.replies import FINAL, NO_TEXT, has_text, silence

logger = logging.getLogger(__name__)
_BURST_SECONDS = 5.0
# Seconds after a time-out in which a reply that has already arrived is still read.
_READING = 0.05
_BYTES_PER_TOKEN, _TOKENS_PER_MESSAGE = 4, 4


class RetriesExhausted(CallError):
    """Every attempt failed for a temporary reason, so the run stops and can be started again later."""


@dataclass(frozen=True, slots=True)
class Retry:
    """Number and timing of attempts at a call that fails temporarily.

    The wait before attempt n is drawn between 0 and `first_wait` * 2^(n-2) seconds, at most `longest_wait`. If a server
    asks for a wait, that wait is added.

    Attributes:
        patience: Seconds; if a server asks to wait longer (for example for a daily quota), the call is not retried.
        empty_attempts: Maximum attempts at a call whose reply has no text. A reply that was cut off at its limit or
            refused fails at once, since a retry would cost the same again.
    """

    attempts: int = 8
    first_wait: float = 1.0
    longest_wait: float = 60.0
    patience: float = 600.0
    empty_attempts: int = 4


class Limits:
    """Limits of one client in one event loop; `None` means no limit.

    Retries count as requests. Tokens are those of prompts and replies. `timeout` is in seconds per attempt.
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
            size = sum(len(message["content"].encode("utf-8", "replace")) for message in messages)
            estimate = -(-size // _BYTES_PER_TOKEN) + _TOKENS_PER_MESSAGE * len(messages) + sampling.max_tokens
            await self._acquire_tokens(self._tokens, estimate)
            cost = [estimate]
            try:
                yield cost.append
            finally:
                self._owed += cost[-1] - estimate

    async def _acquire_tokens(self, bucket: AsyncLimiter, tokens: int) -> None:
        # One call at a time, because the bucket serves small amounts first, so a long prompt could wait forever.
        async with self._turn:
            wanted = self._owed + tokens
            self._owed = min(wanted, 0.0)
            while wanted > 0:
                # A call may be larger than the bucket, so its tokens are taken in parts.
                part = min(wanted, bucket.max_rate)
                await bucket.acquire(part)
                wanted -= part


def _bucket(per_minute: float | None) -> AsyncLimiter | None:
    if per_minute is None:
        return None
    # A bucket must hold at least one call.
    seconds = max(_BURST_SECONDS, 60 / per_minute)
    return AsyncLimiter(per_minute * seconds / 60, seconds)


def _with_tokens_of(reply: Completion, other: Completion | None) -> Completion:
    """A reply with the tokens of another one added, which was paid for as well."""
    read, written = (other.prompt_tokens, other.completion_tokens) if other else (0, 0)
    return replace(reply, prompt_tokens=reply.prompt_tokens + read, completion_tokens=reply.completion_tokens + written)


class _Flight:
    """A call in progress, the number of its waiters, and when it was sent (0: not yet)."""

    task: asyncio.Task[Completion]
    waiting = 0
    sent = 0.0


class LedgerClient(LLMClient, AbstractAsyncContextManager["LedgerClient"]):
    """An `LLMClient` over one backend. Use it in one event loop.

    Args:
        ledger: The ledger for the calls, which the client closes.
        secrets: Keys and passwords to remove from every error message.

    Attributes:
        model: The backend's name of the model; may be extended to distinguish two models with the same name.
        ends_run: Whether nothing more is sent after a failure that every other call would also have. Set it to False in
            a client that stays open, since its server may come back.
    """

    def __init__(
        self,
        backend: Backend,
        ledger: Ledger | NoLedger | None = None,
        limits: Limits | None = None,
        retry: Retry | None = None,
        secrets: Sequence[str] = (),
    ) -> None:
        self.backend, self.ledger, self.model = backend, ledger or NoLedger(), backend.model
        self.behind, self.send_temperature = (backend,), backend.send_temperature
        self._limits, self._retry = limits or Limits(), retry or Retry()
        self._secrets, self._warned, self.ends_run = tuple(filter(None, secrets)), False, True
        self._flights: dict[str, _Flight] = {}
        # The failure that ended the run; after it nothing is sent.
        self._ended: Exception | None = None

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def chat(
        self, messages: Sequence[Message], *, role: str, sampling: Sampling | None = None, question_id: str = ""
    ) -> Completion:
        """Reply to a chat; see `core.calls.LLMClient.chat`.

        Equal concurrent calls are sent once; all but the first get `cached=True`. The `CallError` after the last
        attempt is `RetriesExhausted`. A full disk raises an `OSError`, after which no call is sent.
        """
        sampling = sampling or Sampling()
        try:
            call = make_call(self.model, sampling, messages)
        except (ValueError, TypeError) as error:
            raise CallError(f"{role}: this call can't be sent: {error}") from None
        stored = self.ledger.get(call.key)
        if stored is not None:
            self.ledger.use(stored.key, role, question_id)
            return stored
        flight = self._flights.get(call.key)
        first = flight is None
        if flight is None:
            flight = self._flights[call.key] = _Flight()
            flight.task = asyncio.create_task(self._fetch(flight, call, messages, sampling, role, question_id))
            # Read the exception, so that asyncio does not warn about a failure that nobody waited for.
            flight.task.add_done_callback(lambda task: task.cancelled() or task.exception())
        flight.waiting += 1
        try:
            # Shielded, because cancelling one waiter must not cancel the call for other waiters.
            completion = await asyncio.shield(flight.task)
        finally:
            flight.waiting -= 1
            if not flight.waiting and (flight.task.done() or self._abandon(flight)):
                del self._flights[call.key]
        if first:
            return completion
        self.ledger.use(call.key, role, question_id)
        return replace(completion, cached=True)

    def stop(self, error: Exception) -> None:
        """Send nothing more: every call that is neither stored nor in progress raises this error.

        `SetupError`, `RetriesExhausted` and a ledger that can't be written stop the client automatically.
        """
        self._ended = self._ended or error

    async def close(self) -> None:
        """Cancel calls in progress, then close backend and ledger.

        After an error, wait for sent calls and store their replies, since these are already paid for.
        """
        flights = list(self._flights.values())
        for flight in flights:
            self._abandon(flight)
        await asyncio.gather(*(flight.task for flight in flights), return_exceptions=True)
        try:
            await self.backend.close()
        finally:
            self.ledger.close()

    def _abandon(self, flight: _Flight) -> bool:
        """Cancel a call that nobody waits for, unless the run has failed and the call was sent."""
        return not (self._ended and flight.sent) and flight.task.cancel()

    async def _fetch(
        self, flight: _Flight, call: Call, messages: Sequence[Message], sampling: Sampling, role: str, question_id: str
    ) -> Completion:
        async with self.ledger.claim(call.key):
            if (stored := self.ledger.get(call.key)) is not None:
                # Another process has made the call meanwhile.
                self.ledger.use(call.key, role, question_id)
                return stored
            attempts, silent, completion = 0, 0, None
            unusable: Completion | None = None  # with the tokens of all replies without text
            CALL_ROLE.set(role)  # in the context of this call's own task
            try:
                while True:
                    attempts, completion = attempts + 1, None
                    try:
                        completion = await self._attempt(flight, messages, sampling)
                        if completion and not self.backend.may_be_silent and (reason := silence(completion)):
                            silent += 1
                            unusable = _with_tokens_of(completion, unusable)
                            final = completion.finish_reason in FINAL or silent >= self._retry.empty_attempts
                            if final or attempts >= self._retry.attempts:
                                raise CallError(f"{self.model}, {role}: {reason}")
                            raise TransientError(reason)
                        break
                    except TransientError as error:
                        await self._wait_after(error, attempts)
            except RepliesPending:
                self.ledger.use(call.key, role, question_id)
                raise
            except (CallError, TransientError) as error:
                failure = self._failure(error, attempts, role)
                if self.ends_run and isinstance(failure, (SetupError, RetriesExhausted)):
                    self.stop(failure)
                with self._storing():
                    self.ledger.fail(call, str(failure), attempts - 1, role, question_id, unusable)
                # The cause is dropped, because its text may hold a key.
                raise failure from None
            if completion is None:
                if isinstance(self._ended, CallError):
                    raise type(self._ended)(
                        f"nothing more is sent after an earlier failure; open a new client: {self._ended}"
                    )
                raise self._ended or CallError(f"{role}: the run has ended")
            completion = replace(
                _with_tokens_of(completion, unusable),
                seconds=completion.seconds or time.perf_counter() - flight.sent,
                retries=attempts - 1,
                key=call.key,
            )
            with self._storing():
                if has_text(completion.text):
                    return await self.ledger.store(call, completion, role, question_id)
                # The next run calls again, since the model may have changed by then.
                self.ledger.fail(call, NO_TEXT, attempts - 1, role, question_id, completion)
                return completion

    async def _attempt(self, flight: _Flight, messages: Sequence[Message], sampling: Sampling) -> Completion | None:
        """Make one attempt; None if the run has ended before it."""
        flight.sent = 0.0
        async with self._limits.permit(messages, sampling) as cost:
            if self._ended:
                return None
            flight.sent = time.perf_counter()
            reply = self.backend.complete(messages, sampling)
            try:
                completion = await (reply if self._limits.timeout is None else self._in_time(reply))
            except TransientError:
                flight.sent = 0.0
                raise
            cost(completion.prompt_tokens + completion.completion_tokens)
            return completion

    async def _in_time(self, call: Coroutine[Any, Any, Completion]) -> Completion:
        reply, late = asyncio.ensure_future(call), False
        try:
            # Not `asyncio.timeout`, which drops a reply that came in time if the event loop was blocked.
            for patience in (self._limits.timeout, _READING):
                if not reply.done():
                    await asyncio.wait({reply}, timeout=patience)
            if late := not reply.done():
                raise TransientError(f"no reply within {self._limits.timeout} seconds")
            return reply.result()
        finally:
            if not reply.done():
                reply.cancel(TIMED_OUT if late else None)
                await asyncio.wait({reply})

    @contextmanager
    def _storing(self) -> Iterator[None]:
        try:
            yield
        except (UnusableFile, OSError) as error:
            self.stop(error)
            raise

    async def _wait_after(self, error: TransientError, attempts: int) -> None:
        """Wait before another attempt, or raise the error if there is no attempt left.

        Tenacity is not used, because it took a sixth of the time of a call that is answered at once.
        """
        own, asked = self._retry, error.retry_after or 0.0
        if self._ended or attempts >= own.attempts or asked > own.patience:
            raise error
        seconds = asked + random.uniform(0, min(own.longest_wait, own.first_wait * 2 ** (attempts - 1)))
        # One warning shows a missing server or wrong address before all attempts are over.
        away = bool(self.backend.address) and not self._warned
        self._warned |= away
        name = f"{self.model} at {self.backend.address}" if away else self.model
        # A server may repeat the prompt in its error, and the log of `serve` has no questions.
        told = str(error) if self.ends_run else str(error).partition(" - ")[0]
        words, reason = "%s: attempt %d of %d failed (%s); next attempt in %.1f s", redact(told, self._secrets)
        logger.log(logging.WARNING if away else logging.DEBUG, words, name, attempts, own.attempts, reason, seconds)
        await asyncio.sleep(seconds)

    def _failure(self, error: CallError | TransientError, attempts: int, role: str) -> CallError:
        reason = redact(str(error), self._secrets)
        if isinstance(error, CallError):
            return error if reason == str(error) else type(error)(reason)
        tried = f"{attempts} attempt{'s' if attempts > 1 else ''}"
        if error.retry_after is not None and error.retry_after > self._retry.patience:
            reason += f"; the server asks to wait {error.retry_after:.0f} seconds"
        return RetriesExhausted(f"{self.model}, {role}: no reply after {tried}: {reason}. {self.ledger.to_continue}")
