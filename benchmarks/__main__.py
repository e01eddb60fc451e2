"""`python -m benchmarks CASE`: compare variants, print a table and write `runs/benchmarks/CASE.json`."""

from __future__ import annotations

import importlib
import inspect
import sys
import typing
from collections.abc import Callable, Sequence

from benchmarks import Options, Result, save, show
from tripletune.core.command_line import CommandParser, add_arguments, from_arguments
from tripletune.core.plugins import names_in
from tripletune.core.program import run_program


def cases() -> dict[str, tuple[Callable[[typing.Any], Result], type[Options]]]:
    """Return the functions of this package with `options` as their only argument, and the class of options, by name."""
    found = {}
    for module in (importlib.import_module(f"benchmarks.{name}") for name in names_in("benchmarks")):
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if function.__module__ == module.__name__ and [*inspect.signature(function).parameters] == ["options"]:
                found[name] = (function, typing.get_type_hints(function)["options"])
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a case from a command line, and return the exit code."""
    parser = CommandParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="case", required=True, metavar="CASE")
    known = cases()
    for name, (function, kind) in known.items():
        text = inspect.getdoc(function) or ""
        case = commands.add_parser(name, help=text.splitlines()[0], description=text)
        case.add_argument("--output", default="runs/benchmarks", help="folder of the JSON (default: %(default)s)")
        add_arguments(case, kind)
    given = parser.parse_args(arguments)
    function, kind = known[given.case]

    def program() -> None:
        options = from_arguments(kind, given)
        result = function(options)
        show(result)
        print(f"written to {save(result, given.case, options, given.output)}")

    return run_program(program, level=30, stopped="stopped; nothing was written")


if __name__ == "__main__":
    sys.exit(main())
