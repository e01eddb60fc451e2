"""Stream stored rows: JSON lines, plain or compressed with gzip, and Parquet; files or the splits of a folder."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from tripletune.core.files import JSON, few, file_digest

# Size of the part of a JSON-lines file that one process reads at a time.
PART_BYTES = 2**21
_READ = re.compile(r"\.(jsonl|jsonl\.gz|parquet)$")
# Names of files with rows: a split, perhaps with the number of the shard, and the ending of any format of rows, packed
# or not wholly written.
_SHARD = re.compile(
    r"(?P<stem>.+?)([-_.](?P<number>\d+)([-_]of[-_](?P<total>\d+)(-[0-9a-f]{16})?)?)?"
    r"\.(jsonl|json|ndjson|parquet|arrow|csv|tsv)(\.(gz|zst|xz|bz2|lz4|zip|part|tmp|incomplete|crdownload))?",
    re.IGNORECASE,
)
_UNFINISHED = re.compile(r"\.(part|tmp|incomplete|crdownload)$")
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
# How a pickle of protocol 2 to 5 begins, and the archive that torch.save writes.
_PICKLE = re.compile(rb"\x80[\x02-\x05]|PK\x03\x04.{,250}data\.pkl", re.DOTALL)
_UNPICKLE = (
    "python -c \"import json, pickle; [print(json.dumps(row, default=str)) for row in pickle.load(open('{name}', "
    "'rb'))]\" > {stem}.jsonl"
)
# What an error says about a file that another program wrote.
_WANTED = (
    "this file needs one JSON object per line (`tripletune data adapt` rewrites arrays and files of other projects, "
    "`tripletune build passages` reads documents, tables and plain text)"
)


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
            is_cut_off = partial and not line.endswith(b"\n")
            if not line.strip() or is_cut_off:
                continue
            where = f"{path}:{number}"
            yield where, _object_of(line, where)


def _object_of(line: bytes, where: str) -> dict[str, Any]:
    """The JSON object of a line; an error says what the file should hold, since it is often of another layout."""
    try:
        row = json_value(line)
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 text ({error.reason}); is this a binary file?") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not valid JSON ({error}); {_WANTED}") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected a JSON object, found {type(row).__name__}; {_WANTED}")
    return row


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
    """Open a file of rows with `unpacked`; a damaged gzip file or a pickle is a `ValueError`.

    All readers of rows open files here, so that none of them runs code of a pickle or stops with a library's traceback.
    """
    try:
        with unpacked(path) as file:
            if _PICKLE.match(file.read(512)):
                raise ValueError(
                    f"{path}: this is a pickle, which may run code when it is opened, so it is not read. If you trust "
                    "its source, write its rows as JSON lines in an environment of their own: "
                    f"{_UNPICKLE.format(name=path.name, stem=path.name.partition('.')[0])} (files of torch.save: "
                    "torch.load instead of pickle.load)"
                )
            file.seek(0)
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
        # As one text, in which keys and nested values are reached without a walk.
        return json.loads(whole_characters(json.dumps(value, ensure_ascii=False)))
    try:
        value.encode()
    except UnicodeEncodeError:
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return value


def record_files(path: str | Path, split: str | None = None) -> list[Path]:
    """The record shards under `path`: the file itself, or `<split>*.jsonl`, also compressed, or `.parquet` of a folder.

    If the folder has `train.jsonl` or `train-00000.jsonl`, then `train_small-00000.jsonl` is not part of split `train`.

    Raises:
        FileNotFoundError: There is no such file or folder, or no shard in it.
        ValueError: A shard is missing, stored twice, or in a format that is not read.
    """
    path = Path(path)
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"no such file or folder: {path}")
    stem = split or ""
    files = shards_of(path, stem)
    if not files:
        names = ", ".join(sorted(file.name for file in path.iterdir())[:8]) or "nothing"
        raise FileNotFoundError(
            f"{path} holds no {stem}*.jsonl or {stem}*.parquet shards of records (it holds {names})"
        )
    # A stem may only be the beginning of a split's name, such as "dev" of "dev_distractor", if no split has it whole.
    of_split = [file for file in files if _stem_of(file) == stem] or files
    check_nothing_unread(of_split, files)
    check_shards([file.name for file in of_split], path)
    return of_split


def check_nothing_unread(files: Sequence[Path], read: Collection[Path]) -> None:
    """Make sure that no file beside those of a split is a shard of it that would not be read.

    Args:
        files: Files of a split.
        read: All files that are read, also those of other splits.
    """
    for folder in {file.parent for file in files}:
        beside = [file for file in files if file.parent == folder]
        stems = {_stem_of(file) for file in beside} - {None}
        unread = sorted(file.name for file in folder.iterdir() if _stem_of(file) in stems and file not in read)
        if unread:
            raise ValueError(
                f"{folder}: {few(unread)} would not be read beside {beside[0].name}: make it .jsonl, .jsonl.gz or "
                ".parquet, or move it away"
            )


def check_copies(files: Iterable[Path]) -> None:
    """Make sure that no two files have the same content, as a copy or a backup has: its rows would count twice."""
    by_size: dict[int, list[Path]] = {}
    for file in files:
        by_size.setdefault(file.stat().st_size, []).append(file)
    for same_size in by_size.values():
        digests: dict[str, Path] = {}
        for file in same_size if len(same_size) > 1 else []:
            other = digests.setdefault(file_digest(file), file)
            if other is not file:
                raise ValueError(f"{file.parent}: {other.name} and {file.name} are the same: move one of them away")


def shards_of(folder: Path, stem: str) -> list[Path]:
    """The files of a folder that hold rows and whose names begin with `stem`, sorted."""
    return sorted(file for file in folder.glob(f"{stem}*") if _READ.search(file.name) and file.is_file())


def _stem_of(file: Path) -> str | None:
    """The name of the split of which a file may be a shard; None for a file that can't hold rows."""
    shard = _SHARD.fullmatch(file.name)
    return shard["stem"] if shard else None


