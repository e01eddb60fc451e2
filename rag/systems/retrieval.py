"""Search once and answer nothing, to measure a retriever alone; no model is called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tripletune.core.data.records import Step
from tripletune.core.options import CheckedOptions, setting
from tripletune.rag import Trace
from tripletune.rag.search.retrievers import Retrieved
from tripletune.rag.systems import System, Tools, need


@dataclass(frozen=True, slots=True)
class RankingOptions(CheckedOptions):
    """Options of a system that only retrieves."""

    top_k: int = setting(15, "passages per question, at least as many as the largest k of recall@k", at_least=1)


def ranking_alone(question: str, search: str, hits: Sequence[Retrieved]) -> Trace:
    """The trace of a question that was searched for and not answered, so that only its ranking is scored.

    Args:
        question: The question as `System.run` gets it; `search` is what was searched for.
        hits: The passages, the best one first. Their ids are those of the corpus.
    """
    trace = Trace(question, stop_reason="single_pass", details={"unknown": ["answer", "shown"]})
    trace.add_step(Step(search), hits)
    return trace


async def retrieval(question: str, search: str, tools: Tools, options: RankingOptions) -> Trace:
    """Search for the question; see `System.run`."""
    retriever = need(tools.retriever, "retriever", "retrieval")
    return ranking_alone(question, search, await retriever.retrieve(search, options.top_k))


SYSTEM = System(name="retrieval", run=retrieval, options=RankingOptions, model="none", files=lambda options: {})
