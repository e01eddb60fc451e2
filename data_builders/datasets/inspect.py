"""Read a data set folder, or files of chats, row by row, for `tripletune data stats`, `validate` and `peek`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import regex as re

from tripletune.core.data.chats import is_chat
from tripletune.core.data.fields import NotedRow, unread_columns
from tripletune.core.data.jsonl import record_files, shards_of
from tripletune.core.files import few, read_json
from tripletune.core.rows import Row, file_rows
from tripletune.core.tables import on_one_line
from tripletune.data_builders.datasets import Numbers, R, RowKind, Statistics
from tripletune.data_builders.datasets.kinds import CHATS, KINDS, RECORDS
from tripletune.data_builders.datasets.lookup import SeenTable
from tripletune.data_builders.datasets.writer import CARD, DROPPED, STATISTICS

_SHARD_NAME = re.compile(r"(?P<split>.+?)-\d{5}\.(jsonl|parquet)")
_NO_ENTITY = re.compile(r"[^\w\s.,:!?()/'-]")


def dataset_files(folder: str | Path) -> dict[str, list[Path]]:
    """The shards of a data set folder by split, sorted by name; the error says why a finished build has none.

    A file is the only shard of a split with the file's name. A folder without numbered shards may have one file per
    split, such as `train.jsonl`.

    Raises:
        FileNotFoundError: There is no such file or folder, or it has no shards.
        ValueError: A shard is missing, or there in two formats.
    """
    folder = Path(folder)
    if folder.is_file():
        return {folder.name.partition(".")[0]: [folder]}
    if not folder.is_dir():
        raise FileNotFoundError(f"no such file or folder: {folder}")
    files: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()):
        shard_name = _SHARD_NAME.fullmatch(path.name)
        if shard_name:
            files.setdefault(shard_name["split"], []).append(path)
    if not files:
        for path in shards_of(folder, ""):
            files[path.name.partition(".")[0]] = [path]
    if not files:
        raise FileNotFoundError(
            why_empty(folder) or f"{folder} holds no shards (<split>-00000.jsonl or .parquet) and no <split>.jsonl"
        )
    # Shards that are missing, there twice or in another format are errors.
    return {split: record_files(folder, split) for split in files}


class StoredStatistics(NamedTuple):
    """The content of `statistics.json`.

    Attributes:
        numbers: See `Statistics.to_json`.
        facts: The fields of `BuildFacts`, as far as the version that wrote the file had them.
    """

    numbers: Numbers
    facts: dict[str, Any]


def stored_statistics(folder: str | Path) -> StoredStatistics | None:
    """The content of a folder's `statistics.json`; None if there is no such file, or an empty one."""
    path = Path(folder) / STATISTICS
    content = read_json(path) if path.is_file() else {}
    if not content:
        return None
    numbers, facts = content.get("statistics"), content.get("build")
    if not isinstance(numbers, dict) or not isinstance(facts, dict):
        raise ValueError(f"{path}: the file does not hold the statistics of a data set; build the data set again")
    return StoredStatistics(numbers, facts)


def why_empty(folder: str | Path) -> str | None:
    """Say why a finished data set has no records; None if the folder has records or is no data set.

    Such a folder has a card and statistics, so it is not broken, and the reasons of the drops say what to change.
    """
    stored = stored_statistics(folder)
    if stored is None or stored.numbers["records"]:
        return None
    drops: Counter[str] = Counter()
    for drops_of_source in stored.facts["drops"].values():
        drops.update(drops_of_source)
    reasons = few([f"{number:,} x {reason}" for reason, number in drops.most_common() if number > 0])
    shown = f"{Path(folder) / CARD} has all counts, and {Path(folder) / DROPPED} has the replies"
    return f"{folder} has no records, since no question could be labelled ({reasons}): {shown}"


def kind_of(folder: str | Path) -> RowKind[Any]:
    """The kind of a data set's rows, according to the first row; records if that row is unreadable."""
    files = chain.from_iterable(dataset_files(folder).values())
    with suppress(ValueError):
        for file in files:
            for _, row in file_rows(file):
                return _kind_of_row(row)
    return RECORDS


def _kind_of_row(row: Row) -> RowKind[Any]:
    """The kind whose keys a row has; for a row of no kind, the one whose reader's error helps most."""
    for kind in KINDS.values():
        if row.keys() >= set(kind.keys):
            return kind
    # A row that has parts of a record lacks others; the reader of chats names the layouts that a row may have.
    is_part_of_record = bool(row.keys() & {*RECORDS.keys, "steps"})
    return RECORDS if is_part_of_record and not is_chat(row) else CHATS


