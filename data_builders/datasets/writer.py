"""Writes a data set folder for `datasets.load_dataset(folder)`: shards `<split>-00000.jsonl` or `.parquet`, and a card.

The folder is there completely or not at all, and one program writes it at a time (`models.files.new_folder`).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Generic, Literal

from tripletune.data_builders.datasets.card import CARD, DROPPED, STATISTICS, BuildFacts, write_card
from tripletune.data_builders.datasets.rows import R, RowKind, Statistics
from tripletune.models.data.records import normalize_answer
from tripletune.models.files import check_folder, new_folder
from tripletune.models.options import require, setting

Format = Literal["jsonl", "parquet"]
# Names that a data set folder holds.
MADE = ("*-[0-9][0-9][0-9][0-9][0-9].jsonl", "*-[0-9][0-9][0-9][0-9][0-9].parquet", CARD, STATISTICS, DROPPED)
# Exit code of a build that ended well and gave not one record.
NO_RECORDS = 4
_SPLIT_NAME = re.compile(r"\w+(\.\w+)*")
_ROW_GROUP = 512


@dataclass(frozen=True)
class FolderOptions:
    """Where and how a data set is written.

    Raises:
        FileExistsError: the folder is taken; see `models.files.check_folder`.
        ValueError: a value makes no sense.
    """

    output: str = field(metadata={"help": "folder of the data set"})
    format: Literal["jsonl", "parquet"] = setting("jsonl", "format of the shards")
    shard_size: int = setting(50_000, "rows per shard", at_least=1)
    overwrite: bool = setting(False, "replace a data set in the output folder")
    tokenizer: str | None = setting(None, "count the card's tokens with this model's tokenizer instead of words")

    def __post_init__(self) -> None:
        require(self)
        check_folder(self.output, MADE, self.overwrite)


class DatasetWriter(Generic[R]):
    """A data set while it is written; `new_dataset` makes one.

    Attributes:
        folder: The folder that is filled.
        statistics: Counts of the rows written so far.
    """

    def __init__(self, folder: Path, kind: RowKind[R], options: FolderOptions) -> None:
        self.folder, self.statistics = folder, Statistics(kind, options.tokenizer)
        self._kind, self._options = kind, options
        self._counts: Counter[str] = Counter()
        self._shards: dict[str, _JsonlShard | _ParquetShard] = {}

    def write(self, row: R, split: str) -> None:
        """Append a row to a split."""
        shard = self._shards.get(split)
        if shard is None:
            path = self.folder / f"{split}-{self._counts[split] // self._options.shard_size:05d}.{self._options.format}"
            shard = _JsonlShard(path) if self._options.format == "jsonl" else _ParquetShard(path, self._kind)
            self._shards[split] = shard
        shard.write(row.to_json())
        self.statistics.add(row, split)
        self._counts[split] += 1
        if self._counts[split] % self._options.shard_size == 0:
            self._shards.pop(split).close()

    def close(self) -> None:
        """Finish the shards."""
        while self._shards:
            self._shards.popitem()[1].close()

    def finish(self, facts: BuildFacts, may_be_empty: bool = False) -> dict[str, Any]:
        """Finish the shards and write the card.

        Args:
            facts: What the card says besides the numbers.
            may_be_empty: Whether there is a data set without rows.

        Returns:
            The statistics that are also in `statistics.json`.

        Raises:
            ValueError: there is not a single row.
        """
        self.close()
        if not self.statistics.records and not may_be_empty:
            raise ValueError(f"there is no {self._kind.name} to write to {self._options.output}")
        write_card(self.folder, facts, self.statistics, self._options.format)
        return self.statistics.to_json()


@contextmanager
def new_dataset(
    options: FolderOptions, kind: RowKind[R], sources: Sequence[str | Path | None] = ()
) -> Iterator[DatasetWriter[R]]:
    """A data set that takes the place of `options.output` when the block ends well; call `finish` in it.

    Args:
        options: Where and how.
        kind: What its rows are.
        sources: What is read, which must survive; locations that are no files (hub ids) are passed over.

    Raises:
        FileExistsError: the output folder is taken.
        ValueError: another program is writing it, or it is, holds or lies in what is read.
    """
    read = [path for path in sources if path is not None and Path(path).exists()]
    with new_folder(options.output, MADE, options.overwrite, read) as folder, ExitStack() as stack:
        writer = DatasetWriter(folder, kind, options)
        stack.callback(writer.close)
        yield writer


def split_of(question: str, seed: int, validation_fraction: float) -> str:
    """The split of a question: "train", or "validation" for a share of the questions.

    It depends on the normalised question text and the seed alone, so all records of a question, and questions with the
    same words under different ids, are on one side, in every build.
    """
    digest = hashlib.blake2b(f"{seed}\n{normalize_answer(question)}".encode(), digest_size=8).digest()
    return "validation" if int.from_bytes(digest) < validation_fraction * 2**64 else "train"


def split_name_problems(name: str | None) -> list[str]:
    """What is wrong with the name of a split."""
    if name is None or _SPLIT_NAME.fullmatch(name):
        return []
    return [f"split_name: {name!r} must be made of letters, digits, underscores and single dots"]


class _JsonlShard:
    def __init__(self, path: Path) -> None:
        self._file: IO[str] = path.open("w", encoding="utf-8")

    def write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row, ensure_ascii=False) + "\n")

    def close(self) -> None:
        self._file.close()


class _ParquetShard:
    def __init__(self, path: Path, kind: RowKind[Any]) -> None:
        import pyarrow.parquet as pq

        self._schema = kind.schema()
        self._writer = pq.ParquetWriter(path, self._schema, compression="zstd")
        self._rows: list[dict[str, Any]] = []

    def write(self, row: dict[str, Any]) -> None:
        self._rows.append(row)
        if len(self._rows) >= _ROW_GROUP:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        import pyarrow as pa

        if self._rows:
            self._writer.write_table(pa.Table.from_pylist(self._rows, schema=self._schema))
            self._rows = []
