"""Divide vectors into lists by k-means in two levels, in a time that grows with n log n.

One k-means of all lists compares each sampled row with each list: with sqrt(n) lists that is most of a build's time.
Here, few coarse lists are divided into the wanted number, and two rounds over the whole sample, in which a graph finds
the nearest list, move rows across the borders of the coarse lists.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

if TYPE_CHECKING:
    import faiss

# Rows of the sample per list, and rounds of each k-means.
_SAMPLED, _ROUNDS, _LAST_ROUNDS = 64, 10, 2
# What finds the nearest list in the last rounds: links per list, and lists in view.
_LINKS, _IN_VIEW = 16, 16
_SEED = 1234


def number_of_lists(rows: int) -> int:
    """Half the square root of the number of rows: neither lists nor rows per list grow fast."""
    return max(1, int(0.5 * rows**0.5))


class TrainedLists(NamedTuple):
    """Lists that were found in a sample of rows.

    Attributes:
        centroids: The centre of each list, of shape (lists, width).
        sample: The rows that they were trained on, of shape (sampled, width).
    """

    centroids: np.ndarray
    sample: np.ndarray


def train_lists(vectors: np.ndarray, lists: int) -> TrainedLists:
    """Find the centres of lists by k-means in two levels; see the module.

    Args:
        vectors: Of shape (rows, width), in a file; only a sample is read.
        lists: Number of lists.
    """
    import faiss

    draw = np.random.default_rng(_SEED)
    chosen = np.sort(draw.choice(len(vectors), min(len(vectors), _SAMPLED * lists), replace=False))
    sample = vectors[chosen].astype(np.float32)
    coarse = _trained_kmeans(sample, int(lists**0.5))
    of_coarse = coarse.index.search(sample, 1)[1][:, 0]
    centroids: list[np.ndarray] = []
    for number, own_lists in enumerate(_divide_in_proportion(np.bincount(of_coarse, minlength=coarse.k), lists)):
        own_rows = sample[of_coarse == number]
        if own_lists:
            fine = _trained_kmeans(own_rows, own_lists)
            centroids.append(cast(np.ndarray, fine.centroids))  # None only before the training
    refined = faiss.Clustering(sample.shape[1], lists)
    refined.niter, refined.seed = _LAST_ROUNDS, _SEED
    refined.min_points_per_centroid, refined.max_points_per_centroid = 1, 2 * _SAMPLED
    faiss.copy_array_to_vector(np.concatenate(centroids).ravel(), refined.centroids)
    graph = faiss.IndexHNSWFlat(sample.shape[1], _LINKS)
    graph.hnsw.efSearch = _IN_VIEW
    refined.train(sample, graph)
    return TrainedLists(faiss.vector_to_array(refined.centroids).reshape(lists, -1), sample)


def _trained_kmeans(rows: np.ndarray, lists: int) -> faiss.Kmeans:
    """A k-means of some rows, of shape (rows, width); a list may have a single row, so faiss need not warn."""
    import faiss

    limits = {"min_points_per_centroid": 1, "max_points_per_centroid": 256}
    kmeans = faiss.Kmeans(rows.shape[1], lists, niter=_ROUNDS, seed=_SEED, **limits)
    kmeans.train(rows)
    return kmeans


def _divide_in_proportion(rows: np.ndarray, lists: int) -> list[int]:
    """Divide a number of lists in proportion to some numbers of rows, by largest remainders; at most one per row.

    Args:
        rows: Rows of each coarse list, of shape (coarse lists,).
        lists: How many lists they get together, at most as many as rows.
    """
    exact = rows / rows.sum() * lists
    shares = np.floor(exact).astype(int)
    largest_first = np.argsort(shares - exact, kind="stable")
    shares[largest_first[: lists - shares.sum()]] += 1
    return shares.tolist()
