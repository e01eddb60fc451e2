"""Measure the loops of RAS and CIRAG with one question at a time and with many questions at once.

Both variants use the same model in the same process, on a GPU if there is one; only the number of concurrent questions
differs. Questions, corpus and triples come from a seeded fictional world. The case counts answers that differ; in
float32, none should.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from dataclasses import dataclass
from typing import Any

from benchmarks import ENCODER, MODEL, Options, Result, Way, quiet, take_turns
from tripletune.core.options import setting
from tripletune.data_builders.world.build import WorldOptions, write_world
from tripletune.eval.suites.questions import QuestionSuite
from tripletune.eval.systems import QuestionOptions
from tripletune.llm.backends import LLMOptions

# Options that keep replies short, so that a pass ends soon.
_SHORT = {
    "ras": ["max_plan_tokens=24", "max_answer_tokens=16"],
    "cirag": ["max_rounds=2", "top_k=5", "candidates=15", "max_extraction_tokens=96", "max_integration_tokens=96",
              "max_thought_tokens=32", "max_answer_tokens=16"],
}  # fmt: skip


@dataclass(frozen=True)
class LoopOptions(Options):
    """Options of `loop`."""

    repeats: int = setting(1, "measured passes per variant; the median is reported", at_least=1)
    system: str = setting("ras", "the loop", choices=tuple(_SHORT))
    model: str | None = setting(
        None, f"ras: trained Graph-LLM; cirag: student as integrator (default: {MODEL}, untrained for the loop)"
    )
    questions: int = setting(16, "questions to answer", at_least=1)
    one_by_one: int | None = setting(None, "answer only the first N questions one by one", at_least=1)
    concurrency: int = setting(64, "maximum questions at once, and maximum calls per forward pass", at_least=1)
    set: list[str] = setting([], "options of the loop (NAME=VALUE, separated by commas) instead of the case's own")


def loop(options: LoopOptions) -> Result:
    """Compare the loop of RAS or CIRAG with many questions at once and with one question at a time.

    Without `--model` the model is untrained, so only the cost of its answers is of interest. CIRAG's triples come from
    a file, and its other calls go to SmolLM2. There is no ledger, so that every call is computed.
    """
    quiet()
    traces: dict[str, list[Any]] = {}
    loop_settings, teacher = options.set or _SHORT[options.system], None
    if options.system == "ras":
        model: dict[str, Any] = {"model": options.model or MODEL, "untrained": options.model is None}
    else:
        loop_settings = ["repairs=0", "extraction=store", *loop_settings]
        model = {"integrator": options.model, "encoder": ENCODER}
        teacher = LLMOptions("hf", MODEL, batch_size=options.concurrency, dtype="float32")
    with tempfile.TemporaryDirectory() as folder:
        # One additional question warms up model, encoder and indexes.
        write_world(WorldOptions(options.seed, train=0, validation=0, test=options.questions + 1), folder)
        asked = QuestionOptions(
            **model, system=options.system, task="hotpotqa", data=f"{folder}/test.jsonl", output=folder,
            corpus=f"{folder}/test.corpus.jsonl", triples=f"{folder}/test.triples.jsonl", set=loop_settings,
            batch_size=options.concurrency, dtype="float32",
        )  # fmt: skip

        def way(name: str, count: int, concurrency: int) -> Way:
            def work() -> float:
                # Opened for each pass, so that no variant finds strings that the other variant has embedded.
                suite = QuestionSuite(asked, teacher)
                suite.open()
                traces[name], seconds = asyncio.run(_answers(suite, count, concurrency))
                return seconds

            return Way(name, work, warm_up=False)

        ways = [
            way("one by one", min(options.one_by_one or options.questions, options.questions), 1),
            way("together", options.questions, options.concurrency),
        ]
        take_turns(ways, options.repeats)
    rows = [_row(way, traces[way.name]) for way in ways]
    pairs = list(zip(traces["one by one"], traces["together"]))
    differ = sum(one.answer != other.answer for one, other in pairs)
    decisions = [[[action.reply for action in trace.actions] for trace in pair] for pair in pairs]
    changed = sum(one != other for one, other in decisions)
    speed_up = rows[1]["questions_per_second"] / rows[0]["questions_per_second"]
    return Result(
        f"{options.system}: {options.questions} questions, median of {options.repeats} pass(es), float32",
        "name questions questions_per_second calls_per_question rounds_per_question tokens_read tokens_written "
        "peak_bytes",
        rows,
        [
            f"together is {speed_up:.2f} times as fast as one by one",
            f"of {len(pairs)} questions, {differ} get another answer and {changed} get another decision",
        ],
    )


def _row(way: Way, found: list[Any]) -> dict[str, Any]:
    count = len(found)
    return way.row(
        "questions",
        questions=count,
        calls_per_question=sum(trace.calls for trace in found) / count,
        rounds_per_question=sum(len(trace.steps) for trace in found) / count,
        tokens_read=sum(trace.prompt_tokens for trace in found),
        tokens_written=sum(trace.completion_tokens for trace in found),
    )


async def _answers(suite: QuestionSuite, count: int, concurrency: int) -> tuple[list[Any], float]:
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
