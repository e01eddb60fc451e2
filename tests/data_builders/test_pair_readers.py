import json
from collections import Counter

import pytest

from tests.cli import write_lines
from tests.data_builders.rows import hotpot_row, shared
from tripletune.data_builders.readers.triples import (
    MALFORMED_TRIPLES,
    PairDrop,
    check_source,
    published_triples,
    read_source,
)
from tripletune.data_builders.readers.wikiofgraph import LOST_LETTER
from tripletune.data_builders.subq.options import Source


def read(text):
    drops, issues = Counter(), Counter()
    rows = list(read_source(Source.parse(text), drops, issues))
    return rows, {name: n for name, n in drops.items() if n}, {name: n for name, n in issues.items() if n}


def fields(row):
    return [tuple(triple.as_list()) for triple in row.triples]


def test_wikiofgraph_as_its_authors_publish_it(tmp_path):
    triplet = "(<S> Anarchism| <P> type| <O> theory), (<S> Anarchism| <P> rejects| <O> involuntary, coercive (forms))"
    path = write_lines(tmp_path / "w.jsonl", [{"triplet": triplet, "text": "Anarchism is …"}])
    (row,), drops, issues = read(f"wikiofgraph:{path}")
    assert fields(row) == [("Anarchism", "type", "theory"), ("Anarchism", "rejects", "involuntary, coercive (forms)")]
    assert (drops, issues) == ({}, {})


def test_wikiofgraph_counts_names_that_lost_their_first_letter(tmp_path):
    triples = [
        ["olskjel", "art of", "Trøndelag"],
        ["Solskjel", "Country", "hio"],
        ["iPhone", "Maker", "ordinary people"],
        ["Solskjel", "Position", "Coast"],
    ]
    text = "Solskjel, part of Trøndelag, is an island on the coast of Ohio; ordinary people have an iPhone."
    rows = [{"text": text, "triples": triples}, {"text": "Ann met Bob.", "triples": [["Ann", "met", "Bob"]]}]
    found, _, issues = read(f"wikiofgraph:{write_lines(tmp_path / 'w.jsonl', rows)}")
    assert fields(found[0]) == [tuple(triple) for triple in triples], "rows are read as they were released"
    assert issues == {LOST_LETTER: 2}


def test_wikiofgraph_as_it_was_released_has_lost_letters():
    _, _, issues = read(f"wikiofgraph:{shared('wikiofgraph.jsonl')}")
    assert issues == {LOST_LETTER: 337}


def test_genwiki_puts_entities_in_their_places(tmp_path):
    rows = [
        {"text": "<ENT_1> is in <ENT_0> .", "entities": ["Norway", "Oslo"], "graph": [["Oslo", "country", "Norway"]]},
        {"text": "<ENT_4> is lost .", "entities": ["Norway"], "graph": []},
        {"text": "Oslo .", "triplet": "(<S> Oslo| <P> a| <O> b)"},
    ]
    path = tmp_path / "g.json"
    path.write_text(json.dumps(rows))
    found, drops, _ = read(f"genwiki:{path}")
    assert [row.text for row in found] == ["Oslo is in Norway .", "Oslo ."]
    assert drops == {PairDrop.UNKNOWN_ENTITY: 1}


def test_bad_rows_cost_themselves_alone(tmp_path):
    rows = [
        {"text": "good", "triples": [["a", "b", "c"]], "id": 7},
        {"text": "one bad", "triples": [["a", "b"], ["a", "", "c"], ["a", "b", "c"]]},
        {"text": "all bad", "triples": [["a", "b"]]},
        {"text": "none", "triples": []},
        {"text": "no list", "triples": None},
        {"text": " ", "triples": []},
        {"text": None, "triples": []},
    ]
    found, drops, issues = read(f"triples:{write_lines(tmp_path / 't.jsonl', rows)}")
    kept = [(row.text, row.id, len(row.triples)) for row in found]
    assert kept == [("good", "7", 1), ("one bad", "", 1), ("none", "", 0)]
    assert drops == {PairDrop.ALL_MALFORMED: 1, PairDrop.NO_TRIPLES: 1, PairDrop.NO_TEXT: 2}
    assert issues == {MALFORMED_TRIPLES: 2}


