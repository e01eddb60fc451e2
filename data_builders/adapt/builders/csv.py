"""Tables of triples: CSV, TSV, Parquet or JSON lines with columns for subject, predicate and object.

Columns are found by their names: subject, head, source or from; predicate, relation, label or type; object, tail,
target or to. A column `passage_id` (or `chunk_id`) names the passage of --corpus, a column `text` holds it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from tripletune.core.data.fields import name_field
from tripletune.core.data.passages import passage_id
from tripletune.core.rows import Row, source_rows
from tripletune.data_builders.adapt.graphs import ReadGraph, StatedTriple, predicate_or_description

_SUBJECT = ("subject", "head", "subj", "source", "from", "start")
_PREDICATE = ("predicate", "relation", "relationship", "property", "label", "type", "keywords")
_OBJECT = ("object", "tail", "obj", "target", "to", "end")
_PASSAGE = ("passage_id", "chunk_id", "passage", "chunk")
OTHER_COLUMNS = "cells of other columns, left out"


def read(files: Sequence[str], counts: Counter[str]) -> ReadGraph:
    """The triples of tables, with the passages of a column `text`."""
    passages = None
    for file in files:
        for _, row in source_rows(file):
            if "text" in _with_lower_case_columns(row):
                passages = _passages_of_tables(files)
            break
    return ReadGraph(passages, _triples_of_tables(files, counts))


def _with_lower_case_columns(row: Mapping[str, object]) -> Row:
    """A row with the names of its columns in lower case."""
    return {name.strip().casefold(): value for name, value in row.items()}


def _passages_of_tables(files: Sequence[str]) -> Iterator[Row]:
    """The texts of all rows, each once: several triples of a table may have one text."""
    seen = set()
    for file in files:
        for where, row in source_rows(file):
            values = _with_lower_case_columns(row)
            identity = _passage_id_of(values, where)
            if identity not in seen:
                seen.add(identity)
                title = name_field(values, where, "title")
                yield {"title": title, "id": identity, "text": name_field(values, where, "text")}


def _passage_id_of(values: Row, where: str) -> str:
    """The id of a row's passage: a column's, or made of its text; "" without both."""
    identity = name_field(values, where, *_PASSAGE)
    text = name_field(values, where, "text")
    if identity or not text:
        return identity
    return passage_id(name_field(values, where, "title"), text)


def _triples_of_tables(files: Sequence[str], counts: Counter[str]) -> Iterator[StatedTriple]:
    """The triples of all rows; `counts` counts cells that are not read.

    Raises:
        ValueError: A table has no column of subjects or none of objects.
    """
    used = {*_SUBJECT, *_PREDICATE, *_OBJECT, *_PASSAGE, "text", "title", "description"}
    for file in files:
        for where, row in source_rows(file):
            values = _with_lower_case_columns(row)
            if not any(name in values for name in _SUBJECT) or not any(name in values for name in _OBJECT):
                names = "; ".join(", ".join(columns) for columns in (_SUBJECT, _PREDICATE, _OBJECT))
                raise ValueError(
                    f"{where}: the table needs one column of each: {names}; it has {', '.join(map(str, row))}"
                )
            stated = name_field(values, where, *_PREDICATE)
            predicate = predicate_or_description(stated, name_field(values, where, "description"), counts)
            subject = name_field(values, where, *_SUBJECT)
            object_ = name_field(values, where, *_OBJECT)
            counts[OTHER_COLUMNS] += len(values.keys() - used)
            identity = _passage_id_of(values, where)
            yield StatedTriple(subject, predicate, object_, [identity] if identity else [])
