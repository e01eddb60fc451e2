"""Measure indexes of many passages: lists of codes beside an HNSW graph, and BM25 beside bm25s.

Old and new builds run in one process and take turns at each size. CPU seconds count, since other programs may run.
"""

from __future__ import annotations

import gc
import logging
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from benchmarks import Options, Result, Row, reset_peak_bytes, resident_bytes
from tripletune.core.data.words import analyzer, word_rules
from tripletune.core.options import setting
from tripletune.rag.search.bm25_build import build_bm25
from tripletune.rag.search.bm25_index import ScoredTerms
from tripletune.rag.search.near_rows import ListRows, new_graph
from tripletune.rag.search.ranking import Ranking, best_rows

if TYPE_CHECKING:
    import bm25s
    import faiss

_SIZES = ("125000", "250000", "500000", "1000000")
# Vectors that are queries and in no index; the settings were chosen with as many others (`tuning`).
_QUERIES = 500
# Rows that are made or added at once.
_BLOCK = 65536
# Share of a second vector and length of the noise in a made vector.
_SECOND, _NOISE = 0.2, 0.35


@dataclass(frozen=True)
class VectorOptions(Options):
    """Options of `vectors`."""

    vectors: str = setting(
        "", "NumPy file of float16 with embeddings of real texts; the last 1,000 are in no index, 500 of them are asked"
    )
    tuning: bool = setting(False, "ask the last 500, with which number of lists, their share and the code were chosen")
    sizes: tuple[str, ...] = setting(_SIZES, "rows at which both indexes are measured")
    views: tuple[str, ...] = setting(
        ("64", "128", "256"), "values of efSearch of the graph; 256 is that of vectors=hnsw"
    )


# Rows that a search returns, and of which recall says how many score as well as the best ones ("recall_10").
_RECALL_AT = 10
# Searches for one query of shape (1, width), and returns the numbers of the rows that are near.
NearSearch = Callable[[np.ndarray], list[np.ndarray]]


class _MeasuredSearch(NamedTuple):
    """A search of an index, and the figures of the index's build, which begin its row."""

    row: Row
    search: NearSearch


class _Spent(NamedTuple):
    """Seconds of the processor and of the clock."""

    cpu: float
    wall: float


def _seconds_of(work: Callable[[], object]) -> _Spent:
    """Do some work, and return the seconds that it takes."""
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return _Spent(time.process_time() - cpu, time.perf_counter() - wall)


def vectors(options: VectorOptions) -> Result:
    """Compare lists of codes (vectors=ivf) with an HNSW graph: build, size, recall at 10 and time per query.

    Rows beyond the given ones are made of them: 80 % of one, 20 % of another, and noise, scaled to length one. The
    graph grows from size to size, which takes as long as building it at once; lists are built at each size.
    """
    import faiss

    faiss.omp_set_num_threads(1)
    real = np.load(options.vectors)
    sizes = sorted(map(int, options.sizes))
    held_back = real[-2 * _QUERIES :]
    queries = (held_back[_QUERIES:] if options.tuning else held_back[:_QUERIES]).astype(np.float32)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        file = _made_vectors(real[: -2 * _QUERIES], sizes[-1], folder / "vectors.npy", options.seed)
        graph = new_graph(file.shape[1])
        graph_spent = _Spent(0.0, 0.0)
        for size in sizes:
            some = file[:size]

            def grow(some: np.ndarray = some) -> None:
                """Add the rows to the graph that it lacks."""
                for start in range(graph.ntotal, len(some), _BLOCK):
                    graph.add(some[start : start + _BLOCK].astype(np.float32))

            spent = _seconds_of(grow)
            graph_spent = _Spent(graph_spent.cpu + spent.cpu, graph_spent.wall + spent.wall)
            faiss.write_index(graph, str(folder / "graph.faiss"))
            lists_spent = _seconds_of(partial(ListRows, folder / f"{size}/ivf", {}, some))
            lists = ListRows(folder / f"{size}/ivf", {}, some)
            least = _exact_thresholds(some, queries, _RECALL_AT)
            built = {"rows": size, "build_cpu": graph_spent.cpu, "build_wall": graph_spent.wall}
            built["index_bytes"] = (folder / "graph.faiss").stat().st_size
            searches: list[_MeasuredSearch] = []
            for view in map(int, options.views):
                searches.append(_MeasuredSearch({"name": f"hnsw, {view} in view", **built}, _graph_search(graph, view)))
            built = {"rows": size, "build_cpu": lists_spent.cpu, "build_wall": lists_spent.wall}
            built["index_bytes"] = (folder / f"{size}/ivf/lists.faiss").stat().st_size
            searches.append(_MeasuredSearch({"name": "ivf", **built}, partial(lists.near, k=_RECALL_AT)))
            rows += _measure_searches(searches, some, queries, least, options.repeats)
            for row in rows[-len(searches) :]:
                print(row, flush=True)
    columns = "name rows build_cpu build_wall index_bytes recall_10 ms_per_query ms_wall"
    return Result("vectors", columns, rows, ["ms per query of the processor, with the comparison of what is found."])


