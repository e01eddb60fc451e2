"""LlamaIndex's property graph (llama-index-core 0.14.25): `property_graph_store.json` of a persisted index.

`SimpleLLMPathExtractor` stores names and predicates with one capital ("Ida morn"), so names get the spelling of their
chunk. The store has each relation once, with the first chunk that states it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tripletune.core.data.fields import checked, name_field
from tripletune.core.data.pairs import predicate_words
from tripletune.core.files import read_json
from tripletune.core.rows import Row
from tripletune.data_builders.adapt.graphs import Lost, ReadGraph, StatedTriple, find_builder_file

_STORE = "property_graph_store.json"
_LAYOUT = {"nodes": {"": {"properties?": {}}}, "relations": {"": {"source_id": str, "target_id": str, "label": str}}}
BETWEEN_CHUNKS = "relations between chunks, left out"
ONE_CHUNK = "relations, each known of one chunk only"


def read(files: Sequence[str], counts: Counter[str]) -> ReadGraph:
    """The chunks of a store, with its relations."""
    path = find_builder_file(files, _STORE, "llamaindex")
    store = checked(read_json(path), str(path), _LAYOUT)
    chunks = {name: node for name, node in store["nodes"].items() if isinstance(node, dict) and "text" in node}
    return ReadGraph(
        _passages_of_chunks(chunks, path), _triples_of_relations(store, chunks, path, counts), respell=True
    )


def _passages_of_chunks(chunks: Mapping[str, Row], path: Path) -> Iterator[Row]:
    """The chunks as passages, with the title and the file in their metadata."""
    for identity, chunk in chunks.items():
        where = f"{path}: {identity}"
        properties = chunk.get("properties") or {}
        row = {"title": name_field(properties, where, "title"), "id": identity, "text": chunk["text"] or ""}
        document = name_field(properties, where, "file_name", "file_path")
        if document:
            row["document"] = document
        yield row


def _triples_of_relations(
    store: Mapping[str, Row], chunks: Mapping[str, Row], path: Path, counts: Counter[str]
) -> Iterator[StatedTriple]:
    """The relations between entities as triples; `counts` counts the others, and what was changed.

    Relations between chunks only say in which order they follow each other.
    """
    nodes = store["nodes"]
    for identity, relation in store["relations"].items():
        where = f"{path}: {identity}"
        ends = [relation["source_id"], relation["target_id"]]
        if any(end in chunks for end in ends):
            counts[BETWEEN_CHUNKS] += 1
            continue
        # An id of an entity is its name, but for quotation marks.
        names = [name_field(nodes.get(end, {}), where, "name") or end for end in ends]
        label = relation["label"]
        predicate = predicate_words(label.lower() if label.isupper() else label)
        counts[Lost.PREDICATE_WORDS] += predicate != label
        counts[ONE_CHUNK] += 1
        chunk = name_field(relation.get("properties") or {}, where, "triplet_source_id")
        yield StatedTriple(names[0], predicate, names[1], [chunk] if chunk else [])
