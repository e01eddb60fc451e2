"""LangChain's `GraphDocument`s (langchain-community 0.4.2), each a JSON object of `document.model_dump_json()`.

`LLMGraphTransformer` stores names in title case ("Mcdonald'S") and predicates as UPPER_SNAKE, so names get the spelling
of their document, and predicates are written as words in lower case.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from tripletune.core.data.fields import checked, name_field, text_field
from tripletune.core.data.pairs import predicate_words
from tripletune.core.data.passages import passage_id
from tripletune.core.rows import Row, source_rows
from tripletune.data_builders.adapt.graphs import Lost, ReadGraph, StatedTriple

_HOW = "write each document by `document.model_dump_json()`, one per line"
_END = {"id": object}
_LAYOUT = {"relationships": [{"source": _END, "target": _END, "type": str}], "source": {"page_content": str}}


def read(files: Sequence[str], counts: Counter[str]) -> ReadGraph:
    """The documents of files, with their relationships; the files are read once for each."""
    return ReadGraph(_passages(files), _triples(files, counts), respell=True)


def _documents(files: Sequence[str]) -> Iterator[tuple[str, Row]]:
    """The documents of all files, each after its place."""
    for file in files:
        for where, row in source_rows(file):
            if "lc" in row:
                raise ValueError(
                    f"{where}: `dumps` of langchain_core writes only a text about this document, which nobody can "
                    f"read back: {_HOW}"
                )
            checked(row, where, _LAYOUT)
            yield where, row


def _passages(files: Sequence[str]) -> Iterator[Row]:
    """The source of each document as a passage; a source without an id has one made of its content."""
    for where, document in _documents(files):
        source = document["source"]
        metadata = source.get("metadata") or {}
        title = name_field(metadata, where, "title")
        row = {"title": title, "id": _identity(source, where), "text": source["page_content"]}
        file = name_field(metadata, where, "source")
        if file:
            row["document"] = file
        yield row


def _identity(source: Row, where: str) -> str:
    """The id of a source, which passages and triples share."""
    title = name_field(source.get("metadata") or {}, where, "title")
    return name_field(source, where, "id") or passage_id(title, text_field(source, where, "page_content"))


def _triples(files: Sequence[str], counts: Counter[str]) -> Iterator[StatedTriple]:
    """The relationships of all documents."""
    for where, document in _documents(files):
        counts[Lost.ENTITIES] += len(document.get("nodes") or ())
        for relationship in document["relationships"]:
            label = relationship["type"]
            predicate = predicate_words(label.lower() if label.isupper() else label)
            counts[Lost.PREDICATE_WORDS] += predicate != label
            ends: list[Any] = [name_field(relationship[end], where, "id") for end in ("source", "target")]
            yield StatedTriple(ends[0], predicate, ends[1], [_identity(document["source"], where)])
