"""Indexes over rows of text, such as passages or triples as sentences.

The kinds are BM25, vectors (exact search, or a search for near rows), and both, fused by reciprocal ranks. An
index is a folder with a manifest (`rag/search/index.py`). Rows with equal scores are ordered by number, so rankings are
deterministic.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tripletune.core.program import progress
from tripletune.rag.search.bm25_index import Bm25Index
from tripletune.rag.search.embedding import Embedder
from tripletune.rag.search.index import ROWS, Manifest, check_same_source, digest_rows, ensure_index, find_earlier_rows
from tripletune.rag.search.options import RetrieverKind, VectorSearch
from tripletune.rag.search.ranking import Ranking, best_rows
from tripletune.rag.search.together import Together

logger = logging.getLogger(__name__)

# A function that yields all rows.
Rows = Callable[[], Iterable[str]]
VECTORS = "vectors.f16"
# In the manifest of an index of imported vectors (`imported_vectors.py`): the digest of their file.
IMPORTED = "vectors_sha256"
# Rows embedded between two writes to disk.
CHUNK = 4096
# Rows ranked at once, and rows that fit the processor's cache.
_COMPARED, _CACHED = 65536, 1024
# Decimals of a similarity, so that equal rows tie.
_DIGITS = 6
# Rows of each ranking that are fused, if a query asks for fewer.
_FUSED = 100


def open_text_index(
    kind: RetrieverKind,
    folder: str | Path,
    wanted: Manifest,
    rows: Rows,
    count: int,
    embedder: Embedder | None = None,
    search: VectorSearch = "flat",
    language: str = "english",
    overwrite: bool = False,
) -> TextIndex:
    """Open the index of some rows, and build missing or outdated parts.

    No work of a millisecond or more runs on the event loop.

    Args:
        folder: Has a sub-folder for BM25 and one for vectors.
        wanted: Identifies the rows in the manifest.
        rows: Yields the rows when an index is built.
        count: Number of rows.
        search: How vectors are searched.
        language: Sets BM25's terms.
        overwrite: Whether vectors of another encoder are replaced.
    """
    if kind == "bm25":
        return Bm25Index(Path(folder) / "bm25", wanted, rows, language)
    if embedder is None:
        raise ValueError(f"retriever {kind!r} needs a sentence encoder: give a hub id, a folder or pypi:<package>")
    dense = VectorIndex(Path(folder) / "dense", wanted, rows, count, embedder, search, overwrite)
    if kind == "dense":
        return dense
    return FusedIndex([Bm25Index(Path(folder) / "bm25", wanted, rows, language), dense])


class VectorIndex:
    """Search by similarity of sentence embeddings; the vectors stay in their file, as float16.

    A killed build is continued. Rows of the folder's old index are not embedded again. For the arguments see
    `open_text_index`.
    """

    def __init__(
        self,
        folder: Path,
        wanted: Manifest,
        rows: Rows,
        count: int,
        embedder: Embedder,
        search: VectorSearch = "flat",
        overwrite: bool = False,
    ) -> None:
        """Open the vectors, and embed the rows whose vectors are missing."""
        # Imported here, so that a search without vectors does not read the code for them.
        from tripletune.rag.search.near_rows import open_near_rows

        width = embedder.width
        encoded_by = manifest_of_encoder(embedder)
        if not overwrite:
            check_same_source(folder, "encoder", embedder.name)

        def build(out: Path) -> dict[str, str]:
            """Embed the rows that an earlier index of this encoder does not have."""
            digests = digest_rows(rows())
            old = find_earlier_rows(folder, digests, encoded_by)
            known = None
            if old.is_dropped.size:  # there is an earlier index of this encoder
                vectors = np.memmap(folder / VECTORS, np.float16, "r").reshape(-1, width)
                known = KnownVectors(old.places, vectors)
            embed_rows(rows(), count, out / VECTORS, embedder, known=known)
            np.save(out / ROWS, digests, allow_pickle=False)
            return {"changes": f"{old.summary}, {(old.places < 0).sum():,} embedded"}

        about = ensure_index(folder, {"kind": "dense", **wanted, **encoded_by}, build)
        # "c" instead of "r", because torch warns about read-only memory.
        self._vectors = np.memmap(folder / VECTORS, dtype=np.float16, mode="c").reshape(-1, width)
        if IMPORTED in about:
            # Other vectors of the same corpus need another graph.
            encoded_by[IMPORTED] = about[IMPORTED]
        self._near_rows = open_near_rows(search, folder, wanted | encoded_by, self._vectors)
        self._embedder = embedder
        self._together = Together(self._rankings_of)

    async def rank(self, queries: Sequence[str], k: int) -> list[Ranking]:
        """The best rows for each query; scores are rounded to six decimals, so that equal rows tie and keep order."""
        vectors = await self._embedder.queries(queries)
        return await self._together([(vector.tobytes(), k) for vector in vectors])

    def _similarities_to(self, vector: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """The similarities of a vector, of shape (width,), to some rows, of shape (rows,).

        Stored vectors are float16 on disk, so they are compared in blocks, which bounds the memory. Scores are rounded,
        so that rows with equal vectors tie on every machine.
        """
        scores = []
        for some_rows in np.split(rows, range(_COMPARED, len(rows), _COMPARED)):
            scores.append(self._vectors[some_rows].astype(np.float32) @ vector)
        return np.concatenate(scores).round(_DIGITS)

    def _rankings_of(self, keys: list[tuple[bytes, int]]) -> list[Ranking]:
        """Rank the rows for some (vector, k), by near rows if there is a search for them.

        Else all queries share one pass over the file.
        """
        vectors = np.stack([np.frombuffer(vector, np.float32) for vector, _ in keys])
        counts = [k for _, k in keys]
        if self._near_rows is None:
            return self._search_all(vectors, counts)
        rankings: list[Ranking] = [[] for _ in keys]
        # What is found for a query must not depend on the `k` of others.
        for k in set(counts):
            places = [place for place, count in enumerate(counts) if count == k]
            rows_of_queries = self._near_rows.near(vectors[places], k)
            for place, rows in zip(places, rows_of_queries, strict=True):
                rankings[place] = self._best_of(vectors[place], np.sort(rows), k)
        return rankings

    def _best_of(self, vector: np.ndarray, rows: np.ndarray, k: int) -> Ranking:
        """The best of some rows, in order; their scores and the order of ties are the same as in an exact search."""
        best = best_rows(self._similarities_to(vector, rows), k, digits=_DIGITS)
        return [(int(rows[place]), score) for place, score in best]

    def _search_all(self, vectors: np.ndarray, counts: list[int]) -> list[Ranking]:
        """Compare vectors, of shape (queries, width), with all rows, in one pass over the file.

        The file is larger than memory may be, so it is read in blocks, and of each block only the best rows are kept.
        Decoding from float16 happens in pieces that stay in the processor's cache.
        """
        import torch

        queries = torch.from_numpy(vectors)
        decoded = torch.empty(_CACHED, queries.shape[1])
        rankings: list[Ranking] = [[] for _ in counts]
        for start in range(0, len(self._vectors), _COMPARED):
            block = torch.from_numpy(self._vectors[start : start + _COMPARED])
            scores = []
            for cached in block.split(_CACHED):
                scores.append(queries @ decoded[: len(cached)].copy_(cached).T)
            scores_of_queries = torch.cat(scores, 1).numpy().round(_DIGITS)
            for ranking, own_scores, k in zip(rankings, scores_of_queries, counts, strict=True):
                best = best_rows(own_scores, k, digits=_DIGITS)
                ranking += [(start + row, score) for row, score in best]
        for ranking, k in zip(rankings, counts, strict=True):
            ranking.sort(key=lambda pair: (-pair[1], pair[0]))
            del ranking[k:]
        return rankings


def manifest_of_encoder(embedder: Embedder) -> Manifest:
    """The entries of a manifest that say which vectors an index holds: those of another encoder are never compared."""
    return {"encoder": embedder.name, "weights": embedder.weights, "width": embedder.width, "dtype": "float16"}


class KeptTexts(VectorIndex):
    """Texts to compare with many queries, like `Embedder.scores`, but with vectors on disk instead of in memory.

    Args:
        folder: Where the vectors are, or are written.
        embedder: Embeds the texts and the queries.
        texts: The texts, in the order of the vectors.
    """

    def __init__(self, folder: Path, embedder: Embedder, texts: Iterable[str]) -> None:
        rows = {text: row for row, text in enumerate(dict.fromkeys(texts))}
        self._rows = rows
        wanted = {"texts": hashlib.sha256(digest_rows(rows).tobytes()).hexdigest()}
        # `overwrite`: vectors of another encoder are computed again, not refused, since no user has asked for them.
        super().__init__(folder, wanted, lambda: rows, len(rows), embedder, overwrite=True)

    async def scores(self, query: str, texts: Sequence[str]) -> list[float]:
        """The similarity of a query to each of the given texts."""
        (vector,) = await self._embedder.queries([query])
        rows = np.array([self._rows[text] for text in texts])
        return (await asyncio.to_thread(self._similarities_to, vector, rows)).tolist()


class FusedIndex:
    """Reciprocal rank fusion (Cormack et al., 2009): a score is the sum of `1 / (constant + rank)` over the indexes."""

    def __init__(self, indexes: Sequence[TextIndex]) -> None:
        self._indexes = indexes

    async def rank(self, queries: Sequence[str], k: int) -> list[Ranking]:
        """The best rows for each query; the first 100 (at least `k`) rows of each index are fused."""
        rankings_of_indexes = await asyncio.gather(*(index.rank(queries, max(k, _FUSED)) for index in self._indexes))
        return [reciprocal_rank_fusion(rankings)[:k] for rankings in zip(*rankings_of_indexes, strict=True)]


TextIndex = Bm25Index | VectorIndex | FusedIndex


def shares_of_best(scores: Iterable[float]) -> list[float]:
    """Divide the scores of a ranking by the best score, to compare them across queries and indexes.

    Scores without a positive one can't be divided, and all count as the best.
    """
    scores = list(scores)
    best = max(scores, default=0.0)
    if best <= 0:
        return [1.0] * len(scores)
    return [max(score, 0.0) / best for score in scores]


def with_shares(ranking: Ranking) -> Ranking:
    """A ranking whose scores are divided by the best one, so that rankings of different queries can be compared."""
    if not ranking:
        return []
    rows, scores = zip(*ranking, strict=True)
    return list(zip(rows, shares_of_best(scores), strict=True))


def reciprocal_rank_fusion(rankings: Sequence[Sequence[tuple[int, float]]], constant: int = 60) -> Ranking:
    """Fuse rankings of `(row, score)` pairs; ranks count from 1 and equal sums are ordered by row."""
    fused: dict[int, float] = {}
    for ranking in rankings:
        for rank, (row, _) in enumerate(ranking, 1):
            fused[row] = fused.get(row, 0.0) + 1.0 / (constant + rank)
    return sorted(fused.items(), key=lambda item: (-item[1], item[0]))


class KnownVectors(NamedTuple):
    """Vectors of an earlier index.

    Attributes:
        places: The position of each row among the vectors, or -1; of shape (rows,).
        vectors: In float16, of shape (earlier rows, width).
    """

    places: np.ndarray
    vectors: np.ndarray


def embed_rows(
    rows: Iterable[str],
    count: int,
    path: Path,
    embedder: Embedder,
    chunk: int = CHUNK,
    known: KnownVectors | None = None,
) -> None:
    """Append the missing vectors of rows to the complete vectors in `path`.

    Vectors are written after each chunk, so that a killed build continues where it stopped; half a vector at the end is
    cut off.

    Args:
        rows: All rows, `count` of them; those whose vectors are in `path` are skipped.
        chunk: Rows embedded between two writes to disk.
        known: Vectors of rows that are not embedded again.
    """
    size = 2 * embedder.width
    done = path.stat().st_size // size if path.exists() else 0
    if known is None:
        known = KnownVectors(np.full(count, -1), np.zeros((1, embedder.width), np.float16))
    missing = (row for row, place in zip(islice(rows, done, None), known.places[done:]) if place < 0)
    fresh = embedder.stream(missing, chunk)
    # Vectors that are embedded, but not written yet.
    ready = np.zeros((0, embedder.width), np.float32)
    bar = progress(name="embedding", unit="row", total=count, initial=done)
    with bar, path.open("r+b" if done else "wb") as file:
        file.truncate(done * size)
        file.seek(0, 2)
        for start in range(done, count, chunk):
            places = known.places[start : start + chunk]
            vectors = known.vectors[places]
            is_new = places < 0
            while len(ready) < is_new.sum():
                ready = np.concatenate([ready, next(fresh)])
            vectors[is_new], ready = np.split(ready, [is_new.sum()])
            file.write(vectors.tobytes())
            file.flush()
            bar.update(len(vectors))
