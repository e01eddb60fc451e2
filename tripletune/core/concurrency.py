"""Run coroutines at the same time: all of a batch, a number of equal workers, or a bounded stream in order.

Tested in `tests/data_builders/subq/test_build.py` and `tests/llm/test_ledger_client.py`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")
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
            while window:
                _, first = window[0]
                is_full = len(window) > _WAITING * concurrency
                if not first.done() and not is_full:
                    break
                yield await _take_first(window)
        while window:
            yield await _take_first(window)
    finally:
        # Also if the reader of the results stops early, which closes this generator.
        for _, running in window:
            running.cancel()
        await asyncio.gather(*(running for _, running in window), return_exceptions=True)


async def _take_first(window: deque[tuple[Item, asyncio.Future[Result]]]) -> tuple[Item, Result]:
    """Wait for the first item of the window and remove it; it stays there, to be cancelled, if the wait is ended."""
    item, running = window[0]
    result = await running
    window.popleft()
    return item, result


async def all_of(calls: Iterable[Awaitable[T]]) -> list[T]:
    """Return the results of concurrent calls; a failure is raised after all calls, so that a batch holds every call.

    In the pass that writes a batch file, each call raises that its reply is pending; the first must not end the rest.
    """
    results = await asyncio.gather(*calls, return_exceptions=True)
    values: list[T] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        values.append(result)
    return values


async def in_workers(work: Callable[[], Coroutine[Any, Any, None]], count: int) -> None:
    """Run `count` copies of the work concurrently; the first failure cancels the other copies and is raised.

    The cancelled copies are waited for, so that none of them still writes when the caller handles the failure.
    """
    workers = [asyncio.create_task(work()) for _ in range(count)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
