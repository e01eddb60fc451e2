"""What model calls cost: the loops of RAS and CIRAG with many questions under way, and loops that only wait.

Both ways of a loop run with the same model in the same process; only the number of questions under way differs.
Questions, corpus and triples are a seeded fictional world. Answers that differ are counted: in float32 there should be
none. On the CPU unless there is a GPU.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
import zlib
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks import ENCODER, MODEL, Options, Result, Way, quiet, take_turns
from tripletune.data_builders.world.build import WorldOptions, write_world
from tripletune.eval.suites.questions import QuestionOptions, QuestionSuite
from tripletune.models.llm import CALL_ROLE, Message
from tripletune.models.llm.backends import LLMOptions
from tripletune.models.options import setting
from tripletune.rag.embedding import Embedder


@dataclass(frozen=True)
class LoopsOptions(Options):
    """What both loops can be told."""

    repeats: int = setting(1, "passes of each way, whose median counts", at_least=1)
    questions: int = setting(16, "questions to answer", at_least=1)
    one_by_one: int | None = setting(None, "answer only the first so many of them one by one", at_least=1)
    concurrency: int = setting(64, "most questions under way together", at_least=1)
    batch_size: int = setting(16, "most inputs in a forward pass", at_least=1)
    dtype: str = setting("float32", "float32, bfloat16, float16 or auto")


@dataclass(frozen=True)
class RasOptions(LoopsOptions):
    """Options of `loop`."""

    model: str | None = setting(None, f"trained Graph-LLM: run, checkpoint or export (without: {MODEL}, untrained)")
    set: list[str] = setting(
        ["max_plan_tokens=24", "max_answer_tokens=16"], "options of the loop, NAME=VALUE, separated by commas"
    )


@dataclass(frozen=True)
class CiragLoopOptions(LoopsOptions):
    """Options of `cirag_loop`."""

    questions: int = setting(64, "questions to answer", at_least=1)
    batch_size: int = setting(64, "most calls in a forward pass", at_least=1)
    model: str = setting(MODEL, "language model with a chat template")
    integrator: str | None = setting(None, "a distilled student for the integration phase (without: the model)")
    encoder: str = setting(ENCODER, "ranks triples")
    set: list[str] = setting(
        ["max_rounds=2", "top_k=5", "candidates=15", "max_extraction_tokens=96", "max_integration_tokens=96",
         "max_generation_tokens=48"], "options of the loop, NAME=VALUE, separated by commas",
    )  # fmt: skip


@dataclass(frozen=True)
class WaitingOptions(Options):
    """Options of `waiting`."""

    system: str = setting("ircot", "the loop; one whose calls and searches follow one another")
    questions: int = setting(64, "questions asked together", at_least=1)
    call: float = setting(0.05, "seconds of a model call", at_least=0)
    search: float = setting(0.1, "seconds of a call of the encoder, for any number of texts", at_least=0)
    threads: int = setting(8, "calls of the encoder at once: eight of a server, one on this machine", at_least=1)
    set: list[str] = setting([], "options of the loop, NAME=VALUE, separated by commas")


def loop(options: RasOptions) -> Result:
    """The RAS loop: many questions under way against one by one.

    Without `--model` the model is untrained: what it says is worthless, how long it takes is what counts.
    """
    model = {"model": options.model or MODEL, "untrained": options.model is None, "set": options.set}
    result = _compare(options, WorldOptions(), {"system": "ras", **model})
    if options.model is None:
        result.notes.append("the model is untrained: its answers mean nothing, only their cost does")
    return result


def cirag_loop(options: CiragLoopOptions) -> Result:
    """The CIRAG loop on a local chat model: many questions under way against one by one.

    Without a ledger, so that every call is computed. A model that was not distilled for the loop rarely keeps to its
    format, so replies run to their limits; name a student with `--integrator` for the real mixture of rounds.
    """
    teacher = LLMOptions("hf", options.model, batch_size=options.batch_size, dtype=options.dtype)
    settings = ["repairs=0", "extraction=store", *options.set]
    llms = {"integrator": options.integrator, "encoder": options.encoder, "set": settings}
    return _compare(options, WorldOptions(one_hop=0), {"system": "cirag", **llms}, teacher)


def _compare(
    options: LoopsOptions, world: WorldOptions, more: dict[str, Any], teacher: LLMOptions | None = None
) -> Result:
    quiet()
    traces: dict[str, list[Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        # One question more than is measured: it warms up model, encoder and indexes.
        write_world(replace(world, seed=options.seed, train=0, validation=0, test=options.questions + 1), folder)
        asked = QuestionOptions(
            **more, task="hotpotqa", data=f"{folder}/test.jsonl", corpus=f"{folder}/test.corpus.jsonl", output=folder,
            triples=f"{folder}/test.triples.jsonl", batch_size=options.batch_size, dtype=options.dtype,
        )  # fmt: skip

        def way(name: str, count: int, concurrency: int) -> Way:
            def work() -> float:
                # Opened for each pass, so that no way finds the strings that the other has embedded.
                suite = QuestionSuite(asked, teacher)
                suite.open()
                traces[name], seconds = asyncio.run(_answers(suite, count, concurrency))
                return seconds

            return Way(name, work)

        ways = [
            way("one by one", min(options.one_by_one or options.questions, options.questions), 1),
            way("together", options.questions, options.concurrency),
        ]
        take_turns(ways, options.repeats)
    rows = []
    for way in ways:
        found, count = traces[way.name], len(traces[way.name])
        calls, rounds = sum(trace.calls for trace in found), sum(len(trace.steps) for trace in found)
        read, written = (sum(getattr(one, f"{kind}_tokens") for one in found) for kind in ("prompt", "completion"))
        more = {"calls_per_question": calls / count, "rounds_per_question": rounds / count}
        rows.append(way.row("questions", questions=count, **more, tokens_read=read, tokens_written=written))
    pairs = list(zip(traces["one by one"], traces["together"]))
    differ = [
        {"question": one.question, "one_by_one": one.answer, "together": other.answer}
        for one, other in pairs
        if one.answer != other.answer
    ]
    decisions = [[[action.reply for action in trace.actions] for trace in pair] for pair in pairs]
    changed = sum(one != other for one, other in decisions)
    speed_up = rows[1]["questions_per_second"] / rows[0]["questions_per_second"]
    return Result(
        f"{asked.system}: {options.questions} questions, median of {options.repeats} pass(es), {options.dtype}",
        "name questions questions_per_second calls_per_question rounds_per_question tokens_read tokens_written "
        "peak_bytes",
        rows,
        [
            f"together is {speed_up:.2f} times as fast as one by one",
            f"of {len(pairs)} questions {len(differ)} have another answer and {changed} another decision",
        ],
        {"speed_up": speed_up, "answers_that_differ": differ, "decisions_that_differ": changed},
    )


def waiting(options: WaitingOptions) -> Result:
    """Questions asked together whose time is all waiting: for a model that knows a world's facts, and an encoder.

    The ideal is the question that waits longest: the sum of its calls and searches, one after the other. A call of the
    encoder takes as long for one text as for all, as that of a server does, which is asked eight things at once. With
    `--threads 1`, as many as on this machine, a search that just missed a batch waits for it.
    """
    quiet()
    asleep: list[float] = []
    traces: list[Any] = []
    # Found in the pass before: making them is the stand-ins' time, not the loop's.
    replies: dict[tuple[str, ...], Any] = {}

    @cache
    def vector(text: str) -> np.ndarray:
        return np.bincount([zlib.crc32(word.encode()) % 512 for word in text.lower().split()], minlength=512)

    def encode(texts: list[str], _: str) -> np.ndarray:
        end = time.perf_counter() + sum(asleep)
        vectors = np.stack([vector(text) for text in texts])
        time.sleep(max(0.0, end - time.perf_counter()))
        return vectors

    with tempfile.TemporaryDirectory() as folder:
        splits = WorldOptions(seed=options.seed, train=0, validation=0, test=options.questions + 1, one_hop=0)
        write_world(splits, folder)
        asked = QuestionOptions(
            system=options.system, task="hotpotqa", data=f"{folder}/test.jsonl", corpus=f"{folder}/test.corpus.jsonl",
            triples=f"{folder}/test.triples.jsonl", output=folder, retriever="dense", encoder="a mock",
            oracle=f"{folder}/test", set=options.set,
        )  # fmt: skip
        numbers = count()

        def work() -> float:
            suite = QuestionSuite(asked, LLMOptions(model="a world", ledger=f"{folder}/{next(numbers)}.sqlite"))
            with patch(
                "tripletune.rag.search.open_embedder", lambda *_: Embedder("a mock", encode, threads=options.threads)
            ):
                suite.open()
            backend = suite.tools.llm.backend
            answer = backend.complete

            async def late(messages: list[Message], sampling: Any) -> Any:
                await asyncio.sleep(options.call)
                key = (CALL_ROLE.get(), *(message["content"] for message in messages))
                if key not in replies:
                    replies[key] = await answer(messages, sampling)
                return replies[key]

            asleep[:] = [options.search]
            with patch.object(backend, "complete", late):
                traces[:], seconds = asyncio.run(_answers(suite, options.questions, options.questions))
            asleep.clear()
            return seconds

        way = Way(options.system, work, work)
        take_turns([way], options.repeats)
    ideal = max(one.calls * options.call + len(one.steps) * options.search for one in traces)
    row = way.row("questions", questions=options.questions, ideal_seconds=ideal)
    row |= {"fastest_seconds": min(way.seconds), "own_seconds": min(way.cpu_seconds)}
    calls = sum(one.calls for one in traces)
    return Result(
        f"{options.system}: {options.questions} questions, {calls} calls of {options.call} s, searches of "
        f"{options.search} s, median of {options.repeats}",
        "name seconds fastest_seconds ideal_seconds own_seconds",
        [row],
    )


async def _answers(suite: QuestionSuite, count: int, concurrency: int) -> tuple[list[Any], float]:
    """Traces of the first questions, and the seconds that they took."""
    slots = asyncio.Semaphore(concurrency)

    async def answer(question: Any) -> Any:
        async with slots:
            (trace,) = await suite.ask([question])
            return trace

    *questions, first = suite.items()
    await answer(first)
    start = time.perf_counter()
    try:
        traces = await asyncio.gather(*(answer(question) for question in questions[:count]))
        return traces, time.perf_counter() - start
    finally:
        await asyncio.gather(*(one.close() for one in suite.clients))
