"""The client for loops and builders: it adds a ledger, limits (`llm.limits`) and retries to one backend."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

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
from tripletune.llm.flights import AskedCall, Attempts, Flight, with_tokens_of
from tripletune.llm.ledger import Ledger, NoLedger, make_call
from tripletune.llm.limits import Limits
from tripletune.llm.replies import NO_TEXT, failure_of, has_text, would_fail_again

logger = logging.getLogger(__name__)
# Seconds after a time-out in which a reply that has already arrived is still read.
_READING = 0.05
_SLOW_SERVER = "If the server is slow or still loads its model, raise --teacher-timeout or lower --teacher-concurrency"


class RetriesExhausted(CallError):
    """Every attempt failed for a temporary reason, so the run stops and can be started again later."""


class _TooLate(TransientError):
    """An attempt took longer than the limit."""


@dataclass(frozen=True, slots=True)
class Retry:
    """Number and timing of attempts at a call that fails temporarily.

    The wait before attempt n is drawn between 0 and `first_wait` * 2^(n-2) seconds, at most `longest_wait`. If a server
    asks for a wait, that wait is added.

    Attributes:
        patience: Seconds; if a server asks to wait longer (for example for a daily quota), the call is not retried.
        empty_attempts: Maximum attempts at a call whose reply has no text or broke off. A reply without text that was
            cut off at its limit or refused fails at once, since a retry would cost the same again.
    """

    attempts: int = 8
    first_wait: float = 1.0
    longest_wait: float = 60.0
    patience: float = 600.0
    empty_attempts: int = 4


class LedgerClient(LLMClient, AbstractAsyncContextManager["LedgerClient"]):
    """An `LLMClient` over one backend. Use it in one event loop.

    Args:
        backend: Makes the calls.
        ledger: The ledger for the calls, which the client closes.
        limits: How many calls are sent at once and per minute.
        retry: How often a call is tried, and how long is waited in between.
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
        self.backend = backend
        self.ledger = ledger or NoLedger()
        self.model = backend.model
        self.behind = (backend,)
        self.send_temperature = backend.send_temperature
        self.enforces_schemas = backend.enforces_schemas
        self.ends_run = True
        self._limits = limits or Limits()
        self._retry = retry or Retry()
        self._secrets = tuple(secret for secret in secrets if secret)
        # Whether a warning has named a server that does not answer.
        self._warned = False
        self._flights: dict[str, Flight] = {}
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
            is_paid_here = self.backend.has_sent(stored, role, question_id)
            self.ledger.use(stored.key, role, question_id)
            return replace(stored, cached=not is_paid_here)
        flight = self._flights.get(call.key)
        is_first = flight is None
        if flight is None:
            flight = Flight()
            asked = AskedCall(call, messages, sampling, role, question_id)
            flight.task = asyncio.create_task(self._call_and_store(flight, asked))
            # Read the exception, so that asyncio does not warn about a failure that nobody waited for.
            flight.task.add_done_callback(lambda task: task.cancelled() or task.exception())
            self._flights[call.key] = flight
        flight.waiting += 1
        try:
            # Shielded, because cancelling one waiter must not cancel the call for other waiters.
            completion = await asyncio.shield(flight.task)
        finally:
            flight.waiting -= 1
            if not flight.waiting and (flight.task.done() or self._cancel_unwanted(flight)):
                del self._flights[call.key]
        if is_first:
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
            self._cancel_unwanted(flight)
        await asyncio.gather(*(flight.task for flight in flights), return_exceptions=True)
        try:
            await self.backend.close()
        finally:
            self.ledger.close()

    def _cancel_unwanted(self, flight: Flight) -> bool:
        """Cancel a call that nobody waits for, unless the run has failed and the call was sent."""
        if self._ended and flight.sent:
            return False
        return flight.task.cancel()

    async def _call_and_store(self, flight: Flight, asked: AskedCall) -> Completion:
        """Make a call that the ledger lacks, with retries, and store its reply or its failure.

        The claim makes other processes with this ledger wait, so that a call is paid once; the ledger is read again
        after it. A reply is stored before it is returned.
        """
        call = asked.call
        role = asked.role
        question_id = asked.question_id
        async with self.ledger.claim(call.key):
            stored = self.ledger.get(call.key)
            if stored is not None:
                # Another process has made the call meanwhile.
                self.ledger.use(call.key, role, question_id)
                return stored
            attempts = Attempts()
            CALL_ROLE.set(role)  # in the context of this call's own task
            try:
                completion = await self._with_retries(flight, asked, attempts)
            except RepliesPending:
                self.ledger.use(call.key, role, question_id)
                raise
            except (CallError, TransientError) as error:
                failure = self._final_error(error, attempts.count, role)
                if self.ends_run and isinstance(failure, (SetupError, RetriesExhausted)):
                    self.stop(failure)
                with self._stopping_if_unwritable():
                    self.ledger.fail(call, str(failure), attempts.count - 1, role, question_id, attempts.unusable)
                # The cause is dropped, because its text may hold a key.
                raise failure from None
            if completion is None:
                raise self._error_after_end(role)
            completion = replace(
                with_tokens_of(completion, attempts.unusable),
                seconds=completion.seconds or time.perf_counter() - flight.sent,
                retries=attempts.count - 1,
                key=call.key,
            )
            with self._stopping_if_unwritable():
                if has_text(completion.text):
                    return await self.ledger.store(call, completion, role, question_id)
                # The next run calls again, since the model may have changed by then.
                self.ledger.fail(call, NO_TEXT, attempts.count - 1, role, question_id, completion)
                return completion

    async def _with_retries(self, flight: Flight, asked: AskedCall, attempts: Attempts) -> Completion | None:
        """Make attempts until there is a reply; None if the run has ended before an attempt.

        Two limits hold: all attempts, and those whose reply has no text, since the latter cost tokens each time. Their
        tokens are kept in `attempts`, so that the ledger has what was paid, also after a failure.
        """
        while True:
            attempts.count += 1
            try:
                completion = await self._attempt_once(flight, asked.messages, asked.sampling)
                if completion is None or self.backend.may_be_silent:
                    return completion
                reason = failure_of(completion)
                if not reason:
                    return completion
                attempts.failed += 1
                attempts.unusable = with_tokens_of(completion, attempts.unusable)
                is_final = would_fail_again(completion) or attempts.failed >= self._retry.empty_attempts
                if is_final or attempts.count >= self._retry.attempts:
                    raise CallError(f"{self.model}, {asked.role}: {reason}")
                raise TransientError(reason)
            except TransientError as error:
                await self._wait_after(error, attempts.count)

    def _error_after_end(self, role: str) -> Exception:
        """The error of a call that is not made, because the run has ended (`stop`) by an earlier error."""
        if isinstance(self._ended, CallError):
            return type(self._ended)(f"nothing more is sent after an earlier failure; open a new client: {self._ended}")
        return self._ended or CallError(f"{role}: the run has ended")

    async def _attempt_once(self, flight: Flight, messages: Sequence[Message], sampling: Sampling) -> Completion | None:
        """Make one attempt; None if the run has ended before it.

        `flight.sent` is set only while a call is on its way: `_cancel_unwanted` lets such a call finish after an error,
        and cancels one that only waits.
        """
        flight.sent = 0.0
        async with self._limits.permit(messages, sampling) as report_tokens:
            # The run may have ended while this call waited for its permit.
            if self._ended:
                return None
            flight.sent = time.perf_counter()
            reply = self.backend.complete(messages, sampling)
            if self._limits.timeout is not None:
                reply = self._in_time(reply)
            try:
                completion = await reply
            except TransientError as error:
                flight.sent = 0.0
                if isinstance(error, _TooLate):
                    await self._note_late()
                raise
            self._limits.note_reply()
            report_tokens(completion.prompt_tokens + completion.completion_tokens)
            return completion

    async def _note_late(self) -> None:
        """Count an attempt that ran out of time, and warn if fewer calls are sent at once from now on."""
        calls = await self._limits.note_late()
        if calls is not None:
            form = "%s: no call was answered within %s seconds; calls at once from now on: %d. %s"
            logger.warning(form, self.model, self._limits.timeout, calls, _SLOW_SERVER)

    async def _in_time(self, call: Coroutine[Any, Any, Completion]) -> Completion:
        """Wait for a call at most as long as the limit says, else cancel it with the message `TIMED_OUT`.

        A call that has ended is never lost: a reply that came while the event loop was blocked was paid for.
        """
        reply = asyncio.ensure_future(call)
        is_late = False
        try:
            # Not `asyncio.timeout`, which drops a reply that came in time if the event loop was blocked.
            for patience in (self._limits.timeout, _READING):
                if not reply.done():
                    await asyncio.wait({reply}, timeout=patience)
            is_late = not reply.done()
            if is_late:
                raise _TooLate(f"no reply within {self._limits.timeout} seconds")
            return reply.result()
        finally:
            if not reply.done():
                reply.cancel(TIMED_OUT if is_late else None)
                await asyncio.wait({reply})

    @contextmanager
    def _stopping_if_unwritable(self) -> Iterator[None]:
        """Stop the client if the ledger can't be written: a reply that is not stored would be paid for again."""
        try:
            yield
        except (UnusableFile, OSError) as error:
            self.stop(error)
            raise

    async def _wait_after(self, error: TransientError, attempts: int) -> None:
        """Wait before another attempt, or raise the error if there is no attempt left.

        Tenacity is not used, because it took a sixth of the time of a call that is answered at once.
        """
        retry = self._retry
        asked_seconds = error.retry_after or 0.0
        if self._ended or attempts >= retry.attempts or asked_seconds > retry.patience:
            raise error
        longest = min(retry.longest_wait, retry.first_wait * 2 ** (attempts - 1))
        seconds = asked_seconds + random.uniform(0, longest)
        name = self.model
        level = logging.DEBUG
        if self.backend.address and not self._warned:
            # One warning shows a missing server or wrong address before all attempts are over.
            self._warned = True
            name = f"{self.model} at {self.backend.address}"
            level = logging.WARNING
        # A server may repeat the prompt in its error, and the log of `serve` has no questions.
        reason = str(error)
        if not self.ends_run:
            reason = reason.partition(" - ")[0]
        form = "%s: attempt %d of %d failed (%s); next attempt in %.1f s"
        logger.log(level, form, name, attempts, retry.attempts, redact(reason, self._secrets), seconds)
        await asyncio.sleep(seconds)

    def _final_error(self, error: CallError | TransientError, attempts: int, role: str) -> CallError:
        """The error that the caller gets after the last attempt; its text holds no secrets.

        An error that no retry fixes keeps its class, by which callers decide what to do; all others become
        `RetriesExhausted`, which ends the run, because the server would fail the other calls, too.
        """
        reason = redact(str(error), self._secrets)
        if isinstance(error, CallError):
            if reason == str(error):
                return error
            return type(error)(reason)
        tried = "1 attempt" if attempts == 1 else f"{attempts} attempts"
        if error.retry_after is not None and error.retry_after > self._retry.patience:
            reason += f"; the server asks to wait {error.retry_after:.0f} seconds"
        if isinstance(error, _TooLate):
            reason += f". {_SLOW_SERVER}"
        return RetriesExhausted(f"{self.model}, {role}: no reply after {tried}: {reason}. {self.ledger.to_continue}")