def _graph_search(graph: faiss.IndexHNSW, view: int) -> NearSearch:
    """A search for the `_RECALL_AT` nearest rows that looks at `view` rows of the graph (efSearch); more find more."""

    def search(query: np.ndarray) -> list[np.ndarray]:
        """Set the graph's view, which all searches of this graph share, and search."""
        graph.hnsw.efSearch = view
        return list(graph.search(query, _RECALL_AT)[1])

    return search


def _measure_searches(
    searches: Sequence[_MeasuredSearch],
    vectors: np.ndarray,
    queries: np.ndarray,
    least: np.ndarray,
    repeats: int,
) -> list[Row]:
    """The rows of a table with recall and time per query; the searches take turns, and the median of passes counts.

    Args:
        vectors: All rows of the indexes, shape (rows, width).
        queries: Shape (queries, width).
        least: The score of each query's tenth nearest row, shape (queries,); a row with such a score is right.
    """
    cpu: list[list[float]] = [[] for _ in searches]
    wall: list[list[float]] = [[] for _ in searches]
    recalls = [0.0] * len(searches)
    for _ in range(repeats + 1):
        for number, (_, search) in enumerate(searches):
            recalled = 0

            def ask(search: NearSearch = search) -> None:
                """Search for all queries, and count the found rows that are among the ten nearest, by their scores."""
                nonlocal recalled
                for query, threshold in zip(queries, least, strict=True):
                    (near_rows,) = search(query[None])
                    scores = vectors[np.sort(near_rows)].astype(np.float32) @ query
                    recalled += min(int((scores >= threshold - 1e-5).sum()), 10)

            spent = _seconds_of(ask)
            cpu[number].append(1000 * spent.cpu / len(queries))
            wall[number].append(1000 * spent.wall / len(queries))
            recalls[number] = recalled / 10 / len(queries)
    rows = []
    for number, (row, _) in enumerate(searches):
        # The first pass warms up.
        times = {"ms_per_query": float(np.median(cpu[number][1:])), "ms_wall": float(np.median(wall[number][1:]))}
        rows.append({**row, "recall_10": recalls[number], **times})
    return rows


