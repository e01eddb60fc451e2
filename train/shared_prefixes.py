"""Records of one question become one sequence, in which their common beginning stands once (`models.branches`).

The loss is that of the separate records (but for dropout, which tokens in common then have in common too); what is
saved is the time for these tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from tripletune.models.graph_llm.branches import TRUNK


@dataclass
class SharedSequence:
    """Records side by side.

    Attributes:
        tokens: The trunk (a whole record), then what the other records have of their own.
        positions: Position of each token within its record.
        branches: As in `models.branches.branch_mask`.
        shared: As in `models.branches.branch_mask`.
        records: Numbers of the records, in their order in `tokens`.
        labels: Where each of them has its first label token.
    """

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    branches: list[int] = field(default_factory=list)
    shared: list[int] = field(default_factory=list)
    records: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)

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
        rows: Rows of `train.dataset.tokenize`; those with an equal `question` are put together.
        own: Token that is never shared: the placeholder, behind which each record has a graph of its own.

    Returns:
        One sequence a question; the longest record of each is its trunk.
    """
    questions: dict[int, list[int]] = {}
    for number, row in enumerate(rows):
        questions.setdefault(row["question"], []).append(number)
    sequences = []
    for numbers in questions.values():
        trunk, *others = sorted(numbers, key=lambda number: -rows[number]["length"])
        sequence = SharedSequence()
        sequence.add(trunk, rows[trunk], 0)
        for number in others:
            sequence.add(number, rows[number], _common(rows[trunk]["input_ids"], rows[number]["input_ids"], own))
        sequences.append(sequence)
    return sequences


def _common(one: Sequence[int], other: Sequence[int], own: int | None) -> int:
    """How many tokens two prompts begin with alike; the last of a prompt, which its label follows, stays its own."""
    pairs = zip(one[:-1], other[:-1])
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1] != own, pairs))
