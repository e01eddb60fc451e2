"""Data sets on disk: kinds of rows (`kinds.py`), and statistics of rows.

Quantities are histograms of whole numbers, so medians are exact and memory does not grow with the number of rows. The
samples of a label are the rows whose ids have the smallest hashes, so the order of reading does not change them.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sqlite3
from bisect import bisect_right, insort
from collections import Counter, defaultdict, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate
from operator import itemgetter
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from tripletune.core.data.jsonl import read_jsonl
from tripletune.core.data.pairs import ExtractionPair, Trajectory
from tripletune.core.data.records import Record
from tripletune.core.data.triples import Triple
from tripletune.core.tables import Table

SAMPLES = 5

R = TypeVar("R", bound=Record | ExtractionPair | Trajectory)
Item = TypeVar("Item")
Result = TypeVar("Result")


class RowKind(Protocol[R]):
    """A kind of row.

    Attributes:
        layout: Types of a stored row: "string" or "bool", `[type]` for a list, `{name: type}` for a structure.
        keys: Keys that identify a stored row of this kind.
        hub_task: The hub's name of the task.
        labels: Labels of samples by the value of `peek --label`.
    """

    name: str
    plural: str
    layout: Mapping[str, Any]
    keys: tuple[str, ...]
    hub_task: str = "text-generation"
    labels: Mapping[str, str] = {}

    def read(self, row: dict[str, Any], where: str) -> R:
        """Read a stored row; a malformed row raises a `ValueError` whose message starts with `where`."""

    def label(self, row: R) -> str:
        """The heading under which the card shows the row as a sample."""

    def text(self, row: R) -> tuple[str, str]:
        """The model's input without the instruction, and the row's label."""

    def describe(self, row: R, split: str) -> list[str]:
        """Lines that describe the row, and its instruction."""

    def sides(self, row: R) -> list[tuple[str, str]]:
        """The row's values that must not occur in two splits, as pairs of kind and value."""

    def count(self, row: R, statistics: Statistics[R]) -> None:
        """Count a row, by `Statistics.count` and `Statistics.measure`."""

    def tables(self, numbers: dict[str, Any], facts: Any) -> list[Table]:
        """Tables of the card from `Statistics.to_json` and the `writer.BuildFacts`."""

    def graphs(self, row: R) -> list[Sequence[Triple]]:
        """The triples of each step."""
        return []


