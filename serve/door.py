"""How many questions a server takes at once, which of them wait, and how it closes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Refused(Exception):
    """What a client gets instead of an answer, in the shape of OpenAI's errors."""

    def __init__(
        self, status: int, message: str, code: str = "", param: str | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param
        self.headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
        if status == 401:
            self.headers["WWW-Authenticate"] = "Bearer"

    def to_json(self) -> dict[str, object]:
        """The body of the response."""
        kind = "invalid_request_error" if self.status < 500 and self.status != 429 else "server_error"
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status, kind)
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code or None}}


def closing() -> Refused:
    """What a question gets when the server ends."""
    return Refused(503, "the server is shutting down", "shutting_down")


class Door:
    """At most `places` questions are answered at once, and at most `queue` more wait for a place."""

    def __init__(self, places: int, queue: int, seconds: float) -> None:
        self.places, self.queue, self.seconds = places, queue, seconds
        self.under_way = self.waiting = 0
        self.closed = False
        self._free = asyncio.Semaphore(places)
        self._tasks = set[asyncio.Task[object]]()
        # Of an answer, as a moving mean; it says when to try again.
        self._usual = 1.0

    def check(self) -> None:
        """Refuse a question that there is no room for."""
        if self.closed:
            raise closing()
        if self.under_way + self.waiting >= self.places + self.queue:
            wait = round(self._usual * (1 + self.waiting / self.places))
            what = f"{self.under_way} questions are under way and {self.waiting} wait: try again later"
            raise Refused(429, what, "too_many_questions", retry_after=min(max(wait, 1), 60))

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Wait for a place and keep it during the block, which ends by a `Refused` when the question's time is up."""
        self.check()
        task = asyncio.current_task()
        self._tasks.add(task)  # type: ignore[arg-type]
        self.waiting += 1
        entered = 0.0
        try:
            async with asyncio.timeout(self.seconds) as limit:
                async with self._free:
                    self.waiting, self.under_way, entered = self.waiting - 1, self.under_way + 1, time.monotonic()
                    yield
                    self._usual += 0.2 * (time.monotonic() - entered - self._usual)
        except TimeoutError:
            if not limit.expired():
                raise
            raise Refused(504, f"no answer within {self.seconds:g} seconds", "timeout") from None
        finally:
            if entered:
                self.under_way -= 1
            else:
                self.waiting -= 1
            self._tasks.discard(task)  # type: ignore[arg-type]

    async def close(self, grace: float) -> None:
        """Let no question in any more, wait for those under way, and end what is left after `grace` seconds."""
        self.closed = True
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace)
        for task in self._tasks:
            task.cancel()
