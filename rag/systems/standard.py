"""A reference point of RAS, table 1: one retrieval whose passages the model reads as text."""

from __future__ import annotations

from dataclasses import replace

from tripletune.rag import Trace
from tripletune.rag.systems import LoopOptions, System, Tools
from tripletune.rag.systems.ras import ras


async def standard(question: str, search: str, tools: Tools, options: LoopOptions) -> Trace:
    """Retrieve once with the question and answer from the raw text of the passages; see `System.run`.

    Of the options `top_k` and `max_answer_tokens` count.
    """
    options = replace(options, retrieval=True, max_rounds=1, planning=False, evidence="text")
    return await ras(question, search, replace(tools, store=None), options)


SYSTEM = System(
    name="standard",
    summary="retrieves once with the question, answers from the passages' text",
    run=standard,
    needs_corpus=lambda options: True,
    needs_triples=lambda options: False,
)
