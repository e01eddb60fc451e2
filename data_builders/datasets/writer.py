"""Writes a data set folder for `datasets.load_dataset(folder)`: shards `<split>-00000.jsonl` or `.parquet`, or one file
`<split>.jsonl` per split, and a card.

The folder appears complete or not at all, and only one program writes it at a time (`core.files.new_folder`). The
card gives sources, models, numbers, and samples.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias

import yaml

from tripletune.core.files import check_folder, file_digest, json_line, new_folder, write_json, write_text
from tripletune.core.options import rare, require, setting
from tripletune.core.rows import Row
from tripletune.core.tables import Table, code_span, on_one_line, plain, printable
from tripletune.data_builders.datasets import Layout, Numbers, R, Sample, Statistics, WrittenKind

if TYPE_CHECKING:
    import pyarrow as pa

CARD = "README.md"
STATISTICS = "statistics.json"
# File of the questions that a teacher LLM could not label (`data_builders.subq.build`).
DROPPED = "dropped.ndjson"
_LONGEST_SAMPLE = 2000
_SHARDS = ("*-[0-9][0-9][0-9][0-9][0-9].jsonl", "*-[0-9][0-9][0-9][0-9][0-9].parquet")
# The files of kinds that are not sharded.
_WHOLE_SPLITS = ("train.jsonl", "test.jsonl")
# A type of values as the head of a card has it; see `_hub_features`.
_HubFeature: TypeAlias = str | dict[str, Any] | list[dict[str, Any]]
# Names of the files in a data set folder.
MADE = (STATISTICS, *_SHARDS, *_WHOLE_SPLITS, CARD, DROPPED)
_ROW_GROUP = 512


@dataclass(frozen=True)
class FolderOptions:
    """Output folder and format."""

    output: str = field(metadata={"help": "folder of the data set"})
    format: Literal["jsonl", "parquet"] = setting("jsonl", "format of the shards")
    shard_size: int = rare(50_000, "rows per shard", at_least=1)
    overwrite: bool = setting(False, "replace a data set in the output folder")
    tokenizer: str | None = setting(None, "count the card's tokens with this model's tokenizer instead of words")

    def __post_init__(self) -> None:
        require(self)
        check_folder(self.output, MADE, self.overwrite)


class DatasetWriter(Generic[R]):
    """Writes a data set; `new_dataset` returns one.

    Args:
        folder: Where the files are written.
        kind: The kind of the rows.
        options: Folder, format and size of the shards; the unit of lengths.
        sources: The input files that exist, for the card.
    """

    def __init__(self, folder: Path, kind: WrittenKind[R], options: FolderOptions, sources: Sequence[str]) -> None:
        self.folder = folder
        self.statistics = Statistics(kind, options.tokenizer)
        self._kind = kind
        self._options = options
        self._sources = sources
        # The unfinished shard of each split.
        self._shards: dict[str, _Shard] = {}

    def write(self, row: R, split: str) -> None:
        """Append a row to a split, and count it; a full shard is closed, so one shard per split is open at a time."""
        if split not in self._shards:
            self._shards[split] = _Shard(self.folder / self._next_file(split), self._kind)
        self._shards[split].write(row.to_json())
        self.statistics.add(row, split)
        is_full = self.statistics.splits[split] % self._options.shard_size == 0
        if is_full and self._kind.sharded:
            self._shards.pop(split).close()

    def _next_file(self, split: str) -> str:
        """The name of the file that the next row of a split opens.

        Names have the form that `load_dataset` and `inspect.dataset_files` read.
        """
        if not self._kind.sharded:
            return f"{split}.jsonl"
        number = self.statistics.splits[split] // self._options.shard_size
        return f"{split}-{number:05d}.{self._options.format}"

    def close(self) -> None:
        """Finish the shards; a second call does nothing, since `finish` and the end of the block both close."""
        while self._shards:
            self._shards.popitem()[1].close()

    def finish(self, facts: BuildFacts) -> Numbers:
        """Finish the shards and write card and statistics; return the statistics.

        Completes `facts` in place: the input files, unless it has files, and the options of the folder after its own.
        """
        self.close()
        if not facts.files:
            for path in filter(os.path.isfile, self._sources):
                facts.files[path] = file_digest(path)
        # A kind that is not sharded offers none of these options to its users.
        if self._kind.sharded:
            for name in ("format", "shard_size", "tokenizer"):
                facts.options[name] = getattr(self._options, name)
        numbers = self.statistics.to_json()
        head = _front_matter(self._kind, facts.title, numbers["splits"], self._options.format)
        write_text(self.folder / CARD, f"{head}\n{card_body(self._kind, facts, numbers)}")
        write_json(self.folder / STATISTICS, {"statistics": numbers, "build": dataclasses.asdict(facts)})
        return numbers


@contextmanager
def new_dataset(
    options: FolderOptions, kind: WrittenKind[R], sources: Sequence[str | Path | None] = ()
) -> Iterator[DatasetWriter[R]]:
    """Open a data set that replaces `options.output` when the block succeeds; call `finish` in the block.

    The `sources` are never overwritten; sources that are not files (hub ids) are ignored.
    """
    existing = [str(path) for path in sources if path is not None and Path(path).exists()]
    # The writer closes its shards before the folder gets its name.
    with (
        new_folder(options.output, MADE, options.overwrite, existing) as folder,
        closing(DatasetWriter(folder, kind, options, existing)) as writer,
    ):
        yield writer


class _Shard:
    """A file of a split.

    Rows are written in groups of `_ROW_GROUP`, as Parquet needs, so at most one group is in memory.

    Args:
        path: The file; its ending decides the format.
        kind: The kind of the rows, whose layout a Parquet file needs.
    """

    def __init__(self, path: Path, kind: WrittenKind[Any]) -> None:
        self._rows: list[Row] = []
        self._append: Callable[[list[Row]], None]
        self._close: Callable[[], None]
        if path.suffix == ".jsonl":
            file = path.open("w", encoding="utf-8")
            self._append = lambda rows: file.writelines(map(json_line, rows))
            self._close = file.close
        else:
            import pyarrow as pa
            import pyarrow.parquet as pq

            # The schema is explicit, since empty lists in the first rows of a shard do not show their types.
            schema = pa.schema(_arrow_type(kind.layout))
            table = pq.ParquetWriter(path, schema, compression="zstd")
            self._append = lambda rows: table.write_table(pa.Table.from_pylist(rows, schema=schema))
            self._close = table.close

    def write(self, row: Row) -> None:
        """Add a row; it is in the file once its group is full, or the shard is closed."""
        self._rows.append(row)
        if len(self._rows) == _ROW_GROUP:
            self._write_group()

    def close(self) -> None:
        """Write the last rows and close the file."""
        self._write_group()
        self._close()

    def _write_group(self) -> None:
        """Write the rows that wait, as one group."""
        if self._rows:
            self._append(self._rows)
            self._rows = []


def _arrow_type(layout: Layout) -> pa.DataType:
    """A `WrittenKind.layout` as an Arrow type: structures and lists of the types that it names."""
    import pyarrow as pa

    if isinstance(layout, Mapping):
        return pa.struct([(name, _arrow_type(inner)) for name, inner in layout.items()])
    if isinstance(layout, list):
        return pa.list_(_arrow_type(layout[0]))
    return pa.type_for_alias(layout)


@dataclass
class BuildFacts:
    """Facts that a card shows beside its numbers.

    Attributes:
        title, summary: Heading and first paragraph.
        teachers: The model or annotations that labelled a source, by source.
        drops: Questions or rows left out, by source and reason.
        questions: Questions that gave records, by source.
        repairs: Replies that a repair turn corrected, by source and stage.
        refused: Rejected replies, also of repair turns, by source, stage and reason.
        recovered: Readable replies in another form than requested, by source.
        examples: Examples of left-out questions, by reason (`data_builders.subq.build`).
        issues: Warnings about rows that were read nevertheless, with how often.
        files: SHA-256 of each input file; `prompts` has those of the prompts.
        options: The options of the build.
        models: The model of each role.
        calls: Numbers of calls by stage; two runs of one build give equal numbers.
        notes: Paragraphs below the summary.
    """

    title: str
    summary: str
    teachers: dict[str, str] = field(default_factory=dict)
    drops: dict[str, dict[str, int]] = field(default_factory=dict)
    questions: dict[str, int] = field(default_factory=dict)
    repairs: dict[str, dict[str, int]] = field(default_factory=dict)
    refused: dict[str, dict[str, int]] = field(default_factory=dict)
    recovered: dict[str, dict[str, int]] = field(default_factory=dict)
    examples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    issues: dict[str, int] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    prompts: dict[str, str] = field(default_factory=dict)
    models: dict[str, str] = field(default_factory=dict)
    calls: dict[str, dict[str, float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def _front_matter(kind: WrittenKind[R], title: str, splits: Sequence[str], format: str) -> str:
    """The YAML head of a card, from which the hub's viewer knows the files of the splits and the features of a row."""
    ending = f"-*.{format}" if kind.sharded else ".jsonl"
    files = [{"split": split, "path": f"{split}{ending}"} for split in splits]
    head = {
        "pretty_name": title,
        "task_categories": [kind.hub_task],
        "tags": ["retrieval-augmented-generation", "knowledge-graph"],
        "configs": [{"config_name": "default", "data_files": files}],
        "dataset_info": {"config_name": "default", "features": _hub_features(kind.layout)},
    }
    return f"---\n{yaml.safe_dump(head, sort_keys=False, allow_unicode=True)}---\n"


