import json
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from peft import get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.cli import read_lines
from tripletune.checkpoints import export_run
from tripletune.core.data.records import Action, Record
from tripletune.models.graph_llm import load_graph_llm
from tripletune.models.loading import load_language_model
from tripletune.train import train
from tripletune.train.dry_run import _activation_bytes_per_token, dry_run_report, estimate_computation, estimate_memory
from tripletune.train.misfits import check_tracking


@pytest.mark.parametrize(
    ("bf16", "dtype", "checkpointing", "bytes_per_token"),
    [
        # Width 8 and 3 layers: 24 numbers, 17 of each kept, in 4 bytes, or in 2 bytes if either side is in half
        # precision.
        ("false", torch.float32, False, 24 * 17 * 4),
        ("true", torch.float32, False, 24 * 17 * 2),
        ("false", torch.bfloat16, False, 24 * 17 * 2),
        ("false", torch.float32, True, 24 * 4),
    ],
)
def test_the_memory_of_a_token_counts_width_layers_and_precision(bf16, dtype, checkpointing, bytes_per_token):
    text_config = SimpleNamespace(hidden_size=8, num_hidden_layers=3)
    model = SimpleNamespace(
        config=SimpleNamespace(get_text_config=lambda: text_config),
        parameters=lambda: iter([torch.zeros(1, dtype=dtype)]),
    )
    settings = SimpleNamespace(gradient_checkpointing=checkpointing, bf16=bf16)
    task = SimpleNamespace(config=SimpleNamespace(train=settings), model=model)
    assert _activation_bytes_per_token(task) == bytes_per_token


def test_the_report(begin_task):
    task = begin_task("ras", {"train.epochs": 1.5})
    text = dry_run_report(task)
    assert "  learning_rate: 0.01" in text.replace("    ", "  ")
    assert "train: rows 12, tokens " in text
    for kind in ("answering [NO_RETRIEVAL] 1", "answering [SUFFICIENT] 3", "planning [SUBQ] 3"):
        assert kind in text
    assert "validation: rows 4, " in text
    # Three steps an epoch; 4.5 are rounded up, as the Trainer does.
    assert "5 optimiser steps, 1 of them warm-up" in text
    assert "4 records per optimiser step (batch_size 2 x 2 micro-batch(es) x 1 process(es)); the paper: 2 x 2," in text
    trained = sum(p.numel() for p in task.model.parameters() if p.requires_grad)
    assert f"({trained:,} parameters)" in text
    assert f"for 2 x {max(task.train['length'])} tokens" in text
    assert "passes over the data" not in text


def test_the_report_says_the_passes_of_a_number_of_steps(begin_task):
    # An epoch has three steps.
    few = dry_run_report(begin_task("ras", {"train.max_steps": 6}))
    assert "6 optimiser steps, 1 of them warm-up, the first at learning rate 0" in few
    assert "; 2 passes over the data\n" in few
    many = dry_run_report(begin_task("ras", {"train.max_steps": 300}))
    assert "; 100 passes over the data. Is train.max_steps meant?" in many


def test_a_dry_run_estimates_the_computation(begin_task):
    """Operations by hand: 4 per weight and token, 2 more per trained weight; with checkpointing 6."""
    task = begin_task("ras", {"train.max_steps": 300})
    weights = list(task.model.parameters())
    trained = sum(weight.numel() for weight in weights if weight.requires_grad)
    total = sum(weight.numel() for weight in weights)
    tokens = 300 * task.rows_per_step(1) * sum(task.train["length"]) / len(task.train)
    shown = estimate_computation(task)
    assert shown.startswith(f"{tokens:.2g} tokens, {tokens * (4 * total + 2 * trained):.2g} operations: ")
    task.config.train.gradient_checkpointing = True
    assert f", {tokens * (6 * total + 2 * trained):.2g} operations" in estimate_computation(task)
    assert shown in dry_run_report(begin_task("ras", {"train.max_steps": 300}))


def test_a_dry_run_estimates_the_memory(begin_task):
    """Bytes by hand: gradients and two moments per trained weight, 17 numbers kept per number of the hidden width."""
    task = begin_task("ras", {"train.bf16": "false"})
    sizes = [(weight.numel(), weight.requires_grad) for weight in task.model.parameters()]
    trained = sum(size for size, is_trained in sizes if is_trained)
    memory = estimate_memory(task)
    assert (memory.trained, memory.states) == (4 * trained, 3 * 4 * trained)
    assert memory.frozen == 4 * sum(size for size, is_trained in sizes if not is_trained)
    text = task.model.config.get_text_config()
    per_token = text.hidden_size * text.num_hidden_layers * 17 * 4
    assert memory.activations == 2 * max(task.train["length"]) * per_token
    task.config.train.gradient_checkpointing = True
    assert estimate_memory(task).activations == memory.activations / 17


