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
from typing import Any, NamedTuple
from xml.etree import ElementTree

from tripletune.core.data.fields import name_field, text_field
from tripletune.core.rows import Row
from tripletune.data_builders.adapt.graphs import Lost, ReadGraph, StatedTriple, file_of, object_of, predicate_or
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
    subject: str
    object: str
    keywords: str
    description: str


def read(files: Sequence[str], counts: Counter[str]) -> ReadGraph:
    """The chunks of a folder, with the relations of replies and graph."""
    path = file_of(files, _CHUNKS, "lightrag")
    chunks = object_of(path)
    return ReadGraph(_passages(chunks, path), _triples(chunks, path.parent, counts))


def _passages(chunks: Mapping[str, Row], path: Path) -> Iterator[Row]:
    """The chunks as passages; the document's name cites them, and is no part of their text."""
    for identity, chunk in chunks.items():
        where = f"{path}: {identity}"
        row = {"title": "", "id": identity, "text": text_field(chunk, where, "content")}
        document = name_field(chunk, where, "file_path")
        if document not in ("", "unknown_source"):
            row["document"] = document
        yield row


def _triples(chunks: Mapping[str, Row], folder: Path, counts: Counter[str]) -> Iterator[StatedTriple]:
    """The triples of the replies, then of the relations in the graph that none of them states.

    The graph has one relation per pair of names, in any order, so a pair and a chunk are what can be compared.
    """
    edges = set()
    for edge, chunk in _edges(folder / _GRAPH, counts):
        edges.add((_pair(edge), chunk))
    stated = set()
    for relation, chunk in _replied(folder / _CACHE, chunks, counts):
        key = (_pair(relation), chunk)
        stated.add(key)
        if edges and key not in edges:
            counts[NOT_IN_GRAPH] += 1
        yield _triple(relation, chunk, counts)
    for edge, chunk in _edges(folder / _GRAPH, Counter()):
        if (_pair(edge), chunk) not in stated:
            counts[NO_REPLY] += 1
            counts[Lost.NO_DIRECTION] += 1
            yield _triple(edge, chunk, counts)


def _triple(relation: _Relation, chunk: str, counts: Counter[str]) -> StatedTriple:
    """A relation as a triple of a chunk; its description has no place there."""
    predicate = predicate_or(relation.keywords, relation.description, counts)
    counts[Lost.DESCRIPTIONS] += predicate != relation.description
    return StatedTriple(relation.subject, predicate, relation.object, [chunk])


def _pair(relation: _Relation) -> frozenset[str]:
    """The two names without order, case and signs, which LightRAG changes."""
    ends = []
    for name in (relation.subject, relation.object):
        ends.append("".join(letter for letter in name.casefold() if letter.isalnum()))
    return frozenset(ends)


def _replied(path: Path, chunks: Mapping[str, Row], counts: Counter[str]) -> Iterator[tuple[_Relation, str]]:
    """The relations of all cached replies of the extraction, each with its chunk."""
    if not path.is_file():
        return
    for entry in object_of(path).values():
        chunk = entry.get("chunk_id")
        reply = entry.get("return")
        if (
            entry.get("cache_type") == "extract"
            and isinstance(chunk, str)
            and chunk in chunks
            and isinstance(reply, str)
        ):
            for relation in _relations(reply, counts):
                yield relation, chunk


def _relations(reply: str, counts: Counter[str]) -> Iterator[_Relation]:
    """The relations of a reply: lines of fields, or a JSON object (`entity_extraction_use_json`)."""
    if reply.lstrip().startswith(("{", "```")):
        for value in json_values(reply, dict):
            yield from _json_relations(value, counts)
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


def _json_relations(value: Any, counts: Counter[str]) -> Iterator[_Relation]:
    """The relations of a reply in JSON."""
    if not isinstance(value, dict):
        return
    counts[Lost.ENTITIES] += len(value.get("entities") or ())
    for row in value.get("relationships") or ():
        if not isinstance(row, dict) or not all(isinstance(row.get(name), str) for name in _JSON_FIELDS):
            counts[MALFORMED] += 1
            continue
        yield _Relation(*(row[name] for name in _JSON_FIELDS))


def _edges(path: Path, counts: Counter[str]) -> Iterator[tuple[_Relation, str]]:
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
                yield relation, chunk
            element.clear()
