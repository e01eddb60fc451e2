"""Work on many questions at once and hand the results on in order, in memory that does not grow with their number."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")
# Results that are done but wait for a slower one before them, for each one at work. Beyond that the work waits too.
_WAITING = 4


async def in_order(
    items: Iterator[T], work: Callable[[T], Awaitable[R]], concurrency: int
) -> AsyncGenerator[tuple[T, R], None]:
    """Run `work` on every item and yield the results in the order of the items.

    A sliding window: a slow item holds back the results after it, not the work on them. Items are taken from the
    iterator only when there is room, so a fast reader does not run ahead of a slow teacher. An exception of `work`
    is raised at its item's turn; whatever happens, nothing is left running.

    Args:
        items: What to work on.
        work: The work on one item.
        concurrency: Items at work at a time.

    Yields:
        Pairs of item and result.
    """
    room = asyncio.Semaphore(concurrency)
    window: deque[tuple[T, asyncio.Future[R]]] = deque()
    try:
        for item in items:
            await room.acquire()
            task = asyncio.ensure_future(work(item))
            task.add_done_callback(lambda _: room.release())
            window.append((item, task))
            # A turn of the event loop: work that never waits would otherwise only start when the window is full.
            await asyncio.sleep(0)
            while window and (window[0][1].done() or len(window) > _WAITING * concurrency):
                yield window[0][0], await window[0][1]
                window.popleft()
        while window:
            yield window[0][0], await window[0][1]
            window.popleft()
    finally:
        for _, running in window:
            running.cancel()
        await asyncio.gather(*(running for _, running in window), return_exceptions=True)
