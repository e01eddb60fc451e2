"""LightRAG's working folder (lightrag-hku 1.5.7): triples from its cached replies, else from its graph.

`kv_store_text_chunks.json` holds the passages, `kv_store_llm_response_cache.json` the replies that extracted from them.
The graph (GraphML) is undirected and keeps one relation per pair of names, so it only adds what no reply states:
relations of a folder without a cache, and those that a user has added. The predicate is the keywords of a relation.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from tripletune.core.data.fields import name_field, text_field
from tripletune.core.rows import Row
from tripletune.data_builders.adapt.graphs import (
    Lost,
    ReadGraph,
    StatedTriple,
    find_builder_file,
    predicate_or_description,
    read_json_objects,
)
from tripletune.llm.reply_json import json_values

_CHUNKS = "kv_store_text_chunks.json"
_CACHE = "kv_store_llm_response_cache.json"
_GRAPH = "graph_chunk_entity_relation.graphml"
_SPACE = "{http://graphml.graphdrawing.org/xmlns}"
# Between the ids of chunks in the graph.
_SEPARATOR = "<SEP>"
# The separator of fields, <|#|>, also as models misspell it.
_FIELD = re.compile(r"<\|*\\?#+\|*>|<\|+>")
_RECORD = re.compile(r"\n|<\|COMPLETE\|>|(?<=\S)<\|#\|>(?=(?:entity|relation|relationship)<\|#\|>)", re.IGNORECASE)
_JSON_FIELDS = ("source", "target", "keywords", "description")
_QUOTES = "\"'“”‘’ "
MALFORMED = "relations of replies without five fields, left out"
NO_REPLY = "relations of the graph that no cached reply states"
NOT_IN_GRAPH = "relations of replies that the graph no longer has, kept"


class _Relation(NamedTuple):
    """A relation as a reply or the graph states it; LightRAG keeps keywords instead of a predicate."""

    subject: str
    object: str
    keywords: str
    description: str


class _ChunkRelation(NamedTuple):
    """A relation, and the id of a chunk that states it."""

    relation: _Relation
    chunk: str


def read(files: Sequence[str], counts: Counter[str]) -> ReadGraph:
    """The chunks of a folder, with the relations of replies and graph."""
    path = find_builder_file(files, _CHUNKS, "lightrag")
    chunks = read_json_objects(path)
    return ReadGraph(_passages_of_chunks(chunks, path), _triples_of_replies_and_graph(chunks, path.parent, counts))


def _passages_of_chunks(chunks: Mapping[str, Row], path: Path) -> Iterator[Row]:
    """The chunks as passages; the document's name cites them, and is no part of their text."""
    for identity, chunk in chunks.items():
        where = f"{path}: {identity}"
        row = {"title": "", "id": identity, "text": text_field(chunk, where, "content")}
        document = name_field(chunk, where, "file_path")
        if document not in ("", "unknown_source"):
            row["document"] = document
        yield row


def _triples_of_replies_and_graph(
    chunks: Mapping[str, Row], folder: Path, counts: Counter[str]
) -> Iterator[StatedTriple]:
    """The triples of the replies, then of the relations in the graph that none of them states.

    The graph has one relation per pair of names, in any order, so a pair and a chunk are what can be compared.
    """
    edges = set()
    for edge, chunk in _relations_of_graph(folder / _GRAPH, counts):
        edges.add((_pair_of_names(edge), chunk))
    stated = set()
    for relation, chunk in _relations_of_cache(folder / _CACHE, chunks, counts):
        key = (_pair_of_names(relation), chunk)
        stated.add(key)
        if edges and key not in edges:
            counts[NOT_IN_GRAPH] += 1
        yield _triple_of_relation(relation, chunk, counts)
    for edge, chunk in _relations_of_graph(folder / _GRAPH, Counter()):
        if (_pair_of_names(edge), chunk) not in stated:
            counts[NO_REPLY] += 1
            counts[Lost.NO_DIRECTION] += 1
            yield _triple_of_relation(edge, chunk, counts)


def _triple_of_relation(relation: _Relation, chunk: str, counts: Counter[str]) -> StatedTriple:
    """A relation as a triple of a chunk; its description has no place there."""
    predicate = predicate_or_description(relation.keywords, relation.description, counts)
    counts[Lost.DESCRIPTIONS] += predicate != relation.description
    return StatedTriple(relation.subject, predicate, relation.object, [chunk])


def _pair_of_names(relation: _Relation) -> frozenset[str]:
    """The two names without order, case and signs, which LightRAG changes."""
    ends = []
    for name in (relation.subject, relation.object):
        ends.append("".join(letter for letter in name.casefold() if letter.isalnum()))
    return frozenset(ends)


def _relations_of_cache(path: Path, chunks: Mapping[str, Row], counts: Counter[str]) -> Iterator[_ChunkRelation]:
    """The relations of all cached replies that extracted from these chunks; `counts` as in `_relations_of_reply`."""
    if not path.is_file():
        return
    for entry in read_json_objects(path).values():
        chunk = entry.get("chunk_id")
        reply = entry.get("return")
        if (
            entry.get("cache_type") == "extract"
            and isinstance(chunk, str)
            and chunk in chunks
            and isinstance(reply, str)
        ):
            for relation in _relations_of_reply(reply, counts):
                yield _ChunkRelation(relation, chunk)


def _relations_of_reply(reply: str, counts: Counter[str]) -> Iterator[_Relation]:
    """The relations of a reply: lines of fields, or a JSON object (`entity_extraction_use_json`).

    `counts` counts entities, which are not kept, and relations without five fields.
    """
    if reply.lstrip().startswith(("{", "```")):
        for value in json_values(reply, dict):
            yield from _relations_of_json(value, counts)
        return
    for record in _RECORD.split(reply):
        fields = [field.strip() for field in _FIELD.split(record)]
        kind = fields[0].strip("(\"' ").casefold()
        if kind == "entity":
            counts[Lost.ENTITIES] += 1
        elif kind in ("relation", "relationship"):
            if len(fields) != 5:
                counts[MALFORMED] += 1
                continue
            yield _Relation(fields[1].strip(_QUOTES), fields[2].strip(_QUOTES), fields[3], fields[4])


def _relations_of_json(value: object, counts: Counter[str]) -> Iterator[_Relation]:
    """The relations of a reply in JSON; `counts` counts malformed relations and entities."""
    if not isinstance(value, dict):
        return
    counts[Lost.ENTITIES] += len(value.get("entities") or ())
    for row in value.get("relationships") or ():
        if not isinstance(row, dict) or not all(isinstance(row.get(name), str) for name in _JSON_FIELDS):
            counts[MALFORMED] += 1
            continue
        yield _Relation(*(row[name] for name in _JSON_FIELDS))


def _relations_of_graph(path: Path, counts: Counter[str]) -> Iterator[_ChunkRelation]:
    """The relations of the graph, each with every chunk that it names; the file is read as a stream."""
    if not path.is_file():
        return
    names: dict[str, str] = {}
    for _, element in ElementTree.iterparse(path):
        if element.tag == f"{_SPACE}key":
            names[element.get("id", "")] = element.get("attr.name", "")
        elif element.tag == f"{_SPACE}node":
            element.clear()
        elif element.tag == f"{_SPACE}edge":
            values = {names.get(data.get("key", ""), ""): data.text or "" for data in element}
            ends = element.get("source", ""), element.get("target", "")
            relation = _Relation(*ends, values.get("keywords", ""), values.get("description", ""))
            for chunk in values.get("source_id", "").split(_SEPARATOR):
                yield _ChunkRelation(relation, chunk)
            element.clear()
