"""Checks a data set folder: every record well formed, ids unique, no question on two sides of a split."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tripletune.data_builders.datasets.shards import STATISTICS, dataset_files, why_empty
from tripletune.data_builders.text_to_triples.seen import SeenTable
from tripletune.models.data.records import Record, normalize_answer, read_jsonl


class SplitCheck:
    """Looks for questions that stand on two sides of a split; a context manager.

    A question is the same when its id is, or its normalised text. Memory does not grow with the records.

    Attributes:
        found: How many records belong to a question of another split, by what is the same.
    """

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self._seen = SeenTable()
        self._latest = ("", "", "")

    def __enter__(self) -> SplitCheck:
        return self

    def __exit__(self, *exception: object) -> None:
        self._seen.__exit__(None, None, None)

    def add(self, record: Record, split: str) -> Iterator[str]:
        """What is wrong with the split of a record, a line each."""
        # The records of one question mostly come together.
        if (record.question_id, record.question, split) == self._latest:
            return
        clean = True
        for what, value in (
            ("question id", record.question_id),
            ("question text", normalize_answer(record.question)),
        ):
            other = self._seen.first(what, value, split)
            if other not in (None, split):
                self.found[what] += 1
                clean = False
                yield f"{what} {value!r} is in {split!r} and in {other!r}"
        if clean:
            self._latest = (record.question_id, record.question, split)


def troubles(folder: str | Path) -> Iterator[str]:
    """Everything that is wrong with a data set, one line each.

    Looked at: every record by itself; ids that occur twice; question ids and normalised question texts that occur in
    two splits; the number of records against `statistics.json`, where there is one.

    Args:
        folder: A folder of shards `<split>-00000.jsonl` or `.parquet`.

    Raises:
        FileNotFoundError: there is no such folder, or it holds no shards.
    """
    if (empty := why_empty(folder)) is not None:
        yield empty
        return
    counts: dict[str, int] = {}
    with SeenTable() as seen, SplitCheck() as splits:
        for split, files in dataset_files(folder).items():
            counts[split] = 0
            for path in files:
                for where, record in _records(path):
                    counts[split] += 1
                    if isinstance(record, str):
                        yield record
                        continue
                    if seen.first("record id", record.id) is not None:
                        yield f"{where}: record id {record.id!r} occurs a second time"
                    for trouble in splits.add(record, split):
                        yield f"{where}: {trouble}"
    yield from count_troubles(Path(folder) / STATISTICS, counts)


def _records(path: Path) -> Iterator[tuple[str, Record | str]]:
    """Records with their places; in the stead of a bad record, what is wrong with it."""
    try:
        for where, row in shard_rows(path):
            try:
                yield where, Record.from_json(row, where)
            except ValueError as error:
                yield where, str(error)
    except ValueError as error:
        # A file that can't be decoded further; what follows in it can't be looked at.
        yield str(path), str(error)


def shard_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of one shard with their places.

    Raises:
        ValueError: a line is not JSON.
    """
    if path.suffix == ".jsonl":
        yield from read_jsonl(path)
        return
    import pyarrow.parquet as pq

    number = 0
    for batch in pq.ParquetFile(path).iter_batches(batch_size=512):
        for row in batch.to_pylist():
            number += 1
            yield f"{path}:row {number}", row


def count_troubles(path: Path, counts: dict[str, int]) -> Iterator[str]:
    """Splits with another number of rows than `statistics.json` says, a line each; nothing without that file."""
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
