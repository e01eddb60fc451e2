import json

import pytest

from tripletune.data_builders.__main__ import main
from tripletune.data_builders.datasets.shards import ShardWriter
from tripletune.data_builders.datasets.validation import troubles
from tripletune.models.data.records import Action, Record


def record(identity: str, question_id: str, question: str) -> Record:
    return Record(identity, question_id, "planning", question, Action.SUFFICIENT)


def write(folder, split, *records):
    with ShardWriter(folder, split) as writer:
        for one in records:
            writer.write(one)


def test_good_folder_has_no_troubles(tmp_path, capsys):
    write(tmp_path, "train", record("1", "a", "Why?"), record("2", "a", "Why?"))
    write(tmp_path, "validation", record("3", "b", "How?"))
    assert list(troubles(tmp_path)) == []
    assert main(["validate", str(tmp_path)]) == 0
    assert "every record is in order" in capsys.readouterr().out


def test_every_trouble_is_named(tmp_path, capsys):
    write(tmp_path, "train", record("1", "a", "Why?"), record("1", "a", "Why?"))
    write(tmp_path, "validation", record("2", "a", "Other?"), record("3", "b", "why"))
    with (tmp_path / "train-00000.jsonl").open("a") as file:
        file.write('{"id": "4"}\n{"id": "5", oops\n')
    (tmp_path / "statistics.json").write_text(json.dumps({"statistics": {"splits": {"train": 9, "validation": 2}}}))
    found = "\n".join(troubles(tmp_path))
    for part in (
        "train-00000.jsonl:2: record id '1' occurs a second time",
        "validation-00000.jsonl:1: question id 'a' is in 'validation' and in 'train'",
        "validation-00000.jsonl:2: question text 'why' is in 'validation' and in 'train'",
        "train-00000.jsonl:3: the record lacks question_id",
        "train-00000.jsonl:4: not valid JSON",
        "split 'train' has 4 records, the file says 9",
    ):
        assert part in found
    assert found.count("\n") == 5
    assert main(["validate", str(tmp_path)]) == 1
    assert "6 troubles" in capsys.readouterr().out


def test_missing_folder_ends_with_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["validate", str(tmp_path / "gone")])
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"error: no such folder: {tmp_path / 'gone'}\n"


def test_stats_prints_the_table(tmp_path, capsys):
    write(tmp_path, "train", record("1", "a", "Why?"))
    assert main(["stats", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "129,902" in out
    assert "[SUFFICIENT]" in out
    assert "splits: train 1" in out


def test_explagraphs_command_keeps_repeated_pairs_on_one_side(tmp_path, capsys):
    lines = [f"claim {n % 25}\treason {n % 25}\tsupport\t(a; b; c)\n" for n in range(50)]
    (tmp_path / "e.tsv").write_text("".join(lines))
    arguments = ["explagraphs", "--input", str(tmp_path / "e.tsv"), "--output", str(tmp_path / "out")]
    assert main(arguments) == 0
    assert list(troubles(tmp_path / "out")) == []
    assert sorted({path.name.split("-")[0] for path in (tmp_path / "out").glob("*.jsonl")}) == [
        "test",
        "train",
        "validation",
    ]
    with pytest.raises(SystemExit):
        main(arguments)
    assert "add --overwrite" in capsys.readouterr().err