def check_shards(names: Sequence[str], place: object) -> None:
    """Make sure that shards are complete, and that none is there twice.

    A copy that was cut off, or a folder with two downloads, would else be trained on without a word. Each split is
    checked by itself.

    Args:
        names: Names of the files of one or several splits.
        place: The folder or data set, for the error message.
    """
    by_stem: dict[str, list[re.Match[str]]] = {}
    for name in names:
        if _UNFINISHED.search(name):
            raise ValueError(f"{place}: {name} is not wholly written: finish the download, or move it away")
        shard = _SHARD.fullmatch(name)
        if shard:
            by_stem.setdefault(shard["stem"], []).append(shard)
    for shards in by_stem.values():
        numbered: dict[int | None, str] = {}
        for shard in shards:
            number = int(shard["number"]) if shard["number"] else None
            if number in numbered:
                raise ValueError(
                    f"{place}: {numbered[number]} and {shard[0]} are the same shard: move one of them away"
                )
            numbered[number] = shard[0]
        if None in numbered and len(numbered) > 1:
            raise ValueError(
                f"{place} holds {numbered.pop(None)} and also {few(sorted(numbered.values()))}: the rows would be read "
                "twice; name the file to read, or move one of the two away"
            )
        _check_all_shards_there(shards, place)


def _check_all_shards_there(shards: Sequence[re.Match[str]], place: object) -> None:
    """Make sure that the shards of one split have all numbers, from 0 or 1 to the total in their names, if it is there.

    Without a total, shards that are missing at the end cannot be noticed.
    """
    numbers = sorted(int(shard["number"]) for shard in shards if shard["number"])
    totals = {int(shard["total"]) for shard in shards if shard["total"]}
    if len(totals) > 1:
        raise ValueError(f"{place}: {shards[0][0]} and {shards[-1][0]} are of two sets of shards: move one set away")
    # Numbers such as a year are no count of shards.
    is_counted = totals or any(shard["number"].startswith("0") for shard in shards if shard["number"])
    if not numbers or not is_counted:
        return
    first = 1 if 0 not in numbers and 1 in numbers else 0
    end = first + totals.pop() if totals else numbers[-1] + 1
    missing = sorted(set(range(first, end)) - set(numbers))
    if missing:
        raise ValueError(
            f"{place}: {len(missing)} of {end - first} shards beside {shards[0][0]} are missing (number "
            f"{few(list(map(str, missing)))}): copy the folder again, or name the files to read"
        )


def stored_rows(path: str | Path, split: str | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Stream the rows of a file, or of one split of a folder, as `("file:line", row)`, in file order."""
    for file in record_files(path, split):
        if file.suffix == ".parquet":
            yield from _parquet_rows(file)
        else:
            yield from read_jsonl(file)


def stored_parts(path: str | Path, split: str | None = None) -> Iterator[Iterator[tuple[str, dict[str, Any]]]]:
    """Like `stored_rows`, in independent parts: about 2 MiB of lines, or one row group of Parquet.

    A compressed file is one part, since it cannot be read from the middle.
    """
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
            for stretch in _cut_into_stretches(file):
                yield read_jsonl(file, stretch=stretch)


def _cut_into_stretches(file: Path) -> Iterator[Stretch]:
    """Cut a file of lines into stretches of about `PART_BYTES`.

    The file is read once for it, because errors name lines by their numbers in the whole file.
    """
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
    """Stream the rows of some row groups (None: all); `number` rows stand before them in the file.

    Yields:
        "file:row number" and the row, whose columns of mixed types are read as JSON.
    """
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(file)
        # Columns of mixed types, which `datasets` stores as JSON; texts are stored as they are.
        mixed = [column.name for column in table.schema_arrow if "arrow.json" in str(column.type)]
        for batch in table.iter_batches(batch_size=512, row_groups=groups):
            for row in batch.to_pylist():
                number += 1
                for name in mixed:
                    row[name] = _parsed_objects(row[name])
                yield f"{file}:row {number}", row
    except (ValueError, OSError) as error:
        raise ValueError(f"{file}: not a readable Parquet file ({error})") from None


def _parsed_objects(value: Any) -> Any:
    """A value with its lists, objects and quoted texts that are stored as JSON; other texts are stored as they are.

    A text that only begins like JSON stays a text.
    """
    if isinstance(value, dict):
        return {name: _parsed_objects(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_parsed_objects(item) for item in value]
    if isinstance(value, str) and value[:1] in ("[", "{", '"'):
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return value
