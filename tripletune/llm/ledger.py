"""The ledger: an SQLite file with every LLM call, its reply and its cost.

The key of a call is a hash of model, sampling and messages, so the ledger serves as cache, as record of tokens, and to
resume runs. Several processes may use one file: the first stored reply is kept, and a process waits while another
process makes the same call.

`Ledger.store` returns after the commit, so a returned reply survives `kill -9` (`core.sqlite`). A commit takes 0.2 ms
and runs in the event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sqlite3
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]

from tripletune.core.calls import Completion, Message, Sampling, TokenScores
from tripletune.core.data.fields import checked
from tripletune.core.files import private
from tripletune.core.sqlite import Kind, UnusableFile, file_error, open_database
from tripletune.llm.replies import is_reply

OK, FAILED, PENDING = "ok", "failed", "pending"
_CLAIM_SECONDS = 0.05
_SAMPLING = {"temperature": float, "top_p": float, "max_tokens": int, "seed?": int, "schema?": str, "scored?": bool}
_TABLES = """
CREATE TABLE calls (
    id INTEGER PRIMARY KEY,
    key TEXT NOT NULL UNIQUE,
    model TEXT NOT NULL,
    sampling TEXT NOT NULL,
    messages TEXT NOT NULL,
    text TEXT NOT NULL,
    prompt_tokens INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL,
    seconds REAL NOT NULL,
    retries INTEGER NOT NULL,
    finish_reason TEXT NOT NULL,
    status TEXT NOT NULL CHECK (status IN ('ok', 'failed', 'pending')),
    detail TEXT NOT NULL,
    time TEXT NOT NULL
);
CREATE INDEX calls_pending ON calls (model, detail, id) WHERE status = 'pending';
CREATE TABLE uses (
    id INTEGER PRIMARY KEY,
    call_id INTEGER NOT NULL REFERENCES calls (id),
    role TEXT NOT NULL,
    question_id TEXT NOT NULL,
    UNIQUE (call_id, role, question_id)
);
CREATE TABLE batches (id INTEGER PRIMARY KEY, file TEXT NOT NULL, requests INTEGER NOT NULL, time TEXT NOT NULL);
CREATE TABLE imports (digest TEXT PRIMARY KEY, replies INTEGER NOT NULL, time TEXT NOT NULL);
"""
LEDGER = Kind("ledger", 0x54544C4C, 1, _TABLES)
NOW = "strftime('%Y-%m-%dT%H:%M:%SZ', 'now')"
# A reply is never replaced. A failure may be replaced by anything, and so may what is no reply (`is_reply`; older
# versions stored it); a call that waits for a batch may be replaced only by its reply.
PUT = f"""
INSERT INTO calls (key, model, sampling, messages, text, prompt_tokens, completion_tokens, seconds, retries,
    finish_reason, status, detail, time)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, coalesce(?, {NOW}))
ON CONFLICT (key) DO UPDATE SET text = excluded.text, prompt_tokens = excluded.prompt_tokens,
    completion_tokens = excluded.completion_tokens, seconds = excluded.seconds, retries = excluded.retries,
    finish_reason = excluded.finish_reason, status = excluded.status, detail = excluded.detail, time = excluded.time
WHERE calls.status = 'failed' OR (calls.status = 'pending' AND excluded.status = 'ok')
    OR (calls.status = 'ok' AND NOT is_reply(calls.text, calls.finish_reason))
"""
ADD_USE = "INSERT OR IGNORE INTO uses (call_id, role, question_id) SELECT id, ?2, ?3 FROM calls WHERE key = ?1"
_REPLY = """
SELECT text, prompt_tokens, completion_tokens, seconds, finish_reason, retries, detail FROM calls
WHERE key = ? AND status = 'ok' AND is_reply(text, finish_reason)
"""
# The values of a statement's "?", or of a row's columns, in their order.
SqlParameters = tuple[str | int | float | None, ...]
canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode


@lru_cache(maxsize=256)
def _sampling_text(sampling: Sampling) -> str:
    """A sampling as canonical JSON; cached, since a run has only a few samplings, and every call needs one."""
    return canonical(sampling.to_json())


class Call(NamedTuple):
    """A call in the ledger.

    Attributes:
        key: A hash of the other three, 40 hexadecimal digits.
        model: The model's name in the ledger.
        sampling: The sampling as canonical JSON.
        messages: The messages as canonical JSON.
    """

    key: str
    model: str
    sampling: str
    messages: str


class CallState(NamedTuple):
    """How far a call is.

    Attributes:
        status: `OK`, `FAILED` or `PENDING`.
        detail: Why a call failed, or the request file of a pending call; of an answered call see `row_of`.
    """

    status: str
    detail: str


class FirstUse(NamedTuple):
    """Who made a stored call first.

    Attributes:
        time: When the reply was stored, in UTC, in ISO format.
    """

    role: str
    question_id: str
    time: str


def make_call(model: str, sampling: Sampling | str, messages: Sequence[Message] | str) -> Call:
    """Convert a call to the ledger's form; equal calls have equal keys in every process and Python version.

    `sampling` and `messages` may be canonical JSON from a ledger.
    """
    if isinstance(sampling, Sampling):
        sampling = _sampling_text(sampling)
    if not isinstance(messages, str):
        messages = canonical(list(messages))
    try:
        # JSON escapes line breaks, so a line break separates the three parts.
        content = "\n".join((canonical(model), sampling, messages)).encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the messages contain an unpaired surrogate (U+{ord(error.object[error.start]):04X})"
        ) from None
    return Call(hashlib.blake2b(content, digest_size=20).hexdigest(), model, sampling, messages)


def sampling_of(text: str) -> Sampling:
    """Read a call's sampling back."""
    return Sampling(**checked(json.loads(text), "sampling", _SAMPLING))


