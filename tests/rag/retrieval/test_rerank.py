from __future__ import annotations

import numpy as np
import pytest

from tripletune.models.data.triples import Triple
from tripletune.rag.retrieval.rerank import EmbeddingReranker, open_reranker, top, verbalise


class Letters:
    """Embeds a text as its letter counts, scaled to length one."""

    def __init__(self):
        self.seen = []

    def __call__(self, texts):
        self.seen.append(list(texts))
        rows = np.array([[text.count(letter) + 1e-9 for letter in "abc"] for text in texts])
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def test_scores_are_cosines_and_vectors_are_kept():
    embed = Letters()
    reranker = EmbeddingReranker(embed)
    assert reranker.scores("aa", ["b", "a", "ab", "b"]) == [0.0, 1.0, 0.707107, 0.0]
    reranker.scores("b", ["ab", "c"])
    assert embed.seen == [["aa", "b", "a", "ab"], ["b", "c"]]


def test_the_oldest_vectors_are_forgotten():
    embed = Letters()
    reranker = EmbeddingReranker(embed, kept=1)
    reranker.scores("a", ["a", "b"])
    reranker.scores("a", ["b", "a"])
    assert embed.seen[1] == ["a", "a"]


def test_the_best_come_first_and_equals_keep_their_order():
    assert top(["x", "y", "z"], [1.0, 2.0, 1.0], 2) == ["y", "x"]
    assert top([], [], 3) == []
    assert verbalise(Triple("a", "b", "c")) == "a b c"


def test_the_retriever_lends_its_embedder_and_bm25_has_none():
    class Dense:
        embed = Letters()

    assert open_reranker(Dense(), None).scores("a", ["a"]) == [1.0]
    with pytest.raises(ValueError, match="BM25 retriever has none"):
        open_reranker(object(), None)
