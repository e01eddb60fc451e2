"""Measure the recall of retrieval without a language model, and of GEAR with an oracle."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, get_args

from benchmarks import ENCODER, Options, Result, Row, hide_progress_of_libraries
from tripletune.core.calls import Completion, LLMClient, Message, Sampling
from tripletune.core.data.questions import Question
from tripletune.core.data.triples import Triple
from tripletune.core.options import CheckedOptions, setting
from tripletune.eval import load_task, task_questions, write_context_corpus
from tripletune.eval.metrics import CUTS, recall
from tripletune.eval.rescore import final_ranking
from tripletune.eval.statistics import Difference, bootstrap_mean, paired_table
from tripletune.eval.suites import interval_cells
from tripletune.rag.answering import open_tools
from tripletune.rag.results import StoredTrace
from tripletune.rag.search.options import RetrieverKind
from tripletune.rag.search.retrievers import verbalise, words_in
from tripletune.rag.system_options import SystemOptions
from tripletune.rag.systems import LoopOptions, find_system
from tripletune.rag.systems._beams import Scoring
from tripletune.rag.systems.gear import GearOptions
from tripletune.rag.systems.ppr import PprOptions
from tripletune.rag.triple_store import TripleSource


@dataclass(frozen=True)
class RetrievalOptions(Options):
    """Options of `retrieval`."""

    task: str = setting("musique", "benchmark")
    data: str = setting("", "the benchmark's question file; the contexts of all questions are the corpus")
    triples: str = setting("", "file of the triples of the corpus")
    entities: str | None = setting(
        None, "file of `rag entities`: rows that read triples are run with and without one name per entity"
    )
    only: tuple[str, ...] = setting((), "rows to measure, for example 'bm25 + PageRank' (default: all)")
    scoring: Scoring = setting("concat", "NaiveGE compares the query with whole beams, or with each triple (mean)")


@dataclass(frozen=True, slots=True)
class _Support:
    """A supporting passage of the current question, as the oracle sees it.

    Attributes:
        shown: The prompt has the passage.
        kept: The prompt has one of the passage's best triples.
        triples: The passage's two triples that share most words with the question.
    """

    shown: bool
    kept: bool
    triples: list[Triple]


class _OracleReader(LLMClient):
    """An oracle as GEAR's reader, which keeps triples of the supporting passages that it is shown.

    Of each passage it keeps the two triples that share most words with the question. It searches for the names in kept
    triples until it has seen all supporting passages.
    """

    model = "oracle"
    # Set when the system is open, if it reads triples.
    triples: TripleSource

    def __init__(self, questions: Sequence[Question]) -> None:
        self.questions = {question.id: question for question in questions}

    async def chat(
        self, messages: Sequence[Message], *, role: str, sampling: Sampling | None = None, question_id: str = ""
    ) -> Completion:
        """Reply in a role of GEAR as a reader does who knows the supporting passages; see the class."""
        if not role.startswith("gear."):
            return Completion("")  # an answer, which is not scored
        question = self.questions[question_id]
        supports = self._supports_in_prompt(question, messages[-1]["content"])
        if role == "gear.read":
            return Completion(_kept_triples(supports))
        if role == "gear.reason":
            is_answerable = all(support.kept or not support.triples for support in supports)
            return Completion(f"Answerable: {'Yes' if is_answerable else 'No'}")
        if role == "gear.rewrite":
            return Completion(_next_query(question, supports))
        return Completion("")

    def _supports_in_prompt(self, question: Question, prompt: str) -> list[_Support]:
        """What a prompt shows of each supporting passage: its text, or its triples closest to the question."""
        asked = set(words_in(question.question))

        def shared_words(triple: Triple) -> int:
            """How many distinct words a triple has in common with the question."""
            return len(asked & set(words_in(verbalise(triple))))

        supports = []
        for index in question.supporting:
            passage = question.passages[index]
            best = sorted(self.triples.get(passage) or (), key=shared_words, reverse=True)[:2]
            kept = any(_triple_as_shown(triple) in prompt for triple in best)
            supports.append(_Support(passage.content in prompt, kept, best))
        return supports


def _triple_as_shown(triple: Triple) -> str:
    """A triple as GEAR's prompts show it."""
    return json.dumps(triple.as_list(), ensure_ascii=False)


def _kept_triples(supports: Sequence[_Support]) -> str:
    """The triples of the supporting passages that a prompt shows, as lines."""
    rows: list[str] = []
    for support in supports:
        if support.shown:
            rows += [_triple_as_shown(triple) for triple in support.triples]
    return "\n".join(rows) or "none"


