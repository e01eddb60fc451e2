import json

import pytest

from tripletune.data_builders.datasets.card import BuildFacts, Statistics, write_card
from tripletune.data_builders.datasets.shards import ShardWriter, dataset_files, record_schema, replaced_folder
from tripletune.models.data.records import Action, Record, Step, read_records
from tripletune.models.data.triples import Triple


def record(number: int, steps: tuple[Step, ...] = ()) -> Record:
    answers = ("ja", "yes") if steps else ()
    action = Action.SUFFICIENT if steps else Action.NO_RETRIEVAL
    return Record(f"r{number}", f"q{number}", "planning", "Warum — why?", action, steps, answers=answers, source="s")


FULL = (Step("q", (Triple("a, b", "c|d", "e"),), "title\ntext"), Step("empty"))


def write_all(folder, records, **options):
    with ShardWriter(folder, "train", **options) as writer:
        for one in records:
            writer.write(one)


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_records_come_back_from_shards_of_the_asked_size(tmp_path, format):
    records = [record(n, FULL if n % 2 else ()) for n in range(5)]
    write_all(tmp_path, records, format=format, shard_size=2)
    assert [path.name for path in dataset_files(tmp_path)["train"]] == [f"train-{n:05d}.{format}" for n in range(3)]
    assert list(read_records(tmp_path, "train")) == records
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_load_dataset_sees_the_features_although_the_first_rows_are_empty(tmp_path, format):
    import datasets

    folder, statistics = tmp_path / "data", Statistics()
    folder.mkdir()
    records = [*(record(n) for n in range(3)), record(3, FULL)]
    write_all(folder, records, format=format, shard_size=3)
    with ShardWriter(folder, "validation", format) as writer:
        writer.write(record(9))
    for one, split in [*((one, "train") for one in records), (record(9), "validation")]:
        statistics.add(one, split)
    write_card(folder, BuildFacts("Test", "A test."), statistics, format)

    loaded = datasets.load_dataset(str(folder), cache_dir=str(tmp_path / "cache"))
    assert {name: len(split) for name, split in loaded.items()} == {"train": 4, "validation": 1}
    assert [Record.from_json(row) for row in loaded["train"]] == records
    expected = datasets.Features.from_arrow_schema(record_schema())
    assert loaded["train"].features == expected
    assert loaded["validation"].features == expected


def test_interrupted_shard_leaves_nothing_under_its_name(tmp_path):
    def interrupted():
        with ShardWriter(tmp_path, "train", shard_size=2) as writer:
            for n in range(3):
                writer.write(record(n))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [path.name for path in tmp_path.iterdir()] == ["train-00000.jsonl"]


def test_folder_is_replaced_only_when_allowed_and_only_if_it_is_a_data_set(tmp_path):
    output = tmp_path / "out"
    with replaced_folder(output, overwrite=False) as folder:
        (folder / "train-00000.jsonl").write_text("old")
    with pytest.raises(FileExistsError, match="add --overwrite"), replaced_folder(output, overwrite=False):
        pass
    with replaced_folder(output, overwrite=True) as folder:
        (folder / "dev-00000.jsonl").write_text("new")
    assert [path.name for path in output.iterdir()] == ["dev-00000.jsonl"]
    output.rename(tmp_path / "out.old")  # as a kill between the two renames leaves it
    with pytest.raises(FileExistsError, match="add --overwrite"), replaced_folder(output, overwrite=False):
        pass
    assert [path.name for path in output.iterdir()] == ["dev-00000.jsonl"]
    (output / "thesis.tex").write_text("mine")
    with pytest.raises(FileExistsError, match=r"thesis\.tex"), replaced_folder(output, overwrite=True):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


@pytest.mark.parametrize(
    ("options", "message"),
    [({"format": "csv"}, "format 'csv'"), ({"shard_size": 0}, "shard size 0"), ({"split": "a/b"}, "split name 'a/b'")],
)
def test_unusable_options(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        ShardWriter(tmp_path, **({"split": "train"} | options))


def test_folder_without_shards(tmp_path):
    (tmp_path / "train.teacher.jsonl").write_text(json.dumps({}))
    with pytest.raises(FileNotFoundError, match="holds no record shards"):
        dataset_files(tmp_path)
    with pytest.raises(FileNotFoundError, match="no such folder"):
        dataset_files(tmp_path / "gone")
