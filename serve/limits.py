"""Limit the questions that a server answers at once, queue more questions, and end them at shutdown."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any


class Refused(Exception):
    """An error response in OpenAI's form."""

    def __init__(
        self, status: int, message: str, code: str = "", param: str | None = None, headers: Any = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param
        self.headers = {**(headers or {}), **({"WWW-Authenticate": "Bearer"} if status == 401 else {})}

    def to_json(self) -> dict[str, Any]:
        """The body of the response."""
        usual = "invalid_request_error" if self.status < 500 else "server_error"
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status, usual)
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code or None}}


def closing() -> Refused:
    """The response to a question while the server shuts down."""
    return Refused(503, "the server is shutting down", "shutting_down")


class Door:
    """Let at most `places` questions run at once, while at most `queue` more questions wait."""

    def __init__(self, places: int, queue: int, seconds: float) -> None:
        self.places, self.queue, self.seconds = places, queue, seconds
        self.under_way = self.waiting = 0
        self.closed, self._free = False, asyncio.Semaphore(places)
        self._tasks = set[Any]()
        # A moving mean of the seconds per answer, for the header Retry-After.
        self._usual = 1.0

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Wait for a place and keep it during the block; when the time is up, the block ends with a `Refused`."""
        if self.closed:
            raise closing()
        if len(self._tasks) >= self.places + self.queue:
            what = f"{self.under_way} questions are running and {self.waiting} are waiting: try again later"
            wait = min(max(round(self._usual * (1 + self.waiting / self.places)), 1), 60)
            raise Refused(429, what, "too_many_questions", headers={"Retry-After": str(wait)})
        task, started = asyncio.current_task(), 0.0
        self._tasks.add(task)
        self.waiting += 1
        try:
            async with asyncio.timeout(self.seconds) as limit, self._free:
                self.waiting, self.under_way, started = self.waiting - 1, self.under_way + 1, time.monotonic()
                yield
                self._usual += 0.2 * (time.monotonic() - started - self._usual)
        except TimeoutError:
            if not limit.expired():
                raise
            raise Refused(504, f"no answer within {self.seconds:g} seconds", "timeout") from None
        finally:
            self._tasks.discard(task)
            self.under_way -= started > 0
            self.waiting -= started == 0

    async def close(self, grace: float) -> None:
        """Refuse new questions, wait for accepted ones, and cancel the rest after `grace` seconds."""
        self.closed = True
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace)
        for task in self._tasks:
            task.cancel()
