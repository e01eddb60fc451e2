"""Kinds of evaluations: what is asked, how a reply is scored, and what is said of all scores.

A kind of evaluation is a `Suite`: one file in this folder, found by its name. `eval/running.py` runs suites, alike for
all. Rows and figures are types, written to `results.jsonl` and `metrics.json`.
"""

from __future__ import annotations

import argparse
import dataclasses
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, Protocol, Self, TypeVar

from tripletune.core.command_line import CommandParser, add_arguments, from_arguments
from tripletune.core.options import setting
from tripletune.core.tables import Table
from tripletune.rag.system_options import LimitOptions

if TYPE_CHECKING:
    from rich.console import Console

    from tripletune.core.calls import Endpoint
    from tripletune.eval.result_log import ResultLog
    from tripletune.eval.results import RunMetrics
    from tripletune.models.run_folders import Training
    from tripletune.rag import Trace
    from tripletune.rag.results import ResultRow

# A question's id, and a score that counts for this question.
QuestionScore = tuple[str, float]


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an item has no reply.

    Attributes:
        error: The exception, as text.
        seconds: How long it took to fail.
        trace: What a question answering system had done until then.
    """

    error: str
    seconds: float
    trace: Trace | None = None


@dataclass(kw_only=True)
class SuiteOptions(LimitOptions):
    """Options of every evaluation."""

    data: str = setting(dataclasses.MISSING, "folder or file of the data")
    output: str = setting(dataclasses.MISSING, "folder of the results; the same command continues a stopped run")
    overwrite: bool = setting(False, "replace an earlier run in --output, or an index of other data")


@dataclass(slots=True, kw_only=True)
class SuiteRow:
    """Base of the rows of an evaluation: the fields of a subclass are the keys of a line of `results.jsonl`.

    Every row has the fields `id` and `error`, which is "" if the item has a reply.
    """

    def to_json(self) -> dict[str, Any]:
        """The line as JSON values; fields that are None are left out, and `from_json` gives them back."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read a line; keys that only older versions wrote are left out."""
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: values[name] for name in names if name in values})


@dataclass(slots=True, kw_only=True)
class SuiteMetrics:
    """Base of the figures of an evaluation: the fields of a subclass are the keys of `metrics.json`.

    Attributes:
        failed: Number of failed items; `run_suites` sets it, and adds it to `metrics.json`.
    """

    failed: int = 0

    def to_json(self) -> dict[str, Any]:
        """The figures as JSON values, without `failed`."""
        values = asdict(self)
        del values["failed"]
        return values


class Item(Protocol):
    """What an evaluation asks about: a question, a record, a text; its id names its row."""

    @property
    def id(self) -> str:
        """The id, distinct among the items."""


OptionsT = TypeVar("OptionsT", bound=SuiteOptions)
ItemT = TypeVar("ItemT", bound=Item)
ReplyT = TypeVar("ReplyT")
MetricsT = TypeVar("MetricsT", bound="SuiteMetrics | RunMetrics")


