import json

import pytest

from tripletune.core.data.pairs import Trajectory, read_trajectories


def test_rows_that_are_no_trajectory_are_named(tmp_path):
    good = Trajectory("a", "q", "r", "m", ({"role": "user", "content": "x"},), (True,)).to_json()
    for change in ({"learned": [1]}, {"learned": []}, {"learned": [False]}, {"messages": [{"role": "x"}]}, {"id": 1}):
        with pytest.raises(ValueError, match="file:3: "):
            Trajectory.from_json(good | change, "file:3")
    assert Trajectory.from_json(good).to_json() == good


def test_a_file_is_read_with_the_line_of_a_bad_row(tmp_path):
    good = Trajectory("a", "q", "r", "m", ({"role": "user", "content": "x"},), (True,))
    (tmp_path / "train-00000.jsonl").write_text(json.dumps(good.to_json()) + "\n{}\n")
    rows = read_trajectories(tmp_path, "train")
    assert next(rows) == good
    with pytest.raises(ValueError, match=r"train-00000\.jsonl:2: the row is no chat: .*but it has no field"):
        next(rows)
