"""The data of a run: examples streamed from files, folders of shards, and data sets of the hub."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tripletune.core import libraries
from tripletune.core.data.jsonl import record_files, stored_parts, stored_rows
from tripletune.core.files import file_digest

if TYPE_CHECKING:
    from datasets import Dataset

# A stored row after its location: file and line, or data set and number.
_LocatedRow = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Examples:
    """Examples streamed from files, or from one split of folders.

    Attributes:
        read: Makes an example, or a list of examples, from a row and its location (file and line), like
            `Record.from_json`.
        places: Files, folders or data sets of the hub, each with the share of examples to take.
        split: Name of the shards to read in a folder, and of the split of a data set of the hub.
        limit: The number of examples to take of each place; None for all.
        keep: Tells whether to take an example, given the `share` of its place; None keeps all.
        selection: Settings of `keep`, for the digest.
        name: What the examples are called in error messages.
    """

    read: Callable[[dict[str, Any], str], Any]
    places: tuple[tuple[str, float], ...]
    split: str
    limit: int | None = None
    keep: Callable[[Any, float], bool] | None = None
    selection: tuple[Any, ...] = ()
    name: str = "records"

    def __iter__(self) -> Iterator[Any]:
        for examples in self.parts(whole=True):
            yield from examples

    def parts(self, whole: bool = False) -> Iterator[Iterator[Any]]:
        """Yield the examples in independent parts; a place is one part with `whole`, or if there is a limit."""
        for path, share in self.places:
            for rows in _row_parts(path, self.split, whole or self.limit is not None):
                yield islice(self._examples(rows, share), self.limit)

    def _examples(self, rows: Iterable[_LocatedRow], share: float) -> Iterator[Any]:
        """Yield the examples of rows that `keep` takes.

        A row may give several examples, as a stored question with steps gives the records of all its steps.
        """
        for where, row in rows:
            made = self.read(row, where)
            examples = made if isinstance(made, list) else [made]
            for example in examples:
                if self.keep is None or self.keep(example, share):
                    yield example

    @cached_property
    def digest(self) -> str:
        """Fingerprint of the files' content and of the selection."""
        contents = [(share, _content(path, self.split)) for path, share in self.places]
        return hashlib.sha256(repr((contents, self.split, self.limit, self.selection)).encode()).hexdigest()

    @property
    def paths(self) -> list[str]:
        """The places without their shares; data sets of the hub as URLs."""
        from tripletune.core.rows import is_hub_name

        paths = []
        for path, _ in self.places:
            if is_hub_name(path):
                path = f"https://huggingface.co/datasets/{path}"
            paths.append(path)
        return paths

    def check(self) -> None:
        """Make sure that a first example exists and can be read; the others are read when they are tokenised."""
        for _ in self:
            return
        raise ValueError(f"{', '.join(self.paths)} (split {self.split!r}) holds no {self.name}")


class Sources(NamedTuple):
    """The data of a run.

    Attributes:
        train: `Examples`, or for reinforcement learning `train.tasks.grpo.LoopQuestions`; None for a run with given
        rows.
        validation: Examples to evaluate on; None for a run without evaluations, or with given rows.
    """

    train: Any
    validation: Examples | None


def _content(path: str, split: str) -> list[str] | str:
    """Digests of the files of a place, or the fingerprint of a data set of the hub."""
    from datasets import load_dataset_builder

    dataset = _dataset(path, split)
    if dataset is None:
        return [file_digest(file) for file in record_files(path, split)]
    if Path(path).is_dir():
        # The fingerprint of a folder in the hub's layout would depend on times and on its place.
        files = load_dataset_builder(path).config.data_files[split]
        return [file_digest(file) for file in files]
    return str(dataset._fingerprint)


def _row_parts(path: str, split: str, whole: bool) -> Iterator[Iterator[_LocatedRow]]:
    """Yield the rows of a place, each with its location, in one part (`whole`) or in several independent parts."""
    from tripletune.core.rows import array_opening, source_rows

    dataset = _dataset(path, split)
    if dataset is not None:
        yield ((f"{path}:row {number}", row) for number, row in enumerate(dataset, 1))
    elif array_opening(Path(path)):
        # A JSON array has no lines at which it could be split.
        yield source_rows(path)
    elif whole:
        yield stored_rows(path, split)
    else:
        yield from stored_parts(path, split)


@cache
def _dataset(path: str, split: str) -> Dataset | None:
    """Open a data set of the hub, or a folder laid out like one; return None for files and folders of shards.

    Opened once per process, because a name of the hub is a request. A folder of the hub's layout holds its files below
    `data/`; a folder with shards at its top is ours, even if it has such a sub-folder too.
    """
    from tripletune.core.rows import is_hub_name, open_dataset

    has_shards = has_split(path, split) or not (Path(path) / "data").is_dir()
    if has_shards and not is_hub_name(path):
        return None
    libraries.check_use("data sets of the hub")
    try:
        return open_dataset(path, split)
    except OSError as error:
        raise FileNotFoundError(f"no such file or folder: {path}, and no data set of the hub: {error}") from None


def has_split(path: str, split: str) -> bool:
    """Whether a folder has shards of a split."""
    folder = Path(path)
    if not folder.is_dir():
        return False
    return any(folder.glob(f"{split}*.jsonl")) or any(folder.glob(f"{split}*.parquet"))
