"""Deal the rows of an epoch to several processes so that each row counts once.

accelerate gives all processes full batches, and repeats rows of the epoch's start for this. With its `even_batches:
false`, one process would have a batch fewer, and the others would wait for it for ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, Sampler

from tripletune.core import libraries
from tripletune.core.data.records import IGNORED
from tripletune.train.rows.cache import Row

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import Trainer

    from tripletune.train.rows.sampling import EpochSampler


class EvenBatches(Sampler[list[int]]):
    """Batches in turn for each process; the last round divides the rows that are left.

    If fewer rows are left than there are processes, the others get row 0 without labels, as the number `filler`.

    Args:
        order: The order of the rows in an epoch.
        size: Rows per batch.
        world: Number of processes.
        filler: The number of rows.
    """

    # accelerate reads these two: batches have several sizes, and none is left out.
    batch_size = None
    drop_last = False

    def __init__(self, order: EpochSampler, size: int, world: int) -> None:
        self.order = order
        self.size = size
        self.world = world
        self.filler = len(order)

    def __len__(self) -> int:
        """Number of batches of all processes together."""
        rounds = -(-len(self.order) // (self.size * self.world))
        return rounds * self.world

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches of all processes in turn, so that every process gets one in each round.

        In the last round, the first processes get a row more than the others if the rows cannot be divided.
        """
        order = list(self.order)
        per_round = self.size * self.world
        for start in range(0, len(order), per_round):
            rows = order[start : start + per_round]
            share, larger = divmod(len(rows), self.world)
            begin = 0
            for process in range(self.world):
                end = begin + share + (process < larger)
                yield rows[begin:end] or [self.filler]
                begin = end


class _WithFiller:
    """Rows, and behind them row 0 without labels, which changes neither loss nor gradient.

    Rows that never have labels, such as prompts, are repeated unchanged.
    """

    def __init__(self, rows: Dataset) -> None:
        self.rows = rows

    def __len__(self) -> int:
        """Number of rows, the filler not among them."""
        return len(self.rows)

    def __getitems__(self, numbers: Sequence[int]) -> list[Row]:
        """The rows of a batch; PyTorch's loader calls this. A batch of the filler has no other row."""
        if numbers[0] < len(self.rows):
            return list(self.rows.__getitems__(list(numbers)))
        row = dict(self.rows[0])
        for name in ("labels", "rejected_labels"):
            if name in row:
                row[name] = [IGNORED] * len(row[name])
        return [row]


def even_loader(trainer: Trainer, order: EpochSampler) -> DataLoader[Any]:
    """The loader of a trainer's rows on several processes; accelerate takes every batch of this process from it.

    In the last round the processes share the rows that are left (`EvenBatches`), so none is dropped or counted twice.
    """
    args = trainer.args
    seed_worker = libraries.take("transformers.trainer_utils:seed_worker")
    loader: DataLoader[Any] = DataLoader(
        _WithFiller(trainer.train_dataset),  # type: ignore[arg-type]
        batch_sampler=EvenBatches(order, args.train_batch_size, args.world_size),
        collate_fn=trainer.data_collator,
        num_workers=args.dataloader_num_workers,
        pin_memory=args.dataloader_pin_memory,
        worker_init_fn=partial(seed_worker, num_workers=args.dataloader_num_workers, rank=args.process_index),
    )
    # accelerate refuses batches of several sizes otherwise.
    trainer.accelerator.even_batches = False
    prepared: DataLoader[Any] = trainer.accelerator.prepare(loader)
    return prepared
