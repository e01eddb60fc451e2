"""Personalised PageRank over the triples of a corpus, in the manner of HippoRAG 2 (Gutierrez et al., 2025).

Nodes are entities and passages. Edges connect the entities of a triple, a passage with the entities of its triples, and
synonyms. Of the triples closest to the question, the model keeps some; a walk starts at their entities and, with a
small weight, at retrieved passages. Where the paper leaves a choice: an entity's weight is the mean weight of its
triples, divided by the number of its passages; a triple's weight is its score divided by the best score (for BM25,
cosines and fused ranks). If the model keeps no triple, the retriever's order is used unchanged, as in the paper.
"""

from __future__ import annotations

import asyncio
import re
import threading
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
from scipy.sparse import coo_array, csr_array

from tripletune.core.calls import UnusableReply
from tripletune.core.data.records import Step, one_line
from tripletune.core.options import setting
from tripletune.llm.question_client import QuestionClient, load_prompts
from tripletune.llm.reply_json import find_json
from tripletune.rag import Trace
from tripletune.rag.chat_generator import READER, Found, answer_from, finish, prompt_files
from tripletune.rag.search.embedding import Embedder
from tripletune.rag.search.retrievers import Retrieved, verbalise
from tripletune.rag.search.text_index import Ranking, shares
from tripletune.rag.search.triple_index import TripleIndex
from tripletune.rag.systems import AnswerOptions, System, Tools, client_of, need

_NAMES = ("ppr_filter", READER)
_BUILDING = threading.Lock()
_COMPARED = 2048


@dataclass(frozen=True, slots=True)
class PprOptions(AnswerOptions):
    """Settings of a run; the defaults are HippoRAG 2's."""

    top_k: int = setting(5, "passages to read", at_least=1)
    triples: int = setting(5, "number of triples closest to the question, where the walk may start", at_least=1)
    filter: bool = setting(True, "let the model drop triples that do not help; no: keep all triples")
    damping: float = setting(0.5, "probability that the walk does not restart", above=0, below=1)
    synonyms: float | None = setting(
        0.8, "minimum cosine (of --encoder) of two names of one thing; none: no synonym edges", above=0
    )
    passage_weight: float = setting(0.05, "weight of retrieved passages as starts of the walk", at_least=0)
    retrieved: int = setting(100, "number of retrieved passages where the walk may start", at_least=1)
    repairs: int = setting(1, "maximum repair turns for an unusable reply", at_least=0)
    prompts: str | None = setting(None, "folder of custom prompts: ppr_filter.md, answer_passages.md")
    max_filter_tokens: int = setting(128, "maximum tokens of the filter's reply", at_least=1)


async def ppr(question: str, search: str, tools: Tools, options: PprOptions) -> Trace:
    """Answer one question from the passages with the highest PageRank; see `System.run`."""
    trace = Trace(question, stop_reason="single_pass")
    index: TripleIndex = need(tools, "triples", "ppr")
    llm = client_of("ppr", tools, trace, load_prompts(_NAMES, options.prompts), options.repairs)
    found, ranking = await PageRank("ppr", tools, options, llm, trace).rank(search, question)
    best = [Retrieved(index.passages[position], score, position) for position, score in ranking[: options.top_k]]
    trace.add_step(Step(search, tuple(index[row] for row, _ in found)), best)
    trace.details["ranking"] = [index.passages[position].id for position, _ in ranking[:100]]
    passages = [hit.passage for hit in best]
    return await finish(trace, options, llm, Found(passages), partial(answer_from, question, passages, llm, options))


class PageRank:
    """A retriever that ranks passages by PageRank; IRCoT uses it for each of its thoughts.

    Calls of the filter have the role `<system>.filter`; the trace counts unreadable replies of the filter.
    """

    def __init__(self, system: str, tools: Tools, options: PprOptions, llm: QuestionClient, trace: Trace) -> None:
        self._system, self._tools, self._options, self._llm, self._trace = system, tools, options, llm, trace
        self._index: TripleIndex = need(tools, "triples", system)

    async def retrieve(self, query: str, k: int) -> list[Retrieved]:
        """The best passages for a query, at most `k`, best first."""
        _, ranking = await self.rank(query, query)
        return [Retrieved(self._index.passages[position], score, position) for position, score in ranking[:k]]

    async def rank(self, search: str, question: str) -> tuple[Ranking, Ranking]:
        """Return the triples that a walk starts from, and the passages, best first; the filter reads the question."""
        options, index = self._options, self._index
        hits: list[Retrieved] = await need(self._tools, "retriever", self._system).retrieve(search, options.retrieved)
        (found,) = await index.search([search], options.triples)
        found = [(row, share) for (row, _), share in zip(found, shares(score for _, score in found))]
        if options.filter and found:
            facts = "\n".join(f"{number}. {verbalise(index[row])}" for number, (row, _) in enumerate(found, 1))
            chat = load_prompts(_NAMES, options.prompts).chat(
                "ppr_filter", f"Facts:\n{facts}\n\nQuestion: {one_line(question)}"
            )
            try:
                kept = await self._llm.ask("filter", chat, partial(_kept, len(found)), options.max_filter_tokens)
                found = [found[number - 1] for number in kept]
            except UnusableReply as error:
                self._trace.tally(f"filter.{error.reason}")
        ranking: Ranking = [(hit.position, hit.score) for hit in hits]
        if found:
            embedder = need(self._tools, "reranker", self._system) if options.synonyms is not None else None
            ranking = await asyncio.to_thread(_walk, index, embedder, found, ranking, options)
        return found, ranking


