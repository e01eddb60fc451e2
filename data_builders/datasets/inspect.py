"""Read any data set folder row by row, for `tripletune data stats`, `validate` and `peek`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any

import regex as re

from tripletune.core.data.jsonl import stored_rows
from tripletune.core.files import few, read_json
from tripletune.core.tables import printable
from tripletune.data_builders.datasets import RowKind, SeenTable, Statistics
from tripletune.data_builders.datasets.kinds import KINDS, RECORDS
from tripletune.data_builders.datasets.writer import CARD, DROPPED, STATISTICS

_SHARD_NAME = re.compile(r"(?P<split>.+?)-\d{5}\.(jsonl|parquet)")
_NO_ENTITY = re.compile(r"[^\w\s.,:!?()/'-]")


def dataset_files(folder: str | Path) -> dict[str, list[Path]]:
    """The shards of a data set folder by split, sorted by name."""
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"no such folder: {folder}")
    files: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()):
        if match := _SHARD_NAME.fullmatch(path.name):
            files.setdefault(match["split"], []).append(path)
    if not files:
        raise FileNotFoundError(why_empty(folder) or f"{folder} holds no shards (<split>-00000.jsonl or .parquet)")
    return files


def stored_statistics(folder: str | Path) -> dict[str, Any]:
    """The content of a folder's `statistics.json`; empty if there is no such file."""
    path = Path(folder) / STATISTICS
    content = read_json(path) if path.is_file() else {}
    if content and not (isinstance(content.get("statistics"), dict) and isinstance(content.get("build"), dict)):
        raise ValueError(f"{path}: the file does not hold the statistics of a data set; build the data set again")
    return content


def why_empty(folder: str | Path) -> str | None:
    """Say why a finished data set has no records; None if the folder has records or is no data set."""
    content = stored_statistics(folder)
    if not content or content["statistics"]["records"]:
        return None
    counts: Counter[str] = sum(map(Counter, content["build"]["drops"].values()), Counter())
    reasons = few([f"{n:,} x {reason}" for reason, n in counts.most_common()])
    shown = f"{Path(folder) / CARD} has all counts, and {Path(folder) / DROPPED} has the replies"
    return f"{folder} has no records, since no question could be labelled ({reasons}): {shown}"


def kind_of(folder: str | Path) -> RowKind[Any]:
    """The kind of a data set's rows, according to the first row; records if that row is unreadable."""
    rows = chain.from_iterable(map(stored_rows, chain(*dataset_files(folder).values())))
    with suppress(ValueError):
        for _, first in rows:
            return next((kind for kind in KINDS.values() if set(kind.keys) <= set(first)), RECORDS)
    return RECORDS


def _leaks(kind: RowKind[Any], row: Any, split: str, seen: SeenTable) -> list[tuple[str, str, str | None]]:
    """Values of the row that occur in another split (a question, a text): kind, value, split."""
    sides = [(what, value, seen.first(what, value, split)) for what, value in kind.sides(row)]
    return [side for side in sides if side[2] not in (None, split)]


def count_rows(folder: str | Path, tokenizer: str | None = None) -> tuple[Statistics[Any], Counter[str]]:
    """Statistics of a data set, and per kind of value the number of values that are also in another split."""
    kind, leaks = kind_of(folder), Counter[str]()
    statistics = Statistics(kind, tokenizer)
    with SeenTable() as seen:
        for split, row in _rows(folder, kind):
            statistics.add(row, split)
            leaks.update(what for what, _, _ in _leaks(kind, row, split, seen))
    return statistics, leaks


def troubles(folder: str | Path) -> Iterator[str]:
    """Faults of a data set, one line each: bad rows, repeated ids, values in two splits, wrong numbers of rows."""
    if (empty := why_empty(folder)) is not None:
        yield empty
        return
    kind, counts = kind_of(folder), Counter[str]()
    with SeenTable() as seen:
        for split, files in dataset_files(folder).items():
            for where, row in (found for file in files for found in _checked(file, kind)):
                counts[split] += 1
                if isinstance(row, ValueError):
                    yield str(row)
                    continue
                if seen.first("id", row.id) is not None:
                    yield f"{where}: {kind.name} id {row.id!r} occurs a second time"
                for what, value, other in _leaks(kind, row, split, seen):
                    yield f"{where}: {what} {value[:80]!r} is in {split!r} and in {other!r}"
    if not counts:
        yield f"{folder} holds no {kind.name}"
    expected = stored_statistics(folder).get("statistics", {"splits": counts})["splits"]
    for split in sorted({*counts, *expected}):
        if counts[split] != expected.get(split, 0):
            here = f"split {split!r} has {counts[split]} rows, but this file says {expected.get(split, 0)}"
            yield f"{Path(folder) / STATISTICS}: {here}"


