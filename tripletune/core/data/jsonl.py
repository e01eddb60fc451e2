"""Stream stored rows: JSON lines, plain or compressed with gzip, and Parquet; files or the splits of a folder."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from tripletune.core.files import JSON

# Size of the part of a JSON-lines file that one process reads at a time.
PART_BYTES = 2**21
_HALF_CHARACTER = re.compile(rb"\\u[dD][89a-fA-F]")


class Stretch(NamedTuple):
    """Some lines of a file, which can be read without the lines before them.

    Attributes:
        first_line: Number of the first line, counted from 1.
        begin: The byte at which this line begins.
        lines: How many lines to read; None: all.
    """

    first_line: int = 1
    begin: int = 0
    lines: int | None = None


WHOLE_FILE = Stretch()


def read_jsonl(
    path: str | Path, partial: bool = False, stretch: Stretch = WHOLE_FILE
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Stream a JSON-lines file as `("file:line", object)` pairs; blank lines are skipped.

    Args:
        partial: Skip a last line without a line break, which a killed program leaves.
        stretch: The lines to read; by default all.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"no such file: {path}")
    if not path.is_file():
        kind = "a folder" if path.is_dir() else "a pipe or device"
        raise FileNotFoundError(f"{path} is {kind}; give a file")
    # Read as bytes: a text file is decoded in blocks, and an error would name the wrong line.
    with open_rows(path) as lines:
        lines.seek(stretch.begin)
        for number, line in enumerate(islice(lines, stretch.lines), stretch.first_line):
            if not line.strip() or (partial and not line.endswith(b"\n")):
                continue
            where = f"{path}:{number}"
            try:
                row = json_value(line)
            except UnicodeDecodeError as error:
                raise ValueError(f"{where}: not UTF-8 text ({error.reason}); is this a binary file?") from None
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{where}: not valid JSON ({error})") from None
            if not isinstance(row, dict):
                raise ValueError(f"{where}: expected a JSON object, found {type(row).__name__}")
            yield where, row


def is_packed(path: Path) -> bool:
    """Whether a file is compressed with gzip."""
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"


def unpacked(path: Path) -> IO[bytes]:
    """Open a file as bytes, and decompress it if it is compressed with gzip."""
    if is_packed(path):
        return cast(IO[bytes], gzip.open(path))
    return path.open("rb")


@contextmanager
def open_rows(path: Path) -> Iterator[IO[bytes]]:
    """Open a file of rows with `unpacked`; a damaged gzip file is a `ValueError`."""
    try:
        with unpacked(path) as file:
            yield file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path}: the gzip file is damaged or cut off ({error})") from None


def json_value(line: bytes) -> Any:
    """Read one JSON value, with or without byte-order mark; unpaired surrogates become U+FFFD.

    Text that was cut inside an emoji has an unpaired surrogate (`\\ud83d`), which no tokenizer reads.
    """
    value = JSON.decode(line.decode("utf-8-sig"))
    return whole_characters(value) if _HALF_CHARACTER.search(line) else value


def whole_characters(value: Any) -> Any:
    """Replace unpaired surrogates in a text or JSON value by U+FFFD; see `json_value`."""
    if not isinstance(value, str):
        return json.loads(whole_characters(json.dumps(value, ensure_ascii=False)))
    try:
        value.encode()
    except UnicodeEncodeError:
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return value


def record_files(path: str | Path, split: str | None = None) -> list[Path]:
    """The record shards under `path`: the file itself, or `<split>*.jsonl` / `<split>*.parquet` of a folder.

    If the folder has `train.jsonl` or `train-00000.jsonl`, then `train_small-00000.jsonl` is not part of split `train`.
    """
    path = Path(path)
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"no such file or folder: {path}")
    stem = split or ""
    files = sorted([*path.glob(f"{stem}*.jsonl"), *path.glob(f"{stem}*.parquet")])
    if not files:
        names = ", ".join(sorted(file.name for file in path.iterdir())[:8]) or "nothing"
        raise FileNotFoundError(
            f"{path} holds no {stem}*.jsonl or {stem}*.parquet shards of records (it holds {names})"
        )
    exact = re.compile(rf"{re.escape(stem)}(-\d+)?(-of-\d+)?\.\w+")
    return [file for file in files if exact.fullmatch(file.name)] or files


def stored_rows(path: str | Path, split: str | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Stream the rows of a file, or of one split of a folder, as `("file:line", row)`, in file order."""
    for file in record_files(path, split):
        if file.suffix == ".parquet":
            yield from _parquet_rows(file)
        else:
            yield from read_jsonl(file)


def stored_parts(path: str | Path, split: str | None = None) -> Iterator[Iterator[tuple[str, dict[str, Any]]]]:
    """Like `stored_rows`, in independent parts: about 2 MiB of lines, or one row group of Parquet."""
    for file in record_files(path, split):
        if file.suffix == ".parquet":
            import pyarrow.parquet as pq

            metadata = pq.ParquetFile(file).metadata
            rows_before = 0
            for group in range(metadata.num_row_groups):
                yield _parquet_rows(file, [group], rows_before)
                rows_before += metadata.row_group(group).num_rows
        elif is_packed(file):
            yield read_jsonl(file)
        else:
            for stretch in _stretches(file):
                yield read_jsonl(file, stretch=stretch)


def _stretches(file: Path) -> Iterator[Stretch]:
    """Cut a file of lines into stretches of about `PART_BYTES`."""
    first_line = 1
    begin = end = 0
    line_number = 0
    with file.open("rb") as lines:
        for line_number, line in enumerate(lines, 1):
            end += len(line)
            if end - begin >= PART_BYTES:
                yield Stretch(first_line, begin, line_number + 1 - first_line)
                first_line = line_number + 1
                begin = end
    if end > begin:
        yield Stretch(first_line, begin, line_number + 1 - first_line)


def _parquet_rows(file: Path, groups: list[int] | None = None, number: int = 0) -> Iterator[tuple[str, dict[str, Any]]]:
    """Stream the rows of some row groups (None: all); `number` rows stand before them in the file."""
    import pyarrow.parquet as pq

    try:
        for batch in pq.ParquetFile(file).iter_batches(batch_size=512, row_groups=groups):
            for row in batch.to_pylist():
                number += 1
                yield f"{file}:row {number}", row
    except (ValueError, OSError) as error:
        raise ValueError(f"{file}: not a readable Parquet file ({error})") from None
