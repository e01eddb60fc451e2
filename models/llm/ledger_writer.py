"""How a ledger is written: by the event loop where that is quick, by a thread where it may take long.

What is submitted in one turn of the event loop is one transaction, which the loop commits itself: in WAL mode with
synchronous=NORMAL a commit is a write into the system's cache, and takes less time than to hand it to a thread and to
get the interpreter's lock back. The thread has a connection of its own. It waits for other processes that write, moves
the WAL into the file, and finds out which row of a group makes trouble.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import sqlite3
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tripletune.models.llm.ledger_file import LedgerError, connect

logger = logging.getLogger(__name__)
T = TypeVar("T")
_GROUP, _QUEUE = 512, 4096
# Rows that the event loop writes until the thread moves the WAL into the file: some 10 MB of it.
_MOVE_AFTER = 512


class LedgerWriter:
    """Runs functions in write transactions of one SQLite file; use it from one thread.

    Args:
        path: The file.

    Raises:
        sqlite3.Error: it can't be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._group: list[_Job] = []
        self._scheduled: asyncio.AbstractEventLoop | None = None
        self._unmoved = 0
        self._closed = False
        self._jobs: queue.Queue[_Job | None] = queue.Queue(_QUEUE)
        # Opened here: in the thread, a failure would leave everyone waiting for a writer that is not there.
        connection = connect(path)
        # This one waits for nobody and never moves the WAL: both would hold up the event loop.
        self._quick = connect(path, patience=0.0)
        self._quick.execute("PRAGMA wal_autocheckpoint = 0")
        name = f"ledger {path.name}"
        self._thread = threading.Thread(target=self._work, args=(connection,), name=name, daemon=True)
        self._thread.start()

    async def submit(self, function: Callable[[sqlite3.Connection], T]) -> T:
        """Run a function together with all others of this turn of the loop; what it gives back, after the commit.

        It is run even when the waiting task is cancelled.
        """
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[T] = loop.create_future()
        self._add(_Job(function, waiter, loop))
        if self._scheduled is not loop:
            self._scheduled = loop
            loop.call_soon(self._commit)
        return await waiter

    def send(self, function: Callable[[sqlite3.Connection], Any]) -> None:
        """Let the thread run a function; nobody waits for it."""
        self._send(_Job(function))

    def join_next(self, function: Callable[[sqlite3.Connection], Any]) -> None:
        """Run a function before the next one that is submitted, in its transaction."""
        self._add(_Job(function))

    def transact(self, function: Callable[[sqlite3.Connection], T]) -> T:
        """Run a function in the thread and wait for its commit."""
        done: Future[T] = Future()
        self._hand_over()
        self._send(_Job(function, done))
        return done.result()

    def close(self) -> None:
        """Write what waits and end the thread; the second call does nothing."""
        if self._closed:
            return
        self._hand_over()
        self._closed = True
        self._jobs.put(None)
        self._thread.join()
        self._quick.close()

    def _add(self, job: _Job) -> None:
        self._check_open()
        self._group.append(job)

    def _send(self, job: _Job) -> None:
        self._check_open()
        # A full queue holds the caller up until the disk has caught up: memory stays bounded.
        self._jobs.put(job)

    def _check_open(self) -> None:
        if self._closed:
            raise LedgerError(f"ledger {self.path} is closed")

    def _hand_over(self) -> None:
        """Give a group that waits for its turn of the loop to the thread, so that what follows stays behind it."""
        jobs, self._group = self._group, []
        for job in jobs:
            self._send(job)

    def _commit(self) -> None:
        """Write the group here and now; the thread takes it if that can't be done at once."""
        self._scheduled = None
        jobs, self._group = self._group, []
        try:
            outcomes = _run_together(self._quick, jobs)
        except Exception:
            for job in jobs:
                self._send(job)
            return
        _settle([(job.waiter, outcome) for job, outcome in zip(jobs, outcomes) if job.waiter is not None])
        self._unmoved += len(jobs)
        if self._unmoved >= _MOVE_AFTER:
            self._unmoved = 0
            self._send(_MOVE_WAL)

    def _work(self, connection: sqlite3.Connection) -> None:
        """The thread: takes all that waits, commits it together, then tells those who wait."""
        open_ = True
        while open_:
            group = [self._jobs.get()]
            while len(group) < _GROUP:
                try:
                    group.append(self._jobs.get_nowait())
                except queue.Empty:
                    break
            open_ = None not in group
            jobs = [job for job in group if job is not None and job is not _MOVE_WAL]
            try:
                outcomes = _run_together(connection, jobs)
            except Exception:
                # One of them is at fault: each on its own, so that the others don't pay for it.
                outcomes = [self._run_alone(connection, job) for job in jobs]
            _tell(jobs, outcomes)
            if any(job is _MOVE_WAL for job in group):
                self._move_wal(connection)
        connection.close()

    def _move_wal(self, connection: sqlite3.Connection) -> None:
        try:
            # What others still read or write is left for the next time.
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
        except sqlite3.Error as error:
            logger.debug("ledger %s: the WAL could not be moved: %s", self.path, error)

    def _run_alone(self, connection: sqlite3.Connection, job: _Job) -> Any:
        try:
            return _run_together(connection, [job])[0]
        except sqlite3.Error as error:
            return _Failure(trouble(self.path, error))
        except Exception as error:
            return _Failure(error)


def trouble(path: Path, error: sqlite3.Error) -> LedgerError:
    """What SQLite says about a ledger, with the next step."""
    return LedgerError(f"ledger {path}: {error}; `tripletune ledger verify {path}` looks closer")


class _Failure(NamedTuple):
    error: Exception


class _Job(NamedTuple):
    run: Callable[[sqlite3.Connection], Any]
    waiter: asyncio.Future[Any] | Future[Any] | None = None
    loop: asyncio.AbstractEventLoop | None = None


_MOVE_WAL = _Job(lambda connection: None)


def _run_together(connection: sqlite3.Connection, jobs: Sequence[_Job]) -> list[Any]:
    if not jobs:
        return []
    connection.execute("BEGIN IMMEDIATE")
    try:
        outcomes = [job.run(connection) for job in jobs]
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    return outcomes


def _tell(jobs: Sequence[_Job], outcomes: Sequence[Any]) -> None:
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Any, Any]]] = {}
    for job, outcome in zip(jobs, outcomes, strict=True):
        if job.loop is not None:
            by_loop.setdefault(job.loop, []).append((job.waiter, outcome))
        elif job.waiter is not None:
            _settle([(job.waiter, outcome)])
        elif isinstance(outcome, _Failure):
            logger.error("uses of stored replies were not noted: %s", outcome.error)
    for loop, settled in by_loop.items():
        # A loop that was closed meanwhile has nobody waiting; the rows are stored all the same.
        if not loop.is_closed():
            try:
                loop.call_soon_threadsafe(_settle, settled)
            except RuntimeError:
                continue


def _settle(settled: Sequence[tuple[Any, Any]]) -> None:
    for waiter, outcome in settled:
        if not waiter.done():
            if isinstance(outcome, _Failure):
                waiter.set_exception(outcome.error)
            else:
                waiter.set_result(outcome)
