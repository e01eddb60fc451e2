"""The jobs of `tripletune ledger`: stats, export, verify and import. Memory does not grow with the ledger."""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import IO, Any

from tripletune.models.llm.ledger import (
    FAILED,
    OK,
    PUT,
    Ledger,
    add_uses,
    call_of_json,
    canonical,
    make_call,
    sampling_of,
)
from tripletune.models.llm.ledger_file import LedgerError, open_file
from tripletune.models.local.generation import Completion

_NUMBERS = ("prompt_tokens", "completion_tokens", "retries")
_TEXTS = ("model", "text", "finish_reason", "status", "detail", "time")
_CHUNK, _MOST_TROUBLES = 1000, 20
# A call counts for the role that made it first; later uses of its reply cost nothing and are counted beside.
_STATS = """
SELECT calls.model, coalesce(first.role, ''), sum(calls.status = 'ok'), sum(calls.status = 'failed'),
    sum(calls.status = 'pending'), sum(calls.prompt_tokens), sum(calls.completion_tokens), sum(calls.retries),
    sum(calls.seconds)
FROM calls LEFT JOIN uses AS first
    ON first.id = (SELECT min(uses.id) FROM uses WHERE uses.call_id = calls.id)
GROUP BY 1, 2 ORDER BY 1, 2
"""
_USE_COUNTS = "SELECT model, role, count(*) FROM uses JOIN calls ON calls.id = call_id GROUP BY 1, 2"
STAT_NAMES = (
    "model",
    "role",
    "calls",
    "failed",
    "pending",
    "prompt_tokens",
    "completion_tokens",
    "retries",
    "seconds",
    "uses",
)


def statistics(path: Path) -> list[dict[str, Any]]:
    """Calls, tokens, retries and seconds by model and role.

    Args:
        path: The ledger.

    Returns:
        A row for each model and role, with the names of `STAT_NAMES`.
    """
    with closing(open_file(path, create=False)) as connection:
        rows = {(row[0], row[1]): [*row, 0] for row in connection.execute(_STATS)}
        for model, role, uses in connection.execute(_USE_COUNTS):
            empty = [model, role, 0, 0, 0, 0, 0, 0, 0.0, 0]
            rows.setdefault((model, role), empty)[-1] = uses
    return [dict(zip(STAT_NAMES, row, strict=True)) for _, row in sorted(rows.items())]


def exported(path: Path, role: str | None = None, model: str | None = None) -> Iterator[dict[str, Any]]:
    """The calls of a ledger in the order in which they were stored; those that wait for a batch are left out.

    Args:
        path: The ledger.
        role: Only calls that this role used.
        model: Only calls of this model.

    Yields:
        Objects that `import_calls` reads.
    """
    query = """
        SELECT key, model, sampling, messages, text, prompt_tokens, completion_tokens, seconds, retries, finish_reason,
            status, detail, time,
            (SELECT json_group_array(json_array(role, question_id))
                FROM (SELECT role, question_id FROM uses WHERE call_id = calls.id ORDER BY id))
        FROM calls
        WHERE status <> 'pending' AND (:model IS NULL OR model = :model)
            AND (:role IS NULL OR EXISTS (SELECT 1 FROM uses WHERE call_id = calls.id AND role = :role))
        ORDER BY id
    """
    with closing(open_file(path, create=False)) as connection:
        cursor = connection.execute(query, {"role": role, "model": model})
        names = [column[0] for column in cursor.description[:-1]]
        for row in cursor:
            values = dict(zip(names, row[:-1], strict=True))
            values["sampling"], values["messages"] = json.loads(values["sampling"]), json.loads(values["messages"])
            yield {**values, "uses": json.loads(row[-1])}


def import_calls(path: Path, lines: IO[str], name: str) -> tuple[int, int]:
    """Put exported calls into a ledger. What it holds already stays; a second import changes nothing.

    Args:
        path: The ledger; made when it is not there.
        lines: JSON lines of `exported`.
        name: What the file is called in errors.

    Returns:
        How many calls were new, and how many the ledger had.

    Raises:
        ValueError: a line can't be used; those before it may have been stored.
    """
    new = total = 0
    numbered = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
    with Ledger(path) as ledger:
        while chunk := [_read_line(line, f"{name}, line {number}") for number, line in islice(numbered, _CHUNK)]:
            new += ledger.transact(_store(chunk))
            total += len(chunk)
    return new, total - new


def troubles(path: Path) -> Iterator[str]:
    """What is wrong with a ledger: SQLite's own check, and every key computed again."""
    with closing(open_file(path, create=False)) as connection:
        for (line,) in connection.execute("PRAGMA integrity_check"):
            if line != "ok":
                yield f"SQLite: {line}"
        for key, model, sampling, messages in connection.execute("SELECT key, model, sampling, messages FROM calls"):
            if call_of_json(model, sampling, messages).key != key:
                yield f"call {key}: its key is not that of its model, sampling and messages"
        query = "SELECT count(*) FROM uses WHERE call_id NOT IN (SELECT id FROM calls)"
        orphans = connection.execute(query).fetchone()[0]
        if orphans:
            yield f"{orphans} uses belong to no call"


def _store(chunk: Sequence[tuple[tuple[Any, ...], list[list[str]]]]) -> Callable[[sqlite3.Connection], int]:
    def run(connection: sqlite3.Connection) -> int:
        new = 0
        for row, uses in chunk:
            known = connection.execute("SELECT status, detail FROM calls WHERE key = ?", (row[0],)).fetchone()
            # A failure that is there already is written again by PUT, without being news.
            new += connection.execute(PUT, row).rowcount > 0 and known != row[10:12]
            add_uses(connection, [(row[0], role, question_id) for role, question_id in uses])
        return new

    return run


