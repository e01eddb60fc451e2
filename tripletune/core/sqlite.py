"""Open our SQLite files, which have a kind and version and may be used by several processes at once.

The files are in WAL mode with synchronous=NORMAL: readers don't wait for writers, a killed process leaves only complete
transactions, and a power cut may lose the last transactions, but never the file. WAL needs a local disk.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import tempfile
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from tenacity import Retrying, retry_if_exception_message, stop_after_delay, wait_random

# How long to wait for another process that writes.
_BUSY_SECONDS = 60.0
_MAGIC = b"SQLite format 3\x00"


class UnusableFile(ValueError):
    """A file is not a database of the expected kind and version, or is empty or damaged."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of file, marked by four bytes in its header, which the command `file` also shows."""

    name: str
    application: int
    version: int
    tables: str


def open_database(path: Path, kind: Kind, create: bool = True, only_read: bool = False) -> sqlite3.Connection:
    """Open a file, for any thread, without implicit transactions.

    With `create=False` the file must exist, and without write permission it is only read, so that a program that shows
    a file also works on an archive. Only its owner can read a new file, because prompts and replies may be private.
    `only_read` is for a short read, which may miss later writes.
    """
    if path.is_dir():
        raise UnusableFile(f"{path} is a folder, not a {kind.name}; give a file in this folder")
    if not path.exists():
        if not create:
            raise FileNotFoundError(f"no such {kind.name}: {path}")
        _create_file(path, kind)
    if not path.stat().st_size:
        raise UnusableFile(
            f"{path} is an empty file, not a {kind.name}: the disk was full, or a copy was cut off; restore the file, "
            "or remove it to start again"
        )
    # SQLite writes files beside a database, so the folder counts too.
    has_permission = os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)
    writable = not only_read and (create or has_permission)
    address = f"{path.absolute().as_uri()}?{_uri_query(path, writable)}"
    # If another process changes the file, SQLite sometimes fails at once instead of waiting.
    locked = retry_if_exception_message(match="database is locked")
    retry = Retrying(retry=locked, stop=stop_after_delay(_BUSY_SECONDS), wait=wait_random(0.01, 0.1), reraise=True)
    database = None
    try:
        database = sqlite3.connect(
            address, timeout=_BUSY_SECONDS, isolation_level=None, uri=True, check_same_thread=False
        )
        database.execute("PRAGMA cache_size = -16384")  # 16 MB
        retry(_check_and_prepare, database, path, kind, writable)
    except Exception as error:
        if database is not None:
            database.close()
        if isinstance(error, sqlite3.Error):
            raise file_error(path, kind, error) from None
        raise
    return database


def _uri_query(path: Path, writable: bool) -> str:
    """How SQLite opens a file.

    It writes files beside a database even for reading, unless the database is opened as immutable. With a log (`-wal`)
    beside it, which may hold the last transactions, a database is not immutable: they would not be seen.
    """
    if writable:
        return "mode=rw"
    if path.with_name(f"{path.name}-wal").exists():
        return "mode=ro"
    return "immutable=1"


def file_error(path: Path, kind: Kind, error: sqlite3.Error) -> UnusableFile | OSError:
    """Turn SQLite's error about a file into our error.

    A full or read-only disk is no fault of the file, so it becomes an `OSError`, with the number by which
    `core.program` knows it.
    """
    # Errors of the module itself, such as a parameter of the wrong type, have no code.
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the code without SQLite's extension
    if code == sqlite3.SQLITE_FULL:
        return OSError(errno.ENOSPC, f"the {kind.name} can't be written", str(path))
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR):
        return OSError(errno.EIO, f"{error}; a {kind.name} needs a local disk and a writable folder", str(path))
    return UnusableFile(
        f"{path} can't be used as a {kind.name}: {error}. If the file is damaged, recover its readable part with "
        f"`sqlite3 {path} .recover`; if it belongs to another program, give a new file"
    )


def application_of(path: str | Path) -> int | None:
    """The `Kind.application` of an SQLite file, from its first hundred bytes; None for any other file.

    The file is not opened as a database, which would wait for writers and make files beside it.
    """
    if not Path(path).is_file():
        return None
    with Path(path).open("rb") as file:
        head = file.read(100)
    if not head.startswith(_MAGIC):
        return None
    # SQLite's file format has the application id there, in big-endian order.
    return int.from_bytes(head[68:72])


def _create_file(path: Path, kind: Kind) -> None:
    """Create the file with its tables under another name first, so that it never exists without tables.

    Several processes may do so at once: the first one wins, and the others use its file.
    """
    place = Path(os.path.realpath(path))
    place.parent.mkdir(parents=True, exist_ok=True)
    descriptor, scratch = tempfile.mkstemp(prefix=f".{path.name}.", dir=place.parent)  # readable only by its owner
    os.close(descriptor)
    try:
        with closing(sqlite3.connect(scratch)) as database:
            head = f"PRAGMA application_id = {kind.application}; PRAGMA user_version = {kind.version};"
            # Set WAL last, because in WAL mode the header would stay in the log, which `application_of` does not read.
            database.executescript(f"{kind.tables}; {head} PRAGMA journal_mode = WAL;")
        try:
            with suppress(FileExistsError):  # another process was first
                os.link(scratch, place)
        except OSError:  # a file system without links
            os.replace(scratch, place)
    except sqlite3.Error as error:
        raise file_error(path, kind, error) from None
    finally:
        Path(scratch).unlink(missing_ok=True)


def _check_and_prepare(database: sqlite3.Connection, path: Path, kind: Kind, writable: bool) -> None:
    """Check that a file is of a kind and version before it is changed, then set how it is written.

    SQLite stores WAL mode in the file, but `synchronous` only in the connection.
    """
    query = "SELECT application_id, user_version FROM pragma_application_id, pragma_user_version"
    application, version = database.execute(query).fetchone()
    if application != kind.application:
        raise UnusableFile(f"{path} is an SQLite file, but not a {kind.name}: name another file")
    if version != kind.version:
        raise UnusableFile(
            f"{path} is a {kind.name} of version {version}, but this program reads version {kind.version}: "
            "update the program, or name another file"
        )
    if writable:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