def row_of(call: Call, reply: Completion, status: str = OK, detail: str = "", time: str | None = None) -> SqlParameters:
    """The parameters of `PUT`, in the order of its columns; the default time is now.

    The detail of an answered call holds the prompt tokens in the provider's cache, if there are any, whether the reply
    came from a Batch API, and the reply's scores, if the model gave some.
    """
    if status == OK:
        about: dict[str, Any] = {}
        if reply.cache_read or reply.cache_written:
            about = {"cache_read": reply.cache_read, "cache_written": reply.cache_written}
        if reply.batch:
            about["batch"] = True
        if reply.scores is not None:
            about["scores"] = list(reply.scores)
        if about:
            detail = canonical(about)
    numbers = (reply.prompt_tokens, reply.completion_tokens, reply.seconds, reply.retries)
    return (*call, reply.text, *numbers, reply.finish_reason, status, detail, time)


class SeedRepeats(NamedTuple):
    """Calls that differ only in their seed.

    Attributes:
        calls: Answered calls with a seed and a temperature, whose messages were sent with other seeds, too.
        equal: How many of them have the reply of another of them: a server that ignores seed or temperature gives one
            reply, and it is paid for as often as it is asked for.
    """

    calls: int
    equal: int


def seed_repeats(path: str | Path, roles: Sequence[str] | None = None) -> SeedRepeats:
    """Count the equal replies of different seeds in a ledger, of some roles or (None) of all.

    Servers that ignore seeds reply alike to all of them; such replies are no further samples.
    """
    query = """
    SELECT coalesce(sum(calls), 0), coalesce(sum(calls - texts), 0) FROM (
        SELECT count(*) AS calls, count(DISTINCT text) AS texts FROM calls
        WHERE status = 'ok' AND json_extract(sampling, '$.temperature') > 0
            AND json_extract(sampling, '$.seed') IS NOT NULL
            AND (?1 IS NULL OR id IN (SELECT call_id FROM uses WHERE role IN (SELECT value FROM json_each(?1))))
        GROUP BY model, messages, json_remove(sampling, '$.seed') HAVING count(*) > 1
    )
    """
    wanted = None if roles is None else json.dumps(list(roles))
    with Ledger(path, create=False) as ledger, ledger.connected() as connection:
        return SeedRepeats(*connection.execute(query, (wanted,)).fetchone())


def open_ledger(path: str | Path, create: bool = True) -> sqlite3.Connection:
    """Open a ledger's file (see `core.sqlite.open_database`), with `is_reply` as an SQL function."""
    connection = open_database(Path(path), LEDGER, create, only_read=not create)
    connection.create_function("is_reply", 2, is_reply, deterministic=True)
    return connection


class NoLedger:
    """A ledger that stores nothing; see `Ledger`."""

    to_continue = "Run it again"

    async def store(self, call: Call, completion: Completion, *about: object) -> Completion:
        """Return the reply."""
        return completion

    def claim(self, key: str) -> AbstractAsyncContextManager[None]:
        """Do not wait."""
        return nullcontext()

    def close(self, *about: object) -> None:
        """Do nothing."""

    get = fail = reject = use = close


