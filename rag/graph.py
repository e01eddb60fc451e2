"""Search over the graph of a corpus's triples: diverse beam search (GEAR, algorithm 1) and personalised PageRank."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any, Literal

import numpy as np

from tripletune.rag.retrievers import verbalise, words_in
from tripletune.rag.triple_index import TripleIndex

Scoring = Literal["concat", "mean"]
# The similarity of each text to the query; see `Embedder.scores`.
Compare = Callable[[str, Sequence[str]], Awaitable[Sequence[float]]]


@dataclass(frozen=True, slots=True)
class Beam:
    """A sequence of triples, each of which shares an entity with the one before it.

    Its score is the sum of its prefixes' similarities to the query, made smaller where it had better sisters.
    """

    rows: tuple[int, ...]
    score: float


async def diverse_beam_search(
    query: str,
    seeds: Sequence[int],
    graph: TripleIndex,
    similarity: Compare,
    *,
    width: int = 10,
    length: int = 2,
    neighbours: int = 100,
    gamma: float | None = None,
    scoring: Scoring = "concat",
) -> list[Beam]:
    """Expand a sub-graph from initial triples (GEAR, algorithm 1, with the settings of appendix C.2).

    Where the paper leaves a choice: of more neighbours than `neighbours` those stay that share most words with the
    query; where a step has scores below zero, which a weight below 1 would raise, the lowest is the zero that scores
    are weighted from; equal scores keep the order of rows; when no beam has a new neighbour, the beams stay as they
    are.

    Args:
        query: The query q.
        seeds: The initial triples.
        similarity: The scoring function: the cosine of sentence embeddings in the paper.
        width: Beams that are kept, b.
        length: Triples in a beam, l.
        neighbours: Most triples that a beam is extended by.
        gamma: From this rank on a beam's extensions weigh 1/e; None: twice the width. 0 switches diversity off.
        scoring: "concat" compares the query with the text of the whole beam, as the paper does; "mean" with each triple
            alone, whose vectors come back in other beams and questions, and takes the mean.
    """
    gamma = 2 * width if gamma is None else gamma
    compare = partial(_similarities, query, graph, similarity, scoring)
    starts = [(row,) for row in sorted(set(seeds))]
    beams = _top([Beam(rows, score) for rows, score in zip(starts, await compare(starts))], width)
    for _ in range(length - 1):
        visited = {row for beam in beams for row in beam.rows}
        longer = [
            [(*beam.rows, row) for row in _closest(query, beam.rows[-1], visited, graph, neighbours)] for beam in beams
        ]
        scores = iter(await compare([rows for group in longer for rows in group]))
        groups = [[Beam(rows, beam.score + next(scores)) for rows in group] for beam, group in zip(beams, longer)]
        if not any(groups):
            break
        zero = min(0.0, *(beam.score for group in groups for beam in group))
        beams = _top([weighted for group in groups for weighted in _diverse(group, gamma, zero)], width)
    return beams


def _diverse(group: list[Beam], gamma: float, zero: float) -> list[Beam]:
    """The extensions of one beam: the n-th best weighs exp(-min(n, gamma) / gamma)."""
    ranked = _top(group, len(group))
    if not gamma:
        return ranked
    weights = [math.exp(-min(n, gamma) / gamma) for n in range(len(ranked))]
    return [Beam(beam.rows, (beam.score - zero) * weight + zero) for beam, weight in zip(ranked, weights)]


def _top(beams: list[Beam], count: int) -> list[Beam]:
    return sorted(beams, key=lambda beam: (-beam.score, beam.rows))[:count]


def _closest(query: str, row: int, visited: set[int], graph: TripleIndex, limit: int) -> list[int]:
    rows = [int(other) for other in graph.neighbours(row) if int(other) not in visited]
    if len(rows) <= limit:
        return rows
    words = set(words_in(query))
    return sorted(rows, key=lambda other: (-len(words.intersection(words_in(verbalise(graph[other])))), other))[:limit]


async def _similarities(
    query: str, graph: TripleIndex, similarity: Compare, scoring: Scoring, beams: Sequence[tuple[int, ...]]
) -> list[float]:
    if not beams:
        return []
    if scoring == "concat":
        return list(await similarity(query, [". ".join(verbalise(graph[row]) for row in rows) for rows in beams]))
    rows = sorted({row for beam in beams for row in beam})
    alone = dict(zip(rows, await similarity(query, [verbalise(graph[row]) for row in rows])))
    return [sum(alone[row] for row in beam) / len(beam) for beam in beams]


def breadth_first(beams: Sequence[Beam]) -> list[int]:
    """The triples of beams, each once: the first of every beam, then the second of every beam, and so on."""
    levels = zip_longest(*(beam.rows for beam in beams))
    return list(dict.fromkeys(row for level in levels for row in level if row is not None))


def personalised_pagerank(
    adjacency: Any, seeds: np.ndarray, damping: float = 0.5, tolerance: float = 1e-8, most: int = 1000
) -> np.ndarray:
    """The PageRank of nodes when a walk starts again at the seeds, by power iteration.

    Args:
        adjacency: Weights of edges from row to column, a sparse array of shape (nodes, nodes).
        seeds: Weights of the nodes to start at, of shape (nodes,); at least one is above 0. A walk starts there again
            where a node has no edge, too.
        damping: The probability that the walk does not start again.
        tolerance: Largest change of all scores together that ends the iteration.

    Returns:
        The scores, of shape (nodes,); they add up to 1.
    """
    restart = seeds / seeds.sum()
    degree = np.asarray(adjacency.sum(axis=1)).ravel()
    ends = degree == 0
    shares = np.divide(1.0, degree, out=np.zeros_like(degree, dtype=float), where=~ends)
    backwards = adjacency.T.tocsr()
    scores = restart
    for _ in range(most):
        before = scores
        scores = damping * (backwards @ (before * shares) + before[ends].sum() * restart) + (1 - damping) * restart
        if np.abs(scores - before).sum() < tolerance:
            break
    return scores
