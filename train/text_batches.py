"""Tokenised rows of text become training batches: padded, packed, or source and target of an encoder-decoder.

A row has `input_ids` and `labels`, of one length for decoders, with -100 where nothing is learned. A pack holds several
rows and their lengths, `seq_lengths`.

Shapes: B rows or packs, T tokens of the longest one, S tokens of the longest source.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tripletune.models.graph_llm.processor import pad_batch
from tripletune.models.label_loss import IGNORED


class TextCollator:
    """Pads rows or packs of a decoder on the right.

    There is no attention mask: attention is causal and padding stands on the right, so no real token sees it. In packs
    the positions start anew with each sample, which is how transformers' attention keeps samples apart.

    Args:
        pad_token_id: Padding token.
        flatten: Put all packs of a batch into one row. Flash attention tells samples apart in a single row alone; other
            kernels make a (T, T) mask, which several rows keep small.
        pad_to_multiple_of: Round T up, which keeps the number of shapes small for compiled models.
    """

    def __init__(self, pad_token_id: int, flatten: bool = False, pad_to_multiple_of: int = 8) -> None:
        self.pad_token_id = pad_token_id
        self.flatten = flatten
        self.pad_to_multiple_of = pad_to_multiple_of

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Make a batch.

        Returns:
            `input_ids` (B, T), `labels` (B, T) and, for packs, `position_ids` (B, T).
        """
        if "seq_lengths" not in rows[0]:
            return self._padded([row["input_ids"] for row in rows], [row["labels"] for row in rows])
        if self.flatten:
            merged = {name: [value for row in rows for value in row[name]] for name in rows[0]}
            rows = [merged]
        batch = self._padded([row["input_ids"] for row in rows], [row["labels"] for row in rows])
        width = batch["input_ids"].shape[1]
        positions = []
        for row in rows:
            left = width - len(row["input_ids"])
            # Padding counts as a sample of its own.
            parts = [torch.arange(length) for length in [*row["seq_lengths"], left]]
            positions.append(torch.cat(parts))
        batch["position_ids"] = torch.stack(positions)
        # The first token of a sample would be predicted from the last one of its neighbour.
        batch["labels"][batch["position_ids"] == 0] = IGNORED
        return batch

    def _padded(self, ids: list[list[int]], labels: list[list[int]]) -> dict[str, torch.Tensor]:
        input_ids, _ = pad_batch(ids, self.pad_token_id, "right", self.pad_to_multiple_of)
        padded, _ = pad_batch(labels, IGNORED, "right", self.pad_to_multiple_of)
        return {"input_ids": input_ids, "labels": padded}


class Seq2SeqCollator:
    """Pads source and target of an encoder-decoder; padding of the target is never learned.

    Args:
        pad_token_id: Padding token of the source.
        shift_right: The model's own way from labels to what its decoder reads (B, T), for example
            `model.prepare_decoder_input_ids_from_labels`.
        pad_to_multiple_of: Round T and S up.
    """

    def __init__(
        self, pad_token_id: int, shift_right: Callable[..., torch.Tensor], pad_to_multiple_of: int = 8
    ) -> None:
        self.pad_token_id = pad_token_id
        self.shift_right = shift_right
        self.pad_to_multiple_of = pad_to_multiple_of

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Make a batch: `input_ids` and `attention_mask` (B, S), `labels` and `decoder_input_ids` (B, T)."""
        ids, mask = pad_batch([row["input_ids"] for row in rows], self.pad_token_id, "right", self.pad_to_multiple_of)
        labels, _ = pad_batch([row["labels"] for row in rows], IGNORED, "right", self.pad_to_multiple_of)
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "labels": labels,
            "decoder_input_ids": self.shift_right(labels=labels),
        }
