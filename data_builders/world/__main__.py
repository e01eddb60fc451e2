"""`tripletune build world`: questions about a fictional world, gold decisions, a corpus and its triples."""

import argparse
import sys
from collections.abc import Sequence

from tripletune.data_builders.world.build import WorldOptions, write_world
from tripletune.models.options import add_arguments, from_arguments
from tripletune.models.program import run_program


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; what `run_program` returns is its exit code."""
    parser = argparse.ArgumentParser(prog="tripletune build world", description=__doc__)
    parser.add_argument("--output", required=True, help="folder for the files")
    parser.add_argument("--overwrite", action="store_true", help="replace a world in the output folder")
    add_arguments(parser, WorldOptions)
    given = parser.parse_args(arguments)

    def program() -> None:
        write_world(from_arguments(WorldOptions, given), given.output, given.overwrite)

    return run_program(program, stopped="stopped; the same command makes the same world")


if __name__ == "__main__":
    sys.exit(main())