def _hub_features(layout: Layout) -> _HubFeature:
    """A `WrittenKind.layout` as the hub writes it: the name of a type, `{"list": type}`, or a list of features.

    The hub has one form for a feature of a structure ("dtype", "list" or "struct" beside its name) and another for what
    stands inside a list.
    """
    if isinstance(layout, str):
        return layout
    if isinstance(layout, list):
        return {"list": _hub_features(layout[0])}
    features = []
    for name, inner in layout.items():
        feature = _hub_features(inner)
        if isinstance(inner, str):
            features.append({"name": name, "dtype": feature})
        elif isinstance(inner, list):
            features.append({"name": name, "list": _hub_features(inner[0])})
        else:
            features.append({"name": name, "struct": feature})
    return features


def card_body(kind: WrittenKind[R], facts: BuildFacts, numbers: Numbers) -> str:
    """The card's text below the YAML head, in Markdown: summary, numbers, what was left out and why, samples.

    Texts of rows stand in fences, and names are escaped, since the hub shows a card as a page.

    Args:
        kind: The kind of the rows.
        facts: What the build did.
        numbers: `Statistics.to_json`, so that a card can also be made from a stored `statistics.json`.
    """
    parts = [f"# {plain(facts.title)}", facts.summary, *facts.notes]
    if not numbers["records"]:
        parts.append("**No records: no question could be labelled.** The tables below say why.")
    for table in card_tables(kind, facts, numbers):
        parts.append(f"## {table.title}")
        if table.note:
            parts.append(table.note)
        parts.append(table.markdown())
    if facts.examples:
        parts += _example_lines(facts.examples)
    if numbers["samples"]:
        parts += ["## Samples", *_sample_lines(kind, numbers["samples"])]
    return "\n\n".join(parts) + "\n"


