"""Answer with the model alone, without retrieval (a baseline of RAS, table 1)."""

from __future__ import annotations

from tripletune.rag import Trace
from tripletune.rag.chat_generator import CLOSED_BOOK, answer_once, prompt_files
from tripletune.rag.systems import LoopOptions, System, Tools


async def no_retrieval(question: str, search: str, tools: Tools, options: LoopOptions) -> Trace:
    """Answer from the model's own knowledge; see `System.run`. Only the option `max_answer_tokens` has an effect."""
    return await answer_once("no_retrieval", question, tools, options)


SYSTEM = System(
    name="no_retrieval",
    run=no_retrieval,
    needs_corpus=lambda options: False,
    options=LoopOptions,
    files=prompt_files(CLOSED_BOOK),
)