def _exact_thresholds(vectors: np.ndarray, queries: np.ndarray, k: int) -> np.ndarray:
    """The score of the k-th best row for each query, of shape (queries,), in one pass over the vectors."""
    best = np.full((len(queries), k), -np.inf, np.float32)
    for start in range(0, len(vectors), _BLOCK // 4):
        scores = queries @ vectors[start : start + _BLOCK // 4].astype(np.float32).T
        best = np.partition(np.concatenate([best, scores], 1), -k, axis=1)[:, -k:]
    return best.min(axis=1)


def _made_vectors(real: np.ndarray, count: int, path: Path, seed: int) -> np.ndarray:
    """Map a file of as many vectors as wanted: the real ones, and others made of two real ones and noise."""
    draw = np.random.default_rng(seed)
    width = real.shape[1]
    file = np.lib.format.open_memmap(path, mode="w+", dtype=np.float16, shape=(count, width))
    file[: len(real)] = real[:count]
    for start in range(len(real), count, _BLOCK):
        size = min(_BLOCK, count - start)
        first, second = draw.integers(len(real), size=(2, size))
        noise = draw.normal(size=(size, width)) * _NOISE / width**0.5
        made = (1 - _SECOND) * real[first].astype(np.float32) + _SECOND * real[second].astype(np.float32) + noise
        file[start : start + size] = made / np.linalg.norm(made, axis=1, keepdims=True)
    file.flush()
    return np.load(path, mmap_mode="r")


@dataclass(frozen=True)
class Bm25Options(Options):
    """Options of `bm25`."""

    texts: str = setting("", "file with a real text per line; passages of about 100 words are made of them")
    sizes: tuple[str, ...] = setting(_SIZES, "passages at which both builds are measured")
    queries: int = setting(40, "queries, each six words of a text", at_least=1)
    copies: int = setting(21, "how often the largest index is repeated for the last row", at_least=1)


def bm25(options: Bm25Options) -> Result:
    """Compare the build of BM25 in parts with bm25s in memory: time, peak of memory, scores, and time per query.

    The last row repeats the rows of the queries' terms of the largest index, with scores that differ by up to a tenth.
    """
    import bm25s

    logging.getLogger("bm25s").setLevel(logging.WARNING)
    texts = Path(options.texts).read_text(encoding="utf-8").splitlines()
    rules = word_rules("english")
    draw = random.Random(options.seed)
    queries = [" ".join(draw.choice(texts).split(": ", 1)[-1].split()[:6]) for _ in range(options.queries)]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        for size in map(int, options.sizes):
            old, new = Path(scratch) / f"{size}-old", Path(scratch) / f"{size}-new"
            new.mkdir()
            build_old = partial(_build_in_memory, texts, size, old)
            build_new = partial(_build_in_parts, texts, size, new)
            old_row = _measure_build(build_old, "bm25s in memory", size)
            new_row = _measure_build(build_new, "in parts", size)
            indexes = [bm25s.BM25.load(folder, mmap=True) for folder in (old, new)]
            names = ("data", "indices", "indptr")
            is_same = True
            for name in names:
                is_same &= np.array_equal(indexes[0].scores[name], indexes[1].scores[name])
            new_row["same"] = is_same and indexes[0].vocab_dict == indexes[1].vocab_dict
            numbers = [index_ids for index_ids in map(indexes[1].get_tokens_ids, map(rules.kept, queries)) if index_ids]
            stored = indexes[1].scores
            scored = ScoredTerms(stored["indptr"], stored["indices"], stored["data"], stored["num_docs"])
            own, all_scores = (
                _ask_all(scored.rank, numbers),
                _ask_all(partial(_rank_by_all_scores, indexes[0]), numbers),
            )
            old_row["ms_per_query"], new_row["ms_per_query"] = all_scores.ms, own.ms
            new_row["differing_rankings"] = sum(a != b for a, b in zip(own.rankings, all_scores.rankings, strict=True))
            rows += [old_row, new_row]
            print(old_row, new_row, sep="\n", flush=True)
        largest = _repeated_index(stored, sorted(set(chain.from_iterable(numbers))), options.copies)
        asked = _ask_all(largest.rank, numbers)
        slowest = max(asked.milliseconds)
        rows.append({"name": f"in parts, repeated {options.copies} times (simulated)", "rows": largest.count})
        rows[-1] |= {"ms_per_query": asked.ms, "slowest_ms": slowest}
    columns = "name rows build_cpu build_wall peak_above_rest_bytes ms_per_query same"
    return Result("bm25", columns, rows)


def _measure_build(work: Callable[[], object], name: str, size: int) -> Row:
    """Build an index, and return its row: seconds, and the peak of memory above that before the build."""
    gc.collect()
    resting = reset_peak_bytes() or 0
    spent = _seconds_of(work)
    peak = (resident_bytes("VmHWM") or 0) - resting
    gc.collect()
    return {"name": name, "rows": size, "build_cpu": spent.cpu, "build_wall": spent.wall, "peak_above_rest_bytes": peak}


def made_passages(texts: Sequence[str], count: int) -> Iterator[str]:
    """Yield made passages of a random title and 100 words of random texts; the same for the same `count`.

    Args:
        texts: Real texts, each perhaps after its title and ": ".
    """
    draw = random.Random(count)
    for _ in range(count):
        title = draw.choice(texts).split(": ", 1)[0]
        words: list[str] = []
        while len(words) < 100:
            words += draw.choice(texts).split()
        yield f"{title}\n{' '.join(words[:100])}"


def _build_in_parts(texts: Sequence[str], size: int, folder: Path) -> None:
    """The build of `rag index`."""
    build_bm25(made_passages(texts, size), word_rules("english"), folder, 1.5, 0.75)


def _build_in_memory(texts: Sequence[str], size: int, folder: Path) -> None:
    """The build before parts: terms as lists in memory, then bm25s."""
    import bm25s

    terms_of = analyzer("english")
    vocabulary: dict[str, int] = {}
    numbers_of_rows = []
    for passage in made_passages(texts, size):
        terms = terms_of(passage)
        title, _, _ = passage.partition("\n")
        present = set(terms)
        terms += [term for term in terms_of(title.partition(" (")[0]) if term not in present]
        numbers_of_rows.append([vocabulary.setdefault(term, len(vocabulary)) for term in terms])
    index = bm25s.BM25(k1=1.5, b=0.75)
    index.index((numbers_of_rows, vocabulary), create_empty_token=False, show_progress=False)
    index.save(folder, allow_pickle=False, show_progress=False)


class _AskedQueries(NamedTuple):
    """Rankings of queries, and milliseconds of each."""

    rankings: list[Ranking]
    milliseconds: list[float]

    @property
    def ms(self) -> float:
        """Mean milliseconds of a query."""
        return float(np.mean(self.milliseconds))


def _ask_all(search: Callable[[list[int], int], Ranking], queries: Sequence[list[int]]) -> _AskedQueries:
    """Search for the 10 best rows of each query, after one pass that warms up."""
    rankings: list[Ranking] = []
    milliseconds: list[float] = []
    for is_measured in (False, True):
        for numbers in queries:
            start = time.process_time()
            ranking = search(numbers, 10)
            if is_measured:
                milliseconds.append(1000 * (time.process_time() - start))
                rankings.append(ranking)
    return _AskedQueries(rankings, milliseconds)


def _rank_by_all_scores(index: bm25s.BM25, numbers: list[int], k: int) -> Ranking:
    """The best rows by the scores of all rows, as bm25s computes them."""
    scores = index.get_scores_from_ids(numbers)
    above = np.flatnonzero(scores > 0)
    return [(int(above[place]), score) for place, score in best_rows(scores[above], k)]


def _repeated_index(stored: Mapping[str, Any], terms: Sequence[int], copies: int) -> ScoredTerms:
    """An index with the rows of some terms, one copy after another, whose scores are a bit lower in each copy.

    Args:
        stored: The arrays of bm25s: rows ("indices") and scores ("data") of each term ("indptr"), and "num_docs".
    """
    count = stored["num_docs"]
    factors = np.random.default_rng(0).uniform(0.9, 1, size=(copies, count)).astype(np.float32)
    lengths = np.zeros(len(stored["indptr"]) - 1, np.int64)
    rows, scores = [], []
    for term in terms:
        start, end = stored["indptr"][term : term + 2].tolist()
        lengths[term] = copies * (end - start)
        own_rows, own_scores = stored["indices"][start:end], stored["data"][start:end]
        for copy in range(copies):
            rows.append(own_rows + np.int32(copy * count))
            scores.append(own_scores * factors[copy, own_rows])
    starts = np.concatenate([[0], np.cumsum(lengths)])
    return ScoredTerms(starts, np.concatenate(rows), np.concatenate(scores), copies * count)