def test_steps_and_rows_of_odd_sizes_are_told(begin_task, tiny_model, tmp_path, caplog):
    task = begin_task("ras", {"train.batch_size": 500})
    assert "an optimiser step takes 1000 records, but only 12 exist: it takes them all" in caplog.text
    assert "rows may have 2800 tokens, but model.base has 1024 positions" in caplog.text
    base = shutil.copytree(task.config.model.base, tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 64}))
    for name in ("ras", "text_to_triples", "cirag_distill"):
        caplog.clear()
        begin_task(name, {"model.base": str(base)})
        assert "tokens, but model.base has 64 positions: lower" in caplog.text
    learned = shutil.copytree(tiny_model("gpt2"), tmp_path / "learned")
    config = json.loads((learned / "config.json").read_text())
    weights = load_file(learned / "model.safetensors")
    name = next(name for name in weights if name.endswith("wpe.weight"))
    save_file({**weights, name: weights[name][:64].clone()}, learned / "model.safetensors", {"format": "pt"})
    (learned / "config.json").write_text(json.dumps({**config, "n_positions": 64}))
    with pytest.raises(ValueError, match=r"a row has \d+ tokens, but model\.base has 64 positions: lower"):
        begin_task("ras", {"model.base": str(learned), "model.lora_targets": ["c_attn"]})


@pytest.mark.parametrize("attention", ["flex_attention", "flash_attention_2"])
def test_kernels_of_gpus_are_refused_elsewhere(make_task, attention, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match=f"model.attention {attention} needs a GPU"):
        train(make_task("ras", {"model.attention": attention}))


@pytest.mark.parametrize("name", ["text_to_triples", "cirag_distill"])
def test_a_base_model_without_chat_template_is_given_one(name, begin_task, tmp_path, tiny_llama):
    base = shutil.copytree(tiny_llama, tmp_path / "base")
    template = (base / "chat_template.jinja").rename(tmp_path / "own.jinja")
    with pytest.raises(ValueError, match=r"has no chat template.* for training set data\.chat_template"):
        begin_task(name, {"model.base": str(base)})
    task = begin_task(name, {"model.base": str(base), "data.chat_template": str(template)})
    assert "<|im_start|>" in task.processor.decode(task.example()[0])
    template.write_text(" \n")
    with pytest.raises(ValueError, match=r"own\.jinja: the prompt is empty"):
        begin_task(name, {"model.base": str(base), "data.chat_template": str(template)})


def test_one_process_on_several_gpus_is_refused(make_task, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    with pytest.raises(ValueError, match="one process sees 8 GPUs: start one process per GPU"):
        train(make_task("ras"))


@pytest.mark.parametrize("name", ["ras", "cirag_distill"])
def test_training_starts_from_a_trained_adapter(name, make_task, tmp_path):
    train(make_task(name, {"train.max_steps": 2}))
    run = str(tmp_path / "run")
    later = {"model.adapter": run, "output_dir": str(tmp_path / "later")}
    found = get_peft_model_state_dict(make_task(name, later).load()[0])
    stored = load_file(tmp_path / "run" / "final" / "adapter_model.safetensors")
    assert found.keys() == stored.keys()
    assert all(torch.equal(found[key], stored[key]) for key in stored)
    config = make_task(name, later).config.model
    rank, alpha = config.lora_rank, config.lora_alpha
    refused = rf"lora_rank 3: it was trained with {rank}, so set {rank}; model\.lora_alpha 7: it .* so set {alpha}$"
    with pytest.raises(ValueError, match=refused):
        make_task(name, {**later, "model.lora_rank": 3, "model.lora_alpha": 7}).load()
    layers = ",".join(sorted({key.partition(".lora_")[0].rpartition(".")[2] for key in stored if ".lora_" in key}))
    refused = rf"model\.lora_targets k_proj: it was trained with {layers}, so set {layers}$"
    with pytest.raises(ValueError, match=refused):
        make_task(name, {**later, "model.lora_targets": ["k_proj"]}).load()
    with pytest.raises(ValueError, match=r"does not have the layers and sizes of the settings: .*lora_A"):
        make_task(name, {**later, "model.lora_options": {"layers_to_transform": [0]}}).load()
    with pytest.raises(FileNotFoundError, match="there is no adapter_model"):
        make_task(name, {"model.adapter": str(tmp_path)}).load()
    if name == "ras":
        file = tmp_path / "run" / "final" / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"encoder_weights": "others"}))
        with pytest.raises(ValueError, match=r"was trained with another text encoder: set model\.encoder"):
            make_task(name, later).load()


