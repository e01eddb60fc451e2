"""The programs `tripletune ledger` and `tripletune batch`, which manage the calls of language models."""

from __future__ import annotations

import argparse
import json
import sqlite3
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from tripletune.core.calls import Completion
from tripletune.core.command_line import CommandParser
from tripletune.core.data.fields import checked
from tripletune.core.data.jsonl import read_jsonl
from tripletune.core.files import check_new, json_line, new_file
from tripletune.core.program import run_program
from tripletune.core.sqlite import application_of
from tripletune.core.tables import Table, plain_console
from tripletune.llm.backends.batch import import_replies, reset, waiting
from tripletune.llm.ledger import (
    ADD_USE,
    FAILED,
    OK,
    PENDING,
    PUT,
    Ledger,
    SqlParameters,
    canonical,
    make_call,
    row_of,
    sampling_of,
    seed_repeats,
)

_REPLY = ("text", "prompt_tokens", "completion_tokens", "seconds", "retries", "finish_reason")
# Fields of an exported call, and their types (see `core.data.fields.checked`).
_LAYOUT = {
    "key": str,
    "model": str,
    "sampling": {},
    "messages": [{"": str}],
    "text": str,
    "prompt_tokens": int,
    "completion_tokens": int,
    "seconds": float,
    "retries": int,
    "finish_reason": str,
    "status": str,
    "detail": str,
    "time": str,
}
_MOST_TROUBLES = 20
_SILENT = "ok without a usable reply, which the next run repeats"
# A call counts for the role that made it first; later uses of its reply cost nothing and are counted separately.
_STATS = """
SELECT model, coalesce(role, ''), sum(first AND status = 'ok' AND usable), sum(first AND status = 'failed'),
    sum(first AND status = 'ok' AND NOT usable), sum(first AND status = 'pending'), sum(first * prompt_tokens),
    sum(first * completion_tokens), sum(first * retries), sum(first * seconds), count(role)
FROM (
    SELECT calls.*, uses.role, is_reply(text, finish_reason) AS usable,
        uses.id IS (SELECT min(id) FROM uses WHERE call_id = calls.id) AS first
    FROM calls LEFT JOIN uses ON call_id = calls.id
)
GROUP BY 1, 2 ORDER BY 1, 2
"""
_STAT_NAMES = (
    "model", "role", "calls", "failed", "without_text", "pending", "prompt_tokens", "completion_tokens", "retries",
    "seconds", "uses"
)  # fmt: skip
_EXPORT = """
SELECT key, model, sampling, messages, text, prompt_tokens, completion_tokens, seconds, retries, finish_reason,
    status, detail, time,
    (SELECT json_group_array(json_array(role, question_id))
        FROM (SELECT role, question_id FROM uses WHERE call_id = calls.id ORDER BY id)) AS uses
FROM calls
WHERE status <> 'pending' AND (:model IS NULL OR model = :model)
    AND (:role IS NULL OR EXISTS (SELECT 1 FROM uses WHERE call_id = calls.id
        AND (role = :role OR substr(role, 1, length(:role) + 1) = :role || '.')))
ORDER BY id
"""


def statistics(path: Path) -> list[dict[str, str | int | float]]:
    """Calls, tokens, retries and seconds of a ledger: a row per model and role, with the names of `_STAT_NAMES`."""
    with Ledger(path, create=False) as ledger, ledger.connected() as connection:
        return [dict(zip(_STAT_NAMES, row, strict=True)) for row in connection.execute(_STATS)]


def exported_calls(path: Path, role: str | None = None, model: str | None = None) -> Iterator[dict[str, Any]]:
    """Yield the calls of a ledger, except pending calls, in stored order, in the form that `import_calls` reads.

    Args:
        path: The ledger.
        role: Only calls of this role and of the roles below it, as in `core.calls.in_role`; None: of all roles.
        model: Only calls of this model; None: of all models.
    """
    with Ledger(path, create=False) as ledger, ledger.connected() as connection:
        connection.row_factory = sqlite3.Row
        for row in connection.execute(_EXPORT, {"role": role, "model": model}):
            parsed = {name: json.loads(row[name]) for name in ("sampling", "messages", "uses")}
            yield {**row, **parsed}


class ImportedCalls(NamedTuple):
    """How many calls of an import the ledger lacked, and how many it had already."""

    new: int
    known: int


