import json
import sys
from types import SimpleNamespace

import pytest

from tests.cli import write_lines
from tripletune.eval.__main__ import main


@pytest.fixture
def command(tmp_path, tiny_llama):
    row = {"question": "Q?", "answers": ["gold answer"], "scores": {}}
    write_lines(tmp_path / "results.jsonl", [{"id": str(n), "prediction": f"answer {n % 3}", **row} for n in range(12)])
    return ["mauve", str(tmp_path), "--model", str(tiny_llama)]


def test_the_command_writes_the_packages_score_of_the_models_states(command, tmp_path, monkeypatch):
    given = {}
    stub = SimpleNamespace(compute_mauve=lambda **more: given.update(more) or SimpleNamespace(mauve=0.25))
    monkeypatch.setitem(sys.modules, "mauve", stub)
    assert main(command) == 0
    assert json.loads((tmp_path / "mauve.json").read_text())["mauve"] == 0.25
    gold, said = given["p_features"], given["q_features"]
    assert gold.shape == said.shape
    assert len(gold) == 12
    assert (gold == gold[0]).all()
    assert (said[0] == said[3]).all()
    assert (said[0] != said[1]).any()


def test_without_the_package_one_line_says_how_to_get_it_and_its_licence(command, error_of, monkeypatch):
    monkeypatch.setitem(sys.modules, "mauve", None)
    assert main(command) == 2
    error = error_of()
    assert "pip install 'tripletune[mauve]'" in error
    assert "GPL-3" in error
