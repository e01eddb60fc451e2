"""Data sets on disk: what a kind of row has of its own (`kinds.py`), and the numbers that are counted over its rows.

Quantities are histograms of whole numbers, so medians are exact and memory does not grow with the number of rows. The
samples of a label are the rows whose ids have the smallest hashes: no order of reading changes them.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from bisect import bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from operator import itemgetter
from typing import Any, Generic, TypeVar

from tripletune.models.data.pairs import ExtractionPair
from tripletune.models.data.records import Record
from tripletune.models.data.trajectories import Trajectory
from tripletune.models.data.triples import Triple
from tripletune.models.tables import Table

SAMPLES = 5


R = TypeVar("R", bound=Record | ExtractionPair | Trajectory)


class RowKind(ABC, Generic[R]):
    """What one kind of row has of its own.

    Attributes:
        layout: Types of a stored row: "string" or "bool", `[type]` for a list, `{name: type}` for a structure.
        keys: Keys that a stored row of this kind has, and none of another kind.
        hub_task: The hub's name of the task.
        labels: By the word that `peek --label` takes, the label of a sample.
    """

    name: str
    plural: str
    layout: Mapping[str, Any]
    keys: tuple[str, ...]
    hub_task = "text-generation"
    labels: Mapping[str, str] = {}

    @abstractmethod
    def read(self, row: dict[str, Any], where: str) -> R:
        """Read a stored row; `where` opens the message of the `ValueError` for one that is malformed."""

    @abstractmethod
    def label(self, row: R) -> str:
        """The heading under which the card shows the row when it is a sample."""

    @abstractmethod
    def text(self, row: R) -> tuple[str, str]:
        """What a model reads, below an instruction, and what it learns to write."""

    @abstractmethod
    def describe(self, row: R, split: str) -> list[str]:
        """Lines on what the row is, and the instruction that stands above its text."""

    @abstractmethod
    def sides(self, row: R) -> list[tuple[str, str]]:
        """What must not stand in two splits: kinds of values with the row's own."""

    @abstractmethod
    def count(self, row: R, statistics: Statistics[R]) -> None:
        """Count a row, by `Statistics.count` and `Statistics.measure`."""

    @abstractmethod
    def tables(self, numbers: dict[str, Any], facts: Any) -> list[Table]:
        """Tables of the card from `Statistics.to_json` and the `writer.BuildFacts`."""

    def graphs(self, row: R) -> list[Sequence[Triple]]:
        """The triples of each step."""
        return []


def summary(counts: Counter[int]) -> dict[str, float]:
    """Count, min, mean, median and max of whole numbers, from how often each occurs; zeros when there are none."""
    total = counts.total()
    if not total:
        return {"count": 0, "min": 0, "mean": 0.0, "median": 0.0, "max": 0}
    values = sorted(counts)
    ends = list(accumulate(counts[value] for value in values))
    middle = [values[bisect_right(ends, rank)] for rank in ((total - 1) // 2, total // 2)]
    mean = sum(value * count for value, count in counts.items()) / total
    return {"count": total, "min": values[0], "mean": round(mean, 2), "median": sum(middle) / 2, "max": values[-1]}


class SmallestHashes:
    """The few items whose keys have the smallest hashes, in whatever order they come."""

    def __init__(self, count: int = SAMPLES) -> None:
        self._count = count
        self._kept: list[tuple[bytes, Any]] = []

    def add(self, key: str, item: Any) -> None:
        """Keep the item when the hash of its key is small enough."""
        digest = hashlib.blake2b(key.encode(errors="surrogatepass"), digest_size=8).digest()
        insort(self._kept, (digest, item), key=itemgetter(0))
        del self._kept[self._count :]

    def items(self) -> list[Any]:
        """The items that are kept, the smallest hash first."""
        return [item for _, item in self._kept]


class Statistics(Generic[R]):
    """Counts of the rows of a data set, and a few samples of them.

    Args:
        tokenizer: A model spec whose tokenizer counts the tokens; None counts words between white space.

    Attributes:
        unit: What lengths are counted in.
        length: Counts a text.
    """

    def __init__(self, kind: RowKind[R], tokenizer: str | None = None) -> None:
        self.kind = kind
        self.unit = f"tokens of {tokenizer}" if tokenizer else "white-space words, no tokenizer was given"
        self.length = token_counter(tokenizer) if tokenizer else lambda text: len(text.split())
        self.splits: Counter[str] = Counter()
        self._counts: dict[str, dict[str, Counter[str]]] = {}
        self._lengths: dict[str, dict[str, Counter[int]]] = {}
        self._samples: dict[str, SmallestHashes] = defaultdict(SmallestHashes)

    @property
    def records(self) -> int:
        """How many rows were counted."""
        return self.splits.total()

    def add(self, row: R, split: str) -> None:
        """Count one row of a split."""
        self.splits[split] += 1
        self._samples[self.kind.label(row)].add(row.id, row)
        self.kind.count(row, self)

    def count(self, section: str, group: str, what: str, number: int = 1) -> None:
        """Add to a count: `count("sources", "hotpotqa", "answering")`."""
        self._counts.setdefault(section, {}).setdefault(group, Counter())[what] += number

    def measure(self, group: str, what: str, value: int) -> None:
        """Add a value to a distribution: `measure("planning", "input_tokens", 338)`."""
        self._lengths.setdefault(group, {}).setdefault(what, Counter())[value] += 1

    def to_json(self) -> dict[str, Any]:
        """Everything that was counted, as plain numbers, and the samples."""
        # Labels of the kind stand first, in its order.
        labels = sorted(self._samples, key=[*self.kind.labels.values(), *sorted(self._samples)].index)
        return {
            "unit": self.unit,
            "records": self.records,
            "splits": dict(self.splits),
            **{name: {group: dict(counts) for group, counts in one.items()} for name, one in self._counts.items()},
            "lengths": {
                group: {what: summary(counts) for what, counts in one.items()} for group, one in self._lengths.items()
            },
            "samples": {label: [self._sample(row) for row in self._samples[label].items()] for label in labels},
        }

    def _sample(self, row: R) -> dict[str, str]:
        read, learned = self.kind.text(row)
        return {"id": row.id, "input": read, "label": learned}


def length_table(numbers: dict[str, Any]) -> Table:
    """The distributions of everything that was measured."""
    head = ["min", "mean", "median", "max"]
    named = [(name, one) for group in numbers["lengths"].values() for name, one in group.items()]
    rows = [[name, *(f"{one[key]:,}" for key in head)] for name, one in named]
    return Table(["", *head], rows, "Lengths", f"In {numbers['unit']}.")


def listed(counts: Mapping[str, int]) -> str:
    """Counts as "name number, ..."."""
    return ", ".join(f"{name} {count:,}" for name, count in counts.items() if count)


def token_counter(spec: str) -> Callable[[str], int]:
    """Counts the tokens of a text with a model's tokenizer."""
    from tripletune.models.loading import load_tokenizer

    tokenizer = load_tokenizer(spec)
    return lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"])
