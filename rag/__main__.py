"""Ask one question, or read the triples out of a corpus: `tripletune rag ask`, `extract` and `export`.

tripletune rag ask "Who …?" --model FOLDER --corpus FILE --triples FILE
tripletune rag extract --corpus FILE --model FOLDER --output triples.sqlite
tripletune rag export --corpus FILE --store triples.sqlite --output triples.jsonl

Exit codes of `extract`: 0 done; 1 passages failed or the server stays away, run again to continue; 2 bad input; 3 calls
wait for a batch's replies; 130 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import re
import sqlite3
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import zip_longest
from pathlib import Path
from typing import Any, get_args

from tripletune.models.llm import SetupError
from tripletune.models.llm.backends import LLMOptions, backend_names
from tripletune.models.loading import DTYPE_HELP, usual_dtype
from tripletune.models.options import add_arguments, from_arguments, setting
from tripletune.models.program import printable, run_program
from tripletune.models.run_folders import check_model_folder, trained_folder
from tripletune.rag import Trace
from tripletune.rag.extract import PIECE_LIMIT, CorpusExtraction, ExtractionCounts, export_triples, read_passages
from tripletune.rag.extractor import LocalOptions, open_extractor
from tripletune.rag.retrievers import RetrieverKind
from tripletune.rag.systems import LoopOptions, Tools, load_system, system_names
from tripletune.rag.triple_store import TripleStore

logger = logging.getLogger(__name__)

_SHARD = re.compile(r"(\d+)/(\d+)")


@dataclass(frozen=True, slots=True)
class _Reading:
    """What `ask` reads, and how it searches."""

    system: str = setting("ras", "the system", choices=system_names())
    corpus: str | None = setting(None, "passages to retrieve from: JSON lines with title and text")
    triples: str | None = setting(None, 'JSON lines of {"title", "text", "triples"}, or a store of `extract`')
    extractor: str | None = setting(None, "which extractor's triples to take, where a store holds several")
    retriever: str = setting("bm25", "kind of index", choices=get_args(RetrieverKind))
    encoder: str | None = setting(None, "sentence encoder of a dense retriever")
    index: str | None = setting(None, "folder of the indexes (default: a temporary one)")
    dtype: str | None = setting(None, DTYPE_HELP)


@dataclass(frozen=True, slots=True)
class _Part:
    """Which passages of a corpus `extract` reads."""

    piece_limit: int = setting(PIECE_LIMIT, "most characters; longer passages are cut between sentences", at_least=1)
    shard: str = setting("0/1", "i/n (i from 0): only every n-th passage")
    limit: int | None = setting(None, "only the first N passages", at_least=1)


def _ask(args: argparse.Namespace) -> None:
    """Answer the question and show every step on the way."""
    reading, options = from_arguments(_Reading, args), from_arguments(LoopOptions, args)
    if not args.question.strip():
        raise ValueError("the question is empty")
    system = load_system(reading.system)
    if system.model == "llm":
        raise ValueError(
            f"system {system.name!r} prompts a language model: run it with `tripletune eval run --system {system.name} "
            "--teacher-model NAME`"
        )
    if system.needs_corpus(options) and not reading.corpus:
        raise ValueError(f"system {system.name!r} retrieves: name a --corpus of JSON lines with title and text")
    if system.needs_triples(options) and not reading.triples:
        raise ValueError(f"system {system.name!r} reads triples: name a --triples file, or set --evidence text")

    model = trained_folder(args.model)
    check_model_folder(model)

    from tripletune.models.graph_llm import load_generator
    from tripletune.rag.retrievers import open_retriever
    from tripletune.rag.triple_store import open_triples

    with tempfile.TemporaryDirectory() as scratch:
        index = Path(reading.index or scratch)
        store = retriever = None
        if reading.triples:
            store = open_triples(reading.triples, index / "triples.sqlite", reading.extractor)
        if reading.corpus:
            kind: Any = reading.retriever
            retriever = open_retriever(kind, reading.corpus, index, reading.encoder)
        generator = load_generator(model, batch_size=1, dtype=usual_dtype(reading.dtype))
        if not options.graph:
            generator.processor = generator.processor.without_graph()
        tools = Tools(generator, generator, retriever, store)
        show(asyncio.run(system.run(args.question, args.question, tools, options)))


def show(trace: Trace) -> None:
    """Print the plans, what was retrieved for each sub-query, and the answer."""
    lines = [f"Question: {trace.question}"]
    for action, step in zip_longest(trace.actions, trace.steps):
        # A plan that cannot be read is followed by a retrieval too, and a system that does not plan only retrieves.
        if action is not None:
            lines.append(f"  plan      {action.reply}")
        if step is not None:
            titles = ", ".join(passage["title"] or passage["id"] for passage in step.passages)
            lines.append(f"  retrieve  {titles or 'nothing found'}")
    print(printable("\n".join([*lines, f"  stop      {trace.stop_reason}", f"Answer: {trace.answer}"])))


def extract(args: argparse.Namespace) -> int:
    """Read the triples out of a corpus."""
    part = from_arguments(_Part, args)
    shard = _SHARD.fullmatch(part.shard)
    if shard is None or int(shard[1]) >= int(shard[2]):
        raise ValueError(f"--shard {part.shard!r}: write it as i/n with i from 0 to n - 1, for example 0/4")
    if not Path(args.corpus).is_file():
        raise FileNotFoundError(f"no such corpus: {args.corpus}")
    # A paid reply is kept even when its passage was not finished.
    extractor = open_extractor(args, ledger=f"{args.output}.ledger.sqlite")
    store = TripleStore(args.output)

    async def read_all() -> ExtractionCounts:
        run = CorpusExtraction(extractor, store, part.piece_limit)
        try:
            return await run.run(read_passages(args.corpus, run.counts, (int(shard[1]), int(shard[2])), part.limit))
        finally:
            await extractor.close()

    try:
        counts = asyncio.run(read_all())
    except SetupError as error:
        raise ValueError(str(error)) from error
    except sqlite3.Error as error:
        logger.error("error: %s can't be written (%s): what was read before is kept; run again", args.output, error)
        return 1
    finally:
        store.close()
    logger.info("%s: %s", args.output, counts.line())
    if counts.pending:
        logger.info("%s passages wait for a batch's replies", f"{counts.pending:,}")
        return 3
    return 1 if counts.failed else 0


def export(args: argparse.Namespace) -> int:
    """Write the triples of a store as JSON lines."""
    stores = [TripleStore(path, create=False) for path in args.store]
    try:
        written, missing = export_triples(args.corpus, stores, args.output, args.extractor, args.allow_missing)
    finally:
        for store in stores:
            store.close()
    logger.info("%s: %s passages, %s left out", args.output, f"{written:,}", f"{missing:,}")
    return 0


def _add_ask(commands: Any) -> None:
    parser = commands.add_parser("ask", help="answer one question")
    parser.add_argument("question")
    parser.add_argument("--model", required=True, help="run, checkpoint, export or merged folder")
    add_arguments(parser, _Reading)
    add_arguments(parser.add_argument_group("the loop"), LoopOptions)
    parser.set_defaults(run=_ask, level=logging.WARNING)


def _add_extract(commands: Any) -> None:
    parser = commands.add_parser(
        "extract",
        help="extract the triples of a corpus",
        description="Extract the triples of a corpus into a store; a second run continues the first.",
    )
    add = parser.add_argument
    add("--corpus", required=True, help="passages: JSON lines with text and perhaps title")
    add("--output", required=True, metavar="STORE", help="SQLite file of the triples; several processes may share it")
    who = parser.add_mutually_exclusive_group(required=True)
    who.add_argument("--model", help="a trained model: run, checkpoint, export or merged folder, or hub id; decoder "
        "or encoder-decoder")  # fmt: skip
    who.add_argument("--teacher", choices=backend_names(), help="a chat model behind this backend, see --teacher-model")
    add("--prompt", metavar="FILE", help="system prompt instead of ours (rag/prompts/extract_triples.md for a teacher; "
        "for a trained model that in its folder, or models/prompts/extract_triples.md)")  # fmt: skip
    add_arguments(parser, _Part)
    add_arguments(parser.add_argument_group("--model", "how a model on this machine extracts"), LocalOptions)
    rest = [item.name for item in fields(LLMOptions) if item.name != "backend"]  # `--teacher` names it
    add_arguments(parser.add_argument_group("teacher model"), LLMOptions, "teacher", only=rest)
    parser.set_defaults(run=extract, level=logging.INFO)


def _add_export(commands: Any) -> None:
    parser = commands.add_parser(
        "export",
        help="write the triples of a store as JSON lines",
        description="Write {title, text, triples} for every passage of a corpus, the file that the loops read.",
    )
    add = parser.add_argument
    add("--corpus", required=True, help="the corpus that was read")
    add("--store", required=True, nargs="+", help="stores of `extract`; a passage is taken from the first that has it")
    add("--output", required=True, metavar="FILE", help="JSON lines of title, text, triples")
    add("--extractor", help="which extractor's triples to take, by model or number, where a store holds several")
    add("--allow-missing", action="store_true", help="leave passages out that no store has")
    parser.set_defaults(run=export, level=logging.INFO)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="tripletune rag", description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for add in (_add_ask, _add_extract, _add_export):
        add(commands)
    args = parser.parse_args(argv)
    stopped = "stopped; what was done is kept, run the same command again to continue"
    return run_program(lambda: args.run(args), level=args.level, stopped=stopped)


if __name__ == "__main__":
    sys.exit(main())