class Leak(NamedTuple):
    """A value that must not occur in two splits, and does.

    Attributes:
        side, value: See `datasets.SplitValue`.
        other_split: The split of the first row with this value.
    """

    side: str
    value: str
    other_split: str


def _find_leaks(kind: RowKind[R], row: R, split: str, seen: SeenTable) -> list[Leak]:
    """Values of the row that occurred in another split before; new ones are added to `seen` with the split."""
    leaks = []
    for side, value in kind.split_values(row):
        first_split = seen.get_or_add(side, value, split)
        if first_split not in (None, split):
            leaks.append(Leak(side, value, str(first_split)))
    return leaks


class CountedRows(NamedTuple):
    """Statistics of a data set, and per kind of value (`Leak.side`) how many values are also in another split."""

    statistics: Statistics[Any]
    leaks: Counter[str]


def count_rows(folder: str | Path, tokenizer: str | None = None) -> CountedRows:
    """Read all rows of a data set; lengths are in tokens of a model's tokenizer, or in words."""
    kind = kind_of(folder)
    leaks: Counter[str] = Counter()
    statistics = Statistics(kind, tokenizer)
    with SeenTable() as seen:
        for split, row in _read_rows(folder, kind):
            statistics.add(row, split)
            leaks.update(leak.side for leak in _find_leaks(kind, row, split, seen))
    return CountedRows(statistics, leaks)


def troubles(folder: str | Path, unread: Counter[str] | None = None) -> Iterator[str]:
    """Faults of a data set, one line each: bad rows, repeated ids, values in two splits, wrong numbers of rows.

    Reading goes on after a fault, so that a user sees all of them at once.

    Args:
        folder: Folder of a data set, or a file.
        unread: Counts, for each column that is not read, the rows that have a value there. That is no fault.
    """
    empty = why_empty(folder)
    if empty is not None:
        yield empty
        return
    kind = kind_of(folder)
    counts: Counter[str] = Counter()
    columns: Counter[str] = Counter() if unread is None else unread
    with SeenTable() as seen:
        for split, files in dataset_files(folder).items():
            for where, row in chain.from_iterable(_read_or_error(file, kind, columns) for file in files):
                counts[split] += 1
                yield from _row_troubles(kind, where, row, split, seen)
    if not counts:
        yield f"{folder} holds no {kind.name}"
    stored = stored_statistics(folder)
    expected = counts if stored is None else stored.numbers["splits"]
    for split in sorted({*counts, *expected}):
        if counts[split] != expected.get(split, 0):
            here = f"split {split!r} has {counts[split]} rows, but this file says {expected.get(split, 0)}"
            yield f"{Path(folder) / STATISTICS}: {here}"


def _row_troubles(kind: RowKind[R], where: str, row: R | ValueError, split: str, seen: SeenTable) -> Iterator[str]:
    """Faults of a row, which may be the `ValueError` of reading it; `seen` gets its id and what no split may share."""
    if isinstance(row, ValueError):
        yield str(row)
        return
    if not seen.add_if_new("id", row.id):
        # Chats of others often have no id; theirs is then a fingerprint of the row.
        what = "the chat, or its id," if kind is CHATS else f"{kind.name} id {row.id!r}"
        yield f"{where}: {what} occurs a second time"
    for leak in _find_leaks(kind, row, split, seen):
        yield f"{where}: {leak.side} {leak.value[:80]!r} is in {split!r} and in {leak.other_split!r}"


def _read_or_error(file: Path, kind: RowKind[R], unread: Counter[str]) -> Iterator[tuple[str, R | ValueError]]:
    """Yield rows with their places; for a bad row, its `ValueError`, so that the rows after it are checked too.

    `unread` counts, for the columns that are not read, the rows that have a value there.
    """
    try:
        for where, row in file_rows(file):
            noted = NotedRow(row)
            read: R | ValueError
            try:
                read = kind.read(noted, where)
                unread.update(unread_columns(noted))
            except ValueError as error:
                read = error
            yield where, read
    except ValueError as error:
        # The rest of the file can't be decoded, so its rows can't be checked.
        yield str(file), error


class SplitRow(NamedTuple):
    """A row of a data set after the name of its split."""

    split: str
    row: Any


