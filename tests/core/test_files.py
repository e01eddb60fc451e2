"""One way to write: whole or not at all, one writer, nothing of another making lost."""

import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tripletune.core import files
from tripletune.core.concurrency import build_together
from tripletune.core.files import (
    check_new,
    finite,
    lock_folder,
    new_file,
    new_folder,
    read_json,
    write_json,
    write_text,
)

MADE = ("*.jsonl", "README.md")


def test_numbers_that_json_does_not_have_are_null():
    found = {"loss": math.nan, "é": [math.inf, (1.5, -math.inf)], "steps": 2}
    assert finite(found) == {"loss": None, "é": [None, [1.5, None]], "steps": 2}


def fill(output, text="new", **options):
    with new_folder(output, MADE, **options) as folder:
        (folder / "a.jsonl").write_text(text)


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    output = tmp_path / "deep" / "out"
    with pytest.raises(KeyError), new_folder(output, MADE) as folder:
        (folder / "a.jsonl").write_text("half")
        raise KeyError
    assert list(tmp_path.rglob("*")) == [tmp_path / "deep"]
    fill(output)
    assert sorted(path.name for path in output.iterdir()) == ["a.jsonl"]
    assert os.listdir(output.parent) == ["out"]


@pytest.mark.skipif(os.name == "nt", reason="Windows has other permissions")
def test_weights_may_be_read_by_those_who_may_read_the_other_files(tmp_path):
    with new_folder(tmp_path / "model", ["*"]) as scratch:
        (scratch / "config.json").write_text("{}")
        (scratch / "part").mkdir()
        (scratch / "part/model.safetensors").write_bytes(b"")
        (scratch / "part/model.safetensors").chmod(0o600)
    modes = {path.stat().st_mode for path in (tmp_path / "model").rglob("*.*") if path.is_file()}
    assert len(modes) == 1


def test_a_folder_is_replaced_only_when_asked_and_only_what_such_a_program_makes(tmp_path):
    output = tmp_path / "out"
    fill(output, "old")
    with pytest.raises(FileExistsError, match="--overwrite"):
        fill(output)
    (output / "mine.txt").write_text("precious")
    with pytest.raises(FileExistsError, match=r"did not make \(mine.txt\)"):
        fill(output, overwrite=True)
    (output / "mine.txt").unlink()
    fill(output, overwrite=True)
    assert (output / "a.jsonl").read_text() == "new"


def test_a_folder_without_the_name_that_tells_is_never_replaced(tmp_path):
    output = tmp_path / "out"
    output.mkdir()
    (output / "README.md").write_text("mine")
    with pytest.raises(FileExistsError, match=r"did not make \(README.md\)"):
        fill(output, overwrite=True)
    with pytest.raises(ValueError, match="path is empty"):
        check_new("")


