"""Run evaluations: check, ask, score, write. A run can be resumed, and a failed item is a row that scores 0.

A kind of evaluation is a `Suite`: one file in this folder, found by its name. The suite defines prompts, scores and
metrics; everything else happens here. Many items run at once as asyncio tasks, and models group their calls. The final
file is in data order, so concurrency does not change it. The processes of a launcher (`accelerate launch`) share the
items equally, and the first process writes the final files.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import errno
import logging
import os
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

from rich.console import Console

from tripletune.core.calls import Endpoint, RepliesPending, SetupError, redact
from tripletune.core.command_line import CommandParser, add_arguments, from_arguments
from tripletune.core.files import read_json, write_json
from tripletune.core.options import rare, setting
from tripletune.core.program import progress
from tripletune.core.tables import Table
from tripletune.eval.results import METRICS, ResultLog, this_machine
from tripletune.llm.concurrency import in_workers
from tripletune.llm.ledger_client import RetriesExhausted
from tripletune.rag import NOTING, Trace

logger = logging.getLogger(__name__)
ALL_FAILED, SOME_FAILED = 1, 4


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an item has no reply, the seconds until it failed, and what its system had done."""

    error: str
    seconds: float
    trace: Trace | None = None


@dataclass(kw_only=True)
class SuiteOptions:
    """Options of every evaluation."""

    data: str = setting(dataclasses.MISSING, "folder or file of the data")
    output: str = setting(dataclasses.MISSING, "folder of the results; the same command continues a stopped run")
    limit: int | None = setting(None, "use only the first N items", at_least=1)
    overwrite: bool = setting(False, "replace an earlier run in --output, or an index of other data")
    max_failed: float = rare(
        0.1,
        "exit with code 4 if a larger share of items fails, 1 if all fail; a failed item scores 0",
        at_least=0,
        at_most=1,
    )


class Suite(ABC):
    """One kind of evaluation.

    A subclass sets `options_class` and implements the abstract methods.

    Attributes:
        unit: Name of an item.
        example: Options of a working command, for `--help`.
        ids: The distinct ids of all items, in order.
        command: The words of the command line, for reports.
        concurrency: Batches in progress at once.
        retry_errors: Run the failed items of an earlier call again.
        notes: Facts from `open`, for `run.json`.
        clients: Clients from `open`, which report calls that wait for a batch and are closed at the end.
    """

    unit: ClassVar[str] = "item"
    options_class: ClassVar[type[SuiteOptions]] = SuiteOptions
    example: ClassVar[str] = "--data FILE --output FOLDER"
    options: Any
    ids: list[str]
    command: Sequence[str] = ()
    concurrency: int = 1
    retry_errors: bool = False
    notes: Mapping[str, Any] = {}
    clients: Sequence[Endpoint] = ()

    def __init__(self, options: Any) -> None:
        self.options = options
        self.ids = []
        for item, count in Counter(item.id for item in self.items()).items():
            self.ids.append(item)
            if count > 1:
                raise ValueError(f"{options.data}: {self.unit} id {item!r} occurs twice; results are stored by id")
        if not self.ids:
            raise ValueError(f"{options.data}: the data has no {self.unit}")

    @classmethod
    def add_arguments(cls, parser: CommandParser) -> None:
        """Add the options to a parser."""
        add_arguments(parser, cls.options_class)

    @classmethod
    def suites(cls, args: argparse.Namespace) -> Sequence[Suite]:
        """The suites of a command line."""
        return [cls(from_arguments(cls.options_class, args))]

    @abstractmethod
    def items(self) -> Iterator[Any]:
        """Stream the items, each with an `id`."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """All settings that change a row, without those that only change the speed."""

    def open(self) -> None:  # noqa: B027
        """Open models and data; called only when an item has no row."""

    def batches(self, items: Iterable[Any]) -> Iterator[list[Any]]:
        """Group the items that are asked together."""
        return ([item] for item in items)

    @abstractmethod
    async def ask(self, batch: list[Any]) -> list[Any]:
        """The model's reply to each item; an exception is a `Failure` of the item."""

    @abstractmethod
    def score(self, item: Any, reply: Any) -> dict[str, Any]:
        """The row of an item, with `id` and `error`; an exception of a metric ends the run."""

    @abstractmethod
    def summarise(self, log: ResultLog) -> dict[str, Any]:
        """The metrics of all rows."""

    @abstractmethod
    def show(self, metrics: Mapping[str, Any], console: Console) -> None:
        """Print the metrics."""


class RunsFailed(RuntimeError):
    """Some of several evaluations failed; the other evaluations are complete."""

    exit_code = 1


