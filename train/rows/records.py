"""Rows and batches of the RAS Graph-LLM: records with their graphs (RAS, section 3.4).

Shapes: B rows of a batch, T tokens of the longest row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from typing import Any

import torch

from tripletune.core.data.answers import normalize_answer
from tripletune.core.data.records import IGNORED, STEPS_BY_TRIPLES, Record, count_steps
from tripletune.models.graph_llm.embeddings import EmbeddingTable, string_key
from tripletune.models.graph_llm.graphs import SampleGraph, batch_graphs, build_graph
from tripletune.models.graph_llm.processor import EncodedInput, GraphLLMProcessor
from tripletune.train.rows.batches import pad_tokens
from tripletune.train.rows.cache import TEACHER_IDS, Row
from tripletune.train.rows.hindsight import add_teacher
from tripletune.train.rows.hindsight_prompts import RecordHindsight


class RecordCount(StrEnum):
    """What is counted while records are tokenised, beside their kinds; logs and `training.json` show these names.

    Attributes:
        SKIPPED_LABELS: Records that are left out because their label is too long.
        TRUNCATED_LABELS: Labels that were cut.
        TRUNCATED_RECORDS: Records whose prompt lost evidence.
        TRUNCATED_TRIPLES: Triples that prompts lost.
        TRUNCATED_WORDS: Words of raw text that prompts lost.
        TOKENS_AS_SEPARATE_RECORDS: Tokens of the rows before the records of a question were joined.
    """

    SKIPPED_LABELS = "skipped_labels"
    TRUNCATED_LABELS = "truncated_labels"
    TRUNCATED_RECORDS = "truncated_records"
    TRUNCATED_TRIPLES = "truncated_triples"
    TRUNCATED_WORDS = "truncated_words"
    TOKENS_AS_SEPARATE_RECORDS = "tokens_as_separate_records"


def graph_strings(records: Iterable[Record], pooling: str, counts: Counter[str]) -> Iterator[Row]:
    """Yield each distinct node and edge string of records once, as `text` with its `key`.

    Once per part of the data, since parts are read by different processes; the table drops what is left.
    """
    seen: set[str] = set()
    for record in records:
        graph = build_graph(record.steps, pooling)
        for text in (*graph.nodes, *graph.edges):
            if text not in seen:
                seen.add(text)
                yield {"key": string_key(text), "text": text}


def encode_rows(
    records: Iterable[Record],
    counts: Counter[str],
    processor: GraphLLMProcessor,
    learn_copies: bool = True,
    long_labels: str = "error",
    hindsight: RecordHindsight | None = None,
) -> Iterator[Row]:
    """Tokenise records, one row per record; with `prompt_order: interleaved`, one row holds a question's records.

    Args:
        records: Records; those of a question are adjacent.
        counts: Receives the numbers of records of each kind, and of truncated records, triples, words and labels.
        processor: Renders and tokenises prompts and labels.
        learn_copies: Whether the label includes a first sub-query that repeats the main question. A loop with q_0 =
            main question (RAS, section 3.1) needs only the action.
        long_labels: "truncate", "skip" or "error"; see `GraphLLMProcessor.encode_label`.
        hindsight: Adds the column of `train.rows.hindsight`, from which sub-queries are taught.

    Yields:
        `input_ids` and `labels`, (T,) each; `length`, T; `spans`, for each record (index of the first label token,
        index after the last label token, number of label tokens of the action marker, which is 0 for an answer); and
        the fields of `SampleGraph`, with keys for strings and one entry per placeholder.
    """
    for _, question in groupby(records, key=lambda record: record.question_id):
        records_of_question = list(question)
        rows = []
        for record in records_of_question:
            row = _row_of_record(record, counts, processor, learn_copies, long_labels)
            if row is None:
                continue
            if hindsight is not None:
                row[TEACHER_IDS] = [hindsight.teacher_ids(record, records_of_question, row, processor, counts)]
            rows.append(row)
        if processor.settings.prompt_order == "interleaved":
            # Shows in the logs what joining the records of a question spares.
            counts[RecordCount.TOKENS_AS_SEPARATE_RECORDS] += sum(row["length"] for row in rows)
            rows = chain_records(rows)
        yield from rows


def _row_of_record(
    record: Record, counts: Counter[str], processor: GraphLLMProcessor, learn_copies: bool, long_labels: str
) -> Row | None:
    """Tokenise and count a record; return None if its label is too long and `long_labels` is "skip".

    A label that is to be skipped is cut first, because only then is it known to be too long.
    """
    label, marker = processor.encode_label(record, "error" if long_labels == "error" else "truncate")
    # Only a label that was cut does not end with the end-of-sequence token.
    is_cut = label[-1] != processor.tokenizer.eos_token_id
    if long_labels == "skip":
        counts[RecordCount.SKIPPED_LABELS] += is_cut
        if is_cut:
            return None
    elif long_labels == "truncate":
        counts[RecordCount.TRUNCATED_LABELS] += is_cut
    repeats_question = not record.steps and record.subquery == record.question
    if repeats_question and not learn_copies:
        label = label[:marker]
    encoded = processor.encode_input(record.input)
    start = len(encoded.input_ids)
    end = start + len(label)
    row: Row = {
        "input_ids": [*encoded.input_ids, *label],
        "labels": [IGNORED] * start + label,
        "spans": [[start, end, marker]],
        "length": end,
    }
    if processor.settings.use_graph:
        row |= _graph_columns(encoded.graphs)
    _count_record(record, encoded, counts)
    return row


def _count_record(record: Record, encoded: EncodedInput, counts: Counter[str]) -> None:
    """Add a record of a row to `counts` by its kind, and what its prompt lost: nothing is dropped silently."""
    is_truncated = encoded.truncated_triples + encoded.truncated_words > 0
    counts[f"{record.task} {record.action.value}"] += 1
    count_steps(record.steps, counts)
    for step in record.steps:
        # A count per number of triples, of which the largest is read, since counts of several processes are added.
        counts[f"{STEPS_BY_TRIPLES}{len(step.triples)}"] += 1
    if record.steps:
        asked = normalize_answer(record.steps[0].query) == normalize_answer(record.question)
        counts["first_searches"] += 1
        counts["first_searches_of_question"] += asked
    counts[RecordCount.TRUNCATED_RECORDS] += is_truncated
    counts[RecordCount.TRUNCATED_TRIPLES] += encoded.truncated_triples
    counts[RecordCount.TRUNCATED_WORDS] += encoded.truncated_words


def _graph_columns(graphs: Sequence[SampleGraph]) -> dict[str, list[Any]]:
    """Return the fields of `SampleGraph` as columns with one entry per graph; strings become their keys."""
    columns: dict[str, list[Any]] = {}
    for name in SampleGraph._fields:
        columns[name] = [getattr(graph, name) for graph in graphs]
    for name in ("nodes", "edges"):
        columns[name] = [_keys_of_texts(texts) for texts in columns[name]]
    return columns


def _keys_of_texts(texts: Iterable[str]) -> list[int]:
    """The keys under which the embedding table holds the vectors of texts (`models.graph_llm.embeddings`)."""
    return [string_key(text) for text in texts]


def chain_records(rows: Sequence[Row]) -> list[Row]:
    """Merge the rows of one question: a row that is a prefix of a longer row becomes a part of the longer row.

    With `prompt_order: interleaved`, a prompt begins with the previous prompt and reply. The end-of-sequence token of
    each reply is learned, and the retrieved triples follow that token. Rows that are not prefixes stay separate, for
    example if the next prompt was shortened. The longest rows come first, so that a row meets the chain that it belongs
    to, and the spans of a chain stand from its last reply to its first, on which `_is_beginning_of`
    relies. The rows are
    changed in place.
    """
    chains: list[Row] = []
    for row in sorted(rows, key=lambda row: -row["length"]):
        ((start, end, _),) = row["spans"]
        for longer in chains:
            if _is_beginning_of(row, longer):
                longer["labels"][start:end] = row["labels"][start:end]
                longer["spans"] += row["spans"]
                if TEACHER_IDS in row:
                    longer[TEACHER_IDS] += row[TEACHER_IDS]
                break
        else:
            chains.append(row)
    return chains


def _is_beginning_of(row: Row, longer: Row) -> bool:
    """Whether a longer row begins with all tokens and graphs that the model reads in a row."""
    ((_, end, _),) = row["spans"]
    # A label token can be learned once only, so the row must end before the span that was merged last (the earliest).
    if end > longer["spans"][-1][0]:
        return False
    # The last token is learned, not read.
    if longer["input_ids"][: end - 1] != row["input_ids"][:-1]:
        return False
    graph_columns = [name for name in SampleGraph._fields if name in row]
    return all(longer[name][: len(row[name])] == row[name] for name in graph_columns)


@dataclass(frozen=True)
class RecordCollator:
    """Pads records on the right, without an attention mask (causal attention needs none), and batches all their graphs.

    Attributes:
        table: Vectors of node and edge strings; None for a model without graph.
        action_weight: Weight of the label tokens of action markers.
        answer_weight: Weight of answering records with `per_record`, else of their label tokens.
        per_record: Whether each record, instead of each label token, has the weight 1.
        hindsight_weight: Share of the weight of a sub-query's tokens that goes to the divergence from the teacher.
        graph_token_id: The placeholder of a graph; only needed to find the teacher's graphs.
    """

    pad_token_id: int
    table: EmbeddingTable | None
    action_weight: float = 1.0
    answer_weight: float = 1.0
    per_record: bool = False
    hindsight_weight: float = 0.0
    graph_token_id: int | None = None

    def __call__(self, rows: Sequence[Row], own_rows: Sequence[Row] = ()) -> dict[str, Any]:
        """Make a batch of rows of `encode_rows`.

        Args:
            rows: Rows.
            own_rows: Rows of `TaughtQuery.own_row`, whose sub-queries are taught instead of those of `rows`. They have
                no other loss.

        Returns:
            `input_ids` (B, T); `labels` (B, T), -100 where nothing is learned; `graphs`, a PyG batch in the order of
            the placeholders; `label_parts` (B, T), 0 at label tokens of planning and 1 at label tokens of answering;
            and `label_weights` (B, T), if an attribute of the collator changes the weights. With `hindsight_weight`
            also what `train.rows.hindsight.add_teacher` adds.
        """
        gold_rows = rows
        rows = [*gold_rows, *own_rows]
        batch: dict[str, Any] = pad_tokens(rows, self.pad_token_id)
        weights = torch.ones(batch["labels"].shape)
        parts = torch.zeros_like(batch["labels"])
        for index, row in enumerate(rows):
            for start, end, marker in row["spans"]:
                self._set_label_weights(weights[index, start:end], marker)
                if marker == 0:  # an answer
                    parts[index, start:end] = 1
        if self.changes_weights:
            batch["label_weights"] = weights
        batch["label_parts"] = parts
        batch |= self._graphs_of_batch(rows)
        if self.hindsight_weight and TEACHER_IDS in rows[0]:
            share = self.hindsight_weight
            add_teacher(batch, rows, len(gold_rows), share, self.graph_token_id, self._teacher_batch)
        return batch

    def _teacher_batch(self, rows: Sequence[Row]) -> dict[str, Any]:
        """What the teacher reads: its rows, padded, with their graphs."""
        return pad_tokens(rows, self.pad_token_id) | self._graphs_of_batch(rows)

    def graph_arguments(self, graphs: Sequence[SampleGraph]) -> dict[str, Any]:
        """The argument of the model's forward pass that holds the graphs of prompts; {} without graphs."""
        if self.table is None or not graphs:
            return {}
        return {"graphs": batch_graphs(graphs, self.table.__getitem__)}

    def _graphs_of_batch(self, rows: Sequence[Row]) -> dict[str, Any]:
        """The graphs of rows as a PyG batch with their vectors, under `graphs`; nothing for a model without graph."""
        return self.graph_arguments(_graphs_of_rows(rows))

    @property
    def changes_weights(self) -> bool:
        """Whether label tokens can have another weight than 1."""
        has_weights = self.action_weight != 1.0 or self.answer_weight != 1.0 or self.per_record
        return has_weights or self.hindsight_weight > 0

    def _set_label_weights(self, weights: torch.Tensor, marker: int) -> None:
        """Set the weights of a record's label tokens, (T,), in place; the first `marker` tokens are its action's.

        Per record, the weights of its tokens sum to 1 before an answer is weighted, so that `answer_weight` compares
        records; else it compares tokens.
        """
        weights[:marker] = self.action_weight
        if self.per_record:
            weights /= weights.sum()
        if marker == 0:
            weights *= self.answer_weight


def graphs_of_row(row: Row) -> list[SampleGraph]:
    """The graphs of a row, in the order of their placeholders; none for a row without graph columns."""
    columns = [row[name] for name in SampleGraph._fields if name in row]
    return [SampleGraph(*fields) for fields in zip(*columns, strict=True)]


def _graphs_of_rows(rows: Sequence[Row]) -> list[SampleGraph]:
    """The graphs of all rows, in the order of their placeholders in the batch."""
    graphs: list[SampleGraph] = []
    for row in rows:
        graphs += graphs_of_row(row)
    if graphs:
        return graphs
    # In a batch without graphs, an empty graph gives the encoder the gradient that distributed training needs.
    return [SampleGraph([], [], [], [], [])]
