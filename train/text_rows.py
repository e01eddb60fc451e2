"""Rows of text, tokenised once: a memory-mapped Arrow file in the run's cache folder, and packs of several rows.

A file's name is made of everything it depends on, so a second run or a resumed one opens it at once. Rows are streamed
to disk, and memory does not grow with their number.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tripletune.models.data.records import record_files

logger = logging.getLogger(__name__)
ROWS, META = "rows.arrow", "meta.json"
IGNORED = -100


def cached_rows(key: Sequence[Any], cache: Path, rows: Callable[[Counter[str]], Iterator[Mapping[str, Any]]]) -> Any:
    """Write rows once and open them memory-mapped.

    Args:
        key: JSON data that the rows depend on: the data's digest, settings, template, tokenizer.
        cache: Folder of such files.
        rows: Makes the rows: mappings with `input_ids`, `labels` (-100 where nothing is learned) and `length`, the
            tokens of the row, source and target together where they are apart. It counts what it leaves out or cuts in
            the counter it is given, which `rows_meta` shows.

    Returns:
        A `datasets.Dataset` with these columns.

    Raises:
        ValueError: there are no rows.
    """
    from datasets import Dataset, Features, Value
    from datasets import Sequence as ListOf
    from datasets.arrow_writer import ArrowWriter
    from tqdm.auto import tqdm

    folder = cache / f"tokens-{hashlib.sha256(json.dumps(list(key), sort_keys=True).encode()).hexdigest()[:16]}"
    if (folder / META).exists():
        return Dataset.from_file(str(folder / ROWS))
    folder.mkdir(parents=True, exist_ok=True)
    columns = {"input_ids": ListOf(Value("int32")), "labels": ListOf(Value("int32")), "length": Value("int32")}
    counts: Counter[str] = Counter()
    written = tokens = learned = 0
    writer = ArrowWriter(path=str(folder / ROWS), features=Features(columns), writer_batch_size=512)
    for row in tqdm(rows(counts), desc="tokenising", unit=" rows", disable=None):
        ids, labels = row["input_ids"], row["labels"]
        writer.write({"input_ids": ids, "labels": labels, "length": row["length"]})
        written, tokens = written + 1, tokens + row["length"]
        learned += sum(label != IGNORED for label in labels)
    if not written:
        listed = ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "nothing"
        raise ValueError(f"there are no rows to learn from ({listed})")
    writer.finalize()
    meta = {"rows": written, "tokens": tokens, "label_tokens": learned, **counts}
    scratch = folder / (META + ".tmp")
    scratch.write_text(json.dumps(meta, indent=2), encoding="utf-8")
    os.replace(scratch, folder / META)
    logger.info("tokenised: %s", ", ".join(f"{name} {count:,}" for name, count in meta.items()))
    return Dataset.from_file(str(folder / ROWS))


def rows_meta(dataset: Any) -> dict[str, int]:
    """What `cached_rows` counted: `rows`, `tokens`, `label_tokens`, and what was cut or left out."""
    meta: dict[str, int] = json.loads((_folder(dataset) / META).read_text(encoding="utf-8"))
    return meta


def pack_rows(dataset: Any, tokens: int) -> Any:
    """Lay several rows into one by TRL's best-fit packing, once; each row stays whole and apart from its neighbours.

    Rows that stand within a thousand of each other are packed together, so memory does not grow with the data.

    Args:
        dataset: From `cached_rows`.
        tokens: Most tokens of a pack.

    Returns:
        A `datasets.Dataset` with `input_ids`, `labels` and `seq_lengths`, the lengths of the rows in a pack.

    Raises:
        ValueError: a row is longer than a pack.
    """
    from datasets import Dataset

    longest = int(dataset.with_format("numpy")["length"][:].max())
    if longest > tokens:
        raise ValueError(f"train.pack_tokens {tokens}: the longest sample has {longest} tokens; give at least as many")
    path = _folder(dataset) / f"packs-{tokens}.arrow"
    if not path.exists():
        # TRL would cut a longer row silently; there is none now. `datasets` renames the file when it is complete.
        options = {"cache_file_name": str(path), "load_from_cache_file": False, "desc": "packing"}
        packed = trl_pack_dataset()(dataset.select_columns(["input_ids", "labels"]), tokens, "bfd", options)
        logger.info("packed %s samples into %s rows of at most %d tokens", len(dataset), len(packed), tokens)
    return Dataset.from_file(str(path))


def trl_pack_dataset() -> Callable[..., Any]:
    """TRL's packing.

    Raises:
        ModuleNotFoundError: TRL is not installed; the message says how to install it.
    """
    try:
        from trl import pack_dataset
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("TRL, which trains decoders, is not installed; run: pip install trl") from error
    packer: Callable[..., Any] = pack_dataset
    return packer


def files_digest(path: str | Path, split: str | None, *selection: Any) -> str:
    """Fingerprint of the content of a data file or of a folder's split, and of what is selected from it."""
    digest = hashlib.sha256(repr((split, *selection)).encode())
    for file in record_files(path, split):
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()


def _folder(dataset: Any) -> Path:
    return Path(dataset.cache_files[0]["filename"]).parent
