"""What the LLM client costs, and the HotpotQA-SUBQ builder behind it; nothing here needs a model."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import Options, PeakMemory, Result, Way, in_fresh_process, take_turns
from tripletune.data_builders.world.build import WorldOptions, write_world
from tripletune.models.llm import Message
from tripletune.models.llm.backends import LLMOptions, open_client
from tripletune.models.options import setting

_PROMPT = "You look at a question and at the documents that were found for it. " * 12


@dataclass(frozen=True)
class ClientOptions(Options):
    """Options of `llm_client`."""

    calls: int = setting(2000, "calls of a pass", at_least=1)
    in_flight: int = setting(64, "calls under way", at_least=1)
    delay: float = setting(0.1, "seconds until the server answers", above=0)


@dataclass(frozen=True)
class BuildSubqOptions(Options):
    """Options of `build_subq`."""

    questions: int = setting(20_000, "questions of the larger build; a quarter is built first", at_least=8)


def llm_client(options: ClientOptions) -> Result:
    """The LLM client: calls in flight against the ideal rate, what the ledger adds, and replies it has already.

    The server answers after `--delay` seconds, on loopback, in a process of its own. The ideal is a client that costs
    nothing: ceil(calls / in flight) * delay seconds. Bare aiohttp shows what server and machine allow. "Full ledger" is
    a run whose calls were all made before.
    """
    ideal = math.ceil(options.calls / options.in_flight) * options.delay
    with tempfile.TemporaryDirectory() as scratch, fixed_server(options.delay) as url:
        folder = Path(scratch)
        full = folder / "full.sqlite"
        # A ledger of its own for each pass.
        ledgers = (folder / f"{number}.sqlite" for number in range(10**6))

        def way(name: str, one: Callable[[], Any], warm_up: Callable[[], Any] | None = None) -> Way:
            return Way(name, lambda: asyncio.run(one()), warm_up and (lambda: asyncio.run(warm_up())))

        again = partial(_client_pass, options, url, full)
        ways = [
            way("bare aiohttp", partial(_bare_pass, options, url)),
            way("without ledger", partial(_client_pass, options, url, None)),
            way("with ledger", lambda: _client_pass(options, url, next(ledgers))),
            way("full ledger", again, again),
        ]
        take_turns(ways, options.repeats)
        size = full.stat().st_size / options.calls
    rows = [way.row("calls", calls=options.calls) for way in ways]
    for row in rows:
        cpu = statistics.median(row["cpu_seconds"])
        row["own_microseconds_per_call"] = cpu / (options.calls + options.in_flight) * 1e6
        row["of_ideal_share"] = None if row["name"] == "full ledger" else ideal / row["seconds"]
    cost = rows[2]["own_microseconds_per_call"] - rows[1]["own_microseconds_per_call"]
    return Result(
        f"{options.calls} calls, {options.in_flight} in flight, answers after {options.delay * 1000:g} ms; "
        f"ideal {ideal:.2f} s, median of {options.repeats}",
        "name seconds calls_per_second of_ideal_share own_microseconds_per_call",
        rows,
        [f"the ledger costs {cost:.0f} µs and {size:.0f} bytes per call"],
        {"ideal_seconds": ideal, "ledger_bytes_per_call": size},
    )


def _chat(number: int) -> list[Message]:
    return [{"role": "system", "content": _PROMPT}, {"role": "user", "content": f"question {number}: {_PROMPT}"}]


async def _measured(options: ClientOptions, call: Callable[[int], Awaitable[Any]]) -> float:
    """Seconds of the calls; one round before opens the connections and imports what is late."""

    async def in_flight(numbers: Iterator[int]) -> None:
        async def worker() -> None:
            for number in numbers:
                await call(number)

        await asyncio.gather(*(worker() for _ in range(options.in_flight)))

    await in_flight(iter(range(-options.in_flight, 0)))
    gc.collect()
    gc.freeze()  # as the builder does
    start = time.perf_counter()
    await in_flight(iter(range(options.calls)))
    return time.perf_counter() - start


async def _bare_pass(options: ClientOptions, url: str) -> float:
    import aiohttp

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def post(number: int) -> None:
            async with session.post(f"{url}/chat/completions", json={"messages": _chat(number)}) as response:
                json.loads(await response.read())

        return await _measured(options, post)


async def _client_pass(options: ClientOptions, url: str, ledger: Path | None) -> float:
    where = LLMOptions(model="mock", url=url, ledger=ledger and str(ledger), concurrency=options.in_flight)
    async with open_client(where) as client:

        async def chat(number: int) -> None:
            await client.chat(_chat(number), role="benchmark", question_id=str(number))

        return await _measured(options, chat)


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
        "name records seconds questions_per_second peak_bytes",
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
        "input_bytes": Path(questions).stat().st_size + Path(replies).stat().st_size,
    }


@contextmanager
def fixed_server(delay: float, text: str = "yes") -> Iterator[str]:
    """Base URL of a server that gives every chat the same reply after `delay` seconds; a process of its own."""
    command = [sys.executable, "-m", __name__, str(delay), text]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            if process.stdout is None or not (port := process.stdout.readline().strip()):
                raise RuntimeError("the server did not start")
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.kill()


async def _serve(delay: float, text: str) -> None:
    from aiohttp import web

    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    reply = {
        "id": "chatcmpl-fixed", "object": "chat.completion", "created": 1, "model": "fixed", "choices": [choice],
        "usage": {"prompt_tokens": 200, "completion_tokens": 12, "total_tokens": 212},
    }  # fmt: skip
    body = json.dumps(reply).encode()

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        await asyncio.sleep(delay)
        return web.Response(body=body, content_type="application/json")

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.to_thread(sys.stdin.read)  # which ends when the process that started this one does


if __name__ == "__main__":
    asyncio.run(_serve(float(sys.argv[1]), sys.argv[2]))
