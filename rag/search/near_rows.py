"""Find rows whose vectors are near a query's: all rows on a GPU, an HNSW graph, or lists of codes.

What is found is compared again with the vectors in their file (`text_index.py`), so scores are those of an
exact search, and only a row that was not found can be missing.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from tripletune.core import libraries
from tripletune.core.files import new_file
from tripletune.core.program import progress
from tripletune.rag.search.coarse_lists import number_of_lists, train_lists
from tripletune.rag.search.index import Manifest, ensure_index, manifest
from tripletune.rag.search.options import VectorSearch

if TYPE_CHECKING:
    import faiss

logger = logging.getLogger(__name__)

# With fewer rows, "ivf" compares all of them, which takes less than 10 milliseconds.
FEWEST_ROWS = 20_000
# HNSW (Malkov and Yashunin, 2018): links per row, and the minimum of efSearch.
_LINKS, _IN_VIEW = 32, 256
# Rows that are linked, coded or compared at once.
_BLOCK = 65536
# Lists in view when a row is coded.
_LISTS_IN_VIEW = 16
# Rows coded between two writes to disk.
_SAVED = 1 << 20
# One of so many lists is read. Questions are farther from the rows than rows are from each other, so a number of lists
# that is chosen with rows as queries is too low (docs/evidence/wikipedia.md).
_READ = 3
# The same for vectors of other lengths, whose lists say less about their products. Tried on a small set alone.
_READ_BY_PRODUCT = 2
# Lists are trained again when the rows have become so many times more.
_GROWTH = 4
# Dimensions that share a code, and bits per code.
_CODED, _BITS = 4, 4
_GRAPH, _LISTS = "graph.faiss", "lists.faiss"
_GPU = "cuda"


class NearRows(Protocol):
    """A search for near rows."""

    def near(self, queries: np.ndarray, k: int) -> list[np.ndarray]:
        """At least `k` rows that may be nearest, if there are as many, for each query of shape (queries, width)."""


def open_near_rows(search: VectorSearch, folder: Path, wanted: Manifest, vectors: np.ndarray) -> NearRows | None:
    """Open the search for near rows beside the folder of the vectors, and build it if it is missing or outdated.

    Args:
        folder: The folder of the vectors' file.
        wanted: Identifies the vectors in the manifest.
        vectors: In float16, of shape (rows, width), in their file.

    Returns:
        None if a query is compared with all vectors in their file.
    """
    if search == "gpu":
        return GpuRows(vectors)
    if search == "hnsw":
        return GraphRows(folder.with_name("hnsw"), wanted, vectors)
    if search == "ivf" and len(vectors) >= FEWEST_ROWS:
        return ListRows(folder.with_name("ivf"), wanted, vectors)
    return None


def rows_to_compare(k: int) -> int:
    """How many rows a search gives to be compared again, since codes are rough: 200 for the best 10."""
    return 4 * k + 160


class GpuRows:
    """All vectors in the memory of a GPU, in float16: 16 GB for 21 million of 384 numbers."""

    def __init__(self, vectors: np.ndarray) -> None:
        import torch

        if _GPU == "cuda" and not torch.cuda.is_available():
            raise ValueError("vectors=gpu needs a GPU that torch can use, and there is none: set vectors=ivf, or flat")
        self._blocks = []
        for start in range(0, len(vectors), _BLOCK):
            self._blocks.append(torch.from_numpy(vectors[start : start + _BLOCK]).to(_GPU))

    def near(self, queries: np.ndarray, k: int) -> list[np.ndarray]:
        """The rows with the highest scores; sums may differ from those of a CPU in the last digits."""
        import torch

        on_gpu = torch.from_numpy(queries).to(_GPU)
        scores, rows = [], []
        for number, block in enumerate(self._blocks):
            best = (on_gpu @ block.float().T).topk(min(rows_to_compare(k), len(block)))
            scores.append(best.values)
            rows.append(best.indices + number * _BLOCK)
        all_scores = torch.cat(scores, 1)
        best = all_scores.topk(min(rows_to_compare(k), all_scores.shape[1]))
        return list(torch.cat(rows, 1).gather(1, best.indices).cpu().numpy())


def new_graph(width: int) -> faiss.IndexHNSWSQ:
    """An HNSW graph without rows; it stores vectors as float16, as the file of vectors does."""
    import faiss

    stored_as: Any = faiss.ScalarQuantizer.QT_fp16
    return faiss.IndexHNSWSQ(width, stored_as, _LINKS, faiss.METRIC_INNER_PRODUCT)


class GraphRows:
    """An HNSW graph, which holds the vectors once more.

    Args:
        folder: Where the graph is, or is built.
        wanted: What the graph must be of.
        vectors: All vectors, (rows, width).
    """

    def __init__(self, folder: Path, wanted: Manifest, vectors: np.ndarray) -> None:
        """Open the graph, and build it if it is missing or outdated."""
        import faiss

        def build(out: Path) -> None:
            """Link all rows, in blocks that fit in memory."""
            graph = new_graph(vectors.shape[1])
            for start in range(0, len(vectors), _BLOCK):
                graph.add(vectors[start : start + _BLOCK].astype(np.float32))
                logger.info("linked %d of %d rows", graph.ntotal, len(vectors))
            faiss.write_index(graph, str(out / _GRAPH))

        ensure_index(folder, {"kind": "hnsw", **wanted, "links": _LINKS}, build)
        graph = faiss.read_index(str(folder / _GRAPH), libraries.take("faiss:IO_FLAG_MMAP_IFC"))
        self._graph = cast("faiss.IndexHNSWSQ", graph)

    def near(self, queries: np.ndarray, k: int) -> list[np.ndarray]:
        """The rows that the graph finds, nearest first; fewer than `k` if it has no more."""
        self._graph.hnsw.efSearch = max(2 * k, _IN_VIEW)
        _, rows_of_queries = self._graph.search(queries, k)
        # -1 fills up a list of fewer than k rows.
        return [rows[rows >= 0] for rows in rows_of_queries]


class ListRows:
    """Lists of codes of one bit per dimension, of which a query reads the nearest lists (Jégou et al., 2011).

    A code is a product quantiser's: four bits for four dimensions, compared in the processor's registers (André et al.,
    2017). Codes of RaBitQ find half a percent more, but a query takes 1.4 times as long.

    Rows that are added later are coded alone. A killed build continues at the last million rows.

    Args:
        folder: Where the lists are, or are built.
        wanted: What the lists must be of.
        vectors: All vectors, (rows, width).
    """

    def __init__(self, folder: Path, wanted: Manifest, vectors: np.ndarray) -> None:
        """Open the lists, and build or extend them if they are missing or outdated."""
        import faiss

        def build(out: Path) -> Manifest:
            """Code all rows that are not coded yet, into a folder that replaces the index."""
            index = _index_to_extend(out, folder, vectors)
            first = index.ntotal
            _add_rows(index, vectors, out / _LISTS)
            changes = f"{len(vectors) - first:,} rows coded"
            return {
                "rows": len(vectors),
                "lists": index.nlist,
                "vectors": _digest_of_vectors(vectors),
                "changes": changes,
            }

        ensure_index(folder, {"kind": "ivf", **wanted, "codes": "pq4"}, build)
        index = faiss.read_index(str(folder / _LISTS), libraries.take("faiss:IO_FLAG_MMAP_IFC"))
        self._index = cast("faiss.IndexIVFPQFastScan", index)
        read = _READ if self._index.metric_type == faiss.METRIC_L2 else _READ_BY_PRODUCT
        self._index.nprobe = max(1, self._index.nlist // read)
        _graph_of_lists(self._index).hnsw.efSearch = self._index.nprobe

    def near(self, queries: np.ndarray, k: int) -> list[np.ndarray]:
        """The rows whose codes are nearest in the nearest lists."""
        _, rows_of_queries = self._index.search(queries, rows_to_compare(k))
        return [rows[rows >= 0] for rows in rows_of_queries]


def _index_to_extend(out: Path, folder: Path, vectors: np.ndarray) -> faiss.IndexIVFPQFastScan:
    """The index to which rows are added: of a killed build, an earlier one of the first rows, or one without rows.

    An earlier index is taken only if its vectors are the first ones of these, and if its lists are not far too few for
    the rows now.

    Args:
        out: Folder of the new index, which a killed build may have begun.
        folder: Folder of the earlier index.
        vectors: All vectors, (rows, width).
    """
    import faiss

    if (out / _LISTS).is_file():
        return cast("faiss.IndexIVFPQFastScan", faiss.read_index(str(out / _LISTS)))
    about = manifest(folder).get("about", {})
    rows = about.get("rows", 0)
    lists = number_of_lists(len(vectors))
    # The number of lists grows with the root of the rows.
    is_large_enough = rows and about["lists"] ** 2 * _GROWTH >= lists**2
    if is_large_enough and rows <= len(vectors) and about["vectors"] == _digest_of_vectors(vectors[:rows]):
        return cast("faiss.IndexIVFPQFastScan", faiss.read_index(str(folder / _LISTS)))
    return _index_with_lists(vectors, lists)


def _index_with_lists(vectors: np.ndarray, lists: int) -> faiss.IndexIVFPQFastScan:
    """An index with lists and without rows, trained on a sample of the vectors, of shape (rows, width).

    The nearest lists are found by a graph of their centroids (HNSW), so that a row costs the logarithm of their number.
    Rows are coded by products (PQ) for faiss's FastScan.
    """
    import faiss

    centroids, sample = train_lists(vectors, lists)
    is_of_length_one = np.allclose(np.linalg.norm(sample, axis=1), 1, atol=0.01)
    # The order of vectors of length one is the same for both, and distances suit lists and codes better.
    metric = faiss.METRIC_L2 if is_of_length_one else faiss.METRIC_INNER_PRODUCT
    quantizer = faiss.IndexHNSWFlat(vectors.shape[1], _LINKS, metric)
    quantizer.add(centroids)
    width = vectors.shape[1]
    # Each code stands for as many numbers of a vector, so they must divide the width: the fewest from `_CODED` on.
    dimensions = next(size for size in range(min(_CODED, width), width + 1) if width % size == 0)
    index = faiss.IndexIVFPQFastScan(quantizer, width, len(centroids), width // dimensions, _BITS, metric)
    # Codes of the vectors themselves: those of differences from the centroids take many times longer.
    index.by_residual = False
    # faiss keeps a bare pointer to the quantizer. Now the index frees it, and Python's object, which ends with this
    # function, does not.
    index.own_fields = True
    quantizer.this.disown()  # type: ignore[attr-defined]
    index.train(sample)
    return index


def _add_rows(index: faiss.IndexIVFPQFastScan, vectors: np.ndarray, path: Path) -> None:
    """Code the rows that the index lacks, and write it; a killed build loses at most `_SAVED` rows."""
    import faiss

    def save() -> None:
        """Replace the file by the index so far; a kill in the middle leaves the file before."""
        with new_file(path) as scratch:
            faiss.write_index(index, str(scratch))

    _graph_of_lists(index).hnsw.efSearch = _LISTS_IN_VIEW
    with progress(name="coding", unit="row", total=len(vectors), initial=index.ntotal) as bar:
        while index.ntotal < len(vectors):
            start = index.ntotal
            # Blocks begin at multiples of their size, so that a write follows every `_SAVED` rows.
            end = min(start - start % _BLOCK + _BLOCK, len(vectors))
            index.add(vectors[start:end].astype(np.float32))
            bar.update(end - start)
            if end % _SAVED == 0 and end < len(vectors):
                save()
    save()


def _graph_of_lists(index: faiss.IndexIVFPQFastScan) -> faiss.IndexHNSWFlat:
    """The graph of the lists' centroids, as the class that it has; faiss hands out its base class."""
    import faiss

    return cast("faiss.IndexHNSWFlat", faiss.downcast_index(index.quantizer))


def _digest_of_vectors(vectors: np.ndarray) -> str:
    """A digest of vectors, read in blocks; it tells whether an index is of these vectors."""
    digest = hashlib.sha256()
    for start in range(0, len(vectors), _BLOCK):
        digest.update(vectors[start : start + _BLOCK].tobytes())
    return digest.hexdigest()
