"""`tripletune eval decisions`: a student's decisions against its teacher's, one flushed line each.

A killed run goes on where it was when the same command is given again.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.table import Table

from tripletune.eval.progress import Progress
from tripletune.eval.results import METRICS, ResultLog
from tripletune.eval.suites.decisions import SCORES, Case, decision_cases, score_reply, summarise
from tripletune.models.data.records import record_files
from tripletune.models.data.trajectories import read_trajectories
from tripletune.models.files import file_digest, weights_fingerprint, write_json
from tripletune.models.llm.client import CallError, Message, Sampling
from tripletune.models.loading import resolve
from tripletune.models.local.generation import Completion
from tripletune.rag.systems.cirag.integration import shorten
from tripletune.rag.systems.cirag.options import CiragOptions

logger = logging.getLogger(__name__)
_INTERVALS = "Scores are times 100, with the 95 % interval of a bootstrap over questions."


class LocalBackend(Protocol):
    """A `models.llm.client.Backend` that knows its tokens, such as `models.llm.hf.HFBackend`."""

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        """Reply to a chat."""
        ...

    def count_tokens(self, messages: Sequence[Message]) -> int:
        """Tokens of a chat."""
        ...

    async def close(self) -> None:
        """Let go of threads."""
        ...


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add = parser.add_argument
    longest = CiragOptions().max_integration_tokens
    add("--data", required=True, help="folder of trajectories (data_builders.trajectories), or one file")
    add("--split", default="validation", help="split of the folder (default: %(default)s)")
    add("--model", required=True, metavar="SPEC",
        help="the student: run or adapter folder, model folder, hub id or pypi:<package>")  # fmt: skip
    add("--output", required=True, metavar="DIR", help="results go here; the same call goes on here")
    add("--overwrite", action="store_true", help="forget the results of an earlier run in --output")
    add("--limit", type=int, metavar="N", help="only the first N decisions")
    add("--batch-size", type=int, default=16, help="prompts a forward pass (default: %(default)s)")
    add("--dtype", default="auto", help="auto (bfloat16 where the hardware has it), float32, bfloat16 or float16")
    add("--max-prompt-tokens", type=int, metavar="N",
        help="longest prompt; the oldest candidates go first, as in training (default: no limit)")  # fmt: skip
    add("--max-reply-tokens", type=int, default=longest, metavar="N", help="longest reply (default: %(default)s)")


def run(args: argparse.Namespace, console: Console) -> int:
    """Score a student's decisions.

    Returns:
        The exit code: 1 when every reply failed.

    Raises:
        FileNotFoundError: there is no such data or model.
        ValueError: an option makes no sense, or a trajectory can't be scored.
    """
    _check(args)
    ids = [case.id for case in _cases(args)]
    twice = [name for name, count in Counter(ids).items() if count > 1]
    if twice:
        raise ValueError(f"{args.data}: trajectory {twice[0].rsplit('@', 1)[0]!r} occurs twice; results go by its id")
    if not ids:
        raise ValueError(f"{args.data}: there are no decisions")
    settings = {
        "data": [file_digest(file) for file in record_files(args.data, args.split)],
        "model": args.model,
        "weights": weights_fingerprint(resolve(args.model)),
        **{name: getattr(args, name) for name in ("limit", "dtype", "max_prompt_tokens", "max_reply_tokens")},
    }
    log = ResultLog(args.output, settings, args.overwrite)
    try:
        if any(name not in log.done for name in ids):
            asyncio.run(_answer(_open(args), args, log, len(ids)))
        log.finish(ids)
    finally:
        log.close()
    metrics = summarise(log.rows())
    write_json(log.folder / METRICS, {"model": args.model, "data": str(args.data), "split": args.split, **metrics})
    show(metrics, console)
    if metrics["errors"] == metrics["decisions"]:
        logger.error('every reply failed; see "error" in %s', log.path)
        return 1
    return 0


async def answer_cases(
    backend: LocalBackend,
    cases: Iterator[Case],
    sampling: Sampling,
    add: Callable[[dict[str, Any]], None],
    concurrency: int,
    max_prompt_tokens: int | None = None,
) -> None:
    """Ask a student for its decisions and score them.

    Args:
        backend: The student.
        cases: What to ask; streamed.
        sampling: How its replies are drawn.
        add: Takes each row of `score_reply` as soon as it is there.
        concurrency: Prompts under way at once.
        max_prompt_tokens: Longest prompt; see `rag.cirag_history.shorten`.
    """

    async def work() -> None:
        for case in cases:
            messages, left_out = list(case.messages), 0
            if max_prompt_tokens is not None:
                messages, left_out = shorten(messages, backend.count_tokens, max_prompt_tokens)
            try:
                completion, error = await backend.complete(messages, sampling), ""
            except CallError as failure:
                completion, error = Completion(""), str(failure)
                logger.warning("%s failed: %s", case.id, failure)
            cost = {
                "prompt_tokens": completion.prompt_tokens,
                "completion_tokens": completion.completion_tokens,
                "cut_off": completion.finish_reason == "length",
                "candidates_left_out": left_out,
                "seconds": completion.seconds,
            }
            add(score_reply(case, completion.text, error) | cost)

    await asyncio.gather(*(work() for _ in range(concurrency)))


def show(metrics: Mapping[str, Any], console: Console) -> None:
    """Print the scores."""
    table = Table(
        title=f"{metrics['decisions']} decisions on {metrics['questions']} questions, with the teacher's history"
    )
    for heading in ("round", "score", "mean", "95 % interval", "decisions", "what it says"):
        table.add_column(heading)
    for name, explanation in SCORES.items():
        table.add_row("all", name, *_cells(metrics["metrics"][name]), explanation)
    for number, scores in metrics["by_round"].items():
        for name in ("core_f1", "query_f1", "stop_accuracy"):
            table.add_row(number, name, *_cells(scores[name]), "")
    console.print(table)
    console.print(_INTERVALS)
    faults = ", ".join(f"{name} {count}" for name, count in metrics["faults"].items()) or "none"
    console.print(f"errors {metrics['errors']}, faults of the replies: {faults}", markup=False)


async def _answer(backend: LocalBackend, args: argparse.Namespace, log: ResultLog, total: int) -> None:
    try:
        with Progress(total, len(log.done), "decision") as progress:

            def add(row: dict[str, Any]) -> None:
                log.append(row)
                progress.advance()

            cases = (case for case in _cases(args) if case.id not in log.done)
            sampling = Sampling(max_tokens=args.max_reply_tokens)
            # Twice as many as run, so that batches can be made of prompts of like length.
            await answer_cases(backend, cases, sampling, add, 2 * args.batch_size, args.max_prompt_tokens)
    finally:
        await backend.close()


def _cases(args: argparse.Namespace) -> Iterator[Case]:
    split = args.split if Path(args.data).is_dir() else None
    return islice(decision_cases(read_trajectories(args.data, split)), args.limit)


def _open(args: argparse.Namespace) -> LocalBackend:
    from tripletune.models.llm.backends.hf import HFBackend

    return HFBackend(args.model, args.batch_size, args.dtype)


def _check(args: argparse.Namespace) -> None:
    problems = [
        f"--{name.replace('_', '-')} is {getattr(args, name)}: it must be at least 1"
        for name in ("limit", "batch_size", "max_prompt_tokens", "max_reply_tokens")
        if getattr(args, name) is not None and getattr(args, name) < 1
    ]
    if args.dtype not in ("auto", "float32", "bfloat16", "float16"):
        problems.append(f"--dtype {args.dtype!r} is not one of auto, float32, bfloat16, float16")
    if problems:
        raise ValueError("; ".join(problems))
    resolve(args.model)


def _cells(value: Mapping[str, Any]) -> tuple[str, str, str]:
    if value["mean"] is None:
        return "-", "-", "0"
    return f"{100 * value['mean']:.1f}", f"{100 * value['low']:.1f} to {100 * value['high']:.1f}", str(value["n"])
