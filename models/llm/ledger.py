"""The ledger: an SQLite file with every LLM call, its reply and what it cost.

A call is known by a hash of model, sampling and messages, so the ledger is the cache, the way back after a crash and
the account of tokens at once. Several processes may use one file: the first reply stored for a call wins, and all of
them see that one.

Replies that arrive together are written in one transaction (`models.llm.ledger_writer`). `Ledger.put` returns after the
commit, so a reply that a caller has seen outlives `kill -9`. (The file is in WAL mode with synchronous=NORMAL: a power
cut may take the last moments, never the file.) WAL needs a local disk, not a network file system.

    tripletune ledger stats|export|verify|import FILE
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tripletune.models.llm.client import Message, Sampling
from tripletune.models.llm.ledger_file import open_file
from tripletune.models.llm.ledger_writer import LedgerWriter, trouble
from tripletune.models.local.generation import Completion

T = TypeVar("T")
OK, FAILED, PENDING = "ok", "failed", "pending"

CALL_COLUMNS = (
    "key, model, sampling, messages, text, prompt_tokens, completion_tokens, seconds, retries, finish_reason, "
    "status, detail, time"
)
# A reply is never replaced. A failure gives way to anything, a call that waits for a batch only to its reply.
PUT = f"""
INSERT INTO calls ({CALL_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (key) DO UPDATE SET text = excluded.text, prompt_tokens = excluded.prompt_tokens,
    completion_tokens = excluded.completion_tokens, seconds = excluded.seconds, retries = excluded.retries,
    finish_reason = excluded.finish_reason, status = excluded.status, detail = excluded.detail, time = excluded.time
WHERE calls.status = 'failed' OR (calls.status = 'pending' AND excluded.status = 'ok')
"""
_REPLY = "SELECT text, prompt_tokens, completion_tokens, seconds, finish_reason, retries FROM calls WHERE key = ?"
_OK_REPLY = f"{_REPLY} AND status = 'ok'"
# One statement for many uses: a statement a use would pass Python's lock to and fro for each of them.
_USES = """
INSERT OR IGNORE INTO uses (call_id, role, question_id)
SELECT calls.id, json_extract(one.value, '$[1]'), json_extract(one.value, '$[2]')
FROM json_each(?) AS one CROSS JOIN calls ON calls.key = json_extract(one.value, '$[0]')
"""
_USES_HELD = 256
_encode = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode


class Call(NamedTuple):
    """A call as the ledger knows it: its key and the canonical JSON of what was asked."""

    key: str
    model: str
    sampling: str
    messages: str


def make_call(model: str, sampling: Sampling, messages: Sequence[Message]) -> Call:
    """The ledger's view of a call.

    Args:
        model: As in `models.llm.client.Backend.model`.
        sampling: How the reply is drawn.
        messages: The chat.

    Returns:
        Key and JSON texts; equal calls give equal ones in every process and Python version.

    Raises:
        ValueError: the messages hold something that is not JSON or not Unicode.
    """
    return call_of_json(model, _sampling_json(sampling), _encode(list(messages)))


def call_of_json(model: str, sampling: str, messages: str) -> Call:
    """A call from texts that are canonical already; `make_call` for everything else.

    Raises:
        ValueError: a text is not Unicode.
    """
    try:
        # A line break is escaped in JSON, so that the three parts can't run into each other.
        content = "\n".join((_encode(model), sampling, messages)).encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"the messages hold half a character (U+{ord(error.object[error.start]):04X})") from None
    return Call(hashlib.blake2b(content, digest_size=20).hexdigest(), model, sampling, messages)


def canonical(value: Any) -> str:
    """JSON with sorted keys and without spaces."""
    return _encode(value)


def sampling_of(text: str) -> Sampling:
    """Read a call's sampling back.

    Raises:
        ValueError: the text is no sampling.
    """
    try:
        values = json.loads(text)
        return Sampling(**{**values, "stop": tuple(values.get("stop", ()))})
    except (TypeError, AttributeError) as error:
        raise ValueError(f"sampling {text[:80]!r} can't be read: {error}") from None


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def row_of(call: Call, completion: Completion, status: str = OK, detail: str = "") -> tuple[Any, ...]:
    """The parameters of `PUT`."""
    return (
        *call,
        completion.text,
        completion.prompt_tokens,
        completion.completion_tokens,
        completion.seconds,
        completion.retries,
        completion.finish_reason,
        status,
        detail,
        now(),
    )


def add_uses(connection: sqlite3.Connection, uses: Sequence[tuple[str, str, str]]) -> None:
    """Note (key, role, question id) for calls that are stored; those noted before are passed over."""
    connection.execute(_USES, (_encode(uses).encode("utf-8", "replace").decode("utf-8"),))


class Ledger:
    """The calls of one SQLite file; a context manager.

    Reads are synchronous look-ups by key. Use it from one thread; its writer thread is its own business.

    Args:
        path: The file; made when it is not there.

    Raises:
        LedgerError: the file is no ledger, is damaged, or was written by a newer version.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._reader = open_file(self.path)
        self._uses: list[tuple[str, str, str]] = []
        try:
            self._writer = LedgerWriter(self.path)
        except sqlite3.Error as error:
            self._reader.close()
            raise trouble(self.path, error) from error

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get(self, key: str) -> Completion | None:
        """The stored reply of a call, or `None`."""
        row = self._row(_OK_REPLY, key)
        return None if row is None else _completion(row, cached=True)

    def state(self, key: str) -> tuple[str, str] | None:
        """Status and detail of a call; `None` when it was never made.

        The detail of a failed call is its reason, that of a pending one the request file it waits in.
        """
        return self._row("SELECT status, detail FROM calls WHERE key = ?", key)

    async def put(self, call: Call, completion: Completion, role: str, question_id: str = "") -> Completion:
        """Store a reply; it is safe on return. It is stored even when the waiting task is cancelled.

        Returns:
            The reply that the ledger keeps: this one, or the one that another process stored before.
        """
        stored = await self._submit(_put(row_of(call, completion), (call.key, role, question_id)))
        return completion if stored is None else stored

    async def fail(self, call: Call, reason: str, retries: int, role: str, question_id: str = "") -> None:
        """Store that a call failed and why. It is not given back as a reply: the next run asks again."""
        row = row_of(call, Completion("", retries=retries, finish_reason="error"), FAILED, reason)
        await self._submit(_put(row, (call.key, role, question_id)))

    async def wait_for(self, call: Call) -> None:
        """Store that a call waits to be written to a request file; nothing changes when it waits already."""
        await self._submit(_put(row_of(call, Completion("", finish_reason=""), PENDING), None))

    def use(self, key: str, role: str, question_id: str) -> None:
        """Note that a stored call was used again; written in groups, at the latest by `close`."""
        self._uses.append((key, role, question_id))
        if len(self._uses) >= _USES_HELD:
            self._send_uses(self._writer.send)

    def transact(self, function: Callable[[sqlite3.Connection], T]) -> T:
        """Run a function in a write transaction of the writer's connection, and wait for its commit."""
        return self._writer.transact(function)

    def close(self) -> None:
        """Write what waits and close the file; the second call does nothing."""
        if self._uses:
            self._send_uses(self._writer.send)
        self._writer.close()
        self._reader.close()

    def _row(self, query: str, key: str) -> Any:
        try:
            return self._reader.execute(query, (key,)).fetchone()
        except sqlite3.Error as error:
            raise trouble(self.path, error) from error

    async def _submit(self, function: Callable[[sqlite3.Connection], T]) -> T:
        if self._uses:
            self._send_uses(self._writer.join_next)
        return await self._writer.submit(function)

    def _send_uses(self, send: Callable[[Callable[[sqlite3.Connection], Any]], None]) -> None:
        uses, self._uses = self._uses, []
        send(lambda connection: add_uses(connection, uses))


@lru_cache(maxsize=256)
def _sampling_json(sampling: Sampling) -> str:
    # 0 and 0.0 are the same temperature and must be the same text. A field that `Sampling` gets later must be left out
    # at its default, as the schema is, or every key changes.
    values = {**asdict(sampling), "temperature": float(sampling.temperature), "top_p": float(sampling.top_p)}
    if sampling.schema is None:
        del values["schema"]
    return _encode(values)


def _completion(row: tuple[Any, ...], cached: bool) -> Completion:
    text, prompt_tokens, completion_tokens, seconds, finish_reason, retries = row
    return Completion(text, prompt_tokens, completion_tokens, seconds, 0, finish_reason, retries, cached)


def _put(row: tuple[Any, ...], use: tuple[str, str, str] | None) -> Callable[[sqlite3.Connection], Completion | None]:
    def run(connection: sqlite3.Connection) -> Completion | None:
        written = connection.execute(PUT, row).rowcount
        if use is not None:
            add_uses(connection, [use])
        found = None if written else connection.execute(_OK_REPLY, (row[0],)).fetchone()
        return None if found is None else _completion(found, cached=False)

    return run


if __name__ == "__main__":
    from tripletune.models.llm.ledger_cli import main

    sys.exit(main())
