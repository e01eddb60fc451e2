"""Data order: a function of seed and epoch alone, so a resumed run sees the records it would have seen.

transformers' `LengthGroupedSampler` draws from the global random state, which is not what it was at the start of the
epoch when a run resumes in its middle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import Sampler


class EpochSampler(Sampler[int]):
    """Shuffles every epoch; optionally keeps records of similar length together.

    Args:
        lengths: Tokens of each record.
        batch_size: Records of an optimiser step; groups are made of this size.
        group_by_length: Sort by length within blocks of fifty batches, then shuffle the batches.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int, group_by_length: bool = True) -> None:
        self.lengths = torch.as_tensor(lengths, dtype=torch.long)
        self.batch_size = batch_size
        self.seed = seed
        self.group_by_length = group_by_length
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order comes next."""
        self.epoch = int(epoch)

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order = torch.randperm(len(self.lengths), generator=generator)
        if not self.group_by_length:
            return iter(order.tolist())
        block = 50 * self.batch_size
        batches: list[list[int]] = []
        for start in range(0, len(order), block):
            part = order[start : start + block]
            part = part[torch.argsort(self.lengths[part], descending=True, stable=True)]
            batches += [part[at : at + self.batch_size].tolist() for at in range(0, len(part), self.batch_size)]
        # The incomplete batch stays last: elsewhere it would shift the borders of all that follow.
        tail = [batches.pop()] if batches and len(batches[-1]) < self.batch_size else []
        shuffled = [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()] + tail
        return iter([index for batch in shuffled for index in batch])


class RepeatedSteps(Sampler[int]):
    """An order of rows in which the rows of each rollout come once for each of its micro-batches.

    TRL replies to all prompts of a rollout, which is for one optimiser step or several, at its first micro-batch, and
    splits the replies among the others. Rows that do not fill a rollout are left out of the epoch.

    Args:
        copies: How often a row stands there each time, one behind the other: the rollouts that GRPO compares.
    """

    def __init__(self, order: EpochSampler, rows: int, times: int, copies: int = 1) -> None:
        self.order, self.rows, self.times, self.copies = order, rows, times, copies

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order comes next."""
        self.order.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.order) // self.rows * self.rows * self.times * self.copies

    def __iter__(self) -> Iterator[int]:
        order = list(self.order)
        for start in range(0, len(order) - self.rows + 1, self.rows):
            for _ in range(self.times):
                yield from (row for row in order[start : start + self.rows] for _ in range(self.copies))
