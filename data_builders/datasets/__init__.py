"""Data sets on disk: kinds of rows (`kinds.py`), and statistics of rows.

Quantities are histograms of whole numbers, so medians are exact and memory does not grow with the number of rows. The
samples of a label are the rows whose ids have the smallest hashes, so the order of reading does not change them.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeAlias, TypedDict, TypeVar

from tripletune.core.data.triples import Triple
from tripletune.core.rows import Row
from tripletune.core.tables import Table

if TYPE_CHECKING:
    from tripletune.data_builders.datasets.writer import BuildFacts

SAMPLES = 5


class SampleTexts(NamedTuple):
    """The texts of a row that the card shows as a sample, and that `tripletune data peek` prints.

    Attributes:
        model_input: What the model reads, without the instruction.
        label: What the model learns to write.
    """

    model_input: str
    label: str


class SplitValue(NamedTuple):
    """A value of a row that must not occur in two splits.

    Attributes:
        side: The kind of value: "question id", "question text" or "text".
        value: The value; rows of the same kind of value with equal values belong into one split.
    """

    side: str
    value: str


class StoredRow(Protocol):
    """A row of a data set."""

    @property
    def id(self) -> str:
        """A name of the row, unique in the data set."""

    def to_json(self) -> Row:
        """The row as stored: values of JSON in the layout of its kind, which the kind's `read` reads back."""


R = TypeVar("R", bound=StoredRow)
T = TypeVar("T")
# What `Statistics.to_json` returns, which is also stored in `statistics.json`.
Numbers: TypeAlias = dict[str, Any]
# The type of a stored value: "string" or "bool", `[type]` for a list, `{name: type}` for a structure.
Layout = str | list["Layout"] | Mapping[str, "Layout"]


class WrittenKind(Protocol[R]):
    """A kind of row that `DatasetWriter` writes: how it is stored, counted and shown on the card.

    Attributes:
        plural: What the rows are called: "records", "questions".
        layout: Types of a stored row.
        hub_task: The hub's name of the task.
        labels: Labels of samples by the value of `peek --label`.
        sharded: Whether a split is written as numbered shards; otherwise it is the file `<split>.jsonl`.
    """

    plural: str
    layout: Mapping[str, Layout]
    hub_task: str = "text-generation"
    labels: Mapping[str, str] = {}
    sharded: bool = True

    def label(self, row: R) -> str | None:
        """The heading under which the card shows the row as a sample; by default, it shows no samples."""
        return None

    def text(self, row: R) -> SampleTexts:
        """The texts of a sample; by default, as a kind without samples needs them, they are empty."""
        return SampleTexts("", "")

    def count(self, row: R, split: str, statistics: Statistics[R]) -> None:
        """Count a row of a split, by `Statistics.count` and `Statistics.measure`."""

    def tables(self, numbers: Numbers, facts: BuildFacts) -> list[Table]:
        """Tables of the card, from the statistics and the facts of the build."""


class RowKind(WrittenKind[R], Protocol[R]):
    """A kind of row that the inspector also reads (`tripletune data stats`, `validate`, `peek`).

    Attributes:
        name: "record", "pair" or "trajectory".
        keys: Keys that identify a stored row of this kind.
    """

    name: str
    keys: tuple[str, ...]

    def read(self, row: Row, where: str) -> R:
        """Read a stored row; a malformed row raises a `ValueError` whose message starts with `where`."""

    def label(self, row: R) -> str:
        """The heading under which the card shows the row as a sample."""

    def text(self, row: R) -> SampleTexts:
        """The model's input without the instruction, and the row's label."""

    def describe(self, row: R, split: str) -> list[str]:
        """Lines that describe the row, and its instruction."""

    def split_values(self, row: R) -> list[SplitValue]:
        """The row's values that must not occur in two splits."""

    def graphs(self, row: R) -> list[Sequence[Triple]]:
        """The triples of each step of a row; a kind without triples has none."""
        return []


