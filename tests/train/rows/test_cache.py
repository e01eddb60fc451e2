import pytest

from tripletune.train.rows.cache import cached_rows, pack_rows, rows_meta


def rows_of(lengths):
    def rows(counts):
        counts["seen"] += len(lengths)
        for number, length in enumerate(lengths):
            yield {"input_ids": [number] * length, "labels": [-100] * (length - 1) + [number], "length": length}

    return rows


def never(counts):
    raise AssertionError("tokenised again")
    yield {}


def test_rows_are_written_once(tmp_path):
    found = cached_rows(["key"], tmp_path, [rows_of([3]), rows_of([]), rows_of([4, 5])])
    assert found[2] == {"input_ids": [1] * 5, "labels": [-100] * 4 + [1], "length": 5}
    assert rows_meta(found) == {"rows": 3, "tokens": 12, "label_tokens": 3, "seen": 3}
    again = cached_rows(["key"], tmp_path, [never])
    assert again[:] == found[:]
    # Another key, another file.
    assert len(cached_rows(["other"], tmp_path, [rows_of([4])])) == 1


def test_rows_that_were_cut_off_are_written_anew(tmp_path):
    def dies(counts):
        yield from rows_of([3])(counts)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached_rows(["key"], tmp_path, [dies])
    assert len(cached_rows(["key"], tmp_path, [rows_of([3, 5])])) == 2


def test_packs_are_made_once_and_hold_whole_rows(tmp_path, monkeypatch):
    dataset = cached_rows(["key"], tmp_path, [rows_of([60, 30, 40, 64, 1])])
    packs = pack_rows(dataset, 64)
    assert sorted(length for pack in packs for length in pack["seq_lengths"]) == [1, 30, 40, 60, 64]
    assert all(sum(pack["seq_lengths"]) == len(pack["input_ids"]) == len(pack["labels"]) <= 64 for pack in packs)
    monkeypatch.setattr("trl.pack_dataset", lambda *args: pytest.fail("packed again"))
    assert pack_rows(cached_rows(["key"], tmp_path, [never]), 64)[:] == packs[:]


def test_a_row_longer_than_a_pack_is_an_error_and_not_cut(tmp_path):
    dataset = cached_rows(["key"], tmp_path, [rows_of([3, 65])])
    with pytest.raises(ValueError, match="pack_tokens 64: the longest sample has 65 tokens"):
        pack_rows(dataset, 64)
