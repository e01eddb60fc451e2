"""Work at the same time: coroutines (a batch, equal workers, a bounded stream), and processes that share a build.

Tested in `tests/data_builders/subq/test_build.py`, `tests/llm/test_ledger_client.py` and `tests/core/test_files.py`.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tripletune.core.files import lock_folder

logger = logging.getLogger(__name__)

T = TypeVar("T")
Item = TypeVar("Item")
Result = TypeVar("Result")

# Finished results per running item that may wait for a slower item before them. Beyond this, no new item is started.
_WAITING = 4
# Seconds between two checks of what other processes have finished.
_LOOK = 0.2


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


def build_together(
    folder: str | Path,
    result: str,
    parts: Iterable[Callable[[Path], None]],
    merge: Callable[[list[Path]], None],
    what: str,
) -> None:
    """Build a folder in parts, together with all processes that build the same folder at the same time.

    Each process builds parts that are neither finished nor locked by another process, then waits for the rest. Finished
    parts of a killed process are used. Without file locks each process builds all parts. Processes need no connection,
    so they may also belong to different runs.

    Args:
        folder: A folder whose name identifies everything that its content depends on.
        result: Name of the file that is written last, in every part and in the folder; if it exists, nothing is done.
        parts: Functions that write a part into a given folder; all processes must pass the same functions.
        merge: Builds the folder's content from the folders of the parts, in order.
    """
    from tqdm.auto import tqdm

    folder = Path(folder)
    if (folder / result).exists():
        return
    works = {folder / "parts" / f"{number:05d}": part for number, part in enumerate(parts)}
    places = list(works)
    left = dict(works)
    # Only the process that logs shows the progress bar, and only on a terminal.
    silent = None if logger.isEnabledFor(logging.INFO) else True
    with tqdm(total=len(works), desc=what, unit=" parts", disable=silent) as bar:
        while not (folder / result).exists():
            try:
                for place, part in list(left.items()):
                    if _do_unless_done(place, (folder / result, place / result), partial(part, place)):
                        del left[place]
                        bar.update()
                # Merged only when no part is left: a part that is not done here is being made by another process.
                is_merged = not left and _do_unless_done(folder / "parts", (folder / result,), partial(merge, places))
                if not is_merged:
                    time.sleep(_LOOK)
            except FileNotFoundError:
                # Without locks another process may have merged and removed the parts of this process.
                if not (folder / result).exists():
                    raise
    shutil.rmtree(folder / "parts", ignore_errors=True)


def _do_unless_done(folder: Path, done: Sequence[Path], work: Callable[[], None]) -> bool:
    """Do the work unless its result exists; False if another process is doing it.

    The result is looked for before the lock, which would make a folder, and again with the lock, since another process
    may have finished meanwhile.
    """
    if any(path.exists() for path in done):
        return True
    try:
        lock = lock_folder(folder, "taken")
    except ValueError:
        return False
    with lock:
        if not any(path.exists() for path in done):
            work()
    return True
