import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from peft import get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.cli import read_lines
from tripletune.models.data.records import Action, Record
from tripletune.train import check_tracking, dry_run_report, train


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
    assert "4 records per optimiser step (batch_size 2 x 2 micro-batch(es) x 1 process(es)); the paper: 16 (2 x" in text
    trained = sum(p.numel() for p in task.model.parameters() if p.requires_grad)
    assert f"({trained:,} parameters)" in text
    assert f"for 2 x {max(task.train['length'])} tokens" in text


def test_one_process_on_several_gpus_is_refused(make_task, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    with pytest.raises(ValueError, match="one process sees 8 GPUs: start one per GPU"):
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
    with pytest.raises(ValueError, match=r"has other layers or sizes than the settings ask for: .*lora_A"):
        make_task(name, {**later, "model.lora_rank": 3}).load()
    with pytest.raises(FileNotFoundError, match="there is no adapter_model"):
        make_task(name, {"model.adapter": str(tmp_path)}).load()


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
        patch.setattr("tripletune.train.engine.write_json", killed)
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
    with pytest.raises(ValueError, match=r"No API key configured.*WANDB_MODE=offline") as error:
        check_tracking(["tensorboard", "wandb"])
    assert "\n" not in str(error.value)


def test_offline_or_without_a_tracker_no_login_is_needed(login, monkeypatch):
    check_tracking(["none"])
    for mode in ("offline", "disabled"):
        monkeypatch.setenv("WANDB_MODE", mode)
        check_tracking(["wandb"])
    login.assert_not_called()
