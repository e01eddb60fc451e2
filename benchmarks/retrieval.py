"""Retrieval with no language model: how much of what a question needs is found."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import ENCODER, Options, Result, quiet
from tripletune.eval import load_task, task_questions, write_context_corpus
from tripletune.eval.metrics import CUTS, recall
from tripletune.eval.rescore import final_ranking
from tripletune.eval.statistics import bootstrap_mean
from tripletune.models.data.questions import Question
from tripletune.models.llm import Completion, LLMClient
from tripletune.models.options import setting
from tripletune.rag.answering import SystemOptions, open_tools
from tripletune.rag.systems import find_system
from tripletune.rag.systems.gear import GearOptions, Scoring
from tripletune.rag.systems.ppr import PprOptions


@dataclass(frozen=True)
class RetrievalOptions(Options):
    """Options of `retrieval`."""

    task: str = setting("musique", "benchmark")
    data: str = setting("", "its question file; the contexts of all questions are the corpus")
    triples: str = setting("", "triples of these passages")
    scoring: Scoring = setting("concat", "what NaiveGE compares with the query")


class _NoModel(LLMClient):
    """Replies nothing: the answer is not looked at."""

    model = "none"

    async def chat(self, messages: Any, **options: Any) -> Completion:
        return Completion("")


def retrieval(options: RetrievalOptions) -> Result:
    """Recall of the supporting passages at 2, 5, 10 and 15, of BM25, dense and hybrid retrieval, each with NaiveGE.

    The last rows are PageRank, from each retriever's passages and all of the five closest triples.
    """
    quiet()
    questions = list(task_questions(load_task(options.task), options.data))
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_context_corpus(load_task(options.task), options.data, folder / "corpus.jsonl")
        systems: dict[str, tuple[str, Any]] = {
            "": ("standard", None),
            " + NaiveGE": ("gear", GearOptions(variant="naive", top_k=max(CUTS), scoring=options.scoring)),
            " + PageRank": ("ppr", PprOptions(top_k=max(CUTS), filter=False)),
        }
        for suffix, (name, loop) in systems.items():
            for retriever in ("bm25", "dense", "hybrid"):
                found = asyncio.run(_rankings(questions, name, loop, retriever, options, folder))
                rows.append({"name": f"{retriever}{suffix}", "questions": len(questions), **_recalls(questions, found)})
    notes = ["Recall in percent, its mean over the questions with a 95 % bootstrap interval."]
    return Result(
        f"recall of supporting passages, {options.task}", " ".join(["name", *(f"R@{cut}" for cut in CUTS)]), rows, notes
    )


async def _rankings(
    questions: list[Question], name: str, loop: Any, retriever: Any, options: RetrievalOptions, folder: Path
) -> list[Sequence[str]]:
    """Ids of passages for each question, best first."""
    system = find_system(name)
    loop = loop or system.options(top_k=max(CUTS))
    search = SystemOptions(triples=options.triples, retriever=retriever, encoder=ENCODER)
    tools = open_tools(search, system, loop, folder / "corpus.jsonl", folder / "index", llm=_NoModel())
    runs = (system.run(question.question, question.question, tools, loop) for question in questions)
    traces = await asyncio.gather(*runs)
    return [final_ranking(trace.to_json()) for trace in traces]


def _recalls(questions: list[Question], rankings: Sequence[Sequence[str]]) -> dict[str, Any]:
    gold = [{question.passages[index].id for index in question.supporting} for question in questions]
    found: dict[str, Any] = {}
    for cut in CUTS:
        mean = bootstrap_mean([recall(ids, wanted, cut) for wanted, ids in zip(gold, rankings)])
        found[f"R@{cut}"] = f"{100 * mean['mean']:.1f} ({100 * mean['low']:.1f}-{100 * mean['high']:.1f})"
        found[f"recall_{cut}"] = mean
    return found
