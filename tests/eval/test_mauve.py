import json

import numpy as np
import pytest

from tripletune.eval.__main__ import main
from tripletune.eval.mauve import curve_area, mauve_score


def test_area_by_hand():
    even = np.array([0.5, 0.5])
    assert curve_area(even, even) == pytest.approx(1)
    # Of disjoint histograms the curve is ((1-w)^5, w^5), and the area under it 5 B(6, 5).
    assert curve_area(np.array([1.0, 0.0]), np.array([0.0, 1.0])) == pytest.approx(5 * 2880 / 3628800, rel=0.05)
    middle = curve_area(np.array([0.7, 0.3]), even)
    assert 0.9 < middle < 1
    assert middle == pytest.approx(curve_area(even, np.array([0.7, 0.3])))


def test_alike_sets_score_high_and_sets_apart_low():
    chance = np.random.default_rng(0)
    here, alike, apart = (chance.normal(size=(200, 16)) + shift for shift in (0.0, 0.0, 3.0))
    assert mauve_score(here, alike) > 0.8
    assert mauve_score(here, apart) < 0.05
    assert mauve_score(here, alike) == mauve_score(here, alike)


def test_the_command_writes_its_score(tmp_path, tiny_llama, capsys):
    rows = [
        {"id": str(n), "question": f"Q{n}?", "answers": ["gold answer"], "prediction": f"answer {n % 3}", "scores": {}}
        for n in range(12)
    ]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["mauve", str(tmp_path), "--model", str(tiny_llama)]) == 0
    found = json.loads((tmp_path / "mauve.json").read_text())
    assert 0 <= found["mauve"] <= 1
    assert found["texts"] == 12