def run_suites(suites: Sequence[Suite], console: Console | None = None) -> int:
    """Run suites one after the other and write `metrics.json` of each complete suite.

    A suite that fails does not stop the other suites. The exit code is `ALL_FAILED` if every item of a suite failed,
    `SOME_FAILED` if more than the share `max_failed` did.
    """
    logs: list[ResultLog] = []
    launched = Launched()
    if launched.processes > 1 and len(suites) > 1:
        raise ValueError("several processes share one evaluation: name one --system and --task, or start one process")
    try:
        for suite in suites:
            options = suite.options
            # The first process prepares the folder before the other processes write into it.
            part = (launched.process, launched.gather()[0]) if launched.process else None
            about = {"command": [redact(word) for word in suite.command], "questions": len(suite.ids)}
            about |= {"data": options.data, "concurrency": suite.concurrency}
            read = [path for name in ("data", "other", "control_run") if (path := getattr(options, name, None))]
            log = ResultLog(options.output, suite.settings(), options.overwrite, suite.retry_errors, part, about, read)
            logs.append(log)
            if launched.processes > 1 and not launched.process:
                launched.gather(log.done)
        # The other processes of a launcher do not count as another evaluation.
        with nullcontext(lambda: None) if launched.process else this_machine() as is_ours:
            codes, pending = asyncio.run(_run_all(suites, logs, launched, console))
            for log in logs:
                log.note(alone=is_ours())
    finally:
        for log in logs:
            log.close()
    if pending:
        raise RepliesPending(pending)
    return min(filter(None, codes), default=0)


class Launched:
    """The processes of a launcher, each with its own GPU; without a launcher, only this process."""

    def __init__(self) -> None:
        self.process, self.processes = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        if self.processes == 1:
            return
        import torch

        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        devices = shown.split(",") if shown else [str(device) for device in range(torch.cuda.device_count())]
        if devices:
            # Hide the other GPUs: a new thread starts on the first visible GPU, whatever another thread has set.
            own = devices[int(os.environ["LOCAL_RANK"]) % len(devices)]
            os.environ |= {"CUDA_VISIBLE_DEVICES": own, "LOCAL_RANK": "0"}
        logger.info("%d processes; progress shows the part of the first process", self.processes)
        if not torch.distributed.is_initialized():
            try:
                torch.distributed.init_process_group("gloo", timeout=timedelta(minutes=10))
            except (RuntimeError, ValueError) as error:
                raise ConnectionError(
                    f"timed out waiting for the other processes (WORLD_SIZE={self.processes}): {error}"
                ) from error
        # gloo suffices, since GPUs exchange nothing. One process may end hours before another.
        self._group = torch.distributed.new_group(backend="gloo", timeout=timedelta(days=7))
        if self.process:
            logging.getLogger().setLevel(logging.WARNING)

    def gather(self, value: Any = None) -> list[Any]:
        """The values of all processes."""
        import torch

        values: list[Any] = [None] * self.processes
        try:
            torch.distributed.all_gather_object(values, value, group=self._group)
        except RuntimeError as error:
            raise ConnectionError("another process of this evaluation has ended: see its output") from error
        return values


async def _run_all(
    suites: Sequence[Suite], logs: Sequence[ResultLog], launched: Launched, console: Console | None
) -> tuple[list[int], str]:
    """Answer items without a row; return the exit codes of complete suites, and advice on waiting items."""
    codes, waiting, advice, failed = [], 0, [], []
    try:
        for suite, log in zip(suites, logs):
            before, started, waits = len(log.done), time.perf_counter(), 0
            try:
                mine = [name for name in suite.ids if name not in log.done][launched.process :: launched.processes]
                if mine:
                    suite.open()
                    log.note(**suite.notes)
                    # Models are loaded now, so that the first suite's questions per second do not include loading.
                    for one in suite.clients:
                        one.load()
                    started = time.perf_counter()
                    waits = await _answer(suite, log, frozenset(mine))
                if launched.process:
                    log.close()
                if launched.processes > 1:
                    waits = sum(launched.gather(waits))
                if not launched.process:
                    log.join()
                if not waits and not launched.process:
                    codes.append(_finish(suite, log, len(log.done) - before, time.perf_counter() - started, console))
            except Exception as error:
                if len(suites) == 1:
                    raise
                logger.error("%s: %s: %s", log.folder, type(error).__name__, error)
                logger.debug("traceback of %s", log.folder, exc_info=True)
                failed.append(f"{log.folder}: {error}")
            waiting += waits
        clients = [one for suite in suites for one in suite.clients]
        # This comes last, so that suites that share a client share its request file.
        advice = [one.pending_message() for one in clients if waiting]
    finally:
        await close_clients(*suites)
    if failed:
        raise RunsFailed(f"{len(failed)} of {len(suites)} evaluations failed: {'; '.join(failed)}")
    messages = [f"{waiting:,} {suites[0].unit}s wait.", *(text for text in dict.fromkeys(advice) if text)]
    return codes, " ".join(messages) if waiting else ""


