"""Tokenised records become training batches.

Shapes: B rows of a batch, which are records, or questions where prefixes are shared; T tokens of the longest one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tripletune.models.graph_llm.branches import PADDING
from tripletune.models.graph_llm.embeddings import EmbeddingTable
from tripletune.models.graph_llm.graphs import GraphRows, batch_graphs
from tripletune.models.graph_llm.processor import pad_batch
from tripletune.train.shared_prefixes import SharedSequence, share_prefixes

IGNORED = -100


class Collator:
    """Pads on the right, masks everything but label and end-of-sequence tokens, and batches all graphs at once.

    No attention mask is made: with causal attention and padding on the right no real token ever sees padding, and
    without a mask attention takes its fast path.

    Args:
        pad_token_id: Padding token.
        table: Embedding table; None for models without graph.
        pad_to_multiple_of: Round T up, which keeps the number of shapes small for compiled models.
        action_weight: Weight of the action marker's tokens in the loss.
        answer_weight: Weight of the label tokens of answering records in the loss.
        shared_prefixes: Put records of one question into one row, their common beginning once.
        graph_token_id: Placeholder, which ends what is shared.
    """

    def __init__(
        self,
        pad_token_id: int,
        table: EmbeddingTable | None,
        pad_to_multiple_of: int = 8,
        action_weight: float = 1.0,
        answer_weight: float = 1.0,
        shared_prefixes: bool = False,
        graph_token_id: int | None = None,
    ) -> None:
        self.shared_prefixes = shared_prefixes
        self.graph_token_id = graph_token_id
        self.action_weight = action_weight
        self.answer_weight = answer_weight
        self.pad_token_id = pad_token_id
        self.table = table
        self.pad_to_multiple_of = pad_to_multiple_of

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Make a batch.

        Args:
            rows: Records, as `train.dataset.tokenize` writes them.

        Returns:
            `input_ids` (B, T), `labels` (B, T) with -100 where nothing is learned, `graphs`, a PyG batch, and
            `label_weights` (B, T) where markers or answers weigh more or less than other tokens. With shared prefixes
            also `position_ids`, `branches` and `shared`, (B, T) each, and the graphs are in the order of their
            placeholders.
        """
        if self.shared_prefixes:
            sequences = share_prefixes(rows, self.graph_token_id)
        else:
            sequences = []
            for number, row in enumerate(rows):
                sequences.append(SharedSequence())
                sequences[-1].add(number, row, 0)
        input_ids = self._pad([sequence.tokens for sequence in sequences], self.pad_token_id)
        labels = torch.full_like(input_ids, IGNORED)
        weights = torch.ones(input_ids.shape)
        for place, sequence in enumerate(sequences):
            for number, start in zip(sequence.records, sequence.labels):
                row = rows[number]
                end = start + len(row["label_ids"])
                labels[place, start:end] = input_ids[place, start:end]
                if row["marker"]:
                    weights[place, start : start + row["marker"]] = self.action_weight
                else:
                    weights[place, start:end] = self.answer_weight
        batch: dict[str, Any] = {"input_ids": input_ids, "labels": labels}
        if self.action_weight != 1.0 or self.answer_weight != 1.0:
            batch["label_weights"] = weights
        if self.shared_prefixes:
            batch["position_ids"] = self._pad([sequence.positions for sequence in sequences], 0)
            batch["branches"] = self._pad([sequence.branches for sequence in sequences], PADDING)
            batch["shared"] = self._pad([sequence.shared for sequence in sequences], 0)
        if self.table is not None:
            ordered = [rows[number] for sequence in sequences for number in sequence.records]
            graphs = [
                GraphRows(row["node_rows"], row["edge_rows"], row["sources"], row["targets"], row["subgraph"])
                for row in ordered
            ]
            batch["graphs"] = batch_graphs(graphs, self.table.vectors, self.table.dimension)
        return batch

    def _pad(self, rows: Sequence[Sequence[int]], value: int) -> torch.Tensor:
        return pad_batch(rows, value, "right", self.pad_to_multiple_of)[0]