def _read_line(line: str, where: str) -> tuple[tuple[Any, ...], list[list[str]]]:
    try:
        values = json.loads(line)
        if not isinstance(values, dict):
            raise ValueError("it is not a JSON object")
        for names, kind in ((_TEXTS, str), (_NUMBERS, int), (("seconds",), (int, float)), (("messages", "uses"), list)):
            for name in names:
                if not isinstance(values.get(name), kind):  # type: ignore[arg-type]
                    raise ValueError(f"{name!r} is missing or of the wrong type")
        if any(not 0 <= values[name] < 2**63 for name in (*_NUMBERS, "seconds")):
            raise ValueError("a number is negative or too large")
        canonical(values).encode("utf-8")
        if values["status"] not in (OK, FAILED):
            raise ValueError(f"status {values['status']!r} is not one of {OK}, {FAILED}")
        for use in values["uses"]:
            if not (isinstance(use, list) and len(use) == 2 and all(isinstance(part, str) for part in use)):
                raise ValueError("a use is not a pair of role and question id")
        sampling = sampling_of(canonical(values.get("sampling")))
        call = make_call(values["model"], sampling, values["messages"])
        if values.get("key") != call.key:
            raise ValueError("its key is not that of its model, sampling and messages")
        texts = tuple(values[name] for name in ("status", "detail", "time"))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    reply = Completion(values["text"], values["prompt_tokens"], values["completion_tokens"], float(values["seconds"]))
    row = (*call, reply.text, reply.prompt_tokens, reply.completion_tokens, reply.seconds, values["retries"])
    return (*row, values["finish_reason"], *texts), values["uses"]


def _stats(arguments: argparse.Namespace) -> int:
    """Show calls, tokens, retries and seconds by model and role."""
    rows = statistics(arguments.ledger)
    if arguments.json:
        sys.stdout.write(json.dumps(rows, indent=2, ensure_ascii=False) + "\n")
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table(title=str(arguments.ledger))
    for name in STAT_NAMES:
        table.add_column(name.replace("_", " "), justify="left" if name in ("model", "role") else "right")
    total = {name: sum(row[name] for row in rows) for name in STAT_NAMES[2:]}
    for row in [*rows, {"model": "all", "role": "", **total}]:
        shown = (row[name] for name in STAT_NAMES)
        cells = (f"{v:,.1f}" if isinstance(v, float) else f"{v:,}" if isinstance(v, int) else v for v in shown)
        table.add_row(*(cell.replace("[", r"\[") for cell in cells), end_section=row is rows[-1] if rows else False)
    (Console() if sys.stdout.isatty() else Console(width=140)).print(table)
    return 0


def _export(arguments: argparse.Namespace) -> int:
    """Write the calls as JSON lines."""
    calls = exported(arguments.ledger, arguments.role, arguments.model)
    lines = (json.dumps(call, ensure_ascii=False) + "\n" for call in calls)
    if arguments.output is None:
        sys.stdout.writelines(lines)
        return 0
    partial = arguments.output.with_name(f"{arguments.output.name}.tmp")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.writelines(lines)
        os.replace(partial, arguments.output)
    finally:
        partial.unlink(missing_ok=True)
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    """Check the file and every key; the exit code is 1 when something is wrong."""
    found = 0
    for found, trouble in enumerate(troubles(arguments.ledger), 1):
        if found <= _MOST_TROUBLES:
            sys.stdout.write(f"{trouble}\n")
    if found > _MOST_TROUBLES:
        sys.stdout.write(f"... and {found - _MOST_TROUBLES} more\n")
    with closing(open_file(arguments.ledger, create=False)) as connection:
        by_status = dict(connection.execute("SELECT status, count(*) FROM calls GROUP BY status").fetchall())
    counts = ", ".join(f"{by_status.get(status, 0):,} {status}" for status in (OK, FAILED, "pending"))
    verdict = f"{found} troubles" if found else "in order"
    sys.stdout.write(f"{arguments.ledger}: {verdict}; calls: {counts}\n")
    return 1 if found else 0


def _import(arguments: argparse.Namespace) -> int:
    """Read exported calls into the ledger; what is there stays."""
    with arguments.input.open(encoding="utf-8", errors="surrogateescape") as lines:
        new, known = import_calls(arguments.ledger, lines, str(arguments.input))
    sys.stdout.write(f"{arguments.ledger}: {new:,} calls are new, {known:,} were there\n")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; bad input ends it with one line and exit code 2."""
    parser = argparse.ArgumentParser(prog="tripletune ledger", description="Look after a ledger of LLM calls.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, function in (("stats", _stats), ("export", _export), ("verify", _verify), ("import", _import)):
        command = commands.add_parser(name, help=function.__doc__, description=function.__doc__)
        command.set_defaults(run=function)
        command.add_argument("ledger", type=Path, help="the SQLite file")
        if name == "stats":
            command.add_argument("--json", action="store_true", help="JSON instead of a table")
        if name == "export":
            command.add_argument("--role", help="only calls that this role used")
            command.add_argument("--model", help='only calls of this model, for example "openai:gpt-4o-mini"')
            command.add_argument("--output", type=Path, metavar="FILE", help="JSON lines (default: standard output)")
        if name == "import":
            command.add_argument("input", type=Path, help="JSON lines of export")
    arguments = parser.parse_args(argv)
    try:
        return arguments.run(arguments)
    except BrokenPipeError:
        # The reader of a pipe, `head` for one, has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        parser.exit(2, f"error: {error}\n")
    except sqlite3.Error as error:
        parser.exit(2, f"error: {LedgerError(f'ledger {arguments.ledger}: {error}')}\n")
