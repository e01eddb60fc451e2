"""Rows are tokenised once into a memory-mapped Arrow file, which every later run with the same settings opens at once.

The folder's name depends on all that the rows are made from. Each process of a run makes some parts of the rows, and
streams them to disk.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tripletune.core.concurrency import build_together
from tripletune.core.data.records import IGNORED
from tripletune.core.files import new_file, read_json, write_json

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

ROWS = "rows.arrow"
# The counts of `rows_meta`.
META = "meta.json"
# A row by column. Rows of tokens have `input_ids`, `labels` (-100 where nothing is learned) and `length` in tokens.
Row = dict[str, Any]
# Names and types of columns; "[int32]" is a list, "[[int32]]" a list of lists.
Columns = Mapping[str, str]
# Makes the rows of a part of the data, and counts what it leaves out or cuts.
MakeRows = Callable[[Counter[str]], Iterator[Mapping[str, Any]]]
TEXT: Columns = {"input_ids": "[int32]", "labels": "[int32]", "length": "int32"}
# Columns of a rejected reply, beside those of the preferred reply.
PAIR: Columns = {"rejected_input_ids": "[int32]", "rejected_labels": "[int32]"}
# The column of a prompt in the tokens of a teacher with another tokenizer.
TEACHER: Columns = {"teacher_prompt": "[int32]"}
# Columns of rows with taught sub-queries: their spans, and the tokens that the teacher reads for each
# (`train.rows.hindsight`).
TEACHER_IDS = "teacher_ids"
HINDSIGHT: Columns = {"spans": "[[int32]]", TEACHER_IDS: "[[int32]]"}
# Rows that are converted to Arrow in one go.
_CHUNK = 512


class NoRowsError(ValueError):
    """No row is left to learn from.

    Attributes:
        counts: What was counted while the rows were made; see `rows_meta`.
    """

    def __init__(self, counts: Mapping[str, int]) -> None:
        counted = [f"{kind} {count}" for kind, count in sorted(counts.items()) if count]
        super().__init__(f"there are no rows to learn from ({', '.join(counted) or 'nothing'})")
        self.counts = counts


def cached_rows(
    key: Sequence[Any], cache: Path, parts: Iterable[MakeRows], columns: Columns = TEXT, name: str = "tokens"
) -> Dataset:
    """Write rows once, as shared work of all processes, and open them memory-mapped.

    Args:
        key: JSON values that the rows depend on: the data's digest, settings, template, tokenizer.
        parts: Functions that each make the rows (mappings of columns) of one part of the data, for example of
            `train.sources.Examples.works`, and count dropped and cut data in the given counter, for `rows_meta`. Rows
            of tokens have `length` (source plus target) and `labels`.
        name: First word of the folder's name in the cache.

    Raises:
        NoRowsError: There are no rows of tokens.
    """
    from datasets import Dataset

    contents = json.dumps([*key, sorted(columns.items())], sort_keys=True)
    digest = hashlib.sha256(contents.encode()).hexdigest()
    folder = cache / f"{name}-{digest[:16]}"
    if not (folder / META).exists():
        _write_all(folder, list(parts), _arrow_schema(columns), f"making {name}")
    dataset = Dataset.from_file(str(folder / ROWS))
    if len(dataset) == 0 and "length" in columns:
        raise NoRowsError(rows_meta(dataset))
    return dataset


def _arrow_schema(columns: Columns) -> pa.Schema:
    """Columns as Arrow declares them.

    Declared and not inferred from the rows: a first chunk of empty lists would give their column the type null.
    """
    import pyarrow as pa

    fields = {}
    for column, text in columns.items():
        kind = pa.type_for_alias(text.strip("[]"))
        for _ in range(text.count("[")):
            kind = pa.list_(kind)
        fields[column] = kind
    return pa.schema(fields)


def _write_all(folder: Path, parts: Sequence[MakeRows], schema: pa.Schema, title: str) -> None:
    """Write the rows of all parts into a folder; the processes of a run share the parts."""
    if len(parts) == 1:
        _write_part(parts[0], schema, folder)  # there is nothing to share
        return
    works = [partial(_write_part, part, schema) for part in parts]
    build_together(folder, META, works, partial(_merge_parts, folder, schema), title)


def _write_part(make: MakeRows, schema: pa.Schema, folder: Path) -> None:
    """Stream the rows of one part to a folder, with their counts; a part that was cut off is written again.

    The two files are guarded by `tests/train/rows/test_cache.py:test_rows_that_were_cut_off_are_written_anew`.
    """
    import pyarrow as pa

    folder.mkdir(parents=True, exist_ok=True)
    has_labels = "labels" in schema.names
    counts = Counter({"rows": 0})
    if has_labels:
        counts.update({"tokens": 0, "label_tokens": 0})
    rows = iter(make(counts))
    # The file of counts is renamed after the rows' file: if it exists, the rows are complete.
    with new_file(folder / META) as meta, new_file(folder / ROWS) as scratch:
        with pa.ipc.new_stream(str(scratch), schema) as writer:
            while chunk := list(islice(rows, _CHUNK)):
                writer.write_batch(pa.RecordBatch.from_pylist(chunk, schema))
                counts["rows"] += len(chunk)
                if has_labels:
                    _count_tokens(chunk, counts)
        meta.write_text(json.dumps(counts), encoding="utf-8")


def _count_tokens(rows: Iterable[Mapping[str, Any]], counts: Counter[str]) -> None:
    """Add the tokens and label tokens of a chunk to `counts`, which logs and `training.json` show."""
    for row in rows:
        counts["tokens"] += row["length"]
        counts["label_tokens"] += len(row["labels"]) - row["labels"].count(IGNORED)


def _merge_parts(folder: Path, schema: pa.Schema, parts: Sequence[Path]) -> None:
    """Join the parts in their order, batch by batch, so that no part is held in memory.

    The order is that of the data, whatever the number of processes, and the counts are written last: if they exist, the
    rows are complete.
    """
    import pyarrow as pa

    counts = Counter({"rows": 0})
    with new_file(folder / ROWS) as scratch, pa.ipc.new_stream(str(scratch), schema) as writer:
        for part in parts:
            counts.update(read_json(part / META))
            with pa.memory_map(str(part / ROWS)) as source, pa.ipc.open_stream(source) as batches:
                for batch in batches:
                    writer.write_batch(batch)
    write_json(folder / META, counts)


def rows_meta(dataset: Dataset) -> dict[str, int]:
    """Return the counts of `cached_rows`: `rows`, `tokens`, `label_tokens`, and those of cut and dropped data.

    A data set that `cached_rows` did not write has only its number of `rows`.
    """
    if dataset.cache_files:
        meta = _folder_of_rows(dataset) / META
        if meta.exists():
            counts: dict[str, int] = read_json(meta)
            return counts
    return {"rows": len(dataset)}


def rows_digest(dataset: Dataset) -> str:
    """Fingerprint of the content of any `datasets.Dataset`.

    Its own fingerprint would not do: `datasets` makes it of the operations, and some of them give another each time.
    """
    digest = hashlib.sha256(str(dataset.features).encode())
    for table in dataset.with_format("arrow").iter(batch_size=1000):
        for batch in table.combine_chunks().to_batches():
            digest.update(batch.serialize())
    return digest.hexdigest()


def longest_row(dataset: Dataset) -> int:
    """Tokens of the longest row; the rows need a column `length`."""
    return int(dataset.with_format("numpy")["length"][:].max())


def pack_rows(dataset: Dataset, tokens: int) -> Dataset:
    """Pack whole rows with TRL's best-fit packing, in blocks of a thousand, and cache the packs.

    Packs have `input_ids`, `labels` and `seq_lengths`, the lengths of their rows.
    """
    from datasets import Dataset
    from trl import pack_dataset

    longest = longest_row(dataset)
    if longest > tokens:
        raise ValueError(f"train.pack_tokens {tokens}: the longest sample has {longest} tokens; set at least {longest}")
    path = _folder_of_rows(dataset) / f"packs-{tokens}.arrow"

    def pack(_: Sequence[Path]) -> None:
        """Write the packed rows to `path`."""
        # TRL would silently cut rows of more tokens. `datasets` renames the file when the file is complete.
        options = {"cache_file_name": str(path), "load_from_cache_file": False, "desc": "packing"}
        pack_dataset(dataset.select_columns(["input_ids", "labels"]), tokens, "bfd", options)

    build_together(path.parent, path.name, [], pack, "packing")
    return Dataset.from_file(str(path))


def _folder_of_rows(dataset: Dataset) -> Path:
    """The folder of a data set that `cached_rows` wrote: that of its first memory-mapped file."""
    return Path(dataset.cache_files[0]["filename"]).parent
