"""Records of planning and answering as rows of integers, and the strings of their graphs."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

from tripletune.models.data.records import Record

if TYPE_CHECKING:
    from tripletune.models.graph_llm.processor import GraphLLMProcessor


def graph_strings(records: Iterable[Record], pooling: str, counts: Counter[str]) -> Iterator[dict[str, Any]]:
    """The distinct node and edge strings of records, in their order, each with its key."""
    from tripletune.models.graph_llm.embeddings import string_key
    from tripletune.models.graph_llm.graphs import build_graph

    seen: set[str] = set()
    for record in records:
        for text in chain(*build_graph(record.steps, pooling)[:2]):
            if text not in seen:
                seen.add(text)
                yield {"key": string_key(text), "text": text}


def encode_rows(
    records: Iterable[Record],
    counts: Counter[str],
    processor: GraphLLMProcessor,
    learn_copies: bool = True,
    long_labels: str = "error",
) -> Iterator[dict[str, Any]]:
    """Records as integers, but those whose label is too long where they are skipped.

    Args:
        records: The records.
        counts: Counts records of each kind, and truncated records, triples, words and labels.
        processor: Makes prompt and label.
        learn_copies: Whether a first sub-query that repeats the main question is part of its label. A loop whose q_0 is
            the main question (RAS, section 3.1) fills it in itself and reads the action alone.
        long_labels: "truncate", "skip" or "error"; see `GraphLLMProcessor.encode_label`.
    """
    from tripletune.models.graph_llm.embeddings import string_key
    from tripletune.models.graph_llm.graphs import SampleGraph

    for record in records:
        label, marker = processor.encode_label(record, "error" if long_labels == "error" else "truncate")
        too_long = label[-1] != processor.tokenizer.eos_token_id
        if long_labels != "error":
            counts["skipped_labels" if long_labels == "skip" else "truncated_labels"] += too_long
        if too_long and long_labels == "skip":
            continue
        encoded = processor.encode_input(record.input)
        if not learn_copies and not record.steps and record.subquery == record.question:
            label = label[:marker]
        row: dict[str, Any] = {"input_ids": encoded.input_ids, "label_ids": label}
        if processor.settings.use_graph:
            for name in SampleGraph._fields:
                row[name] = [getattr(graph, name) for graph in encoded.graphs]
            for name in ("nodes", "edges"):
                row[name] = [[string_key(text) for text in texts] for texts in row[name]]
        row["marker"] = marker
        row["length"] = len(encoded.input_ids) + len(label)
        row["question"] = int.from_bytes(hashlib.sha256(record.question_id.encode()).digest()[:7])
        triples, words = encoded.truncated_triples, encoded.truncated_words
        counts[f"{record.task} {record.action.value}"] += 1
        counts.update(truncated_records=triples + words > 0, truncated_triples=triples, truncated_words=words)
        yield row
