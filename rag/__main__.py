"""Ask one question, or read the triples out of a corpus: `tripletune rag ask`, `extract` and `export`.

tripletune rag ask "Who …?" --model FOLDER --corpus FILE --triples FILE
tripletune rag extract --corpus FILE --model FOLDER --output triples.sqlite
tripletune rag export --corpus FILE --store triples.sqlite --output triples.jsonl
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import tempfile
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import get_args

from tripletune.models.run_folders import check_model_folder, trained_folder
from tripletune.rag.systems import FirstQuery, LoopOptions, System, Tools, load_system, system_names
from tripletune.rag.trace import Trace
from tripletune.rag.triples.cli import add_extract


def ask(args: argparse.Namespace) -> None:
    """Answer the question and show every step on the way."""
    options = LoopOptions(
        max_rounds=args.max_rounds, top_k=args.top_k, evidence=args.evidence, first_query=args.first_query
    )
    if not args.question.strip():
        raise ValueError("the question is empty")
    system = load_system(args.system)
    if system.model == "llm":
        raise ValueError(
            f"system {args.system!r} prompts a language model: run it with `tripletune eval run --system {args.system} "
            "--teacher-model NAME`"
        )
    if system.needs_corpus(options) and not args.corpus:
        raise ValueError(f"system {args.system!r} retrieves: name a --corpus of JSON lines with title and text")
    if system.needs_triples(options) and not args.triples:
        raise ValueError(f"system {args.system!r} reads triples: name a --triples file, or set --evidence text")

    model = trained_folder(args.model)
    check_model_folder(model)

    from transformers.utils.logging import disable_progress_bar

    from tripletune.models.local.generator import load_generator
    from tripletune.rag.retrieval.retrievers import open_retriever
    from tripletune.rag.triples.store import open_triples

    if not sys.stderr.isatty():
        disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch:
        index = Path(args.index or scratch)
        store = open_triples(args.triples, index / "triples.sqlite", args.extractor) if args.triples else None
        retriever = open_retriever(args.retriever, args.corpus, index, args.encoder) if args.corpus else None
        generator = load_generator(model, batch_size=1, dtype=args.dtype)
        tools = Tools(generator, generator, retriever, store)
        show(asyncio.run(_run(system, args.question, tools, options)))


async def _run(system: System, question: str, tools: Tools, options: LoopOptions) -> Trace:
    return await system.run(question, question, tools, options)


def show(trace: Trace) -> None:
    """Print the plans, what was retrieved for each sub-query, and the answer."""
    print(f"Question: {trace.question}")
    for action, step in zip_longest(trace.actions, trace.steps):
        # A plan that can't be read is followed by a retrieval too, and a system that does not plan only retrieves.
        if action is not None:
            print(f"  plan      {action.reply}")
        if step is not None:
            titles = ", ".join(passage["title"] or passage["id"] for passage in step.passages)
            print(f"  retrieve  {titles or 'nothing found'}")
    print(f"  stop      {trace.stop_reason}")
    print(f"Answer: {trace.answer}")


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="tripletune rag", description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("ask", help="answer one question")
    one.add_argument("question")
    one.add_argument("--model", required=True, help="run, checkpoint, export or merged folder")
    one.add_argument("--system", default="ras", choices=system_names())
    one.add_argument("--corpus", help="passages to retrieve from: JSON lines with title and text")
    one.add_argument("--triples", help='JSON lines of {"title", "text", "triples"}, or a store of `extract`')
    one.add_argument("--extractor", metavar="NAME", help="whose triples, where a store holds those of several")
    one.add_argument("--retriever", default="bm25", choices=("bm25", "dense", "hybrid"))
    one.add_argument("--encoder", help="sentence encoder of a dense retriever")
    one.add_argument("--index", help="where indexes are kept (default: built and forgotten)")
    one.add_argument("--evidence", default="triples", choices=("triples", "text"))
    one.add_argument("--max-rounds", type=int, default=5)
    one.add_argument("--top-k", type=int, default=5)
    one.add_argument("--first-query", default="main_question", choices=get_args(FirstQuery), help="what q_0 is")
    one.add_argument("--dtype", default="float32", help="float32, bfloat16, float16 or auto")
    one.set_defaults(run=ask)
    add_extract(commands)
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("tripletune.rag").setLevel(logging.INFO if args.run is not ask else logging.WARNING)
    try:
        return args.run(args) or 0
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
