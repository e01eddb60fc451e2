"""`python -m benchmarks CASE`: compare variants, print a table and write `runs/benchmarks/CASE.json`."""

from __future__ import annotations

import importlib
import inspect
import sys
import typing
from collections.abc import Callable, Sequence
from typing import NamedTuple

from benchmarks import Options, Result, print_table, write_figures
from tripletune.core.command_line import CommandParser, add_arguments, from_arguments
from tripletune.core.plugins import names_in
from tripletune.core.program import run_program


class Case(NamedTuple):
    """A benchmark, and the class of its options."""

    # Its argument is of the class `options`, which differs from case to case.
    run: Callable[[typing.Any], Result]
    options: type[Options]


def find_cases() -> dict[str, Case]:
    """The cases by name: public functions of this package with `options` as their only argument."""
    cases = {}
    for module_name in names_in("benchmarks"):
        module = importlib.import_module(f"benchmarks.{module_name}")
        for name, function in inspect.getmembers(module, inspect.isfunction):
            is_own = function.__module__ == module.__name__
            if is_own and not name.startswith("_") and list(inspect.signature(function).parameters) == ["options"]:
                cases[name] = Case(function, typing.get_type_hints(function)["options"])
    return cases


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a case from a command line, and return the exit code."""
    parser = CommandParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="case", required=True, metavar="CASE")
    cases = find_cases()
    for name, case in cases.items():
        text = inspect.getdoc(case.run) or ""
        command = commands.add_parser(name, help=text.splitlines()[0], description=text)
        add_arguments(command, case.options)
    args = parser.parse_args(arguments)
    case = cases[args.case]

    def program() -> None:
        """Run the case, print its table, and write its figures."""
        options = from_arguments(case.options, args)
        result = case.run(options)
        print_table(result)
        print(f"written to {write_figures(result, args.case, options)}")

    return run_program(program, level=30, stopped="stopped; of all cases, only gpu has written its figures so far")


if __name__ == "__main__":
    sys.exit(main())
