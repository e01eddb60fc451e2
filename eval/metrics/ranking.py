"""Scores of the final ranking of passages, against those that support the question; every such passage counts alike.

Metrics with a `k` are named with it, for each of `CUTS`: `recall@5`. The ranking is `eval/rescore.py:final_ranking`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

CUTS = (2, 5, 10, 15)


def recall(ranking: Sequence[str], supporting: Collection[str], k: int | None = None) -> float:
    """Share of the supporting passages that stand in the first k places of the final ranking."""
    return len(set(supporting).intersection(ranking[:k])) / len(set(supporting))


def precision(ranking: Sequence[str], supporting: Collection[str], k: int) -> float:
    """Share of the first k places of the final ranking that hold a supporting passage; a place may be empty."""
    return len(set(supporting).intersection(ranking[:k])) / k


def ndcg(ranking: Sequence[str], supporting: Collection[str], k: int) -> float:
    """Gain (1 / log2(place + 1)) in the first k places of the final ranking, as a share of the best possible."""
    gains = [1 / math.log2(place + 1) for place in range(1, k + 1)]
    found = sum(gain for gain, passage in zip(gains, ranking) if passage in supporting)
    return found / sum(gains[: len(set(supporting))])


def mrr(ranking: Sequence[str], supporting: Collection[str]) -> float:
    """One over the place of the first supporting passage in the final ranking; 0 where there is none."""
    return next((1 / place for place, passage in enumerate(ranking, 1) if passage in supporting), 0.0)
