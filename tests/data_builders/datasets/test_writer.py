"""One writer for all kinds; what two builds, a user's folders, links and inputs may not lose."""

import pytest

from tests.data_builders.rows import CHATS, PAIRS, RECORDS, ROWS, write_rows
from tripletune.data_builders.datasets.card import BuildFacts
from tripletune.data_builders.datasets.inspect import dataset_files
from tripletune.data_builders.datasets.rows import get_kind
from tripletune.data_builders.datasets.writer import FolderOptions, new_dataset, split_name_problems
from tripletune.models.data.pairs import read_pairs
from tripletune.models.data.records import read_records
from tripletune.models.data.trajectories import read_trajectories

READERS = {"records": read_records, "pairs": read_pairs, "trajectories": read_trajectories}
FACTS = BuildFacts("T", "S.")


def write(output, splits, **options):
    return write_rows(output, "records", splits, **options)


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
@pytest.mark.parametrize("kind", ROWS)
def test_rows_come_back_and_load_dataset_sees_their_features(tmp_path, kind, format):
    import datasets

    # Records with empty lists first: the features must not be guessed from them.
    rows = sorted(ROWS[kind], key=lambda row: len(str(row)))
    folder = write_rows(tmp_path / "out", kind, {"train": rows, "test": rows[:1]}, format=format, shard_size=2)
    assert list(READERS[kind](folder, "train")) == rows
    loaded = datasets.load_dataset(str(folder), cache_dir=str(tmp_path / "cache"))
    assert {name: len(split) for name, split in loaded.items()} == {"train": len(rows), "test": 1}
    expected = datasets.Features.from_arrow_schema(get_kind(kind).schema())
    assert loaded["train"].features == loaded["test"].features == expected
    assert [get_kind(kind).read(row, "row") for row in loaded["train"]] == rows


def test_shards_have_the_asked_size(tmp_path):
    folder = write(tmp_path / "out", {"train": RECORDS, "test": RECORDS[:1]}, shard_size=3)
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md",
        "statistics.json",
        "test-00000.jsonl",
        "train-00000.jsonl",
        "train-00001.jsonl",
    ]
    assert list(dataset_files(folder)) == ["test", "train"]


def test_the_same_rows_give_the_same_bytes(tmp_path):
    one, two = (write_rows(tmp_path / name, "pairs", {"train": PAIRS}) for name in "ab")
    assert {path.name: path.read_bytes() for path in one.iterdir()} == {
        path.name: path.read_bytes() for path in two.iterdir()
    }


def test_a_failure_leaves_nothing(tmp_path):
    options = FolderOptions(str(tmp_path / "out"))
    with pytest.raises(KeyboardInterrupt), new_dataset(options, get_kind("records")) as dataset:
        dataset.write(RECORDS[0], "train")
        raise KeyboardInterrupt
    with pytest.raises(ValueError, match="no record to write"), new_dataset(options, get_kind("records")) as dataset:
        dataset.finish(FACTS)
    assert list(tmp_path.iterdir()) == []


def test_options_are_checked_before_anything_is_read(tmp_path):
    (tmp_path / "train-00000.jsonl").write_text("")
    with pytest.raises(FileExistsError, match="--overwrite to replace it"):
        FolderOptions(str(tmp_path))
    with pytest.raises(ValueError, match="shard_size: 0 must be at least 1"):
        FolderOptions(str(tmp_path / "out"), shard_size=0)
    assert split_name_problems("a/b")
    assert not split_name_problems("train_small.v2")


def test_of_two_builds_into_one_folder_the_second_is_refused(tmp_path):
    """Defect 1: both ended with exit code 0, and the folder held rows of the one under the card of the other."""
    options = FolderOptions(str(tmp_path / "out"))
    with new_dataset(options, get_kind("records")) as dataset:
        dataset.write(RECORDS[0], "train")
        with pytest.raises(ValueError, match="another program is writing it"), new_dataset(options, get_kind("pairs")):
            pass
        dataset.finish(FACTS)
    assert list(read_records(tmp_path / "out")) == RECORDS[:1]


@pytest.mark.parametrize("ending", [".old", ".partial"])
def test_a_users_folders_beside_the_output_stay(tmp_path, ending):
    """Defect 2: a build took `X.old` and `X.partial` for its own and deleted or renamed them."""
    mine = write(tmp_path / f"out{ending}", {"train": RECORDS})
    for overwrite in (False, True):
        write(tmp_path / "out", {"train": RECORDS[:1]}, overwrite=overwrite)
        assert list(read_records(mine)) == RECORDS
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", f"out{ending}"]


def test_only_a_data_set_is_replaced_and_only_when_asked(tmp_path):
    output = write(tmp_path / "out", {"train": RECORDS})
    with pytest.raises(FileExistsError, match="is not empty"):
        write(output, {"dev": RECORDS})
    write(output, {"dev": RECORDS}, overwrite=True)
    assert list(dataset_files(output)) == ["dev"]
    (output / "thesis.tex").write_text("mine")
    with pytest.raises(FileExistsError, match=r"did not make \(thesis\.tex\)"):
        write(output, {"train": RECORDS}, overwrite=True)
    assert (output / "thesis.tex").read_text() == "mine"


def test_a_build_does_not_replace_what_it_reads(tmp_path):
    """Defect 4: with --overwrite the input went, when it was named like a shard."""
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "train-00000.jsonl").write_text("input")
    options = FolderOptions(str(folder), overwrite=True)
    sources = [folder / "train-00000.jsonl", None, "owner/name"]
    with pytest.raises(ValueError, match="is, holds or lies"), new_dataset(options, get_kind("records"), sources):
        pass
    assert (folder / "train-00000.jsonl").read_text() == "input"


def test_an_output_that_is_a_link_is_followed(tmp_path):
    """Defect 5: after all the work the build ended with `Cannot call rmtree on a symbolic link`."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    for overwrite, rows in ((False, RECORDS), (True, RECORDS[:1])):
        write(tmp_path / "out", {"train": rows}, overwrite=overwrite)
        assert list(read_records(tmp_path / "disk")) == rows
    assert (tmp_path / "out").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "out"]


def test_chats_keep_their_order(tmp_path):
    folder = write_rows(tmp_path / "out", "trajectories", {"train": CHATS[::-1]})
    assert [one.id for one in read_trajectories(folder)] == ["v:0", "u:0"]
