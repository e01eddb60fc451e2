"""The commands `tripletune rag extract` and `tripletune rag export`: a corpus to triples, and triples to a file.

Exit codes of `extract`: 0 done; 1 passages failed or the server stays away, run again to go on; 2 bad input; 3 calls
wait for a batch's replies; 130 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import re
import sqlite3
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from tripletune.models.data.passages import Passage
from tripletune.models.data.records import read_jsonl
from tripletune.models.llm.client import SetupError
from tripletune.models.llm.options import BACKENDS, add_arguments
from tripletune.rag.triples.extract import CorpusExtraction, ExtractionCounts
from tripletune.rag.triples.extractor import TextExtractor
from tripletune.rag.triples.options import add_local_arguments, open_extractor
from tripletune.rag.triples.sentences import PIECE_LIMIT
from tripletune.rag.triples.store import TripleStore, passage_key

logger = logging.getLogger(__name__)

_SHARD = re.compile(r"(\d+)/(\d+)")


def add_extract(commands: Any) -> None:
    """Add `extract` and `export` to the commands of `tripletune rag`; their `run` gives the exit code."""
    parser = commands.add_parser(
        "extract",
        help="read the triples out of a corpus",
        description="Read the triples out of a corpus and keep them in a store; a second run goes on from it.",
    )
    add = parser.add_argument
    add("--corpus", required=True, help="passages: JSON lines with text and perhaps title")
    add("--output", required=True, metavar="STORE", help="SQLite file of the triples; several processes may share it")
    who = parser.add_mutually_exclusive_group(required=True)
    who.add_argument("--model", help="a trained model: run, checkpoint, export or merged folder, or hub id; decoder "
        "or encoder-decoder")  # fmt: skip
    who.add_argument("--teacher", choices=BACKENDS, help="a chat model behind this backend, see --teacher-model")
    add("--prompt", metavar="FILE", help="system prompt in the place of ours (rag/prompts/extract_triples.md for a "
        "teacher; for a trained model that in its folder, or models/prompts/extract_triples.md)")  # fmt: skip
    add_local_arguments(parser)
    add("--piece-limit", type=int, default=PIECE_LIMIT, metavar="CHARACTERS", help="longer passages are cut between "
        "sentences (default: %(default)s, about 400 tokens)")  # fmt: skip
    add("--shard", metavar="i/n", help="read every n-th passage alone, the i-th of them first (from 0)")
    add("--limit", type=int, help="only the first passages")
    defaults: dict[str, Any] = {"backend": None}
    add_arguments(parser, "teacher", **defaults)
    parser.set_defaults(run=extract)

    parser = commands.add_parser(
        "export",
        help="write the triples of a store as JSON lines",
        description="Write {title, text, triples} for every passage of a corpus, the file that the loops read.",
    )
    add = parser.add_argument
    add("--corpus", required=True, help="the corpus that was read")
    add("--store", required=True, nargs="+", help="stores of `extract`; a passage is taken from the first that has it")
    add("--output", required=True, metavar="FILE", help="JSON lines of title, text, triples")
    add("--extractor", help="whose triples, by model or number, where a store holds those of several")
    add("--allow-missing", action="store_true", help="leave passages out that no store has")
    parser.set_defaults(run=export)


def extract(args: argparse.Namespace) -> int:
    """Read the triples out of a corpus."""
    shard = parse_shard(args.shard)
    if args.limit is not None and args.limit < 1:
        raise ValueError(f"--limit {args.limit}: it must be at least 1")
    if not Path(args.corpus).is_file():
        raise FileNotFoundError(f"no such corpus: {args.corpus}")
    # A paid reply is kept even when its passage was not finished.
    extractor = open_extractor(args, ledger=f"{args.output}.ledger.sqlite")
    store = TripleStore(args.output)
    try:
        counts = asyncio.run(_extract(args, extractor, store, shard))
    except SetupError as error:
        if isinstance(error.__cause__, (ValueError, OSError)):
            # The model's folder is at fault, which shows when its weights are loaded.
            raise ValueError(str(error)) from error
        logger.error("error: %s", error)
        return 1
    except RuntimeError as error:
        # Calls that can't be answered, and models that fail passage after passage.
        logger.error("error: %s", error)
        return 1
    except sqlite3.Error as error:
        logger.error("error: %s can't be written (%s): what was read before is kept; run again", args.output, error)
        return 1
    except KeyboardInterrupt:
        logger.error("interrupted; what was read is in %s, run the same command again to go on", args.output)
        return 130
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


def export_triples(
    corpus: str | Path,
    stores: list[TripleStore],
    output: str | Path,
    extractor: str | None = None,
    allow_missing: bool = False,
) -> tuple[int, int]:
    """Write `{"title", "text", "triples"}` for the passages of a corpus; the file appears when it is complete.

    Args:
        corpus: The corpus, streamed.
        stores: Where triples are looked up, the first one first.
        output: The file.
        extractor: See `TripleStore.choose`.
        allow_missing: Whether passages that no store has are left out, in the place of an error.

    Returns:
        Passages written, and passages left out.

    Raises:
        ValueError: passages are missing, or a store holds several extractors.
    """
    chosen = [(store, store.choose(extractor).id) for store in stores]
    output = Path(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f"{output.name}.{os.getpid()}.tmp")
    written = missing = 0
    try:
        with partial.open("w", encoding="utf-8", errors="replace", newline="\n") as file:
            for passage in read_passages(corpus, ExtractionCounts()):
                key = passage_key(passage.title, passage.text)
                found = next((f for store, number in chosen if (f := store.get(number, key)) is not None), None)
                if found is None:
                    missing += 1
                    continue
                triples = [triple.as_list() for triple in found]
                row = {"title": passage.title, "text": passage.text, "triples": triples}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                written += 1
        if missing and not allow_missing:
            raise ValueError(
                f"{missing:,} of {written + missing:,} passages of {corpus} are in no store: extract them first, or "
                "leave them out with --allow-missing"
            )
        os.replace(partial, output)
    finally:
        partial.unlink(missing_ok=True)
    return written, missing


def read_passages(
    corpus: str | Path, counts: ExtractionCounts, shard: tuple[int, int] = (0, 1), limit: int | None = None
) -> Iterator[Passage]:
    """Stream the passages of a shard; unlike in `read_corpus`, one without text is counted and passed over.

    Args:
        corpus: JSON lines.
        counts: Counts passages without text.
        shard: Number of the shard, and how many there are.
        limit: Most lines of the corpus to read.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line is not JSON, or has no column "text"; the message has file and line.
    """
    number, count = shard
    for position, (where, row) in enumerate(islice(read_jsonl(corpus), limit)):
        if position % count != number:
            continue
        text, title = row.get("text"), row.get("title")
        if "text" not in row or not isinstance(text, (str, type(None))):
            raise ValueError(f'{where}: a passage needs "text", a string; the line has {", ".join(row) or "nothing"}')
        if not isinstance(title, (str, type(None))):
            raise ValueError(f'{where}: "title" must be a string, found {type(title).__name__}')
        if not (text and text.strip()) and not (title and title.strip()):
            counts.empty += 1
            continue
        # The place in the file stands for an id, which costs a digest to make and is not looked at.
        yield Passage(title or "", text or "", str(row.get("id") or position))


def parse_shard(text: str | None) -> tuple[int, int]:
    """Read "i/n".

    Raises:
        ValueError: it is not of that form, with i from 0 to n - 1.
    """
    if text is None:
        return 0, 1
    match = _SHARD.fullmatch(text)
    if match is None or int(match[1]) >= int(match[2]):
        raise ValueError(f"--shard {text!r}: write it as i/n with i from 0 to n - 1, for example 0/4")
    return int(match[1]), int(match[2])


async def _extract(
    args: argparse.Namespace, extractor: TextExtractor, store: TripleStore, shard: tuple[int, int]
) -> ExtractionCounts:
    try:
        run = CorpusExtraction(extractor, store, args.piece_limit)
        return await run.run(read_passages(args.corpus, run.counts, shard, args.limit))
    finally:
        await extractor.close()
