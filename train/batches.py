"""Tokenise rows once into a memory-mapped Arrow file, pack them on request, and order and collate them into batches.

The file's name depends on all that the rows are made from, so a second or resumed run opens the file at once. Each
process of a run makes a part of the rows and streams it to disk.

Shapes: B rows of a batch (samples, packs or interleaved questions), T tokens of the longest row.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Sampler

from tripletune.core.data.pairs import Trajectory
from tripletune.core.data.records import IGNORED, Record
from tripletune.core.data.rendering import parse_plan
from tripletune.core.files import build_together, new_file, read_json, write_json
from tripletune.models.graph_llm.embeddings import EmbeddingTable, string_key
from tripletune.models.graph_llm.graphs import SampleGraph, batch_graphs, build_graph
from tripletune.models.graph_llm.processor import GraphLLMProcessor

ROWS, META = "rows.arrow", "meta.json"
# Names and types of columns; "[int32]" is a list, "[[int32]]" a list of lists.
Columns = Mapping[str, str]
# Makes the rows of a part of the data, and counts what it leaves out or cuts.
Part = Callable[[Counter[str]], Iterator[Mapping[str, Any]]]
# Lengths are rounded up to a multiple of this, so that compiled models see few shapes.
_MULTIPLE = 8
TEXT: Columns = {"input_ids": "[int32]", "labels": "[int32]", "length": "int32"}
PAIR = {"rejected_input_ids": "[int32]", "rejected_labels": "[int32]"}


def cached_rows(
    key: Sequence[Any], cache: Path, parts: Iterable[Part], columns: Columns = TEXT, name: str = "tokens"
) -> Any:
    """Write rows once, as shared work of all processes, and open them memory-mapped.

    Args:
        key: JSON values that the rows depend on: the data's digest, settings, template, tokenizer.
        parts: Functions that each make the rows (mappings of columns) of one part of the data, for example of
            `train.tasks.Examples.parts`, and count dropped and cut data in the given counter, for `rows_meta`. Rows of
            tokens have `length` (source plus target) and `labels`.
    """
    import pyarrow as pa
    from datasets import Dataset

    digest = hashlib.sha256(json.dumps([*key, sorted(columns.items())], sort_keys=True).encode()).hexdigest()
    folder = cache / f"{name}-{digest[:16]}"
    if not (folder / META).exists():
        types = {one: pa.type_for_alias(kind.strip("[]")) for one, kind in columns.items()}
        for one, kind in columns.items():
            for _ in range(kind.count("[")):
                types[one] = pa.list_(types[one])
        schema = pa.schema(types)
        works = [partial(_write_rows, part, schema) for part in parts]
        if len(works) == 1:
            works[0](folder)  # there is nothing to share
        else:
            build_together(folder, META, works, partial(_merge_rows, folder, schema), f"making {name}")
    dataset = Dataset.from_file(str(folder / ROWS))
    if not len(dataset) and "length" in columns:
        listed = ", ".join(f"{what} {count}" for what, count in sorted(rows_meta(dataset).items()) if count)
        raise ValueError(f"there are no rows to learn from ({listed or 'nothing'})")
    return dataset


def _write_rows(part: Part, schema: Any, folder: Path) -> None:
    import pyarrow as pa

    folder.mkdir(parents=True, exist_ok=True)
    learned = "labels" in schema.names
    counts = Counter({"rows": 0} | dict.fromkeys(("tokens", "label_tokens") if learned else (), 0))
    rows = iter(part(counts))
    # The file of counts is renamed after the rows' file: if it exists, the rows are complete.
    with new_file(folder / META) as about, new_file(folder / ROWS) as scratch:
        with pa.ipc.new_stream(str(scratch), schema) as writer:
            while batch := list(islice(rows, 512)):
                writer.write_batch(pa.RecordBatch.from_pylist(batch, schema))
                counts["rows"] += len(batch)
                for row in batch if learned else ():
                    counts["tokens"] += row["length"]
                    counts["label_tokens"] += len(row["labels"]) - row["labels"].count(IGNORED)
        about.write_text(json.dumps(counts), encoding="utf-8")


def _merge_rows(folder: Path, schema: Any, parts: Sequence[Path]) -> None:
    import pyarrow as pa

    counts = Counter({"rows": 0})
    with new_file(folder / ROWS) as scratch, pa.ipc.new_stream(str(scratch), schema) as writer:
        for part in parts:
            counts.update(read_json(part / META))
            with pa.memory_map(str(part / ROWS)) as source, pa.ipc.open_stream(source) as batches:
                for batch in batches:
                    writer.write_batch(batch)
    write_json(folder / META, counts)


def rows_meta(dataset: Any) -> dict[str, int]:
    """Return the counts of `cached_rows`: `rows`, `tokens`, `label_tokens`, and those of cut and dropped data."""
    about = _folder(dataset) / META if dataset.cache_files else None
    return read_json(about) if about and about.exists() else {"rows": len(dataset)}


def rows_digest(dataset: Any) -> str:
    """Fingerprint of the content of any `datasets.Dataset`."""
    found = hashlib.sha256(str(dataset.features).encode())
    for table in dataset.with_format("arrow").iter(batch_size=1000):
        for batch in table.combine_chunks().to_batches():
            found.update(batch.serialize())
    return found.hexdigest()


def pack_rows(dataset: Any, tokens: int) -> Any:
    """Pack whole rows with TRL's best-fit packing, in blocks of a thousand, and cache the packs.

    Packs have `input_ids`, `labels` and `seq_lengths`, the lengths of their rows.
    """
    from datasets import Dataset
    from trl import pack_dataset

    longest = int(dataset.with_format("numpy")["length"][:].max())
    if longest > tokens:
        raise ValueError(f"train.pack_tokens {tokens}: the longest sample has {longest} tokens; set at least {longest}")
    path = _folder(dataset) / f"packs-{tokens}.arrow"

    def pack(_: Sequence[Path]) -> None:
        # TRL would silently cut rows of more tokens. `datasets` renames the file when the file is complete.
        options = {"cache_file_name": str(path), "load_from_cache_file": False, "desc": "packing"}
        pack_dataset(dataset.select_columns(["input_ids", "labels"]), tokens, "bfd", options)

    build_together(path.parent, path.name, [], pack, "packing")
    return Dataset.from_file(str(path))


def _folder(dataset: Any) -> Path:
    return Path(dataset.cache_files[0]["filename"]).parent


def pad_batch(rows: Sequence[Sequence[int]], pad: int, multiple_of: int = 1) -> torch.Tensor:
    """Pad token rows on the right to one length, a multiple of `multiple_of`: (B, T)."""
    length = -(-max(map(len, rows)) // multiple_of) * multiple_of
    return torch.tensor([[*row, *[pad] * (length - len(row))] for row in rows], dtype=torch.long)


@dataclass(frozen=True)
class TextCollator:
    """Pads rows or packs of a decoder on the right.

    There is no attention mask: attention is causal and padding is on the right, so no real token sees padding. In
    packs, positions restart at each sample, and transformers' attention separates samples by their positions.

    `flatten` puts all packs of a batch into one row, because flash attention separates samples only within one row.
    Other kernels make a (T, T) mask, which is smaller with several rows.
    """

    pad_token_id: int
    flatten: bool = False

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """A batch: `input_ids` (B, T), `labels` (B, T) and, for packs, `position_ids` (B, T)."""
        packs = "seq_lengths" in rows[0]
        if packs and self.flatten:
            rows = [{name: [value for row in rows for value in row[name]] for name in rows[0]}]
        batch = _padded(rows, self.pad_token_id)
        if not packs:
            return batch
        width = batch["input_ids"].shape[1]
        # Padding counts as one more sample.
        lengths = [[*row["seq_lengths"], width - len(row["input_ids"])] for row in rows]
        batch["position_ids"] = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
        # The first token of a sample would be predicted from the last token of the sample before it.
        batch["labels"][batch["position_ids"] == 0] = IGNORED
        return batch


def graph_strings(records: Iterable[Record], pooling: str, counts: Counter[str]) -> Iterator[dict[str, Any]]:
    """Yield each distinct node and edge string of records once, with its key."""
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
    """Tokenise records, one row per record; with `prompt_order: interleaved`, one row holds a question's records.

    Args:
        counts: Receives the numbers of records of each kind, and of truncated records, triples, words and labels.
        learn_copies: Whether the label includes a first sub-query that repeats the main question. A loop with q_0 =
            main question (RAS, section 3.1) needs only the action.
        long_labels: "truncate", "skip" or "error"; see `GraphLLMProcessor.encode_label`.

    Yields:
        `input_ids` and `labels`, (T,) each; `length`, T; `spans`, for each record (index of the first label token,
        index after the last label token, number of label tokens of the action marker, which is 0 for an answer); and
        the fields of `SampleGraph`, with keys for strings and one entry per placeholder.
    """
    grows = processor.settings.prompt_order == "interleaved"
    for _, group in groupby(records, key=lambda record: record.question_id if grows else record.id):
        rows = []
        for record in group:
            label, marker = processor.encode_label(record, "error" if long_labels == "error" else "truncate")
            too_long = label[-1] != processor.tokenizer.eos_token_id
            if long_labels != "error":
                counts["skipped_labels" if long_labels == "skip" else "truncated_labels"] += too_long
            if too_long and long_labels == "skip":
                continue
            if not learn_copies and not record.steps and record.subquery == record.question:
                label = label[:marker]
            encoded = processor.encode_input(record.input)
            start, end = len(encoded.input_ids), len(encoded.input_ids) + len(label)
            row: dict[str, Any] = {"input_ids": [*encoded.input_ids, *label], "labels": [IGNORED] * start + label}
            row |= {"spans": [[start, end, marker]], "length": end}
            if processor.settings.use_graph:
                for name in SampleGraph._fields:
                    row[name] = [getattr(graph, name) for graph in encoded.graphs]
                for name in ("nodes", "edges"):
                    row[name] = [[string_key(text) for text in texts] for texts in row[name]]
            rows.append(row)
            triples, words = encoded.truncated_triples, encoded.truncated_words
            counts[f"{record.task} {record.action.value}"] += 1
            counts.update(truncated_records=triples + words > 0, truncated_triples=triples, truncated_words=words)
            if grows:
                counts["tokens_as_separate_records"] += end
        yield from chain_records(rows) if grows else rows


def rows_of_pairs(examples: Iterable[Any], counts: Counter[str], make: Callable[..., Any]) -> Iterator[dict[str, Any]]:
    """Make rows of preferred replies with `make`, and add tokens and labels of the rejected reply to each row."""
    for one in examples:
        found = [*make([one], counts), *make([_worse(one)], Counter())]
        if len(found) != 2:
            counts["pairs_left_out"] += 1
            continue
        better, worse = found
        better |= {f"rejected_{name}": worse[name] for name in ("input_ids", "labels")}
        yield better | {"length": max(better["length"], worse["length"])}


def _worse(one: Record | Trajectory) -> Record | Trajectory:
    if not one.rejected:
        raise ValueError(
            f"train.preference: {one.id!r} has no rejected reply: make pairs with `tripletune build trajectories "
            "--pairs`, or leave train.preference out"
        )
    if isinstance(one, Trajectory):
        return replace(one, messages=(*one.messages[:-1], {"role": "assistant", "content": one.rejected}))
    plan = parse_plan(one.rejected)
    if plan.action is None:
        raise ValueError(f"record {one.id!r}: the rejected reply {one.rejected!r} is not a plan")
    return replace(one, action=plan.action, subquery=plan.subquery)


def pair_batch(collate: Callable[..., dict[str, Any]], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Collate pairs into a batch for TRL: first all preferred replies, then all rejected replies."""
    worse = [row | {name: row[f"rejected_{name}"] for name in ("input_ids", "labels")} for row in rows]
    batch = collate([*rows, *worse])
    learned = (batch["labels"] != IGNORED).long()
    inputs = {name: batch[name] for name in ("input_ids", "graphs") if name in batch}
    return inputs | {"attention_mask": torch.ones_like(learned), "completion_mask": learned}


