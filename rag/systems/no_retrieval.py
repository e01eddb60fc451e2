"""A reference point of RAS, table 1: the model alone."""

from __future__ import annotations

import time

from tripletune.models.data.records import ModelInput
from tripletune.rag import Trace
from tripletune.rag.systems import LoopOptions, System, Tools, need


async def no_retrieval(question: str, search: str, tools: Tools, options: LoopOptions) -> Trace:
    """Answer from the model's own knowledge; see `System.run`. Only `max_answer_tokens` counts."""
    answerer = need(tools, "answerer", "no_retrieval")
    started = time.perf_counter()
    trace = Trace(question, stop_reason="retrieval_off")
    sample = ModelInput("answering", question, ())
    completion = await answerer.generate(sample, options.max_answer_tokens, None)
    trace.count(completion)
    trace.answer = completion.text.strip()
    trace.seconds = time.perf_counter() - started
    return trace


SYSTEM = System(
    name="no_retrieval",
    summary="answers from the model's own knowledge",
    run=no_retrieval,
    needs_corpus=lambda options: False,
    needs_triples=lambda options: False,
)
