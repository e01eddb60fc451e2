"""Checks a data set folder: every record well formed, ids unique, no question on two sides of a split."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from data_builders.shards import STATISTICS, dataset_files
from models.normalize import normalize_answer
from models.records import Record, read_jsonl


def troubles(folder: str | Path) -> Iterator[str]:
    """Everything that is wrong with a data set, one line each.

    Looked at: every record by itself; ids that occur twice; question ids and normalised question texts that occur in
    two splits; the number of records against `statistics.json`, where there is one.

    Args:
        folder: A folder of shards `<split>-00000.jsonl` or `.parquet`.

    Raises:
        FileNotFoundError: there is no such folder, or it holds no shards.
    """
    records: set[bytes] = set()
    splits_of: dict[bytes, str] = {}
    counts: dict[str, int] = {}
    for split, files in dataset_files(folder).items():
        counts[split] = 0
        for path in files:
            for where, record in _records(path):
                counts[split] += 1
                if isinstance(record, str):
                    yield record
                    continue
                identity = _digest("id", record.id)
                if identity in records:
                    yield f"{where}: record id {record.id!r} occurs a second time"
                records.add(identity)
                for what, value in (
                    ("question id", record.question_id),
                    ("question text", normalize_answer(record.question)),
                ):
                    other = splits_of.setdefault(_digest(what, value), split)
                    if other != split:
                        yield f"{where}: {what} {value!r} is in {split!r} and in {other!r}"
    yield from _count_troubles(Path(folder) / STATISTICS, counts)


def _records(path: Path) -> Iterator[tuple[str, Record | str]]:
    """Records with their places; in the stead of a bad record, what is wrong with it."""
    try:
        for where, row in _rows(path):
            try:
                yield where, Record.from_json(row, where)
            except ValueError as error:
                yield where, str(error)
    except ValueError as error:
        # A file that can't be decoded further; what follows in it can't be looked at.
        yield str(path), str(error)


def _rows(path: Path) -> Iterator[tuple[str, dict[str, object]]]:
    if path.suffix == ".jsonl":
        yield from read_jsonl(path)
        return
    import pyarrow.parquet as pq

    number = 0
    for batch in pq.ParquetFile(path).iter_batches(batch_size=512):
        for row in batch.to_pylist():
            number += 1
            yield f"{path}:row {number}", row


def _count_troubles(path: Path, counts: dict[str, int]) -> Iterator[str]:
    if not path.is_file():
        return
    try:
        expected = json.loads(path.read_text(encoding="utf-8"))["statistics"]["splits"]
    except (ValueError, KeyError, TypeError) as error:
        yield f"{path}: not a statistics file ({error!r})"
        return
    for split in sorted({*counts, *expected}):
        if counts.get(split, 0) != expected.get(split, 0):
            yield f"{path}: split {split!r} has {counts.get(split, 0)} records, the file says {expected.get(split, 0)}"


def _digest(kind: str, value: str) -> bytes:
    return hashlib.blake2b(f"{kind}\n{value}".encode(), digest_size=12).digest()
