"""Record shards in the layout that `datasets.load_dataset(folder)` reads: `<split>-00000.jsonl` or `.parquet`.

Records are written one at a time, a shard appears under its name only when it is complete, and a whole data set only
when all of it is.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Literal, Protocol

from tripletune.models.data.records import normalize_answer

if TYPE_CHECKING:
    import pyarrow as pa

Format = Literal["jsonl", "parquet"]
FORMATS: tuple[Format, ...] = ("jsonl", "parquet")
SHARD_NAME = re.compile(r"(?P<split>.+?)-\d{5}\.(jsonl|parquet)")
SPLIT_NAME = re.compile(r"\w+(\.\w+)*")
CARD, STATISTICS = "README.md", "statistics.json"
# What a sharded run leaves besides: for each labelled question its place in the input (`data_builders.merge`).
ORDER = "order.tsv"
# Questions that a teacher LLM could not label (`data_builders.dropped`).
DROPPED = "dropped.ndjson"
# Exit code of a build that ended well and gave not one record.
NO_RECORDS = 4
_ROW_GROUP = 512
_MAIN_REASONS = 3


class Storable(Protocol):
    """What can be written into a shard: a record, or a text-to-triples pair."""

    def to_json(self) -> dict[str, Any]:
        """The row as it is stored."""
        ...


def record_schema() -> pa.Schema:
    """The Arrow schema of a record; explicit, since a shard whose first rows have empty lists does not show it."""
    import pyarrow as pa

    text = pa.string()
    step = pa.struct([("query", text), ("triples", pa.list_(pa.list_(text))), ("text", text)])
    return pa.schema(
        [
            ("id", text),
            ("question_id", text),
            ("task", text),
            ("question", text),
            ("steps", pa.list_(step)),
            ("action", text),
            ("subquery", text),
            ("answers", pa.list_(text)),
            ("source", text),
        ]
    )


def record_features() -> list[dict[str, Any]]:
    """The features of a record as the YAML head of a data set card names them."""
    text = {"dtype": "string"}
    step = [{"name": "query", **text}, {"name": "triples", "list": {"list": "string"}}, {"name": "text", **text}]
    kinds: dict[str, dict[str, Any]] = {"steps": {"list": step}, "answers": {"list": "string"}}
    return [{"name": name, **kinds.get(name, text)} for name in record_schema().names]


def front_matter(
    splits: list[str],
    format: Format,
    title: str,
    features: list[dict[str, Any]] | None = None,
    task: str = "question-answering",
) -> str:
    """The YAML head of the data set card: where the splits are, and the features of a row.

    Args:
        splits: The splits that have shards.
        format: The shards' format.
        title: The data set's name.
        features: The features of a row; None: those of a record.
        task: The hub's name of the task.

    Returns:
        YAML between two `---` lines.
    """
    import yaml

    features = record_features() if features is None else features
    files = [{"split": split, "path": f"{split}-*.{format}"} for split in splits]
    head = {
        "pretty_name": title,
        "task_categories": [task],
        "tags": ["retrieval-augmented-generation", "knowledge-graph"],
        "configs": [{"config_name": "default", "data_files": files}],
        "dataset_info": {"config_name": "default", "features": features},
    }
    return f"---\n{yaml.safe_dump(head, sort_keys=False, allow_unicode=True)}---\n"


class ShardWriter:
    """Writes the records of one split; a context manager.

    Args:
        folder: An existing folder.
        split: The split's name, the beginning of the file names.
        format: "jsonl" or "parquet".
        shard_size: Records in a shard.
        schema: Gives the Arrow schema of a row.

    Raises:
        ValueError: the split's name, the format or the shard size can't be used.
    """

    def __init__(
        self,
        folder: str | Path,
        split: str,
        format: Format = "jsonl",
        shard_size: int = 50_000,
        schema: Callable[[], pa.Schema] = record_schema,
    ) -> None:
        check_shard_options(format, shard_size)
        if not SPLIT_NAME.fullmatch(split):
            raise ValueError(f"split name {split!r}: use letters, digits, underscores and single dots")
        self.count = 0
        self._folder, self._split, self._format, self._shard_size = Path(folder), split, format, shard_size
        self._shard, self._schema = 0, schema
        self._sink: _JsonlSink | _ParquetSink | None = None

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._sink is not None:
            self._finish(keep=kind is None)

    def write(self, record: Storable) -> None:
        """Append one record."""
        if self._sink is None:
            path = self._folder / f"{self._split}-{self._shard:05d}.{self._format}"
            self._sink = _JsonlSink(path) if self._format == "jsonl" else _ParquetSink(path, self._schema())
        self._sink.write(record.to_json())
        self.count += 1
        if self.count % self._shard_size == 0:
            self._finish(keep=True)

    def _finish(self, keep: bool) -> None:
        if self._sink is not None:
            self._sink.close()
            if keep:
                os.replace(self._sink.partial, self._sink.path)
                self._shard += 1
            else:
                self._sink.partial.unlink(missing_ok=True)
            self._sink = None


@contextmanager
def replaced_folder(output: str | Path, overwrite: bool) -> Iterator[Path]:
    """A fresh folder that takes the place of `output` when the block ends well, and is removed when it fails.

    Args:
        output: The data set's folder.
        overwrite: Whether a data set that is there may be replaced.

    Raises:
        FileExistsError: `output` holds something and may not be replaced, or holds files that are not shards.
    """
    output = Path(output)
    partial, old = output.with_name(f"{output.name}.partial"), output.with_name(f"{output.name}.old")
    if old.exists() and not output.exists():
        # A kill between the two renames below: the old folder is still the newest whole one.
        os.replace(old, output)
    check_output(output, overwrite)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if output.exists():
        # A folder can't be replaced by another in one step; the old one steps aside first, so that it is never lost.
        shutil.rmtree(old, ignore_errors=True)
        os.replace(output, old)
        os.replace(partial, output)
        shutil.rmtree(old)
    else:
        os.replace(partial, output)


def dataset_files(folder: str | Path) -> dict[str, list[Path]]:
    """The shards of a data set folder by split, both in order.

    Raises:
        FileNotFoundError: there is no such folder, or it holds no shards.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"no such folder: {folder}")
    files: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()):
        match = SHARD_NAME.fullmatch(path.name)
        if match:
            files.setdefault(match["split"], []).append(path)
    if not files:
        raise FileNotFoundError(
            why_empty(folder) or f"{folder} holds no record shards (<split>-00000.jsonl or .parquet)"
        )
    return files


