"""RDF: N-Triples as a stream; Turtle, RDF/XML, JSON-LD and TriG with the package rdflib (7.6.0).

A URI is named by its label (rdfs:label, skos:prefLabel, schema.org's and FOAF's name; English or without a language
first), else by its last part. A comment or abstract opens the passage of its subject. RDF has no passages: give
--corpus, or each subject becomes one. Blank nodes have no name, so their triples are left out.
"""

from __future__ import annotations

import re
import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

from tripletune.core.data.jsonl import open_rows
from tripletune.core.data.pairs import predicate_words
from tripletune.data_builders.adapt.graphs import ReadGraph, StatedTriple, optional_library
from tripletune.data_builders.datasets.lookup import temporary_database

_LABELS = {
    "http://www.w3.org/2000/01/rdf-schema#label",
    "http://www.w3.org/2004/02/skos/core#prefLabel",
    "http://schema.org/name",
    "https://schema.org/name",
    "http://xmlns.com/foaf/0.1/name",
}
_TEXTS = {
    "http://www.w3.org/2000/01/rdf-schema#comment",
    "http://www.w3.org/2004/02/skos/core#definition",
    "http://schema.org/description",
    "https://schema.org/description",
    "http://dbpedia.org/ontology/abstract",
    "http://purl.org/dc/terms/description",
}
_LINE = re.compile(
    r'\s*(<[^>]*>|_:\S+)\s+(<[^>]*>)\s+(<[^>]*>|_:[^\s.]+|"(?:[^"\\]|\\.)*"(?:@[\w-]+|\^\^<[^>]*>)?)'
    r"(?:\s+<[^>]*>)?\s*\.\s*(?:#.*)?"
)
_LITERAL = re.compile(r'"((?:[^"\\]|\\.)*)"(?:@([\w-]+)|\^\^<([^>]*)>)?', re.DOTALL)
_ESCAPE = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))")
_SHORT = {"t": "\t", "n": "\n", "r": "\r", "b": "\b", "f": "\f"}
_TABLES = """
CREATE TABLE labels (uri TEXT PRIMARY KEY, label TEXT, rank INTEGER) WITHOUT ROWID;
CREATE TABLE texts (uri TEXT PRIMARY KEY, text TEXT, rank INTEGER) WITHOUT ROWID;
CREATE TABLE statements (subject TEXT, predicate TEXT, object TEXT, is_uri INTEGER);
CREATE TABLE named (uri TEXT PRIMARY KEY, name TEXT) WITHOUT ROWID;
CREATE INDEX by_name ON named (name);
"""
LABELS = "labels, read as names"
MORE_LABELS = "further labels and texts of a URI (other languages), left out"
WITHOUT_LABEL = "URIs without a label, named by their last part"
ONE_NAME = "URIs that share their name with another URI"
BLANK = "triples with a blank node, left out"
TYPED = "datatypes and languages of literals, left out"
MALFORMED = "lines that are not N-Triples, left out"


class _Term(NamedTuple):
    """A URI or the text of a literal, whose `language` is "" without one; `typed` says whether it has a datatype."""

    text: str
    is_uri: bool
    language: str = ""
    typed: bool = False


class _Statement(NamedTuple):
    """A triple of RDF, with URIs for subject and predicate."""

    subject: str
    predicate: str
    object: _Term


def read(files: Sequence[str], counts: Counter[str]) -> ReadGraph:
    """The statements of RDF files, with names instead of URIs."""
    database = temporary_database()
    database.executescript(_TABLES)
    for file in files:
        if not Path(file).is_file():
            raise FileNotFoundError(f"--from rdf: no such file: {file}")
        for statement in _read_statements(Path(file), counts):
            _store_statement(database, statement, counts)
    return ReadGraph(None, _named_triples(database, counts), facts=partial(_text_about, database))


def _read_statements(path: Path, counts: Counter[str]) -> Iterator[_Statement]:
    """Read the statements of a file; `counts` counts those with blank nodes, which are left out."""
    if path.name.removesuffix(".gz").endswith((".nt", ".nq")):
        yield from _read_ntriples(path, counts)
        return
    rdflib = optional_library("rdflib", f"--from rdf: {path.name} is no N-Triples file (.nt), so it")
    # Else 007 would become 7.
    rdflib.NORMALIZE_LITERALS = False  # type: ignore[attr-defined]
    try:
        graph = rdflib.Dataset()
        graph.parse(str(path))
    except Exception as error:  # each of rdflib's parsers has errors of its own
        raise ValueError(f"{path}: rdflib can't read it ({' '.join(str(error).split())[:200]})") from None
    for subject, predicate, object_, _ in graph.quads():
        if isinstance(subject, rdflib.BNode) or isinstance(object_, rdflib.BNode):
            counts[BLANK] += 1
        elif isinstance(object_, rdflib.Literal):
            term = _Term(str(object_), False, object_.language or "", object_.datatype is not None)
            yield _Statement(str(subject), str(predicate), term)
        else:
            yield _Statement(str(subject), str(predicate), _Term(str(object_), True))


