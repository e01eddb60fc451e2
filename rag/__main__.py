"""Extract the triples of a corpus, and index the corpus: `tripletune rag extract`, `export` and `index`.

tripletune rag extract --corpus FILE --model FOLDER --output triples.sqlite
tripletune rag export --corpus FILE --store triples.sqlite --output triples.jsonl
tripletune rag index --corpus FILE --triples FILE --retriever dense --encoder SPEC --index DIR

Exit codes of `extract`: 0 done; 1 passages failed, more than a tenth of the replies could not be read, or the server is
down (run the command again to continue); 2 bad input; 3 calls wait for a batch's replies; 130 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing, nullcontext
from itertools import islice
from pathlib import Path

from tripletune.core.calls import SetupError
from tripletune.core.command_line import CommandParser, add_arguments, from_arguments
from tripletune.core.data.passages import corpus_file, read_corpus
from tripletune.core.program import run_program
from tripletune.llm.prices import cost_lines
from tripletune.rag.extract import (
    CorpusExtraction,
    ExtractionCounts,
    PartOptions,
    add_extract_arguments,
    export_triples,
)
from tripletune.rag.extractor import ROLE, TEACHER_PROMPT, load_instruction, open_extractor, source_pieces
from tripletune.rag.search.options import SearchOptions, build_indexes
from tripletune.rag.triple_store import TripleStore

logger = logging.getLogger(__name__)


def extract(args: argparse.Namespace) -> int:
    """Extract the triples of a corpus."""
    part = from_arguments(PartOptions, args)
    if not corpus_file(args.corpus).is_file():
        raise FileNotFoundError(f"no such corpus: {args.corpus}")
    if args.dry_run:
        return _show(args, part)
    # The ledger keeps a paid reply even if its passage was not finished.
    extractor = open_extractor(args, ledger=f"{args.output}.ledger.sqlite")
    store = TripleStore(args.output)

    async def read_all() -> tuple[ExtractionCounts, str | None]:
        run = CorpusExtraction(extractor, store, part.piece_limit)
        try:
            counts = await run.run(islice(read_corpus(args.corpus, blank_texts=True), part.limit))
            return counts, extractor.pending_message() if counts.pending else None
        finally:
            await extractor.close()

    try:
        counts, next_step = asyncio.run(read_all())
    except SetupError as error:
        raise ValueError(str(error)) from error
    finally:
        store.close()
    logger.info("%s: %s", args.output, counts.line())
    if counts.pending:
        logger.info("%s passages wait. %s", f"{counts.pending:,}", next_step)
        return 3
    return counts.exit_code


def _show(args: argparse.Namespace, part: PartOptions) -> int:
    """Print calls, tokens and cost of the passages that the store lacks."""
    if not args.teacher or args.prompts_of:
        raise ValueError("--dry-run can only count calls of a chat model: give --llm, and leave out --prompts-of")
    asked, calls, written = len(load_instruction(args.prompt or TEACHER_PROMPT)), 0, 0
    with closing(TripleStore(args.output, create=False)) if Path(args.output).is_file() else nullcontext() as store:
        readers = [one.id for one in store.extractors()] if store else []
        for passage in islice(read_corpus(args.corpus, blank_texts=True), part.limit):
            if store is None or all(store.get(reader, passage.key) is None for reader in readers):
                pieces = [len(text) for text in source_pieces(passage.title, passage.text, part.piece_limit)]
                calls, written = calls + len(pieces), written + sum(pieces)
    stages = {ROLE: [calls, (written + asked * calls) / 4, written / 4]}
    lines = cost_lines(stages, args.price, "as characters / 4; a reply counts as long as its passage")
    print("\n".join([f"{args.output}: nothing was sent", *lines]))
    return 0


def export(args: argparse.Namespace) -> None:
    """Write the triples of a store as JSON lines."""
    with ExitStack() as opened:
        stores = [opened.enter_context(closing(TripleStore(path, create=False))) for path in args.store]
        written, missing = export_triples(args.corpus, stores, args.output, args.extractor, args.allow_missing)
    logger.info("%s: %s passages, %s left out", args.output, f"{written:,}", f"{missing:,}")


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run the command."""
    parser = CommandParser(prog="tripletune rag", description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "extract",
        help="extract the triples of a corpus",
        description="Extract the triples of a corpus into a store; a second run continues the first.",
        example="tripletune rag extract --corpus corpus.jsonl --model runs/extractor --output triples.sqlite",
    )
    add_extract_arguments(command)
    command.add_argument("--dry-run", action="store_true", help="show calls and tokens of a chat model; send nothing")
    command.add_argument("--price", metavar="IN,OUT", help="dollars per million input and output tokens, for --dry-run")
    command.set_defaults(run=extract)
    command = commands.add_parser(
        "export",
        help="write the triples of a store as JSON lines",
        description="Write {title, text, triples} for every passage of a corpus, as a file for the option --triples.",
        example="tripletune rag export --corpus corpus.jsonl --store triples.sqlite --output triples.jsonl",
    )
    add = command.add_argument
    add("--corpus", required=True, help="corpus of the triples: a file, or a folder of `build passages`")
    add("--store", required=True, nargs="+", help="stores of `extract`; the first store that has a passage is used")
    add("--output", required=True, metavar="FILE", help="JSON lines of title, text, triples")
    add("--extractor", help="extractor (model or number) whose triples are written, if a store holds several")
    add("--allow-missing", action="store_true", help="leave out passages that no store has")
    command.set_defaults(run=export)
    command = commands.add_parser(
        "index",
        help="build the indexes of a corpus",
        description="Build the indexes of a corpus and its triples in a folder that runs share (--index). After a "
        "stop, the same command continues the build.",
        example="tripletune rag index --corpus corpus.jsonl --retriever dense --encoder SPEC --index runs/index",
    )
    add_arguments(command, SearchOptions)
    command.set_defaults(run=lambda args: build_indexes(from_arguments(SearchOptions, args)))
    args = parser.parse_args(argv)
    stopped = "stopped; finished passages are kept, run the same command again to continue"
    return run_program(lambda: args.run(args), stopped=stopped)


if __name__ == "__main__":
    sys.exit(main())