def import_calls(path: Path, source: Path) -> ImportedCalls:
    """Import exported calls, or another ledger's calls, into a ledger.

    Nothing is imported from a file with a bad line. A reply replaces a failure of the same call, and never another
    reply.
    """
    # The source is read twice, so that a bad line leaves no ledger behind and memory does not grow with the file.
    total = 0
    for where, values in _calls_in_file(source):
        _put_parameters(values, where)  # raises at a bad line
        total += 1
    if not total:
        raise ValueError(f"{source}: the file holds no calls")
    new = 0
    with Ledger(path) as ledger, ledger.transaction() as connection:
        for where, values in _calls_in_file(source):
            key = values["key"]
            query = "SELECT status, detail FROM calls WHERE key = ?"
            before = connection.execute(query, (key,)).fetchone()
            is_written = connection.execute(PUT, _put_parameters(values, where)).rowcount > 0
            # PUT also writes a failure over the same failure, which is not new.
            if is_written and before != (values["status"], values["detail"]):
                new += 1
            uses = [(key, role, question_id) for role, question_id in values.get("uses", ())]
            connection.executemany(ADD_USE, uses)
    return ImportedCalls(new, total - new)


def _calls_in_file(source: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the calls of a ledger or of an exported file, each with its place for errors."""
    if application_of(source) is None:
        yield from read_jsonl(source)
        return
    for values in exported_calls(source):
        yield str(source), values


def ledger_troubles(path: Path) -> Iterator[str]:
    """Yield the faults of a ledger: those that SQLite's check finds, and calls whose key is wrong.

    SQLite's check finds a damaged file, but not a row that another program has changed, whose reply would be given to
    another call.
    """
    with Ledger(path, create=False) as ledger, ledger.connected() as connection:
        for (line,) in connection.execute("PRAGMA integrity_check"):
            if line != "ok":
                yield f"SQLite: {line}"
        for key, model, sampling, messages in connection.execute("SELECT key, model, sampling, messages FROM calls"):
            if make_call(model, sampling, messages).key != key:
                yield f"call {key}: the key does not match model, sampling and messages"
        query = "SELECT count(*) FROM uses WHERE call_id NOT IN (SELECT id FROM calls)"
        orphans = connection.execute(query).fetchone()[0]
        if orphans:
            yield f"{orphans} uses belong to no call"


def _put_parameters(values: Mapping[str, Any], where: str) -> SqlParameters:
    """The parameters of `PUT` for an exported call.

    The file may come from another machine, so the key is computed again: a wrong one would give its reply to other
    calls.
    """
    checked(values, where, _LAYOUT)
    try:
        call = make_call(values["model"], sampling_of(canonical(values["sampling"])), values["messages"])
        if values["key"] != call.key:
            raise ValueError("the key does not match model, sampling and messages")
        if values["status"] not in (OK, FAILED):
            raise ValueError(f"status {values['status']!r} is not one of {OK}, {FAILED}")
        reply = Completion(**{name: values[name] for name in _REPLY})
        return row_of(call, reply, values["status"], values["detail"], values["time"])
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{where}: {error}") from None


def _show_statistics(arguments: argparse.Namespace) -> int:
    """Show calls, tokens, retries and seconds by model and role."""
    # The docstrings of these functions are the help texts of the commands.
    rows = statistics(arguments.ledger)
    if arguments.json:
        sys.stdout.write(json.dumps(rows, indent=2, ensure_ascii=False) + "\n")
        return 0
    total: dict[str, Any] = {"model": "all", "role": ""}
    for name in _STAT_NAMES[2:]:
        total[name] = sum(row[name] for row in rows)
    cells = []
    for row in [*rows, total]:
        cells.append([_number_as_text(value) for value in row.values()])
    head = [name.replace("_", " ") for name in _STAT_NAMES]
    Table(head, cells, title=str(arguments.ledger)).show(plain_console())
    repeats = seed_repeats(arguments.ledger)
    if repeats.calls:
        shown = f"{repeats.calls:,} calls differ only in their seed"
        sys.stdout.write(f"{shown}; {repeats.equal:,} of them have the reply of another seed\n")
    return 0


def _number_as_text(value: str | int | float) -> str:
    """A cell of the table of statistics."""
    if isinstance(value, float):
        return f"{value:,.1f}"
    if isinstance(value, int):
        return f"{value:,}"
    return value


def _export_calls(arguments: argparse.Namespace) -> int:
    """Write the calls as JSON lines."""
    calls = exported_calls(arguments.ledger, arguments.role, arguments.model)
    lines: Iterator[str] = map(json_line, calls)
    # The first line is read before the output is opened, so that a wrong role leaves no empty file.
    first = next(lines, "")
    filters = []
    if arguments.role:
        filters.append(f"role {arguments.role}")
    if arguments.model:
        filters.append(f"model {arguments.model}")
    if not first and filters:
        advice = f"run `tripletune ledger stats {arguments.ledger}` to see its calls"
        raise ValueError(f"{arguments.ledger} has no answered call of {', '.join(filters)}; {advice}")
    lines = chain([first], lines)
    if arguments.output is None:
        sys.stdout.writelines(lines)
    else:
        check_new(arguments.output, [arguments.ledger])
        with new_file(arguments.output) as scratch, scratch.open("w", encoding="utf-8") as file:
            file.writelines(lines)
    return 0


def _verify_ledger(arguments: argparse.Namespace) -> int:
    """Check the file and every key; the exit code is 1 if a problem is found."""
    # A damaged ledger may have a problem per call, so not all are shown. Replies without text are stored as "ok" by
    # older versions, so they are counted apart.
    troubles = 0
    for trouble in ledger_troubles(arguments.ledger):
        troubles += 1
        if troubles <= _MOST_TROUBLES:
            sys.stdout.write(f"{trouble}\n")
    if troubles > _MOST_TROUBLES:
        sys.stdout.write(f"... and {troubles - _MOST_TROUBLES} more\n")
    with Ledger(arguments.ledger, create=False) as ledger, ledger.connected() as connection:
        status = "CASE WHEN status = 'ok' AND NOT is_reply(text, finish_reason) THEN :silent ELSE status END"
        query = f"SELECT {status}, count(*) FROM calls GROUP BY 1"
        by_status = dict(connection.execute(query, {"silent": _SILENT}).fetchall())
    shown = [OK, FAILED, PENDING]
    if _SILENT in by_status:
        shown.append(_SILENT)
    counts = ", ".join(f"{by_status.get(name, 0):,} {name}" for name in shown)
    if troubles:
        sys.stdout.write(f"{arguments.ledger}: {troubles} problems; calls: {counts}\n")
        return 1
    sys.stdout.write(f"{arguments.ledger}: in order; calls: {counts}\n")
    return 0


def _import_sources(arguments: argparse.Namespace) -> int:
    """Import exported calls or other ledgers into the ledger; calls that it already holds stay unchanged."""
    for source in arguments.input:
        imported = import_calls(arguments.ledger, source)
        counts = f"{imported.new:,} calls are new, {imported.known:,} were known"
        sys.stdout.write(f"{arguments.ledger}: {counts} ({source})\n")
    return 0


def _show_waiting(arguments: argparse.Namespace) -> int:
    """Show the waiting calls of each request file."""
    with Ledger(arguments.ledger, create=False) as ledger:
        rows = waiting(ledger)
    for row in rows:
        if row.file:
            line = f"{row.file}: calls of {row.model} that wait: {row.calls:,} of {row.requests:,}"
        else:
            line = f"(no file yet): calls of {row.model} that wait: {row.calls:,}"
        sys.stdout.write(f"{line}\n")
    if not rows:
        sys.stdout.write(f"{arguments.ledger}: no call waits\n")
    return 0


def _import_batch_replies(arguments: argparse.Namespace) -> int:
    """Put a provider's reply or error file into the ledger."""
    with _open_existing(arguments.ledger) as ledger:
        counts = import_replies(ledger, arguments.replies)
        left = sum(row.calls for row in waiting(ledger))
    if counts is None:
        sys.stdout.write(f"{arguments.replies} was imported before: nothing to do\n")
        return 0
    sys.stdout.write(f"{arguments.replies}: {counts['stored']:,} replies stored, {counts['known']:,} were known\n")
    retry_refused = f"`tripletune batch reset --ledger {arguments.ledger} --refused`"
    for name, meaning in (
        ("again", "calls failed temporarily; the next run writes them to a new request file"),
        ("refused", f"calls were refused; they count as failed until you run {retry_refused}"),
        ("unknown", "replies belong to no call of this ledger"),
    ):
        if counts[name]:
            sys.stdout.write(f"{counts[name]:,} {meaning}\n")
    if left:
        sys.stdout.write(f"calls that still wait for replies: {left:,}\n")
    return 0


def _reset_batch_calls(arguments: argparse.Namespace) -> int:
    """Mark the calls of a lost request file, or refused calls, to be written again."""
    with _open_existing(arguments.ledger) as ledger:
        calls = reset(ledger, arguments.file)
    if arguments.file is not None and not calls:
        raise ValueError(f"no call waits in {arguments.file}; `tripletune batch status` shows the request files")
    sys.stdout.write(f"{calls:,} calls will be in the request file of the next run\n")
    return 0


def _open_existing(path: Path) -> Ledger:
    """Open a ledger to write to it; a mistyped path must not make a new one."""
    if not path.exists():
        raise FileNotFoundError(f"no such ledger: {path}")
    return Ledger(path)


def _build_parser() -> argparse.ArgumentParser:
    """The parser of both programs; a command's function is its `run`.

    `ledger` and `batch` are one parser, since the main program hands over its words, the first of which names one.
    """
    parser = CommandParser(prog="tripletune", description="Manage the calls of language models.")
    programs = parser.add_subparsers(required=True, metavar="PROGRAM")

    def add_command(
        commands: argparse._SubParsersAction[CommandParser],
        name: str,
        function: Callable[[argparse.Namespace], int],
    ) -> argparse.ArgumentParser:
        """Add a command, whose help is the docstring of its function."""
        command: argparse.ArgumentParser = commands.add_parser(
            name, help=function.__doc__, description=function.__doc__, example=f"tripletune {_EXAMPLES[function]}"
        )
        command.set_defaults(run=function)
        return command

    ledger = programs.add_parser("ledger", help="manage a ledger").add_subparsers(required=True, metavar="COMMAND")
    commands = {name: add_command(ledger, name, function) for name, function in _LEDGER.items()}
    for command in commands.values():
        command.add_argument("ledger", type=Path, help="the SQLite file")
    commands["stats"].add_argument("--json", action="store_true", help="print JSON instead of a table")
    commands["export"].add_argument("--role", help="export only calls of this role and of the roles below it, such as "
        "repairs; t2rag: all calls of the system")  # fmt: skip
    commands["export"].add_argument("--model", help='export only calls of this model, for example "openai:gpt-4o-mini"')
    commands["export"].add_argument("--output", type=Path, metavar="FILE", help="file (default: standard output)")
    commands["import"].add_argument("input", type=Path, nargs="+", help="files written by export, or ledgers")

    batch = programs.add_parser("batch", help="manage waiting calls").add_subparsers(required=True, metavar="COMMAND")
    commands = {name: add_command(batch, name, function) for name, function in _BATCH.items()}
    for command in commands.values():
        command.add_argument("--ledger", type=Path, required=True, help="the SQLite file")
    commands["import"].add_argument("--replies", type=Path, required=True, help="the provider's file, JSON lines")
    selection = commands["reset"].add_mutually_exclusive_group(required=True)
    selection.add_argument("--file", help="request file whose calls are written again")
    selection.add_argument("--refused", action="store_true", help="write refused calls again")
    return parser


_LEDGER = {"stats": _show_statistics, "export": _export_calls, "verify": _verify_ledger, "import": _import_sources}
_BATCH = {"status": _show_waiting, "import": _import_batch_replies, "reset": _reset_batch_calls}
_EXAMPLES: dict[Callable[[argparse.Namespace], int], str] = {
    _show_statistics: "ledger stats runs/subq.ledger.sqlite",
    _export_calls: "ledger export runs/subq.ledger.sqlite --role subq.filter --output calls.jsonl",
    _verify_ledger: "ledger verify runs/subq.ledger.sqlite",
    _import_sources: "ledger import all.sqlite calls.jsonl shard-0.sqlite",
    _show_waiting: "batch status --ledger runs/subq.ledger.sqlite",
    _import_batch_replies: "batch import --ledger runs/subq.ledger.sqlite --replies replies.jsonl",
    _reset_batch_calls: "batch reset --ledger runs/subq.ledger.sqlite --refused",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line that begins with "ledger" or "batch"."""
    arguments = _build_parser().parse_args(argv)
    return run_program(lambda: int(arguments.run(arguments)))


if __name__ == "__main__":
    sys.exit(main())
