"""`tripletune build pairs`: the command line."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from tripletune.data_builders.datasets.writer import FolderOptions
from tripletune.data_builders.hotpotqa_subq.options import Source
from tripletune.data_builders.text_to_triples.build import PairOptions, build_pairs, listed
from tripletune.models.options import add_arguments, from_arguments
from tripletune.models.program import run_program

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; bad input ends it with one line and exit code 2."""
    parser = argparse.ArgumentParser(
        prog="tripletune build pairs",
        description="Build text-to-triples pairs from published data, a teacher's triples or the fictional world.",
    )
    group = parser.add_argument_group("what to read")
    group.add_argument("--source", action="append", required=True, metavar="[NAME=]READER:FILE[:REPLIES]",
        help="pairs to read: triples, wikiofgraph or genwiki with a file (.jsonl, .json, .parquet) or a hub id "
        "owner/name[@configuration][#split]; or a reader of questions (hotpotqa, ...) with its file and a teacher's "
        "recorded replies; repeat it for several; of a text that occurs again the first row counts")  # fmt: skip
    group.add_argument("--exclude", action="append", default=[], metavar="[NAME=]READER:FILE[:REPLIES]",
        help="leave out the texts of this source, for example those of a test set; repeat it for several")  # fmt: skip
    add_arguments(parser.add_argument_group("how pairs are made and split"), PairOptions)
    add_arguments(parser.add_argument_group("where and how they are written"), FolderOptions)
    parsed = parser.parse_args(arguments)

    def program() -> None:
        sources, excluded = ([Source.parse(text) for text in texts] for texts in (parsed.source, parsed.exclude))
        folder = from_arguments(FolderOptions, parsed)
        numbers = build_pairs(sources, from_arguments(PairOptions, parsed), folder, excluded)
        logger.info("%s: %s", folder.output, listed(numbers["splits"]))
        for name, counts in numbers["sources"].items():
            logger.info("  %s: %s", name, listed(counts))

    return run_program(program)


if __name__ == "__main__":
    sys.exit(main())