def why_empty(folder: str | Path) -> str | None:
    """A sentence on why a finished data set has no records; None when it has some, or is no data set."""
    path = Path(folder) / STATISTICS
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["statistics"]["records"]:
            return None
        counts: Counter[str] = Counter()
        for drops in content["build"]["drops"].values():
            counts.update(drops)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    # The most frequent first, and equally frequent ones by name.
    main = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    told = "; ".join(f"{n:,} x {reason}" for reason, n in main[:_MAIN_REASONS])
    more = f"; {len(main) - _MAIN_REASONS} more reasons" if len(main) > _MAIN_REASONS else ""
    shown = f"{path.with_name(CARD)} has all counts, {path.with_name(DROPPED)} the replies"
    return f"{folder} has no records, no question could be labelled ({told}{more}): {shown}"


def split_of(question: str, seed: int, validation_fraction: float) -> str:
    """The split of a question: "train", or "validation" for a share of the questions.

    It hangs on the normalised question text and the seed alone, so all records of a question, and questions with the
    same words under different ids, are on one side, in every build.
    """
    digest = hashlib.blake2b(f"{seed}\n{normalize_answer(question)}".encode(), digest_size=8).digest()
    return "validation" if int.from_bytes(digest) < validation_fraction * 2**64 else "train"


def check_output(output: str | Path, overwrite: bool) -> None:
    """Raise `FileExistsError` when `output` can't become a data set folder; see `replaced_folder`."""
    output = Path(output)
    if output.is_file():
        raise FileExistsError(f"output {output} is a file; give a folder")
    found = sorted(path.name for path in output.iterdir()) if output.is_dir() else []
    foreign = [name for name in found if not (SHARD_NAME.fullmatch(name) or name in (CARD, STATISTICS, ORDER, DROPPED))]
    if foreign:
        raise FileExistsError(
            f"output folder {output} holds files that are not record shards ({', '.join(foreign[:3])}); "
            "give another folder"
        )
    if found and not overwrite:
        raise FileExistsError(f"output folder {output} already holds a data set; add --overwrite to replace it")


def check_shard_options(format: str, shard_size: int) -> None:
    """Raise `ValueError` when shards can't be written so."""
    if format not in FORMATS:
        raise ValueError(f"format {format!r} is not one of {', '.join(FORMATS)}")
    if shard_size < 1:
        raise ValueError(f"shard size {shard_size}: a shard must hold at least one record")


def write_text(path: Path, text: str) -> None:
    """Write a small file in one step: it is there completely or not at all."""
    partial = path.with_name(f"{path.name}.tmp")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


class _JsonlSink:
    def __init__(self, path: Path) -> None:
        self.path, self.partial = path, path.with_name(f"{path.name}.tmp")
        self._file: IO[str] = self.partial.open("w", encoding="utf-8")

    def write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row, ensure_ascii=False) + "\n")

    def close(self) -> None:
        self._file.close()


class _ParquetSink:
    def __init__(self, path: Path, schema: pa.Schema) -> None:
        import pyarrow.parquet as pq

        self.path, self.partial = path, path.with_name(f"{path.name}.tmp")
        self._schema = schema
        self._writer = pq.ParquetWriter(self.partial, self._schema, compression="zstd")
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
