"""The jobs of `tripletune batch`: status, import and reset."""

from __future__ import annotations

import argparse
import sqlite3
import sys
from collections.abc import Sequence
from pathlib import Path

from tripletune.models.llm.backends.batch import reset, waiting
from tripletune.models.llm.backends.batch_replies import import_replies
from tripletune.models.llm.ledger import Ledger


def _status(arguments: argparse.Namespace, ledger: Ledger) -> str:
    """Show the calls that wait, by request file."""
    rows = waiting(ledger)
    if not rows:
        return f"{ledger.path}: no call waits"
    return "\n".join(f"{row['file']}: {row['calls']:,} calls of {row['model']} wait" for row in rows)


def _import(arguments: argparse.Namespace, ledger: Ledger) -> str:
    """Put a provider's reply or error file into the ledger."""
    counts = import_replies(ledger, arguments.replies)
    if counts.repeated:
        return f"{arguments.replies} was imported before: nothing to do"
    lines = [f"{arguments.replies}: {counts.stored:,} replies stored, {counts.known:,} were known"]
    if counts.again:
        lines.append(f"{counts.again:,} calls failed for now; the next run writes them to a new request file")
    if counts.refused:
        lines.append(f"{counts.refused:,} calls were refused; they count as failed until `reset --refused`")
    if counts.unknown:
        lines.append(f"{counts.unknown:,} replies belong to no call of this ledger")
    return "\n".join(lines)


def _reset(arguments: argparse.Namespace, ledger: Ledger) -> str:
    """Let calls be written again: those of a request file that was lost, or those that were refused."""
    calls = reset(ledger, arguments.file)
    if arguments.file is not None and not calls:
        raise ValueError(f"no call waits in {arguments.file}; `status` shows the files as the ledger names them")
    return f"{calls:,} calls will be in the request file of the next run"


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; bad input ends it with one line and exit code 2."""
    parser = argparse.ArgumentParser(prog="tripletune batch", description="Look after calls that wait.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, function in (("status", _status), ("import", _import), ("reset", _reset)):
        command = commands.add_parser(name, help=function.__doc__, description=function.__doc__)
        command.set_defaults(run=function)
        command.add_argument("--ledger", type=Path, required=True, help="the SQLite file")
        if name == "import":
            command.add_argument("--replies", type=Path, required=True, help="the provider's file, JSON lines")
        if name == "reset":
            which = command.add_mutually_exclusive_group(required=True)
            which.add_argument("--file", help="the request file, as status names it")
            which.add_argument("--refused", action="store_true", help="the calls that were refused")
    arguments = parser.parse_args(argv)
    try:
        if not arguments.ledger.is_file():
            raise FileNotFoundError(f"no such ledger: {arguments.ledger}")
        with Ledger(arguments.ledger) as ledger:
            sys.stdout.write(arguments.run(arguments, ledger) + "\n")
    except (ValueError, OSError, sqlite3.Error) as error:
        parser.exit(2, f"error: {error}\n")
    return 0
