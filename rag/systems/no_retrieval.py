"""A reference point of RAS, table 1: the model alone."""

from __future__ import annotations

import time

from tripletune.models.data.records import ModelInput
from tripletune.models.llm.client import Generator
from tripletune.rag.systems import LoopOptions, System, Tools, need
from tripletune.rag.trace import Trace


async def no_retrieval(question: str, answerer: Generator, options: LoopOptions | None = None) -> Trace:
    """Answer from the model's own knowledge.

    Args:
        question: The question as the model reads it.
        answerer: Replies to the answering input.
        options: Only `max_answer_tokens` counts.
    """
    started = time.perf_counter()
    trace = Trace(question, stop_reason="retrieval_off")
    sample = ModelInput("answering", question, ())
    completion = await answerer.generate(sample, (options or LoopOptions()).max_answer_tokens, None)
    trace.count(completion)
    trace.answer = completion.text.strip()
    trace.seconds = time.perf_counter() - started
    return trace


async def _run(question: str, search: str, tools: Tools, options: LoopOptions) -> Trace:
    return await no_retrieval(question, need(tools, "answerer", "no_retrieval"), options)


SYSTEM = System(
    name="no_retrieval",
    summary="answers from the model's own knowledge",
    run=_run,
    needs_corpus=lambda options: False,
    needs_triples=lambda options: False,
)
