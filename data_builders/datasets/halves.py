"""Divide the rows of a file into training and validation shards, with no question, text or chat in both.

Rows are written as they are, whatever their layout; `tripletune data split` calls this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import MISSING, dataclass
from pathlib import Path

from tripletune.core.data.fields import given
from tripletune.core.data.jsonl import stored_rows
from tripletune.core.data.pairs import Trajectory
from tripletune.core.files import json_line, new_folder
from tripletune.core.options import CheckedOptions, setting
from tripletune.core.rows import Row, source_rows
from tripletune.data_builders.datasets.split import question_key, text_key, validation_keys

_SHARDS = {"train": "train-00000.jsonl", "validation": "validation-00000.jsonl"}


@dataclass(frozen=True)
class SplitOptions(CheckedOptions):
    """Options of `tripletune data split`."""

    output: str = setting(MISSING, "folder of the two files, which data.train names then")
    validation_fraction: float = setting(
        0.05, "share of the questions, texts or chats for validation", above=0, below=1
    )
    seed: int = setting(42, "seed of the split", at_least=0)
    overwrite: bool = setting(False, "replace the two files in the output folder")


def split_rows(source: str, options: SplitOptions) -> Counter[str]:
    """Write the rows of a file, folder or data set of the Hub into two files; return the number of rows in each.

    The same questions are drawn as by `data.validation_share` with this share and seed.
    """
    keys = frozenset(row_key(row, where) for where, row in _training_rows(source))
    held_out = validation_keys(keys, options.validation_fraction, options.seed, source)
    counts: Counter[str] = Counter()
    names = tuple(_SHARDS.values())
    with new_folder(options.output, names, options.overwrite, [source]) as folder, ExitStack() as stack:
        files = {}
        for split, name in _SHARDS.items():
            files[split] = stack.enter_context((folder / name).open("w", encoding="utf-8"))
        for where, row in _training_rows(source):
            split = "validation" if row_key(row, where) in held_out else "train"
            files[split].write(json_line(row))
            counts[split] += 1
    return counts


def _training_rows(source: str) -> Iterator[tuple[str, Row]]:
    """The rows of a source after their places; of a folder of shards, those for training."""
    if Path(source).is_dir() and any(Path(source).glob("train*")):
        return stored_rows(source, "train")
    return source_rows(source)


def row_key(row: Row, where: str) -> str:
    """What rows that belong together have in common: the question, the text, or the first question of a chat.

    Chats are read as training reads them, so that both refuse the same rows. A row with a question may be of any
    training, and is not read further.
    """
    has_turns = given(row, "messages", "conversations") is not None
    if isinstance(row.get("question"), str) and not has_turns:
        return question_key(row["question"])
    if isinstance(row.get("text"), str) and not has_turns:
        return text_key(row["text"])
    return Trajectory.from_json(row, where).question_id
