"""What the LLM client costs, and the HotpotQA-SUBQ builder behind it; nothing here needs a model."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import Options, PeakMemory, Result, Way, in_fresh_process, take_turns
from tripletune.data_builders.world.build import WorldOptions, write_world
from tripletune.models.llm.backends.openai import OpenAIBackend
from tripletune.models.llm.client import Completion, Message, Sampling
from tripletune.models.llm.ledger import Ledger
from tripletune.models.llm.ledger_client import LedgerClient, Limits
from tripletune.models.llm.options import LLMOptions
from tripletune.models.options import setting

_CALLS_PER_QUESTION = 5
_PROMPT = "You look at a question and at the documents that were found for it. " * 12


@dataclass(frozen=True)
class ClientOptions(Options):
    """Options of `llm_client`."""

    calls: int = setting(2000, "calls to the server", at_least=1)
    in_flight: int = setting(64, "calls under way", at_least=1)
    delay: float = setting(0.1, "seconds until the server answers", above=0)
    local_calls: int = setting(10_000, "calls to a backend that answers at once", at_least=1)
    cached_calls: int = setting(50_000, "calls over a full ledger", at_least=1)


@dataclass(frozen=True)
class BuildSubqOptions(Options):
    """Options of `build_subq`."""

    questions: int = setting(20_000, "questions of the larger build; a quarter is built first", at_least=8)


def llm_client(options: ClientOptions) -> Result:
    """The LLM client: calls in flight against the ideal rate, what the ledger adds, and replies it has already.

    The server answers after `--delay` seconds, on loopback, in a process of its own. The ideal is a client that costs
    nothing: ceil(calls / in flight) * delay seconds. Bare aiohttp shows what server and machine allow. "At once" is
    the same client over a backend that answers at once; "full ledger" is a run whose calls were all made before.
    """
    ideal = math.ceil(options.calls / options.in_flight) * options.delay
    own: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as scratch, _fixed_server(options.delay) as url:
        folder = Path(scratch)
        # A ledger of its own for each pass.
        ledgers = (folder / f"{number}.sqlite" for number in range(10**6))

        def server(name: str, make: Callable[[], Any]) -> Way:
            def work() -> float:
                seconds, cpu = asyncio.run(make())
                own.setdefault(name, []).append(cpu / options.calls * 1e6)
                return float(seconds)

            return Way(name, work)

        def local(ledger: bool) -> Callable[[], float]:
            return lambda: asyncio.run(_local_pass(options, next(ledgers) if ledger else None))

        full = folder / "full.sqlite"
        ways = [
            server("bare aiohttp", lambda: _bare_pass(options, url)),
            server("without ledger", lambda: _client_pass(options, url, None)),
            server("with ledger", lambda: _client_pass(options, url, next(ledgers))),
            Way("at once, without ledger", local(ledger=False)),
            Way("at once, with ledger", local(ledger=True)),
            Way("full ledger", lambda: asyncio.run(_cached_pass(options, full)), lambda: _fill(options, full)),
        ]
        take_turns(ways, options.repeats)
        size = full.stat().st_size
    rows = []
    for way, calls in zip(ways, [options.calls] * 3 + [options.local_calls] * 2 + [options.cached_calls]):
        cpu = sorted(own.get(way.name, []))
        rows.append(
            way.row(
                calls=calls,
                calls_per_second=round(calls / way.median, 1),
                microseconds_per_call=round(cpu[len(cpu) // 2] if cpu else way.median / calls * 1e6, 1),
                share_of_ideal=round(ideal / way.median, 4) if cpu else None,
            )
        )
    cost = rows[4]["microseconds_per_call"] - rows[3]["microseconds_per_call"]
    return Result(
        f"{options.calls} calls, {options.in_flight} in flight, answers after {options.delay * 1000:g} ms; "
        f"ideal {ideal:.2f} s, median of {options.repeats}",
        {
            "way": ("name", "{}"),
            "seconds": ("seconds", "{:.3f}"),
            "calls/s": ("calls_per_second", "{:,.0f}"),
            "share of the ideal": ("share_of_ideal", "{:.1%}"),
            "own µs per call": ("microseconds_per_call", "{:.0f}"),
        },
        rows,
        [f"the ledger costs {cost:.0f} µs and {size / options.cached_calls:.0f} bytes per call"],
        {"ideal_seconds": ideal, "ledger_bytes_per_call": round(size / options.cached_calls)},
    )


def _chat(number: int) -> list[Message]:
    return [{"role": "system", "content": _PROMPT}, {"role": "user", "content": f"question {number}: {_PROMPT}"}]


async def _in_flight(calls: int, in_flight: int, call: Callable[[int], Awaitable[Any]]) -> float:
    """Make calls with so many workers; the seconds from first to last."""
    numbers = iter(range(calls))

    async def worker() -> None:
        for number in numbers:
            await call(number)

    start = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(in_flight)))
    return time.perf_counter() - start


async def _measured(options: ClientOptions, call: Callable[[int], Awaitable[Any]]) -> tuple[float, float]:
    """Seconds of the calls, and of processor time; one round before opens the connections and imports what is late."""
    await _in_flight(options.in_flight, options.in_flight, lambda number: call(-1 - number))
    gc.collect()
    gc.freeze()  # as the builder does
    before = time.process_time()
    return await _in_flight(options.calls, options.in_flight, call), time.process_time() - before


async def _bare_pass(options: ClientOptions, url: str) -> tuple[float, float]:
    import aiohttp

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def post(number: int) -> None:
            async with session.post(f"{url}/chat/completions", json={"messages": _chat(number)}) as response:
                json.loads(await response.read())

        return await _measured(options, post)


async def _client_pass(options: ClientOptions, url: str, ledger: Path | None) -> tuple[float, float]:
    backend, limits = (
        OpenAIBackend(LLMOptions(model="mock", url=url)),
        Limits(concurrency=options.in_flight, timeout=60.0),
    )
    async with LedgerClient(backend, Ledger(ledger) if ledger else None, limits) as client:

        async def chat(number: int) -> None:
            await client.chat(_chat(number), role="benchmark", question_id=str(number))

        return await _measured(options, chat)


class _Echo:
    """A backend that answers at once."""

    model = "benchmark:echo"

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        return Completion(messages[-1]["content"], 200, 100)

    async def close(self) -> None:
        return


async def _local_pass(options: ClientOptions, path: Path | None, calls: int = 0) -> float:
    async with LedgerClient(_Echo(), Ledger(path) if path else None) as client:

        async def chat(number: int) -> None:
            await client.chat(_chat(number), role="benchmark", question_id=str(number // _CALLS_PER_QUESTION))

        return await _in_flight(calls or options.local_calls, options.in_flight, chat)


def _fill(options: ClientOptions, path: Path) -> None:
    asyncio.run(_local_pass(options, path, options.cached_calls))


async def _cached_pass(options: ClientOptions, path: Path) -> float:
    """Questions of several calls each, as a builder makes them; with opening and closing the ledger."""
    calls, cached = options.cached_calls, 0
    start = time.perf_counter()
    async with LedgerClient(_Echo(), Ledger(path)) as client:

        async def question(number: int) -> None:
            nonlocal cached
            first = number * _CALLS_PER_QUESTION
            for call in range(first, min(first + _CALLS_PER_QUESTION, calls)):
                found = await client.chat(_chat(call), role="benchmark", question_id=str(number))
                cached += found.cached

        await _in_flight(math.ceil(calls / _CALLS_PER_QUESTION), options.in_flight, question)
    if cached != calls:
        raise ValueError(f"only {cached} of {calls} calls came from the ledger: this measures nothing")
    return time.perf_counter() - start


# The builder ----------------------------------------------------------------------------------------------------------


def build_subq(options: BuildSubqOptions) -> Result:
    """The whole HotpotQA-SUBQ builder on recorded replies: questions per second, and peak memory at two sizes.

    Questions of a fictional world go through reader, teacher, checks, labelling, shards, statistics and card. Each
    size runs in a process of its own.
    """
    rows = []
    for size in (options.questions // 4, options.questions):
        with tempfile.TemporaryDirectory() as folder:
            write_world(WorldOptions(options.seed, size, 0, 0), f"{folder}/world")
            rows.append(in_fresh_process(_build, folder, size))
    grown, more = (rows[1][name] - rows[0][name] for name in ("peak_bytes", "input_bytes"))
    return Result(
        "builds of HotpotQA-SUBQ from recorded replies",
        {
            "questions": ("name", "{}"),
            "records": ("records", "{:,}"),
            "seconds": ("seconds", "{:.1f}"),
            "questions/s": ("questions_per_second", "{:,.0f}"),
            "peak GB": ("peak_bytes", "GB"),
        },
        rows,
        [f"peak memory changes by {grown / 1e6:+.1f} MB, the input by {more / 1e6:+.1f} MB"],
    )


def _build(folder: str, size: int) -> dict[str, Any]:
    from tripletune.data_builders.hotpotqa_subq.build import build
    from tripletune.data_builders.hotpotqa_subq.options import BuildOptions, Source

    questions, replies = f"{folder}/world/train.jsonl", f"{folder}/world/train.teacher.jsonl"
    with PeakMemory() as memory:
        start = time.perf_counter()
        numbers = build([Source.parse(f"hotpotqa:{questions}:{replies}")], BuildOptions(output=f"{folder}/records"))
        seconds = time.perf_counter() - start
    return {
        "name": f"{size:,}",
        "records": numbers["records"],
        "seconds": seconds,
        "questions_per_second": size / seconds,
        "peak_bytes": memory.peak,
        "resting_bytes": memory.resting,
        "input_bytes": Path(questions).stat().st_size + Path(replies).stat().st_size,
    }


# A server that costs next to nothing ----------------------------------------------------------------------------------


@contextmanager
def _fixed_server(delay: float, text: str = "yes") -> Iterator[str]:
    """Base URL of a server that gives every chat the same reply after `delay` seconds; a process of its own.

    The mock server of the tests reads, hashes and counts every request, which takes more processor time than the
    client that is measured. This one finds the end of a request and sends bytes that were made beforehand.
    """
    command = [sys.executable, "-m", __name__, str(delay), text]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            if process.stdout is None or not (port := process.stdout.readline().strip()):
                raise RuntimeError("the server did not start")
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.kill()


class _Connection(asyncio.Protocol):
    def __init__(self, delay: float, response: bytes) -> None:
        self._delay, self._response, self._data = delay, response, b""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            head = self._data[:end].lower()
            size = int(head.partition(b"content-length:")[2].split(b"\r\n", 1)[0] or 0)
            if len(self._data) < end + 4 + size:
                return
            self._data = self._data[end + 4 + size :]
            asyncio.get_running_loop().call_later(self._delay, self._transport.write, self._response)


async def _serve(delay: float, text: str) -> None:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    body = json.dumps(
        {
            "id": "chatcmpl-fixed", "object": "chat.completion", "created": 1, "model": "fixed", "choices": [choice],
            "usage": {"prompt_tokens": 200, "completion_tokens": 12, "total_tokens": 212},
        }
    )  # fmt: skip
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    connect = lambda: _Connection(delay, f"{head}{body}".encode())  # noqa: E731
    server = await asyncio.get_running_loop().create_server(connect, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)  # which ends when the process that started this one does


if __name__ == "__main__":
    asyncio.run(_serve(float(sys.argv[1]), sys.argv[2]))
