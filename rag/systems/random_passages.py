"""A lower bound of retrieval: the model reads passages drawn at random from the corpus."""

from __future__ import annotations

import random

from tripletune.rag import Trace
from tripletune.rag.chat_generator import READER, answer_once, prompt_files
from tripletune.rag.search.retrievers import Retrieved
from tripletune.rag.systems import LoopOptions, System, Tools, corpus_retriever


async def random_passages(question: str, search: str, tools: Tools, options: LoopOptions) -> Trace:
    """Answer from `top_k` passages; see `System.run`. All runs with one `share_seed` draw the same passages."""
    passages = corpus_retriever(tools, "random_passages").passages
    count = min(options.top_k, len(passages))
    drawn = random.Random(f"{options.share_seed} {search}").sample(range(len(passages)), count)
    hits = [Retrieved(passages[position], 0.0, position) for position in drawn]
    return await answer_once("random_passages", question, tools, options, hits, search)


SYSTEM = System(name="random_passages", run=random_passages, options=LoopOptions, files=prompt_files(READER))