def _checked(file: Path, kind: RowKind[Any]) -> Iterator[tuple[str, Any]]:
    """Yield rows with their places; for a bad row, yield its `ValueError`."""
    try:
        for where, row in stored_rows(file):
            try:
                yield where, kind.read(row, where)
            except ValueError as error:
                yield where, error
    except ValueError as error:
        # The rest of the file can't be decoded, so its rows can't be checked.
        yield str(file), error


def _rows(folder: str | Path, kind: RowKind[Any], split: str | None = None) -> Iterator[tuple[str, Any]]:
    files = dataset_files(folder)
    if split is not None and split not in files:
        raise ValueError(f"{folder} has no split {split!r}; it has {', '.join(files)}")
    for name in [split] if split else files:
        for file in files[name]:
            yield from ((name, kind.read(row, where)) for where, row in stored_rows(file))


def find_rows(
    folder: str | Path,
    identity: str | None = None,
    number: int | None = None,
    label: str | None = None,
    split: str | None = None,
) -> list[tuple[str, Any]]:
    """Rows of a data set with their splits, by the filters of `tripletune data peek`; without filters the first row."""
    kind = kind_of(folder)
    if number is not None and number < 1:
        raise ValueError(f"number {number}: {kind.plural} are counted from 1")
    if label is not None and label not in kind.labels:
        known = f"is not one of {', '.join(kind.labels)}" if kind.labels else "can't be used"
        raise ValueError(f"label {label!r} {known}, since {folder} holds {kind.plural}")
    fitting = (
        (name, row)
        for name, row in _rows(folder, kind, split)
        if identity in (None, row.id, getattr(row, "question_id", None))
        and (label is None or kind.label(row) == kind.labels[label])
    )
    found = list(islice(fitting, (number or 1) - 1, None if identity and not number else number or 1))
    # The one row with this id, or else all rows of the question with this id.
    found = [item for item in found if item[1].id == identity][:1] or found
    if not found:
        asked = {"id": identity, "number": number, "label": label, "split": split}
        filters = ", ".join(f"{name} {value}" for name, value in asked.items() if value is not None)
        raise ValueError(f"{folder} has no {kind.name}{f' with {filters}' if filters else ''}")
    return found


def row_text(kind: RowKind[Any], row: Any, split: str) -> str:
    """A row as text: description, the model's whole input, and label."""
    read, learned = kind.text(row)
    about = [" ".join(line.splitlines()) for line in kind.describe(row, split)]
    return "\n".join([*about, "", read, "", f"=> {learned}"])


def mermaid(kind: RowKind[Any], row: Any) -> str:
    """The graph of a row as Mermaid text; names that several steps share (bridges) have a bold frame."""
    graphs, steps, arrows = kind.graphs(row), defaultdict[str, set[int]](set), []
    for step, triples in enumerate(graphs):
        for triple in dict.fromkeys(triples):
            for name in (triple.subject, triple.object):
                steps[name].add(step)
            ends = [f"n{list(steps).index(name)}" for name in (triple.subject, triple.object)]
            label = f"q_{step}: {triple.predicate}" if len(graphs) > 1 else triple.predicate
            arrows.append(f"    {ends[0]} -->|{_quoted(label)}| {ends[1]}")
    if not steps:
        raise ValueError(f"{kind.name} {row.id!r} has no triples to draw; choose another row (--number, --label)")
    bridges = [f"n{number}" for number, shared in enumerate(steps.values()) if len(shared) > 1]
    return "\n".join([
        "flowchart LR",
        *(f"    n{number}[{_quoted(name)}]" for number, name in enumerate(steps)),
        *arrows,
        *(["    classDef bridge stroke-width:3px", f"    class {','.join(bridges)} bridge"] if bridges else []),
    ])  # fmt: skip


def _quoted(text: str) -> str:
    """A label without Mermaid syntax: special characters are written as numeric codes."""
    return '"' + _NO_ENTITY.sub(lambda match: f"#{ord(match[0])};", " ".join(printable(text).split())) + '"'
