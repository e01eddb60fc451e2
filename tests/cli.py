"""The `tripletune` command in this process, `run("build world", "--output", folder)`, and its JSON lines and SQLite."""

import importlib
import io
import json
import sqlite3
from collections.abc import Iterable
from contextlib import closing, redirect_stderr, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from tripletune.__main__ import PROGRAMS


class Ran(NamedTuple):
    """How a program ended, and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line of an error."""
        (line,) = [line for line in self.err.splitlines() if line.startswith("error: ")]
        return line


def run(program: str, *words: Any) -> Ran:
    """Run a program, a row of `PROGRAMS`, with these words: `run("train", "ras", …)`, `run("build world", …)`.

    An argument that argparse refuses ends it with code 2, as for a user.
    """
    place, *first = PROGRAMS[program][0].split()
    spec = find_spec(f"tripletune.{place}")
    package = spec is not None and spec.submodule_search_locations is not None
    module = importlib.import_module(f"tripletune.{place}.__main__" if package else f"tripletune.{place}")
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            first += map(str, words)
            code = module.main(first[0], argv=first[1:]) if program == "train" else module.main(first)
        except SystemExit as stop:
            code = stop.code
    return Ran(int(code or 0), out.getvalue(), err.getvalue())


def write_lines(path: str | Path, rows: Iterable[Any]) -> str:
    """A JSON-lines file of these rows; its folder is made."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def read_lines(path: str | Path, *without: str) -> list[dict[str, Any]]:
    """The rows of a JSON-lines file, without some of their keys."""
    rows = map(json.loads, Path(path).read_text(encoding="utf-8").splitlines())
    return [{key: value for key, value in row.items() if key not in without} for row in rows]


def sql(path: str | Path, query: str) -> list[tuple[Any, ...]]:
    """The rows that a query of an SQLite file gives."""
    with closing(sqlite3.connect(path)) as database, database:
        return database.execute(query).fetchall()
