import json
import os
from collections import Counter

import pyarrow
import pytest
from pyarrow import parquet

from tests.cli import write_lines
from tripletune.core.config import load_config
from tripletune.core.data.pairs import ExtractionPair
from tripletune.core.data.records import Action, Record
from tripletune.train.sources import Examples, PlaceAndShare
from tripletune.train.tasks.ras import GraphTask
from tripletune.train.tasks.text_to_triples import PairTask


@pytest.mark.parametrize("limit", [None, 5])
@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_parts_are_the_examples_in_their_order(ending, limit, tmp_path, monkeypatch):
    monkeypatch.setattr("tripletune.core.data.jsonl.PART_BYTES", 25)
    rows = [{"id": number} for number in range(9)]
    for name in ("train-00000", "train-00001"):
        if ending == "jsonl":
            (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps(row) + "\n" * (row["id"] % 2) for row in rows))
        else:
            parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / f"{name}.parquet", row_group_size=2)
    places = (PlaceAndShare(str(tmp_path), 1.0), PlaceAndShare(str(tmp_path), 0.5))
    source = Examples(
        lambda row, where: (row, where), places, "train", limit, lambda one: one[0]["id"] > 2,
        keys_of=lambda one: [str(one[0]["id"])],
    )  # fmt: skip
    parts = [list(part) for part in source.parts()]
    assert [one for part in parts for one in part] == list(source)
    assert len(parts) == 2 if limit else all(len(part) <= 3 for part in parts)


@pytest.mark.parametrize(
    ("task", "row"),
    [
        (GraphTask, lambda number: Record(str(number), "", "planning", f"Why {number}?", Action.SUFFICIENT).to_json()),
        (PairTask, lambda number: ExtractionPair(str(number), f"Text {number}.", "", ()).to_json()),
    ],
)
def test_several_places_and_shares_of_their_questions(tmp_path, task, row):
    write_lines(tmp_path / "a" / "train-00000.jsonl", [row(number) for number in range(100)])
    write_lines(tmp_path / "b.jsonl", [row(number) for number in range(100, 110)])
    places = f"{tmp_path / 'a'}=0.3,{tmp_path / 'b.jsonl'}"
    config = load_config(task.Config, None, {"data.train": places})
    taken = [int(example.id) for example in task(config).sources.train]
    of_a = [number for number in taken if number < 100]
    assert 15 < len(of_a) < 45
    assert taken == [*of_a, *range(100, 110)]
    counts: Counter[str] = Counter()
    for work in task(config).sources.train.works(lambda examples, counts: iter(list(examples))):
        list(work(counts))
    assert counts == {f"from {tmp_path / 'a'}": len(of_a), f"from {tmp_path / 'b.jsonl'}": 10}


def test_a_share_needs_keys(tmp_path):
    write_lines(tmp_path / "data.jsonl", [{"id": "1"}])
    place = PlaceAndShare(str(tmp_path / "data.jsonl"), 0.5)
    with pytest.raises(ValueError, match="a share of records is drawn by the question or text"):
        list(Examples(lambda row, where: row, (place,), "train"))


def test_a_share_leaves_the_validation_data_whole(tmp_path):
    for split, numbers in (("train", range(100)), ("validation", range(100, 120))):
        rows = [ExtractionPair(str(number), f"Text {number}.", "", ()).to_json() for number in numbers]
        write_lines(tmp_path / f"{split}-00000.jsonl", rows)
    sources = PairTask(load_config(PairTask.Config, None, {"data.train": f"{tmp_path}=0.2"})).sources
    assert (len(list(sources.train)) < 40, len(list(sources.validation))) == (True, 20)


def test_the_digest_follows_content_and_selection(tmp_path):
    path = tmp_path / "data.jsonl"

    def digest(**options):
        return Examples(lambda row, where: row, (PlaceAndShare(str(path), 1.0),), "train", **options).digest

    write_lines(path, [{"id": "1"}])
    first = digest(limit=5)
    assert digest(limit=5) == first
    assert len({first, digest(limit=6), digest(limit=5, selection=("planning",))}) == 3
    write_lines(path, [{"id": "2"}])
    assert digest(limit=5) != first


def test_the_digest_of_a_folder_like_one_of_the_hub_is_its_content(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name / "data").mkdir(parents=True)
        for split in ("train", "validation"):
            write_lines(tmp_path / name / "data" / f"{split}-00000.jsonl", [{"id": "1"}])

    def digest(name, split="train"):
        return Examples(lambda row, where: row, (PlaceAndShare(str(tmp_path / name), 1.0),), split).digest

    file = tmp_path / "one" / "data" / "train-00000.jsonl"
    first, stamp = digest("one"), file.stat().st_mtime_ns
    write_lines(file.with_name("validation-00000.jsonl"), [{"id": "3"}])
    os.utime(tmp_path / "two" / "data" / file.name, ns=(1, 1))
    assert digest("one") == digest("two") == first != digest("one", "validation")
    write_lines(file, [{"id": "2"}])
    os.utime(file, ns=(stamp, stamp))
    assert digest("one") != first


def test_what_is_held_out_changes_the_digest_only_if_it_is_there(tmp_path):
    path = tmp_path / "data.jsonl"
    write_lines(path, [{"text": text} for text in "abcd"])

    def source(*held_out, limit=None):
        return Examples(
            lambda row, where: row["text"], (PlaceAndShare(str(path), 1.0),), "train", limit,
            keys_of=lambda text: [text], held_out=frozenset(held_out),
        )  # fmt: skip

    whole = source()
    assert source("x", "y").digest == whole.digest, "validation data can be added to a resumed run"
    assert len({whole.digest, source("b").digest, source("c").digest}) == 3
    assert list(source("b", "x")) == ["a", "c", "d"]
    assert list(source("b", limit=2)) == ["a", "c"]
    assert source("d", limit=2).digest == source(limit=2).digest, "it is not reached"
    assert whole.keys() == source(limit=1).keys() == frozenset("abcd")
