"""What a thing to train has to say; `train.run` and `train.engine` do the rest, alike for all.

A file in `train/tasks/` is found by its place: it makes a subclass of `TrainingTask` and names it `TASK`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from tripletune.models.data.records import record_files
from tripletune.models.files import file_digest
from tripletune.train.config import RunConfig

# Scores of a model, by name. It is given the model without what is put around it to train on several devices, the
# index of this process and how many there are.
Scorer = Callable[[Any, int, int], dict[str, float]]


@dataclass(frozen=True)
class Examples:
    """Examples of files, or of one split of folders, read as a stream.

    Attributes:
        read: Reads a file, or a folder's split.
        places: Files or folders, each with the share of it that is taken.
        split: Shards of folders.
        limit: Most examples of a place; None takes all.
        keep: Whether an example is taken, given its place's share.
        selection: What `keep` depends on, for the digest.
        what: What the examples are called.
    """

    read: Callable[[str, str | None], Iterator[Any]]
    places: tuple[tuple[str, float], ...]
    split: str
    limit: int | None = None
    keep: Callable[[Any, float], bool] | None = None
    selection: tuple[Any, ...] = ()
    what: str = "records"

    def __iter__(self) -> Iterator[Any]:
        for path, share in self.places:
            found = self.read(path, self._split(path))
            keep = self.keep
            yield from islice((one for one in found if keep is None or keep(one, share)), self.limit)

    @cached_property
    def digest(self) -> str:
        """Fingerprint of the files' content and of the selection."""
        files = [
            (share, [file_digest(file) for file in record_files(path, self._split(path))])
            for path, share in self.places
        ]
        return hashlib.sha256(repr((files, self.split, self.limit, self.selection)).encode()).hexdigest()

    @property
    def paths(self) -> list[str]:
        """The places."""
        return [path for path, _ in self.places]

    def check(self) -> None:
        """Make sure that there is a first example and that it can be read.

        Raises:
            FileNotFoundError: a file or folder is not there.
            ValueError: there is none, or the first one is not well formed.
        """
        if next(iter(self), None) is None:
            raise ValueError(f"{', '.join(self.paths)} (split {self.split!r}) holds no {self.what}")

    def _split(self, path: str) -> str | None:
        return self.split if Path(path).is_dir() else None


class TrainingTask:
    """A thing to train.

    A subclass sets `Config` and gives `sources`, `load`, `rows` and `collator`; the other methods have a default.

    Attributes:
        Config: Settings of a run.
        unit: What a row is called in logs and results.
        config: The run.
        model: From `load`, once the run has begun.
        processor: Likewise.
        train: Training rows, a `datasets.Dataset` with a column `length` in tokens, once they are made.
        validation: Likewise, or None.
    """

    Config: ClassVar[type[RunConfig]] = RunConfig
    unit: ClassVar[str] = "rows"
    model: Any
    processor: Any
    train: Any
    validation: Any = None

    def __init__(self, config: Any) -> None:
        self.config = config

    @cached_property
    def sources(self) -> tuple[Examples, Examples | None]:
        """Training and validation data."""
        raise NotImplementedError

    def load(self) -> tuple[Any, Any]:
        """The model as it is trained, and its tokenizer or processor."""
        raise NotImplementedError

    def rows(self, source: Examples, cache: Path) -> Any:
        """The rows of a source, tokenised once; see `train.batches.cached_rows`.

        Args:
            source: One of `sources`.
            cache: Folder of such rows.
        """
        raise NotImplementedError

    def collator(self) -> Callable[[list[dict[str, Any]]], dict[str, Any]]:
        """What makes a batch of rows: the model's inputs, `labels` (-100 where nothing is learned) among them."""
        raise NotImplementedError

    def scorer(self) -> Scorer | None:
        """Scores the model at every evaluation, besides its loss."""
        return None

    def save(self, folder: Path) -> None:
        """Write what a checkpoint needs beside the weights to load by itself; called on the first process alone."""
        self.processor.save_pretrained(folder)

    def sampler(self, rows: Any, micro_batch: int, per_step: int) -> Any:
        """The order of the rows.

        Args:
            rows: Training rows.
            micro_batch: Rows of a device and micro-batch.
            per_step: Rows of an optimiser step.

        Returns:
            A sampler with `set_epoch`.
        """
        from tripletune.train.sampling import EpochSampler

        lengths = rows.with_format("numpy")["length"][:]
        return EpochSampler(lengths, per_step, self.config.seed, self.config.train.group_by_length)

    def trainer(self) -> Any:
        """The engine of the run: `train.engine.Engine`, or a trainer with its mixin."""
        from tripletune.train.engine import Engine

        return Engine(self)

    def loss(self) -> Callable[..., Any] | None:
        """Loss of outputs and labels, where the model's own will not do."""
        return None

    def facts(self) -> dict[str, Any]:
        """More about the training, for `training.json`."""
        return {}

    def warnings(self) -> list[str]:
        """What is odd about the rows, said before training."""
        return []

    # What a dry run shows

    def steps_per_epoch(self, per_step: int) -> int:
        """Optimiser steps of an epoch, given the rows of a step on all devices."""
        return -(-len(self.train) // per_step)

    def notes(self) -> list[str]:
        """More lines about the steps."""
        return []

    def example(self) -> tuple[list[int], list[int]]:
        """Tokens and labels of the first row."""
        return list(self.train[0]["input_ids"]), list(self.train[0]["labels"])

    # What several tasks need

    def source_pair(self, read: Callable[..., Any], **options: Any) -> tuple[Examples, Examples | None]:
        """Training and validation data of one place each; validation is optional where no such shards exist.

        Args:
            read: Reads a file, or a folder's split.
            **options: More of `Examples`.
        """
        data = self.config.data
        train = Examples(read, ((data.train, 1.0),), data.train_split, data.max_train_records, **options)
        place = data.validation or (data.train if Path(data.train).is_dir() else None)
        if place is None:
            return train, None
        found = Examples(read, ((place, 1.0),), data.validation_split, data.max_validation_records, **options)
        if data.validation is None:
            try:
                next(iter(found), None)
            except FileNotFoundError:
                return train, None
        return train, found
