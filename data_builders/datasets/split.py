"""Which split a row belongs to, by hashes of texts: the order of the rows does not matter.

Questions are split by a share (`split_of`), pairs by a number of validation rows (`CountedSplit`), rows of others and
the data of a run by an exact share (`validation_keys`).
"""

from __future__ import annotations

import hashlib
import heapq
import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tripletune.core.data.answers import normalize_answer

if TYPE_CHECKING:
    from tripletune.core.data.pairs import ExtractionPair

# Number of validation rows of RAS (section D.1).
PAPER_ROWS = 5_000
# At most a tenth of a small data set is for validation, so that most of it is left for training.
_LARGEST_SHARE = 10
_SPLIT_NAME = re.compile(r"\w+(\.\w+)*")


def split_of(question: str, seed: int, validation_fraction: float) -> str:
    """The split of a question: "train", or "validation" for a share of the questions.

    The split depends only on normalised text and seed: questions with the same words share a split in every build.
    """
    if drawn_number(seed, normalize_answer(question)) < validation_fraction * 2**64:
        return "validation"
    return "train"


def drawn_number(seed: int, text: str) -> int:
    """A number from 0 to 2**64 - 1, drawn by a hash of the seed and a text: the same on every machine.

    It decides the split of a row, so a change here would move rows of rebuilt data sets between training and
    validation.
    """
    return int.from_bytes(hashlib.blake2b(f"{seed}\n{text}".encode(), digest_size=8).digest())


def question_key(question: str) -> str:
    """What two forms of one question have in common; a question without letters and digits is its own key."""
    return normalize_answer(question) or question


def text_key(text: str) -> str:
    """A text without spaces, in one case and Unicode form: texts that differ only in these count as the same.

    This decides which texts are repetitions, which must not be in two splits, and by its digest which are for
    validation (`CountedSplit`): another form would move rows between the splits of rebuilt data sets.
    """
    return "".join(unicodedata.normalize("NFKC", text).casefold().split())


def validation_keys(keys: Collection[str], share: float, seed: int, source: str) -> frozenset[str]:
    """The keys of validation rows: those with the smallest hashes under the seed, at least one, never all.

    The order of the rows does not matter, and the keys hardly change when the data grow.

    Args:
        share: Share of the keys.
        source: What holds the rows, for the error.

    Raises:
        ValueError: There are fewer than two keys.
    """
    if len(keys) < 2:
        raise ValueError(
            f"{source}: the rows have {len(keys)} different questions, texts or first questions of chats, and rows "
            "with the same one stay together, so they can't be divided into training and validation: give validation "
            "data of their own, or none"
        )
    count = min(max(1, round(share * len(keys))), len(keys) - 1)
    return frozenset(heapq.nsmallest(count, keys, key=lambda key: (drawn_number(seed, key), key)))


def split_name_problems(name: str | None) -> list[str]:
    """Problems of a split's name, which is part of file names and of what `load_dataset` takes as `split`."""
    if name is None or _SPLIT_NAME.fullmatch(name):
        return []
    return [f"split_name: {name!r} must be made of letters, digits, underscores and single dots"]


class SplitPair(NamedTuple):
    """A pair, and the split that it belongs to."""

    pair: ExtractionPair
    split: str


class _Candidate(NamedTuple):
    """A pair that may be a validation row; the heap of candidates has the largest hash first, then the latest row."""

    minus_hash: int
    minus_number: int
    pair: ExtractionPair


@dataclass
class CountedSplit:
    """Assigns splits to a stream of pairs in one pass; only the validation rows are held in memory.

    The validation rows are those whose texts have the smallest hashes, so they do not depend on the order of the rows
    and hardly change when the data grows. Rows of one text share a split, so `kept` may be smaller than `rows`.

    Attributes:
        rows: Number of validation rows; None: the paper's, at most a tenth of all.
        total: Pairs that were read.
        kept: Pairs that became validation rows.
    """

    rows: int | None = None
    seed: int = 0
    total: int = 0
    kept: int = 0

    def split(self, pairs: Iterable[ExtractionPair]) -> Iterator[SplitPair]:
        """Yield the pairs with "train" or "validation"; candidates for validation come last.

        A pair becomes a training row as soon as enough pairs with smaller hashes were seen. Pairs with equal hashes
        have one text, and are moved together.
        """
        most = PAPER_ROWS if self.rows is None else self.rows
        candidates: list[_Candidate] = []
        # Pairs whose hash is at least the border are training rows.
        border = 2**64
        for pair in pairs:
            self.total += 1
            digest = drawn_number(self.seed, text_key(pair.text))
            if digest >= border:
                yield SplitPair(pair, "train")
                continue
            heapq.heappush(candidates, _Candidate(-digest, -self.total, pair))
            if len(candidates) > most:
                border = _largest_hash(candidates)
                yield from _take_largest(candidates)
        if self.rows is None:
            most = min(most, self.total // _LARGEST_SHARE)
        elif most and most >= self.total:
            raise ValueError(
                f"validation rows {most}: there are only {self.total:,} pairs; set fewer, or set split_name"
            )
        while len(candidates) > most:
            yield from _take_largest(candidates)
        self.kept = len(candidates)
        for candidate in sorted(candidates, key=lambda candidate: -candidate.minus_number):
            yield SplitPair(candidate.pair, "validation")

    def sentence(self) -> str:
        """A sentence on the split, for the card."""
        text = (
            f"Validation: the {self.kept:,} of {self.total:,} pairs whose texts have the smallest hashes under seed "
            f"{self.seed}; no text is in both splits."
        )
        if self.rows is None and self.kept < PAPER_ROWS:
            text += f" The paper keeps {PAPER_ROWS:,} pairs; this data set is small, so a tenth is kept."
        return text


def _largest_hash(candidates: list[_Candidate]) -> int:
    """The largest hash among the candidates; hashes are stored negative, so that the heap has this one first."""
    return -candidates[0].minus_hash


def _take_largest(candidates: list[_Candidate]) -> Iterator[SplitPair]:
    """Take all pairs with the largest hash out of the heap for training: the pairs of one text stay together."""
    largest = _largest_hash(candidates)
    while candidates and _largest_hash(candidates) == largest:
        yield SplitPair(heapq.heappop(candidates).pair, "train")