class Suite(ABC, Generic[OptionsT, ItemT, ReplyT, MetricsT]):
    """One kind of evaluation, with the types of its options, items, replies and figures.

    A subclass sets `options_class` and implements the abstract methods. `eval.running.run_suites` calls, in this order:
    `items` and `settings`, then `open` and for each batch `ask` and `score`, at the end `summarise` and `show`.

    The constructor reads the ids of all items, so a subclass sets the fields that its `items` needs before it calls the
    constructor of this class.

    Attributes:
        unit: Name of an item.
        example: Options of a working command, for `--help`.
        ids: The distinct ids of all items, in order.
        command: The words of the command line, for reports.
        concurrency: Batches in progress at once.
        retry_errors: Run the failed items of an earlier call again.
        embedded: Number of texts in the vector indexes, which `open` sets, for `run.json`; None without such an index.
        backends: Kinds of the chat models' backends by role ("": all other roles), if one of them is a Batch API.
        trainings: How the models were trained, by role, as far as their folders say it.
        clients: Clients from `open`, which report calls that wait for a batch and are closed at the end.
    """

    unit: ClassVar[str] = "item"
    options_class: ClassVar[type[SuiteOptions]] = SuiteOptions
    example: ClassVar[str] = "--data FILE --output FOLDER"
    options: OptionsT
    ids: list[str]
    command: Sequence[str] = ()
    concurrency: int = 1
    retry_errors: bool = False
    embedded: int | None = None
    backends: Mapping[str, str] = MappingProxyType({})
    trainings: Mapping[str, Training] = MappingProxyType({})
    clients: Sequence[Endpoint] = ()

    def __init__(self, options: OptionsT) -> None:
        self.options = options
        self.ids = []
        occurrences = Counter(item.id for item in self.items())
        repeated = [item_id for item_id, count in occurrences.items() if count > 1]
        if repeated:
            raise ValueError(
                f"{options.data}: {len(repeated)} {self.unit} ids occur more than once, for example "
                f"{', '.join(map(repr, repeated[:3]))}; results are stored by id: make the ids unique, or remove their "
                "field, since ids are then made from the texts"
            )
        self.ids = list(occurrences)
        if not self.ids:
            raise ValueError(f"{options.data}: the data has no {self.unit}")

    @classmethod
    def add_arguments(cls, parser: CommandParser) -> None:
        """Add the options to a parser."""
        add_arguments(parser, cls.options_class)

    @classmethod
    def suites(cls, args: argparse.Namespace) -> Sequence[Suite]:
        """The suites of a command line, which are several if it names several systems or tasks."""
        # The class in `options_class` is `OptionsT`, which a class variable cannot say.
        options: Any = from_arguments(cls.options_class, args)
        return [cls(options)]

    @abstractmethod
    def items(self) -> Iterator[ItemT]:
        """Stream the items, each with an `id`."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """All settings that change a row, without those that only change the speed.

        A stopped run is continued only if they are equal, so a missing one mixes rows of two settings.
        """

    def open(self) -> None:
        """Open models and data; called only when an item has no row."""

    def batches(self, items: Iterable[ItemT]) -> Iterator[list[ItemT]]:
        """Group the items that are asked together; an `ask` that unpacks one item relies on this default of one."""
        return ([item] for item in items)

    @abstractmethod
    async def ask(self, batch: list[ItemT]) -> list[ReplyT]:
        """The model's reply to each item of one batch of `batches`; an exception is a `Failure` of the item."""

    @abstractmethod
    def score(self, item: ItemT, reply: ReplyT | Failure) -> SuiteRow | ResultRow:
        """The row of an item, from its reply or its `Failure`; an exception of a metric ends the run."""

    @abstractmethod
    def summarise(self, log: ResultLog) -> MetricsT:
        """The figures of all rows."""

    @abstractmethod
    def show(self, metrics: MetricsT, console: Console) -> None:
        """Print what `summarise` returned."""

    def show_all(self, finished: Sequence[tuple[Self, MetricsT]], console: Console) -> None:
        """Print the figures of several suites of this kind, each with what its `summarise` returned."""
        for suite, metrics in finished:
            suite.show(metrics, console)


class IntervalCells(NamedTuple):
    """A mean and the ends of its interval, such as "43.1" and "40.2 to 46.0"."""

    mean: str
    interval: str


def interval_cells(value: Mapping[str, Any], times: float = 100, form: str = "z.1f") -> IntervalCells:
    """A mean and its interval as table cells; dashes if there are none.

    Args:
        value: An interval, with "mean", "low" and "high".
        times: Factor of all three; scores are shown times 100.
        form: Format of a number; "z" writes no minus before zero.
    """
    if value["mean"] is None:
        return IntervalCells("-", "-")
    mean, low, high = (format(times * value[key], form) for key in ("mean", "low", "high"))
    return IntervalCells(mean, f"{low} to {high}")


def named_numbers(values: Mapping[str, float]) -> str:
    """Names with their numbers, such as "stop 3, error 1"."""
    return ", ".join(f"{name} {value}" for name, value in values.items()) or "none"


def show_table(
    console: Console,
    title: str,
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    drawn: str = "",
    failed: int | None = None,
) -> None:
    """Print a table.

    Args:
        heads: Names of the columns; the last one explains the row.
        rows: One cell per name.
        drawn: For scores: what their intervals draw, for example "questions".
        failed: Number of failed items, which gets a column of its own before the last one.
    """
    if failed is not None:
        heads = [*heads[:-1], "failed", heads[-1]]
        rows = [[*row[:-1], str(failed), row[-1]] for row in rows]
    Table(heads, rows, title).show(console)
    if drawn:
        way = f"by bootstrap over {drawn} (Clopper-Pearson if all scores are equal)"
        console.print(f"Scores are times 100, with a 95 % interval {way}.")
