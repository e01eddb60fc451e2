"""Records, tokenised once: a memory-mapped Arrow file of token ids and graph rows, and one embedding table.

Both live in the run's cache folder under a name made of everything they depend on, so a second run or a resumed one
opens them at once and nothing is tokenised or embedded per step.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tripletune.models.data.records import TASKS, ModelInput, Record, read_records, record_files
from tripletune.models.graph_llm.embeddings import EmbeddingTable
from tripletune.models.graph_llm.graphs import graph_rows
from tripletune.models.graph_llm.processor import GraphLLMProcessor

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RecordSource:
    """Where records come from: a file or folder, the split, the tasks wanted and how many at most."""

    path: str
    split: str | None = None
    tasks: tuple[str, ...] = ("planning", "answering")
    limit: int | None = None

    def __iter__(self) -> Iterator[Record]:
        wanted = (record for record in read_records(self.path, self.split) if record.task in self.tasks)
        for count, record in enumerate(wanted):
            if self.limit is not None and count >= self.limit:
                return
            yield record

    def digest(self) -> str:
        """Fingerprint of the shards' content and the selection."""
        digest = hashlib.sha256(repr((self.split, self.tasks, self.limit)).encode())
        for file in record_files(self.path, self.split):
            with file.open("rb") as content:
                digest.update(hashlib.file_digest(content, "sha256").digest())
        return digest.hexdigest()


def build_table(
    sources: Sequence[RecordSource], processor: GraphLLMProcessor, encoder: str, cache: Path
) -> EmbeddingTable:
    """Embed every distinct node and edge string of the records once, or open the table that exists."""
    digest = _digest([source.digest() for source in sources], encoder, processor.settings.graph_pooling)
    folder = cache / f"embeddings-{digest}"
    if (folder / "table.json").exists():
        return EmbeddingTable(folder)

    def strings() -> Iterator[str]:
        for source in sources:
            for record in source:
                for graph in processor.graphs(record.steps):
                    yield from graph.strings

    return EmbeddingTable.build(strings(), encoder, folder)


def tokenize(
    source: RecordSource,
    processor: GraphLLMProcessor,
    table: EmbeddingTable | None,
    cache: Path,
    learn_copies: bool = True,
) -> Any:
    """Write the tokenised records of a source once and open them memory-mapped.

    Columns: `input_ids`, `label_ids`, `marker` (label tokens of the action marker), `length`, `question` (a number that
    records of one question have in common) and, with graphs, those of `models.graphs.GraphRows`.

    Args:
        source: The records.
        processor: Makes prompts and labels.
        table: Rows of node and edge strings; None for models without graph.
        cache: Folder of the files.
        learn_copies: As in `encode_row`.

    Returns:
        A `datasets.Dataset`; `meta.json` beside it counts what was truncated.

    Raises:
        ValueError: there is no record, or a label is longer than the limit.
    """
    from datasets import Dataset, Features, Sequence, Value
    from datasets.arrow_writer import ArrowWriter
    from tqdm.auto import tqdm

    columns: dict[str, Any] = {name: Sequence(Value("int32")) for name in ("input_ids", "label_ids")}
    if table is not None:
        columns |= {name: Sequence(Value("int64")) for name in ("node_rows", "edge_rows")}
        columns |= {name: Sequence(Value("int32")) for name in ("sources", "targets", "subgraph")}
    columns["marker"] = Value("int32")
    columns["length"] = Value("int32")
    columns["question"] = Value("int64")
    # An empty prompt shows template and tokenizer, which may change while their folder keeps its name.
    empty = [processor.encode_input(ModelInput(task, "?")).input_ids for task in TASKS]
    settings = [
        sorted(columns),
        dataclasses.asdict(processor.settings),
        processor.tokenizer.name_or_path,
        len(processor.tokenizer),
        empty,
        learn_copies,
    ]
    folder = cache / f"tokens-{_digest([source.digest()], settings, table.digest if table else None)}"
    if (folder / "meta.json").exists():
        return Dataset.from_file(str(folder / "records.arrow"))
    folder.mkdir(parents=True, exist_ok=True)
    meta = {
        "records": 0,
        "tokens": 0,
        "label_tokens": 0,
        "truncated_records": 0,
        "truncated_triples": 0,
        "truncated_words": 0,
    }
    writer = ArrowWriter(path=str(folder / "records.arrow"), features=Features(columns), writer_batch_size=512)
    for record in tqdm(source, desc="tokenising", unit=" records", disable=None):
        row = encode_row(record, processor, table, learn_copies)
        lost = row.pop("lost")
        writer.write(row)
        meta["records"] += 1
        meta["tokens"] += row["length"]
        meta["label_tokens"] += len(row["label_ids"])
        meta["truncated_records"] += any(lost)
        meta["truncated_triples"] += lost[0]
        meta["truncated_words"] += lost[1]
    if meta["records"] == 0:
        raise ValueError(
            f"{source.path} (split {source.split!r}, tasks {', '.join(source.tasks)}) holds no records to learn from"
        )
    writer.finalize()
    scratch = folder / "meta.json.tmp"
    scratch.write_text(json.dumps(meta, indent=2), encoding="utf-8")
    os.replace(scratch, folder / "meta.json")
    logger.info("tokenised %s: %s", source.path, meta)
    return Dataset.from_file(str(folder / "records.arrow"))


def encode_row(
    record: Record, processor: GraphLLMProcessor, table: EmbeddingTable | None, learn_copies: bool = True
) -> dict[str, Any]:
    """One record as integers; `lost` counts truncated triples and words.

    Args:
        record: The record.
        processor: Makes prompt and label.
        table: Rows of node and edge strings; None for models without graph.
        learn_copies: Whether a first sub-query that repeats the main question is part of its label. A loop whose q_0 is
            the main question (RAS, section 3.1) fills it in itself and reads the action alone.
    """
    encoded = processor.encode_input(record.input)
    label = processor.encode_label(record)
    if not learn_copies and not record.steps and record.subquery == record.question:
        label = label[: processor.marker_length(record)]
    row: dict[str, Any] = {"input_ids": encoded.input_ids, "label_ids": label}
    if table is not None:
        rows = table.rows(text for graph in encoded.graphs for text in graph.strings)
        row |= graph_rows(encoded.graphs, rows).to_json()
    row["marker"] = processor.marker_length(record)
    row["length"] = len(encoded.input_ids) + len(label)
    row["question"] = int.from_bytes(hashlib.sha256(record.question_id.encode()).digest()[:7])
    row["lost"] = (encoded.truncated_triples, encoded.truncated_words)
    return row


def _digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