def _next_query(question: Question, supports: Sequence[_Support]) -> str:
    """The question with the names in kept triples."""
    names: dict[str, None] = {}
    for support in supports:
        if support.kept:
            for triple in support.triples:
                names |= {triple.subject: None, triple.object: None}
    return f"{question.question} {' '.join(names)}"


def retrieval(options: RetrievalOptions) -> Result:
    """Measure the recall of supporting passages at 2, 5, 10 and 15 for BM25, dense and hybrid retrieval.

    Each retriever runs alone, with NaiveGE, with PageRank (from the retriever's passages and the five closest triples),
    also without edges between synonyms, and with GEAR, whose reader is an oracle.
    """
    hide_progress_of_libraries()
    task = load_task(options.task)
    questions = list(task_questions(task, options.data))
    most = max(CUTS)
    systems = [
        _Ranker("", "standard", LoopOptions(top_k=most)),
        _Ranker(" + NaiveGE", "gear", GearOptions(variant="naive", top_k=most, scoring=options.scoring)),
        _Ranker(" + PageRank", "ppr", PprOptions(top_k=most, filter=False)),
        _Ranker(" + PageRank without synonyms", "ppr", PprOptions(top_k=most, filter=False, synonyms=None)),
        _Ranker(" + GEAR", "gear", GearOptions(scoring=options.scoring)),
    ]
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_context_corpus(task, options.data, folder / "corpus.jsonl")
        for ranker in systems:
            for retriever in get_args(RetrieverKind):
                name = f"{retriever}{ranker.suffix}"
                if options.only and name not in options.only:
                    continue
                search = SystemOptions(triples=options.triples, retriever=retriever, encoder=ENCODER)
                rankings = asyncio.run(_rank_passages(questions, ranker, search, folder))
                rows.append({"name": name, "questions": len(questions), **_recall_figures(questions, rankings)})
                if options.entities and ranker.suffix:
                    named = replace(search, entities=options.entities)
                    others = asyncio.run(_rank_passages(questions, ranker, named, folder))
                    values = _recall_figures(questions, others)
                    gained = _recall_gains(questions, rankings, others)
                    rows.append({"name": f"{name}, one name", "questions": len(questions), **values, **gained})
    return Result(
        f"recall of supporting passages, {options.task}",
        " ".join(["name", *(f"R@{cut}" for cut in CUTS)]),
        rows,
        ["Recall in percent: mean over the questions, and its 95 % bootstrap interval."],
    )


class _Ranker(NamedTuple):
    """A system that ranks passages, with its options, and the suffix of its rows' names."""

    suffix: str
    system: str
    loop: CheckedOptions


async def _rank_passages(
    questions: Sequence[Question], ranker: _Ranker, search: SystemOptions, folder: Path
) -> list[Sequence[str]]:
    """The ids of passages for each question, best first."""
    system = find_system(ranker.system)
    reader = _OracleReader(questions)
    tools = open_tools(search, system, ranker.loop, folder / "corpus.jsonl", folder / "index", llm=reader)
    if tools.store is not None:
        reader.triples = tools.store
    runs = []
    for question in questions:
        own_tools = replace(tools, question_id=question.id)
        runs.append(system.run(question.question, question.question, own_tools, ranker.loop))
    traces = await asyncio.gather(*runs)
    return [final_ranking(StoredTrace.of(trace)) for trace in traces]


def _recall_figures(questions: Sequence[Question], rankings: Sequence[Sequence[str]]) -> Row:
    """For each of `CUTS` the mean recall as a table cell ("R@5") and with its interval ("recall_5")."""
    figures: Row = {}
    for cut in CUTS:
        recalls = []
        for question, ranking in zip(questions, rankings):
            supporting = {question.passages[index].id for index in question.supporting}
            recalls.append(recall(ranking, supporting, cut))
        interval = bootstrap_mean(recalls)
        mean, low_to_high = interval_cells(interval)
        figures[f"R@{cut}"] = f"{mean} ({low_to_high.replace(' to ', '-')})"
        figures[f"recall_{cut}"] = interval
    return figures


def _recall_gains(
    questions: Sequence[Question], before: Sequence[Sequence[str]], after: Sequence[Sequence[str]]
) -> dict[str, Difference]:
    """For each of `CUTS` the gain in recall of the second rankings over the first ("gain_5")."""
    figures = {}
    for cut in CUTS:
        recalls: dict[str, list[float]] = {"before": [], "after": []}
        for question, first, second in zip(questions, before, after):
            supporting = {question.passages[index].id for index in question.supporting}
            recalls["before"].append(recall(first, supporting, cut))
            recalls["after"].append(recall(second, supporting, cut))
        (figures[f"gain_{cut}"],) = paired_table(recalls).values()
    return figures
