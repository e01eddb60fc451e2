"""GEAR's search of chains of triples: a beam search whose beams are kept apart (section 4)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from heapq import nsmallest
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Literal

from tripletune.rag.search.retrievers import (
    verbalise,
    verbalise_all,
    words_in,
)
from tripletune.rag.search.triple_index import TripleIndex

if TYPE_CHECKING:
    from tripletune.rag.systems.gear import GearOptions

Scoring = Literal["concat", "mean"]
Compare = Callable[[str, Sequence[str]], Awaitable[Sequence[float]]]


@dataclass(frozen=True, slots=True)
class Beam:
    """A sequence of triples, each of which shares an entity with the previous triple.

    The score is the sum of the similarities of all prefixes to the query; better siblings reduce it.
    """

    rows: tuple[int, ...]
    score: float


async def diverse_beam_search(
    query: str, seeds: Sequence[int], graph: TripleIndex, similarity: Compare, options: GearOptions
) -> list[Beam]:
    """Expand a sub-graph from initial triples, the seeds (GEAR, algorithm 1, with the settings of appendix C.2).

    Where the paper leaves a choice: at most `neighbours` neighbours are kept, those that share most words with the
    query; if a step has negative scores, which a weight below 1 would raise, all scores are weighted relative to the
    lowest; equal scores keep the order of rows; if no beam has a new neighbour, the beams do not change.
    """
    width = options.width
    gamma = 2 * options.width if options.gamma is None else options.gamma
    compare = partial(_similarities_of_beams, query, graph, similarity, options.scoring)
    starts = [(row,) for row in sorted(set(seeds))]
    beams = _best_beams([Beam(rows, score) for rows, score in zip(starts, await compare(starts))], width)
    for _ in range(options.length - 1):
        # This runs in a thread, because an entity may have tens of thousands of neighbours.
        extensions = await asyncio.to_thread(_extended_rows, query, beams, graph, options.neighbours)
        if not any(extensions):
            break
        scores = iter(await compare(list(chain.from_iterable(extensions))))
        groups: list[list[Beam]] = []
        zero = 0.0
        for beam, longer in zip(beams, extensions):
            groups.append([])
            for rows in longer:
                score = beam.score + next(scores)
                groups[-1].append(Beam(rows, score))
                zero = min(zero, score)
        weighted: list[Beam] = []
        for group in groups:
            weighted += _weighted_by_rank(group, gamma, zero)
        beams = _best_beams(weighted, width)
    return beams


def _weighted_by_rank(group: list[Beam], gamma: float, zero: float) -> list[Beam]:
    """Weight the extensions of one beam: the n-th best, counted from 0, has the weight exp(-min(n, gamma) / gamma).

    Scores are weighted relative to `zero`. With `gamma` 0 they are not weighted.
    """
    ranked = _best_beams(group, len(group))
    if not gamma:
        return ranked
    weighted = []
    for rank, beam in enumerate(ranked):
        weight = math.exp(-min(rank, gamma) / gamma)
        weighted.append(Beam(beam.rows, (beam.score - zero) * weight + zero))
    return weighted


def _best_beams(beams: list[Beam], count: int) -> list[Beam]:
    """The beams with the highest scores, best first; equal scores are ordered by rows, so that runs are alike."""
    return sorted(beams, key=lambda beam: (-beam.score, beam.rows))[:count]


def _extended_rows(query: str, beams: Sequence[Beam], graph: TripleIndex, limit: int) -> list[list[tuple[int, ...]]]:
    """By beam, its rows extended by each of its new neighbours; at most `limit`, which share most words with the query.

    A neighbour of one beam that is in another beam is not new.
    """
    in_beams = set(chain.from_iterable(beam.rows for beam in beams))
    query_words = frozenset(words_in(query))

    @cache  # beams often end at the same entity, so they have the same neighbours
    def rank(row: int) -> tuple[int, int]:
        """The key by which neighbours are ordered: those that share most words with the query, then by row."""
        return -len(query_words & _word_set(verbalise(graph[row]))), row

    extensions = []
    for beam in beams:
        neighbours = [int(row) for row in graph.neighbours(beam.rows[-1]) if row not in in_beams]
        if len(neighbours) > limit:
            neighbours = nsmallest(limit, neighbours, key=rank)
        extensions.append([(*beam.rows, row) for row in neighbours])
    return extensions


@lru_cache(maxsize=1 << 16)
def _word_set(text: str) -> frozenset[str]:
    """The distinct words of a triple's text; triples recur as neighbours in many searches, so they are kept."""
    return frozenset(words_in(text))


async def _similarities_of_beams(
    query: str, graph: TripleIndex, similarity: Compare, scoring: Scoring, beams: Sequence[tuple[int, ...]]
) -> list[float]:
    """The similarity of the query to each beam: to its text, or the mean over its triples.

    Args:
        query: The query.
        graph: The triples of the corpus.
        similarity: Compares a text with others.
        scoring: "concat" compares with the joined texts of a beam, else each triple is compared once for all beams.
        beams: Rows of triples of the graph.

    Returns:
        A similarity per beam, in their order.
    """
    if not beams:
        return []
    if scoring == "concat":
        texts = [". ".join(_texts_of_rows(beam, graph)) for beam in beams]
        return list(await similarity(query, texts))
    rows = sorted(set(chain.from_iterable(beams)))
    score_of = dict(zip(rows, await similarity(query, _texts_of_rows(rows, graph))))
    means = []
    for beam in beams:
        scores = [score_of[row] for row in beam]
        means.append(sum(scores) / len(scores))
    return means


def _texts_of_rows(rows: Iterable[int], graph: TripleIndex) -> list[str]:
    """The texts of triples, by which they are compared with the query."""
    return verbalise_all(graph[row] for row in rows)


def breadth_first(beams: Sequence[Beam]) -> list[int]:
    """The distinct triples of beams: the first triple of every beam, then the second of every beam, and so on."""
    levels = zip_longest(*(beam.rows for beam in beams))
    rows = dict.fromkeys(chain.from_iterable(levels))
    rows.pop(None, None)  # the place of a triple that a shorter beam lacks
    return list(rows)