def summary(counts: Counter[int]) -> dict[str, float]:
    """Count, min, mean, median and max of whole numbers from their frequencies; zeros if there are no numbers."""
    total = counts.total()
    if not total:
        return {"count": 0, "min": 0, "mean": 0.0, "median": 0.0, "max": 0}
    values = sorted(counts)
    ends = list(accumulate(counts[value] for value in values))
    middle = [values[bisect_right(ends, rank)] for rank in ((total - 1) // 2, total // 2)]
    mean = sum(value * count for value, count in counts.items()) / total
    return {"count": total, "min": values[0], "mean": round(mean, 2), "median": sum(middle) / 2, "max": values[-1]}


def keep_smallest(kept: list[tuple[bytes, Any]], key: str, item: Any, count: int = SAMPLES) -> None:
    """Add an item if its key's hash is one of the `count` smallest; the order in which items come does not matter."""
    digest = hashlib.blake2b(key.encode(errors="surrogatepass"), digest_size=8).digest()
    insort(kept, (digest, item), key=itemgetter(0))
    del kept[count:]


class Statistics(Generic[R]):
    """Counts the rows of a data set and keeps a few samples; lengths are in tokens, or in words without a tokenizer."""

    def __init__(self, kind: RowKind[R], tokenizer: str | None = None) -> None:
        self.kind = kind
        self.unit = f"tokens of {tokenizer}" if tokenizer else "white-space words (no tokenizer was given)"
        self.length = token_counter(tokenizer) if tokenizer else lambda text: len(text.split())
        self.splits: Counter[str] = Counter()
        self._counts: dict[str, dict[str, Counter[str]]] = {}
        self._lengths: dict[str, dict[str, Counter[int]]] = {}
        self._samples: dict[str, list[tuple[bytes, R]]] = defaultdict(list)

    @property
    def records(self) -> int:
        """Number of rows."""
        return self.splits.total()

    def add(self, row: R, split: str) -> None:
        """Count one row of a split."""
        self.splits[split] += 1
        keep_smallest(self._samples[self.kind.label(row)], row.id, row)
        self.kind.count(row, self)

    def count(self, section: str, group: str, what: str, number: int = 1) -> None:
        """Add to a count: `count("sources", "hotpotqa", "answering")`."""
        self._counts.setdefault(section, {}).setdefault(group, Counter())[what] += number

    def measure(self, group: str, what: str, value: int) -> None:
        """Add a value to a distribution: `measure("planning", "input_tokens", 338)`."""
        self._lengths.setdefault(group, {}).setdefault(what, Counter())[value] += 1

    def to_json(self) -> dict[str, Any]:
        """All counts as plain numbers, and the samples."""
        # The labels of the row kind come first, in the order of the kind.
        labels = sorted(self._samples, key=[*self.kind.labels.values(), *sorted(self._samples)].index)
        return {
            "unit": self.unit,
            "records": self.records,
            "splits": dict(self.splits),
            **{name: {group: dict(counts) for group, counts in one.items()} for name, one in self._counts.items()},
            "lengths": {
                group: {what: summary(counts) for what, counts in one.items()} for group, one in self._lengths.items()
            },
            "samples": {label: [self._sample(row) for _, row in self._samples[label]] for label in labels},
        }

    def _sample(self, row: R) -> dict[str, str]:
        read, learned = self.kind.text(row)
        return {"id": row.id, "input": read, "label": learned}


def length_table(numbers: dict[str, Any]) -> Table:
    """The table of the distributions of all measures."""
    head = ["min", "mean", "median", "max"]
    named = [(name, one) for group in numbers["lengths"].values() for name, one in group.items()]
    rows = [[name, *(f"{one[key]:,}" for key in head)] for name, one in named]
    return Table(["", *head], rows, "Lengths", f"In {numbers['unit']}.")


def listed(counts: Mapping[str, int]) -> str:
    """Counts as "name number, ..."."""
    return ", ".join(f"{name} {count:,}" for name, count in counts.items() if count)


def token_counter(spec: str) -> Callable[[str], int]:
    """Return a function that counts the tokens of a text with a model's tokenizer."""
    from tripletune.models.loading import load_tokenizer

    tokenizer = load_tokenizer(spec)
    return lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"])


_CACHE_KIB = 64 * 1024
# Finished results per running item that may wait for a slower item before them. Beyond this, no new item is started.
_WAITING = 4


class SeenTable(AbstractContextManager["SeenTable"]):
    """Remembers the note of the first occurrence of every value, under a 16-byte hash; at most 64 MB are in memory."""

    def __init__(self) -> None:
        # For an empty name SQLite opens a private temporary file, which disappears with the connection.
        self._database = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        for setting in (f"cache_size = -{_CACHE_KIB}", "journal_mode = OFF", "synchronous = OFF"):
            self._database.execute(f"PRAGMA {setting}")
        self._database.execute("CREATE TABLE seen (digest BLOB PRIMARY KEY, note TEXT) WITHOUT ROWID")
        self._database.execute("BEGIN")

    def __exit__(self, *_: object) -> None:
        self._database.close()

    def first(self, kind: str, value: str, note: str = "") -> str | None:
        """The note of the first occurrence of a value, or None if this call adds the value."""
        row = (_digest(kind, value), note)
        added = self._database.execute("INSERT OR IGNORE INTO seen VALUES (?, ?)", row).rowcount
        return None if added else self.get(kind, value)

    def get(self, kind: str, value: str) -> str | None:
        """The note of a value that was added before, else None."""
        row = self._database.execute("SELECT note FROM seen WHERE digest = ?", (_digest(kind, value),)).fetchone()
        return None if row is None else str(row[0])


class JsonlIndex:
    """The rows of a JSON-lines file by their key, kept on disk.

    Args:
        key_of: Returns the key of a row, given "file:line" and the row.

    Attributes:
        repeated_line: Number of the first line that repeats an earlier key; the earlier line is used.
    """

    def __init__(self, path: str | Path, key_of: Callable[[str, dict[str, Any]], str]) -> None:
        self.repeated_line: int | None = None
        self._seen = SeenTable()
        for where, row in read_jsonl(path):
            if self._seen.first("row", key_of(where, row), json.dumps([where, row])) is not None:
                self.repeated_line = self.repeated_line or int(where.rpartition(":")[2])

    def get(self, key: str) -> tuple[str, dict[str, Any]] | None:
        """The row of this key with its "file:line", or None."""
        found = self._seen.get("row", key)
        return None if found is None else tuple(json.loads(found))


def _digest(kind: str, value: str) -> bytes:
    return hashlib.blake2b(f"{kind}\n{value}".encode(errors="surrogatepass"), digest_size=16).digest()


async def in_order(
    items: Iterator[Item], work: Callable[[Item], Awaitable[Result]], concurrency: int
) -> AsyncGenerator[tuple[Item, Result], None]:
    """Run `work` on every item and yield items with results, in the order of the items.

    In the sliding window, a slow item delays the results after it but not the work on them, and a fast reader does not
    run ahead of a slow teacher. An exception of `work` is raised at its item's turn, and no task is left running.
    """
    room = asyncio.Semaphore(concurrency)
    window: deque[tuple[Item, asyncio.Future[Result]]] = deque()
    try:
        for item in items:
            await room.acquire()
            task = asyncio.ensure_future(work(item))
            task.add_done_callback(lambda _: room.release())
            window.append((item, task))
            # Let the event loop run: otherwise, work that never waits would start only when the window is full.
            await asyncio.sleep(0)
            while window and (window[0][1].done() or len(window) > _WAITING * concurrency):
                yield window[0][0], await window[0][1]
                window.popleft()
        while window:
            yield window[0][0], await window[0][1]
            window.popleft()
    finally:
        for _, running in window:
            running.cancel()
        await asyncio.gather(*(running for _, running in window), return_exceptions=True)
