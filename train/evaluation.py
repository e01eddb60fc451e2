"""Evaluation while training: the model's own replies to validation records, scored like `tripletune eval records`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from accelerate.utils import gather_object

from tripletune.eval.statistics import flatten_means
from tripletune.eval.suites.records import score_predictions
from tripletune.models.data.records import Record
from tripletune.models.graph_llm.embeddings import EmbeddingTable, TableEmbeddings
from tripletune.models.graph_llm.processor import GraphLLMProcessor
from tripletune.models.local.generator import LocalGenerator


def generate_and_score(
    model: Any,
    processor: GraphLLMProcessor,
    table: EmbeddingTable | None,
    records: Sequence[Record],
    batch_size: int,
    max_new_tokens: int,
    process_index: int = 0,
    num_processes: int = 1,
) -> dict[str, float]:
    """Generate replies to records, spread over the processes, and score them.

    Returns:
        Numbers by name: action accuracy (overall, with history, per label), sub-query F1, answer EM and F1,
        malformed share. Empty without records.
    """
    if not records:
        return {}
    embeddings = TableEmbeddings(table) if table is not None else None
    generator = LocalGenerator(model, processor, batch_size, embeddings)  # type: ignore[arg-type]
    mine = list(range(process_index, len(records), num_processes))
    completions = generator.generate_many([records[number].input for number in mine], max_new_tokens)
    replies = list(zip(mine, (completion.text for completion in completions)))
    if num_processes > 1:
        replies = gather_object(replies)
    texts = [text for _, text in sorted(replies)]
    return flatten_means(score_predictions(list(records), texts))
