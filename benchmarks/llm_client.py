"""What the LLM client costs: calls in flight against the ideal rate, the ledger per call, and replies it has already.

    python benchmarks/llm_client.py

Three measurements, all on this machine:

1. `--calls` calls, `--in-flight` of them under way, to a mock OpenAI-compatible server that answers after `--delay`
   seconds, on loopback, in a process of its own (`benchmarks/fixed_server.py`). Ways: a bare aiohttp client (what
   server and machine allow), our client without and with a ledger. The ideal is a client that costs nothing:
   ceil(calls / in flight) * delay seconds. One call for each place in flight goes before the clock starts: it opens
   the connection and imports what the SDK imports late. With `--tests-server` the calls go to the mock server of the
   tests, which takes as much processor time as the client.
2. The same client over a backend that answers at once: processor time that a call costs us, without and with a ledger.
3. A run over a full ledger: `--cached-calls` calls that were all answered before, by questions that run at once.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from fixed_server import fixed_server
from measure import environment, write_result

sys.path.insert(0, str(Path(__file__).parents[1]))

from tripletune.models.llm.backends.openai import OpenAIBackend
from tripletune.models.llm.client import Message, Sampling
from tripletune.models.llm.ledger import Ledger
from tripletune.models.llm.ledger_client import LedgerClient
from tripletune.models.llm.limits import Limits
from tripletune.models.local.generation import Completion

CALLS_A_QUESTION = 5
PROMPT = "You look at a question and at the documents that were found for it. " * 12
WAYS = ("bare aiohttp", "without ledger", "with ledger")


class Echo:
    """A backend that answers at once."""

    model = "benchmark:echo"

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        """The last message again."""
        return Completion(messages[-1]["content"], 200, 100)

    async def close(self) -> None:
        """Nothing is open."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table and write the JSON; bad input gives one line and exit code 2."""
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        for name in ("calls", "in_flight", "delay", "local_calls", "cached_calls", "repeats"):
            if not getattr(args, name) > 0:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)}: it must be above 0")
        result = measure(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    show(result)
    print(f"written to {write_result(args.output, 'llm_client', result)}")
    return 0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All three measurements.

    Returns:
        The content of the JSON file.
    """
    ideal = math.ceil(args.calls / args.in_flight) * args.delay
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        passes: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
        with _server(args) as url:
            for turn in range(args.repeats):
                # The ways take turns in going first.
                for way in WAYS if turn % 2 == 0 else reversed(WAYS):
                    ledger = folder / f"server{turn}.sqlite" if way == "with ledger" else None
                    passes[way].append(asyncio.run(_server_pass(args, url, way, ledger)))
        local: dict[str, list[float]] = {"without ledger": [], "with ledger": []}
        for turn in range(args.repeats):
            local["without ledger"].append(asyncio.run(_local_pass(args.local_calls, args.in_flight, None)))
            path = folder / f"local{turn}.sqlite"
            local["with ledger"].append(asyncio.run(_local_pass(args.local_calls, args.in_flight, path)))
        full = folder / "full.sqlite"
        asyncio.run(_local_pass(args.cached_calls, args.in_flight, full))
        cached = [asyncio.run(_cached_pass(args.cached_calls, args.in_flight, full)) for _ in range(args.repeats)]
        size = full.stat().st_size
    return {
        "options": {name: getattr(args, name) for name in vars(args) if name != "output"},
        "ideal_seconds": ideal,
        "server": [_server_row(way, passes[way], args.calls, ideal) for way in WAYS],
        "local_microseconds_per_call": {
            way: round(statistics.median(seconds) / args.local_calls * 1e6, 1) for way, seconds in local.items()
        },
        "cached_calls_per_second": round(args.cached_calls / statistics.median(cached)),
        "cached_passes_seconds": [round(value, 4) for value in cached],
        "ledger_bytes_per_call": round(size / args.cached_calls),
        "environment": environment(),
    }


def show(result: dict[str, Any]) -> None:
    """Print the figures."""
    from rich.console import Console
    from rich.table import Table

    options = result["options"]
    title = f"{options['calls']} calls, {options['in_flight']} in flight, answers after {options['delay'] * 1000:g} ms"
    table = Table(title=f"{title}; ideal {result['ideal_seconds']:.2f} s, median of {options['repeats']}")
    for heading in ("way", "seconds", "calls/s", "share of the ideal"):
        table.add_column(heading, justify="left" if heading == "way" else "right")
    for row in result["server"]:
        share = f"{row['share_of_ideal']:.1%}"
        table.add_row(row["way"], f"{row['seconds']:.3f}", f"{row['calls_per_second']:.0f}", share)
    console = Console() if sys.stdout.isatty() else Console(width=120)
    console.print(table)
    costs = ", ".join(f"{row['way']} {row['client_microseconds_per_call']:.0f} µs" for row in result["server"])
    console.print(f"processor time of the client, a call: {costs}")
    local = result["local_microseconds_per_call"]
    without, with_ledger = local["without ledger"], local["with ledger"]
    console.print(
        f"client's own time: {without:.0f} µs a call without ledger, {with_ledger:.0f} µs with: "
        f"the ledger costs {with_ledger - without:.0f} µs and {result['ledger_bytes_per_call']} bytes a call"
    )
    console.print(
        f"full ledger of {options['cached_calls']:,} calls: {result['cached_calls_per_second']:,} cached calls a second"
    )


def _server(args: argparse.Namespace) -> AbstractContextManager[str]:
    if not args.tests_server:
        return fixed_server(args.delay)
    from tests.models.llm.server import server_process

    return server_process(delay=args.delay)


def _chat(number: int) -> list[Message]:
    return [{"role": "system", "content": PROMPT}, {"role": "user", "content": f"question {number}: {PROMPT}"}]


async def _in_flight(calls: int, in_flight: int, call: Callable[[int], Awaitable[Any]]) -> float:
    """Make calls with so many workers; the seconds from first to last."""
    numbers = iter(range(calls))

    async def worker() -> None:
        for number in numbers:
            await call(number)

    start = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(in_flight)))
    return time.perf_counter() - start


async def _server_pass(args: argparse.Namespace, url: str, way: str, ledger: Path | None) -> tuple[float, float]:
    """Seconds of the calls, and seconds of processor time that this process took for them."""
    if way == "bare aiohttp":
        import aiohttp

        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

            async def post(number: int) -> None:
                async with session.post(f"{url}/chat/completions", json={"messages": _chat(number)}) as response:
                    json.loads(await response.read())

            # One round opens the connections.
            await _in_flight(args.in_flight, args.in_flight, post)
            before = time.process_time()
            return await _in_flight(args.calls, args.in_flight, post), time.process_time() - before
    backend = OpenAIBackend("mock", url, timeout=60.0)
    limits = Limits(concurrency=args.in_flight)
    async with LedgerClient(backend, Ledger(ledger) if ledger else None, limits) as client:

        async def chat(number: int) -> None:
            await client.chat(_chat(number), role="benchmark", question_id=str(number))

        await _in_flight(args.in_flight, args.in_flight, lambda number: chat(-1 - number))
        # As the builder does, once what the SDK imports is there.
        gc.collect()
        gc.freeze()
        before = time.process_time()
        return await _in_flight(args.calls, args.in_flight, chat), time.process_time() - before


async def _local_pass(calls: int, in_flight: int, path: Path | None) -> float:
    async with LedgerClient(Echo(), Ledger(path) if path else None) as client:

        async def chat(number: int) -> None:
            await client.chat(_chat(number), role="benchmark", question_id=str(number // CALLS_A_QUESTION))

        return await _in_flight(calls, in_flight, chat)


async def _cached_pass(calls: int, in_flight: int, path: Path) -> float:
    """Questions of several calls each, as a builder makes them; with opening and closing the ledger."""
    start = time.perf_counter()
    async with LedgerClient(Echo(), Ledger(path)) as client:
        cached = 0

        async def question(number: int) -> None:
            nonlocal cached
            first = number * CALLS_A_QUESTION
            for call in range(first, min(first + CALLS_A_QUESTION, calls)):
                found = await client.chat(_chat(call), role="benchmark", question_id=str(number))
                cached += found.cached

        await _in_flight(math.ceil(calls / CALLS_A_QUESTION), in_flight, question)
    if cached != calls:
        raise ValueError(f"only {cached} of {calls} calls came from the ledger: this measures nothing")
    return time.perf_counter() - start


def _server_row(way: str, passes: list[tuple[float, float]], calls: int, ideal: float) -> dict[str, Any]:
    seconds = statistics.median(wall for wall, _ in passes)
    return {
        "way": way,
        "passes_seconds": [round(wall, 4) for wall, _ in passes],
        "client_microseconds_per_call": round(statistics.median(own for _, own in passes) / calls * 1e6, 1),
        "seconds": round(seconds, 4),
        "calls_per_second": round(calls / seconds, 1),
        "share_of_ideal": round(ideal / seconds, 4),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--calls", type=int, default=2000, help="calls to the server (default: %(default)s)")
    add("--in-flight", type=int, default=64, help="calls under way (default: %(default)s)")
    add("--delay", type=float, default=0.1, help="seconds until the server answers (default: %(default)s)")
    add("--local-calls", type=int, default=10_000, help="calls without a server (default: %(default)s)")
    add("--cached-calls", type=int, default=50_000, help="calls over a full ledger (default: %(default)s)")
    add("--repeats", type=int, default=3, help="passes of each way, whose median counts (default: %(default)s)")
    add("--tests-server", action="store_true", help="call the mock server of the tests instead of the fixed one")
    add("--output", default="runs/benchmarks", help="folder of the JSON (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
