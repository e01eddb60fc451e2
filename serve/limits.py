"""Limit the questions that a server answers at once, queue more questions, and end them at shutdown."""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from tripletune.core.calls import CallError, PromptTooLong

logger = logging.getLogger(__name__)


class Refused(Exception):
    """An error response in OpenAI's form: HTTP status, message, a code for programs, and the field that is wrong."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str = "",
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.headers = dict(headers or {})
        if status == 401:
            self.headers["WWW-Authenticate"] = "Bearer"

    def to_json(self) -> dict[str, Any]:
        """The body of the response; clients of OpenAI's API choose by `type` whether to try again."""
        kind = "server_error"
        if self.status == 401:
            kind = "authentication_error"
        elif self.status == 429:
            kind = "rate_limit_error"
        elif self.status < 500:
            kind = "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code or None}}


def refusal_at_shutdown() -> Refused:
    """The response to a question while the server shuts down."""
    return Refused(503, "the server is shutting down", "shutting_down")


def refusal_of(error: Exception) -> Refused:
    """The response to a question that failed; what is no client's fault is also logged, without the error's text."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, PromptTooLong):
        return Refused(400, str(error), "context_length_exceeded", "messages")
    # The log has no texts of errors, because they may quote the question.
    if isinstance(error, CallError):
        logger.warning("a question failed: the system's model gave no usable reply (%s)", type(error).__name__)
        return Refused(502, f"the system's model gave no usable reply: {error}", "upstream_error")
    places = "".join(traceback.format_tb(error.__traceback__))
    logger.error("a question failed because of a bug in this program: %s at\n%s", type(error).__name__, places)
    return Refused(500, "the question failed because of a bug in the server; see the server's log", "internal_error")


class Door:
    """Let at most `places` questions run at once, while at most `queue` more questions wait.

    Attributes:
        seconds: Maximum seconds of a question, waiting included.
        under_way: Number of questions that run.
        waiting: Number of questions that wait.
        closed: Whether new questions are refused, since the server shuts down.
    """

    def __init__(self, places: int, queue: int, seconds: float) -> None:
        """Open the door; it needs the event loop of the questions only when the first one comes."""
        self.places = places
        self.queue = queue
        self.seconds = seconds
        self.under_way = 0
        self.waiting = 0
        self.closed = False
        self._free = asyncio.Semaphore(places)
        self._tasks: set[asyncio.Task[Any]] = set()
        # A moving mean of the seconds per answer, for the header Retry-After. The first value is a guess that each
        # answer corrects by a fifth of the difference.
        self._usual = 1.0

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Wait for a place and keep it during the block; when the time is up, the block ends with a `Refused`.

        A question is in `waiting` or in `under_way`, never in both; `started` says which one to lower at the end,
        since a question may end at any `await`. Guarded by `test_a_crowd_waits_or_is_told_when_to_come_back`.
        """
        if self.closed:
            raise refusal_at_shutdown()
        if len(self._tasks) >= self.places + self.queue:
            raise self._refusal_when_full()
        task: Any = asyncio.current_task()
        self._tasks.add(task)
        self.waiting += 1
        started = 0.0
        try:
            async with asyncio.timeout(self.seconds) as limit, self._free:
                started = time.monotonic()
                self.waiting -= 1
                self.under_way += 1
                yield
                self._usual += 0.2 * (time.monotonic() - started - self._usual)
        except TimeoutError:
            # A timeout of the block itself, such as that of a model server, is not ours.
            if not limit.expired():
                raise
            raise Refused(504, f"no answer within {self.seconds:g} seconds", "timeout") from None
        finally:
            self._tasks.discard(task)
            if started:  # it had a place
                self.under_way -= 1
            else:
                self.waiting -= 1

    def _refusal_when_full(self) -> Refused:
        """The response to a question for which there is no room; it says after how many seconds to try again."""
        # The places together answer `places` questions per mean time, so the queue is empty after its length over that.
        seconds = round(self._usual * (1 + self.waiting / self.places))
        message = f"{self.under_way} questions are running and {self.waiting} are waiting: try again later"
        return Refused(429, message, "too_many_questions", headers={"Retry-After": str(min(max(seconds, 1), 60))})

    async def close(self, grace: float) -> None:
        """Refuse new questions, wait for accepted ones, and after `grace` seconds cancel those that still run."""
        self.closed = True
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace)
        for task in self._tasks:
            task.cancel()
