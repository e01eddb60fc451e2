"""Retrieval with no language model: how much of what a question needs is found, and what a search in vectors costs."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from benchmarks import ENCODER, Options, Result, Way, quiet, take_turns
from tripletune.eval import load_task, task_questions, write_context_corpus
from tripletune.eval.metrics import CUTS, recall
from tripletune.eval.rescore import final_ranking
from tripletune.eval.statistics import bootstrap_mean
from tripletune.models.data.questions import Question
from tripletune.models.llm import Completion, LLMClient
from tripletune.models.options import setting
from tripletune.rag.answering import SystemOptions, open_tools
from tripletune.rag.embedding import Embedder
from tripletune.rag.systems import find_system
from tripletune.rag.systems.gear import GearOptions, Scoring
from tripletune.rag.systems.ppr import PprOptions
from tripletune.rag.text_index import Ranking, VectorIndex

_WIDTH, _SEARCHES, _NEAREST = 384, 1000, 10


@dataclass(frozen=True)
class RetrievalOptions(Options):
    """Options of `retrieval`."""

    task: str = setting("musique", "benchmark")
    data: str = setting("", "its question file; the contexts of all questions are the corpus")
    triples: str = setting("", "triples of these passages")
    scoring: Scoring = setting("concat", "what NaiveGE compares with the query")


@dataclass(frozen=True)
class VectorOptions(Options):
    """Options of `vector_index`; a pass is 1,000 searches, one after the other."""

    rows: int = setting(100_000, "vectors of the index", at_least=100)


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


def vector_index(options: VectorOptions) -> Result:
    """Searches in vectors: all compared, and through an HNSW graph.

    Recall is the share of the ten nearest rows. The vectors are random; the variance of their n-th principal component
    is 1 / n, like that of MiniLM's.
    """
    axes, _ = np.linalg.qr(np.random.default_rng(options.seed).normal(size=(_WIDTH, _WIDTH)))
    axes = (axes * np.arange(1, _WIDTH + 1)[:, None] ** -0.5).astype(np.float32)
    rankings: dict[str, list[Ranking]] = {}

    def encode(texts: list[str], kind: str) -> np.ndarray:
        drawn = np.random.default_rng([options.seed, kind == "query", crc32(texts[0].encode())])
        found: np.ndarray = drawn.standard_normal((len(texts), _WIDTH), dtype=np.float32) @ axes
        return found

    def way(name: str, index: VectorIndex) -> Way:
        async def search() -> None:
            rankings[name] = [(await index.rank([str(number)], _NEAREST))[0] for number in range(_SEARCHES)]

        return Way(name, lambda: asyncio.run(search()))

    def texts() -> Iterator[str]:
        return map(str, range(options.rows))

    with tempfile.TemporaryDirectory() as folder:
        embedder = Embedder("random", encode)
        ways = [
            way(name, VectorIndex(Path(folder), {"rows": options.rows}, texts, options.rows, embedder, search))
            for name, search in (("all compared", "flat"), ("HNSW graph", "hnsw"))
        ]
        take_turns(ways, options.repeats)
    exact = rankings[ways[0].name]
    rows = []
    for one in ways:
        both = zip(exact, rankings[one.name])
        recall = statistics.fmean(len({row for row, _ in a} & {row for row, _ in b}) / len(a) for a, b in both)
        rows.append(one.row("searches", searches=_SEARCHES, recall=recall))
    columns = "name searches_per_second recall peak_bytes"
    return Result(f"searches in {options.rows:,} vectors of {_WIDTH} numbers", columns, rows)