def _read_ntriples(path: Path, counts: Counter[str]) -> Iterator[_Statement]:
    """Read the statements of N-Triples or N-Quads line by line; `counts` counts lines that give none."""
    with open_rows(path) as lines:
        for line in lines:
            text = line.decode(errors="replace")
            if not text.strip() or text.lstrip().startswith("#"):
                continue
            match = _LINE.fullmatch(text.rstrip("\r\n"))
            if match is None:
                counts[MALFORMED] += 1
                continue
            subject, predicate, object_ = match.groups()
            if "_:" in (subject[:2], object_[:2]):
                counts[BLANK] += 1
                continue
            yield _Statement(_without_escapes(subject[1:-1]), _without_escapes(predicate[1:-1]), _object_term(object_))


def _object_term(written: str) -> _Term:
    """The object of a line of N-Triples as it is written there: a URI in angle brackets, or a literal in quotes."""
    literal = _LITERAL.fullmatch(written)
    if literal is None:
        return _Term(_without_escapes(written[1:-1]), True)
    text, language, datatype = literal.groups()
    return _Term(_without_escapes(text), False, language or "", bool(datatype))


def _without_escapes(text: str) -> str:
    """A text of N-Triples without its escapes."""

    def character(match: re.Match[str]) -> str:
        """The character that an escape stands for."""
        code = match[1] or match[2]
        return chr(int(code, 16)) if code else _SHORT.get(match[3], match[3])

    return _ESCAPE.sub(character, text)


def _store_statement(database: sqlite3.Connection, statement: _Statement, counts: Counter[str]) -> None:
    """Store a statement as a label, as a text about its subject, or as a fact; `counts` counts what is not kept.

    Of several labels or texts of a subject, the first in English or without a language stays (`rank` 0), else the
    first.
    """
    term = statement.object
    for table, predicates in (("labels", _LABELS), ("texts", _TEXTS)):
        if statement.predicate in predicates and not term.is_uri and term.text.strip():
            counts[LABELS] += table == "labels"
            rank = 0 if term.language.partition("-")[0].lower() in ("", "en") else 1
            better = f"{table[:-1]} = ?2, rank = ?3 WHERE rank > ?3"
            query = f"INSERT INTO {table} VALUES (?1, ?2, ?3) ON CONFLICT DO UPDATE SET {better}"
            earlier = database.execute(f"SELECT 1 FROM {table} WHERE uri = ?", [statement.subject]).fetchone()
            counts[MORE_LABELS] += earlier is not None
            database.execute(query, [statement.subject, " ".join(term.text.split()), rank])
            return
    counts[TYPED] += bool(term.language or term.typed)
    fact = [statement.subject, statement.predicate, term.text, term.is_uri]
    database.execute("INSERT INTO statements VALUES (?, ?, ?, ?)", fact)


def _named_triples(database: sqlite3.Connection, counts: Counter[str]) -> Iterator[StatedTriple]:
    """The facts with names instead of URIs; names are noted, and `counts` counts URIs that share a name."""
    query = (
        "SELECT statements.subject, s.label, statements.predicate, p.label, object, o.label, is_uri FROM statements "
        "LEFT JOIN labels AS s ON s.uri = statements.subject LEFT JOIN labels AS p ON p.uri = statements.predicate "
        "LEFT JOIN labels AS o ON is_uri AND o.uri = object ORDER BY statements.rowid"
    )
    for subject, subject_label, predicate, predicate_label, object_, object_label, is_uri in database.execute(query):
        subject_name = subject_label or _last_part_in_words(subject)
        _note_name(database, subject, subject_name, subject_label is not None, counts)
        predicate_name = predicate_label or predicate_words(_last_part_in_words(predicate))
        object_name = object_
        if is_uri:
            object_name = object_label or _last_part_in_words(object_)
            _note_name(database, object_, object_name, object_label is not None, counts)
        yield StatedTriple(subject_name, predicate_name, object_name)
    (shared,) = database.execute("SELECT COUNT(*) - COUNT(DISTINCT name) FROM named").fetchone()
    counts[ONE_NAME] += shared


def _note_name(database: sqlite3.Connection, uri: str, name: str, has_label: bool, counts: Counter[str]) -> None:
    """Store the name of a URI, and count the URI once in `counts` if no label gave it the name.

    From these names, URIs that share one are counted, and `_text_about` finds the URI of a subject.
    """
    is_new = database.execute("INSERT OR IGNORE INTO named VALUES (?, ?)", [uri, name]).rowcount
    counts[WITHOUT_LABEL] += bool(is_new and not has_label)


def _last_part_in_words(uri: str) -> str:
    """The part of a URI after its last # or /, as words."""
    part = re.split("[#/]", uri.rstrip("#/"))[-1]
    return unquote(part).replace("_", " ").strip() or uri


def _text_about(database: sqlite3.Connection, name: str) -> str:
    """What the file says about the URI with this name; "" if it says nothing."""
    query = "SELECT text FROM named JOIN texts ON texts.uri = named.uri WHERE named.name = ? LIMIT 1"
    row = database.execute(query, [name]).fetchone()
    return "" if row is None else str(row[0])