class Ledger:
    """The calls in one SQLite file; a context manager. Use it from one thread.

    A missing file is created at the first call, so that a run that can't start leaves no file. With `create=False` the
    file must exist and is only read.
    """

    def __init__(self, path: str | Path, create: bool = True) -> None:
        self.path = Path(path)
        self.to_continue = f"The replies so far are kept in {path}: run the same command again to continue"
        self._uses: list[tuple[str, str, str]] = []
        self._closed = False
        self._claims: IO[bytes] | None = None
        self._opened = open_ledger(self.path, create) if self.path.exists() or not create else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get(self, key: str) -> Completion | None:
        """The stored reply of a call, or `None`, also for a call that failed or waits."""
        with self.connected() as connection:
            row = connection.execute(_REPLY, (key,)).fetchone()
        if row is None:
            return None
        return _completion_from_row(key, row, cached=True)

    def first_use(self, key: str) -> FirstUse | None:
        """Who made a stored call first; `None` if the ledger does not say it."""
        uses = "SELECT role, question_id, time FROM uses JOIN calls ON calls.id = call_id WHERE key = ?"
        with self.connected() as connection:
            row = connection.execute(f"{uses} ORDER BY uses.id LIMIT 1", (key,)).fetchone()
        return FirstUse(*row) if row else None

    def state(self, key: str) -> CallState | None:
        """Status and detail of a call; `None` if the call was never made."""
        with self.connected() as connection:
            row = connection.execute("SELECT status, detail FROM calls WHERE key = ?", (key,)).fetchone()
        return CallState(*row) if row else None

    async def store(self, call: Call, completion: Completion, role: str, question_id: str = "") -> Completion:
        """Commit a reply to the file, and return the stored reply (another process may have stored its reply first).

        Once this returns, the reply survives a kill. The use is written with it, so that costs count the call.
        """
        with self.transaction() as connection:
            is_written = connection.execute(PUT, row_of(call, completion)).rowcount > 0
            self._uses.append((call.key, role, question_id))
            if is_written:
                return completion
            row = connection.execute(_REPLY, (call.key,)).fetchone()
        if row is None:
            return completion
        return _completion_from_row(call.key, row, cached=False)

    def fail(
        self, call: Call, reason: str, retries: int, role: str, question_id: str = "", reply: Completion | None = None
    ) -> None:
        """Store that a call failed, the reason, and the cost of an file_error `reply`; the next run calls again."""
        failure = replace(reply or Completion("", finish_reason="error"), text="", retries=retries)
        with self.transaction() as connection:
            connection.execute(PUT, row_of(call, failure, FAILED, reason))
            self._uses.append((call.key, role, question_id))

    def wait_for(self, call: Call) -> None:
        """Store that a call waits to be written to a request file, unless it waits already."""
        with self.transaction() as connection:
            connection.execute(PUT, row_of(call, Completion("", finish_reason=""), PENDING))

    def reject(self, key: str, reason: str) -> None:
        """Mark a stored reply as a failed call, so that the next run calls again."""
        with self.transaction() as connection:
            connection.execute("UPDATE calls SET status = 'failed', detail = ? WHERE key = ?", (reason, key))

    def use(self, key: str, role: str, question_id: str) -> None:
        """Record that a stored call was used again; this is written with the next reply, or by `close`."""
        self._uses.append((key, role, question_id))

    @asynccontextmanager
    async def claim(self, key: str) -> AsyncIterator[None]:
        """Wait until no other process is making the same call; the block then makes it.

        The system releases a claim when its process ends in any way. On systems without such locks (Windows), two
        processes may make the same call.
        """
        if fcntl is None:
            yield
            return
        if self._claims is None:
            self._claims = open(f"{self.path}-claims", "ab", opener=private)  # noqa: SIM115
        # Each key locks one byte; nothing is written to the file.
        place = int(key[:15], 16)
        while True:
            try:
                fcntl.lockf(self._claims, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
                break
            except (BlockingIOError, PermissionError):
                await asyncio.sleep(_CLAIM_SECONDS)
        try:
            yield
        finally:
            if not self._claims.closed:
                fcntl.lockf(self._claims, fcntl.LOCK_UN, 1, place)

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Open a write transaction, which is committed with the recorded uses when the block succeeds."""
        with self.connected() as connection, connection:
            connection.execute("BEGIN IMMEDIATE")
            yield connection
            uses = self._uses
            self._uses = []
            connection.executemany(ADD_USE, uses)

    def close(self) -> None:
        """Write the recorded uses and close the file; a second call does nothing."""
        if self._closed:
            return
        try:
            if self._uses:
                # Each transaction writes the recorded uses at its end.
                with self.transaction():
                    pass
        finally:
            self._closed = True
            for file in (self._opened, self._claims):
                if file is not None:
                    file.close()

    @contextmanager
    def connected(self) -> Iterator[sqlite3.Connection]:
        """Yield the open file; SQLite's errors become `UnusableFile`. The file is opened at the first use."""
        if self._closed:
            raise UnusableFile(f"ledger {self.path} is closed")
        if self._opened is None:
            self._opened = open_ledger(self.path)
        try:
            yield self._opened
        except sqlite3.Error as error:
            raise file_error(self.path, LEDGER, error) from error


def _completion_from_row(key: str, row: tuple[Any, ...], cached: bool) -> Completion:
    """The reply in a row of `_REPLY`; what few replies have is in the row's `detail` (see `row_of`)."""
    text, prompt_tokens, completion_tokens, seconds, finish_reason, retries, detail = row
    about = json.loads(detail) if detail else {}
    if "scores" in about:
        about["scores"] = TokenScores(*about["scores"])
    return Completion(
        text=text,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        seconds=seconds,
        finish_reason=finish_reason,
        retries=retries,
        cached=cached,
        key=key,
        **about,
    )
