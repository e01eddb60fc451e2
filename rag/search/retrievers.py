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
from tripletune.rag.search.options import RetrieverKind, VectorSearch
from tripletune.rag.search.text_index import Ranking, TextIndex, open_text_index

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Retrieved:
    """One hit: the passage, its score (higher is better) and its position in the corpus (-1: not known)."""

    passage: Passage
    score: float
    position: int = -1


class Retriever(Protocol):
    """Interface of retrievers."""

    async def retrieve(self, query: str, k: int) -> list[Retrieved]:
        """The at most `k` best passages for a query, best first."""


@dataclass(frozen=True, slots=True)
class CorpusRetriever:
    """A retriever over one indexed corpus.

    Attributes:
        comparable: Whether scores of different queries are comparable, like cosines.
    """

    passages: PassageStore
    index: TextIndex
    comparable: bool = True

    async def retrieve(self, query: str, k: int) -> list[Retrieved]:
        """The at most `k` best passages for a query, best first."""
        (ranking,) = await self.index.rank([query], k)
        return hits_of(ranking, self.passages)


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

    Args:
        kind: The paper uses "bm25" for 2WikiMultiHopQA. "dense" and "hybrid" (both combined) need the embedder.
        search: How vectors are searched.
        language: Language of BM25's stems and stop words.
        overwrite: Whether an index of another corpus or encoder is replaced.
    """
    passages = PassageStore(corpus, index_dir, overwrite)
    if language == AUTO:
        language = passages.language
    wanted = {"corpus_sha256": passages.sha256}
    index = open_text_index(
        kind, index_dir, wanted, passages.texts, len(passages), embedder, search, language, overwrite
    )
    return CorpusRetriever(passages, index, kind == "dense")


def hits_of(ranking: Ranking, passages: PassageStore) -> list[Retrieved]:
    """The passages of a ranking of positions, with their scores, in its order."""
    return [Retrieved(passages[position], score, position) for position, score in ranking]


def ranking_of(hits: Iterable[Retrieved]) -> Ranking:
    """The positions and scores of hits, in their order: the reverse of `hits_of`."""
    return [(hit.position, hit.score) for hit in hits]


def passages_of_hits(hits: Iterable[Retrieved]) -> list[Passage]:
    """The passages of hits, in their order."""
    return [hit.passage for hit in hits]


def verbalise(triple: Triple) -> str:
    """A triple as the text that is embedded: its fields, separated by spaces."""
    return " ".join(triple.as_list())


def verbalise_all(triples: Iterable[Triple]) -> list[str]:
    """The text of each triple (`verbalise`), in order."""
    return [verbalise(triple) for triple in triples]


def fact_lines(triples: Iterable[Triple]) -> list[str]:
    """Triples as prompts show them as facts, one per line: fields separated by bars."""
    return [" | ".join(triple.as_list()) for triple in triples]


def highest_scored(items: Sequence[T], scores: Sequence[float], count: int) -> list[T]:
    """The `count` items with the highest scores, best first; equal scores keep their order."""
    best = nsmallest(count, range(len(items)), key=lambda position: -scores[position])
    return [items[position] for position in best]


@dataclass(frozen=True, slots=True)
class Fact:
    """A triple with its passage and sentence (the maps M^D and M^S of the paper)."""

    triple: Triple
    passage: Passage
    sentence: str


def provenance(passage: Passage, triples: Iterable[Triple]) -> list[Fact]:
    """The triples of a passage, each with the sentence that states it (`source_sentence`)."""
    sentences = split_sentences(passage.text)
    return [Fact(triple, passage, sentences[source_sentence(triple, sentences)]) for triple in triples]


@lru_cache(maxsize=8192)
def split_sentences(text: str) -> tuple[str, ...]:
    """Split a text into sentences, by the rules of sentencex for its language; white space is folded."""
    from sentencex import segment

    # Unpaired surrogates, which sentencex cannot read, become question marks.
    folded = " ".join(text.encode("utf-8", "replace").decode("utf-8").split())
    stripped = [sentence.strip() for sentence in segment(detect(folded), folded)]
    sentences = tuple(sentence for sentence in stripped if sentence)
    return sentences or (folded,)


def source_sentence(triple: Triple, sentences: Sequence[str]) -> int:
    """The index of the sentence that states a triple: the first of those that share most words with its fields.

    Each field counts by the share of its words in the sentence; the object counts twice, since many sentences of a
    passage name its subject.
    """
    fields = [words_in(field) for field in triple.as_list()]
    weights = (1.0, 1.0, 2.0)
    scores = []
    for sentence in sentences:
        sentence_words = set(words_in(sentence))
        score = 0.0
        for field_words, weight in zip(fields, weights, strict=True):
            if field_words:
                shared = [word for word in field_words if word in sentence_words]
                score += weight * (len(shared) / len(field_words))
        scores.append(score)
    return scores.index(max(scores))


def words_in(text: str) -> list[str]:
    """Split a text into words; case, accents and Unicode form are normalised, so that words can be compared."""
    return [fold(word) for word in words(text)]
