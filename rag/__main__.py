"""Ask one question, read the triples out of a corpus, index it: `tripletune rag ask`, `extract`, `export`, `index`.

tripletune rag ask "Who …?" --model FOLDER --corpus FILE --triples FILE
tripletune rag ask "Who …?" --system ircot --teacher openai --teacher-model NAME --corpus FILE
tripletune rag extract --corpus FILE --model FOLDER --output triples.sqlite
tripletune rag export --corpus FILE --store triples.sqlite --output triples.jsonl
tripletune rag index --corpus FILE --triples FILE --retriever dense --encoder SPEC --index DIR

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
from dataclasses import dataclass, fields, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from tripletune.models.data.records import one_line
from tripletune.models.llm import SetupError
from tripletune.models.llm.backends import LLMOptions, backend_names, open_client
from tripletune.models.loading import DTYPE_HELP, usual_dtype
from tripletune.models.options import CommandParser, add_arguments, add_short_flags, from_arguments, setting
from tripletune.models.program import run_program
from tripletune.models.run_folders import check_model_folder, trained_folder
from tripletune.models.tables import printable
from tripletune.rag import Trace
from tripletune.rag.extract import CorpusExtraction, ExtractionCounts, export_triples, read_passages
from tripletune.rag.extractor import PIECE_LIMIT, LocalOptions, open_extractor
from tripletune.rag.search import (
    SearchOptions,
    build_indexes,
    open_search,
    search_problems,
)
from tripletune.rag.systems import SHORT, LoopOptions, find_system, make_options, system_names
from tripletune.rag.triple_store import TripleStore

logger = logging.getLogger(__name__)

_SHARD = re.compile(r"(\d+)/(\d+)")


@dataclass(kw_only=True)
class _Reading(SearchOptions):
    """What `ask` reads, and how it searches."""

    system: str = setting("ras", "the system", choices=system_names())
    dtype: str | None = setting(None, DTYPE_HELP)


@dataclass(frozen=True, slots=True)
class _Part:
    """Which passages of a corpus `extract` reads."""

    piece_limit: int = setting(PIECE_LIMIT, "most characters; longer passages are cut between sentences", at_least=1)
    shard: str = setting("0/1", "i/n (i from 0): only every n-th passage")
    limit: int | None = setting(None, "only the first N passages", at_least=1)


def _ask(args: argparse.Namespace) -> None:
    """Answer the question and show every step on the way."""
    reading = from_arguments(_Reading, args)
    if not args.question.strip():
        raise ValueError("the question is empty")
    system = find_system(reading.system)
    options = make_options(system, args.set)
    problems = search_problems(reading, system, options)
    corpus = reading.corpus if system.needs_corpus(options) else None
    if system.needs_corpus(options) and not corpus:
        problems.append(f"--system {system.name} retrieves: name a --corpus of JSON lines with title and text")
    if not args.teacher and (system.model == "llm" or not args.model):
        graph_llm = "" if system.model == "llm" else ", or the folder of a Graph-LLM with --model"
        problems.append(f"--system {system.name} needs a model: name a --teacher and a --teacher-model{graph_llm}")
    if args.teacher and args.model and not system.plans:
        problems.append(f"--system {system.name} takes one model: leave out --model or --teacher")
    if problems:
        raise ValueError("; ".join(problems))
    if args.model:
        model = trained_folder(args.model)
        check_model_folder(model)

    with tempfile.TemporaryDirectory() as scratch:
        teacher = from_arguments(LLMOptions, args, "teacher") if args.teacher else None
        llm = open_client(teacher) if teacher else None
        index = Path(reading.index or scratch)
        tools = open_search(reading, system, options, corpus, index, llm=llm, teacher=teacher)
        tools = replace(tools, sampling=teacher.sampling(1) if teacher else None)
        if args.model:
            from tripletune.models.graph_llm import load_generator

            generator = load_generator(model, batch_size=1, dtype=usual_dtype(reading.dtype))
            if not options.graph:
                generator.processor = generator.processor.without_graph()
            tools = replace(tools, planner=None if args.teacher else generator, answerer=generator)

        async def run() -> Trace:
            try:
                return await system.run(args.question, args.question, tools, options)
            finally:
                if isinstance(tools.store, CorpusExtraction):
                    await tools.store.extractor.close()
                if llm is not None:
                    await llm.close()

        show(asyncio.run(run()))


def show(trace: Trace) -> None:
    """Print the plans, what was retrieved for each sub-query, and the answer."""
    lines = [f"Question: {trace.question}"]
    for action, step in zip_longest(trace.actions, trace.steps):
        # A plan that cannot be read is followed by a retrieval too, and a system that does not plan only retrieves.
        if action is not None:
            lines.append(f"  plan      {one_line(action.reply)}")
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

    async def read_all() -> tuple[ExtractionCounts, str | None]:
        run = CorpusExtraction(extractor, store, part.piece_limit)
        try:
            passages = read_passages(args.corpus, run.counts, (int(shard[1]), int(shard[2])), part.limit)
            counts = await run.run(passages)
            return counts, extractor.pending_message() if counts.pending else None
        finally:
            await extractor.close()

    try:
        counts, next_step = asyncio.run(read_all())
    except SetupError as error:
        raise ValueError(str(error)) from error
    except sqlite3.Error as error:
        logger.error("error: %s can't be written (%s): what was read before is kept; run again", args.output, error)
        return 1
    finally:
        store.close()
    logger.info("%s: %s", args.output, counts.line())
    if counts.pending:
        logger.info("%s passages wait. %s", f"{counts.pending:,}", next_step)
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
    about = "an option of the system's own, for example max_passages=10; repeatable"
    parser = commands.add_parser("ask", help="answer one question", others=about)
    parser.add_argument("question")
    parser.add_argument("--model", help="a Graph-LLM: run, checkpoint, export or merged folder")
    parser.add_argument("--teacher", choices=backend_names(), help="a chat model behind this backend in its place, see "
        "--teacher-model; with both, RAS plans with the teacher and answers with --model")  # fmt: skip
    add_arguments(parser, _Reading)
    add_short_flags(parser.add_argument_group("the loop", SHORT), LoopOptions)
    _add_teacher(parser)
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
    _add_teacher(parser)
    parser.set_defaults(run=extract, level=logging.INFO)


def _add_teacher(parser: argparse.ArgumentParser) -> None:
    rest = [item.name for item in fields(LLMOptions) if item.name != "backend"]  # `--teacher` names it
    add_arguments(parser.add_argument_group("teacher model"), LLMOptions, "teacher", only=rest)


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


def _add_index(commands: Any) -> None:
    parser = commands.add_parser(
        "index",
        help="build the indexes of a corpus",
        description="Build the indexes of a corpus, and of its triples, in a folder that runs share with --index; a "
        "build that was stopped goes on.",
    )
    add_arguments(parser, SearchOptions)
    parser.set_defaults(run=lambda args: build_indexes(from_arguments(SearchOptions, args)), level=logging.INFO)


def rag_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = CommandParser(prog="tripletune rag", description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for add in (_add_ask, _add_extract, _add_export, _add_index):
        add(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run the command."""
    args = rag_parser().parse_args(argv)
    stopped = "stopped; what was done is kept, run the same command again to continue"
    return run_program(lambda: args.run(args), level=args.level, stopped=stopped)


if __name__ == "__main__":
    sys.exit(main())
