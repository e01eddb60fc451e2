"""A few rows of every kind, for the tests of data sets."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tripletune.core.data.pairs import ExtractionPair, Trajectory
from tripletune.core.data.records import Action, Record, Step
from tripletune.core.data.triples import Triple
from tripletune.data_builders.datasets import Statistics
from tripletune.data_builders.datasets.kinds import KINDS
from tripletune.data_builders.datasets.writer import BuildFacts, FolderOptions, new_dataset

STEP = Step("q", (Triple("a", "r", "b"), Triple("a", "s", "c"), Triple("a", "r", "b")))
OTHER = Step("p", (Triple("b", "r", "the Answer"),), "title\ntext")
RECORDS = [
    Record("1", "q", "planning", "Why?", Action.SUBQ, (), "Who is it?", source="x"),
    Record("2", "q", "planning", "Why?", Action.SUFFICIENT, (STEP, OTHER), source="x"),
    Record("3", "q", "answering", "Why?", Action.SUFFICIENT, (STEP, OTHER), answers=("answer", "one"), source="x"),
    Record("4", "p", "answering", "When — wann?", Action.SUFFICIENT, (STEP,), answers=("Yes",), source="x"),
    Record("5", "o", "answering", "How?", Action.NO_RETRIEVAL, (), answers=("a b c",), source="y"),
]
PAIRS = [
    ExtractionPair(
        "a", "Ada was born in London.", "Ada", (Triple("Ada", "born in", "London"), Triple("Ada", "x", "Rome"))
    ),
    ExtractionPair("b", "Oslo", "", (Triple("Oslo", "is", "Oslo"),), "x"),
    ExtractionPair("c", "Hello there"),
]
CHATS = [
    Trajectory(
        f"{name}:0", name, "cirag.integrate", "teacher",
        ({"role": "user", "content": f"Where is {name}?"}, {"role": "assistant", "content": "here it is"}),
        (False, True),
    )
    for name in ("u", "v")
]  # fmt: skip
# What others have published, a folder beside the repository.
SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
ROWS: dict[str, list[Any]] = {"records": RECORDS, "pairs": PAIRS, "trajectories": CHATS}


def shards(folder: Path) -> dict[str, bytes]:
    """The bytes of the JSON-lines files of a folder."""
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.jsonl"))}


def build_facts(folder: Path) -> dict[str, Any]:
    """What a data set's statistics say of its build."""
    found: dict[str, Any] = json.loads((folder / "statistics.json").read_text(encoding="utf-8"))["build"]
    return found


def hotpot_row(number: int, **more: Any) -> dict[str, Any]:
    """A question in the layout of HotpotQA, which needs the first of its two passages."""
    return {
        "_id": f"id{number}",
        "question": f"Question number {number}?",
        "answer": f"answer {number}",
        "type": "bridge",
        "supporting_facts": [["A", 0]],
        "context": [["A", [f"Text {number}."]], ["B", ["Other."]]],
    } | more


def shared(name: str) -> Path:
    """A published file; the test is skipped where it is not on this machine."""
    if not (SHARED / name).is_file():
        pytest.skip(f"{SHARED / name} is not on this machine")
    return SHARED / name


def counted(kind: str = "records", rows: Iterable[Any] | None = None) -> dict[str, Any]:
    """The numbers of rows of a kind, the last one in the validation split."""
    statistics = Statistics(KINDS[kind])
    rows = list(ROWS[kind] if rows is None else rows)
    for row in rows:
        statistics.add(row, "validation" if row is rows[-1] else "train")
    return statistics.to_json()


def write_rows(folder: Path, kind: str, splits: dict[str, list[Any]], **options: Any) -> Path:
    """A data set with rows of a kind by split."""
    with new_dataset(FolderOptions(str(folder), **options), KINDS[kind]) as dataset:
        for split, rows in splits.items():
            for row in rows:
                dataset.write(row, split)
        dataset.finish(BuildFacts("T", "S."))
    return folder
