from __future__ import annotations

import json

import pytest

from tripletune.models.data.passages import Passage
from tripletune.models.data.triples import Triple
from tripletune.rag.triples.store import StoreCounts, TripleStore

ROWS = [
    {"title": "Oslo", "text": "Oslo is in Norway.", "triples": [["Oslo", "located in", "Norway"]]},
    {
        "title": "Smith, J. (actor)",
        "text": "é",
        "triples": [["A, b (c)", "|", "日本"], ["x", "", "y"], ["a", "b"], "abc"],
    },
    {"title": "Nothing", "text": "Said nothing.", "triples": []},
    {"title": "Bad", "text": None, "triples": []},
    {"title": "Bad", "triples": None, "text": "no list"},
    {"title": "Oslo", "text": "Oslo  is in\u00a0Norway.", "triples": [["second", "row", "loses"]]},
]


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "triples.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def test_look_up_and_counts(source, tmp_path):
    store = TripleStore.open(source, tmp_path / "triples.sqlite")
    assert store.get(Passage("Oslo", "Oslo is in Norway.")) == (Triple("Oslo", "located in", "Norway"),)
    assert store.get(Passage("Smith, J. (actor)", "é")) == (Triple("A, b (c)", "|", "日本"),)
    assert store.counts == StoreCounts(passages=3, triples=2, malformed_rows=2, malformed_triples=3, duplicates=1)


def test_a_passage_without_facts_is_not_a_miss(source, tmp_path):
    store = TripleStore.open(source, tmp_path / "triples.sqlite")
    assert store.get(Passage("Nothing", "Said nothing.")) == ()
    assert store.misses == 0
    assert store.get(Passage("Nothing", "Said something.")) is None
    assert store.misses == 1


def test_spaces_unicode_form_and_corpus_ids_do_not_matter(source, tmp_path):
    store = TripleStore.open(source, tmp_path / "triples.sqlite")
    assert store.get(Passage("Oslo", "Oslo is  in Norway. ", id="wiki-17"))
    assert store.get(Passage("Smith, J. (actor)", "e\u0301"))
    assert store.get(Passage("oslo", "Oslo is in Norway.")) is None


def test_database_is_used_again_until_the_source_changes(source, tmp_path):
    database = tmp_path / "deep" / "triples.sqlite"
    TripleStore.open(source, database).close()
    stamp = database.stat().st_mtime_ns
    TripleStore.open(source, database).close()
    assert database.stat().st_mtime_ns == stamp
    source.write_text(json.dumps({"title": "T", "text": "t", "triples": [["a", "b", "c"]]}) + "\n")
    store = TripleStore.open(source, database)
    assert store.get(Passage("T", "t")) == (Triple("a", "b", "c"),)
    assert store.get(Passage("Oslo", "Oslo is in Norway.")) is None


def test_bad_sources_are_named(tmp_path):
    path = tmp_path / "triples.jsonl"
    with pytest.raises(FileNotFoundError, match=r"triples\.jsonl"):
        TripleStore.open(path, tmp_path / "db")
    path.write_text('{"title": "a", "text": "b", "triples": []}\n{oops\n')
    with pytest.raises(ValueError, match=r"triples\.jsonl:2: not valid JSON"):
        TripleStore.open(path, tmp_path / "db")
    path.write_text('{"text": "b"}\n')
    with pytest.raises(ValueError, match="no row holds a passage with triples"):
        TripleStore.open(path, tmp_path / "db")
    assert not (tmp_path / "db").exists()


def test_a_file_that_is_not_a_store_is_not_overwritten(source, tmp_path):
    other = tmp_path / "notes.txt"
    other.write_text("mine, and long enough to be no database header" * 10)
    with pytest.raises(ValueError, match="is not a triple store"):
        TripleStore.open(source, other)
    assert other.read_text().startswith("mine")
