"""Passage retrieval, `t_i <- Retrieval(q_i, C, k)` (RAS, eq. 3), and the sentences that triples come from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import nsmallest
from pathlib import Path
from typing import Protocol, TypeVar

from tripletune.core.data.passages import Passage
from tripletune.core.data.triples import Triple
from tripletune.core.data.words import AUTO, detect, fold, words
from tripletune.rag.search.embedding import Embedder
from tripletune.rag.search.index import PassageStore
from tripletune.rag.search.text_index import RetrieverKind, TextIndex, VectorSearch, open_text_index

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Retrieved:
    """One hit: the passage, its score (higher is better) and its position in the corpus."""

    passage: Passage
    score: float
    position: int = -1


class Retriever(Protocol):
    """Interface of retrievers."""

    async def retrieve(self, query: str, k: int) -> list[Retrieved]:
        """The at most `k` best passages for a query, best first."""


@dataclass(frozen=True, slots=True)
class CorpusRetriever:
    """A retriever over one indexed corpus; `comparable`: scores of different queries are comparable, like cosines."""

    passages: PassageStore
    index: TextIndex
    comparable: bool = True

    async def retrieve(self, query: str, k: int) -> list[Retrieved]:
        """The at most `k` best passages for a query, best first."""
        (ranking,) = await self.index.rank([query], k)
        return [Retrieved(self.passages[position], score, position) for position, score in ranking]


def open_retriever(
    kind: RetrieverKind,
    corpus: str | Path,
    index_dir: str | Path,
    embedder: Embedder | None = None,
    search: VectorSearch = "flat",
    language: str = AUTO,
    overwrite: bool = False,
) -> CorpusRetriever:
    """Open the index of a corpus, and build missing or outdated parts.

    The paper uses "bm25" for 2WikiMultiHopQA. The kinds "dense" and "hybrid" (both combined) need the embedder. With
    `overwrite`, an index of another corpus or encoder is replaced.
    """
    passages = PassageStore(corpus, index_dir, overwrite)
    rows = lambda: (passage.content for passage in passages)  # noqa: E731
    how = (embedder, search, passages.language if language == AUTO else language, overwrite)
    index = open_text_index(kind, index_dir, {"corpus_sha256": passages.sha256}, rows, len(passages), *how)
    return CorpusRetriever(passages, index, kind == "dense")


def verbalise(triple: Triple) -> str:
    """A triple as the text that is embedded: its fields, separated by spaces."""
    return " ".join(triple.as_list())


def top(items: Sequence[T], scores: Sequence[float], count: int) -> list[T]:
    """The `count` items with the highest scores, best first; equal scores keep their order."""
    return [items[i] for i in nsmallest(count, range(len(items)), key=lambda i: -scores[i])]


@dataclass(frozen=True, slots=True)
class Fact:
    """A triple with its passage and sentence (the maps M^D and M^S of the paper)."""

    triple: Triple
    passage: Passage
    sentence: str


def provenance(passage: Passage, triples: Iterable[Triple]) -> list[Fact]:
    """The triples of a passage with the sentences they come from."""
    sentences = split_sentences(passage.text)
    return [Fact(triple, passage, sentences[source_sentence(triple, sentences)]) for triple in triples]


@lru_cache(maxsize=8192)
def split_sentences(text: str) -> tuple[str, ...]:
    """Split a text into sentences, by the rules of sentencex for its language; white space is folded."""
    from sentencex import segment

    folded = " ".join(text.encode("utf-8", "replace").decode("utf-8").split())
    sentences = tuple(stripped for part in segment(detect(folded), folded) if (stripped := part.strip()))
    return sentences or (folded,)


def source_sentence(triple: Triple, sentences: Sequence[str]) -> int:
    """The index of the sentence that states a triple."""
    fields = [words_in(field) for field in triple.as_list()]
    weights = (1.0, 1.0, 2.0)

    def score(sentence: str) -> float:
        said = set(words_in(sentence))
        shares = (sum(word in said for word in field) / len(field) if field else 0.0 for field in fields)
        return sum(weight * share for weight, share in zip(weights, shares))

    scores = [score(sentence) for sentence in sentences]
    return scores.index(max(scores))


def words_in(text: str) -> list[str]:
    """Split a text into words; case, accents and Unicode form are normalised."""
    return list(map(fold, words(text)))
