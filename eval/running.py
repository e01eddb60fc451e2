"""Run evaluations: check, ask, score, write. A run can be resumed, and a failed item is a row that scores 0.

For each suite, `_open_log` checks the output folder, `_answer_items` asks the items without a row and writes their
rows, and `_write_figures` ends the run. Many items run at once as asyncio tasks, and models group their calls. The
final file is in data order, so concurrency does not change it. The processes of a launcher (`accelerate launch`) share
the items equally, and the first process writes the final files.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import re
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

from rich.console import Console

from tripletune.core.calls import (
    SENT_SINCE,
    CallError,
    RepliesPending,
    SetupError,
    TransientError,
    UnusableReply,
    redact,
)
from tripletune.core.concurrency import in_workers
from tripletune.core.files import read_json, write_json
from tripletune.core.plugins import error_place
from tripletune.core.program import progress
from tripletune.eval.launched import Launched
from tripletune.eval.result_log import ProcessPart, ResultLog, watch_for_other_evaluations
from tripletune.eval.results import METRICS, RunAbout, RunMetrics, SessionSpeed
from tripletune.eval.suites import Failure, ItemT, ReplyT, Suite, SuiteMetrics
from tripletune.llm.ledger_client import RetriesExhausted
from tripletune.llm.question_client import PromptError
from tripletune.rag import NOTING

logger = logging.getLogger(__name__)
# Exit codes of a complete evaluation; see `SuiteOptions.max_failed`.
ALL_FAILED = 1
SOME_FAILED = 4
# What differs between items that fail for one reason: quoted texts and numbers.
_NAMES_AND_NUMBERS = re.compile(r"'[^']*'|\"[^\"]*\"|\d+")
# Errors of a call or a reply, which are no mistake in a system's code.
_EXPECTED = (CallError, TransientError, UnusableReply, ConnectionError, TimeoutError)


class RunsFailed(RuntimeError):
    """Some of several evaluations failed; the other evaluations are complete."""

    exit_code = 1


def run_suites(suites: Sequence[Suite], console: Console | None = None) -> int:
    """Run suites one after the other and write `metrics.json` of each complete suite.

    All output folders are opened before the first suite starts, so that a folder with other results is an error now,
    not after hours. A suite that fails does not stop the other suites.

    Returns:
        `ALL_FAILED` if every item of a suite failed, `SOME_FAILED` if more than the share `max_failed` did, else 0.
    """
    launched = Launched()
    if launched.is_shared and len(suites) > 1:
        raise ValueError("several processes share one evaluation: name one --system and --task, or start one process")
    logs: list[ResultLog] = []
    try:
        for suite in suites:
            logs.append(_open_log(suite, launched))
        # The other processes of a launcher do not count as another evaluation.
        with watch_for_other_evaluations() if launched.is_first else nullcontext(lambda: None) as is_ours:
            try:
                ended = asyncio.run(_run_in_turn(suites, logs, launched, console))
            finally:
                # Also after an error of the output, such as a pipe that `head` has closed.
                for log in logs:
                    log.write_about(alone=is_ours())
    finally:
        for log in logs:
            log.close()
    if ended.pending:
        raise RepliesPending(ended.pending)
    for code in (ALL_FAILED, SOME_FAILED):
        if code in ended.exit_codes:
            return code
    return 0


class _Ended(NamedTuple):
    """How several suites ended: exit codes of the complete ones, and advice on the items that wait for a batch.

    Attributes:
        pending: "" if no item waits.
    """

    exit_codes: list[int]
    pending: str


def _open_log(suite: Suite, launched: Launched) -> ResultLog:
    """Open the output folder of a suite; the first process prepares it before the others write into it.

    `gather` makes the other processes wait until the first one has checked and repaired the folder, and gives them the
    ids of the items that are done.
    """
    options = suite.options
    # Not every suite has a corpus and triples.
    about = RunAbout(
        command=[redact(word) for word in suite.command],
        questions=len(suite.ids),
        data=options.data,
        corpus=getattr(options, "corpus", None),
        triples=getattr(options, "triples", None),
        concurrency=suite.concurrency,
        backends=suite.backends,
        trainings=suite.trainings,
    )
    sources = []
    for name in ("data", "other", "control_run"):
        # Not every suite reads another run.
        path = getattr(options, name, None)
        if path:
            sources.append(path)
    part = None if launched.is_first else ProcessPart(launched.process, launched.gather()[0])
    log = ResultLog(options.output, suite.settings(), options.overwrite, suite.retry_errors, part, about, sources)
    if launched.is_shared and launched.is_first:
        launched.gather(log.done)
    return log


async def _run_in_turn(
    suites: Sequence[Suite], logs: Sequence[ResultLog], launched: Launched, console: Console | None
) -> _Ended:
    """Run suites one after the other, and close their clients.

    The error of a single suite is raised as it is; errors of several are collected, as the other suites still count.
    """
    codes: list[int] = []
    failures: list[str] = []
    advice: list[str] = []
    waiting = 0
    done = 0
    pass_number = 0
    finished: list[tuple[Suite, RunMetrics | SuiteMetrics]] = []
    # The figures of several suites are shown together, at the end.
    console_of_one = console if len(suites) == 1 else None
    try:
        for suite, log in zip(suites, logs, strict=True):
            try:
                outcome = await _run_suite(suite, log, launched, console_of_one)
            except Exception as error:
                if len(suites) == 1:
                    raise
                logger.error("%s: %s: %s", log.folder, type(error).__name__, error)
                logger.debug("traceback of %s", log.folder, exc_info=True)
                failures.append(f"{log.folder}: {error}")
                continue
            waiting += outcome.waiting
            done += len(log.done)
            if outcome.waiting:
                pass_number = max(pass_number, log.pass_number)
                log.note_waiting_pass()
            if outcome.exit_code is not None and outcome.metrics is not None:
                codes.append(outcome.exit_code)
                finished.append((suite, outcome.metrics))
        if waiting:
            # This comes last, so that suites that share a client share its request file.
            advice = _pending_messages(suites)
    finally:
        await close_clients(*suites)
    if console is not None and len(suites) > 1 and finished:
        suites[0].show_all(finished, console)
    if failures:
        raise RunsFailed(f"{len(failures)} of {len(suites)} evaluations failed: {'; '.join(failures)}")
    if not waiting:
        return _Ended(codes, "")
    progress_line = f"Pass {pass_number}: {done:,} of {done + waiting:,} {suites[0].unit}s are done, {waiting:,} wait."
    return _Ended(codes, " ".join([progress_line, *advice]))


def _pending_messages(suites: Sequence[Suite]) -> list[str]:
    """What the clients say about calls that wait for a batch, each text once; shared clients would repeat it."""
    messages: dict[str, None] = {}
    for suite in suites:
        for client in suite.clients:
            message = client.pending_message()
            if message:
                messages[message] = None
    return list(messages)


class _Outcome(NamedTuple):
    """How a suite ended: the number of items that wait for a batch; exit code and figures if this process ended it."""

    waiting: int
    exit_code: int | None = None
    metrics: RunMetrics | SuiteMetrics | None = None


async def _run_suite(suite: Suite, log: ResultLog, launched: Launched, console: Console | None) -> _Outcome:
    """Answer the items without a row, and write the final files if no item waits.

    A process with nothing to answer opens no model. The other processes close their logs before the first one counts
    (`gather`) and joins them, so that their last rows are written by then.
    """
    before = len(log.done)
    started = time.perf_counter()
    waiting = 0
    SENT_SINCE.set(log.began)
    left = [name for name in suite.ids if name not in log.done]
    mine = left[launched.process :: launched.processes]
    if mine:
        suite.open()
        log.write_about(embedded=suite.embedded)
        # Models are loaded now, so that the questions per second do not include loading; the clock starts again.
        for client in suite.clients:
            client.load()
        started = time.perf_counter()
        waiting = await _answer_items(suite, log, frozenset(mine))
    if not launched.is_first:
        log.close()
    if launched.is_shared:
        waiting = sum(launched.gather(waiting))
    if not launched.is_first:
        return _Outcome(waiting)
    log.append_rows_of_processes()
    if waiting:
        return _Outcome(waiting)
    if log.pass_number > 1:
        logger.info("pass %d: all %d %ss are done", log.pass_number, len(suite.ids), suite.unit)
    seconds = time.perf_counter() - started
    return _write_figures(suite, log, len(log.done) - before, seconds, console)


async def close_clients(*suites: Suite) -> None:
    """Close each client that suites have opened, once; several runs may share a client."""
    closed: set[int] = set()
    for suite in suites:
        for client in suite.clients:
            if id(client) not in closed:
                closed.add(id(client))
                await client.close()


class FailureLog:
    """Shows each reason of failures once, and counts how often it comes back.

    A mistake in a system, or questions of another world than the oracle's, fail thousands of items for one reason.
    """

    def __init__(self) -> None:
        # By reason without names and numbers: the item that failed first, and how many failed after it.
        self._first: dict[str, str] = {}
        self._repeated: Counter[str] = Counter()

    def log(self, item: str, reason: str, error: Exception) -> None:
        """Log the failure of an item, with a traceback if code raised the error by mistake; a known reason is counted.

        Args:
            item: What failed, such as "question q7".
        """
        kind = _NAMES_AND_NUMBERS.sub("…", reason)
        is_new = kind not in self._first
        logger.log(logging.WARNING if is_new else logging.DEBUG, "%s failed: %s", item, reason)
        if not is_new:
            self._repeated[kind] += 1
            return
        self._first[kind] = item
        is_bug = not isinstance(error, _EXPECTED)
        logger.log(logging.ERROR if is_bug else logging.DEBUG, "traceback of this error, shown once:", exc_info=error)

    def log_repeated(self, unit: str) -> None:
        """Log how many more items failed for each reason."""
        for kind, count in self._repeated.items():
            logger.warning("%d more %s(s) failed for the same reason as %s", count, unit, self._first[kind])


async def _answer_items(suite: Suite, log: ResultLog, mine: frozenset[str]) -> int:
    """Answer this process's items and write their rows; returns the number of items that wait for a batch.

    A row is written as soon as its item is done, so that a stopped run keeps it.
    """
    waiting = 0
    batches = suite.batches(item for item in suite.items() if item.id in mine)
    # Only the first process shows its progress.
    silent = not logger.isEnabledFor(logging.INFO)
    failures = FailureLog()
    bar = progress(unit=suite.unit, total=len(log.done) + len(mine), initial=len(log.done), disable=silent)

    async def work() -> None:
        """Answer batches until none is left; each row is in the file before the next batch is asked."""
        nonlocal waiting
        # All workers draw from one iterator, so that only items in progress are in memory.
        for batch in batches:
            for item, reply in await ask_items(suite, batch, failures):
                if isinstance(reply, RepliesPending):
                    waiting += 1
                    continue
                log.append(suite.score(item, reply).to_json())
                bar.update()

    with bar:
        await in_workers(work, suite.concurrency)
    failures.log_repeated(suite.unit)
    return waiting


async def ask_items(
    suite: Suite[Any, ItemT, ReplyT, Any], batch: list[ItemT], failures: FailureLog | None = None
) -> list[tuple[ItemT, ReplyT | Failure | RepliesPending]]:
    """Each item with its reply, its failure, or `RepliesPending`; a bad item does not affect other items.

    If a batch fails, its items are asked one by one, since the error does not say which item caused it. Errors that
    every item would have (a wrong model, a server that does not answer, prompts that can't be read, a full disk) end
    the run instead of failing all items.

    Args:
        failures: What failed before, so that each reason is shown once; new reasons are added.
    """
    started = time.perf_counter()
    NOTING.set(None)
    try:
        return list(zip(batch, await suite.ask(batch), strict=True))
    except (SetupError, RetriesExhausted) as error:
        if isinstance(error.__cause__, (ValueError, OSError)):  # a model folder that can't be loaded is bad input
            raise ValueError(str(error)) from error
        raise
    except PromptError:
        raise
    # No error of one item may lose this item or other items.
    except Exception as error:
        if len(batch) > 1:
            replies: list[tuple[ItemT, ReplyT | Failure | RepliesPending]] = []
            for item in batch:
                (alone,) = await ask_items(suite, [item], failures)
                replies.append(alone)
            return replies
        if isinstance(error, RepliesPending):
            return [(batch[0], error)]
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        reason = f"{type(error).__name__}: {error}"
        if not isinstance(error, _EXPECTED):
            reason += f" ({error_place(error)})"
        (failures or FailureLog()).log(f"{suite.unit} {batch[0].id}", reason, error)
        return [(batch[0], Failure(reason, time.perf_counter() - started, NOTING.get()))]


def _write_figures(suite: Suite, log: ResultLog, answered: int, seconds: float, console: Console | None) -> _Outcome:
    """Sort the rows of a complete suite, write `metrics.json`, and print its figures; without a console log one line.

    The files come before the output, so that an error of the output loses nothing.

    Args:
        answered: Number of items that this session has answered in `seconds`.
    """
    log.sort_and_close(suite.ids)
    path = log.folder / METRICS
    units = f"{suite.unit}s"
    speed = SessionSpeed(answered, round(seconds, 3), round(answered / seconds, 4))
    if not answered and path.exists():
        # This session answered nothing, so the speed of the last real session is kept.
        speed = SessionSpeed.from_json(read_json(path).get("session", {}), units) or speed
    total = len(suite.ids)
    failed = sum(bool(row.get("error")) for row in log.rows())
    metrics = suite.summarise(log)
    metrics.failed = failed
    write_json(path, {**metrics.to_json(), "failed": failed, "session": speed.to_json(units)})
    session_lines = []
    earlier = total - answered
    if earlier:
        asked = f"{answered} were asked" if answered else "none was asked"
        session_lines.append(f"{earlier} of {total} {units} had results; {asked}")
    if answered:
        session_lines.append(f"{speed.items} {units} in {speed.seconds} s, {speed.per_second} per second")
    if console is None:
        logger.info("%s: %s", log.folder, "; ".join(session_lines))
    else:
        suite.show(metrics, console)
        console.print("\n".join(session_lines))
    if failed:
        again = ""
        if getattr(suite.options, "answers", None):
            # A file with more lines is another setting of the run.
            again = "; with a completed file, --overwrite scores it anew"
        elif hasattr(suite.options, "retry_errors"):
            again = "; --set retry_errors=yes asks them again"
        logger.error('%d of %d %s failed and score 0; see "error" in %s%s', failed, total, units, log.path, again)
    return _Outcome(0, _exit_code(failed, total, suite.options.max_failed), metrics)


def _exit_code(failed: int, total: int, max_failed: float) -> int:
    """The exit code of a complete suite; `max_failed` is a share of the items, and at 1 only `ALL_FAILED` is left."""
    if failed == total:
        return ALL_FAILED
    if failed > max_failed * total:
        return SOME_FAILED
    return 0
