"""Records of one question become one sequence, in which their common beginning stands once.

`QuestionSampler` puts them into one batch, `share_prefixes` makes the sequence, and `models/training.py` the
mask with which each record sees its own tokens alone. The loss is that of the separate records (but for dropout, which
tokens in common then have in common too); what is saved is the time for these tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import torch

from tripletune.models.training import TRUNK
from tripletune.train.sampling import EpochSampler


@dataclass
class SharedSequence:
    """Records side by side.

    Attributes:
        tokens: The trunk (a whole record), then what the other records have of their own.
        positions: Position of each token within its record.
        branches: As in `models.training.branch_mask`.
        shared: As in `models.training.branch_mask`.
        records: Numbers of the records, in their order in `tokens`.
        labels: Where each of them has its first label token.
    """

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    branches: list[int] = field(default_factory=list)
    shared: list[int] = field(default_factory=list)
    records: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, number: int, row: dict[str, Any]) -> SharedSequence:
        """A record by itself."""
        sequence = cls()
        sequence.add(number, row, 0)
        return sequence

    def add(self, number: int, row: dict[str, Any], begin: int) -> None:
        """Append a record from its token `begin` on; those before it are the trunk's."""
        tokens = [*row["input_ids"], *row["label_ids"]][begin:]
        self.records.append(number)
        self.labels.append(len(self.tokens) + len(row["input_ids"]) - begin)
        self.branches += [len(self.records) - 1 + TRUNK] * len(tokens)
        self.shared += [begin] * len(tokens)
        self.positions += range(begin, begin + len(tokens))
        self.tokens += tokens


def share_prefixes(rows: Sequence[dict[str, Any]], own: int | None) -> list[SharedSequence]:
    """Put the records of each question into one sequence.

    Args:
        rows: Rows of `train.tasks.ras.encode_row`; those with an equal `question` are put together.
        own: Token that is never shared: the placeholder, behind which each record has a graph of its own.

    Returns:
        One sequence per question; the longest record of each is its trunk.
    """
    questions: dict[int, list[int]] = {}
    for number, row in enumerate(rows):
        questions.setdefault(row["question"], []).append(number)
    sequences = []
    for numbers in questions.values():
        trunk, *others = sorted(numbers, key=lambda number: -rows[number]["length"])
        sequence = SharedSequence.of(trunk, rows[trunk])
        for number in others:
            sequence.add(number, rows[number], _common(rows[trunk]["input_ids"], rows[number]["input_ids"], own))
        sequences.append(sequence)
    return sequences


def _common(one: Sequence[int], other: Sequence[int], own: int | None) -> int:
    """How many tokens two prompts begin with alike; the last of a prompt, which its label follows, stays its own."""
    pairs = zip(one[:-1], other[:-1])
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1] != own, pairs))


def tokens_saved(rows: Any, batch_size: int, seed: int, own: int | None) -> tuple[int, int, int]:
    """What shared prefixes save in the first batches, of a thousand at most.

    Args:
        rows: The training rows.
        batch_size: Records of a micro-batch.
        seed: Seed of the order.
        own: As in `share_prefixes`.

    Returns:
        Tokens with shared prefixes, tokens of the separate records, and how many records these are.
    """
    order = list(QuestionSampler.of(rows, batch_size, seed))[: 1000 * batch_size]
    shared = apart = 0
    for at in range(0, len(order), batch_size):
        batch = [rows[number] for number in order[at : at + batch_size]]
        apart += sum(row["length"] for row in batch)
        shared += sum(len(sequence.tokens) for sequence in share_prefixes(batch, own))
    return shared, apart, len(order)


class QuestionSampler(EpochSampler):
    """Shuffles questions every epoch; the records of one stay together.

    Questions with equally many records fill batches one after the other: four records to a batch of four or eight.
    Where sizes do not go together, as three records and a batch of four, questions are divided between two batches.

    Args:
        lengths: Tokens of each record.
        questions: Number of each record's question.
        batch_size: Records of a micro-batch.
        seed: Seed.
    """

    def __init__(self, lengths: Sequence[int], questions: Sequence[int], batch_size: int, seed: int) -> None:
        super().__init__(lengths, batch_size, seed, group_by_length=False)
        self.questions: dict[int, list[int]] = {}
        for record, question in enumerate(questions):
            self.questions.setdefault(int(question), []).append(record)

    @classmethod
    def of(cls, rows: Any, batch_size: int, seed: int) -> QuestionSampler:
        """The sampler of tokenised rows."""
        columns = rows.with_format("numpy")
        return cls(columns["length"][:], columns["question"][:], batch_size, seed)

    def __iter__(self) -> Iterator[int]:
        generator = self._generator()
        groups = list(self.questions.values())
        chosen = [groups[number] for number in torch.randperm(len(groups), generator=generator).tolist()]
        order: list[int] = []
        for group in sorted(chosen, key=len, reverse=True):
            if len(group) > self.batch_size:
                # Its records do not all meet: let others meet in every epoch.
                group = [group[place] for place in torch.randperm(len(group), generator=generator).tolist()]
            order += group
        batches = [order[at : at + self.batch_size] for at in range(0, len(order), self.batch_size)]
        return self._shuffled(batches, generator)
