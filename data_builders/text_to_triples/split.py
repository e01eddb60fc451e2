"""Splits a stream into training and a *count* of validation rows, in one pass and with memory for that count alone.

Every text has a hash, of the seed and its letters. The validation rows are those with the smallest hashes: the same
ones in whatever order the rows come, and nearly the same ones when the data grows. Rows of one text fall on one side.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tripletune.data_builders.text_to_triples.cleaning import text_key
from tripletune.models.data.pairs import ExtractionPair

PAPER_ROWS = 5_000
# A small data set would have nothing left to train on.
_LARGEST_SHARE = 10


@dataclass
class CountedSplit:
    """Gives a stream of pairs their splits.

    Args:
        rows: Validation rows to keep; None: the paper's 5,000 (section D.1), at most a tenth of all rows.
        seed: Seed of the hash.

    Attributes:
        total: Pairs seen.
        kept: Validation rows; fewer than asked for when one text has several rows at the border.

    Raises:
        ValueError: a negative number of rows.
    """

    rows: int | None = None
    seed: int = 0
    total: int = 0
    kept: int = 0

    def __post_init__(self) -> None:
        if self.rows is not None and self.rows < 0:
            raise ValueError(f"validation rows {self.rows}: it must be 0 or more")

    def split(self, pairs: Iterable[ExtractionPair]) -> Iterator[tuple[ExtractionPair, str]]:
        """Yield the pairs with "train" or "validation"; a pair that may be for validation waits for the end.

        Raises:
            ValueError: as many validation rows were asked for as there are rows, or more.
        """
        most = PAPER_ROWS if self.rows is None else self.rows
        # A heap of (minus the hash, minus the number, pair): the largest hash of those kept stands first.
        heap: list[tuple[int, int, ExtractionPair]] = []
        border = 2**64
        for pair in pairs:
            self.total += 1
            number = self._hash(pair.text)
            if number >= border:
                yield pair, "train"
                continue
            heapq.heappush(heap, (-number, -self.total, pair))
            if len(heap) > most:
                border = -heap[0][0]
                yield from _from_border(heap, border)
        if self.rows is None:
            most = min(most, self.total // _LARGEST_SHARE)
        elif most and most >= self.total:
            raise ValueError(
                f"validation rows {most}: there are only {self.total:,} pairs; ask for fewer, or for a split name"
            )
        while len(heap) > most:
            yield from _from_border(heap, -heap[0][0])
        self.kept = len(heap)
        for _, _, pair in sorted(heap, key=lambda entry: -entry[1]):
            yield pair, "validation"

    def sentence(self) -> str:
        """How the split was made, for the card."""
        text = (
            f"Validation: the {self.kept:,} of {self.total:,} pairs whose texts have the smallest hashes under seed "
            f"{self.seed}; no text is on both sides."
        )
        if self.rows is None and self.kept < PAPER_ROWS:
            text += f" The paper keeps {PAPER_ROWS:,}; here it is a tenth, since there are few pairs."
        return text

    def _hash(self, text: str) -> int:
        return int.from_bytes(hashlib.blake2b(f"{self.seed}\n{text_key(text)}".encode(), digest_size=8).digest())


def _from_border(heap: list[tuple[int, int, ExtractionPair]], border: int) -> Iterator[tuple[ExtractionPair, str]]:
    """Take all pairs with the largest hash out of the heap, so that no text is divided."""
    while heap and -heap[0][0] >= border:
        yield heapq.heappop(heap)[2], "train"