def _kept(count: int, text: str) -> list[int]:
    """Read the numbers of kept facts, also as strings ("2", "2. Ada ..."); others than 1 to `count` are skipped."""
    rows = find_json(text, list)
    found = (re.match(r"\d+", str(one)) for row in rows for one in (row if isinstance(row, list) else [row]))
    numbers = dict.fromkeys(number for match in found if match and 1 <= (number := int(match[0])) <= count)
    if rows and not numbers:
        raise UnusableReply("no_number", f"Write only a JSON list of numbers of facts, 1 to {count}, or [].")
    return list(numbers)


def _walk(index: TripleIndex, embedder: Embedder | None, found: Ranking, hits: Ranking, options: PprOptions) -> Ranking:
    with _BUILDING:
        adjacency = _graph(index, embedder, options.synonyms)
    entities = int(index.entities.max()) + 1
    seeds = np.zeros(adjacency.shape[0])
    weights: dict[int, list[float]] = {}
    for row, score in found:
        for entity in set(index.entities[:, row].tolist()):
            weights.setdefault(entity, []).append(max(score, 1e-6))
    for entity, scores in weights.items():
        # Specific entities occur in few passages.
        named_in = max(1, int((adjacency[[entity], entities:] > 0).sum()))
        seeds[entity] = float(np.mean(scores)) / named_in
    if hits and options.passage_weight:
        found_by = np.array([score for _, score in hits])
        low, high = found_by.min(), found_by.max()
        shares = (found_by - low) / (high - low) if high > low else np.ones(len(hits))
        seeds[[entities + position for position, _ in hits]] = options.passage_weight * shares
    ranks = personalised_pagerank(adjacency, seeds, options.damping)[entities:].round(12)
    order = np.lexsort((np.arange(len(ranks)), -ranks))
    return [(int(position), float(ranks[position])) for position in order if ranks[position] > 0]


def personalised_pagerank(adjacency: Any, seeds: np.ndarray, damping: float, tolerance: float = 1e-8) -> np.ndarray:
    """Compute personalised PageRank by power iteration, with restarts at the seeds; the scores add up to 1.

    Args:
        adjacency: Weights of edges from row to column, a sparse array of shape (nodes, nodes).
        seeds: Weights of the start nodes, of shape (nodes,); at least one weight is above 0. At a node without edges
            the walk restarts.
        tolerance: Total change of scores below which the iteration ends.
    """
    restart = seeds / seeds.sum()
    degree = np.asarray(adjacency.sum(axis=1)).ravel()
    ends = degree == 0
    shares = np.divide(1.0, degree, out=np.zeros_like(degree, dtype=float), where=~ends)
    backwards = adjacency.T.tocsr()
    scores = restart
    for _ in range(1000):
        before = scores
        scores = damping * (backwards @ (before * shares) + before[ends].sum() * restart) + (1 - damping) * restart
        if np.abs(scores - before).sum() < tolerance:
            break
    return scores


@lru_cache(maxsize=1)
def _graph(index: TripleIndex, embedder: Embedder | None, threshold: float | None) -> csr_array:
    """Adjacency of entities, then passages, in both directions; no entity has an edge to itself."""
    subjects, objects = (column.astype(np.int64) for column in index.entities)
    entities = int(index.entities.max()) + 1
    size = entities + len(index.passages)
    stated = [(row, int(position)) for row in range(len(index)) for position in index.passages_of(row)]
    rows, positions = np.array(stated, dtype=np.int64).T
    both, places = np.concatenate([subjects[rows], objects[rows]]), np.tile(entities + positions, 2)
    named, place = np.divmod(np.unique(both * size + places), size)
    parts = [(subjects, objects, np.ones(len(subjects))), (named, place, np.ones(len(named)))]
    if embedder is not None and threshold is not None:
        parts.append(_synonyms(index, embedder, threshold))
    one, other, weights = (np.concatenate(columns) for columns in zip(*parts))
    apart = one != other
    edges = coo_array((weights[apart], (one[apart], other[apart])), shape=(size, size))
    return (edges + edges.T).tocsr()


def _synonyms(index: TripleIndex, embedder: Embedder, threshold: float) -> tuple[Any, Any, Any]:
    names: dict[int, str] = {}
    for row, triple in enumerate(index):
        for entity, name in zip(index.entities[:, row].tolist(), (triple.subject, triple.object)):
            names.setdefault(entity, name)
    vectors = embedder.encode([names[entity] for entity in range(len(names))])
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True).clip(1e-12)  # an encoder for dot products has none
    found = []
    for start in range(0, len(vectors), _COMPARED):
        cosines = np.triu(vectors[start : start + _COMPARED] @ vectors.T, start + 1)
        one, other = np.nonzero(cosines >= threshold)
        found.append((one + start, other, cosines[one, other]))
    one, other, weights = (np.concatenate(columns) for columns in zip(*found))
    return one, other, weights


SYSTEM = System(
    name="ppr",
    run=ppr,
    needs_triples=lambda options: True,
    needs_reranker=lambda options: options.synonyms is not None,
    searches_triples=lambda options: True,
    searches_both=True,
    options=PprOptions,
    model="llm",
    files=prompt_files(*_NAMES, names=_NAMES),
)
