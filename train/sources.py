"""The data of a run: examples streamed from files, folders of shards, and data sets of the hub."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tripletune.core import libraries
from tripletune.core.data.fields import NotedRow, unread_columns, unread_note
from tripletune.core.data.jsonl import record_files, shards_of, stored_parts, stored_rows
from tripletune.core.files import file_digest

if TYPE_CHECKING:
    from tripletune.core.rows import DataSet
    from tripletune.train.settings import DataSection

# A stored row after its location: file and line, or data set and number.
_LocatedRow = tuple[str, dict[str, Any]]
# Makes rows of a part of the examples, and counts what it leaves out or cuts.
_MakeOfPart = Callable[[Iterable[Any], Counter[str]], Iterator[Mapping[str, Any]]]
# The beginning of the name of a count: rows of a file with a column that is not read.
_UNREAD = "unread column "
_HELD_OUT = "left_out_as_validation_data"
# The count of examples with a rejected reply.
REJECTED_REPLIES = "rejected_replies"
# The number of 64-bit hashes.
_HASHES = 1 << 64


class PlaceAndShare(NamedTuple):
    """A file, folder or data set of the hub, and the share of its questions or texts to take, above 0 and at most 1."""

    path: str
    share: float


def place_and_share(place: str) -> PlaceAndShare:
    """Read an item of `data.train`: PLACE, or PLACE=SHARE.

    A text after "=" that is no number is part of the path, since paths may hold equals signs.

    Raises:
        ValueError: The share is a number out of range.
    """
    folder, equals, number = place.rpartition("=")
    if not equals:
        return PlaceAndShare(place, 1.0)
    try:
        share = float(number)
    except ValueError:
        return PlaceAndShare(place, 1.0)
    if not 0 < share <= 1:
        raise ValueError(f"{place!r}: the share must be above 0 and at most 1")
    return PlaceAndShare(folder, share)


@dataclass
class _Notes:
    """What was noticed while a part was read: counts of rows and examples, and held-out keys that examples have."""

    counts: Counter[str] = field(default_factory=Counter)
    held_out: set[str] = field(default_factory=set)


def _no_keys(example: object) -> tuple[str, ...]:
    """The keys of examples that share nothing with others, so none is ever held out."""
    return ()


@dataclass(frozen=True)
class Examples:
    """Examples streamed from files, or from one split of folders.

    Attributes:
        read: Makes an example, or a list of examples, from a row and its location (file and line), like
            `Record.from_json`.
        places: Files, folders or data sets of the hub, each with the share of questions or texts to take.
        split: Name of the shards to read in a folder, and of the split of a data set of the hub.
        limit: The number of examples to take of each place; None for all.
        keep: Tells whether to take an example; None keeps all.
        selection: Settings of `keep`, for the digest.
        left_out: Name of the count of examples that `keep` leaves out; "" if they belong to other tasks.
        name: What the examples are called in error messages.
        keys_of: Texts that an example shares with examples of the same question or text.
        held_out: Keys of the validation data. Examples with one of them are left out.
        pairs: Whether a run needs a rejected reply in each row (`train.preference`).
    """

    read: Callable[[dict[str, Any], str], Any]
    places: tuple[PlaceAndShare, ...]
    split: str
    limit: int | None = None
    keep: Callable[[Any], bool] | None = None
    selection: tuple[Any, ...] = ()
    left_out: str = ""
    name: str = "records"
    keys_of: Callable[[Any], Iterable[str]] = _no_keys
    held_out: frozenset[str] = frozenset()
    pairs: bool = False

    def __iter__(self) -> Iterator[Any]:
        """Yield all examples, in the order of the places and rows."""
        for examples in self.parts(whole=True):
            yield from examples

    def parts(self, whole: bool = False) -> Iterator[Iterator[Any]]:
        """Yield the examples in independent parts; a place is one part with `whole`, or if there is a limit."""
        for examples, _ in self._noted_parts(whole):
            yield examples

    def works(self, make: _MakeOfPart) -> Iterator[Callable[[Counter[str]], Iterator[Mapping[str, Any]]]]:
        """Yield for each part a function that makes its rows with `make`, for `train.rows.cache.cached_rows`.

        The functions also count the examples that are left out because they are validation data, and the rows with
        columns that are not read (`unread_warnings`).
        """
        for examples, notes in self._noted_parts(whole=False):
            yield partial(_made_and_counted, make, examples, notes)

    def _noted_parts(self, whole: bool) -> Iterator[tuple[Iterator[Any], _Notes]]:
        """Yield the examples of each part, with notes that are filled while the examples are read.

        With a limit, a place is one part: the first N examples of several parts would not be the first N of the place.
        """
        for place in self.places:
            is_one_part = whole or self.limit is not None
            for rows in _row_parts(place.path, self.split, is_one_part):
                notes = _Notes()
                yield islice(self._examples_taken(rows, place, notes), self.limit), notes

    def _examples_taken(self, rows: Iterable[_LocatedRow], place: PlaceAndShare, notes: _Notes) -> Iterator[Any]:
        """Yield the examples of rows that are in the share of their place, not held out, and that `keep` takes.

        A row may give several examples, as a stored question with steps gives the records of all its steps.
        """
        for where, row in rows:
            # It notes which columns `read` asks for, so the rest can be named in a warning.
            noted = NotedRow(row)
            made = self.read(noted, where)
            file = Path(where.rpartition(":")[0]).name
            for column in unread_columns(noted):
                notes.counts[f"{_UNREAD}{column} of {file}"] += 1
            examples = made if isinstance(made, list) else [made]
            for example in examples:
                if not self._is_in_share(example, place.share):
                    continue
                if self.keep is not None and not self.keep(example):
                    if self.left_out:
                        notes.counts[self.left_out] += 1
                    continue
                if self.pairs and not example.rejected:
                    raise ValueError(
                        f"{where}: train.preference learns from pairs, but the row has no rejected reply: name data "
                        "with chosen and rejected replies (docs/guide/own_data.md#pairs-of-replies-dpo; `tripletune "
                        "build trajectories --pairs` makes them of runs), or leave train.preference out to learn the "
                        "replies alone"
                    )
                held_out_keys = self.held_out.intersection(self.keys_of(example))
                if held_out_keys:
                    notes.held_out |= held_out_keys
                    notes.counts[_HELD_OUT] += 1
                else:
                    if self._is_mixed:
                        notes.counts[f"from {place.path}"] += 1
                    if getattr(example, "rejected", ""):
                        notes.counts[REJECTED_REPLIES] += 1
                    yield example

    @property
    def _is_mixed(self) -> bool:
        """Whether it is worth counting how many examples each place gives: there are several, or a share of one."""
        return len(self.places) > 1 or self.places[0].share < 1

    def _is_in_share(self, example: Any, share: float) -> bool:
        """Whether an example is in the share of its place, drawn by a hash of its question or text.

        Either all or none of a question's examples are taken, whatever the order of the file; half of the questions are
        among three quarters of them, so runs with growing shares can be compared.
        """
        if share == 1:
            return True
        key = next(iter(self.keys_of(example)), None)
        if key is None:
            raise ValueError(f"a share of {self.name} is drawn by the question or text: give the task keys_of")
        digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
        return int.from_bytes(digest) < share * _HASHES

    @cached_property
    def digest(self) -> str:
        """Fingerprint of the files' content, of the selection, and of what is held out of these files."""
        contents = [(share, _digests_of_place(path, self.split)) for path, share in self.places]
        about: tuple[Any, ...] = (contents, self.split, self.limit, self.selection)
        held_out = self._held_out_keys()
        if held_out:
            # Other validation data leave the fingerprint as it is, so that a resumed run may get them.
            about = (*about, held_out)
        return hashlib.sha256(repr(about).encode()).hexdigest()

    def _held_out_keys(self) -> list[str]:
        """The keys of `held_out` that examples have, sorted; all examples are read for it."""
        keys: set[str] = set()
        if self.held_out:
            for examples, notes in self._noted_parts(whole=True):
                for _ in examples:
                    pass
                keys |= notes.held_out
        return sorted(keys)

    def keys(self) -> frozenset[str]:
        """The keys of all examples, whatever the limit, so that training and validation never share one."""
        keys: set[str] = set()
        for example in replace(self, limit=None):
            keys.update(self.keys_of(example))
        return frozenset(keys)

    def divided(self, data: DataSection, seed: int) -> Sources:
        """Divide examples into training and validation (`data.validation_share`), with no key in both.

        Keys are drawn with the seed, and not examples: several examples of a question or text would otherwise stand on
        both sides. See `data_builders.datasets.split.validation_keys`.

        Raises:
            ValueError: A place has validation shards already, or too few keys to divide.
        """
        from tripletune.data_builders.datasets.split import validation_keys

        share = data.validation_share or 0.0
        for path, _ in self.places:
            if has_split(path, data.validation_split):
                raise ValueError(
                    f"data.validation_share: {path} has validation shards already: leave data.validation_share out, or "
                    "name a training file of the folder as data.train"
                )
        name = f"data.validation_share: {', '.join(self.paths)}"
        held_out = validation_keys(self.keys(), share, seed, name)

        def keep(example: Any) -> bool:
            """Take an example for validation that these examples have and that has a drawn key."""
            is_kept = self.keep is None or self.keep(example)
            return is_kept and not held_out.isdisjoint(self.keys_of(example))

        selection = (*self.selection, "validation_share", share, seed)
        validation = replace(self, limit=data.max_validation_records, keep=keep, selection=selection)
        # The keys of `validation` and not those drawn: a validation example may have further keys, which training must
        # not have either.
        return Sources(replace(self, held_out=validation.keys()), validation)

    @property
    def paths(self) -> list[str]:
        """The places without their shares; data sets of the hub as URLs, by which the model card names them."""
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
        left_out = " but those of the validation data" if self.held_out else ""
        raise ValueError(f"{', '.join(self.paths)} (split {self.split!r}) holds no {self.name}{left_out}")


