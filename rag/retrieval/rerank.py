"""Ranking of triples by their similarity to a query, with the retriever's own embedder (CIRAG, section 3.3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from tripletune.models.data.triples import Triple
from tripletune.rag.retrieval.retrievers import load_embedder

T = TypeVar("T")
# Texts to vectors of length one, one row per text.
Embed = Callable[[list[str]], np.ndarray]


class Reranker(Protocol):
    """What a loop asks of a reranker."""

    def scores(self, query: str, texts: Sequence[str]) -> Sequence[float]:
        """The similarity of each text to the query; higher is better."""
        ...


class EmbeddingReranker:
    """Cosine similarity of sentence embeddings.

    Passages come back in other rounds and questions, so the vectors of their triples are kept.

    Args:
        embed: Texts to vectors of length one.
        kept: Vectors to keep; the oldest go first.
    """

    def __init__(self, embed: Embed, kept: int = 50_000) -> None:
        self._embed, self._kept = embed, kept
        self._vectors: dict[str, np.ndarray] = {}

    def scores(self, query: str, texts: Sequence[str]) -> list[float]:
        """See `Reranker`; rounded to six decimals, so that equal texts tie on any machine."""
        missing = [text for text in dict.fromkeys(texts) if text not in self._vectors]
        # The query goes with the new texts in one forward pass and is not kept: few queries come twice.
        fresh = self._embed([query, *missing])
        self._vectors.update(zip(missing, fresh[1:]))
        similarities = [float(np.dot(fresh[0], self._vectors[text])) for text in texts]
        for text in list(self._vectors)[: max(0, len(self._vectors) - self._kept)]:
            del self._vectors[text]
        return [round(value, 6) for value in similarities]


def verbalise(triple: Triple) -> str:
    """A triple as the text that is embedded: its fields, separated by spaces."""
    return " ".join(triple.as_list())


def top(items: Sequence[T], scores: Sequence[float], count: int) -> list[T]:
    """The `count` items with the highest scores, best first; equal scores keep their order."""
    order = sorted(range(len(items)), key=lambda i: -scores[i])
    return [items[i] for i in order[:count]]


def open_reranker(retriever: Any, encoder: str | None) -> EmbeddingReranker:
    """A reranker with the retriever's embedder, or with `encoder` where the retriever has none (BM25).

    Args:
        retriever: A retriever; a dense one and a hybrid one lend their encoder.
        encoder: A hub id, a folder or "pypi:package" of a sentence encoder.

    Raises:
        ValueError: there is neither.
    """
    lent: Embed | None = getattr(retriever, "embed", None)
    if lent is None:
        if not encoder:
            raise ValueError(
                "triples are reranked by an embedder, and a BM25 retriever has none: name a sentence encoder "
                "(--encoder), or switch reranking off (--set rerank=no, the ablation 'w/o reranker')"
            )
        lent = load_embedder(encoder)
    return EmbeddingReranker(lent)
