import json
import math
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.cli import run
from tripletune.checkpoints.verify import compare_observations, verify


def _scale(folder, part, by):
    """Multiply the tensors whose name holds `part`."""
    path = folder / "adapter_model.safetensors"
    save_file({name: tensor * (by if part in name else 1) for name, tensor in load_file(path).items()}, path)


def _other_base(folder):
    config = json.loads((folder / "config.json").read_text())
    base = Path(shutil.copytree(config["base_model"], folder.parent / "base"))
    tensors = load_file(base / "model.safetensors")
    save_file({name: tensor * 1.01 for name, tensor in tensors.items()}, base / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "base_model": str(base)}))


def _other_template(folder):
    # No case has so many turns.
    file = folder / "chat_template.jinja"
    file.write_text(file.read_text() + "{% if messages | length > 9 %}So many turns.{% endif %}")


def _other_instruction(folder):
    path = folder / "processor_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, "answering_instruction": "Say something else."}))


@pytest.mark.usefixtures("same_process")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder: _scale(folder, "lora_B", 1.5), "adapter_model.safetensors has changed since the export"),
        (_other_instruction, "processor_config.json has changed since the export"),
        (_other_template, "chat_template.jinja has changed since the export"),
    ],
)
def test_what_is_wrong_is_named(change, words, export_copy, tmp_path):
    change(export_copy)
    code, out, err = run("checkpoints", "verify", export_copy)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith(f"error: {export_copy} does not verify against verify.json: ")
    assert words in err


@pytest.mark.usefixtures("same_process")
def test_another_base_model_is_named(export_copy):
    _other_base(export_copy)
    code, out, err = run("checkpoints", "verify", export_copy)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"{export_copy.parent / 'base'} is not known to be the same model" in err


@pytest.mark.usefixtures("same_process")
def test_changed_file_with_equal_outputs_is_noticed(export_copy):
    path = export_copy / "adapter_model.safetensors"
    save_file(load_file(path), path, metadata={"format": "pt", "note": "saved again"})
    (found,) = verify(export_copy)
    assert (found.same_prompts, found.same_replies, found.difference) == (3, 3, 0)
    assert found.other_files == ["adapter_model.safetensors"]
    assert not found.passed


@pytest.mark.usefixtures("same_process")
def test_an_export_that_recorded_only_weights_is_verified_by_its_outputs(export_copy):
    _reference(lambda cases: cases, files=None)(export_copy)
    (found,) = verify(export_copy)
    assert found.passed
    _other_instruction(export_copy)
    assert "the tokenizer or processor_config.json has changed" in run("checkpoints", "verify", export_copy).err


@pytest.mark.usefixtures("same_process")
def test_another_run_is_noticed(tiny_export, run_copy):
    _scale(run_copy / "final", "lora_B", 1.5)
    code, out, err = run("checkpoints", "verify", tiny_export, "--run", run_copy)
    assert code == 1
    assert "is intact against verify.json" in out
    assert f"against {run_copy}: " in err
    assert "it is another model" in err


def _cut_weights(folder):
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


def _reference(change, **more):
    def damage(folder):
        path = folder / "verify.json"
        reference = json.loads(path.read_text())
        path.write_text(json.dumps(reference | {"cases": change(reference["cases"])} | more))

    return damage


@pytest.mark.usefixtures("same_process")
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_cut_weights, "adapter_model.safetensors cannot be read"),
        (lambda folder: (folder / "verify.json").unlink(), "has no verify.json"),
        (
            lambda folder: _scale(folder, "lora_B", math.nan),
            "export: weights are not finite (NaN or infinite), for example base_",
        ),
        (_reference(lambda cases: None), "verify.json: cases must be a list, found null"),
        (_reference(lambda cases: [None]), "cases[0] must be an object, found null"),
        (
            _reference(lambda cases: [{**cases[0], "log_normaliser": "high"}]),
            "cases[0].log_normaliser must be a finite number",
        ),
        (_reference(lambda cases: [{**cases[1], "steps": 7}]), "cases[0].steps must be a list, found 7"),
        (
            _reference(lambda cases: [{key: cases[0][key] for key in ("name", "task")}]),
            "cases[0] lacks prompt_ids",
        ),
    ],
)
def test_damage_is_one_line(damage, words, export_copy):
    damage(export_copy)
    code, out, err = run("checkpoints", "verify", export_copy)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ")
    assert words in err


@pytest.mark.parametrize("tolerance", ["nan", "inf", "-1"])
def test_a_tolerance_that_decides_nothing_is_refused(tolerance, tiny_export):
    code, out, err = run("checkpoints", "verify", tiny_export, f"--tolerance={tolerance}")
    assert (code, out) == (2, "")
    assert err == f"error: tolerance {tolerance}: must be a number from 0\n"


@pytest.mark.parametrize(
    ("changes", "passes"),
    [
        # Exports before 0.1.0 also hold a sample of the logits.
        ({"logit_ids": [0, 1], "logits": [0.5, 1.0]}, True),
        ({"log_normaliser": 2.0009}, True),
        ({"log_normaliser": 2.0011}, False),
        ({"log_normaliser": math.nan}, False),
        ({"prompt_ids": [1, 1]}, False),
        ({"reply_ids": [7]}, False),
    ],
)
def test_compare(changes, passes):
    case = {"name": "a", "prompt_ids": [1], "log_normaliser": 2.0, "reply_ids": [7, 2]}
    other = {"name": "b", "prompt_ids": [2], "log_normaliser": 1.0, "reply_ids": [5]}
    reference, observed = {"cases": [case, other]}, {"cases": [{**case, **changes}, other]}
    assert compare_observations(reference, observed).passed is passes


@pytest.mark.slow
def test_new_process(export_copy):
    # Found by the other process alone: this one looks at JSON and file headers.
    config = json.loads((export_copy / "config.json").read_text())
    (export_copy / "config.json").write_text(json.dumps({**config, "base_model": "/nowhere/base"}))
    code, _, err = run("checkpoints", "verify", export_copy)
    assert (code, err.count("\n")) == (2, 1)
    assert "/nowhere/base" in err


@pytest.mark.slow
def test_the_new_process_shows_no_warnings_of_other_libraries(export_copy, capfd):
    assert run("checkpoints", "verify", export_copy).code == 0
    # What the other process writes does not pass through this one.
    assert "Warning" not in capfd.readouterr().err
