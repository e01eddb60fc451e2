"""Open our SQLite files, which have a kind and version and may be used by several processes at once.

The file is in WAL mode with synchronous=NORMAL: readers don't wait for writers, a process that is killed leaves whole
transactions, and a power cut may take the last moments, never the file. WAL needs a local disk.
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

_BUSY_SECONDS = 60.0
_MAGIC = b"SQLite format 3\x00"


class UnusableFile(ValueError):
    """A file is no database of that kind and version, or is empty or damaged."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of file, marked by four bytes in its header, which the command `file` shows too."""

    name: str
    application: int
    version: int
    tables: str


def open_database(path: Path, kind: Kind, create: bool = True, only_read: bool = False) -> sqlite3.Connection:
    """Open a file, from any thread; no transaction begins by itself.

    Without `create` it must exist, and without the right to write it is only read. A new one can be read by its owner
    alone. `only_read` is for a short look, which may miss later writes.
    """
    if path.is_dir():
        raise UnusableFile(f"{path} is a folder, not a {kind.name}; name a file in it")
    if not path.exists():
        if not create:
            raise FileNotFoundError(f"no such {kind.name}: {path}")
        _make(path, kind)
    if not path.stat().st_size:
        raise UnusableFile(
            f"{path} is an empty file, not a {kind.name}: the disk was full, or a copy was cut off; restore it, or "
            "remove it to begin again"
        )
    # SQLite makes files beside a database even to read it, unless it is called immutable.
    read = "mode=ro" if path.with_name(f"{path.name}-wal").exists() else "immutable=1"
    writable = not only_read and (create or (os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)))
    address = f"{path.absolute().as_uri()}?{'mode=rw' if writable else read}"
    # Where a file is changed by another process, SQLite fails at once in some cases, instead of waiting.
    locked = retry_if_exception_message(match="database is locked")
    retry = Retrying(retry=locked, stop=stop_after_delay(_BUSY_SECONDS), wait=wait_random(0.01, 0.1), reraise=True)
    database = None
    try:
        database = sqlite3.connect(
            address, timeout=_BUSY_SECONDS, isolation_level=None, uri=True, check_same_thread=False
        )
        database.execute("PRAGMA cache_size = -16384")  # 16 MB
        retry(_prepare, database, path, kind, writable)
    except Exception as error:
        if database is not None:
            database.close()
        raise (unusable(path, kind, error) if isinstance(error, sqlite3.Error) else error) from None
    return database


def unusable(path: Path, kind: Kind, error: sqlite3.Error) -> UnusableFile | OSError:
    """SQLite's error about a file, as our error."""
    # Errors of the module itself, such as a parameter of the wrong type, have no code.
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # without what SQLite adds to it
    if code == sqlite3.SQLITE_FULL:
        return OSError(errno.ENOSPC, f"the {kind.name} can't be written", str(path))
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR):
        return OSError(errno.EIO, f"{error}; the {kind.name} needs a local disk, and rights on its folder", str(path))
    return UnusableFile(
        f"{path} can't be used as a {kind.name}: {error}. If it is damaged, bring back what can be read with "
        f"`sqlite3 {path} .recover`; if it is another program's file, name a new one"
    )


def application_of(path: str | Path) -> int | None:
    """The `Kind.application` of an SQLite file, from its first hundred bytes; None for any other file."""
    if not Path(path).is_file():
        return None
    with Path(path).open("rb") as file:
        head = file.read(100)
    return int.from_bytes(head[68:72]) if head.startswith(_MAGIC) else None


def _make(path: Path, kind: Kind) -> None:
    """Make a file with its tables beside its place, so that it never exists without them."""
    place = Path(os.path.realpath(path))
    place.parent.mkdir(parents=True, exist_ok=True)
    descriptor, scratch = tempfile.mkstemp(prefix=f".{path.name}.", dir=place.parent)  # its owner's alone
    os.close(descriptor)
    try:
        with closing(sqlite3.connect(scratch)) as database:
            head = f"PRAGMA application_id = {kind.application}; PRAGMA user_version = {kind.version};"
            # WAL at the end: in this mode the head would stay in the log, where `application_of` does not look.
            database.executescript(f"{kind.tables}; {head} PRAGMA journal_mode = WAL;")
        try:
            with suppress(FileExistsError):  # another process was first
                os.link(scratch, place)
        except OSError:  # a file system without links
            os.replace(scratch, place)
    except sqlite3.Error as error:
        raise unusable(path, kind, error) from None
    finally:
        Path(scratch).unlink(missing_ok=True)


def _prepare(database: sqlite3.Connection, path: Path, kind: Kind, writable: bool) -> None:
    query = "SELECT application_id, user_version FROM pragma_application_id, pragma_user_version"
    application, version = database.execute(query).fetchone()
    if application != kind.application:
        raise UnusableFile(f"{path} is an SQLite file, but not a {kind.name}: name another file")
    if version != kind.version:
        raise UnusableFile(
            f"{path} is a {kind.name} of version {version}, and this program knows version {kind.version}: "
            "update it, or name another file"
        )
    if writable:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
