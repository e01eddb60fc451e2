"""LangChain's `GraphDocument`s (langchain-community 0.4.2), each a JSON object of `document.model_dump_json()`.

`LLMGraphTransformer` stores names in title case ("Mcdonald'S") and predicates as UPPER_SNAKE, so names get the spelling
of their document, and predicates are written as words in lower case.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

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
    return ReadGraph(_passages_of_sources(files), _triples_of_relationships(files, counts), respell=True)


def _read_documents(files: Sequence[str]) -> Iterator[tuple[str, Row]]:
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


def _passages_of_sources(files: Sequence[str]) -> Iterator[Row]:
    """The source of each document as a passage; a source without an id has one made of its content."""
    for where, document in _read_documents(files):
        source = document["source"]
        metadata = source.get("metadata") or {}
        title = name_field(metadata, where, "title")
        row = {"title": title, "id": _id_of_source(source, where), "text": source["page_content"]}
        file = name_field(metadata, where, "source")
        if file:
            row["document"] = file
        yield row


def _id_of_source(source: Row, where: str) -> str:
    """The id of a source, which passages and triples share."""
    title = name_field(source.get("metadata") or {}, where, "title")
    return name_field(source, where, "id") or passage_id(title, text_field(source, where, "page_content"))


def _triples_of_relationships(files: Sequence[str], counts: Counter[str]) -> Iterator[StatedTriple]:
    """The relationships of all documents, each as a triple of its document's passage (`_id_of_source`)."""
    for where, document in _read_documents(files):
        counts[Lost.ENTITIES] += len(document.get("nodes") or ())
        for relationship in document["relationships"]:
            label = relationship["type"]
            predicate = predicate_words(label.lower() if label.isupper() else label)
            counts[Lost.PREDICATE_WORDS] += predicate != label
            subject = name_field(relationship["source"], where, "id")
            object_ = name_field(relationship["target"], where, "id")
            yield StatedTriple(subject, predicate, object_, [_id_of_source(document["source"], where)])
