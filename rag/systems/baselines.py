"""The two reference points of RAS, table 1: the model alone, and one retrieval whose passages it reads as text."""

from __future__ import annotations

import time

from tripletune.models.data.records import ModelInput, Step
from tripletune.models.local.generation import Generator
from tripletune.rag.retrieval.retrievers import Retriever
from tripletune.rag.systems.registry import LoopOptions, System, Tools, need_models, need_retriever
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
    await _answer(question, (), answerer, options or LoopOptions(), trace)
    trace.seconds = time.perf_counter() - started
    return trace


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
    await _answer(question, (step,), answerer, options, trace)
    trace.seconds = time.perf_counter() - started
    return trace


async def _answer(
    question: str, steps: tuple[Step, ...], answerer: Generator, options: LoopOptions, trace: Trace
) -> None:
    sample = ModelInput("answering", question, steps)
    completion = await answerer.generate(sample, options.max_answer_tokens, "text" if steps else None)
    trace.count(completion)
    trace.answer = completion.text.strip()


async def _run_no_retrieval(question: str, search: str, tools: Tools, options: LoopOptions) -> Trace:
    return await no_retrieval(question, need_models(tools, "no_retrieval")[1], options)


async def _run_standard(question: str, search: str, tools: Tools, options: LoopOptions) -> Trace:
    answerer, retriever = need_models(tools, "standard")[1], need_retriever(tools, "standard")
    return await standard(question, answerer, retriever, options, search)


NO_RETRIEVAL = System(
    name="no_retrieval",
    summary="answers from the model's own knowledge",
    run=_run_no_retrieval,
    needs_corpus=lambda options: False,
    needs_triples=lambda options: False,
)
STANDARD = System(
    name="standard",
    summary="retrieves once with the question, answers from the passages' text",
    run=_run_standard,
    needs_corpus=lambda options: True,
    needs_triples=lambda options: False,
)
