"""Batch the work of many tasks: requests that wait while a thread is busy are worked on together.

Encoders and indexes are asked by hundreds of questions at once. They run in a thread, so that the event loop never
waits for them, and a batch costs little more time than a single request.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Collection, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from typing import Generic, NamedTuple, TypeVar

from tripletune.core.calls import PromptTooLong

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class _Request(NamedTuple, Generic[K, V]):
    """A call that waits for the values of its keys."""

    keys: Sequence[K]
    future: asyncio.Future[list[V]]


class _Outcome(NamedTuple, Generic[K, V]):
    """What one run of the work gave: the values by key, or the error that ended it."""

    values: dict[K, V]
    error: Exception | None


class _BatchOutcome(NamedTuple, Generic[K, V]):
    """What the work for a batch gave: the values by key, and the error of each request, in their order, or None."""

    values: dict[K, V]
    errors: list[Exception | None]


class Together(Generic[K, V]):
    """Run work for event loops in a thread; waiting requests are batched.

    Args:
        work: Maps distinct keys to their values, in order.
        kept: Maximum number of values to keep by key (the attribute `most`); the oldest are dropped first.
        patience: Seconds that the thread waits for more requests before it starts, since requests come in groups.
        threads: Maximum parallel runs of `work`, for a server that handles several requests at once.
    """

    def __init__(
        self, work: Callable[[list[K]], Sequence[V]], kept: int = 0, patience: float = 0.0, threads: int = 1
    ) -> None:
        self._work = work
        self.most = kept
        self._patience = patience
        # How long the last work took, and when the newest waiting request arrived.
        self._seconds = 0.0
        self._newest = 0.0
        self._kept: dict[K, V] = {}
        self._waiting: list[_Request[K, V]] = []
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(threads)

    async def __call__(self, keys: Sequence[K]) -> list[V]:
        """Return the values of the keys; an error of `work` is raised in all calls that were batched.

        Values that are kept cost no batch. Requests of several event loops may share one, and each is answered in its
        own loop.
        """
        values = [self._kept.get(key) for key in keys]
        if all(value is not None for value in values):
            return values  # type: ignore[return-value]
        loop = asyncio.get_running_loop()
        future: asyncio.Future[list[V]] = loop.create_future()
        with self._lock:
            is_first = not self._waiting or self._waiting[-1].future.get_loop() is not loop
            self._waiting.append(_Request(keys, future))
            self._newest = time.monotonic()
        if is_first:
            # Start in the loop's next step, so that requests of this step are batched.
            loop.call_soon(self._thread.submit, self._work_off)
        return await future

    def _work_off(self) -> None:
        """Work on all waiting requests, in a thread.

        Values are kept before the requests are answered, so that the next request for a key finds it. Requests of
        several event loops may wait, and a future may only be set in its own loop.
        """
        self._wait_for_more()
        wanted: dict[K, None] = {}
        values: dict[K, V] = {}
        with self._lock:
            requests = [request for request in self._waiting if not request.future.cancelled()]
            self._waiting = []
            for key in chain.from_iterable(request.keys for request in requests):
                if key in self._kept:
                    values[key] = self._kept[key]
                else:
                    wanted[key] = None
        start = time.monotonic()
        fresh, errors = self._work_on_batch(requests, wanted)
        self._seconds = time.monotonic() - start
        values |= fresh
        with self._lock:
            self._kept |= fresh
            for key in list(islice(self._kept, max(0, len(self._kept) - self.most))):
                del self._kept[key]

        def answer(loop: asyncio.AbstractEventLoop) -> None:
            """Set the futures of one event loop."""
            for request, error in zip(requests, errors, strict=True):
                if request.future.get_loop() is not loop or request.future.done():
                    continue
                if error is not None:
                    request.future.set_exception(error)
                else:
                    request.future.set_result([values[key] for key in request.keys])

        # Only one call per loop, since each call from another thread costs a switch of the interpreter's lock.
        for loop in {request.future.get_loop() for request in requests}:
            if not loop.is_closed():
                loop.call_soon_threadsafe(answer, loop)

    def _wait_for_more(self) -> None:
        """Wait while more requests arrive, but at most half as long as the work takes.

        Requests come in groups, and a larger batch costs little more time than a small one.
        """
        if not self._patience:
            return
        gap = max(self._patience, self._seconds / 50)
        end = time.monotonic() + max(self._patience, self._seconds / 2)
        while True:
            left = min(self._newest + gap, end) - time.monotonic()
            if left <= 0:
                return
            time.sleep(left)

    def _work_on_batch(self, requests: Sequence[_Request[K, V]], wanted: Collection[K]) -> _BatchOutcome[K, V]:
        """The values of the wanted keys, all in one run of the work.

        A text that is too long fails all requests of a batch, so each of them is then tried alone.
        """
        fresh, error = self._work_or_error(list(wanted))
        errors = [error] * len(requests)
        if isinstance(error, PromptTooLong) and len(requests) > 1:
            # Only one of the requests may have the text that is too long.
            for place, request in enumerate(requests):
                own_keys = [key for key in request.keys if key in wanted and key not in fresh]
                own_values, errors[place] = self._work_or_error(own_keys)
                fresh |= own_values
        return _BatchOutcome(fresh, errors)

    def _work_or_error(self, keys: list[K]) -> _Outcome[K, V]:
        """Run the work for some keys; an error belongs to the calls that wait, and must not end the thread."""
        if not keys:
            return _Outcome({}, None)
        try:
            return _Outcome(dict(zip(keys, self._work(keys), strict=True)), None)
        except Exception as error:
            return _Outcome({}, error)
