"""HippoRAG's OpenIE results (hipporag 2.0.0a4): `openie_results_ner_MODEL.json`, with direction and names as extracted.

The first line of a passage is its title. Entities that no triple names are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tripletune.core.data.fields import checked, name_field
from tripletune.core.data.triples import triple_of
from tripletune.core.rows import Row
from tripletune.data_builders.adapt.graphs import Lost, ReadGraph, StatedTriple, read_json_value

_LAYOUT = {"docs": [{"idx": object, "passage": str, "extracted_triples": list, "extracted_entities?": list}]}
UNUSED = "entities that no triple names, left out"


def read(files: Sequence[str], counts: Counter[str]) -> ReadGraph:
    """The passages of the files, with their triples."""
    documents: list[Row] = []
    for file in files:
        path = Path(file)
        if path.is_dir():
            raise ValueError(f"--from hipporag: {file} is a folder; give its openie_results_ner_….json")
        results: Any = read_json_value(path)
        documents += checked(results, file, _LAYOUT)["docs"]
    return ReadGraph(_passages_of_documents(documents), _triples_of_documents(documents, counts))


def _passages_of_documents(documents: Sequence[Row]) -> Iterator[Row]:
    """The passages, each split into title and text."""
    for document in documents:
        title, _, text = document["passage"].partition("\n")
        if not text:
            title, text = "", title
        yield {"title": title.strip(), "id": name_field(document, "idx", "idx"), "text": text.strip()}


def _triples_of_documents(documents: Sequence[Row], counts: Counter[str]) -> Iterator[StatedTriple]:
    """The triples of all passages; `counts` counts malformed ones, and entities that no triple of the passage names."""
    for document in documents:
        names = set()
        for row in document["extracted_triples"]:
            triple = triple_of(row)
            if triple is None:
                counts[Lost.MALFORMED] += 1
                continue
            names |= {triple.subject, triple.object}
            passages = [name_field(document, "idx", "idx")]
            yield StatedTriple(triple.subject, triple.predicate, triple.object, passages)
        counts[UNUSED] += len(set(map(str, document.get("extracted_entities") or ())) - names)
