"""`tripletune rag export`: write the triples of a corpus, as JSON lines for `--triples` or for a graph program.

Each triple of each passage is one line, edge or relationship, so a fact that several passages state stays countable.
What a format has no place for is counted.

| format | what it holds | what it has no place for |
|---|---|---|
| `jsonl` | `{"title", "text", "triples"}` per passage | nothing |
| `csv` | subject, predicate, object, id and title of the passage | texts of passages; passages without triples |
| `graphml` | names as nodes (`label`), triples as edges (`predicate`, `passage`) | as `csv`; control characters |
| `ntriples` | names and predicates as URIs with labels | passages; repeated triples |
| `neo4j` | a folder of CSV files for `neo4j-admin database import` | nothing |
"""

from __future__ import annotations

import csv
import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import IO, Literal, get_args
from urllib.parse import quote
from xml.sax.saxutils import escape, quoteattr

from tripletune.core.data.passages import Passage, corpus_file, read_corpus
from tripletune.core.data.triples import Triple
from tripletune.core.files import check_new, json_line, new_file, new_folder
from tripletune.rag.triple_store import StoredTriples

Format = Literal["jsonl", "csv", "graphml", "ntriples", "neo4j"]
# Writes a passage and its triples.
Write = Callable[[Passage, Sequence[Triple]], None]

PASSAGES = "passages"
MISSING = "passages in no store, left out"
TRIPLES = "triples"
NO_TEXTS = "texts of passages, which only --corpus has"
NO_TRIPLES = "passages without triples, of which the file has nothing"
NO_PASSAGES = "passages of triples: the file does not say which passage states a triple"
REPEATED = "triples that several passages state, written once"
CHARACTERS = "characters that XML can't hold, replaced"

NEO4J_FILES = ("facts.csv", "entities.csv", "passages.csv")
_NAME_URI = "urn:tripletune:name:"
_PREDICATE_URI = "urn:tripletune:predicate:"
_LABEL_URI = "http://www.w3.org/2000/01/rdf-schema#label"
_NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_LITERAL_ESCAPES = {ord("\\"): "\\\\", ord('"'): '\\"', ord("\n"): "\\n", ord("\r"): "\\r"}
_GRAPHML = """<?xml version="1.0" encoding="utf-8"?>
<graphml xmlns="http://graphml.graphdrawing.org/xmlns">
<key id="label" for="node" attr.name="label" attr.type="string"/>
<key id="predicate" for="edge" attr.name="predicate" attr.type="string"/>
<key id="passage" for="edge" attr.name="passage" attr.type="string"/>
<graph edgedefault="directed">
"""


def export_triples(
    corpus: str | Path,
    stores: Sequence[StoredTriples],
    output: str | Path,
    form: Format = "jsonl",
    allow_missing: bool = False,
    overwrite: bool = False,
) -> Counter[str]:
    """Write the passages of a corpus with their triples; the output appears when it is complete.

    Args:
        stores: Triples come from the first store that has the passage.
        allow_missing: Whether passages that no store has are left out, and not an error.
        overwrite: Whether the folder of an earlier export (neo4j) is replaced; a file always is.

    Returns:
        What was written, and what the format has no place for.
    """
    corpus = corpus_file(corpus)
    check_new(output, [corpus, *(store.store.path for store in stores)])
    counts: Counter[str] = Counter()
    with _WRITERS[form](output, overwrite, counts) as write:
        for passage in read_corpus(corpus, blank_texts=True):
            if not passage.content.strip():
                continue
            triples = _first_stored(stores, passage)
            if triples is None:
                counts[MISSING] += 1
                continue
            counts[PASSAGES] += 1
            counts[TRIPLES] += len(triples)
            write(passage, triples)
        if counts[MISSING] and not allow_missing:
            raise ValueError(
                f"{counts[MISSING]:,} of {counts[PASSAGES] + counts[MISSING]:,} passages of {corpus} are in no store: "
                "extract these passages first, or add --allow-missing to leave them out"
            )
    return +counts


def _first_stored(stores: Sequence[StoredTriples], passage: Passage) -> tuple[Triple, ...] | None:
    """The triples of the first store that has a passage; the user names stores in the order of preference."""
    for store in stores:
        triples = store.get(passage)
        if triples is not None:
            return triples
    return None


@contextmanager
def _text_file(output: str | Path) -> Iterator[IO[str]]:
    """A file that replaces `output` when it is complete; unpaired surrogates become question marks."""
    with new_file(output) as scratch, scratch.open("w", encoding="utf-8", errors="replace", newline="\n") as file:
        yield file


@contextmanager
def _json_lines_writer(output: str | Path, overwrite: bool, counts: Counter[str]) -> Iterator[Write]:
    """The form that `--triples` reads; nothing is left out, so nothing is counted."""
    with _text_file(output) as file:

        def write(passage: Passage, triples: Sequence[Triple]) -> None:
            """Write a passage as one line."""
            row = {"title": passage.title, "text": passage.text, "triples": [triple.as_list() for triple in triples]}
            file.write(json_line(row))

        yield write


