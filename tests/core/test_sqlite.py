import os
import sqlite3
from contextlib import closing
from dataclasses import replace

import pytest

from tests.cli import sql
from tripletune.core.sqlite import Kind, UnusableFile, application_of, open_database

NOTES = Kind("notebook", 0x4E4F5445, 1, "CREATE TABLE notes (text TEXT)")


def make(path, kind=NOTES):
    with closing(open_database(path, kind)) as database, database:
        database.execute("INSERT INTO notes VALUES ('a')")


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (lambda path: path.write_text("some text " * 200), "not a database"),
        (lambda path: make(path, replace(NOTES, application=7)), "is an SQLite file, but not a notebook"),
        (lambda path: make(path, replace(NOTES, version=2)), "of version 2, but this program reads version 1"),
        (lambda path: path.mkdir(), "is a folder, not a notebook"),
        (lambda path: path.touch(), "x.sqlite is an empty file, not a notebook"),
    ],
)
def test_another_file_is_refused(tmp_path, prepare, words):
    path = tmp_path / "x.sqlite"
    prepare(path)
    before = path.is_file() and path.read_bytes()
    for create in (True, False):
        if create or path.is_file():
            with pytest.raises(UnusableFile, match=words):
                open_database(path, NOTES, create)
    assert (path.is_file() and path.read_bytes()) == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_a_new_file_is_its_owners_alone(tmp_path, umask):
    path = tmp_path / "x.sqlite"
    before = os.umask(umask)
    try:
        make(path)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o664)  # which a group shares
    make(path)
    assert path.stat().st_mode & 0o777 == 0o664


def test_a_reader_writes_nothing(tmp_path):
    path = tmp_path / "x.sqlite"
    make(path)
    before = path.read_bytes()
    with closing(open_database(path, NOTES, create=False, only_read=True)) as database:
        assert database.execute("SELECT count(*) FROM notes").fetchone() == (1,)
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            database.execute("INSERT INTO notes VALUES ('b')")
    # While another process writes, its log is read too.
    with closing(open_database(path, NOTES)) as writer:
        writer.execute("INSERT INTO notes VALUES ('b')")
        with closing(open_database(path, NOTES, create=False, only_read=True)) as database:
            assert database.execute("SELECT count(*) FROM notes").fetchone() == (2,)
        assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_is_made_once_and_known_by_its_head(tmp_path):
    path = tmp_path / "deep" / "x.sqlite"
    with pytest.raises(FileNotFoundError, match="no such notebook"):
        open_database(path, NOTES, create=False)
    make(path)
    make(path)
    assert sql(path, "SELECT count(*) FROM notes") == [(2,)]
    assert application_of(path) == NOTES.application
    assert application_of(tmp_path) is application_of(tmp_path / "none") is None
