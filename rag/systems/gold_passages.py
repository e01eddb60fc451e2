"""An upper bound of retrieval: the model reads only the passages that support the question."""

from __future__ import annotations

from tripletune.rag import Trace
from tripletune.rag.chat_generator import CLOSED_BOOK, READER, answer_once, prompt_files
from tripletune.rag.search.retrievers import Retrieved
from tripletune.rag.systems import LoopOptions, System, Tools


async def gold_passages(question: str, search: str, tools: Tools, options: LoopOptions) -> Trace:
    """Answer from the gold passages, if the question has any; see `System.run`."""
    if not tools.gold and not tools.context:
        raise ValueError("the question has no known supporting passages: give --gold links and the links' --corpus")
    # Without a supporting passage the model answers from its own knowledge.
    hits = [Retrieved(passage, 1.0) for passage in tools.gold] or None
    return await answer_once("gold_passages", question, tools, options, hits, search)


SYSTEM = System(
    name="gold_passages",
    run=gold_passages,
    needs_corpus=lambda options: False,
    options=LoopOptions,
    files=prompt_files(READER, CLOSED_BOOK),
    needs_gold=True,
)
