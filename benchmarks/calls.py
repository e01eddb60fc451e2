"""Measure what `eval run` itself costs per call: a server on this machine answers every call at once.

The replies are those of the oracle of a fictional world, recorded before the first measured pass. Time is counted by
the server, from the first request to the last reply, so start and loading are no part of it.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sqlite3
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import Options, Result, Row, Way, hide_progress_of_libraries, take_turns
from tripletune.core.options import setting
from tripletune.data_builders.world.build import WorldOptions, write_world

_ROOT = Path(__file__).resolve().parents[1]
# Systems that need only a chat model; GEAR and TH-RAG also need an encoder, whose time is not that of calls.
_SYSTEMS = ["ras", "cirag", "t2rag", "ircot", "standard"]
_SET = {"cirag": ["--set", "extraction=store", "--set", "rerank=no"]}
_MODEL = "mock"
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


@dataclass(frozen=True)
class CallsOptions(Options):
    """Options of `calls`."""

    questions: int = setting(2000, "questions per pass", at_least=1)
    concurrency: int = setting(64, "questions, and calls, at once", at_least=1)
    systems: list[str] = setting(_SYSTEMS, "systems, each measured by itself")
    beside: str | None = setting(None, "folder of another checkout, whose passes take turns with ours")
    ledger: bool = setting(True, "store every call in a ledger, as runs that can be continued do")


@dataclass
class _PassFigures:
    """What a pass did.

    Attributes:
        calls: Requests that were answered.
        seconds: From the first request to the last reply.
        cpu_seconds: Of the evaluation's process in this time.
        peak_bytes: Its highest resident memory.
    """

    calls: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_bytes: int = 0


def calls(options: CallsOptions) -> Result:
    """Compare calls per second and memory of `eval run` per system, against a server that answers at once.

    A pass answers all questions of a fictional world with BM25 and a new ledger. "Grown GB" is the peak of a pass
    minus the peak of a pass over a quarter of the questions: what memory the other questions took.
    """
    hide_progress_of_libraries()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_world(WorldOptions(options.seed, train=0, validation=0, test=options.questions), folder / "world")
        for system in options.systems:
            rows += _rows_of_system(system, options, folder)
    return Result(
        f"eval run on {options.questions} questions, {options.concurrency} at once, median of {options.repeats}",
        "name calls calls_per_second cpu_milliseconds_per_call times_beside peak_bytes grown_bytes",
        rows,
    )


def _rows_of_system(system: str, options: CallsOptions, folder: Path) -> list[Row]:
    """Measure a system: the row of this checkout, and that of the checkout beside it.

    Both get the replies that either has recorded, since their prompts may differ.
    """
    checkouts = {"here": str(_ROOT)}
    if options.beside:
        checkouts["beside"] = str(Path(options.beside).resolve())
    replies: dict[str, str] = {}
    for root in checkouts.values():
        replies |= _record_replies(system, options, folder, root)
    ways = []
    passes: dict[str, list[_PassFigures]] = {}
    grown = {}
    for name, root in checkouts.items():
        quarter = asyncio.run(_measure_pass(system, options, folder, root, replies, max(1, options.questions // 4)))
        grown[name] = quarter.peak_bytes

        def work(name: str = name, root: str = root) -> float:
            """Do one pass of a checkout, and keep its figures."""
            measured = asyncio.run(_measure_pass(system, options, folder, root, replies, options.questions))
            passes.setdefault(name, []).append(measured)
            return measured.seconds

        ways.append(Way(name, work, warm_up=False))
    take_turns(ways, options.repeats)
    rows = []
    for way in ways:
        measured = passes[way.name]
        peak = max(done.peak_bytes for done in measured)
        rows.append(
            way.row("calls", calls=measured[0].calls)
            | {
                "name": f"{system}, {way.name}",
                "cpu_milliseconds_per_call": 1000 * min(done.cpu_seconds for done in measured) / measured[0].calls,
                "passes_cpu_seconds": [done.cpu_seconds for done in measured],
                "times_beside": ways[-1].median / way.median,
                "peak_bytes": peak,
                "grown_bytes": peak - grown[way.name],
            }
        )
    return rows


def _eval_command(system: str, options: CallsOptions, folder: Path, output: Path, questions: int) -> list[str]:
    """`eval run` on the first questions of the world, without the model."""
    world = folder / "world"
    ledger = ["--ledger", str(output / "ledger.sqlite")] if options.ledger else []
    return [
        "eval", "run", "--system", system, "--task", "hotpotqa", "--data", str(world / "test.jsonl"),
        "--corpus", str(world / "test.corpus.jsonl"), "--triples", str(world / "test.triples.jsonl"),
        "--index", str(folder / "index"), "--retriever", "bm25", "--output", str(output), "--limit", str(questions),
        "--concurrency", str(options.concurrency), "--teacher-concurrency", str(options.concurrency), *ledger,
        *_SET.get(system, []),
    ]  # fmt: skip


def _record_replies(system: str, options: CallsOptions, folder: Path, root: str) -> dict[str, str]:
    """Answer all questions with the oracle, and return its replies by the messages as JSON.

    The ledger that held them is deleted, so that the passes do not read it.
    """
    output = folder / "recorded"
    command = _eval_command(system, options, folder, output, options.questions)
    if not options.ledger:
        command += ["--ledger", str(output / "ledger.sqlite")]
    asyncio.run(_run_tripletune([*command, "--oracle", str(folder / "world" / "test")], root))
    with sqlite3.connect(output / "ledger.sqlite") as connection:
        replies = dict(connection.execute("SELECT messages, text FROM calls WHERE status = 'ok'"))
    connection.close()
    shutil.rmtree(output)
    return replies


async def _run_tripletune(command: Sequence[str], root: str, seen: _Server | None = None) -> int:
    """Run `tripletune` of a checkout to its end, and return the peak of its resident memory in bytes.

    Args:
        seen: The server that it calls, which gets the number of the process; a call that it does not know is an error.
    """
    environment = {**os.environ, "PYTHONPATH": root, "OPENAI_API_KEY": "none"}
    with tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tripletune", *command, cwd=root, env=environment, stdout=log, stderr=log
        )
        if seen is not None:
            seen.process = process.pid
        peak = asyncio.create_task(_peak_until_end(process.pid))
        code = await process.wait()
        highest = await peak
        if code != 0 or (seen is not None and seen.unknown):
            log.seek(0)
            said = log.read().decode(errors="replace")[-2000:]
            raise RuntimeError(f"tripletune {' '.join(command)} ended with {code}: {said}")
    return highest


async def _peak_until_end(process: int) -> int:
    """The highest resident memory of a process in bytes, read until it ends; 0 where there is no /proc."""
    highest = 0
    while True:
        try:
            for line in Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines():
                if line.startswith("VmHWM:"):
                    highest = int(line.split()[1]) * 1024
        except OSError:
            return highest
        await asyncio.sleep(0.2)


async def _measure_pass(
    system: str, options: CallsOptions, folder: Path, root: str, replies: dict[str, str], questions: int
) -> _PassFigures:
    """Run `eval run` on the first questions against a new server, in a new output folder, and measure it."""
    output = folder / "pass"
    shutil.rmtree(output, ignore_errors=True)
    server = _Server(replies)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    async with listening:
        port = listening.sockets[0].getsockname()[1]
        model = f"openai:{_MODEL}@http://127.0.0.1:{port}/v1"
        peak = await _run_tripletune(
            [*_eval_command(system, options, folder, output, questions), "--llm", model], root, server
        )
    return _PassFigures(server.calls, server.last - server.first, server.cpu_last - server.cpu_first, peak)


@dataclass
class _Server:
    """Answers chat completions from a table, over plain HTTP/1.1 with kept connections.

    Attributes:
        process: The process whose CPU time is read at the first and at the last call.
        unknown: Calls that are not in the table, which were refused.
    """

    replies: dict[str, str]
    process: int = 0
    calls: int = 0
    first: float = 0.0
    last: float = 0.0
    cpu_first: float = 0.0
    cpu_last: float = 0.0
    unknown: int = 0
    _dumps: json.JSONEncoder = field(
        default_factory=lambda: json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    )

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection until the client closes it."""
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                _, _, after = head.partition(b"content-length:")
                body = await reader.readexactly(int(after.split(b"\r\n", 1)[0]))
                if not self.calls:
                    self.first = time.perf_counter()
                    self.cpu_first = _cpu_seconds(self.process)
                writer.write(self._respond_and_count(body))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def _respond_and_count(self, body: bytes) -> bytes:
        """The response to a request, as bytes; counts the call and keeps its time.

        The CPU time is read at every 50th call alone, since reading it takes as long as a reply.
        """
        messages = json.loads(body)["messages"]
        text = self.replies.get(self._dumps.encode(messages))
        self.calls += 1
        self.last = time.perf_counter()
        if self.calls % 50 == 0:
            self.cpu_last = _cpu_seconds(self.process)
        if text is None:
            self.unknown += 1
            return b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        usage = {"prompt_tokens": len(body) // 4, "completion_tokens": len(text) // 4}
        content = json.dumps(
            {"id": "c", "object": "chat.completion", "created": 0, "model": _MODEL, "choices": [choice], "usage": usage}
        ).encode()
        return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
            len(content),
            content,
        )


def _cpu_seconds(process: int) -> float:
    """The CPU seconds of a process so far; 0 where there is no /proc."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS
