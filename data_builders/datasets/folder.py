"""Writes a stream of records as a data set folder with its card, in one step: it is there completely or not at all."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from tripletune.data_builders.datasets.card import BuildFacts, write_card
from tripletune.data_builders.datasets.shards import (
    FORMATS,
    Format,
    ShardWriter,
    Storable,
    check_output,
    check_shard_options,
    record_schema,
    replaced_folder,
)
from tripletune.data_builders.datasets.stats import Statistics
from tripletune.models.data.records import Record

if TYPE_CHECKING:
    import pyarrow as pa

R = TypeVar("R", bound=Storable)
R_in = TypeVar("R_in", contravariant=True)


@dataclass(frozen=True)
class FolderOptions:
    """Where and how a data set is written.

    Attributes:
        output: Its folder.
        format: "jsonl" or "parquet".
        shard_size: Records in a shard.
        overwrite: Whether a data set that is there may be replaced.
        tokenizer: Model spec whose tokenizer counts the card's tokens; None counts words.
    """

    output: str
    format: Format = "jsonl"
    shard_size: int = 50_000
    overwrite: bool = False
    tokenizer: str | None = None

    def __post_init__(self) -> None:
        check_shard_options(self.format, self.shard_size)
        check_output(self.output, self.overwrite)

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> FolderOptions:
        """The options of a command line that `add_folder_arguments` gave."""
        names = ("output", "format", "shard_size", "overwrite", "tokenizer")
        return cls(**{name: getattr(arguments, name) for name in names})


def add_folder_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `FolderOptions` to a command."""
    add = parser.add_argument
    add("--output", required=True, help="folder of the data set")
    add("--format", choices=FORMATS, default="jsonl", help="format of the shards")
    add("--shard-size", type=int, default=50_000, help="records in a shard")
    add("--overwrite", action="store_true", help="replace a data set in the output folder")
    add("--tokenizer", help="count the card's tokens with this model's tokenizer instead of counting words")


class Counting(Protocol[R_in]):
    """What counts the rows of a data set: `data_builders.stats.Statistics`, or that of another kind of row."""

    @property
    def records(self) -> int:
        """How many rows were counted."""
        ...

    def add(self, record: R_in, split: str) -> None:
        """Count one row of a split."""
        ...

    def to_json(self) -> dict[str, Any]:
        """Everything that was counted."""
        ...


@dataclass
class Layout(Generic[R]):
    """What a data set of another kind of row than records has of its own.

    Attributes:
        statistics: Counts its rows.
        card: Writes card and statistics into the folder: folder, facts, statistics, format.
        schema: Gives the Arrow schema of a row.
        may_be_empty: Whether a data set without rows is written too, with its card.
    """

    statistics: Counting[R]
    card: Callable[[Path, BuildFacts, Any, Format], None]
    schema: Callable[[], pa.Schema] = field(default=record_schema)
    may_be_empty: bool = False


def write_dataset(
    records: Iterable[tuple[Record, str]], facts: Callable[[Statistics], BuildFacts], options: FolderOptions
) -> dict[str, Any]:
    """Write records, statistics and card.

    Args:
        records: Records and their splits, written in this order.
        facts: Called when all records are written; raises `ValueError` when there should be no data set.
        options: Where and how.

    Returns:
        The statistics that are also in `statistics.json`.

    Raises:
        FileExistsError: the output folder is taken.
        ValueError: there is not a single record, or `facts` or the records say so.
    """
    return write_rows(records, facts, options, Layout(Statistics(options.tokenizer), write_card))


def write_rows(
    records: Iterable[tuple[R, str]],
    facts: Callable[[Any], BuildFacts],
    options: FolderOptions,
    layout: Layout[R],
) -> dict[str, Any]:
    """As `write_dataset`, for any kind of row.

    Args:
        records: Rows and their splits, written in this order.
        facts: As in `write_dataset`; it gets the statistics of the layout.
        options: Where and how.
        layout: What is counted and what the card shows.
    """
    statistics = layout.statistics
    with replaced_folder(options.output, options.overwrite) as folder:
        with ExitStack() as stack:
            writers: dict[str, ShardWriter] = {}
            for record, split in records:
                if split not in writers:
                    writer = ShardWriter(folder, split, options.format, options.shard_size, layout.schema)
                    writers[split] = stack.enter_context(writer)
                writers[split].write(record)
                statistics.add(record, split)
        found = facts(statistics)
        if not statistics.records and not layout.may_be_empty:
            raise ValueError(f"there is no record to write to {options.output}")
        layout.card(folder, found, statistics, options.format)
    return statistics.to_json()
