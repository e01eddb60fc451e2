"""Shows single records of a data set as the model sees them: `tripletune data peek DIR`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tripletune.data_builders.datasets.shards import dataset_files
from tripletune.data_builders.datasets.stats import sample_label, sample_labels
from tripletune.models.data.records import Record, read_records
from tripletune.models.prompts.rendering import Instructions, render

# What --label takes: the short names of `data_builders.stats.sample_labels`.
LABELS = {
    "subq": "[SUBQ]",
    "sufficient": "[SUFFICIENT]",
    "no_retrieval": "[NO_RETRIEVAL]",
    "answer": "answer after retrieval",
    "direct_answer": "answer without retrieval",
}


def find_records(
    folder: str | Path,
    identity: str | None = None,
    number: int | None = None,
    label: str | None = None,
    split: str | None = None,
) -> list[tuple[str, Record]]:
    """Records of a data set with their splits.

    Args:
        folder: The data set.
        identity: A record's id, or a question's: then all its records.
        number: The how-manieth record, from 1, of those that fit the rest; 1 when nothing else is asked for.
        label: Only records of this label, a key of `LABELS`.
        split: Only records of this split.

    Raises:
        FileNotFoundError: there is no such data set.
        ValueError: no record fits.
    """
    if number is not None and number < 1:
        raise ValueError(f"number {number}: records are counted from 1")
    fitting = _fitting(folder, identity, label, split)
    if identity is None or number is not None:
        found = list(islice(fitting, (number or 1) - 1, number or 1))
    else:
        found = _with_id(fitting, identity)
    if not found:
        asked = {"id": identity, "number": number, "label": label, "split": split}
        told = ", ".join(f"{name} {value}" for name, value in asked.items() if value is not None)
        raise ValueError(f"{folder} has no record with {told or 'anything in it'}")
    return found


def shown(record: Record, split: str) -> str:
    """A record as text: what it is, the whole input of the model, and what it learns."""
    graphs = ", ".join(
        f"q_{number}: {len(set(step.triples))} triples, "
        f"{len({name for triple in step.triples for name in (triple.subject, triple.object)})} nodes"
        for number, step in enumerate(record.steps)
    )
    head = [
        f"{record.id}  ({record.task}, split {split}, source {record.source or '-'}, question {record.question_id})",
        f"graphs: {graphs or 'none'}",
        f"gold answers: {' | '.join(record.answers) or 'none'}",
    ]
    prompt = f"{Instructions.load().of(record.task)}\n\n{render(record.input)}"
    return "\n".join([*head, "", prompt, "", f"=> {record.label}"])


def _fitting(
    folder: str | Path, identity: str | None, label: str | None, split: str | None
) -> Iterator[tuple[str, Record]]:
    files = dataset_files(folder)
    if split is not None and split not in files:
        raise ValueError(f"{folder} has no split {split!r}; it has {', '.join(files)}")
    wanted = LABELS.get(label, label) if label else None
    if wanted is not None and wanted not in sample_labels():
        raise ValueError(f"label {label!r} is not one of {', '.join(LABELS)}")
    for name in [split] if split else files:
        for file in files[name]:
            for record in read_records(file):
                if identity not in (None, record.id, record.question_id):
                    continue
                if wanted is None or sample_label(record) == wanted:
                    yield name, record


def _with_id(fitting: Iterator[tuple[str, Record]], identity: str) -> list[tuple[str, Record]]:
    """The record of that id alone, else all records of the question."""
    found = []
    for name, record in fitting:
        if record.id == identity:
            return [(name, record)]
        found.append((name, record))
    return found