def card_tables(kind: WrittenKind[R], facts: BuildFacts, numbers: Numbers) -> list[Table]:
    """All tables of a card: numbers of rows and facts of the build.

    Empty tables are left out, since most builds have no repairs or warnings; the first one with the splits always
    stays.
    """
    splits = _cells_of_counts(numbers["splits"])
    tables = [Table(["split", kind.plural], splits, kind.plural.capitalize())]
    if numbers["records"]:
        tables += kind.tables(numbers, facts)
    for title, counts in (
        ("Left out", _by_source(facts.drops)),
        ("Rejected replies", _by_source(facts.refused)),
        ("Repaired replies", _by_source(facts.repairs)),
        ("Replies that were read although they did not have the requested form", _by_source(facts.recovered)),
        ("Warnings", facts.issues),
    ):
        tables.append(Table(["what", "count"], _cells_of_counts(counts), title))
    tables.append(Table(["role", "model"], facts.models.items(), "Models"))
    tables.append(_calls_table(facts.calls))
    for title, head, values in (
        ("Prompts", ("prompt", "SHA-256"), facts.prompts),
        ("Input files", ("file", "SHA-256"), facts.files),
        ("Options", ("option", "value"), facts.options),
    ):
        tables.append(Table(head, values.items(), title, cell=code_span))
    return tables[:1] + [table for table in tables[1:] if table.rows]