@pytest.mark.parametrize("noted", [True, False])
@pytest.mark.parametrize("name", ["ras", "cirag_distill"])
def test_an_adapter_goes_on_its_own_base_model_alone(name, noted, make_task, tmp_path):
    base = Path(make_task(name).config.model.base)
    own, moved, other = (Path(shutil.copytree(base, tmp_path / place)) for place in ("own", "moved", "other"))
    weights = load_file(other / "model.safetensors")
    save_file({key: weight * 1.1 for key, weight in weights.items()}, other / "model.safetensors", {"format": "pt"})
    run = make_task(name, {"model.base": str(own), "train.max_steps": 1, "train.gradient_accumulation": 1})
    train(run)
    final = tmp_path / "run" / "final"
    if not noted:  # as earlier versions left it
        file = final / ("config.json" if name == "ras" else "student.json")
        about = json.loads(file.read_text())
        del about["base_weights"]
        file.write_text(json.dumps(about))

    def load(folder):
        make_task(name, {"model.adapter": str(final), "model.base": str(folder)}).load()

    refused = f"was trained on {own}, but {other} is not known to be the same model"
    load(own)
    load(moved)
    with pytest.raises(ValueError, match=refused):
        load(other)
    with pytest.raises(ValueError, match=refused):
        export_run(final, tmp_path / "out", base_model=str(other))
    shutil.rmtree(own)
    with pytest.raises(ValueError, match=refused):
        load(other)
    with pytest.raises(ValueError, match="write its new name into adapter_config") if not noted else nullcontext():
        load(moved)
    if noted:
        # Other weights under the old name.
        other.rename(own)
        with pytest.raises(ValueError, match=f"was trained on {own}, but {own} holds other weights now"):
            load_graph_llm(final) if name == "ras" else load_language_model(final)


@pytest.mark.parametrize("name", ["ras", "cirag_distill"])
def test_an_adapter_is_trained_beside_weights_of_four_bits(name, make_task, tmp_path, tokenizer):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    # Blocks of 64 numbers share a scale.
    widths = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "num_attention_heads": 4}
    config = LlamaConfig(
        vocab_size=len(tokenizer), num_hidden_layers=1, num_key_value_heads=4, eos_token_id=2, **widths
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    settings = {"model.base": str(tmp_path / "base"), "model.quantization": "nf4", "train.max_steps": 8}
    task = make_task(name, {**settings, "train.gradient_accumulation": 1, "train.eval_steps": 4})
    train(task)
    kinds = {type(layer) for layer in task.model.modules() if "Linear4bit" in type(layer).__name__}
    assert bitsandbytes.nn.Linear4bit in kinds
    assert not any(weight.requires_grad for key, weight in task.model.named_parameters() if "base_layer" in key)
    losses = [line["loss"] for line in read_lines(tmp_path / "run" / "losses.jsonl")]
    assert losses[-1] < losses[0]
    # What is used later is the adapter on the base model as its folder has it.
    assert not [
        file for file in (tmp_path / "run" / "final").glob("*.json") if "quantization_config" in file.read_text()
    ]


def test_the_mask_is_shown_in_any_script(begin_task, write_records, records):
    task = begin_task("ras")
    record = Record("1", "1", "answering", "誰?", Action.NO_RETRIEVAL, answers=("紫式部",))
    write_records([record], "train", None)
    task.__dict__.pop("sources")
    task.train = task.rows(task.sources[0], task.cache)
    text = dry_run_report(task)
    assert "Question: 誰?<|im_end|>" in text
    assert text.endswith("⟦紫式部<|im_end|>⟧" + text.rsplit("⟧", 1)[1])
    assert text.count("⟦") == text.count("⟧") == 2
    assert "�" not in text


def test_a_result_that_was_cut_off_is_not_there(make_task, tmp_path, monkeypatch):
    def killed(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("tripletune.train.result.write_json", killed)
        with pytest.raises(KeyboardInterrupt):
            train(make_task("text_to_triples", {"train.max_steps": 1}))
    assert not (tmp_path / "run" / "final").exists()
    train(make_task("text_to_triples", {"train.max_steps": 1}))
    assert {"training.json", "adapter_model.safetensors"} <= {path.name for path in (tmp_path / "run/final").iterdir()}


# Trackers


class UsageError(Exception):
    pass


@pytest.fixture
def login(monkeypatch):
    login = Mock(side_effect=UsageError("No API key configured.\nUse `wandb login` to log in."))
    monkeypatch.setitem(
        sys.modules, "wandb", SimpleNamespace(login=login, errors=SimpleNamespace(UsageError=UsageError), __spec__=True)
    )
    monkeypatch.delenv("WANDB_MODE", raising=False)
    return login


def test_wandb_without_login_is_told_before_anything_is_loaded(login):
    pytest.importorskip("tensorboard")
    with pytest.raises(ValueError, match=r"No API key configured.*WANDB_MODE=offline") as error:
        check_tracking(["tensorboard", "wandb"])
    assert "\n" not in str(error.value)


def test_offline_or_without_a_tracker_no_login_is_needed(login, monkeypatch):
    check_tracking(["none"])
    for mode in ("offline", "disabled"):
        monkeypatch.setenv("WANDB_MODE", mode)
        check_tracking(["wandb"])
    login.assert_not_called()
