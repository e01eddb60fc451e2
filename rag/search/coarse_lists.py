"""Divide vectors into lists by k-means in two levels, in a time that grows with n log n.

One k-means of all lists compares each sampled row with each list: with sqrt(n) lists that is most of a build's time.
Here, few coarse lists are divided into the wanted number, and two rounds over the whole sample, in which a graph finds
the nearest list, move rows across the borders of the coarse lists.
"""

from __future__ import annotations

from typing import Any

import numpy as np

# Rows of the sample per list, and rounds of each k-means.
_SAMPLED, _ROUNDS, _LAST_ROUNDS = 64, 10, 2
# What finds the nearest list in the last rounds: links per list, and lists in view.
_LINKS, _IN_VIEW = 16, 16
_SEED = 1234


def number_of_lists(rows: int) -> int:
    """Half the square root of the number of rows: neither lists nor rows per list grow fast."""
    return max(1, int(0.5 * rows**0.5))


def train_centroids(vectors: np.ndarray, lists: int) -> tuple[np.ndarray, np.ndarray]:
    """The centres of lists, shape (lists, width), and the rows they were trained on, shape (sampled, width).

    Args:
        vectors: Of shape (rows, width), in a file; only a sample is read.
    """
    import faiss

    draw = np.random.default_rng(_SEED)
    chosen = np.sort(draw.choice(len(vectors), min(len(vectors), _SAMPLED * lists), replace=False))
    sample = vectors[chosen].astype(np.float32)
    coarse = _kmeans(sample, int(lists**0.5))
    of_coarse = coarse.index.search(sample, 1)[1][:, 0]
    centroids = []
    for number, own_lists in enumerate(_shares(np.bincount(of_coarse, minlength=coarse.k), lists)):
        own_rows = sample[of_coarse == number]
        if own_lists:
            centroids.append(_kmeans(own_rows, own_lists).centroids)
    refined = faiss.Clustering(sample.shape[1], lists)
    refined.niter, refined.seed = _LAST_ROUNDS, _SEED
    refined.min_points_per_centroid, refined.max_points_per_centroid = 1, 2 * _SAMPLED
    faiss.copy_array_to_vector(np.concatenate(centroids).ravel(), refined.centroids)
    graph = faiss.IndexHNSWFlat(sample.shape[1], _LINKS)
    graph.hnsw.efSearch = _IN_VIEW
    refined.train(sample, graph)
    return faiss.vector_to_array(refined.centroids).reshape(lists, -1), sample


def _kmeans(rows: np.ndarray, lists: int) -> Any:
    """A k-means of some rows, in which a list may have a single row."""
    import faiss

    limits = {"min_points_per_centroid": 1, "max_points_per_centroid": 256}
    kmeans = faiss.Kmeans(rows.shape[1], lists, niter=_ROUNDS, seed=_SEED, **limits)
    kmeans.train(rows)
    return kmeans


def _shares(rows: np.ndarray, lists: int) -> list[int]:
    """Divide a number of lists in proportion to some numbers of rows, by largest remainders; at most one per row."""
    exact = rows / rows.sum() * lists
    shares = np.floor(exact).astype(int)
    largest_first = np.argsort(shares - exact, kind="stable")
    shares[largest_first[: lists - shares.sum()]] += 1
    return shares.tolist()
