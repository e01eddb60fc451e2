import json

import pytest

from tripletune.data_builders.__main__ import main
from tripletune.data_builders.datasets.shards import ShardWriter
from tripletune.data_builders.text_to_triples.card import pair_schema
from tripletune.data_builders.text_to_triples.inspection import (
    find_pair,
    holds_pairs,
    pair_statistics,
    pair_troubles,
    shown_pair,
)
from tripletune.models.data.pairs import ExtractionPair
from tripletune.models.data.records import Action, Record
from tripletune.models.data.triples import Triple

PAIRS = {
    "train": [
        ExtractionPair("x:1", "Ada was born in London.", "Ada", (Triple("Ada", "born in", "London"),), "x"),
        ExtractionPair("x:2", "Hello there", source="x"),
        ExtractionPair("y:1", "Oslo", "", (Triple("Oslo", "is", "Oslo"),), "y"),
    ],
    "validation": [ExtractionPair("x:3", "Rome lies on the Tiber.", "", (Triple("Rome", "river", "Tiber"),), "x")],
}


def write(folder, pairs, format="jsonl"):
    for split, group in pairs.items():
        with ShardWriter(folder, split, format, schema=pair_schema) as writer:
            for pair in group:
                writer.write(pair)


@pytest.fixture(params=["jsonl", "parquet"])
def folder(tmp_path, request):
    write(tmp_path, PAIRS, request.param)
    return tmp_path


def test_pairs_are_told_from_records(folder, tmp_path_factory):
    assert holds_pairs(folder)
    records = tmp_path_factory.mktemp("records")
    with ShardWriter(records, "train") as writer:
        writer.write(Record("1", "a", "planning", "Why?", Action.SUFFICIENT))
    assert not holds_pairs(records)
    broken = tmp_path_factory.mktemp("broken")
    (broken / "train-00000.jsonl").write_text("oops\n")
    assert not holds_pairs(broken)
    (broken / "train-00000.jsonl").write_text("")
    assert not holds_pairs(broken)


def test_statistics_are_those_of_the_card(folder):
    found, leaks = pair_statistics(folder)
    numbers = found.to_json()
    assert numbers["splits"] == {"train": 3, "validation": 1}
    assert numbers["sources"]["x"]["without facts"] == 1
    assert numbers["lengths"]["triples"]["max"] == 1
    assert not leaks


def test_stats_prints_the_tables(folder, capsys):
    (folder / "statistics.json").write_text(
        json.dumps({"statistics": {"records": 4}, "build": {"title": "T", "summary": "S.", "notes": ["A note."]}})
    )
    assert main(["stats", str(folder)]) == 0
    out = capsys.readouterr().out
    for part in ("triples", "without facts", "splits: train 3, validation 1", "no text stands in two splits", "A note"):
        assert part in out


def test_a_good_folder_has_no_troubles(folder, capsys):
    assert list(pair_troubles(folder)) == []
    assert main(["validate", str(folder)]) == 0
    assert "every pair is in order" in capsys.readouterr().out


def test_every_trouble_is_named(tmp_path, capsys):
    again = ExtractionPair("x:1", "Other text.")
    same = ExtractionPair("x:9", "hello   THERE", "With a title")
    write(tmp_path, {"train": [*PAIRS["train"], again], "validation": [*PAIRS["validation"], same]})
    with (tmp_path / "train-00000.jsonl").open("a") as file:
        file.write('{"id": "z", "text": " ", "triples": []}\n{"id": "5", oops\n')
    (tmp_path / "statistics.json").write_text(json.dumps({"statistics": {"records": 1, "splits": {"train": 1}}}))
    found = list(pair_troubles(tmp_path))
    for part in (
        "train-00000.jsonl:4: pair id 'x:1' occurs a second time",
        "train-00000.jsonl:5: pair 'z': the text is empty",
        "train-00000.jsonl:6: not valid JSON",
        "validation-00000.jsonl:2: the text of 'x:9' is in 'validation' and in 'train'",
        "split 'train' has 6 records, the file says 1",
        "split 'validation' has 2 records, the file says 0",
    ):
        assert any(part in line for line in found), part
    assert len(found) == 6
    assert main(["validate", str(tmp_path)]) == 1
    assert "6 troubles" in capsys.readouterr().out


def test_single_pairs_are_found_and_shown(folder, capsys):
    assert find_pair(folder)[1].id == "x:1"
    assert find_pair(folder, number=3)[1].id == "y:1"
    assert find_pair(folder, split="validation") == ("validation", PAIRS["validation"][0])
    split, pair = find_pair(folder, identity="x:2")
    assert "(nothing: the text has no facts)" in shown_pair(pair, split)
    assert main(["peek", str(folder), "--id", "x:1"]) == 0
    out = capsys.readouterr().out
    assert "x:1  (split train, source x, with facts)\n1 triples, 2 entities\n\nAda: Ada was born in London.\n" in out
    assert "=> (S> Ada| P> born in| O> London)" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--id", "q"], "no pair with id q"),
        (["--number", "9"], "no pair with number 9"),
        (["--number", "0"], "counted from 1"),
        (["--split", "test"], "no split 'test'; it has train, validation"),
        (["--label", "subq"], "--label subq is for records"),
    ],
)
def test_nothing_found_is_said(tmp_path, capsys, options, message):
    write(tmp_path, PAIRS)
    with pytest.raises(SystemExit) as caught:
        main(["peek", str(tmp_path), *options])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