@pytest.mark.parametrize(
    ("value", "triples", "malformed"),
    [
        ([["a", "b", "c"]], 1, 0),
        ([{"subject": "a", "predicate": "b", "object": "c"}, {"subject": "a", "relation": "b", "object": "c"}], 2, 0),
        (["(S> a| P> b| O> c)", "(<S> d| <P> e| <O> f)"], 2, 0),
        ("(S> a| P> b\\c| O> d), (S> e| P> f", 1, 1),
        ("prose", 0, 1),
        ([], 0, 0),
        ([3], 0, 1),
        ([["a", "b", value] for value in (1815, 1.5, True, None, float("nan"))], 2, 3),
        ("[" * 5000, 0, 1),
    ],
)
def test_published_forms(value, triples, malformed):
    found = published_triples(value)
    assert (len(found[0]), found[1]) == (triples, malformed)


def test_a_backslash_in_published_data_stands_for_itself():
    (triple,), _ = published_triples("(<S> a\\b| <P> p| <O> c\\)")
    assert (triple.subject, triple.object) == ("a\\b", "c\\")


def question(number, titles, supporting_facts=()):
    context = [[title, [f"{title} is said here."]] for title in titles]
    return hotpot_row(number, supporting_facts=list(supporting_facts), context=context)


def test_recorded_replies_meet_the_passages_of_their_questions(tmp_path):
    asked = [question(1, ["A", "B &amp; C"]), question(2, ["D"]), question(3, ["E"])]
    read_triples = {"A": [["a", "b", "c"], ["x"]], "b & c": [["d", "e", "f"]], "Gone": [["g", "h", "i"]]}
    replied = [{"_id": "id1", "triples": read_triples}, {"_id": "id2", "triples": {"D": [["x"]]}}]
    questions, replies = write_lines(tmp_path / "q.jsonl", asked), write_lines(tmp_path / "r.jsonl", replied)
    rows, drops, issues = read(f"hotpotqa:{questions}:{replies}")
    assert [(row.id, row.title, row.text, fields(row)) for row in rows] == [
        ("id1:0", "A", "A is said here.", [("a", "b", "c")]),
        ("id1:1", "B &amp; C", "B &amp; C is said here.", [("d", "e", "f")]),
    ]
    assert drops == {PairDrop.NO_PASSAGE: 1, PairDrop.ALL_MALFORMED: 1, PairDrop.NO_ANNOTATION: 1}
    assert issues == {MALFORMED_TRIPLES: 1}


def test_unusable_sources_are_named(tmp_path):
    for text, message in (
        ("nope:file.jsonl", r"reader 'nope' is not one of .*wikiofgraph"),
        ("hotpotqa:file.jsonl", r"hotpotqa reads questions; add the file of a teacher's recorded replies"),
    ):
        with pytest.raises(ValueError, match=message):
            check_source(Source.parse(text))
    path = write_lines(tmp_path / "w.jsonl", [{"text": "a", "triples": []}, {"passage": "b"}])
    with pytest.raises(ValueError, match=r"w\.jsonl:2: a row needs 'text' and 'triples'.*it has passage"):
        read(f"triples:{path}")


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("wikiofgraph:wikiofgraph.jsonl", 700),
        ("genwiki:genwiki_test.jsonl", 499),
        ("triples:openie_musique_silver.jsonl", 1888),
        ("triples:teacher/paragraph_triples.jsonl", 300),
        ("hotpotqa:hotpotqa_dev.jsonl:teacher/hotpotqa_dev.jsonl", None),
    ],
)
def test_real_files(source, count):
    reader, *files = source.split(":")
    rows, drops, _ = read(":".join([reader, *(str(shared(file)) for file in files)]))
    assert len(rows) == count if count else len(rows) > 100
    assert set(drops) <= {PairDrop.NO_ANNOTATION}
    assert all(row.text and row.triples for row in rows)
