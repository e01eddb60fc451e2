"""GraphRAG's output folder (graphrag 3.3.0): `text_units.parquet`, `relationships.parquet` and `documents.parquet`.

GraphRAG has no predicates: the description of a relation stands in their place, and is counted. Names are in capitals
there, and get the spelling of their text unit. A relation that several units state has one description, which a model
made of those of all units.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tripletune.core.data.fields import name_field, name_list, text_field
from tripletune.core.data.jsonl import stored_rows
from tripletune.core.rows import Row
from tripletune.data_builders.adapt.graphs import (
    Lost,
    ReadGraph,
    StatedTriple,
    find_builder_file,
    predicate_or_description,
)

_UNITS = "text_units.parquet"
_RELATIONS = "relationships.parquet"
_DOCUMENTS = "documents.parquet"
SHARED = "relations that several text units state with one description"


def read(files: Sequence[str], counts: Counter[str]) -> ReadGraph:
    """The text units of a folder, with its relations."""
    folder = Path(files[0]) if files else Path()
    if (folder / "output" / _UNITS).is_file():
        files = [str(folder / "output")]
    path = find_builder_file(files, _UNITS, "graphrag")
    return ReadGraph(_passages_of_units(path), _triples_of_relations(path.parent, counts), respell=True)


def _passages_of_units(path: Path) -> Iterator[Row]:
    """The text units as passages; the document's title cites them."""
    titles = {}
    documents = path.parent / _DOCUMENTS
    if documents.is_file():
        for where, row in stored_rows(documents):
            titles[name_field(row, where, "id")] = name_field(row, where, "title")
    for where, row in stored_rows(path):
        passage = {"title": "", "id": name_field(row, where, "id"), "text": text_field(row, where, "text")}
        # Before version 3, a unit could have several documents.
        for document in name_list(row, where, "document_id") or name_list(row, where, "document_ids"):
            if titles.get(document):
                passage["document"] = titles[document]
        yield passage


def _triples_of_relations(folder: Path, counts: Counter[str]) -> Iterator[StatedTriple]:
    """The relations as triples of all their text units; `counts` counts descriptions and entities by `Lost`.

    Raises:
        FileNotFoundError: The folder has no relations, as after a run that stopped.
    """
    relations = folder / _RELATIONS
    if not relations.is_file():
        raise FileNotFoundError(f"--from graphrag: {folder} has no {_RELATIONS}: run `graphrag index` to its end")
    for where, row in stored_rows(relations):
        units = name_list(row, where, "text_unit_ids")
        counts[SHARED] += len(units) > 1
        predicate = predicate_or_description("", text_field(row, where, "description"), counts)
        yield StatedTriple(name_field(row, where, "source"), predicate, name_field(row, where, "target"), units)
    entities = folder / "entities.parquet"
    if entities.is_file():
        counts[Lost.ENTITIES] += sum(1 for _ in stored_rows(entities))
