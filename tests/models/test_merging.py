import json
import logging

import pytest
import torch
from peft import (
    AdaptionPromptConfig,
    LilyConfig,
    LoraConfig,
    OSFConfig,
    PeftModel,
    PromptTuningConfig,
    get_peft_model,
)
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from tripletune.models.loading import load_language_model
from tripletune.models.merging import merge_into_base

IDS = torch.tensor([[5, 9, 30, 7, 44, 12]])


def _base(folder, tied):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        initializer_range=0.3, tie_word_embeddings=tied,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def _opened(base, tokens=None):
    model = AutoModelForCausalLM.from_pretrained(base)
    if tokens:
        torch.manual_seed(2)
        model.resize_token_embeddings(tokens, mean_resizing=False)
    return model


def _trained(base, folder, settings, tokens=None):
    """Save an adapter all of whose weights changed, on a base with another number of tokens if it is given."""
    adapted = get_peft_model(_opened(base, tokens), settings)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in adapted.parameters():
            if weight.requires_grad:
                weight.add_(0.05 * torch.randn_like(weight))
    adapted.save_pretrained(folder)
    return folder


@torch.no_grad()
def _logits(model):
    return model.eval()(input_ids=IDS).logits


def _difference(model, base, adapter, tokens=None):
    expected = _logits(PeftModel.from_pretrained(_opened(base, tokens), str(adapter)))
    return float((_logits(model) - expected).abs().max())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["embed_tokens", "lm_head"]},
        {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj"], "trainable_token_indices": [5, 7]},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_merged_logits_are_those_of_the_adapter(options, tied, tmp_path):
    base = _base(tmp_path / "base", tied)
    adapter = _trained(base, tmp_path / "adapter", LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=16, **options))
    for merge in (False, True):
        model = load_language_model(adapter, torch.float32, merge=merge)
        assert _difference(model, base, adapter) < 1e-4
    model.save_pretrained(tmp_path / "merged")
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert _difference(reloaded, base, adapter) < 1e-4
    # transformers would tie the layers again.
    head = reloaded.lm_head.weight.detach().clone()
    reloaded.resize_token_embeddings(100, mean_resizing=False)
    torch.testing.assert_close(reloaded.lm_head.weight[:96], head)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_layers_that_would_merge_twice_are_merged_once(tmp_path):
    base = _base(tmp_path / "base", tied=False)
    adapter = _trained(base, tmp_path / "adapter", OSFConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    assert _difference(load_language_model(adapter, torch.float32), base, adapter) < 1e-4


@pytest.mark.parametrize("tokens", [88, 104])
@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj"]},
        {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
        {"target_modules": ["q_proj"], "trainable_token_indices": [5, 80]},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_adapter_with_added_tokens_brings_its_embeddings(options, tokens, tmp_path):
    base = _base(tmp_path / "base", tied=True)
    adapter = _trained(base, tmp_path / "adapter", LoraConfig(task_type="CAUSAL_LM", **options), tokens)
    for merge in (False, True):
        model = load_language_model(adapter, torch.float32, merge=merge)
        assert model.config.vocab_size == tokens
        assert _difference(model, base, adapter, tokens) < 1e-4


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_encoder_decoder_with_a_changed_embedding(tmp_path):
    torch.manual_seed(0)
    config = T5Config(vocab_size=96, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, decoder_start_token_id=0)
    base = T5ForConditionalGeneration(config)
    adapted = get_peft_model(base, LoraConfig(target_modules=["q", "lm_head"], init_lora_weights=False))
    inputs = {"input_ids": IDS, "decoder_input_ids": IDS}
    with torch.no_grad():
        expected = adapted.eval()(**inputs).logits
        merged = merge_into_base(adapted)(**inputs).logits
    torch.testing.assert_close(merged, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (LoraConfig(target_modules=["q_proj", "v_proj"], lora_bias=True), "base layer has no bias"),
        (LilyConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]), "not supported for Lily"),
        (
            AdaptionPromptConfig(adapter_len=4, adapter_layers=1, task_type="CAUSAL_LM"),
            "merge the type ADAPTION_PROMPT",
        ),
    ],
    ids=lambda value: getattr(value, "peft_type", ""),
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_adapter_that_can_not_be_merged_stays_unmerged(settings, reason, tmp_path, caplog):
    base = _base(tmp_path / "base", tied=False)
    adapter = _trained(base, tmp_path / "adapter", settings)
    with caplog.at_level(logging.WARNING):
        model = load_language_model(adapter, torch.float32, merge=False)
    assert "It stays unmerged, which is slower." in caplog.text
    assert _difference(model, base, adapter) < 1e-6
    with pytest.raises(ValueError, match=rf"can't be merged .* {reason}; use the adapter's folder"):
        load_language_model(adapter, torch.float32)


def test_a_merge_with_other_logits_is_undone(tmp_path, monkeypatch):
    base = _base(tmp_path / "base", tied=True)
    adapter = _trained(base, tmp_path / "adapter", LoraConfig(target_modules=["q_proj", "embed_tokens"]))
    monkeypatch.setattr("tripletune.models.merging._separate_shared_weights", lambda model: None)
    model = load_language_model(adapter, torch.float32, merge=False)
    assert _difference(model, base, adapter) < 1e-4
    with pytest.raises(ValueError, match="the logits of the merged model differ by"):
        load_language_model(adapter, torch.float32)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_that_need_the_wrapper_of_peft_are_refused(dtype, tmp_path):
    base = _base(tmp_path / "base", tied=True)
    settings = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], alora_invocation_tokens=[7, 44])
    _trained(base, tmp_path / "activated", settings)
    with pytest.raises(ValueError, match="has alora_invocation_tokens, which only PEFT's own generate applies"):
        load_language_model(tmp_path / "activated", dtype, merge=False)
    _trained(base, tmp_path / "prompt", PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with pytest.raises(ValueError, match="of the type PROMPT_TUNING, which changes prompts"):
        load_language_model(tmp_path / "prompt", dtype, merge=False)
    (tmp_path / "mixed").mkdir()
    mixed = json.dumps({"peft_type": "XLORA", "base_model_name_or_path": str(base)})
    (tmp_path / "mixed" / "adapter_config.json").write_text(mixed)
    (tmp_path / "mixed" / "adapter_model.safetensors").touch()
    with pytest.raises(ValueError, match="of the type XLORA, which PEFT's wrapper computes"):
        load_language_model(tmp_path / "mixed", dtype, merge=False)