def _made_and_counted(
    make: _MakeOfPart, examples: Iterable[Any], notes: _Notes, counts: Counter[str]
) -> Iterator[Mapping[str, Any]]:
    """Make the rows of a part, then add its notes, which are complete only when all examples were read."""
    yield from make(examples, counts)
    counts.update(notes.counts)


def is_unread_count(name: str) -> bool:
    """Whether a count of `train.rows.cache.rows_meta` is of a column that is not read; these get a warning instead."""
    return name.startswith(_UNREAD)


def unread_warnings(counts: Mapping[str, int]) -> Iterator[str]:
    """Yield a line per file whose rows have columns that are not read, given the counts of the rows made of them."""
    by_file: dict[str, dict[str, int]] = {}
    for name, count in sorted(counts.items()):
        if is_unread_count(name):
            column, _, file = name.removeprefix(_UNREAD).rpartition(" of ")
            by_file.setdefault(file, {})[column] = count
    for file, rows_of_column in by_file.items():
        yield unread_note(file, rows_of_column)


class Sources(NamedTuple):
    """The data of a run.

    Attributes:
        train: `Examples`, or for reinforcement learning `train.tasks.grpo.LoopQuestions`; None for a run with given
        rows.
        validation: Examples to evaluate on; None for a run without evaluations, or with given rows.
    """

    train: Any
    validation: Examples | None


def _digests_of_place(path: str, split: str) -> list[str] | str:
    """Digests of the files of a place, or the fingerprint of a data set that only `datasets` reads."""
    dataset = _dataset_of_place(path, split)
    if dataset is None:
        return [file_digest(file) for file in record_files(path, split)]
    return dataset.content


def _row_parts(path: str, split: str, whole: bool) -> Iterator[Iterator[_LocatedRow]]:
    """Yield the rows of a place, each with its location, in one part (`whole`) or in several independent parts.

    Parts are tokenised by several processes at once. Their order is that of the rows, whatever their number.
    """
    from tripletune.core.rows import file_rows, is_in_one_part

    dataset = _dataset_of_place(path, split)
    if dataset is not None:
        yield dataset.rows()
    elif is_in_one_part(Path(path)):
        yield file_rows(Path(path))
    elif whole:
        yield stored_rows(path, split)
    else:
        yield from stored_parts(path, split)


@cache
def _dataset_of_place(path: str, split: str) -> DataSet | None:
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
    """Whether a folder has shards of a split at its top; False for a file or a name of the hub."""
    return Path(path).is_dir() and bool(shards_of(Path(path), split))