@contextmanager
def _csv_writer(output: str | Path, overwrite: bool, counts: Counter[str]) -> Iterator[Write]:
    """A table with a line per triple of each passage."""
    with _text_file(output) as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["subject", "predicate", "object", "passage_id", "title"])

        def write(passage: Passage, triples: Sequence[Triple]) -> None:
            """Write a line for each triple of a passage."""
            _count_passage(triples, counts)
            table.writerows([*triple.as_list(), passage.id, passage.title] for triple in triples)

        yield write


@contextmanager
def _graphml_writer(output: str | Path, overwrite: bool, counts: Counter[str]) -> Iterator[Write]:
    """A directed multigraph; a node stands before its first edge, as readers that stream the file need it."""
    numbers: dict[str, int] = {}

    def clean(text: str) -> str:
        """A text without the characters that no XML file may hold."""
        cleaned, replaced = _NOT_IN_XML.subn("\ufffd", text)
        counts[CHARACTERS] += replaced
        return cleaned

    with _text_file(output) as file:
        file.write(_GRAPHML)

        def node(name: str) -> str:
            """The id of a name's node, which is written when the name comes first."""
            if name not in numbers:
                numbers[name] = len(numbers)
                file.write(f'<node id="n{numbers[name]}"><data key="label">{escape(clean(name))}</data></node>\n')
            return quoteattr(f"n{numbers[name]}")

        def write(passage: Passage, triples: Sequence[Triple]) -> None:
            """Write an edge for each triple of a passage, after the nodes that are new."""
            _count_passage(triples, counts)
            for triple in triples:
                ends = f"source={node(triple.subject)} target={node(triple.object)}"
                file.write(
                    f'<edge {ends}><data key="predicate">{escape(clean(triple.predicate))}</data>'
                    f'<data key="passage">{escape(clean(passage.id))}</data></edge>\n'
                )

        yield write
        file.write("</graph>\n</graphml>\n")


@contextmanager
def _ntriples_writer(output: str | Path, overwrite: bool, counts: Counter[str]) -> Iterator[Write]:
    """RDF, which is a set of triples; a store does not say which objects are values, so all of them are names."""
    labelled: set[str] = set()
    written: set[bytes] = set()
    with _text_file(output) as file:

        def uri(prefix: str, name: str) -> str:
            """The URI of a name, whose label is written when it comes first."""
            address = f"<{prefix}{quote(name, safe='', errors='replace')}>"
            if address not in labelled:
                labelled.add(address)
                file.write(f'{address} <{_LABEL_URI}> "{name.translate(_LITERAL_ESCAPES)}" .\n')
            return address

        def write(passage: Passage, triples: Sequence[Triple]) -> None:
            """Write each triple of a passage that no passage before stated; digests bound the memory."""
            for triple in triples:
                counts[NO_PASSAGES] += 1
                digest = hashlib.blake2b(str(triple).encode(errors="replace"), digest_size=16).digest()
                if digest in written:
                    counts[REPEATED] += 1
                    continue
                written.add(digest)
                ends = [uri(_NAME_URI, name) for name in (triple.subject, triple.object)]
                file.write(f"{ends[0]} {uri(_PREDICATE_URI, triple.predicate)} {ends[1]} .\n")

        yield write


@contextmanager
def _neo4j_writer(output: str | Path, overwrite: bool, counts: Counter[str]) -> Iterator[Write]:
    """Tables with the headers of `neo4j-admin database import`.

    The predicate is a property: Neo4j stores at most 65,535 types of relationships, and free texts are more.
    """
    seen: set[str] = set()
    with new_folder(output, NEO4J_FILES, overwrite) as folder, ExitStack() as opened:
        tables = []
        for name in NEO4J_FILES:
            file = (folder / name).open("w", encoding="utf-8", errors="replace", newline="\n")
            tables.append(csv.writer(opened.enter_context(file), lineterminator="\n", quoting=csv.QUOTE_ALL))
        facts, entities, passages = tables
        facts.writerow([":START_ID(Entity)", "predicate", "passage", ":END_ID(Entity)", ":TYPE"])
        entities.writerow(["name:ID(Entity)", ":LABEL"])
        passages.writerow(["id:ID(Passage)", "title", "text", ":LABEL"])

        def write(passage: Passage, triples: Sequence[Triple]) -> None:
            """Write a passage, its new entities and its facts, each into its table."""
            passages.writerow([passage.id, passage.title, passage.text, "Passage"])
            for triple in triples:
                for name in (triple.subject, triple.object):
                    if name not in seen:
                        seen.add(name)
                        entities.writerow([name, "Entity"])
                facts.writerow([triple.subject, triple.predicate, passage.id, triple.object, "FACT"])

        yield write


def _count_passage(triples: Sequence[Triple], counts: Counter[str]) -> None:
    """Add to `counts` what a format without passages leaves out of one."""
    counts[NO_TEXTS] += 1
    counts[NO_TRIPLES] += not triples


_WRITERS: dict[Format, Callable[[str | Path, bool, Counter[str]], AbstractContextManager[Write]]] = {
    "jsonl": _json_lines_writer,
    "csv": _csv_writer,
    "graphml": _graphml_writer,
    "ntriples": _ntriples_writer,
    "neo4j": _neo4j_writer,
}
FORMATS: tuple[Format, ...] = get_args(Format)
