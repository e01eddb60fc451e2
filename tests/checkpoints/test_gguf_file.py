import json

import gguf
import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from tests.cli import run
from tripletune.checkpoints.gguf_file import write_gguf


@pytest.mark.parametrize("family", ["llama", "smollm2", "qwen2"])
def test_a_file_read_back_is_the_model(family, tiny_model, tmp_path):
    folder = tiny_model(family)
    assert run("checkpoints", "gguf", folder, "--output", tmp_path / "m.gguf", "--quantize", "f32").code == 0
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("Ida Morn, born in 1931.", return_tensors="pt")["input_ids"]
    read = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", quantization_config=GgufConfig(dequantize=True)
    )
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits
        assert torch.allclose(read(ids).logits, expected, atol=1e-4)
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    assert fields["tokenizer.ggml.pre"].contents() == "gpt-2"
    tokens, kinds = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type"))
    assert {tokens[number]: number for number in range(len(tokens))}.items() >= tokenizer.get_vocab().items()
    assert kinds[tokenizer.eos_token_id] == gguf.TokenType.CONTROL
    assert fields["tokenizer.chat_template"].contents() == tokenizer.chat_template


@pytest.mark.parametrize(("kind", "most"), [("f16", 1e-3), ("bf16", 5e-3), ("q8_0", 6e-3)])
def test_matrices_are_rounded_and_vectors_are_not(kind, most, tiny_model, tmp_path):
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2,
        rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
                         "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(tiny_model("llama")).save_pretrained(tmp_path / "model")
    write_gguf(tmp_path / "model", tmp_path / "m.gguf", kind)
    found = {one.name: one for one in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    down = found["blk.0.ffn_down.weight"]
    weight = model.model.layers[0].mlp.down_proj.weight.detach().numpy()
    error = abs(gguf.quants.dequantize(down.data, down.tensor_type) - weight).max() / abs(weight).max()
    assert down.tensor_type.name == kind.upper()
    assert 0 < error < most
    assert found["output_norm.weight"].tensor_type.name == "F32"
    factors = np.array(found["rope_freqs.weight"].data)
    assert (factors[0], factors[-1]) == (pytest.approx(1), pytest.approx(8))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("config.json", {"model_type": "gpt2"}), "is a gpt2"),
        (("tokenizer.json", {"pre_tokenizer": {"type": "Whitespace"}}), "tokenizer does not split text like GPT-2"),
    ],
)
def test_what_is_not_written_names_the_script_that_does(change, words, tiny_model, tmp_path):
    folder, (name, values) = tmp_path / "model", change
    AutoModelForCausalLM.from_pretrained(tiny_model("llama")).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model("llama")).save_pretrained(folder)
    (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | values))
    ran = run("checkpoints", "gguf", folder, "--output", tmp_path / "m.gguf")
    assert (ran.code, list(tmp_path.iterdir())) == (2, [folder])
    assert words in ran.error
    assert "convert_hf_to_gguf.py" in ran.error


def test_a_weight_that_is_missing_is_named(tiny_model, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_model("llama"))
    left = {name: one for name, one in model.state_dict().items() if "layers.1.mlp.down_proj" not in name}
    model.save_pretrained(tmp_path / "model", state_dict=left)
    AutoTokenizer.from_pretrained(tiny_model("llama")).save_pretrained(tmp_path / "model")
    ran = run("checkpoints", "gguf", tmp_path / "model", "--output", tmp_path / "m.gguf")
    assert (ran.code, list(tmp_path.iterdir())) == (2, [tmp_path / "model"])
    assert "weights are missing, such as model.layers.1.mlp.down_proj.weight" in ran.error


def test_an_adapter_is_merged_first(tiny_export, tmp_path):
    error = run("checkpoints", "gguf", tiny_export, "--output", tmp_path / "m.gguf").error
    assert f"first run tripletune checkpoints merge {tiny_export} --language-model-only" in error
