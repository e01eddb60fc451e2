"""Run coroutines at the same time, with a bound and in order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

# Finished results per running item that may wait for a slower item before them. Beyond this, no new item is started.
_WAITING = 4


async def in_order(
    items: Iterator[Item], work: Callable[[Item], Awaitable[Result]], concurrency: int
) -> AsyncGenerator[tuple[Item, Result], None]:
    """Run `work` on every item and yield items with results, in the order of the items.

    At most `concurrency` items are worked on at once. In the sliding window, a slow item delays the results after it
    but not the work on them, and a fast reader does not run ahead of a slow teacher. An exception of `work` is raised
    at its item's turn, and no task is left running.
    """
    room = asyncio.Semaphore(concurrency)
    window: deque[tuple[Item, asyncio.Future[Result]]] = deque()
    try:
        for item in items:
            await room.acquire()
            task = asyncio.ensure_future(work(item))
            task.add_done_callback(lambda _: room.release())
            window.append((item, task))
            # Let the event loop run: otherwise, work that never waits would start only when the window is full.
            await asyncio.sleep(0)
            while window and (window[0][1].done() or len(window) > _WAITING * concurrency):
                yield await _first(window)
        while window:
            yield await _first(window)
    finally:
        for _, running in window:
            running.cancel()
        await asyncio.gather(*(running for _, running in window), return_exceptions=True)


async def _first(window: deque[tuple[Item, asyncio.Future[Result]]]) -> tuple[Item, Result]:
    """Wait for the first item of the window and remove it; it stays there, to be cancelled, if the wait is ended."""
    item, running = window[0]
    result = await running
    window.popleft()
    return item, result
