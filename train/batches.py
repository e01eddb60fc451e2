"""Rows: tokenised once into a memory-mapped Arrow file, packed where asked for, and collated into batches.

A file's name is made of everything it depends on, so a second run or a resumed one opens it at once. All processes of a
run make a part of the rows each. Rows are streamed to disk, and memory does not grow with their number.

Shapes: B rows of a batch, which are records, packs, or questions where prefixes are shared; T tokens of the longest.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, product, takewhile
from pathlib import Path
from typing import Any

import torch

from tripletune.models.data.records import IGNORED
from tripletune.models.files import build_together, new_file, read_json, write_json
from tripletune.models.graph_llm.embeddings import EmbeddingTable
from tripletune.models.graph_llm.graphs import SampleGraph, batch_graphs
from tripletune.models.graph_llm.processor import pad_batch
from tripletune.models.losses import PADDING

logger = logging.getLogger(__name__)
ROWS, META = "rows.arrow", "meta.json"
# Names and types of columns; "[int32]" is a list, "[[int32]]" a list of lists.
Columns = Mapping[str, str]
# Makes the rows of a part of the data, and counts what it leaves out or cuts.
Part = Callable[[Counter[str]], Iterator[Mapping[str, Any]]]
# Lengths are rounded up to it, which keeps the number of shapes small for compiled models.
_MULTIPLE = 8
TEXT: Columns = {"input_ids": "[int32]", "labels": "[int32]", "length": "int32"}


def cached_rows(
    key: Sequence[Any], cache: Path, parts: Iterable[Part], columns: Columns = TEXT, name: str = "tokens"
) -> Any:
    """Write rows once, together with all processes that want the same, and open them memory-mapped.

    Args:
        key: JSON data that the rows depend on: the data's digest, settings, template, tokenizer.
        cache: Folder of such files.
        parts: Make the rows of one part of the data after the other, such as of `train.tasks.Examples.parts`: mappings
            with the columns. Each counts what it leaves out or cuts in the counter it is given, which `rows_meta`
            shows. Rows of tokens have `length` (source and target together where they are apart) and `labels` or
            `label_ids`.
        columns: Their columns.
        name: What the rows are, for the name of their folder.

    Returns:
        A `datasets.Dataset` with these columns.

    Raises:
        ValueError: there are no rows of tokens.
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
    labels = [name for name in ("labels", "label_ids") if name in schema.names]
    counts = Counter({"rows": 0} | dict.fromkeys(("tokens", "label_tokens") if labels else (), 0))
    rows = iter(part(counts))
    # The counts appear behind the rows: where they are, the rows are whole.
    with new_file(folder / META) as about, new_file(folder / ROWS) as scratch:
        with pa.ipc.new_stream(str(scratch), schema) as writer:
            while batch := list(islice(rows, 512)):
                writer.write_batch(pa.RecordBatch.from_pylist(batch, schema))
                counts["rows"] += len(batch)
                for row, name in product(batch, labels):
                    counts["tokens"] += row["length"]
                    counts["label_tokens"] += len(row[name]) - row[name].count(IGNORED)
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
    """What `cached_rows` counted: `rows`, `tokens`, `label_tokens`, and what was cut or left out."""
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
    """Lay several rows into one by TRL's best-fit packing, once; each row stays whole and apart from its neighbours.

    Rows that stand within a thousand of each other are packed together, so memory does not grow with the data.

    Args:
        dataset: From `cached_rows`.
        tokens: Most tokens of a pack.

    Returns:
        A `datasets.Dataset` with `input_ids`, `labels` and `seq_lengths`, the lengths of the rows in a pack.

    Raises:
        ValueError: a row is longer than a pack.
    """
    from datasets import Dataset
    from trl import pack_dataset

    longest = int(dataset.with_format("numpy")["length"][:].max())
    if longest > tokens:
        raise ValueError(f"train.pack_tokens {tokens}: the longest sample has {longest} tokens; give at least as many")
    path = _folder(dataset) / f"packs-{tokens}.arrow"

    def pack(_: Sequence[Path]) -> None:
        # TRL would cut a longer row silently; there is none now. `datasets` renames the file when it is complete.
        options = {"cache_file_name": str(path), "load_from_cache_file": False, "desc": "packing"}
        packed = pack_dataset(dataset.select_columns(["input_ids", "labels"]), tokens, "bfd", options)
        logger.info("packed %s samples into %s rows of at most %d tokens", len(dataset), len(packed), tokens)

    build_together(path.parent, path.name, [], pack, "packing")
    return Dataset.from_file(str(path))


