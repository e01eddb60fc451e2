"""`tripletune data {stats,validate,peek}` on a folder of text-to-triples pairs; it is streamed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from tripletune.data_builders.datasets.shards import STATISTICS, dataset_files
from tripletune.data_builders.datasets.validation import count_troubles, shard_rows
from tripletune.data_builders.text_to_triples.card import PairStatistics, pair_kind
from tripletune.data_builders.text_to_triples.cleaning import text_key
from tripletune.data_builders.text_to_triples.seen import SeenTable
from tripletune.models.data.pairs import ExtractionPair


def holds_pairs(folder: str | Path) -> bool:
    """Whether a data set holds text-to-triples pairs and no records; its first row says it.

    Raises:
        FileNotFoundError: there is no such folder, or it holds no shards.
    """
    for files in dataset_files(folder).values():
        for file in files:
            try:
                for _, row in shard_rows(file):
                    return "triples" in row and "text" in row and "question_id" not in row
            except ValueError:
                # A first line that can't be read is for the check of the kind that is expected.
                return False
    return False


class PairSplitCheck:
    """Looks for texts that stand on two sides of a split, spaces and case aside; a context manager.

    Attributes:
        found: How many pairs have a text of another split.
    """

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self._seen = SeenTable()

    def __enter__(self) -> PairSplitCheck:
        return self

    def __exit__(self, *exception: object) -> None:
        self._seen.__exit__(None, None, None)

    def add(self, pair: ExtractionPair, split: str) -> str | None:
        """The other split that has the text of a pair; None when there is none."""
        other = self._seen.first("text", text_key(pair.text), split)
        if other in (None, split):
            return None
        self.found["text"] += 1
        return other


def pair_statistics(folder: str | Path, tokenizer: str | None = None) -> tuple[PairStatistics, Counter[str]]:
    """Counts of a data set of pairs.

    Args:
        folder: The data set.
        tokenizer: As for `PairStatistics`.

    Returns:
        The statistics, and how many pairs have a text of another split.

    Raises:
        FileNotFoundError: there is no such folder, or it holds no shards.
        ValueError: a row is no pair.
    """
    statistics = PairStatistics(tokenizer)
    with PairSplitCheck() as splits:
        for split, row in _rows(folder):
            pair = ExtractionPair.from_json(*row)
            statistics.add(pair, split)
            splits.add(pair, split)
        return statistics, splits.found


def pair_troubles(folder: str | Path) -> Iterator[str]:
    """Everything that is wrong with a data set of pairs, one line each.

    Looked at: every pair by itself; ids that occur twice; texts that occur in two splits; the number of pairs against
    `statistics.json`, where there is one.

    Args:
        folder: A folder of shards.

    Raises:
        FileNotFoundError: there is no such folder, or it holds no shards.
    """
    counts: dict[str, int] = {}
    with SeenTable() as seen, PairSplitCheck() as splits:
        for split, files in dataset_files(folder).items():
            counts[split] = 0
            for file in files:
                for where, pair in _read(file):
                    counts[split] += 1
                    if isinstance(pair, str):
                        yield pair
                        continue
                    if seen.first("id", pair.id) is not None:
                        yield f"{where}: pair id {pair.id!r} occurs a second time"
                    if (other := splits.add(pair, split)) is not None:
                        yield f"{where}: the text of {pair.id!r} is in {split!r} and in {other!r}"
    yield from count_troubles(Path(folder) / STATISTICS, counts)


def find_pair(
    folder: str | Path, identity: str | None = None, number: int | None = None, split: str | None = None
) -> tuple[str, ExtractionPair]:
    """One pair of a data set, with its split.

    Args:
        folder: The data set.
        identity: The pair's id.
        number: The how-manieth pair, from 1, of those that fit the rest.
        split: Only pairs of this split.

    Raises:
        FileNotFoundError: there is no such data set.
        ValueError: no pair fits, or a row is no pair.
    """
    if number is not None and number < 1:
        raise ValueError(f"number {number}: pairs are counted from 1")
    names = list(dataset_files(folder))
    if split is not None and split not in names:
        raise ValueError(f"{folder} has no split {split!r}; it has {', '.join(names)}")
    pairs = ((name, ExtractionPair.from_json(*row)) for name, row in _rows(folder) if split in (None, name))
    fitting = ((name, pair) for name, pair in pairs if identity in (None, pair.id))
    found = next(islice(fitting, (number or 1) - 1, None), None)
    if found is None:
        asked = {"id": identity, "number": number, "split": split}
        told = ", ".join(f"{name} {value}" for name, value in asked.items() if value is not None)
        raise ValueError(f"{folder} has no pair with {told or 'anything in it'}")
    return found


def shown_pair(pair: ExtractionPair, split: str) -> str:
    """A pair as text: what it is, what the model reads, and what it learns to write."""
    names = {name for triple in pair.triples for name in (triple.subject, triple.object)}
    head = f"{pair.id}  (split {split}, source {pair.source or '-'}, {pair_kind(pair)})"
    counts = f"{len(pair.triples)} triples, {len(names)} entities"
    return f"{head}\n{counts}\n\n{pair.source_text}\n\n=> {pair.target or '(nothing: the text has no facts)'}"


def _rows(folder: str | Path) -> Iterator[tuple[str, tuple[dict[str, Any], str]]]:
    for split, files in dataset_files(folder).items():
        for file in files:
            for where, row in shard_rows(file):
                yield split, (row, where)


def _read(file: Path) -> Iterator[tuple[str, ExtractionPair | str]]:
    """Pairs with their places; in the stead of a bad one, what is wrong with it."""
    try:
        for where, row in shard_rows(file):
            try:
                yield where, ExtractionPair.from_json(row, where)
            except ValueError as error:
                yield where, str(error)
    except ValueError as error:
        yield str(file), str(error)
