"""Measure the loops of RAS and CIRAG with one question at a time and with many questions at once.

Both variants use the same model in the same process, on a GPU if there is one; only the number of concurrent questions
differs. Questions, corpus and triples come from a seeded fictional world. The case counts answers that differ; in
float32, none should.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from benchmarks import ENCODER, MODEL, Options, Result, Row, Way, hide_progress_of_libraries, take_turns
from tripletune.core.data.questions import Question
from tripletune.core.options import setting
from tripletune.data_builders.world.build import WorldOptions, write_world
from tripletune.eval.running import close_clients
from tripletune.eval.suites.questions import QuestionSuite
from tripletune.eval.systems import QuestionOptions, RunOptions
from tripletune.llm.backends import LLMOptions
from tripletune.rag import Trace

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
    hide_progress_of_libraries()
    traces: dict[str, list[Trace]] = {}
    with tempfile.TemporaryDirectory() as folder:
        # One additional question warms up model, encoder and indexes.
        write_world(WorldOptions(options.seed, train=0, validation=0, test=options.questions + 1), folder)
        run, teacher = _options_of_run(options, folder)

        def way(name: str, count: int, concurrency: int) -> Way:
            """A way to answer `count` questions, so many at once; its seconds leave out opening models and indexes."""

            def work() -> float:
                """Answer the questions, and keep their traces to compare them between ways."""
                # Opened for each pass, so that no variant finds strings that the other variant has embedded.
                suite = QuestionSuite(run, teacher)
                suite.open()
                answered = asyncio.run(_answer_questions(suite, count, concurrency))
                traces[name] = answered.traces
                return answered.seconds

            return Way(name, work, warm_up=False)

        one_by_one = min(options.one_by_one or options.questions, options.questions)
        ways = [way("one by one", one_by_one, 1), way("together", options.questions, options.concurrency)]
        take_turns(ways, options.repeats)
    rows = [_row_of_way(way, traces[way.name]) for way in ways]
    speed_up = rows[1]["questions_per_second"] / rows[0]["questions_per_second"]
    return Result(
        f"{options.system}: {options.questions} questions, median of {options.repeats} pass(es), float32",
        "name questions questions_per_second calls_per_question rounds_per_question tokens_read tokens_written "
        "peak_bytes",
        rows,
        [
            f"together is {speed_up:.2f} times as fast as one by one",
            _differences_in_words(traces["one by one"], traces["together"]),
        ],
    )


def _options_of_run(options: LoopOptions, folder: str) -> RunOptions:
    """The options of a run on the world in `folder`, and the chat model of CIRAG."""
    model: dict[str, Any]
    if options.system == "ras":
        teacher = None
        model = {"model": options.model or MODEL, "untrained": options.model is None}
        fixed = []
    else:
        teacher = LLMOptions("hf", MODEL, batch_size=options.concurrency, dtype="float32")
        model = {"integrator": options.model, "encoder": ENCODER}
        fixed = ["repairs=0", "extraction=store"]
    run = QuestionOptions(
        **model,
        system=options.system,
        task="hotpotqa",
        data=f"{folder}/test.jsonl",
        output=folder,
        corpus=f"{folder}/test.corpus.jsonl",
        triples=f"{folder}/test.triples.jsonl",
        set=[*fixed, *(options.set or _SHORT[options.system])],
        batch_size=options.concurrency,
        dtype="float32",
    )
    return RunOptions(run, teacher)


def _differences_in_words(alone: Sequence[Trace], together: Sequence[Trace]) -> str:
    """How many questions get another answer, and other replies on the way, when they are asked together."""
    answers = 0
    decisions = 0
    pairs = list(zip(alone, together))
    for first, second in pairs:
        answers += first.answer != second.answer
        decisions += [action.reply for action in first.actions] != [action.reply for action in second.actions]
    return f"of {len(pairs)} questions, {answers} get another answer and {decisions} get another decision"


def _row_of_way(way: Way, traces: Sequence[Trace]) -> Row:
    """Speed of a way, with the calls, rounds and tokens of the questions of its last pass."""
    calls = 0
    rounds = 0
    tokens_read = 0
    tokens_written = 0
    for trace in traces:
        calls += trace.calls
        rounds += len(trace.steps)
        tokens_read += trace.prompt_tokens
        tokens_written += trace.completion_tokens
    count = len(traces)
    return way.row(
        "questions",
        questions=count,
        calls_per_question=calls / count,
        rounds_per_question=rounds / count,
        tokens_read=tokens_read,
        tokens_written=tokens_written,
    )


class _Answered(NamedTuple):
    """The traces of the questions in order, and the seconds without opening and warm-up."""

    traces: list[Trace]
    seconds: float


async def _answer_questions(suite: QuestionSuite, count: int, concurrency: int) -> _Answered:
    """Answer the first `count` questions of an open suite, at most `concurrency` at once."""
    slots = asyncio.Semaphore(concurrency)

    async def answer(question: Question) -> Trace:
        """Answer a question when fewer than `concurrency` others are in progress."""
        async with slots:
            (trace,) = await suite.ask([question])
            return trace

    *questions, additional = suite.items()
    await answer(additional)
    start = time.perf_counter()
    try:
        traces = await asyncio.gather(*(answer(question) for question in questions[:count]))
        return _Answered(traces, time.perf_counter() - start)
    finally:
        await close_clients(suite)