def chain_records(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge the rows of one question: a row that is a prefix of a longer row becomes a part of the longer row.

    With `prompt_order: interleaved`, a prompt begins with the previous prompt and reply. The end-of-sequence token of
    each reply is learned, and the retrieved triples follow that token. Rows that are not prefixes stay separate, for
    example if the next prompt was shortened.
    """
    chains: list[dict[str, Any]] = []
    for row in sorted(rows, key=lambda row: -row["length"]):
        ((start, end, _),) = row["spans"]
        for longer in chains:
            graphs = all(longer[name][: len(row[name])] == row[name] for name in SampleGraph._fields if name in row)
            # The last token is learned, not read.
            tokens = longer["input_ids"][: end - 1] == row["input_ids"][:-1]
            if graphs and tokens and end <= longer["spans"][-1][0]:
                longer["labels"][start:end] = row["labels"][start:end]
                longer["spans"] += row["spans"]
                break
        else:
            chains.append(row)
    return chains


@dataclass(frozen=True)
class RecordCollator:
    """Pads records on the right, without an attention mask (causal attention needs none), and batches all their graphs.

    Attributes:
        action_weight: Weight of the label tokens of action markers.
        answer_weight: Weight of answering records with `per_record`, else of their label tokens.
        per_record: Whether each record, instead of each label token, has the weight 1.
    """

    pad_token_id: int
    table: EmbeddingTable | None
    action_weight: float = 1.0
    answer_weight: float = 1.0
    per_record: bool = False

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Make a batch of rows of `encode_rows`.

        Returns:
            `input_ids` (B, T); `labels` (B, T), -100 where nothing is learned; `graphs`, a PyG batch in the order of
            the placeholders; `label_parts` (B, T), 0 at label tokens of planning and 1 at label tokens of answering;
            and `label_weights` (B, T), if an attribute of the collator changes the weights.
        """
        batch: dict[str, Any] = _padded(rows, self.pad_token_id)
        weights, parts = torch.ones(batch["labels"].shape), torch.zeros_like(batch["labels"])
        for place, row in enumerate(rows):
            for start, end, marker in row["spans"]:
                own = weights[place, start:end]
                own[:marker] = self.action_weight
                if self.per_record:
                    own /= own.sum()
                if not marker:
                    own *= self.answer_weight
                    parts[place, start:end] = 1
        if (self.action_weight, self.answer_weight, self.per_record) != (1.0, 1.0, False):
            batch["label_weights"] = weights
        batch["label_parts"] = parts
        if self.table is not None:
            fields = [one for row in rows for one in zip(*(row[name] for name in SampleGraph._fields))]
            # In a batch without graphs, an empty graph gives the encoder the gradient that distributed training needs.
            graphs = [SampleGraph(*one) for one in fields] or [SampleGraph([], [], [], [], [])]
            batch["graphs"] = batch_graphs(graphs, self.table.__getitem__)
        return batch


def _padded(rows: Sequence[dict[str, Any]], pad_token_id: int) -> dict[str, torch.Tensor]:
    return {
        name: pad_batch([row[name] for row in rows], value, _MULTIPLE)
        for name, value in (("input_ids", pad_token_id), ("labels", IGNORED))
    }


class EpochSampler(Sampler[int]):
    """Shuffles every epoch; optionally keeps records of similar length together.

    The order depends only on seed and epoch, so a resumed run sees the same order. The order of transformers'
    `LengthGroupedSampler` depends on the global random state.

    Args:
        batch_size: Records per group. A step combines random groups, because length can reveal the label: after a long
            history, a plan is often the last plan.
        group_by_length: Sort by length within blocks of fifty groups, then shuffle the groups.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int, group_by_length: bool = True) -> None:
        self.lengths = torch.as_tensor(lengths, dtype=torch.long)
        self.batch_size = batch_size
        self.seed = seed
        self.group_by_length = group_by_length
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = int(epoch)

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order = torch.randperm(len(self.lengths), generator=generator)
        if not self.group_by_length:
            return iter(order.tolist())
        block = 50 * self.batch_size
        batches: list[list[int]] = []
        for start in range(0, len(order), block):
            part = order[start : start + block]
            part = part[torch.argsort(self.lengths[part], descending=True, stable=True)]
            batches += [part[at : at + self.batch_size].tolist() for at in range(0, len(part), self.batch_size)]
        # The incomplete batch stays last: elsewhere it would shift the borders of all batches after it.
        tail = [batches.pop()] if batches and len(batches[-1]) < self.batch_size else []
        shuffled = [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()] + tail
        return iter([index for batch in shuffled for index in batch])


class RepeatedSteps(Sampler[int]):
    """Repeats the rows of a rollout once per micro-batch of the rollout.

    A rollout lasts one or more optimiser steps. At its first micro-batch, TRL generates replies to all its prompts and
    splits the replies among its micro-batches. Rows that do not fill a rollout are left out of the epoch. The `copies`
    of a row, which GRPO compares, are adjacent.
    """

    def __init__(self, order: EpochSampler, rows: int, times: int, copies: int = 1) -> None:
        self.order, self.rows, self.times, self.copies = order, rows, times, copies

    def set_epoch(self, epoch: int) -> None:
        self.order.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.order) // self.rows * self.rows * self.times * self.copies

    def __iter__(self) -> Iterator[int]:
        order = list(self.order)
        for start in range(0, len(order) - self.rows + 1, self.rows):
            for _ in range(self.times):
                yield from (row for row in order[start : start + self.rows] for _ in range(self.copies))