def _cells_of_counts(counts: Mapping[str, int]) -> list[list[str]]:
    """Counts as rows of a table."""
    return [[name, f"{count:,}"] for name, count in counts.items()]


def _calls_table(calls: Mapping[str, Mapping[str, float]]) -> Table:
    """The teacher's calls: a row per stage, and a column per number that any stage has: only one counts triples."""
    columns = list(dict.fromkeys(chain.from_iterable(calls.values())))
    rows = []
    for stage, numbers in calls.items():
        cells = [stage]
        for column in columns:
            cells.append(f"{numbers[column]:,}" if column in numbers else "-")
        rows.append(cells)
    head = ["stage", *(column.replace("_", " ") for column in columns)]
    return Table(head, rows, "Calls of the teacher")


def _code_block(text: str) -> str:
    """A Markdown code block of a text, with a longer fence than the text has."""
    longest_ticks = max((len(ticks) for ticks in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest_ticks + 1)
    return f"{fence}text\n{printable(text)}\n{fence}"


def _example_lines(examples: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Questions that the teacher could not label: stage of the failure, and start of the reply."""
    parts = [
        "## Examples of questions left out",
        f"Picked by a hash of the ids. `{DROPPED}` has all left-out questions, and the ledger has the whole replies.",
    ]
    for reason, rows in examples.items():
        lines = []
        for row in rows:
            lines.append(on_one_line(f"{row['question_id']}  {row['stage']}  {row['detail']}"))
            lines.append(f"    {on_one_line(row['reply']) or '(no reply)'}")
        parts += [f"### {plain(reason[:1].upper() + reason[1:])}", _code_block("\n".join(lines))]
    return parts


def _sample_lines(kind: WrittenKind[R], samples: Mapping[str, Sequence[Sample]]) -> list[str]:
    """Rows of each label as a model reads them; long rows are cut (`peek` shows whole rows)."""
    parts = [
        f"{kind.plural.capitalize()} picked by a hash of their ids: what the model reads (below its instruction), and "
        f"what it learns to write. Whole {kind.plural} and graphs: `tripletune data peek FOLDER --id ID`."
    ]
    for label, rows in samples.items():
        parts.append(f"### {plain(label)}")
        for row in rows:
            parts.append(code_span(row["id"]))
            parts.append(_code_block(f"{_cut_in_middle(row['input'])}\n=> {_cut_in_middle(row['label'])}"))
    return parts


def _cut_in_middle(text: str) -> str:
    """A text of at most about `_LONGEST_SAMPLE` characters, which says how many were left out."""
    if len(text) <= _LONGEST_SAMPLE:
        return text
    # The question stands last, so the middle is cut.
    tail = _LONGEST_SAMPLE // 3
    left_out = len(text) - _LONGEST_SAMPLE
    return f"{text[: _LONGEST_SAMPLE - tail]} [... {left_out:,} characters ...] {text[-tail:]}"


def _by_source(counts: dict[str, dict[str, int]]) -> dict[str, int]:
    """Counts by source and reason as counts by "source: reason"."""
    by_name = {}
    for source, numbers in counts.items():
        for reason, number in numbers.items():
            by_name[f"{source}: {reason}"] = number
    return by_name
