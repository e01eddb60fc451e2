import gzip
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tripletune.data_builders.datasets.lookup import JsonlIndex, SeenTable


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.text(max_size=3), st.text(max_size=2))))
def test_first_notes_are_kept_like_a_dictionary_keeps_them(calls):
    kept: dict[tuple[str, str], str] = {}
    with SeenTable() as seen:
        for kind, value, note in calls:
            assert seen.get(kind, value) == kept.get((kind, value)), "asking remembers nothing"
            assert seen.get_or_add(kind, value, note) == kept.get((kind, value))
            kept.setdefault((kind, value), note)


def keys(where, row):
    return row["name"]


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_rows_are_found_by_key_with_their_line(tmp_path, pack):
    path = tmp_path / "a.jsonl"
    rows = [{"name": "ä", "n": 1}, {"name": "b", "n": 2}, {"name": "ä", "n": 3}]
    path.write_bytes(pack("\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode()))
    index = JsonlIndex(path, keys)
    assert index.get("b") == (f"{path}:3", rows[1])
    assert index.get("ä") == (f"{path}:1", rows[0])
    assert index.get("c") is None
    assert index.repeated_line == 5
