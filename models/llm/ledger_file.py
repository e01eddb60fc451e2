"""The ledger's file: its tables, and opening it so that only a ledger is taken for one."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from tenacity import Retrying, retry_if_exception_message, stop_after_delay, wait_random

SCHEMA_VERSION = 1
# "TTLL" in ASCII; `file` and we tell a ledger from other SQLite files by it.
APPLICATION_ID = 0x54544C4C
BUSY_SECONDS = 60.0

_SCHEMA = """
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


class LedgerError(ValueError):
    """The ledger file can't be used; the message says why and what to do."""


def open_file(path: Path, create: bool = True) -> sqlite3.Connection:
    """Open a ledger file and make sure that it is one.

    Args:
        path: The file.
        create: Whether to make it when it is not there.

    Raises:
        LedgerError: see `Ledger`.
        FileNotFoundError: it is not there and may not be made.
    """
    if not create and not path.is_file():
        raise FileNotFoundError(f"no such ledger: {path}")
    if path.is_dir():
        raise LedgerError(f"ledger {path} is a folder; name a file in it, for example {path / 'ledger.sqlite'}")
    path.parent.mkdir(parents=True, exist_ok=True)
    connection = None
    try:
        connection = connect(path)
        _check_or_create(connection, path)
    except sqlite3.Error as error:
        if connection is not None:
            connection.close()
        raise LedgerError(
            f"{path} can't be used as a ledger: {error}. If it is damaged, move it away and bring back what can be "
            f"read with `sqlite3 {path} .recover`; if it is another file, name a new one"
        ) from error
    except LedgerError:
        if connection is not None:
            connection.close()
        raise
    return connection


def connect(path: Path, patience: float = BUSY_SECONDS) -> sqlite3.Connection:
    """A connection with the ledger's settings; no transaction begins by itself.

    Args:
        path: The file.
        patience: Seconds to wait while another connection writes.
    """
    connection = sqlite3.connect(path, timeout=patience, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("PRAGMA cache_size = -16384")
    return connection


def _check_or_create(connection: sqlite3.Connection, path: Path) -> None:
    # Going over to WAL ignores the busy timeout, so two processes that make the file at once need another try.
    locked = retry_if_exception_message(match="database is locked")
    Retrying(retry=locked, wait=wait_random(0.01, 0.1), stop=stop_after_delay(BUSY_SECONDS), reraise=True)(
        connection.execute, "PRAGMA journal_mode = WAL"
    )
    connection.execute("BEGIN IMMEDIATE")
    try:
        application = connection.execute("PRAGMA application_id").fetchone()[0]
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        empty = not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if application != APPLICATION_ID and not (empty and application == version == 0):
            raise LedgerError(f"{path} is an SQLite file but no ledger; name another file")
        if version > SCHEMA_VERSION:
            raise LedgerError(
                f"ledger {path} has schema {version}, this version of TripleTune knows {SCHEMA_VERSION}: update it"
            )
        if empty:
            for statement in _SCHEMA.split(";"):
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise
