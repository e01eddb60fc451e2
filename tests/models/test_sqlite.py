from contextlib import closing
from dataclasses import replace

import pytest

from tests.cli import sql
from tripletune.models.sqlite import Kind, UnusableFile, application_of, open_database

NOTES = Kind("notebook", 0x4E4F5445, 1, "CREATE TABLE notes (text TEXT)")


def make(path, kind=NOTES):
    with closing(open_database(path, kind)) as database, database:
        database.execute("INSERT INTO notes VALUES ('a')")


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (lambda path: path.write_text("some text " * 200), "not a database"),
        (lambda path: make(path, replace(NOTES, application=7)), "is an SQLite file, but no notebook"),
        (lambda path: make(path, replace(NOTES, version=2)), "of version 2, and this program knows version 1"),
        (lambda path: path.mkdir(), "is a folder, not a notebook"),
    ],
)
def test_another_file_is_refused(tmp_path, prepare, words):
    path = tmp_path / "x.sqlite"
    prepare(path)
    for create in (True, False):
        if create or path.is_file():
            with pytest.raises(UnusableFile, match=words):
                open_database(path, NOTES, create)


def test_a_file_is_made_once_and_known_by_its_head(tmp_path):
    path = tmp_path / "deep" / "x.sqlite"
    with pytest.raises(FileNotFoundError, match="no such notebook"):
        open_database(path, NOTES, create=False)
    make(path)
    make(path)
    assert sql(path, "SELECT count(*) FROM notes") == [(2,)]
    assert application_of(path) == NOTES.application
    assert application_of(tmp_path) is application_of(tmp_path / "none") is None
