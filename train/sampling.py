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
        seed: Seed.
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

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        generator = self._generator()
        order = torch.randperm(len(self.lengths), generator=generator)
        if not self.group_by_length:
            return iter(order.tolist())
        block = 50 * self.batch_size
        batches: list[list[int]] = []
        for start in range(0, len(order), block):
            part = order[start : start + block]
            part = part[torch.argsort(self.lengths[part], descending=True, stable=True)]
            batches += [part[at : at + self.batch_size].tolist() for at in range(0, len(part), self.batch_size)]
        return self._shuffled(batches, generator)

    def _shuffled(self, batches: list[list[int]], generator: torch.Generator) -> Iterator[int]:
        # The incomplete batch stays last: elsewhere it would shift the borders of all that follow.
        tail = [batches.pop()] if batches and len(batches[-1]) < self.batch_size else []
        shuffled = [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()] + tail
        return iter([index for batch in shuffled for index in batch])


class QuestionSampler(EpochSampler):
    """Shuffles questions every epoch; the records of one stay together.

    A batch takes the question with the most records that still fits, until it is full. Where none fits, as after three
    records in a batch of four, a question is divided between two batches.

    Args:
        questions: Number of each record's question.
        batch_size: Records of a micro-batch.
        seed: Seed.
    """

    def __init__(self, questions: Sequence[int], batch_size: int, seed: int) -> None:
        super().__init__([1] * len(questions), batch_size, seed, group_by_length=False)
        self.questions: dict[int, list[int]] = {}
        for record, question in enumerate(questions):
            self.questions.setdefault(int(question), []).append(record)

    def __iter__(self) -> Iterator[int]:
        generator = self._generator()
        groups = list(self.questions.values())
        chosen = [groups[number] for number in torch.randperm(len(groups), generator=generator).tolist()]
        waiting: dict[int, list[list[int]]] = {}
        for group in chosen:
            if len(group) > self.batch_size:
                # Its records do not all meet: let others meet in every epoch.
                group = [group[place] for place in torch.randperm(len(group), generator=generator).tolist()]
            waiting.setdefault(len(group), []).append(group)
        order: list[int] = []
        while waiting:
            room = self.batch_size - len(order) % self.batch_size
            size = max([size for size in waiting if size <= room] or waiting)
            group = waiting[size].pop()
            if not waiting[size]:
                del waiting[size]
            order += group[:room]
            if size > room:
                waiting.setdefault(size - room, []).append(group[room:])
        batches = [order[at : at + self.batch_size] for at in range(0, len(order), self.batch_size)]
        return self._shuffled(batches, generator)


class RepeatedSteps(Sampler[int]):
    """An order of rows in which the rows of each rollout come once for each of its micro-batches.

    TRL replies to all prompts of a rollout, which is for one optimiser step or several, at its first micro-batch, and
    splits the replies among the others. Rows that do not fill a rollout are left out of the epoch.

    Args:
        order: The order of the rows.
        rows: Rows of a rollout.
        times: Micro-batches of a rollout.
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
