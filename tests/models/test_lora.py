import json
import shutil

import pytest
import torch

from tripletune.models.adapters import adapter_base
from tripletune.models.loading import load_causal_lm, load_language_model
from tripletune.models.lora import add_lora
from tripletune.models.specs import resolve


@pytest.fixture
def adapter(tiny_llama, tmp_path):
    """Folder of a LoRA adapter that changes the tiny Llama's replies, without a tokenizer."""
    from peft import LoraConfig, get_peft_model

    model, _ = load_causal_lm(tiny_llama, torch.float32)
    torch.manual_seed(5)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    folder = tmp_path / "adapter"
    adapted.save_pretrained(folder)
    assert not (folder / "tokenizer.json").exists()
    return folder


def test_an_adapter_folder_means_base_and_adapter(adapter, tiny_llama):
    from peft import PeftModel

    assert adapter_base(adapter) == str(tiny_llama)
    assert adapter_base(tiny_llama) is None
    model, tokenizer = load_causal_lm(adapter, torch.float32)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert not model.training
    assert tokenizer.chat_template
    base, _ = load_causal_lm(tiny_llama, torch.float32)
    assert (base.training, base.dtype) == (False, torch.float32)
    ids = torch.tensor([[5, 9, 30, 7]])
    with torch.inference_mode():
        plain = base(input_ids=ids).logits
        wanted = PeftModel.from_pretrained(base, str(adapter)).eval()(input_ids=ids).logits
        found = model(input_ids=ids).logits
    assert (wanted - plain).abs().max() > 0.1
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.fixture
def small_update(tmp_path):
    """A LoRA adapter that adds 1e-4 (standard deviation) to bfloat16 weights of 0.02, as a 7B model has them."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=384, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    base = LlamaForCausalLM(config)
    base.to(torch.bfloat16).save_pretrained(tmp_path / "base")
    adapted = get_peft_model(
        load_language_model(tmp_path / "base", torch.float32), LoraConfig(target_modules="all-linear")
    )
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=(1e-4 / 8**0.5) ** 0.5)
    assert adapted.base_model.model.model.layers[0].mlp.up_proj.get_delta_weight("default").std() < 1.2e-4
    adapted.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_weights_of_16_bits_do_not_round_an_adapter_away(small_update):
    ids = torch.randint(0, 384, (8, 64), generator=torch.Generator().manual_seed(1))

    def logits(model):
        # Sums in float32: those in bfloat16 have as much noise again, whatever the weights are.
        assert model.dtype is torch.bfloat16
        with torch.inference_mode():
            return model.float()(input_ids=ids).logits

    with torch.inference_mode():
        wanted = load_language_model(small_update, torch.float32)(input_ids=ids).logits
    unmerged = load_language_model(small_update, torch.bfloat16, merge=False)
    # No wrapper of PEFT that would have settings of its own.
    assert type(unmerged).__name__ == "LlamaForCausalLM"
    assert not any(parameter.requires_grad for name, parameter in unmerged.named_parameters() if "lora_" in name)
    errors = [
        (logits(model) - wanted).norm() for model in (unmerged, load_language_model(small_update, torch.bfloat16))
    ]
    assert 10 * errors[0] < errors[1]
    assert errors[1] > 0.2 * (wanted - logits(load_language_model(small_update.parent / "base", torch.bfloat16))).norm()
    # In float32 it is merged, and costs nothing.
    merged = load_language_model(small_update, torch.float32, merge=False)
    assert not any("lora_" in name for name, _ in merged.named_parameters())


def test_a_run_folder_means_its_result(adapter, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(adapter, run / "checkpoint-5")
    with pytest.raises(FileNotFoundError, match=r"did not finish: finish it, or give a checkpoint: .*checkpoint-5"):
        resolve(run)
    shutil.copytree(adapter, run / "final")
    assert resolve(run) == str(run / "final")
    assert load_causal_lm(run, torch.float32)[1].chat_template


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"base_model_name_or_path": None}, ValueError, "names no base model"),
        (
            {"base_model_name_or_path": "/nowhere/base"},
            ValueError,
            "adapter_config.json names .*'/nowhere/base': there is no",
        ),
        ({"target_modules": "(.*)*(.*)*(.*)*x"}, ValueError, "regular expression '\\(.*take forever"),
        ({"rank_pattern": {"(a+)+": 2}}, ValueError, "rank_pattern holds the regular expression"),
        ({"r": 8}, ValueError, "do not match"),
    ],
)
def test_adapters_that_do_not_load(adapter, change, error, message):
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(error, match=message):
        load_causal_lm(adapter, torch.float32)


def test_damaged_adapters(adapter):
    weights = adapter / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-40])
    with pytest.raises(ValueError, match=r"cannot be read|does not fit"):
        load_causal_lm(adapter, torch.float32)
    weights.unlink()
    with pytest.raises(FileNotFoundError, match="has no weights"):
        load_causal_lm(adapter, torch.float32)
    weights.write_bytes(whole)
    (adapter / "config.json").write_text('{"model_type": "graph_llm"}')
    with pytest.raises(ValueError, match="is a Graph-LLM"):
        load_causal_lm(adapter, torch.float32)


def _multimodal():
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = {
        "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    }  # fmt: skip
    vision = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
        "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    return Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=text, vision_config=vision, image_token_index=299, mm_tokens_per_image=4)
    )


@pytest.mark.parametrize(("targets", "count"), [(["all-linear"], 14), (["q_proj", "v_proj"], 4)])
def test_lora_on_a_multimodal_model_changes_its_text_model_alone(targets, count):
    from tripletune.models.graph_llm import add_adapter
    from tripletune.models.graph_llm.model import GraphLLM, GraphLLMConfig

    adapted = add_lora(_multimodal(), rank=2, alpha=4, dropout=0, targets=targets, base="base")
    language_model = _multimodal()
    graph_llm = GraphLLM(GraphLLMConfig(text_config=language_model.config, use_graph=False), language_model)
    for model in (adapted, add_adapter(graph_llm, targets=tuple(targets))):
        names = [name for name, _ in model.named_parameters() if "lora_A" in name]
        assert len(names) == count
        assert all("language_model.layers" in name for name in names)


def test_options_that_could_not_be_used_are_refused_before_training(tiny_llama):
    model, _ = load_causal_lm(tiny_llama, torch.float32)
    with pytest.raises(ValueError, match="lora_bias: q_proj has no bias, so the trained adapter could not be merged"):
        add_lora(
            model, rank=2, alpha=4, dropout=0, targets=["q_proj"], base=str(tiny_llama), options={"lora_bias": True}
        )
