"""Run a model on this machine for many asyncio tasks, whose calls share batches in one thread.

In float32 a reply does not depend on other calls in its batch. This also holds for sampled replies, since each call has
its own random generator.

Tested in `tests/llm/backends/test_hf.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch

from tripletune.core.calls import CallError, Endpoint, SetupError
from tripletune.models.fingerprints import model_fingerprint
from tripletune.models.local import Decoder
from tripletune.models.local.requests import Request
from tripletune.models.specs import resolve

logger = logging.getLogger(__name__)
T = TypeVar("T")


def fingerprinted_name(name: str, spec: str | Path) -> str:
    """A model's name for the ledger: with its fingerprint, since a folder may be trained again.

    A model of the hub keeps its name, because it has no fingerprint (`models.fingerprints.model_fingerprint`).
    """
    fingerprint = model_fingerprint(resolve(spec))
    if not fingerprint:
        return name
    return f"{name}@{fingerprint}"


class DecodingService(Endpoint):
    """Run the requests of asyncio tasks on a decoder in one thread; the event loop may change between calls.

    Args:
        make: Loads the model and creates the decoder; called once, in the thread.
        model: The model's name, for messages.
    """

    may_be_silent = True

    def __init__(self, make: Callable[[], Decoder], model: str) -> None:
        self._make = make
        self.model = model
        self._decoder: Decoder | None = None
        # Requests for the next run of the decoder.
        self._arrived: list[Request] = []
        # The task that waits for each request.
        self._futures: dict[Request, asyncio.Future[None]] = {}
        # Whether the thread is running the decoder, which meanwhile accepts more requests.
        self._running = False
        self._opening: asyncio.Future[None] | None = None
        self._worker: asyncio.Task[None] | None = None
        self._executor: ThreadPoolExecutor | None = None

    async def open(self) -> None:
        """Load the model unless it is loaded.

        All tasks wait for one loading. It is shielded, since a task that is cancelled must not cancel it for the
        others.
        """
        if self._decoder is not None:
            return
        if self._opening is None or self._opening.done():
            self._opening = asyncio.ensure_future(self._in_thread(self.load))
        try:
            await asyncio.shield(self._opening)
        except (ValueError, OSError) as error:
            raise SetupError(str(error)) from error
        except Exception as error:
            raise SetupError(f"{self.model} can't be loaded ({type(error).__name__}: {error})") from error

    def load(self) -> None:
        """See `Endpoint.load`; `open` calls this in the model's thread, programs before they have an event loop."""
        if self._decoder is None:
            self._decoder = self._make()

    async def reply(self, request: Request) -> None:
        """Generate the reply of a request, whose fields then hold it.

        A decoder that runs takes the request at its next token. Else it waits in `_arrived` for `_run_decoder`, which
        sorts what has arrived together.
        """
        await self.open()
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._futures[request] = future
        if self._running and self._decoder is not None:
            self._decoder.add(request)
        else:
            self._arrived.append(request)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._run_decoder())
        try:
            await future
        finally:
            # This also runs if the task was cancelled or the event loop ended.
            self._futures.pop(request, None)
            request.abandoned = True

    async def close(self) -> None:
        """End the thread. Waiting requests fail, and running ones stop at the next token.

        A second call does nothing. Callers whose event loop has ended can't be told and are left alone.
        """
        error = CallError(f"{self.model}: the model was closed while this call waited")
        for future in self._futures.values():
            if not future.done() and not future.get_loop().is_closed():
                future.set_exception(error)
        self._arrived = []
        # Both are unset before the first `await`, so that another task cannot close them again.
        decoder = self._decoder
        self._decoder = None
        if decoder is not None:
            decoder.stop()
        executor = self._executor
        self._executor = None
        if executor is not None:
            await asyncio.to_thread(executor.shutdown)

    async def _run_decoder(self) -> None:
        """Run the decoder until no task waits for a reply.

        The only task that calls the decoder's `run`; `reply` starts it if it has ended. `close` sets `_decoder` to
        None, which ends it too.
        """
        while self._futures and self._decoder is not None:
            decoder = self._decoder
            await self._wait_for_arrivals()
            # Sort similar prompts together, since prompts that are read together are padded to one length.
            for request in sorted(self._arrived, key=lambda request: (request.shared, len(request.prompt))):
                if not request.abandoned:
                    decoder.add(request)
            self._arrived = []
            self._running = True
            try:
                await self._in_thread(decoder.run)
            except Exception as error:
                # Calls that arrive from now on wait in `_arrived`: `_run_one_by_one` clears the decoder for each
                # request.
                self._running = False
                await self._run_one_by_one(decoder, error)
            finally:
                self._running = False
            # The result of `run` is not used, since it lacks requests that ended after their event loop was gone.
            self._wake_finished()
            await asyncio.sleep(0)

    async def _wait_for_arrivals(self) -> None:
        """Wait while other tasks still make calls, so that these share a batch.

        It ends when no call came in a whole step of the event loop.
        """
        count = -1
        while count != len(self._arrived):
            count = len(self._arrived)
            await asyncio.sleep(0)

    async def _run_one_by_one(self, decoder: Decoder, error: Exception) -> None:
        """After a failure, run each request by itself to find the faulty one.

        An error of a batch does not say which request caused it, and the others should still get their replies. Those
        in `_arrived` have not run yet, so they wait for the next batch.
        """
        self._wake_finished()
        waiting = [request for request in self._futures if request not in self._arrived]
        logger.warning("%s: %s; the %d waiting calls now run one by one", self.model, error, len(waiting))
        for request in waiting:
            decoder.clear()
            decoder.add(request.restart())
            try:
                while not request.done and self._decoder is decoder:
                    await self._in_thread(decoder.run)
            except Exception as problem:
                if isinstance(problem, torch.OutOfMemoryError):
                    problem = CallError(
                        f"{self.model}: a prompt of {len(request.prompt)} tokens and a reply of up to {request.limit} "
                        "don't fit the memory: set dtype bfloat16, lower max_tokens, or use a smaller model"
                    )
                future = self._futures.get(request)
                if future is not None and not future.done():
                    future.set_exception(problem)
            self._wake_finished()
        decoder.clear()

    def _wake_finished(self) -> None:
        """Wake the tasks whose replies are done.

        A task that was cancelled has a finished future, whose result cannot be set again.
        """
        for request, future in self._futures.items():
            if request.done and not future.done():
                future.set_result(None)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Run a function in the one thread of the model, which is started at the first call.

        A decoder is not safe for several threads, and the event loop must stay free for calls that arrive meanwhile.
        """
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="decoding")
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)
