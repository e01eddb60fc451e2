"""The order of rows in training, which depends only on seed and epoch, so that a resumed run continues in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import Sampler

# Groups of rows that are sorted by length together.
_GROUPS_PER_BLOCK = 50
# Epochs between the seeds of two runs with neighbouring seeds: more than any run has.
_EPOCHS_PER_SEED = 1_000_003


class EpochSampler(Sampler[int]):
    """Shuffles every epoch; optionally keeps rows of similar length together.

    The order depends only on seed and epoch, so a resumed run sees the same order. The order of transformers'
    `LengthGroupedSampler` depends on the global random state.

    Args:
        lengths: Tokens of each row.
        batch_size: Rows per group. A step combines random groups, because length can reveal the label: after a long
            history, a plan is often the last plan.
        group_by_length: Sort by length within blocks of fifty groups, then shuffle the groups.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int, group_by_length: bool = True) -> None:
        self.lengths = torch.as_tensor(lengths, dtype=torch.long)
        self.batch_size = batch_size
        self.seed = seed
        self.group_by_length = group_by_length
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration."""
        self.epoch = int(epoch)

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        """Yield the rows of the current epoch, which `set_epoch` chooses."""
        return iter(self._rows_in_order())

    def _rows_in_order(self) -> list[int]:
        """The rows of the current epoch in their order.

        Drawn with a generator of its own, so that the order neither depends on the global random state nor changes it.
        """
        generator = torch.Generator().manual_seed(self.seed * _EPOCHS_PER_SEED + self.epoch)
        shuffled = torch.randperm(len(self.lengths), generator=generator)
        if not self.group_by_length:
            return list(shuffled.tolist())
        groups = self._groups_of_similar_length(shuffled)
        # The incomplete group stays last: elsewhere it would shift the borders of all groups after it.
        incomplete: list[int] = []
        if groups and len(groups[-1]) < self.batch_size:
            incomplete = groups.pop()
        order: list[int] = []
        for number in torch.randperm(len(groups), generator=generator).tolist():
            order += groups[number]
        return order + incomplete

    def _groups_of_similar_length(self, shuffled: torch.Tensor) -> list[list[int]]:
        """Split shuffled rows, (N,), into groups of similar length; only the last group can be incomplete."""
        groups: list[list[int]] = []
        for block in shuffled.split(_GROUPS_PER_BLOCK * self.batch_size):
            by_length = block[torch.argsort(self.lengths[block], descending=True, stable=True)]
            groups += [group.tolist() for group in by_length.split(self.batch_size)]
        return groups


class RepeatedSteps(Sampler[int]):
    """Repeats the rows of a rollout once per micro-batch of the rollout.

    A rollout lasts one or more optimiser steps. At its first micro-batch, TRL generates replies to all its prompts and
    splits the replies among its micro-batches. Rows that do not fill a rollout are left out of the epoch.

    Args:
        order: The order of the rows in an epoch.
        rows: Rows of a rollout.
        times: Micro-batches of a rollout.
        copies: Number of replies to each row, which GRPO compares; the copies of a row are adjacent.
    """

    def __init__(self, order: EpochSampler, rows: int, times: int, copies: int = 1) -> None:
        self.order = order
        self.rows = rows
        self.times = times
        self.copies = copies

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration."""
        self.order.set_epoch(epoch)

    def __len__(self) -> int:
        """Number of rows that an iteration yields, those of incomplete rollouts left out."""
        rollouts = len(self.order) // self.rows
        return rollouts * self.rows * self.times * self.copies

    def __iter__(self) -> Iterator[int]:
        """Yield each rollout's rows once per micro-batch, which is as often as TRL asks for them."""
        order = list(self.order)
        # Ends before an incomplete rollout.
        for start in range(0, len(order) - self.rows + 1, self.rows):
            rollout = order[start : start + self.rows]
            for _ in range(self.times):
                for row in rollout:
                    yield from [row] * self.copies