def _read_rows(folder: str | Path, kind: RowKind[Any], split: str | None = None) -> Iterator[SplitRow]:
    """Read the rows of a data set, or of one split, each after the name of its split.

    An unreadable row is an error here, unlike in `troubles`: statistics without it would not be those of the data.
    """
    files = dataset_files(folder)
    if split is not None and split not in files:
        raise ValueError(f"{folder} has no split {split!r}; it has {', '.join(files)}")
    for name in [split] if split else files:
        for file in files[name]:
            for where, row in file_rows(file):
                yield SplitRow(name, kind.read(row, where))


def find_rows(
    folder: str | Path,
    identity: str | None = None,
    number: int | None = None,
    label: str | None = None,
    split: str | None = None,
) -> list[SplitRow]:
    """Rows of a data set after the names of their splits, by the filters of `tripletune data peek`.

    Without filters, this is the first row. With an id it is the row that has it, or else all rows of the question that
    has it. A `ValueError` says that no row fits.
    """
    kind = kind_of(folder)
    if number is not None and number < 1:
        raise ValueError(f"number {number}: {kind.plural} are counted from 1")
    if label is not None and label not in kind.labels:
        why = f"is not one of {', '.join(kind.labels)}" if kind.labels else "can't be used"
        raise ValueError(f"label {label!r} {why}, since {folder} holds {kind.plural}")
    rows = _matching_rows(folder, kind, identity, label, split)
    if identity and not number:
        selected = list(rows)
        with_this_id = [split_row for split_row in selected if split_row.row.id == identity]
        if with_this_id:
            selected = with_this_id[:1]
    else:
        first = (number or 1) - 1
        selected = list(islice(rows, first, first + 1))
    if not selected:
        options = {"id": identity, "number": number, "label": label, "split": split}
        filters = [f"{name} {value}" for name, value in options.items() if value is not None]
        if not filters:
            raise ValueError(f"{folder} has no {kind.name}")
        raise ValueError(f"{folder} has no {kind.name} with {', '.join(filters)}")
    return selected


def _matching_rows(
    folder: str | Path, kind: RowKind[Any], identity: str | None, label: str | None, split: str | None
) -> Iterator[SplitRow]:
    """The rows of a split (None: of all) with this id or question id, and this label (None: any)."""
    for split_row in _read_rows(folder, kind, split):
        row = split_row.row
        if identity not in (None, row.id, getattr(row, "question_id", None)):
            continue
        if label is None or kind.label(row) == kind.labels[label]:
            yield split_row


def row_text(kind: RowKind[R], row: R, split: str) -> str:
    """A row as text: description, the model's whole input, label, and of a preference pair the rejected reply.

    Each line of the description is one line.
    """
    texts = kind.text(row)
    lines = [" ".join(line.splitlines()) for line in kind.describe(row, split)]
    lines += ["", texts.model_input]
    if texts.label:
        lines += ["", f"=> {texts.label}"]
    rejected = getattr(row, "rejected", "")
    if rejected:
        lines += ["", f"rejected: {rejected}"]
    return "\n".join(lines)


def mermaid(kind: RowKind[R], row: R) -> str:
    """The graph of a row as Mermaid text; names that several steps share (bridges) have a bold frame.

    Nodes are numbered in the order in which the triples name them, since names may hold any character.

    Raises:
        ValueError: The row has no triples.
    """
    graphs = kind.graphs(row)
    # The steps in which each name occurs; the number of a node is the place of its name.
    steps_of: dict[str, set[int]] = {}
    arrows = []
    for step, triples in enumerate(graphs):
        for triple in dict.fromkeys(triples):
            for name in (triple.subject, triple.object):
                steps_of.setdefault(name, set()).add(step)
            names = list(steps_of)
            label = f"q_{step}: {triple.predicate}" if len(graphs) > 1 else triple.predicate
            arrows.append(
                f"    n{names.index(triple.subject)} -->|{_mermaid_label(label)}| n{names.index(triple.object)}",
            )
    if not steps_of:
        raise ValueError(f"{kind.name} {row.id!r} has no triples to draw; choose another row (--number, --label)")
    lines = ["flowchart LR"]
    bridges = []
    for number, (name, steps) in enumerate(steps_of.items()):
        lines.append(f"    n{number}[{_mermaid_label(name)}]")
        if len(steps) > 1:
            bridges.append(f"n{number}")
    lines += arrows
    if bridges:
        lines.append("    classDef bridge stroke-width:3px")
        lines.append(f"    class {','.join(bridges)} bridge")
    return "\n".join(lines)


def _mermaid_label(text: str) -> str:
    """A label without Mermaid syntax: special characters are written as numeric codes."""
    escaped = _NO_ENTITY.sub(lambda match: f"#{ord(match[0])};", on_one_line(text))
    return f'"{escaped}"'
