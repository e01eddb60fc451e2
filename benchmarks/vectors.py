"""What a large index of vectors costs: building it, opening it, and a search in it."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from benchmarks import Options, PeakMemory, Result, in_fresh_process, resident
from tripletune.models.options import setting
from tripletune.rag.embedding import Embedder, Kind
from tripletune.rag.text_index import Ranking, VectorIndex, VectorSearch

WIDTH = 384


@dataclass(frozen=True)
class VectorOptions(Options):
    """Options of `vector_index`."""

    rows: int = setting(1_000_000, "rows of the index", at_least=100)
    queries: int = setting(1000, "searches, one after the other", at_least=1)
    k: int = setting(10, "rows that are searched for", at_least=1)
    rate: int = setting(10_000, "texts that the encoder reads a second", at_least=1)
    folder: str | None = setting(None, "folder of the index, which is kept (default: a temporary one)")


def vector_index(options: VectorOptions) -> Result:
    """Build, open and search vectors of an encoder that is imitated at a fixed rate; each in a process of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        place = str(options.folder or scratch)
        built = [in_fresh_process(_build, options, place, search) for search in ("flat", "hnsw")]
        found = [in_fresh_process(_searches, options, place, search) for search in ("flat", "hnsw")]
    exact, graph = (rankings for _, rankings in found)
    recall = statistics.fmean(
        len({row for row, _ in one} & {row for row, _ in other}) / len(one) for one, other in zip(exact, graph)
    )
    rows = [{**made, **row} for made, (row, _) in zip(built, found)]
    rows[0] |= {"recall": 1.0, "of_the_encoders_rate_share": rows[0]["rows_per_second"] / options.rate}
    rows[1]["recall"] = recall
    notes = [
        f"{options.rows:,} vectors of {WIDTH} numbers, of an encoder that reads {options.rate:,} texts a second.",
        "Seconds are those of the build; the graph is built from the vectors.",
        f"Recall: share of the {options.k} nearest rows by exact search, over {options.queries} queries.",
        "Opened: the process's own memory that opening and searching takes; pages of the index files are not in it.",
    ]
    columns = "name seconds rows_per_second peak_bytes opened_bytes ms_median ms_of_processor recall"
    return Result("an index of vectors", columns, rows, notes)


def _encoder(settings: VectorOptions) -> Embedder:
    """Vectors that are normally distributed; the variance of the n-th principal component is 1 / n, like real ones."""
    axes, _ = np.linalg.qr(np.random.default_rng(settings.seed).normal(size=(WIDTH, WIDTH)))
    axes = (axes * np.arange(1, WIDTH + 1)[:, None] ** -0.5).astype(np.float32)

    def encode(texts: list[str], kind: Kind) -> np.ndarray:
        started = time.perf_counter()
        random = np.random.default_rng([settings.seed, kind == "query", crc32(texts[0].encode())])
        vectors: np.ndarray = random.standard_normal((len(texts), WIDTH), dtype=np.float32) @ axes
        if kind == "text":
            time.sleep(max(0.0, len(texts) / settings.rate - (time.perf_counter() - started)))
        return vectors

    return Embedder(f"synthetic {settings.seed}", encode)


def _open(options: VectorOptions, place: str, search: VectorSearch) -> VectorIndex:
    def rows() -> Iterator[str]:
        return map(str, range(options.rows))

    return VectorIndex(Path(place) / "dense", {"rows": options.rows}, rows, options.rows, _encoder(options), search)


def _build(options: VectorOptions, place: str, search: VectorSearch) -> dict[str, Any]:
    started = time.perf_counter()
    with PeakMemory() as memory:
        _open(options, place, search)
    seconds = time.perf_counter() - started
    name = {"flat": "vectors, all compared", "hnsw": "HNSW graph"}[search]
    made = {"name": name, "seconds": seconds, "rows_per_second": options.rows / seconds}
    return made | {"peak_bytes": memory.peak}


def _searches(options: VectorOptions, place: str, search: VectorSearch) -> tuple[dict[str, Any], list[Ranking]]:
    # Imported before memory is read: opening is not to pay for libraries.
    import faiss  # noqa: F401
    import torch

    encoder, before = _encoder(options), resident("RssAnon")
    index, found, taken = _open(options, place, search), list[Ranking](), list[float]()
    cpu: list[float] = []

    async def ask() -> None:
        await index.rank(["0"], options.k)
        cpu.append(time.process_time())
        for number in range(options.queries):
            await encoder.queries([str(number)])
            started = time.perf_counter()
            found.extend(await index.rank([str(number)], options.k))
            taken.append(1000 * (time.perf_counter() - started))
        cpu.append(time.process_time())

    asyncio.run(ask())
    after = resident("RssAnon")
    return {
        "threads": torch.get_num_threads(),
        "opened_bytes": after and before and after - before,
        "file_bytes": sum(path.stat().st_size for path in Path(place).rglob("*") if path.is_file()),
        "resident_file_bytes": resident("RssFile"),
        "ms_median": statistics.median(taken),
        "ms_of_processor": 1000 * (cpu[1] - cpu[0]) / options.queries,
        "ms_99_percent": float(np.percentile(taken, 99)),
    }, found