def summary(counts: Counter[int]) -> dict[str, float]:
    """Count, min, mean, median and max of whole numbers from their frequencies; zeros if there are no numbers.

    The numbers may be millions, so they are never listed: the middle ones are found in the sums of the frequencies.
    """
    total = counts.total()
    if not total:
        return {"count": 0, "min": 0, "mean": 0.0, "median": 0.0, "max": 0}
    values = sorted(counts)
    # ends[i]: how many of the numbers are at most values[i].
    ends = list(accumulate(counts[value] for value in values))
    lower_middle = values[bisect_right(ends, (total - 1) // 2)]
    upper_middle = values[bisect_right(ends, total // 2)]
    mean = sum(value * count for value, count in counts.items()) / total
    return {
        "count": total,
        "min": values[0],
        "mean": round(mean, 2),
        "median": (lower_middle + upper_middle) / 2,
        "max": values[-1],
    }


def add_to_sample(kept: list[tuple[bytes, T]], key: str, item: T, count: int = SAMPLES) -> None:
    """Add an item if its key's hash is one of the `count` smallest; the order in which items come does not matter.

    Two builds of the same rows therefore show the same samples, however many workers wrote them.

    Args:
        kept: The items that were kept before, with their hashes, the smallest first; changed in place.
        key: What identifies the item, such as an id.
        item: The item.
        count: Maximum items to keep.
    """
    digest = hashlib.blake2b(key.encode(errors="surrogatepass"), digest_size=8).digest()
    insort(kept, (digest, item), key=itemgetter(0))
    del kept[count:]


class Sample(TypedDict):
    """A row on the card: the model's input without the instruction, and the row's label."""

    id: str
    input: str
    label: str


class Statistics(Generic[R]):
    """Counts the rows of a data set and keeps a few samples.

    Args:
        kind: The kind of the rows.
        tokenizer: Lengths are in tokens of this model's tokenizer; None: in words.

    Attributes:
        unit: The unit of lengths, in words.
        length: Returns the length of a text.
        splits: Number of rows per split.
    """

    def __init__(self, kind: WrittenKind[R], tokenizer: str | None = None) -> None:
        self.kind = kind
        self.length: Callable[[str], int]
        if tokenizer:
            self.unit = f"tokens of {tokenizer}"
            self.length = token_counter(tokenizer)
        else:
            self.unit = "white-space words (no tokenizer was given)"
            self.length = count_words
        self.splits: Counter[str] = Counter()
        # section -> group -> name -> count, and group -> name -> value -> number of rows with this value
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
        label = self.kind.label(row)
        if label is not None:
            add_to_sample(self._samples[label], row.id, row)
        self.kind.count(row, split, self)

    def count(self, section: str, group: str, name: str, number: int = 1) -> None:
        """Add to a count: `count("sources", "hotpotqa", "answering")`; a `number` of 0 makes it appear."""
        self._counts.setdefault(section, {}).setdefault(group, Counter())[name] += number

    def measure(self, group: str, name: str, value: int) -> None:
        """Add a value to a distribution: `measure("planning", "input_tokens", 338)`."""
        self._lengths.setdefault(group, {}).setdefault(name, Counter())[value] += 1

    def to_json(self) -> Numbers:
        """All counts as plain numbers, and the samples.

        Returns:
            `{"unit", "records", "splits": {split: n}, "lengths": {group: {name: summary}}, "samples": {label: [{"id",
            "input", "label"}]}}`, and between them `{section: {group: {name: n}}}` for each section of `count`.
        """
        sections = {}
        for section, groups in self._counts.items():
            sections[section] = {group: dict(counts) for group, counts in groups.items()}
        lengths = {}
        for group, distributions in self._lengths.items():
            lengths[group] = {name: summary(values) for name, values in distributions.items()}
        samples = {}
        for label in self._sample_labels():
            samples[label] = [self._sample_for_card(row) for _, row in self._samples[label]]
        return {
            "unit": self.unit,
            "records": self.records,
            "splits": dict(self.splits),
            **sections,
            "lengths": lengths,
            "samples": samples,
        }

    def _sample_labels(self) -> list[str]:
        """The labels that have samples: first those that the row kind names, in its order, then others by name."""
        named = [label for label in self.kind.labels.values() if label in self._samples]
        return named + sorted(set(self._samples) - set(named))

    def _sample_for_card(self, row: R) -> Sample:
        """A row as the card shows it."""
        texts = self.kind.text(row)
        return {"id": row.id, "input": texts.model_input, "label": texts.label}


def length_table(numbers: Numbers) -> Table:
    """The table of the distributions of all measures, from `Statistics.to_json`."""
    columns = ["min", "mean", "median", "max"]
    rows = []
    for distributions in numbers["lengths"].values():
        for name, values in distributions.items():
            rows.append([name, *(f"{values[column]:,}" for column in columns)])
    return Table(["", *columns], rows, "Lengths", f"In {numbers['unit']}.")


def listed(counts: Mapping[str, int]) -> str:
    """Counts above zero as "name number, name number"."""
    return ", ".join(f"{name} {count:,}" for name, count in counts.items() if count)


def count_words(text: str) -> int:
    """The number of words between white space, the unit of lengths where no tokenizer is given."""
    return len(text.split())


def token_counter(spec: str) -> Callable[[str], int]:
    """Return a function that counts the tokens of a text with a model's tokenizer."""
    from tripletune.models.loading import load_tokenizer

    tokenizer = load_tokenizer(spec)
    return lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"])
