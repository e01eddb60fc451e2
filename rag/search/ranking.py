"""Rankings of rows: the best of many scores, with ties in the order of the rows."""

from __future__ import annotations

import numpy as np

# (row, score) pairs of retrieved rows, best first.
Ranking = list[tuple[int, float]]


def best_rows(scores: np.ndarray, k: int, digits: int | None = None) -> Ranking:
    """The `k` best rows; rows with equal scores keep their order.

    Args:
        scores: One score per row, of shape (rows,).
        digits: Decimals to which the scores are rounded, as doubles; None: all.
    """
    candidates = np.arange(len(scores))
    if len(candidates) > k:
        threshold = np.partition(scores, -k)[-k]
        candidates = np.flatnonzero(scores >= threshold)
    order = candidates[np.argsort(-scores[candidates], kind="stable")][:k]
    best_scores = scores[order].astype(np.float64)
    if digits is not None:
        best_scores = best_scores.round(digits)
    return list(zip(order.tolist(), best_scores.tolist(), strict=True))
