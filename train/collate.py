"""Tokenised records become training batches.

Shapes: B records, T tokens of the longest one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from models.graph_processor import pad_batch
from models.graphs import GraphRows, batch_graphs
from models.text_embeddings import EmbeddingTable

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
    """

    def __init__(
        self,
        pad_token_id: int,
        table: EmbeddingTable | None,
        pad_to_multiple_of: int = 8,
        action_weight: float = 1.0,
        answer_weight: float = 1.0,
    ) -> None:
        self.action_weight = action_weight
        self.answer_weight = answer_weight
        self.pad_token_id = pad_token_id
        self.table = table
        self.pad_to_multiple_of = pad_to_multiple_of

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Make a batch.

        Args:
            rows: B rows of `train.dataset.tokenize`.

        Returns:
            `input_ids` (B, T), `labels` (B, T) with -100 where nothing is learned, `graphs`, a PyG batch, and
            `label_weights` (B, T) where markers or answers weigh more or less than other tokens.
        """
        sequences = [[*row["input_ids"], *row["label_ids"]] for row in rows]
        input_ids, _ = pad_batch(sequences, self.pad_token_id, "right", self.pad_to_multiple_of)
        labels = torch.full_like(input_ids, IGNORED)
        for number, row in enumerate(rows):
            start, end = len(row["input_ids"]), len(sequences[number])
            labels[number, start:end] = input_ids[number, start:end]
        batch: dict[str, Any] = {"input_ids": input_ids, "labels": labels}
        if self.action_weight != 1.0 or self.answer_weight != 1.0:
            weights = torch.ones(input_ids.shape)
            for number, row in enumerate(rows):
                start, end = len(row["input_ids"]), len(sequences[number])
                if row["marker"]:
                    weights[number, start : start + row["marker"]] = self.action_weight
                else:
                    weights[number, start:end] = self.answer_weight
            batch["label_weights"] = weights
        if self.table is not None:
            graphs = [
                GraphRows(row["node_rows"], row["edge_rows"], row["sources"], row["targets"], row["subgraph"])
                for row in rows
            ]
            batch["graphs"] = batch_graphs(graphs, self.table.vectors, self.table.dimension)
        return batch
