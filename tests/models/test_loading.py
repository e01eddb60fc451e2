import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.fakes import damaged
from tripletune.models.encoders import load_encoder
from tripletune.models.graph_llm import add_adapter, load_graph_llm
from tripletune.models.loading import load_causal_lm, load_language_model, load_tokenizer
from tripletune.models.run_folders import weight_files


def test_a_tokenizer_can_always_pad(tokenizer_folder, tokenizer, tmp_path):  # type: ignore[no-untyped-def]
    assert load_tokenizer(tokenizer_folder).pad_token == "<|pad|>"
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).pad_token == "<|im_end|>"


def test_a_padding_token_without_an_embedding_is_not_used(tiny_llama, tmp_path):
    folder = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    tokenizer = load_tokenizer(folder)
    embeddings = load_language_model(folder, torch.float32).config.vocab_size
    tokenizer.add_tokens([f"<extra_{number}>" for number in range(embeddings - len(tokenizer))])
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer.save_pretrained(folder)
    assert load_tokenizer(folder).pad_token_id == embeddings
    model, tokenizer = load_causal_lm(folder, torch.float32)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id < embeddings
    assert model(**tokenizer(["a", "a b c"], padding=True, return_tensors="pt")).logits.isfinite().all()


def test_cut_off_weights_and_no_tokenizer(tiny_llama, tmp_path):
    folder = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-50])
    with pytest.raises(ValueError, match="cannot be read"):
        load_causal_lm(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match="has no tokenizer"):
        load_causal_lm(folder)


def test_all_shards_are_looked_at(tmp_path):
    index = {"weight_map": {"a": "model-2.safetensors", "b": "model-1.safetensors", "c": "model-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [file.name for file in weight_files(tmp_path)] == ["model-1.safetensors", "model-2.safetensors"]


# What a kind of model is loaded by, from a folder of its own.
LOADERS = {
    "llama": load_language_model,
    "smollm2": load_language_model,
    "t5": load_language_model,
    "encoder": load_encoder,
}
LOADERS |= {"graph": load_graph_llm}


@pytest.fixture
def folder_of(tiny_model, tiny_encoder, make_graph_llm, tmp_path):
    def folder(kind):
        if kind != "graph":
            return tiny_encoder if kind == "encoder" else tiny_model(kind)
        for part in make_graph_llm("smollm2"):
            part.save_pretrained(tmp_path / "graph")
        return tmp_path / "graph"

    return folder


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda old: dict(list(old.items())[1:]), r"\d weights are missing or have another size: [\w.]+"),
        (
            lambda old: {f"x.{name}": one for name, one in old.items()},
            r"missing .*(\d+) weights are not used, such as x",
        ),
        (lambda old: old | {next(iter(old)): torch.zeros(3, 3)}, r" \(\[3, 3\] instead of \[\d+"),
        (None, r"weights are not finite \(NaN or infinite\), for example \w+"),
    ],
)
@pytest.mark.parametrize("kind", LOADERS)
def test_weights_that_are_missing_misfit_or_are_not_finite(kind, change, words, folder_of, tmp_path):
    folder = damaged(folder_of(kind), tmp_path / "model", change)
    with pytest.raises(ValueError, match=f"model {folder}: .*{words}"):
        LOADERS[kind](folder)


def test_what_may_be_missing_is_what_nothing_reads(tiny_encoder, tmp_path):
    def kept(old):
        return {name: one for name, one in old.items() if "pooler" not in name}

    vectors = [load_encoder(one).encode("Ada") for one in (tiny_encoder, damaged(tiny_encoder, tmp_path / "one", kept))]
    assert (vectors[0] == vectors[1]).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"base_model": "-1"}, r"config\.json names a model that can't be loaded: model '-1': there is no such folder"),
        ({"base_model": 7}, r"config\.json names .*'7'"),
        ({"encoder": "/nowhere/../x"}, r"config\.json names .*'/nowhere/\.\./x'"),
        ({"encoder": "a b/\x1b[31m"}, r"config\.json names .*there is no such folder"),
        ({"graph_hidden_width": "wide"}, r"config\.json: graph_hidden_width: 'wide' is not a whole number"),
        ({"graph_layers": -1}, r"config\.json: graph_layers: -1 must be"),
        ({"auto_map": 7}, r"JSON files .*a value is missing or has the wrong type"),
    ],
)
def test_what_a_graph_llm_is_made_of(change, words, tiny_llama, tiny_encoder, make_graph_llm, tmp_path):
    model, processor = make_graph_llm()
    add_adapter(model).save_pretrained(tmp_path)
    model.config.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    load_graph_llm(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=words):
        load_graph_llm(tmp_path)


@pytest.mark.parametrize("shards", [{"a": "../../../etc/passwd"}, {"a": "/etc/passwd"}, {"a": 7}, [], None])
def test_shards_lie_in_their_folder(shards, tiny_llama, tiny_encoder, tmp_path):
    for source, load in ((tiny_llama, load_language_model), (tiny_encoder, load_encoder)):
        folder = Path(shutil.copytree(source, tmp_path / source.name))
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
        with pytest.raises(ValueError, match="weight_map must name safetensors files there"):
            load(folder)


def test_code_and_pickles_of_a_model_folder_are_never_run(tiny_llama, tiny_encoder, tmp_path):
    folder = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'PWNED')!r}, 'w')\nclass Config: ...\nclass Model: ...\n")
    code = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "evil", "auto_map": code}))
    with pytest.raises(ValueError, match=r"comes with Python code .* never run here"):
        load_causal_lm(folder)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="no safetensors weights, and pickles"):
        load_causal_lm(folder)
    encoder = Path(shutil.copytree(tiny_encoder, tmp_path / "encoder"))
    modules = json.loads((encoder / "modules.json").read_text())
    evil = {"idx": len(modules), "name": "evil", "path": "", "type": "evil.Model"}
    (encoder / "modules.json").write_text(json.dumps([*modules, evil]))
    shutil.copy(folder / "evil.py", encoder)
    with pytest.raises(ValueError, match=r"modules.json.* --set trust_remote_code=yes"):
        load_encoder(encoder)
    assert not (tmp_path / "PWNED").exists()


@pytest.mark.parametrize("family", ["llama", "gpt2", "t5"])
def test_a_model_that_writes_is_no_sentence_encoder(tiny_model, family):
    with pytest.raises(ValueError, match=r"generates text and is no sentence encoder"):
        load_encoder(tiny_model(family))
