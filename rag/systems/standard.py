"""A reference point of RAS, table 1: one retrieval whose passages the model reads as text."""

from __future__ import annotations

import time

from tripletune.models.data.records import ModelInput, Step
from tripletune.rag.systems import LoopOptions, System, Tools, need
from tripletune.rag.trace import Trace


async def standard(question: str, search: str, tools: Tools, options: LoopOptions) -> Trace:
    """Retrieve once with the question and answer from the raw text of the passages; see `System.run`.

    Of the options `top_k` and `max_answer_tokens` count.
    """
    answerer, retriever = need(tools, "answerer", "standard"), need(tools, "retriever", "standard")
    started = time.perf_counter()
    trace = Trace(question, stop_reason="single_pass")
    hits = await retriever.retrieve(search, options.top_k)
    step = Step(search, (), "\n".join(hit.passage.content for hit in hits))
    trace.add_step(step, hits)
    sample = ModelInput("answering", question, (step,))
    completion = await answerer.generate(sample, options.max_answer_tokens, "text")
    trace.count(completion)
    trace.answer = completion.text.strip()
    trace.seconds = time.perf_counter() - started
    return trace


SYSTEM = System(
    name="standard",
    summary="retrieves once with the question, answers from the passages' text",
    run=standard,
    needs_corpus=lambda options: True,
    needs_triples=lambda options: False,
)
