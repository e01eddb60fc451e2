"""Personalised PageRank over the triples of a corpus, in the manner of HippoRAG 2 (Gutierrez et al., 2025).

Nodes are entities and passages. Edges connect the entities of a triple, a passage with the entities of its triples, and
synonyms. Of the triples closest to the question, the model keeps some; a walk starts at their entities and, with a
small weight, at retrieved passages. Where the paper leaves a choice: an entity's weight is the mean weight of its
triples, divided by the number of its passages; a triple's weight is its score divided by the best score (for BM25,
cosines and fused ranks). If the model keeps no triple, the retriever's order is used unchanged, as in the paper.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
from scipy.sparse import coo_array, csr_array

from tripletune.core.calls import UnusableReply
from tripletune.core.data.records import Step, one_line
from tripletune.core.options import setting
from tripletune.llm.question_client import QuestionClient, load_prompts
from tripletune.llm.reply_json import numbers_in_list
from tripletune.rag import Trace
from tripletune.rag.chat_generator import COMMON_READER, answer_from, finish, prompt_files
from tripletune.rag.evidence import Found
from tripletune.rag.search.embedding import Embedder
from tripletune.rag.search.retrievers import Retrieved, Retriever, hits_of, passages_of_hits, ranking_of, verbalise
from tripletune.rag.search.text_index import Ranking, with_shares
from tripletune.rag.search.triple_index import TripleIndex
from tripletune.rag.systems import AnswerOptions, System, Tools, client_of, need

_NAMES = ("ppr_filter", *COMMON_READER)
# Digests of the prompts, also for a loop that searches by PageRank.
prompt_digests = prompt_files(*_NAMES, names=_NAMES)
# Questions wait for the graph of their corpus, which is built once.
_BUILDING = threading.Lock()
# Rows of names that are compared at once.
_COMPARED = 2048
# Number of best passages that are recorded as the ranking.
_RANKED = 100
# Weight of a triple whose score is 0 or less, so that the walk can still start there.
_LEAST_WEIGHT = 1e-6


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
    index: TripleIndex = need(tools.triples, "triples", "ppr")
    llm = client_of("ppr", tools, trace, load_prompts(_NAMES, options.prompts), options.repairs)
    starts, ranking = await PageRank("ppr", tools, options, llm, trace).rank(search, question)
    hits = hits_of(ranking[: options.top_k], index.passages)
    trace.add_step(Step(search, tuple(index[row] for row, _ in starts)), hits)
    trace.details["ranking"] = [index.passages[position].id for position, _ in ranking[:_RANKED]]
    passages = passages_of_hits(hits)
    return await finish(trace, options, llm, Found([passages]), partial(answer_from, question, passages, llm, options))


class Ranked(NamedTuple):
    """What a walk starts from and what it finds.

    Attributes:
        triples: Rows of the triples at whose entities the walk starts, with their weights; empty if there was no walk.
        passages: Positions of passages with their PageRank, best first, or as the retriever ranks them.
    """

    triples: Ranking
    passages: Ranking


class PageRank:
    """A retriever that ranks passages by PageRank; IRCoT uses it for each of its thoughts.

    Calls of the filter have the role `<system>.filter`; the trace counts unreadable replies of the filter.

    Args:
        system: The system that ranks, for the roles of calls.
        tools: Models and indexes, with the triples of the corpus.
        options: The options of the walk.
        llm: The client of the filter.
        trace: Counts the filter's unreadable replies.
    """

    def __init__(self, system: str, tools: Tools, options: PprOptions, llm: QuestionClient, trace: Trace) -> None:
        self._options = options
        self._llm = llm
        self._trace = trace
        self._index: TripleIndex = need(tools.triples, "triples", system)
        self._retriever: Retriever = need(tools.retriever, "retriever", system)
        self._embedder: Embedder | None = None
        if options.synonyms is not None:
            self._embedder = need(tools.reranker, "reranker", system)

    async def retrieve(self, query: str, k: int) -> list[Retrieved]:
        """The best passages for a query, at most `k`, best first."""
        ranked = await self.rank(query, query)
        return hits_of(ranked.passages[:k], self._index.passages)

    async def rank(self, search: str, question: str) -> Ranked:
        """Rank passages for the query `search`; the filter reads the question.

        Without any triple that the filter keeps, the ranking of the retriever stays as it is.
        """
        options = self._options
        hits = await self._retriever.retrieve(search, options.retrieved)
        passages = ranking_of(hits)
        (triples,) = await self._index.search([search], options.triples)
        triples = with_shares(triples)
        if options.filter and triples:
            triples = await self._filter_triples(triples, question)
        if triples:
            passages = await asyncio.to_thread(_rank_by_walk, self._index, self._embedder, triples, passages, options)
        return Ranked(triples, passages)

    async def _filter_triples(self, triples: Ranking, question: str) -> Ranking:
        """The triples that the model keeps, in its order; all of them if its reply is unreadable."""
        facts = [f"{number}. {verbalise(self._index[row])}" for number, (row, _) in enumerate(triples, 1)]
        user = "\n".join(["Facts:", *facts, "", f"Question: {one_line(question)}"])
        chat = load_prompts(_NAMES, self._options.prompts).chat("ppr_filter", user)
        read = partial(numbers_in_list, len(triples), "facts")
        try:
            numbers = await self._llm.ask("filter", chat, read, self._options.max_filter_tokens)
        except UnusableReply as error:
            self._trace.tally(f"filter.{error.reason}")
            return triples
        return [triples[number - 1] for number in numbers]


def _rank_by_walk(
    index: TripleIndex, embedder: Embedder | None, triples: Ranking, retrieved: Ranking, options: PprOptions
) -> Ranking:
    """The passages that a walk from triples and retrieved passages reaches, best first.

    Nodes are entities, then passages. The walk starts at the entities of the triples, each with its mean score divided
    by the number of passages that name it, and with `passage_weight` at the retrieved passages.

    Args:
        index: The triples of the corpus.
        embedder: Finds synonyms among the entities; None: no synonyms.
        triples: Rows of triples with scores.
        retrieved: Positions of passages with scores.

    Returns:
        Positions of passages with their ranks above 0.
    """
    with _BUILDING:
        adjacency = _adjacency_of_corpus(index, embedder, options.synonyms)
    entities = _entity_count(index)
    seeds = np.zeros(adjacency.shape[0])
    weights: dict[int, list[float]] = {}
    for row, score in triples:
        for entity in set(index.entities[:, row].tolist()):
            weights.setdefault(entity, []).append(max(score, _LEAST_WEIGHT))
    for entity, scores in weights.items():
        # Specific entities occur in few passages.
        named_in = max(1, int((adjacency[[entity], entities:] > 0).sum()))
        seeds[entity] = float(np.mean(scores)) / named_in
    if retrieved and options.passage_weight:
        positions, scores_of_hits = (np.array(column) for column in zip(*retrieved))
        seeds[entities + positions] = options.passage_weight * _scaled_to_one(scores_of_hits)
    # Rounded, so that the order of equal scores does not depend on the order of sums.
    ranks = personalised_pagerank(adjacency, seeds, options.damping)[entities:].round(12)
    best_first = np.lexsort((np.arange(len(ranks)), -ranks))
    return [(int(position), float(ranks[position])) for position in best_first if ranks[position] > 0]


def _scaled_to_one(scores: np.ndarray) -> np.ndarray:
    """Scores (n,) as shares from 0, the lowest, to 1, the highest; 1 for all if they are equal."""
    low, high = scores.min(), scores.max()
    if low == high:
        return np.ones(len(scores))
    return (scores - low) / (high - low)


def personalised_pagerank(
    adjacency: csr_array, seeds: np.ndarray, damping: float, tolerance: float = 1e-8
) -> np.ndarray:
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


class _Edges(NamedTuple):
    """Undirected edges: two nodes each, of shape (edges,), and their weights."""

    first: np.ndarray
    second: np.ndarray
    weights: np.ndarray


def _entity_count(index: TripleIndex) -> int:
    """Number of entities of a corpus; their nodes come first, so it is also the node of the first passage."""
    return int(index.entities.max()) + 1


@lru_cache(maxsize=1)
def _adjacency_of_corpus(index: TripleIndex, embedder: Embedder | None, threshold: float | None) -> csr_array:
    """Adjacency of entities, then passages, in both directions; no entity has an edge to itself.

    Kept for the last corpus, since all questions walk on it; `_rank_by_walk` holds a lock, so it is made once.

    Args:
        threshold: Minimum cosine of synonyms; None: there are no edges between synonyms.
    """
    size = _entity_count(index) + len(index.passages)
    groups = [_edges_of_triples(index), _edges_of_passages(index, size)]
    if embedder is not None and threshold is not None:
        groups.append(_edges_of_synonyms(index, embedder, threshold))
    first, second, weights = _concatenated_edges(groups)
    differ = first != second
    edges = coo_array((weights[differ], (first[differ], second[differ])), shape=(size, size))
    return (edges + edges.T).tocsr()


def _edges_of_triples(index: TripleIndex) -> _Edges:
    """An edge between subject and object of each triple."""
    subjects, objects = index.entities.astype(np.int64)
    return _Edges(subjects, objects, np.ones(len(subjects)))


def _edges_of_passages(index: TripleIndex, size: int) -> _Edges:
    """One edge between a passage and each entity of its triples; the graph has `size` nodes."""
    positions_of_rows = [index.passages_of(row) for row in range(len(index))]
    positions = np.concatenate(positions_of_rows).astype(np.int64)
    rows = np.repeat(np.arange(len(index)), list(map(len, positions_of_rows)))
    subjects, objects = index.entities.astype(np.int64)
    entities = np.concatenate([subjects[rows], objects[rows]])
    passages = np.tile(_entity_count(index) + positions, 2)
    # A pair as one number, since a passage may state several triples of an entity.
    entities, passages = np.divmod(np.unique(entities * size + passages), size)
    return _Edges(entities, passages, np.ones(len(entities)))


def _edges_of_synonyms(index: TripleIndex, embedder: Embedder, threshold: float) -> _Edges:
    """Edges between entities whose names have at least the cosine `threshold`, which is the edge's weight.

    All pairs are compared, in blocks of `_COMPARED` rows: the time grows with the square of the number of entities, the
    memory does not.
    """
    names: dict[int, str] = {}
    for row, triple in enumerate(index):
        subject, object_ = index.entities[:, row].tolist()
        names.setdefault(subject, triple.subject)
        names.setdefault(object_, triple.object)
    vectors = embedder.encode([names[entity] for entity in range(len(names))])
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True).clip(1e-12)  # an encoder for dot products has none
    blocks = []
    for start in range(0, len(vectors), _COMPARED):
        # Above the diagonal, so that each pair is compared once.
        cosines = np.triu(vectors[start : start + _COMPARED] @ vectors.T, start + 1)
        first, second = np.nonzero(cosines >= threshold)
        blocks.append(_Edges(first + start, second, cosines[first, second]))
    return _concatenated_edges(blocks)


def _concatenated_edges(groups: Sequence[_Edges]) -> _Edges:
    """Several lists of edges as one, in their order."""
    return _Edges(*(np.concatenate(columns) for columns in zip(*groups)))


SYSTEM = System(
    name="ppr",
    run=ppr,
    needs_triples=lambda options: True,
    needs_reranker=lambda options: options.synonyms is not None,
    searches_triples=lambda options: True,
    searches_both=True,
    options=PprOptions,
    model="llm",
    files=prompt_digests,
)
