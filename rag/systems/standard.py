"""A reference point of RAS, table 1: one retrieval whose passages the model reads as text."""

from __future__ import annotations

import time

from tripletune.models.data.records import ModelInput, Step
from tripletune.models.llm.client import Generator
from tripletune.rag.retrieval.retrievers import Retriever
from tripletune.rag.systems import LoopOptions, System, Tools, need
from tripletune.rag.trace import Trace


async def standard(
    question: str, answerer: Generator, retriever: Retriever, options: LoopOptions | None = None, search: str = ""
) -> Trace:
    """Retrieve once with the question and answer from the raw text of the passages.

    Args:
        question: The question as the model reads it.
        answerer: Replies to the answering input.
        retriever: Searches the corpus.
        options: `top_k` and `max_answer_tokens` count.
        search: The question as it is searched, when that differs from `question`.
    """
    options = options or LoopOptions()
    started = time.perf_counter()
    trace = Trace(question, stop_reason="single_pass")
    hits = await retriever.retrieve(search or question, options.top_k)
    step = Step(search or question, (), "\n".join(hit.passage.content for hit in hits))
    trace.add_step(step, hits)
    sample = ModelInput("answering", question, (step,))
    completion = await answerer.generate(sample, options.max_answer_tokens, "text")
    trace.count(completion)
    trace.answer = completion.text.strip()
    trace.seconds = time.perf_counter() - started
    return trace


async def _run(question: str, search: str, tools: Tools, options: LoopOptions) -> Trace:
    answerer, retriever = need(tools, "answerer", "standard"), need(tools, "retriever", "standard")
    return await standard(question, answerer, retriever, options, search)


SYSTEM = System(
    name="standard",
    summary="retrieves once with the question, answers from the passages' text",
    run=_run,
    needs_corpus=lambda options: True,
    needs_triples=lambda options: False,
)
