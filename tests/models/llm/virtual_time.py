"""An event loop whose clock jumps over every wait: minutes of rate limits and backoff pass in milliseconds."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """When nothing is ready to run, the clock goes to the next timer at once.

    Don't wait for threads in it: their work is not a timer, and the clock would run ahead of them.
    """

    ahead = 0.0

    def time(self) -> float:
        return super().time() + self.ahead

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:
            self.ahead += max(0.0, self._scheduled[0]._when - self.time())
        super()._run_once()


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`, on virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(coroutine)


def now() -> float:
    """The running loop's time, in seconds."""
    return asyncio.get_running_loop().time()
