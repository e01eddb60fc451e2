"""What the LLM client costs, and the HotpotQA-SUBQ builder behind it; nothing here needs a model."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import random
import re
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.fixed_server import fixed_server
from benchmarks.harness import Options, PeakMemory, Result, Way, in_fresh_process, take_turns
from tripletune.models.llm.backends.openai import OpenAIBackend
from tripletune.models.llm.client import CallError, Message, Sampling
from tripletune.models.llm.ledger import Ledger
from tripletune.models.llm.ledger_client import LedgerClient, Limits
from tripletune.models.local.generation import Completion
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

    questions: int = setting(20_000, "questions of the larger build; a quarter is built first", at_least=4)


def llm_client(options: ClientOptions) -> Result:
    """The LLM client: calls in flight against the ideal rate, what the ledger adds, and replies it has already.

    The server answers after `--delay` seconds, on loopback, in a process of its own. The ideal is a client that costs
    nothing: ceil(calls / in flight) * delay seconds. Bare aiohttp shows what server and machine allow. "At once" is
    the same client over a backend that answers at once; "full ledger" is a run whose calls were all made before.
    """
    ideal = math.ceil(options.calls / options.in_flight) * options.delay
    own: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as scratch, fixed_server(options.delay) as url:
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
    backend, limits = OpenAIBackend("mock", url, timeout=60.0), Limits(concurrency=options.in_flight)
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

_PASSAGES, _WORDS = 10, 45
_VOCABULARY = [
    f"{start}{middle}{end}"
    for start in ("ka", "lo", "mi", "ne", "ru", "sa", "te", "vo")
    for middle in ("b", "d", "ll", "m", "nt", "r", "st")
    for end in ("a", "en", "ir", "on", "us")
]
_DOCUMENT = re.compile(r"^Document: (Book|Author) (\d+)$", re.MULTILINE)


def build_subq(options: BuildSubqOptions) -> Result:
    """The whole HotpotQA-SUBQ builder with every reply stored: questions per second, and peak memory at two sizes.

    Synthetic questions of ten passages go through reader, teacher, checks, labelling, shards, statistics and card.
    `annotations` takes recorded replies from a file; `ledger` asks the teacher through a full ledger, behind which a
    model that refuses every call proves that nothing is sent. Each build runs in a process of its own.
    """
    rows = []
    for size in (options.questions // 4, options.questions):
        with tempfile.TemporaryDirectory() as folder:
            _write_questions(Path(folder), size, options.seed)
            for path in ("annotations", "ledger"):
                if path == "ledger":
                    in_fresh_process(_build, folder, "fill", size)
                rows.append(in_fresh_process(_build, folder, path, size))
    notes = []
    for first, last in zip(rows[:2], rows[2:]):
        grown, more = last["peak_bytes"] - first["peak_bytes"], last["input_bytes"] - first["input_bytes"]
        notes.append(f"{first['name']}: peak memory grows by {grown / 1e6:+.1f} MB, the input by {more / 1e6:+.1f} MB")
    return Result(
        "builds of HotpotQA-SUBQ from stored replies",
        {
            "replies from": ("name", "{}"),
            "questions": ("questions", "{:,}"),
            "records": ("records", "{:,}"),
            "seconds": ("seconds", "{:.1f}"),
            "questions/s": ("questions_per_second", "{:,.0f}"),
            "calls/s": ("calls_per_second", "{:,.0f}"),
            "peak GB": ("peak_bytes", "GB"),
        },
        rows,
        notes,
    )


def _build(folder: str, path: str, size: int) -> dict[str, Any]:
    from tripletune.data_builders.hotpotqa_subq.build import build
    from tripletune.data_builders.hotpotqa_subq.options import BuildOptions, Source

    questions, replies = f"{folder}/questions.jsonl", f"{folder}/replies.jsonl"
    recorded = path == "annotations"
    source = Source.parse(f"hotpotqa:{questions}:{replies}" if recorded else f"hotpotqa:{questions}")

    def open_client() -> LedgerClient:
        return LedgerClient(_Teacher(refuse=path != "fill"), Ledger(Path(folder) / "ledger.sqlite"))

    with PeakMemory() as memory:
        start = time.perf_counter()
        numbers = build([source], BuildOptions(output=f"{folder}/{path}"), None if recorded else open_client)
        seconds = time.perf_counter() - start
    labelled = numbers["tasks"]["answering"]["records"]
    if labelled != size:
        raise ValueError(f"{labelled:,} of {size:,} questions gave records; all should have")
    return {
        "name": path,
        "questions": size,
        "records": numbers["records"],
        "seconds": seconds,
        "questions_per_second": size / seconds,
        # Filter, and a sub-query and triples for each of two documents.
        "calls_per_second": None if recorded else 5 * size / seconds,
        "peak_bytes": memory.peak,
        "resting_bytes": memory.resting,
        "input_bytes": Path(questions).stat().st_size + Path(replies).stat().st_size,
    }


def _write_questions(folder: Path, count: int, seed: int) -> None:
    chance = random.Random(seed)
    with (folder / "questions.jsonl").open("w") as questions, (folder / "replies.jsonl").open("w") as replies:
        for number in range(count):
            questions.write(json.dumps(_question(number, chance)) + "\n")
            titles = {kind: f"{kind} {number}" for kind in ("Book", "Author")}
            reply = {
                "_id": f"bench{number}",
                "helpful": list(titles.values()),
                "subqueries": [{"title": title, "question": _subquery(kind, number)} for kind, title in titles.items()],
                "triples": {title: _facts(kind, number) for kind, title in titles.items()},
            }
            replies.write(json.dumps(reply) + "\n")


def _question(number: int, chance: random.Random) -> dict[str, Any]:
    def words() -> str:
        return " ".join(chance.choices(_VOCABULARY, k=_WORDS))

    book, author = f"Book {number}", f"Author {number}"
    context = [
        [book, [f"{book} is a novel by {author}.", f" {words()}."]],
        [author, [f"{author} was born in Town {number}.", f" {words()}."]],
        *([f"Other {number} {other}", [f"{words()}."]] for other in range(_PASSAGES - 2)),
    ]
    chance.shuffle(context)
    return {
        "_id": f"bench{number}",
        "question": f"Where was the author of {book} born?",
        "answer": f"Town {number}",
        "type": "bridge",
        "supporting_facts": [[book, 0], [author, 0]],
        "context": context,
    }


def _facts(kind: str, number: int) -> list[list[str]]:
    name = f"{kind} {number}"
    link = ["written by", f"Author {number}"] if kind == "Book" else ["born in", f"Town {number}"]
    return [[name, *link], *([name, f"property {n}", f"{_VOCABULARY[(number + n) % 280]}"] for n in range(9))]


def _subquery(kind: str, number: int) -> str:
    return f"Who wrote Book {number}?" if kind == "Book" else f"Where was Author {number} born?"


class _Teacher:
    """A backend that answers the builder's three prompts on these questions at once, or refuses all."""

    model = "synthetic"

    def __init__(self, refuse: bool) -> None:
        self._refuse = refuse

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        if self._refuse:
            raise CallError("the ledger has no reply for a call; it should be full")
        prompt = messages[-1]["content"]
        documents = _DOCUMENT.findall(prompt)
        if len(documents) != 1:
            return Completion(json.dumps({"documents": [1, 2], "answerable": True}))
        ((kind, number),) = documents
        if prompt.startswith("Main question: "):
            return Completion(json.dumps({"question": _subquery(kind, int(number))}))
        return Completion(json.dumps({"triples": _facts(kind, int(number))}))

    async def close(self) -> None:
        return
