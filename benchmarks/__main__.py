"""`python -m benchmarks CASE`: measure one thing side by side, print a table, write `runs/benchmarks/CASE.json`."""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
import typing
from collections.abc import Callable, Sequence

from benchmarks.harness import Options, Result, save, show
from tripletune.models.options import add_arguments, from_arguments, nearest
from tripletune.models.program import names_in, run_program

Case = Callable[[typing.Any], Result]


def cases() -> dict[str, tuple[Case, type[Options]]]:
    """Every case with the class of its options, by name; found by their place in `benchmarks/cases`."""
    found = {}
    for module_name in names_in("benchmarks.cases"):
        module = importlib.import_module(f"benchmarks.cases.{module_name}")
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if function.__module__ == module.__name__ and not name.startswith("_"):
                kind = typing.get_type_hints(function)["options"]
                found[name] = (function, kind)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; what `run_program` returns is its exit code."""
    known = cases()
    rows = "\n".join(f"  {name:20} {(function.__doc__ or '').splitlines()[0]}" for name, (function, _) in known.items())
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] not in known:
        print(f"usage: python -m benchmarks CASE [OPTIONS]\n\n{rows}")
        if words and words[0] not in ("-h", "--help"):
            print(f"error: there is no case {words[0]!r}{nearest(words[0], known)}", file=sys.stderr)
            return 2
        return 0
    name = words[0]
    function, kind = known[name]
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}", description=inspect.getdoc(function), allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--output", default="runs/benchmarks", help="folder of the JSON (default: %(default)s)")
    add_arguments(parser, kind)
    given = parser.parse_args(words[1:])

    def program() -> None:
        options = from_arguments(kind, given)
        result = function(options)
        show(result)
        print(f"written to {save(result, name, options, given.output)}")

    return run_program(program, level=30, stopped="stopped; nothing was written")


if __name__ == "__main__":
    sys.exit(main())
