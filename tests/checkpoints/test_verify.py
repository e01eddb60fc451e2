from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tripletune.checkpoints.verify import compare_observations, verify

Cli = Callable[..., tuple[int, str, str]]


def _scale(folder: Path, part: str, by: float) -> None:
    """Multiply the tensors whose name holds `part`."""
    path = folder / "adapter_model.safetensors"
    save_file({name: tensor * (by if part in name else 1) for name, tensor in load_file(path).items()}, path)


@pytest.mark.usefixtures("same_process")
def test_untouched_export_passes(tiny_export: Path, tiny_run: Path, cli: Cli) -> None:
    code, out, err = cli("verify", tiny_export, "--run", tiny_run)
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert [line.rsplit(maxsplit=1)[-1] for line in lines[1:-1]] == ["ok"] * 10
    assert "is intact" in lines[-1]


@pytest.mark.usefixtures("same_process")
@pytest.mark.parametrize("part", ["lora_B", "graph_encoder", "projector"])
def test_every_trained_part_is_noticed(part: str, export_copy: Path, cli: Cli) -> None:
    _scale(export_copy, part, 1.5)
    code, out, err = cli("verify", export_copy)
    assert code == 1
    assert "FAILED" in out
    assert err.startswith(f"error: {export_copy} does not verify: ")
    assert "adapter_model.safetensors is not the file" in err
    assert "Traceback" not in err


@pytest.mark.usefixtures("same_process")
def test_changed_file_with_equal_outputs_is_noticed(export_copy: Path) -> None:
    path = export_copy / "adapter_model.safetensors"
    save_file(load_file(path), path, metadata={"format": "pt", "note": "saved again"})
    comparison = verify(export_copy)[0]
    assert all(case.passed for case in comparison.cases)
    assert comparison.other_files == ["adapter_model.safetensors"]
    assert not comparison.passed


@pytest.mark.usefixtures("same_process")
def test_other_base_model_is_noticed(export_copy: Path, tmp_path: Path, cli: Cli) -> None:
    config = json.loads((export_copy / "config.json").read_text())
    base = Path(shutil.copytree(config["base_model"], tmp_path / "base"))
    tensors = load_file(base / "model.safetensors")
    save_file({name: tensor * 1.01 for name, tensor in tensors.items()}, base / "model.safetensors", {"format": "pt"})
    (export_copy / "config.json").write_text(json.dumps({**config, "base_model": str(base)}))
    code, _, err = cli("verify", export_copy)
    assert code == 1
    assert "base model, encoder or package versions are other ones" in err


@pytest.mark.usefixtures("same_process")
def test_other_instruction_is_noticed(export_copy: Path, cli: Cli) -> None:
    path = export_copy / "processor_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, "answering_instruction": "Say something else."}))
    code, out, err = cli("verify", export_copy)
    assert code == 1
    rows = [line for line in out.splitlines() if "verify.json" in line]
    assert ["DIFFERS" in row.split("verify.json")[1][:10] for row in rows] == [False, False, False, True, True]
    assert "tokenizer or processor_config.json is another one" in err


@pytest.mark.usefixtures("same_process")
def test_another_run_is_noticed(tiny_export: Path, run_copy: Path, cli: Cli) -> None:
    _scale(run_copy / "final", "lora_B", 1.5)
    code, out, err = cli("verify", tiny_export, "--run", run_copy)
    assert code == 1
    assert out.count("FAILED") == 5
    assert f"differ from {run_copy}: it is another model" in err


def _cut_weights(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (shutil.rmtree, "no such folder"),
        (_cut_weights, "adapter_model.safetensors cannot be read"),
        (lambda folder: (folder / "verify.json").unlink(), "has no verify.json"),
    ],
)
def test_damage_is_one_line(damage: Callable[[Path], None], words: str, export_copy: Path, cli: Cli) -> None:
    damage(export_copy)
    code, out, err = cli("verify", export_copy)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ")
    assert words in err


def _observation(**changes: object) -> dict[str, object]:
    case = {"name": "a", "prompt_ids": [1], "logit_ids": [0, 1], "logits": [0.5, 1.0], "log_normaliser": 2.0}
    return {"cases": [{**case, "reply_ids": [7, 2], **changes}]}


@pytest.mark.parametrize(
    ("changes", "passes"),
    [
        ({}, True),
        ({"logits": [0.5, 1.0009]}, True),
        ({"logits": [0.5, 1.0011]}, False),
        ({"logits": [0.5, math.nan]}, False),
        ({"log_normaliser": 2.1}, False),
        ({"logit_ids": [0, 2]}, False),
        ({"prompt_ids": [1, 1]}, False),
        ({"reply_ids": [7]}, False),
    ],
)
def test_compare(changes: dict[str, object], passes: bool) -> None:
    assert compare_observations(_observation(), _observation(**changes)).passed is passes


@pytest.mark.slow
def test_new_process(export_copy: Path, cli: Cli) -> None:
    code, out, _ = cli("verify", export_copy)
    assert code == 0
    assert out.count(" ok\n") == 5
    # Found by the other process alone: this one looks at JSON and file headers.
    config = json.loads((export_copy / "config.json").read_text())
    (export_copy / "config.json").write_text(json.dumps({**config, "base_model": "/nowhere/base"}))
    code, _, err = cli("verify", export_copy)
    assert (code, err.count("\n")) == (2, 1)
    assert "/nowhere/base" in err
