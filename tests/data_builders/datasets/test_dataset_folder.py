import pytest

from tripletune.data_builders.datasets.card import BuildFacts
from tripletune.data_builders.datasets.folder import FolderOptions, write_dataset
from tripletune.models.data.records import Action, Record, read_records


def record(number: int) -> Record:
    return Record(f"r{number}", f"q{number}", "planning", f"Why {number}?", Action.SUFFICIENT)


def facts(_: object) -> BuildFacts:
    return BuildFacts("T", "S.")


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_records_go_to_their_splits(tmp_path, format):
    output = tmp_path / "out"
    pairs = [(record(n), "test" if n == 3 else "train") for n in range(5)]
    numbers = write_dataset(iter(pairs), facts, FolderOptions(str(output), format, shard_size=3))
    assert numbers["splits"] == {"train": 4, "test": 1}
    assert [one.id for one in read_records(output, "train")] == ["r0", "r1", "r2", "r4"]
    assert sorted(path.name for path in output.iterdir()) == [
        "README.md",
        "statistics.json",
        f"test-00000.{format}",
        f"train-00000.{format}",
        f"train-00001.{format}",
    ]


def test_a_failure_leaves_nothing(tmp_path):
    def broken():
        yield record(1), "train"
        raise ValueError("the input ends here")

    for records, message in ((broken(), "the input ends here"), (iter(()), "no record to write")):
        with pytest.raises(ValueError, match=message):
            write_dataset(records, facts, FolderOptions(str(tmp_path / "out")))
        assert list(tmp_path.iterdir()) == []


def test_options_are_checked_before_anything_is_read(tmp_path):
    (tmp_path / "train-00000.jsonl").write_text("")
    with pytest.raises(FileExistsError, match="add --overwrite"):
        FolderOptions(str(tmp_path))
    with pytest.raises(ValueError, match="shard size 0"):
        FolderOptions(str(tmp_path / "out"), shard_size=0)