async def close_clients(*suites: Suite) -> None:
    """Close each client that suites have opened, once."""
    for one in {id(one): one for suite in suites for one in suite.clients}.values():
        await one.close()


async def _answer(suite: Suite, log: ResultLog, mine: frozenset[str]) -> int:
    """Answer this process's items; return the number of items that wait for a batch."""
    waiting = 0
    batches = suite.batches(item for item in suite.items() if item.id in mine)
    # Only the first process shows its progress.
    silent = not logger.isEnabledFor(logging.INFO)
    bar = progress(unit=suite.unit, total=len(log.done) + len(mine), initial=len(log.done), disable=silent)

    async def work() -> None:
        nonlocal waiting
        # All workers draw from one iterator, so that only items in progress are in memory.
        for batch in batches:
            for item, reply in await ask_items(suite, batch):
                if isinstance(reply, RepliesPending):
                    waiting += 1
                    continue
                log.append(suite.score(item, reply))
                bar.update()

    with bar:
        await in_workers(work, suite.concurrency)
    return waiting


async def ask_items(suite: Suite, batch: list[Any]) -> list[tuple[Any, Any]]:
    """Each item with its reply, its failure, or `RepliesPending`; a bad item does not affect other items."""
    started = time.perf_counter()
    NOTING.set(None)
    try:
        return list(zip(batch, await suite.ask(batch), strict=True))
    except (SetupError, RetriesExhausted) as error:
        if isinstance(error.__cause__, (ValueError, OSError)):  # a model folder that can't be loaded is bad input
            raise ValueError(str(error)) from error
        raise
    # No error of one item may lose this item or other items.
    except Exception as error:
        if len(batch) > 1:
            return [pair for item in batch for pair in await ask_items(suite, [item])]
        if isinstance(error, RepliesPending):
            return [(batch[0], error)]
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        logger.warning("%s %s failed: %s: %s", suite.unit, batch[0].id, type(error).__name__, error)
        logger.debug("traceback of %s %s", suite.unit, batch[0].id, exc_info=True)
        return [(batch[0], Failure(f"{type(error).__name__}: {error}", time.perf_counter() - started, NOTING.get()))]


def _finish(suite: Suite, log: ResultLog, answered: int, seconds: float, console: Console | None) -> int:
    log.finish(suite.ids)
    path, units = log.folder / METRICS, f"{suite.unit}s"
    session = {units: answered, "seconds": round(seconds, 3), f"{units}_per_second": round(answered / seconds, 4)}
    if not answered and path.exists():
        # This session answered nothing, so the speed of the last real session is kept.
        session = read_json(path).get("session", session)
    failed, total = sum(bool(row.get("error")) for row in log.rows()), len(suite.ids)
    metrics = {**suite.summarise(log), "failed": failed, "session": session}
    write_json(path, metrics)
    if console is not None:
        suite.show(metrics, console)
        speed = session[f"{units}_per_second"]
        console.print(f"{session[units]} {units} in {session['seconds']} s, {speed} per second")
    if failed:
        logger.error('%d of %d %s failed and score 0; see "error" in %s', failed, total, units, log.path)
    return ALL_FAILED if failed == total else SOME_FAILED if failed > suite.options.max_failed * total else 0


def interval_cells(value: Mapping[str, Any], times: float = 100, form: str = "z.1f") -> tuple[str, str]:
    """A mean and its interval as table cells; dashes if there are none."""
    if value["mean"] is None:
        return "-", "-"
    mean, low, high = (format(times * value[key], form) for key in ("mean", "low", "high"))
    return mean, f"{low} to {high}"


def show_table(
    console: Console,
    title: str,
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    drawn: str = "",
    failed: int | None = None,
) -> None:
    """Print a table; for scores, also what their intervals draw ("questions") and how many items `failed`."""
    if failed is not None:
        heads, rows = [*heads[:-1], "failed", heads[-1]], [[*row[:-1], str(failed), row[-1]] for row in rows]
    Table(heads, rows, title).show(console)
    if drawn:
        way = f"by bootstrap over {drawn} (Clopper-Pearson if all scores are equal)"
        console.print(f"Scores are times 100, with a 95 % interval {way}.")
