import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tripletune.train.text_rows import cached_rows, files_digest, pack_rows, rows_meta

Rows = Callable[[Counter[str]], Iterator[dict[str, Any]]]


def rows_of(lengths: list[int]) -> Rows:
    def rows(counts: Counter[str]) -> Iterator[dict[str, Any]]:
        counts["seen"] += len(lengths)
        for number, length in enumerate(lengths):
            yield {
                "input_ids": [number] * length,
                "labels": [-100] * (length - 1) + [number],
                "length": length,
            }

    return rows


def never(counts: Counter[str]) -> Iterator[dict[str, Any]]:
    raise AssertionError("tokenised again")
    yield {}


def test_rows_are_written_once(tmp_path: Path) -> None:
    found = cached_rows(["key"], tmp_path, rows_of([3, 5]))
    assert found[1] == {"input_ids": [1] * 5, "labels": [-100] * 4 + [1], "length": 5}
    assert rows_meta(found) == {"rows": 2, "tokens": 8, "label_tokens": 2, "seen": 2}
    again = cached_rows(["key"], tmp_path, never)
    assert again[:] == found[:]
    # Another key, another file.
    assert len(cached_rows(["other"], tmp_path, rows_of([4]))) == 1


def test_rows_that_were_cut_off_are_written_anew(tmp_path: Path) -> None:
    def dies(counts: Counter[str]) -> Iterator[dict[str, Any]]:
        yield from rows_of([3])(counts)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached_rows(["key"], tmp_path, dies)
    assert len(cached_rows(["key"], tmp_path, rows_of([3, 5]))) == 2


def test_no_rows_say_why(tmp_path: Path) -> None:
    def nothing(counts: Counter[str]) -> Iterator[dict[str, Any]]:
        counts["left_out"] = 7
        yield from ()

    with pytest.raises(ValueError, match=r"no rows to learn from \(left_out 7\)"):
        cached_rows(["key"], tmp_path, nothing)


def test_packs_are_made_once_and_hold_whole_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = cached_rows(["key"], tmp_path, rows_of([60, 30, 40, 64, 1]))
    packs = pack_rows(dataset, 64)
    assert sorted(length for pack in packs for length in pack["seq_lengths"]) == [1, 30, 40, 60, 64]
    assert all(sum(pack["seq_lengths"]) == len(pack["input_ids"]) == len(pack["labels"]) <= 64 for pack in packs)
    monkeypatch.setattr("tripletune.train.text_rows.trl_pack_dataset", lambda: pytest.fail("packed again"))
    assert pack_rows(cached_rows(["key"], tmp_path, never), 64)[:] == packs[:]


def test_a_row_longer_than_a_pack_is_an_error_and_not_cut(tmp_path: Path) -> None:
    dataset = cached_rows(["key"], tmp_path, rows_of([3, 65]))
    with pytest.raises(ValueError, match="pack_tokens 64: the longest sample has 65 tokens"):
        pack_rows(dataset, 64)


def test_the_digest_follows_content_and_selection(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"id": "1"}) + "\n")
    first = files_digest(path, None, 5)
    assert files_digest(path, None, 5) == first != files_digest(path, None, 6)
    path.write_text(json.dumps({"id": "2"}) + "\n")
    assert files_digest(path, None, 5) != first