def test_folders_of_the_user_beside_the_output_stay(tmp_path):
    for name in ("out.old", "out.partial", "out.tmp", "out.replaced"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").write_text("precious")
    fill(tmp_path / "out")
    fill(tmp_path / "out", overwrite=True)
    assert len(list(tmp_path.glob("out.*/mine"))) == 4


def test_a_symbolic_link_is_followed(tmp_path):
    disk, link = tmp_path / "disk", tmp_path / "link"
    disk.mkdir()
    link.symlink_to(disk)
    fill(link)
    fill(link, "again", overwrite=True)
    assert link.is_symlink()
    assert (disk / "a.jsonl").read_text() == "again"


def test_a_second_writer_is_refused_while_the_first_writes(tmp_path):
    with new_folder(tmp_path / "out", MADE) as folder:
        (folder / "a.jsonl").write_text("first")
        with pytest.raises(ValueError, match="another program is writing"):
            fill(tmp_path / "out", "second")
    assert (tmp_path / "out" / "a.jsonl").read_text() == "first"


def test_what_a_kill_left_is_put_right(tmp_path):
    fill(tmp_path / "out", "old")
    script = (
        "import os, signal, sys\nfrom tripletune.core import files\n"
        "real = os.replace\n"
        "def once(a, b):\n    real(a, b)\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "os.replace = once\n"
        f"with files.new_folder({str(tmp_path / 'out')!r}, {MADE!r}, True) as folder:\n"
        "    (folder / 'a.jsonl').write_text('new')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    with pytest.raises(FileExistsError, match="--overwrite"):
        fill(tmp_path / "out")  # which the old folder, back in its place, refuses
    assert (tmp_path / "out" / "a.jsonl").read_text() == "old"


def test_work_that_can_go_on_stays_for_the_next_call(tmp_path):
    with pytest.raises(KeyError), new_folder(tmp_path / "out", MADE, resume=True) as folder:
        (folder / "a.jsonl").write_text("half")
        raise KeyError
    with new_folder(tmp_path / "out", MADE, resume=True) as folder:
        assert (folder / "a.jsonl").read_text() == "half"
    assert sorted(os.listdir(tmp_path / "out")) == ["a.jsonl"]


def test_nothing_is_written_over_what_is_read(tmp_path):
    source = tmp_path / "in" / "train.jsonl"
    write_text_in = source.parent
    write_text_in.mkdir()
    source.write_text("mine")
    with pytest.raises(ValueError, match="in the input"):
        check_new(source.parent / ".." / "in" / "train.jsonl", [source])
    with pytest.raises(ValueError, match="in the input"), new_folder(source.parent, MADE, True, [source]):
        pass
    assert source.read_text() == "mine"


def test_a_file_is_written_in_one_step(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"a": "é"})
    with pytest.raises(KeyError), new_file(path) as scratch:
        scratch.write_text("half")
        raise KeyError
    assert read_json(path) == {"a": "é"}
    assert os.listdir(tmp_path) == ["a.json"]
    link = tmp_path / "link"
    link.symlink_to(path)
    write_text(link, "{}")
    assert link.is_symlink()
    assert read_json(path) == {}


@pytest.mark.parametrize(("content", "said"), [(b"{", "not valid JSON"), (b"\xff", "not UTF-8"), (b"[]", "found list")])
def test_a_damaged_file_is_named(tmp_path, content, said):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ValueError, match=said) as caught:
        read_json(tmp_path / "a.json")
    assert "a.json" in str(caught.value)


def test_a_lock_ends_with_its_file_and_can_be_waited_for(tmp_path):
    first = lock_folder(tmp_path, "busy")
    with pytest.raises(ValueError, match="busy"):
        lock_folder(tmp_path, "busy")
    threading.Timer(0.2, first.close).start()
    start = time.monotonic()
    lock_folder(tmp_path, "busy", wait=True).close()
    assert time.monotonic() - start > 0.1


def build(folder, done, stops=None):
    def part(number, place):
        if number == stops:
            raise KeyboardInterrupt
        time.sleep(0.01)
        done.append(str(number))
        write_text(place / "end", str(number))

    def merge(places):
        done.append("merged")
        write_text(folder / "end", "".join((place / "end").read_text() for place in places))

    build_together(folder, "end", [partial(part, number) for number in range(6)], merge, "building")
    return (folder / "end").read_text()


def test_parts_that_were_finished_before_a_kill_are_used(tmp_path):
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "it", done, stops=4)
    assert [build(tmp_path / "it", done) for _ in range(2)] == ["012345"] * 2
    assert done == [*"012345", "merged"]
    assert os.listdir(tmp_path / "it") == ["end"]


def test_several_build_each_part_once(tmp_path):
    done: list[str] = []
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda _: build(tmp_path, done), range(3))) == ["012345"] * 3
    assert sorted(done) == [*"012345", "merged"]


def test_without_locks_another_may_be_done_first(tmp_path):
    def part(place):
        write_text(tmp_path / "end", "theirs")
        shutil.rmtree(place.parent)
        write_text(place / "end", "mine")

    build_together(tmp_path, "end", [part], lambda places: pytest.fail("merged"), "building")
    assert (tmp_path / "end").read_text() == "theirs"


def test_a_changed_byte_of_a_large_file_changes_its_fingerprint(tmp_path, monkeypatch):
    monkeypatch.setenv("TRIPLETUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "_LARGE", 1000)
    file = tmp_path / "model" / "a.safetensors"
    file.parent.mkdir()
    content = bytearray(5000)
    file.write_bytes(content)
    fingerprint = files.files_fingerprint(file.parent)
    with monkeypatch.context() as patch:
        patch.setattr(files, "file_digest", None)
        assert files.files_fingerprint(file.parent) == fingerprint, "it is remembered"
    before = file.stat()
    content[4321] = 1
    file.write_bytes(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert files.files_fingerprint(file.parent) != fingerprint
