"""Join the triples of another project's graph with its passages, and count what the way here loses.

A module in `builders/` reads passages and triples, each as a stream; a temporary SQLite file joins them, so memory does
not grow with the graph. Triples without passages (RDF, tables) go to the passages of a corpus that name their subject
and their object, or into passages of their own, one per subject.

Tested in `tests/data_builders/adapt/builders/test_graph_files.py`.
"""

from __future__ import annotations

import importlib
import json
import re
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from tripletune.core.data.fields import shown
from tripletune.core.data.pairs import spelling_in
from tripletune.core.data.passages import Passage
from tripletune.core.data.triples import Triple
from tripletune.core.files import JSON, read_text
from tripletune.core.rows import Row
from tripletune.data_builders.datasets.lookup import temporary_database

# What stands for a predicate that the graph has in no form.
RELATED = "related to"
_WORD = re.compile(r"\w+")
# Names of more words are not looked for in passages.
_LONGEST_NAME = 12
_TABLES = """
CREATE TABLE stated (passage TEXT, subject TEXT, predicate TEXT, object TEXT, subject_key TEXT, object_key TEXT);
CREATE TABLE names (name TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE joined (number INTEGER PRIMARY KEY);
"""


class Lost(StrEnum):
    """What is counted of a graph, as the command prints it; a builder adds counts of its own."""

    MALFORMED = "triples with an empty part, left out"
    REPEATED = "triples that a passage states twice, left out"
    WITHOUT_PASSAGE = "triples without a passage, left out"
    WITHOUT_TRIPLES = "passages without triples"
    RESPELLED = "names that the graph spells otherwise, now spelled as in their passage"
    ABSENT = "names that are not in their passage"
    NO_PREDICATE = "triples without a predicate: the description stands in its place"
    NO_PREDICATE_AT_ALL = f"triples without a predicate: '{RELATED}' stands in its place"
    NO_DIRECTION = "triples whose direction the graph lost"
    PREDICATE_WORDS = "predicates written as words in lower case"
    DESCRIPTIONS = "descriptions of relations, left out"
    ENTITIES = "types and descriptions of entities, left out"


class StatedTriple(NamedTuple):
    """A triple as the graph has it, with the ids of the passages that state it; none: the graph does not say."""

    subject: str
    predicate: str
    object: str
    passages: Sequence[str] = ()


class _StoredTriple(NamedTuple):
    """A row of the table `stated`."""

    rowid: int
    subject: str
    predicate: str
    object: str


class ReadGraph(NamedTuple):
    """What a builder's files hold.

    Attributes:
        passages: The passages with their ids, as rows of a corpus; None: the graph has none.
        triples: The triples; they are read before the passages.
        respell: Whether the builder changes the case of names, so that the passage's spelling is the right one.
        facts: Text by subject that opens a passage of its own, if the graph has no passages.
    """

    passages: Iterable[Row] | None
    triples: Iterable[StatedTriple]
    respell: bool = False
    facts: Callable[[str], str] = lambda subject: ""


def passages_with_triples(graph: ReadGraph, corpus: Iterable[Passage] | None, counts: Counter[str]) -> Iterator[Row]:
    """The passages of a graph, each with its triples.

    Args:
        corpus: Passages for a graph without passages; triples without a passage's id go to those that name both ends.
        counts: Counts by `Lost`, complete after the last passage.
    """
    with closing(temporary_database()) as database:
        database.executescript(_TABLES)
        _store_triples(database, graph.triples, counts)
        if corpus is not None:
            rows = _passages_that_name(database, corpus)
        elif graph.passages is not None:
            rows = _passages_that_state(database, graph.passages)
        else:
            rows = _passages_by_subject(database, graph.facts)
        for row in rows:
            yield _with_distinct_triples(row, graph.respell, counts)
        (joined,) = database.execute("SELECT COUNT(*) FROM joined").fetchone()
        (stated,) = database.execute("SELECT COUNT(*) FROM stated").fetchone()
        counts[Lost.WITHOUT_PASSAGE] += stated - joined


def predicate_or_description(predicate: str, description: str, counts: Counter[str]) -> str:
    """The predicate of a relation, else its description, else `RELATED`; `counts` counts what is no predicate."""
    if predicate.strip():
        return predicate
    if description.strip():
        counts[Lost.NO_PREDICATE] += 1
        return description
    counts[Lost.NO_PREDICATE_AT_ALL] += 1
    return RELATED


def find_builder_file(files: Sequence[str], name: str, made_by: str) -> Path:
    """The file of this name in the given folder, or the given file, which may have another name.

    Args:
        files: What follows `--from BUILDER`: one folder or file.
        name: The name under which the builder writes the file.
        made_by: The builder that writes such files, for errors.

    Raises:
        ValueError: Not one path is given.
        FileNotFoundError: The path does not exist, or is a folder without the file.
    """
    if len(files) != 1:
        raise ValueError(f"--from {made_by}: give one file or folder, found {len(files)}")
    path = Path(files[0])
    if path.is_dir() and (path / name).is_file():
        return path / name
    if path.is_file():
        return path
    held = "it does not exist"
    if path.is_dir():
        held = f"it holds {', '.join(sorted(entry.name for entry in path.iterdir())[:10]) or 'nothing'}"
    raise FileNotFoundError(f"--from {made_by}: {path} has no {name} ({held}): give the folder that {made_by} wrote")


def read_json_value(path: Path) -> object:
    """Read a JSON file as a whole: the builder that wrote it holds it in memory, too."""
    try:
        return JSON.decode(read_text(path).strip())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from None


