"""Retrieve once, and let the model read the passages as text (a baseline of RAS, table 1)."""

from __future__ import annotations

from tripletune.rag import Trace
from tripletune.rag.chat_generator import READER, answer_once, prompt_files
from tripletune.rag.systems import LoopOptions, System, Tools, need


async def standard(question: str, search: str, tools: Tools, options: LoopOptions) -> Trace:
    """Retrieve once with the question and answer from the raw text of the passages; see `System.run`."""
    hits = await need(tools.retriever, "retriever", "standard").retrieve(search, options.top_k)
    return await answer_once("standard", question, tools, options, hits, search)


SYSTEM = System(name="standard", run=standard, options=LoopOptions, files=prompt_files(READER))
