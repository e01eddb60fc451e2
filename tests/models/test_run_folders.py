from __future__ import annotations

import json
from pathlib import Path

from tripletune.models.run_folders import trained_folder, weight_files


def test_trained_folder(tmp_path: Path) -> None:
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / "config.json").write_text("{}")
    assert trained_folder(tmp_path) == trained_folder(tmp_path / "final") == tmp_path / "final"


def test_all_shards_are_looked_at(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model-2.safetensors", "b": "model-1.safetensors", "c": "model-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [file.name for file in weight_files(tmp_path)] == ["model-1.safetensors", "model-2.safetensors"]
