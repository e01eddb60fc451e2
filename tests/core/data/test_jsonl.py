import gzip
import json

import pytest
from datasets import Dataset

from tests.cli import write_lines
from tripletune.core.data.jsonl import record_files, stored_parts, stored_rows


def numbers(folder, split="train"):
    return [row["n"] for _, row in stored_rows(folder, split)]


def write(folder, name, number):
    if name.endswith(".parquet"):
        Dataset.from_list([{"n": number}]).to_parquet(folder / name)
    elif name.endswith(".jsonl.gz"):
        (folder / name).write_bytes(gzip.compress(json.dumps({"n": number}).encode()))
    else:
        write_lines(folder / name, [{"n": number}])


@pytest.mark.parametrize(
    "names",
    [
        ["train-00000.jsonl", "train-00001.jsonl.gz"],
        ["train-00000-of-00002.jsonl", "train-00001-of-00002.parquet"],
        ["train-00001-of-00002.parquet", "train-00002-of-00002.parquet"],
        ["train-0.jsonl", "train-1.jsonl"],
        ["train-2021.jsonl", "train-2024.jsonl"],
        ["train-a.jsonl", "train-b.jsonl"],
    ],
)
def test_all_shards_of_a_split_are_read(tmp_path, names):
    for number, name in enumerate(names):
        write(tmp_path, name, number)
    write(tmp_path, "validation-00000.jsonl", 7)
    write(tmp_path, "dropped.ndjson", 8)
    (tmp_path / "statistics.json").write_text("{}")
    assert numbers(tmp_path) == [0, 1]
    assert [row["n"] for part in stored_parts(tmp_path, "train") for _, row in part] == [0, 1]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ["train-00000-of-00003.jsonl", "train-00002-of-00003.jsonl"],
            r"1 of 3 shards .* \(number 1\)",
        ),
        (["train-00000-of-00003.jsonl"], r"2 of 3 shards .* \(number 1; 2\)"),
        (["train-00000.jsonl", "train-00003.jsonl"], r"2 of 4 shards .* \(number 1; 2\)"),
        (["train-00003.jsonl"], r"3 of 4 shards .* \(number 0; 1; 2\)"),
        (
            ["train.jsonl", "train-00000.jsonl", "train-00001.jsonl"],
            r"holds train\.jsonl and also train-00000\.jsonl; .*twice",
        ),
        (["train-00000.jsonl", "train-00000.parquet"], "are the same shard"),
        (["train-00000.jsonl", "train-00000.jsonl.gz"], "are the same shard"),
        (["train.jsonl", "train.parquet"], "are the same shard"),
        (["train-00000-of-00001.jsonl", "train-00000-of-00002.jsonl"], "are the same shard"),
        (["train-00000-of-00001.jsonl", "train-00001-of-00002.jsonl"], "are of two sets of shards"),
        (["train-00000.jsonl", "train-00001.jsonl.zst"], r"train-00001\.jsonl\.zst would not be read beside"),
        (["train-00000.jsonl", "train-00001.jsonl.part"], r"train-00001\.jsonl\.part would not be read beside"),
        (["train_00000_of_00002.jsonl"], r"1 of 2 shards .* \(number 1\)"),
        (["train-00000-of-00002-6f3344faa23e9b0a.parquet"], r"1 of 2 shards .* \(number 1\)"),
        (["train-00000.jsonl", "train-00001.JSONL"], r"train-00001\.JSONL would not be read beside"),
        (["train-00000.jsonl", "train-00001.json"], r"train-00001\.json would not be read beside"),
    ],
)
def test_half_or_double_data_are_refused(tmp_path, names, message):
    for name in names:
        write(tmp_path, name, 0)
    with pytest.raises(ValueError, match=message):
        record_files(tmp_path, "train")
    # A file that is named is read alone.
    assert record_files(tmp_path / names[0]) == [tmp_path / names[0]]
