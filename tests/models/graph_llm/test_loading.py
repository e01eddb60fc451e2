import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tripletune.models.graph_llm import add_adapter, is_graph_llm_folder, load_graph_llm


def scramble(model):
    """Give everything that is trained a value it does not start with (LoRA's B starts at zero)."""
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)


def save(model, processor, folder):
    model.save_pretrained(folder)
    model.get_base_model().config.save_pretrained(folder)
    processor.save_pretrained(folder)


def trained_names(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("family", ["llama", "smollm2", "qwen3", "gemma2"])
def test_an_adapter_holds_what_is_trained_and_nothing_else(family, make_graph_llm, make_batch, records, tmp_path):
    base, processor = make_graph_llm(family)
    model = add_adapter(base, rank=4)
    scramble(model)
    batch = make_batch(processor, records[:4])
    expected = model.eval()(**batch).logits
    save(model, processor, tmp_path)
    stored = load_file(tmp_path / "adapter_model.safetensors")
    assert all("lora_" in name or "graph_encoder" in name or "projector" in name for name in stored)
    assert sum(t.numel() for t in stored.values()) == sum(p.numel() for p in model.parameters() if p.requires_grad)

    again, its_processor = load_graph_llm(tmp_path, torch.float32)
    assert torch.allclose(again(**batch).logits, expected, atol=1e-6)
    assert not again.training
    assert trained_names(again) == set()
    assert its_processor.encode_input(records[1].input) == processor.encode_input(records[1].input)


def test_the_text_encoder_is_that_of_the_training(make_graph_llm, tiny_encoder, tmp_path):
    base, processor = make_graph_llm()
    base.config.encoder = str(encoder := shutil.copytree(tiny_encoder, tmp_path / "encoder"))
    save(add_adapter(base), processor, tmp_path / "model")
    load_graph_llm(tmp_path / "model")
    weights = load_file(encoder / "model.safetensors")
    save_file({name: 1.1 * one for name, one in weights.items()}, encoder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=f"was trained with a text encoder other than {encoder}: name"):
        load_graph_llm(tmp_path / "model")
    config = json.loads((file := tmp_path / "model" / "config.json").read_text())
    assert config.pop("encoder_weights")
    file.write_text(json.dumps(config))  # as earlier versions left it
    load_graph_llm(tmp_path / "model")


def test_queries_and_values_have_lora_and_graph_modules_are_trained_in_full(make_graph_llm):
    model = add_adapter(make_graph_llm()[0])
    assert model.get_base_model().labels_only
    names = trained_names(model)
    assert any("q_proj.lora_A" in name for name in names)
    assert any("v_proj.lora_B" in name for name in names)
    assert not any("k_proj" in name for name in names)
    assert any("graph_encoder.modules_to_save" in name for name in names)
    assert any("projector.modules_to_save" in name for name in names)
    # Convolutions have linear layers, too: they are trained in full, not adapted.
    assert not any("lora" in name and ("graph_encoder" in name or "projector" in name) for name in names)
    assert all("lora_" in name or "modules_to_save" in name for name in names)


@pytest.mark.parametrize(("use_graph", "trained"), [(True, ("graph_encoder", "projector")), (False, ("lora_",))])
def test_without_lora_or_graph_the_other_alone_is_trained(make_graph_llm, use_graph, trained):
    names = trained_names(
        add_adapter(make_graph_llm(use_graph=use_graph)[0], tune="graph_token" if use_graph else "lora")
    )
    assert names
    assert all(any(part in name for part in trained) for name in names)


def test_all_linear_means_all_but_the_output_layer(make_graph_llm):
    model = add_adapter(make_graph_llm()[0], targets=("all-linear",))
    adapted = {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in trained_names(model) if "lora_" in name}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_targets_that_do_not_exist_are_named(make_graph_llm):
    with pytest.raises(ValueError, match=r"\['query'\] do not exist.*q_proj"):
        add_adapter(make_graph_llm()[0], targets=("query", "v_proj"))
    with pytest.raises(ValueError, match=r"\['lm_head'\] do not exist"):
        add_adapter(make_graph_llm()[0], targets=("lm_head",))


def test_graph_modules_stay_float32(make_graph_llm, make_batch, records):
    model, processor = make_graph_llm(dtype=torch.bfloat16)
    assert model.language_model.dtype is torch.bfloat16
    assert next(model.projector.parameters()).dtype is torch.float32
    assert next(model.graph_encoder.parameters()).dtype is torch.float32
    assert torch.isfinite(model(**make_batch(processor, records[:2])).loss)


def test_folders_that_are_no_model(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        load_graph_llm(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    assert not is_graph_llm_folder(tmp_path)
    (tmp_path / "config.json").write_text("{cut")
    assert not is_graph_llm_folder(tmp_path)


@pytest.mark.parametrize("merged", [False, True])
def test_cut_off_weights_are_one_clear_error(make_graph_llm, tmp_path, merged):
    base, processor = make_graph_llm()
    if merged:
        base.save_pretrained(tmp_path)
        processor.save_pretrained(tmp_path)
    else:
        save(add_adapter(base), processor, tmp_path)
    weights = tmp_path / ("model.safetensors" if merged else "adapter_model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match="cut off or damaged"):
        load_graph_llm(tmp_path, torch.float32)