def read_json_objects(path: Path) -> dict[str, dict[str, object]]:
    """Read a JSON file that is one object of objects, such as the stores of LightRAG: the objects by their names."""
    value = read_json_value(path)
    if not isinstance(value, dict) or not all(isinstance(entry, dict) for entry in value.values()):
        raise ValueError(f"{path}: expected a JSON object of objects, found {shown(value)}")
    return value


def optional_library(name: str, needed_for: str) -> ModuleType:
    """Import a library that is no dependency of ours; the error says what needs it, and how to install it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ValueError(f"{needed_for} needs the package {name}: pip install {name}") from None


def _store_triples(database: sqlite3.Connection, triples: Iterable[StatedTriple], counts: Counter[str]) -> None:
    """Store each triple once for each of its passages, under "" if it has none; `counts` counts malformed ones."""
    for stated in triples:
        try:
            triple = Triple(stated.subject, stated.predicate, stated.object)
        except ValueError:
            counts[Lost.MALFORMED] += 1
            continue
        keys = [_key_of_name(triple.subject), _key_of_name(triple.object)]
        for passage in stated.passages or [""]:
            database.execute("INSERT INTO stated VALUES (?, ?, ?, ?, ?, ?)", [passage, *triple.as_list(), *keys])
    database.execute("CREATE INDEX by_passage ON stated (passage)")


def _passages_that_state(database: sqlite3.Connection, passages: Iterable[Row]) -> Iterator[Row]:
    """The passages, each with the triples that name it by its id."""
    for passage in passages:
        query = "SELECT rowid, subject, predicate, object FROM stated WHERE passage = ? ORDER BY rowid"
        yield {**passage, "triples": _take_triples(database, query, [passage["id"]])}


def _passages_that_name(database: sqlite3.Connection, corpus: Iterable[Passage]) -> Iterator[Row]:
    """The passages of a corpus, each with the triples that have its id, or no id and both ends named in it."""
    database.execute("CREATE INDEX by_subject ON stated (subject_key)")
    database.execute("INSERT OR IGNORE INTO names SELECT subject_key FROM stated WHERE subject_key != ''")
    database.execute("INSERT OR IGNORE INTO names SELECT object_key FROM stated WHERE object_key != ''")
    query = (
        "SELECT rowid, subject, predicate, object FROM stated WHERE passage = ?1 OR (passage = '' AND subject_key IN "
        "(SELECT value FROM json_each(?2)) AND object_key IN (SELECT value FROM json_each(?2))) ORDER BY rowid"
    )
    for passage in corpus:
        named = _names_in(database, passage.content)
        row = {"title": passage.title, "id": passage.id, "text": passage.text, **passage.source}
        yield {**row, "triples": _take_triples(database, query, [passage.id, json.dumps(named)])}


def _names_in(database: sqlite3.Connection, text: str) -> list[str]:
    """The keys (`_key_of_name`) of stored names that a text holds as whole words."""
    words = _WORD.findall(text.casefold())
    runs = set()
    for start in range(len(words)):
        for length in range(1, min(_LONGEST_NAME, len(words) - start) + 1):
            runs.add(" ".join(words[start : start + length]))
    query = "SELECT name FROM names WHERE name IN (SELECT value FROM json_each(?))"
    return [name for (name,) in database.execute(query, [json.dumps(sorted(runs))])]


def _passages_by_subject(database: sqlite3.Connection, facts: Callable[[str], str]) -> Iterator[Row]:
    """One passage per subject: what is known about it, and its triples as sentences."""
    database.execute("CREATE INDEX by_name ON stated (subject)")
    for (subject,) in database.execute("SELECT subject FROM stated GROUP BY subject ORDER BY MIN(rowid)"):
        query = "SELECT rowid, subject, predicate, object FROM stated WHERE subject = ? ORDER BY rowid"
        triples = _take_triples(database, query, [subject])
        sentences = dict.fromkeys(f"{' '.join(triple)}." for triple in triples)
        text = " ".join([facts(subject), *sentences]).strip()
        yield {"title": subject, "text": text, "triples": triples}


def _take_triples(database: sqlite3.Connection, query: str, values: Sequence[str]) -> list[list[str]]:
    """Take the stated triples that a query selects for a passage: they are also noted in the table `joined`.

    From this table, `passages_with_triples` counts the triples that no passage has taken.

    Args:
        query: Selects rowid, subject, predicate and object.
        values: What stands for the question marks of the query.
    """
    rows = list(map(_StoredTriple._make, database.execute(query, values).fetchall()))
    database.executemany("INSERT OR IGNORE INTO joined VALUES (?)", [[row.rowid] for row in rows])
    return [[row.subject, row.predicate, row.object] for row in rows]


def _with_distinct_triples(row: Row, respell: bool, counts: Counter[str]) -> Row:
    """A passage with each triple once; `counts` counts what was changed, dropped or is odd, by `Lost`.

    Args:
        respell: Whether names get the passage's spelling, since the builder changed their case.
    """
    text = f"{row['title']}\n{row['text']}"
    folded = " ".join(text.casefold().split())
    triples = []
    for subject, predicate, object_ in row["triples"]:
        ends = []
        for name in (subject, object_):
            spelled = spelling_in(name, text) if respell else name
            counts[Lost.RESPELLED] += spelled != name
            counts[Lost.ABSENT] += " ".join(name.casefold().split()) not in folded
            ends.append(spelled)
        triples.append([ends[0], predicate, ends[1]])
    distinct = [list(fields) for fields in dict.fromkeys(map(tuple, triples))]
    counts[Lost.REPEATED] += len(triples) - len(distinct)
    counts[Lost.WITHOUT_TRIPLES] += not distinct
    return {**row, "triples": distinct}


def _key_of_name(name: str) -> str:
    """A name as its words without case, by which passages that name it are found."""
    return " ".join(_WORD.findall(name.casefold()))
