import json
from pathlib import Path

import pytest

from tripletune.data_builders.text_to_triples.__main__ import main
from tripletune.data_builders.text_to_triples.build import PairOptions
from tripletune.data_builders.world.build import WorldOptions, write_world
from tripletune.models.data.pairs import read_pairs
from tripletune.models.data.triples import Triple


def write(path: Path, rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows(count, prefix="Text"):
    return [{"text": f"{prefix} {n} says b.", "triples": [[f"{prefix} {n}", "says", "b"]]} for n in range(count)]


def run(tmp_path, *arguments, output="out"):
    folder = tmp_path / output
    assert main([*map(str, arguments), "--output", str(folder)]) == 0
    return folder, json.loads((folder / "statistics.json").read_text())


def failing(capsys, *arguments):
    assert main(list(map(str, arguments))) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_pairs_come_back_with_their_split(tmp_path, format):
    file = write(tmp_path / "a.jsonl", rows(40))
    folder, numbers = run(tmp_path, "--source", f"triples:{file}", "--validation-rows", 7, "--format", format,
                          "--shard-size", 10)  # fmt: skip
    train, validation = list(read_pairs(folder, "train")), list(read_pairs(folder, "validation"))
    assert (len(train), len(validation)) == (33, 7)
    assert {pair.text for pair in train + validation} == {row["text"] for row in rows(40)}
    assert all(pair.id.startswith("triples:") and pair.source == "triples" for pair in train)
    assert numbers["statistics"]["splits"] == {"train": 33, "validation": 7}
    assert len(list(folder.glob(f"train-*.{format}"))) == 4
    card = (folder / "README.md").read_text()
    assert "the 7 of 40 pairs" in card
    assert "(S> Text" in card


def test_the_same_options_give_the_same_bytes(tmp_path):
    file = write(tmp_path / "a.jsonl", rows(40))
    first, _ = run(tmp_path, "--source", f"triples:{file}", output="one")
    second, _ = run(tmp_path, "--source", f"triples:{file}", output="two")
    assert {path.name: path.read_bytes() for path in first.iterdir()} == {
        path.name: path.read_bytes() for path in second.iterdir()
    }


def test_what_is_left_out_is_counted(tmp_path):
    first = [
        {"text": "A  text.", "triples": [["a", "b", "c"], ["a", "b", "c"]]},
        {"text": "a TEXT.", "triples": [["a", "b", "c"]]},
        {"text": "A text.", "triples": [["other", "b", "c"]]},
        {"text": "A text.", "title": "T", "triples": [["a", "b", "c"]]},
        {"text": "Nothing.", "triples": []},
        {"text": "Held out.", "triples": [["a", "b", "c"]]},
        {"text": "Held out with bad triples.", "triples": [["a", "b", "c"]]},
        {"text": "Bad.", "triples": [["a", "b"]]},
        {"text": " ", "triples": []},
    ]
    held = [("held OUT.", []), ("Other", []), ("Held out with bad triples.", [["a"]])]
    held_out = write(tmp_path / "held.jsonl", [{"text": text, "triples": triples} for text, triples in held])
    file = write(tmp_path / "a.jsonl", first)
    folder, numbers = run(tmp_path, "--source", f"x=triples:{file}", "--exclude", f"triples:{held_out}",
                          "--no-facts", "drop", "--split-name", "train")  # fmt: skip
    assert [(pair.title, pair.text) for pair in read_pairs(folder)] == [("", "A text."), ("T", "A text.")]
    build = numbers["build"]
    assert build["drops"]["x"] == {
        "the text is empty": 1,
        "the text has no facts (--no-facts drop)": 1,
        "text and triples seen before": 1,
        "text seen before, with other triples": 1,
        "every triple is malformed": 1,
        "the text is among those to exclude": 2,
    }
    assert build["issues"] == {
        "x: texts with Unicode composed, spaces folded or control characters removed": 1,
        "x: triples that a row has twice, left out": 1,
    }
    assert any("3 texts of triples=triples:" in note for note in build["notes"])
    card = (folder / "README.md").read_text()
    assert "| x: the text is among those to exclude | 2 |" in card


def test_texts_without_facts_have_an_empty_target(tmp_path):
    file = write(tmp_path / "a.jsonl", [{"text": "Hello!", "triples": []}, *rows(1)])
    folder, numbers = run(tmp_path, "--source", f"triples:{file}", "--split-name", "test")
    assert next(read_pairs(folder, "test")).target == ""
    assert numbers["statistics"]["sources"]["triples"]["without facts"] == 1


def test_names_by_the_papers_rule(tmp_path):
    file = write(tmp_path / "a.jsonl", [*rows(5), {"text": "x", "title": "Unsaid", "triples": [["y", "p", "o"]]}])
    folder, numbers = run(tmp_path, "--source", f"triples:{file}", "--entity-share", 1, "--split-name", "train")
    named = [pair for pair in read_pairs(folder) if pair.source == "names"]
    assert [pair.text for pair in named] == [*(f"Text {n}" for n in range(5)), "Unsaid"]
    assert all(pair.triples == (Triple(pair.text, "is", pair.text),) for pair in named)
    assert numbers["statistics"]["sources"]["names"]["only a name"] == 6


def test_the_world_and_a_teacher_mix(tmp_path):
    write_world(WorldOptions(train=20, validation=0, test=0), tmp_path / "world")
    file = write(tmp_path / "a.jsonl", rows(30))
    folder, numbers = run(tmp_path, "--source", f"world=triples:{tmp_path / 'world/train.triples.jsonl'}",
                          "--source", f"triples:{file}", "--limit", 12)  # fmt: skip
    assert {name: counts["pairs"] for name, counts in numbers["statistics"]["sources"].items()} == {
        "world": 12,
        "triples": 12,
    }
    world = [pair for pair in read_pairs(folder, "train") if pair.source == "world"]
    assert all(pair.source_text.startswith(f"{pair.title}: ") for pair in world)


def test_ids_are_unique_whatever_the_rows_say(tmp_path):
    file = write(tmp_path / "a.jsonl", [row | {"id": "same"} for row in rows(3)])
    folder, _ = run(tmp_path, "--source", f"triples:{file}", "--split-name", "train")
    assert [pair.id for pair in read_pairs(folder)] == ["triples:same", "triples:same:2", "triples:same:3"]


def test_bad_input_is_one_line_and_leaves_nothing(tmp_path, capsys):
    file, output = write(tmp_path / "a.jsonl", rows(4)), tmp_path / "out"
    source = ("--source", f"triples:{file}", "--output", output)
    assert "there are only 4 pairs" in failing(capsys, *source, "--validation-rows", 9)
    assert "no such file" in failing(capsys, "--source", "triples:gone.jsonl", "--output", output)
    assert "is there twice" in failing(capsys, *source, "--source", f"triples:{file}")
    assert "stands for the pairs of --entity-share" in failing(
        capsys, "--source", f"names=triples:{file}", "--output", output
    )
    assert "entity_share: 2.0 must be at least 0 and at most 1" in failing(capsys, *source, "--entity-share", 2)
    assert "limit: 0 must be at least 1" in failing(capsys, *source, "--limit", 0)
    assert "split_name: 'a/b'" in failing(capsys, *source, "--split-name", "a/b")
    bare = write(tmp_path / "b.jsonl", [{"text": "x", "triples": None}])
    error = failing(capsys, "--source", f"triples:{bare}", "--output", output)
    assert "not a single pair could be made (triples: there is no list of triples 1)" in error
    assert not output.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl"]


def test_options_that_exclude_each_other():
    with pytest.raises(ValueError, match="validation_rows and split_name"):
        PairOptions(validation_rows=3, split_name="test")
