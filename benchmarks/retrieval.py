"""Measure the recall of retrieval without a language model, and of GEAR with an oracle."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import ENCODER, Options, Result, quiet
from tripletune.core.calls import Completion, LLMClient
from tripletune.core.data.questions import Question
from tripletune.core.options import setting
from tripletune.eval import load_task, task_questions, write_context_corpus
from tripletune.eval.metrics import CUTS, recall
from tripletune.eval.rescore import final_ranking
from tripletune.eval.statistics import bootstrap_mean
from tripletune.rag.answering import open_tools
from tripletune.rag.search.retrievers import verbalise, words_in
from tripletune.rag.system_options import SystemOptions
from tripletune.rag.systems import find_system
from tripletune.rag.systems.gear import GearOptions, Scoring
from tripletune.rag.systems.ppr import PprOptions


@dataclass(frozen=True)
class RetrievalOptions(Options):
    """Options of `retrieval`."""

    task: str = setting("musique", "benchmark")
    data: str = setting("", "the benchmark's question file; the contexts of all questions are the corpus")
    triples: str = setting("", "file of the triples of the corpus")
    scoring: Scoring = setting("concat", "NaiveGE compares the query with whole beams, or with each triple (mean)")


class _Reader(LLMClient):
    """An oracle as GEAR's reader, which keeps triples of the supporting passages that it is shown.

    Of each passage it keeps the two triples that share most words with the question. It searches for the names in kept
    triples until it has seen all supporting passages.
    """

    model = "oracle"

    def __init__(self, questions: Sequence[Question]) -> None:
        self.questions = {one.id: one for one in questions}
        self.triples: Any = None

    async def chat(self, messages: Any, *, role: str, question_id: str = "", **options: Any) -> Completion:
        text, question = messages[-1]["content"], self.questions[question_id]
        wanted = set(words_in(question.question))
        known = []
        for passage in (question.passages[index] for index in question.supporting):
            stated = sorted(self.triples.get(passage) or (), key=lambda one: -len(wanted & {*words_in(verbalise(one))}))
            rows = [json.dumps(triple.as_list(), ensure_ascii=False) for triple in stated[:2]]
            known.append((passage.content in text, any(row in text for row in rows), rows))
        if role == "gear.read":
            return Completion("\n".join(row for shown, _, rows in known if shown for row in rows) or "none")
        if role == "gear.reason":
            return Completion(f"Answerable: {'Yes' if all(kept or not rows for _, kept, rows in known) else 'No'}")
        names = (name for _, kept, rows in known if kept for row in rows for name in json.loads(row)[::2])
        return Completion(f"{question.question} {' '.join(dict.fromkeys(names))}" if role == "gear.rewrite" else "")


def retrieval(options: RetrievalOptions) -> Result:
    """Measure the recall of supporting passages at 2, 5, 10 and 15 for BM25, dense and hybrid retrieval.

    Each retriever runs alone, with NaiveGE, with PageRank (from the retriever's passages and the five closest triples),
    and with GEAR, whose reader is an oracle.
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
            " + GEAR": ("gear", GearOptions(scoring=options.scoring)),
        }
        for suffix, (name, loop) in systems.items():
            for retriever in ("bm25", "dense", "hybrid"):
                found = asyncio.run(_rankings(questions, name, loop, retriever, options, folder))
                rows.append({"name": f"{retriever}{suffix}", "questions": len(questions), **_recalls(questions, found)})
    notes = ["Recall in percent: mean over the questions, and its 95 % bootstrap interval."]
    return Result(
        f"recall of supporting passages, {options.task}", " ".join(["name", *(f"R@{cut}" for cut in CUTS)]), rows, notes
    )


async def _rankings(
    questions: list[Question], name: str, loop: Any, retriever: Any, options: RetrievalOptions, folder: Path
) -> list[Sequence[str]]:
    """Return the ids of passages for each question, best first."""
    system = find_system(name)
    loop = loop or system.options(top_k=max(CUTS))
    search = SystemOptions(triples=options.triples, retriever=retriever, encoder=ENCODER)
    reader = _Reader(questions)
    tools = open_tools(search, system, loop, folder / "corpus.jsonl", folder / "index", llm=reader)
    reader.triples = tools.store
    runs = (system.run(one.question, one.question, replace(tools, question_id=one.id), loop) for one in questions)
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
