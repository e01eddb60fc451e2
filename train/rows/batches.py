"""Pad token rows into batches; `TextCollator` also batches packs.

Shapes: B rows of a batch, T tokens of the longest row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tripletune.core.data.records import IGNORED
from tripletune.train.rows.cache import Row

# Lengths are rounded up to a multiple of this, so that compiled models see few shapes.
_MULTIPLE = 8


def pad_batch(rows: Sequence[Sequence[int]], pad: int, multiple_of: int = 1) -> torch.Tensor:
    """Pad token rows on the right to one length, a multiple of `multiple_of`: (B, T)."""
    longest = max(map(len, rows))
    length = -(-longest // multiple_of) * multiple_of
    padded = [[*row, *[pad] * (length - len(row))] for row in rows]
    return torch.tensor(padded, dtype=torch.long)


def pad_tokens(rows: Sequence[Row], pad_token_id: int) -> dict[str, torch.Tensor]:
    """Pad `input_ids` (B, T) with the padding token and `labels` (B, T) with -100."""
    return {
        "input_ids": pad_batch([row["input_ids"] for row in rows], pad_token_id, _MULTIPLE),
        "labels": pad_batch([row["labels"] for row in rows], IGNORED, _MULTIPLE),
    }


@dataclass(frozen=True)
class TextCollator:
    """Pads rows or packs of a decoder on the right.

    There is no attention mask: attention is causal and padding is on the right, so no real token sees padding. In
    packs, positions restart at each sample, and transformers' attention separates samples by their positions.

    Attributes:
        flatten: Put all packs of a batch into one row, because flash attention separates samples only within one row.
            Other kernels make a (T, T) mask, which is smaller with several rows.
    """

    pad_token_id: int
    flatten: bool = False

    def __call__(self, rows: Sequence[Row]) -> dict[str, torch.Tensor]:
        """A batch: `input_ids` (B, T), `labels` (B, T) and, for packs, `position_ids` (B, T)."""
        if "seq_lengths" not in rows[0]:
            return pad_tokens(rows, self.pad_token_id)
        if self.flatten:
            rows = [_joined_packs(rows)]
        batch = pad_tokens(rows, self.pad_token_id)
        width = batch["input_ids"].shape[1]
        batch["position_ids"] = torch.stack([_positions_in_pack(row, width) for row in rows])
        # The first token of a sample would be predicted from the last token of the sample before it.
        batch["labels"][batch["position_ids"] == 0] = IGNORED
        return batch


def _joined_packs(packs: Sequence[Row]) -> Row:
    """One pack with the samples of several packs, in their order: rows of a batch are read end to end."""
    joined: Row = {name: [] for name in packs[0]}
    for pack in packs:
        for name, values in joined.items():
            values.extend(pack[name])
    return joined


def _positions_in_pack(pack: Row, width: int) -> torch.Tensor:
    """Positions (T,) that restart at each sample of a pack; padding counts as one more sample."""
    lengths = [*pack["seq_lengths"], width - len(pack["input_ids"])]
    return torch.cat([torch.arange(length) for length in lengths])