def _folder(dataset: Any) -> Path:
    return Path(dataset.cache_files[0]["filename"]).parent


@dataclass(frozen=True)
class TextCollator:
    """Pads rows or packs of a decoder on the right.

    There is no attention mask: attention is causal and padding stands on the right, so no real token sees it. In packs
    the positions start again with each sample, which is how transformers' attention keeps samples apart.

    Attributes:
        pad_token_id: Padding token.
        flatten: Put all packs of a batch into one row. Flash attention tells samples apart in a single row alone; other
            kernels make a (T, T) mask, which several rows keep small.
    """

    pad_token_id: int
    flatten: bool = False

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Make a batch.

        Returns:
            `input_ids` (B, T), `labels` (B, T) and, for packs, `position_ids` (B, T).
        """
        packs = "seq_lengths" in rows[0]
        if packs and self.flatten:
            rows = [{name: [value for row in rows for value in row[name]] for name in rows[0]}]
        batch = {
            name: pad_batch([row[name] for row in rows], value, _MULTIPLE)
            for name, value in (("input_ids", self.pad_token_id), ("labels", IGNORED))
        }
        if not packs:
            return batch
        width = batch["input_ids"].shape[1]
        # Padding counts as a sample of its own.
        lengths = [[*row["seq_lengths"], width - len(row["input_ids"])] for row in rows]
        batch["position_ids"] = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
        # The first token of a sample would be predicted from the last one of its neighbour.
        batch["labels"][batch["position_ids"] == 0] = IGNORED
        return batch


@dataclass
class SharedSequence:
    """Records side by side.

    Attributes:
        tokens: The longest record as a whole, then what the others have of their own.
        positions: Position of each token within its record.
        record_of: As in `models.losses.prefix_mask`.
        shared: As in `models.losses.prefix_mask`.
        records: Numbers of the records, in their order in `tokens`.
        labels: Where each of them has its first label token.
    """

    tokens: list[int]
    positions: list[int]
    record_of: list[int]
    shared: list[int]
    records: list[int]
    labels: list[int]


def share_prefixes(
    rows: Sequence[dict[str, Any]], own: int | None, share: bool = True, interleaved: bool = False
) -> list[SharedSequence]:
    """Put the records of each question into one sequence.

    Args:
        rows: Rows of `train.record_rows.encode_rows`; those with an equal `question` are put together.
        own: Token that is never shared: the placeholder, behind which each record has a graph of its own.
        share: False gives each record a sequence of its own.
        interleaved: Whether prompts go on from each other; see `chain_records`.
    """
    if share and interleaved:
        return chain_records(rows)
    groups: dict[int, list[int]] = {}
    for number, row in enumerate(rows):
        groups.setdefault(row["question"] if share else number, []).append(number)
    sequences = []
    for numbers in groups.values():
        numbers.sort(key=lambda number: -rows[number]["length"])
        longest = rows[numbers[0]]["input_ids"]
        sequence = SharedSequence([], [], [], [], [], [])
        for place, number in enumerate(numbers):
            prompt = rows[number]["input_ids"]
            begin = _common(longest, prompt, own) if place else 0
            tokens = [*prompt, *rows[number]["label_ids"]][begin:]
            sequence.records.append(number)
            sequence.labels.append(len(sequence.tokens) + len(prompt) - begin)
            sequence.record_of += [place] * len(tokens)
            sequence.shared += [begin] * len(tokens)
            sequence.positions += range(begin, begin + len(tokens))
            sequence.tokens += tokens
        sequences.append(sequence)
    return sequences


def chain_records(rows: Sequence[dict[str, Any]]) -> list[SharedSequence]:
    """Put each record that is the beginning of another one into its sequence, without a token of its own.

    For `prompt_order: interleaved`: there a prompt goes on from the one before and its reply, so that a question is one
    sequence. Where a reply ends, its end-of-sequence token is learned, and what was found stands there. Records that
    are no beginnings, as where triples were left out of a later prompt, have a sequence of their own.

    Args:
        rows: Rows of `train.record_rows.encode_rows`.
    """
    sequences: list[SharedSequence] = []
    for number in sorted(range(len(rows)), key=lambda number: -rows[number]["length"]):
        tokens, start = [*rows[number]["input_ids"], *rows[number]["label_ids"]], len(rows[number]["input_ids"])
        for sequence in sequences:
            # Its last token is learned, not read.
            alike = sequence.tokens[: len(tokens) - 1] == tokens[:-1] and len(tokens) <= sequence.labels[-1]
            if alike and _begins(rows[number], rows[sequence.records[0]]):
                sequence.records.append(number)
                sequence.labels.append(start)
                break
        else:
            blank = [0] * len(tokens)
            sequences.append(SharedSequence(tokens, [*range(len(tokens))], blank, blank, [number], [start]))
    return sequences


def _begins(row: dict[str, Any], longer: dict[str, Any]) -> bool:
    """Whether the graphs of a row are the first ones of another."""
    return all(longer[name][: len(row[name])] == row[name] for name in SampleGraph._fields if name in row)


def _common(one: Sequence[int], other: Sequence[int], own: int | None) -> int:
    """How many tokens two prompts begin with alike; the last of a prompt, which its label follows, stays its own."""
    pairs = zip(one[:-1], other[:-1])
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1] != own, pairs))


@dataclass(frozen=True)
class RecordCollator:
    """Pads records on the right, masks everything but label and end-of-sequence tokens, and batches all graphs at once.

    No attention mask is made: with causal attention and padding on the right no real token ever sees padding, and
    without a mask attention takes its fast path.

    Attributes:
        pad_token_id: Padding token.
        table: Embedding table; None for models without graph.
        action_weight: Weight of the action marker's tokens in the loss.
        answer_weight: Weight of the label tokens of answering records in the loss.
        tokens_per_record: Label tokens of a record on average: each record then has that weight, divided among its
            label tokens; None gives each token the weight 1.
        shared_prefixes: Put records of one question into one row, their common prefix once.
        interleaved: With shared prefixes: prompts go on from each other; see `chain_records`.
        graph_token_id: Placeholder, which ends what is shared.
    """

    pad_token_id: int
    table: EmbeddingTable | None
    action_weight: float = 1.0
    answer_weight: float = 1.0
    tokens_per_record: float | None = None
    shared_prefixes: bool = False
    interleaved: bool = False
    graph_token_id: int | None = None

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Make a batch.

        Args:
            rows: Records, as `train.record_rows.encode_rows` makes them.

        Returns:
            `input_ids` (B, T), `labels` (B, T) with -100 where nothing is learned, `graphs`, a PyG batch, and
            `label_weights` (B, T) where markers or answers weigh more or less than other tokens. With shared prefixes
            that need a mask also `position_ids`, `record_of` and `shared`, (B, T) each. The graphs are in the order of
            their placeholders.
        """
        sequences = share_prefixes(rows, self.graph_token_id, self.shared_prefixes, self.interleaved)
        input_ids = pad_batch([sequence.tokens for sequence in sequences], self.pad_token_id, _MULTIPLE)
        labels = torch.full_like(input_ids, IGNORED)
        weights = torch.ones(input_ids.shape)
        for place, sequence in enumerate(sequences):
            for number, start in zip(sequence.records, sequence.labels):
                row = rows[number]
                end = start + len(row["label_ids"])
                labels[place, start:end] = torch.tensor(row["label_ids"])
                if row["marker"]:
                    weights[place, start : start + row["marker"]] = self.action_weight
                else:
                    weights[place, start:end] = self.answer_weight
                if self.tokens_per_record is not None:
                    weights[place, start:end] *= self.tokens_per_record / (end - start)
        batch: dict[str, Any] = {"input_ids": input_ids, "labels": labels}
        if (self.action_weight, self.answer_weight, self.tokens_per_record) != (1.0, 1.0, None):
            batch["label_weights"] = weights
        if self.shared_prefixes and not self.interleaved:
            for name, values, padding in (
                ("position_ids", [sequence.positions for sequence in sequences], 0),
                ("record_of", [sequence.record_of for sequence in sequences], PADDING),
                ("shared", [sequence.shared for sequence in sequences], 0),
            ):
                batch[name] = pad_batch(values, padding, _MULTIPLE)
        if self.table is not None:
            # In a chain the first record has the graphs of all.
            own = 1 if self.interleaved else None
            ordered = [rows[number] for sequence in sequences for number in sequence.records[:own]]
            parts = [part for row in ordered for part in zip(*(row[name] for name in SampleGraph._fields))]
            # Without any, an empty graph gives the encoder its gradient, which distributed training waits for.
            graphs = [SampleGraph(*part) for part in parts] or [SampleGraph([], [], [], [], [])]
            batch["graphs"] = batch_graphs(graphs, self.table.__getitem__)
        return batch
