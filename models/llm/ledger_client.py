"""The client that loops and builders call: ledger, limits and retries around one backend.

A call goes this way: stored before? -> under way already? -> limits -> backend, with retries -> ledger -> caller.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt
from tenacity.wait import wait_random_exponential

from tripletune.models.llm.backends.api import redact
from tripletune.models.llm.backends.batch import BatchBackend
from tripletune.models.llm.client import Backend, CallError, Message, RepliesPending, Sampling, TransientError
from tripletune.models.llm.ledger import Call, Ledger, make_call
from tripletune.models.llm.limits import Limits
from tripletune.models.local.generation import Completion

logger = logging.getLogger(__name__)
GREEDY = Sampling()


class RetriesExhausted(CallError):
    """Every attempt failed for a passing reason. The question is not at fault: stop, and run again later."""


@dataclass(frozen=True, slots=True)
class Retry:
    """How often and how fast a call that fails for now is tried again.

    The wait before attempt n is drawn between 0 and `first_wait` * 2^(n-2) seconds, at most `longest_wait`. A server
    that says how long to wait is waited for at least that long.

    Attributes:
        attempts: Most attempts, the first one included.
        first_wait: Longest wait before the second attempt, in seconds.
        longest_wait: Longest wait that is drawn, in seconds.
        patience: A server that asks for a longer wait than this, in seconds, is not tried again (a day's quota).
        empty_attempts: Most attempts on a call whose reply is empty; then the empty reply is kept. One that is empty
            because it was cut off at its limit or refused is kept at once: another attempt pays for the same again.

    Raises:
        ValueError: a value makes no sense.
    """

    attempts: int = 8
    first_wait: float = 1.0
    longest_wait: float = 60.0
    patience: float = 600.0
    empty_attempts: int = 4

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.empty_attempts < 1:
            raise ValueError(f"attempts {self.attempts}, empty_attempts {self.empty_attempts}: both must be at least 1")
        if min(self.first_wait, self.longest_wait, self.patience) < 0:
            raise ValueError("first_wait, longest_wait and patience must be 0 seconds or more")


class _Flight:
    """A call under way and how many wait for it."""

    __slots__ = ("task", "waiting")

    def __init__(self, task: asyncio.Task[Completion]) -> None:
        self.task, self.waiting = task, 0


class LedgerClient:
    """An `LLMClient` over one backend. Use it in one event loop.

    Args:
        backend: The model.
        ledger: Where calls are stored; `None` stores nothing. It is closed with the client.
        limits: What may be sent; `None` means no limits.
        retry: How often a call is tried.
        secrets: Keys and passwords; they are struck out of every error text, whatever a server writes into it.

    Attributes:
        model: As in `Backend`.
        backend: The backend.
        ledger: The ledger, or `None`.
    """

    def __init__(
        self,
        backend: Backend,
        ledger: Ledger | None = None,
        limits: Limits | None = None,
        retry: Retry | None = None,
        secrets: Sequence[str] = (),
    ) -> None:
        self.backend, self.ledger, self.model = backend, ledger, backend.model
        self._limits = limits or Limits()
        self._retry = retry or Retry()
        self._secrets = tuple(secret for secret in secrets if secret)
        self._flights: dict[str, _Flight] = {}
        # Calls that a server works on, and the error that ended the sending of more.
        self._sent: set[Any] = set()
        self._stopped: Exception | None = None

    def __repr__(self) -> str:
        return f"LedgerClient(model={self.model!r}, ledger={str(self.ledger.path) if self.ledger else None!r})"

    async def __aenter__(self) -> LedgerClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def count_tokens(self) -> Callable[[Sequence[Message]], int] | None:
        """What counts the tokens of a chat; None where the backend's model is not on this machine."""
        return getattr(self.backend, "count_tokens", None)

    async def chat(
        self, messages: Sequence[Message], *, role: str, sampling: Sampling | None = None, question_id: str = ""
    ) -> Completion:
        """Reply to a chat; see `models.llm.client.LLMClient.chat`.

        Equal calls under way together are sent once; all but the first get `cached=True`.

        Raises:
            RetriesExhausted: every attempt failed for a passing reason.
            CallError: no attempt will do better, or the messages can't be sent.
            RepliesPending: it waits in a request file.
        """
        sampling = sampling or GREEDY
        try:
            call = make_call(self.model, sampling, messages)
        except (ValueError, TypeError) as error:
            raise CallError(f"{role}: this call can't be sent: {error}") from None
        if self.ledger is not None:
            stored = self.ledger.get(call.key)
            if stored is not None:
                self.ledger.use(call.key, role, question_id)
                return stored
        flight = self._flights.get(call.key)
        first = flight is None
        if flight is None:
            flight = self._start(call, messages, sampling, role, question_id)
        completion = await self._join(call.key, flight)
        if first:
            return completion
        if self.ledger is not None:
            self.ledger.use(call.key, role, question_id)
        return replace(completion, cached=True)

    def pending_message(self) -> str | None:
        """What to do about the calls that wait for a batch, for the end of a run; `None` when none waits."""
        return self.backend.pending_message() if isinstance(self.backend, BatchBackend) else None

    async def stop(self, error: Exception) -> None:
        """Send nothing more, and wait for the replies under way, so that none that is paid for is lost.

        Args:
            error: From now on raised by calls that are neither stored nor under way.
        """
        self._stopped = self._stopped or error
        await asyncio.gather(*self._sent - {asyncio.current_task()}, return_exceptions=True)

    async def close(self) -> None:
        """End calls under way, write what was received, close backend and ledger."""
        flights = [flight.task for flight in self._flights.values()]
        for task in flights:
            task.cancel()
        await asyncio.gather(*flights, return_exceptions=True)
        try:
            await self.backend.close()
        finally:
            if self.ledger is not None:
                self.ledger.close()

    def _start(
        self, call: Call, messages: Sequence[Message], sampling: Sampling, role: str, question_id: str
    ) -> _Flight:
        task = asyncio.create_task(self._fetch(call, messages, sampling, role, question_id))
        flight = self._flights[call.key] = _Flight(task)

        def landed(task: asyncio.Task[Completion]) -> None:
            self._sent.discard(task)
            if self._flights.get(call.key) is flight:
                del self._flights[call.key]
            if not task.cancelled():
                # Looked at, so that a failure whose waiters have all gone is not reported as forgotten.
                task.exception()

        task.add_done_callback(landed)
        return flight

    async def _join(self, key: str, flight: _Flight) -> Completion:
        # Shielded: one waiter that is cancelled must not take the call away from the others.
        flight.waiting += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiting -= 1
            if not flight.waiting and not flight.task.done():
                flight.task.cancel()
                if self._flights.get(key) is flight:
                    del self._flights[key]

    async def _fetch(
        self, call: Call, messages: Sequence[Message], sampling: Sampling, role: str, question_id: str
    ) -> Completion:
        """One call to the model, stored before it is given back."""
        attempts = empty = 0

        async def attempt() -> Completion:
            nonlocal attempts, empty
            attempts += 1
            completion = await self._attempt(messages, sampling)
            if not completion.text.strip() and completion.finish_reason == "stop":
                empty += 1
                if empty < self._retry.empty_attempts and attempts < self._retry.attempts:
                    raise TransientError("the reply is empty")
            text = _unicode(completion.text)
            if attempts == 1 and text == completion.text:
                return completion
            return replace(completion, text=text, retries=attempts - 1)

        try:
            completion = await self._until_it_succeeds(attempt)
        except RepliesPending:
            if self.ledger is not None:
                self.ledger.use(call.key, role, question_id)
            raise
        except (CallError, TransientError) as error:
            if error is self._stopped:
                raise
            failure = self._failure(error, attempts, role)
            if self.ledger is not None:
                await self.ledger.fail(call, str(failure), attempts - 1, role, question_id)
            # Without its cause, whose text may hold a key.
            raise failure from None
        if self.ledger is not None:
            return await self.ledger.put(call, completion, role, question_id)
        return completion

    async def _attempt(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        async with self._limits.permit(messages, sampling) as permit:
            if self._stopped is not None:
                raise self._stopped
            task = asyncio.current_task()
            self._sent.add(task)
            start = time.perf_counter()
            try:
                async with asyncio.timeout(self._limits.timeout):
                    completion = await self.backend.complete(messages, sampling)
            except TimeoutError:
                limit = self._limits.timeout
                raise TransientError(f"no reply within {limit} seconds" if limit else "no reply in time") from None
            except RepliesPending:
                permit.used(0)
                raise
            except TransientError:
                self._sent.discard(task)
                raise
            permit.used(completion.prompt_tokens + completion.completion_tokens)
            return completion if completion.seconds else replace(completion, seconds=time.perf_counter() - start)

    async def _until_it_succeeds(self, attempt: Callable[[], Awaitable[Completion]]) -> Completion:
        # Tenacity costs more than all else here, so it is only called when there is something to try again.
        try:
            return await attempt()
        except TransientError as error:
            failed = [error]

        async def again() -> Completion:
            # The attempt that failed counts as its first: it waits before the second.
            if failed:
                raise failed.pop()
            return await attempt()

        return await self._retrying()(again)

    def _retrying(self) -> AsyncRetrying:
        retry = self._retry
        backoff = wait_random_exponential(multiplier=retry.first_wait, max=retry.longest_wait)

        def wait(state: RetryCallState) -> float:
            return backoff(state) + (_retry_after(state) or 0.0)

        def stop(state: RetryCallState) -> bool:
            return stop_after_attempt(retry.attempts)(state) or (_retry_after(state) or 0.0) > retry.patience

        def say(state: RetryCallState) -> None:
            error = state.outcome.exception() if state.outcome else None
            logger.info(
                "%s: attempt %d of %d failed (%s); again in %.1f s",
                self.model,
                state.attempt_number,
                retry.attempts,
                self._clean(str(error)),
                state.upcoming_sleep,
            )

        return AsyncRetrying(
            retry=retry_if_exception_type(TransientError), wait=wait, stop=stop, before_sleep=say, reraise=True
        )

    def _failure(self, error: CallError | TransientError, attempts: int, role: str) -> CallError:
        reason = self._clean(str(error))
        if isinstance(error, CallError):
            return error if reason == str(error) else type(error)(reason)
        tried = f"{attempts} attempt{'s' if attempts > 1 else ''}"
        if error.retry_after is not None and error.retry_after > self._retry.patience:
            reason += f"; the server asks to wait {error.retry_after:.0f} seconds"
        kept = f"What was answered is kept in {self.ledger.path}: run" if self.ledger is not None else "Run"
        again = f"{kept} the same command again to go on" if self.ledger is not None else f"{kept} it again"
        return RetriesExhausted(f"{self.model}, {role}: no reply after {tried}: {reason}. {again}")

    def _clean(self, text: str) -> str:
        return redact(text, self._secrets)


def _retry_after(state: RetryCallState) -> float | None:
    error = state.outcome.exception() if state.outcome else None
    return error.retry_after if isinstance(error, TransientError) else None


def _unicode(text: str) -> str:
    """Half characters, which no file can hold, become question marks."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")
