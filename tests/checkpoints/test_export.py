import json
import math
import shutil

import pytest
from safetensors.torch import load, save

from tests.checkpoints.conftest import train_tiny
from tests.cli import run
from tripletune.checkpoints import export_run, merge_adapter
from tripletune.core.files import file_digest

WANTED = {
    "README.md", "adapter_config.json", "adapter_model.safetensors", "chat_template.jinja", "config.json",
    "generation_config.json", "modeling_graph_llm.py", "processor_config.json", "provenance.json",
    "tokenizer.json", "tokenizer_config.json", "verify.json",
}  # fmt: skip


def test_reference_outputs_are_of_both_tasks_and_name_the_weights(tiny_run, tiny_export):
    reference = json.loads((tiny_export / "verify.json").read_text())
    tasks = [(case["task"], len(case["steps"])) for case in reference["cases"]]
    assert {("planning", 0), ("planning", 2), ("answering", 2)} == set(tasks)
    assert reference["weights"] == {
        "adapter_model.safetensors": file_digest(tiny_run / "final" / "adapter_model.safetensors")
    }


def test_says_nothing_of_this_machine(run_copy, tmp_path, tiny_encoder):
    config = json.loads((run_copy / "final" / "config.json").read_text())
    tokenizer = json.loads((run_copy / "final" / "tokenizer_config.json").read_text())
    settings = {**tokenizer, "name_or_path": "/home/someone/models/base"}
    (run_copy / "final" / "tokenizer_config.json").write_text(json.dumps(settings))
    given = {"base_model": "owner/base@abc123", "encoder": "owner/encoder@v2"}
    folder = export_run(run_copy, tmp_path / "out", **given, licence="mit")
    for path in folder.iterdir():
        for private in (b"/home/", b"hf_abcdef", config["base_model"].encode(), bytes(tiny_encoder), b"\x80pickle"):
            assert private not in path.read_bytes(), (path.name, private)
    written = json.loads((folder / "config.json").read_text())
    names = {"base_model": "owner/base", "base_revision": "abc123", "encoder": "owner/encoder@v2"}
    assert {**names, "encoder_weights": config["encoder_weights"]}.items() <= written.items()
    adapter = json.loads((folder / "adapter_config.json").read_text())
    assert (adapter["base_model_name_or_path"], adapter["revision"]) == ("owner/base", "abc123")
    assert adapter["auto_mapping"]["parent_library"] == "tripletune.models.graph_llm.model"
    assert json.loads((folder / "tokenizer_config.json").read_text())["eos_token"] == tokenizer["eos_token"]


def test_revision_of_a_renamed_base_is_not_kept(run_copy, tmp_path):
    path = run_copy / "final" / "config.json"
    path.write_bytes(_set("base_revision", "old")(path.read_bytes()))
    kept = export_run(run_copy, tmp_path / "kept")
    renamed = export_run(run_copy, tmp_path / "renamed", base_model="owner/base")
    assert json.loads((kept / "config.json").read_text())["base_revision"] == "old"
    assert json.loads((renamed / "config.json").read_text())["base_revision"] is None


def test_checkpoint_of_an_unfinished_run(run_copy, tmp_path):
    (run_copy / "final").rename(run_copy / "checkpoint-20")
    shutil.copytree(run_copy / "checkpoint-20", run_copy / "checkpoint-3")
    code, _, err = run("checkpoints", "export", run_copy, "--output", tmp_path / "out")
    assert code == 2
    assert err.endswith(f"give a checkpoint: {run_copy / 'checkpoint-20'}\n")
    assert run("checkpoints", "export", run_copy / "checkpoint-20", "--output", tmp_path / "out")[0] == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == WANTED


def _tensors(part, change):
    """Puts what `change` gives, one tensor or none, in the place of those whose names hold `part`."""

    def damage(data):
        tensors = load(data)
        assert any(part in name for name in tensors)
        return save({n: one for n, old in tensors.items() for one in (change(old) if part in n else [old])})

    return damage


def _set(name, value):
    return lambda data: json.dumps({**json.loads(data), name: value}).encode()


WEIGHTS, UNFIT = "adapter_model.safetensors", "do not match"


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("tokenizer.json", None, ["has no tokenizer"]),
        (WEIGHTS, lambda data: data[:20_000], [WEIGHTS, "cut off"]),
        ("config.json", _set("model_type", "llama"), ["model_type is 'llama'"]),
        (WEIGHTS, _tensors("lora_A", lambda old: [old.new_zeros(8, 99)]), [UNFIT, "size mismatch"]),
        (WEIGHTS, _tensors("projector", lambda old: [old * math.nan]), ["final: weights are not finite", "projector"]),
        (WEIGHTS, _tensors("layers.1.", lambda old: []), [UNFIT, "missing adapter keys", "layers.1."]),
    ],
)
def test_bad_input_is_one_line(name, change, words, run_copy, tmp_path):
    path = run_copy / "final" / name
    data = path.read_bytes()
    path.unlink()
    if change is not None:
        path.write_bytes(change(data))
    ran = run("checkpoints", "export", run_copy, "--output", tmp_path / "out")
    assert (ran.code, ran.out) == (2, "")
    assert all(word in ran.error for word in words), ran.error
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.usefixtures("same_process")
def test_a_graph_llm_whose_weights_were_all_trained_is_exported_whole(tiny_model, tiny_encoder, tmp_path):
    run_ = tmp_path / "run"
    train_tiny(tiny_model("smollm2"), tiny_encoder, run_ / "final", tune="all")
    (run_ / "config.yaml").write_text("model: {tune: all}\n")
    folder = export_run(run_, tmp_path / "out", base_model="owner/name")
    assert run("checkpoints", "verify", folder, "--run", run_).code == 0
    config = json.loads((folder / "config.json").read_text())
    assert (config["base_model"], config["encoder"]) == ("owner/name", str(tiny_encoder))
    card = (folder / "README.md").read_text()
    assert "# Graph-LLM: out" in card
    assert "(all weights, graph encoder and projector); it needs no PEFT" in card
    with pytest.raises(ValueError, match="a whole model, with nothing to merge"):
        merge_adapter(folder, tmp_path / "merged")
