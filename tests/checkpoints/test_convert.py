"""Pickled weights become safetensors with the same numbers, and nothing in a pickle is run."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer

from tests.cli import run
from tripletune.checkpoints import convert as module
from tripletune.checkpoints.convert import CONVERTED, convert_weights
from tripletune.models.encoders import load_encoder
from tripletune.models.loading import load_causal_lm, load_language_model

TEXTS = ["Oslo", "Which river crosses Kelm?"]


def pickled(folder, target, change=lambda weights: weights, **options):
    """A copy of a model folder whose model.safetensors are pytorch_model.bin."""
    copy = Path(shutil.copytree(folder, target))
    for file in copy.rglob("model.safetensors"):
        torch.save(change(load_file(file)), file.with_name("pytorch_model.bin"), **options)
        file.unlink()
    return copy


@pytest.fixture
def here(monkeypatch):
    """Files are converted in this process, since a new one takes seconds."""
    monkeypatch.setattr(module, "_convert_in_new_process", lambda jobs: [module.convert_file(*job) for job in jobs])


def logits(spec):
    model = load_language_model(spec, torch.float32)
    with torch.inference_mode():
        return model(input_ids=torch.arange(5, 20)[None]).logits


@pytest.mark.slow
def test_the_refusal_gives_the_command_that_helps(tiny_llama, tiny_encoder, tmp_path):
    model, encoder = (pickled(place, tmp_path / place.name) for place in (tiny_llama, tiny_encoder))
    for folder, load in ((model, load_causal_lm), (encoder, load_encoder)):
        with pytest.raises(ValueError, match=f"`tripletune checkpoints convert {folder} --output FOLDER`"):
            load(folder)
    ran = run("checkpoints", "convert", model, "--output", tmp_path / "converted")
    assert (ran.code, ran.err) == (0, "")
    assert "converted 1 files to " in ran.out
    assert torch.equal(logits(tmp_path / "converted"), logits(tiny_llama))
    assert not [path for path in (tmp_path / "converted").rglob("*") if path.suffix == ".bin"]
    # An error in the other process is one line, and nothing is written.
    torch.save({"epoch": 3}, model / "pytorch_model.bin")
    ran = run("checkpoints", "convert", model, "--output", tmp_path / "again")
    assert (ran.code, (tmp_path / "again").exists()) == (2, False)
    assert "is not the state dictionary of a model (epoch is no tensor)" in ran.error


@pytest.mark.parametrize("options", [{}, {"_use_new_zipfile_serialization": False}])
@pytest.mark.usefixtures("here")
def test_an_encoder_with_all_its_modules(tiny_encoder, tmp_path, options):
    # As encoders of 2020: a folder for the transformer, a layer behind the pooling, weights of other libraries.
    model = SentenceTransformer(str(tiny_encoder), device="cpu")
    model.append(_dense())
    model.save(str(tmp_path / "whole"))
    whole, inner = tmp_path / "whole", tmp_path / "whole" / "0_Transformer"
    inner.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        shutil.move(whole / name, inner / name)
    modules = json.loads((whole / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    (whole / "modules.json").write_text(json.dumps(modules))

    folder = pickled(whole, tmp_path / "old", **options)
    for name in ("tf_model.h5", "training_args.bin", "onnx/model.onnx"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"\x80")
    (folder / ".git").mkdir()
    done = convert_weights(str(folder), tmp_path / "new")
    assert (done.files, done.left_out) == (2, ["tf_model.h5", "training_args.bin", "onnx/model.onnx"])
    assert not (tmp_path / "new" / ".git").exists()
    assert (load_encoder(tmp_path / "new").encode(TEXTS) == load_encoder(whole).encode(TEXTS)).all()
    # The same weights are the same encoder, from whatever place they were converted.
    digests = json.loads((tmp_path / "new" / CONVERTED).read_text())
    assert sorted(digests) == ["0_Transformer/pytorch_model.bin", "2_Dense/pytorch_model.bin"]


def _dense():
    try:
        from sentence_transformers.base.modules import Dense
    except ImportError:
        from sentence_transformers.models import Dense
    torch.manual_seed(4)
    return Dense(16, 8)


@pytest.mark.usefixtures("here")
def test_a_model_of_the_hub(hub, tiny_encoder, tmp_path):
    """The layout of facebook/contriever-msmarco: a BERT of 2021 without modules.json, safetensors in a pull request."""
    plain = Path(shutil.copytree(tiny_encoder, tmp_path / "plain"))
    for path in plain.iterdir():
        if path.is_dir() or path.name in ("modules.json", "config_sentence_transformers.json"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    config = json.loads((plain / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps(config | {"architectures": ["Contriever"]}))
    commit = hub.add("facebook/contriever", plain, "refs/pr/3")
    positions = {"embeddings.position_ids": torch.arange(128)[None]}
    hub.add("facebook/contriever", pickled(plain, tmp_path / "old", lambda weights: weights | positions), "main")
    with pytest.raises(ValueError, match=r"convert facebook/contriever --output FOLDER`, or name a revision that has"):
        load_encoder("facebook/contriever")
    convert_weights("facebook/contriever", tmp_path / "new")
    specs = (tmp_path / "new", "facebook/contriever@refs/pr/3", f"facebook/contriever@{commit}", tiny_encoder)
    first, *others = (load_encoder(spec).encode(TEXTS) for spec in specs)
    # Sentence-transformers pools by the mean where nothing else is said, which is Contriever's pooling.
    assert all((first == vectors).all() for vectors in others)
    with pytest.raises(ValueError, match=r"refs/pr/3 has no pytorch_model.bin .* use it as it is"):
        convert_weights("facebook/contriever@refs/pr/3", tmp_path / "again")
    with pytest.raises(FileNotFoundError, match="neither a hub id"):
        convert_weights("nowhere", tmp_path / "again")
    with pytest.raises(FileNotFoundError, match=r"model me/absent@v1 can't be fetched: "):
        convert_weights("me/absent@v1", tmp_path / "again")
    assert not (tmp_path / "again").exists()


@pytest.mark.usefixtures("here")
def test_shards_and_weights_that_share_memory(tiny_model, tmp_path):
    source = tiny_model("smollm2")
    folder = pickled(source, tmp_path / "old")
    weights = torch.load(folder / "pytorch_model.bin")
    # As torch saves a tied output layer: one memory under two names.
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    names = sorted(weights)
    shards = {1: ["lm_head.weight", "model.embed_tokens.weight"]}
    shards[2] = [name for name in names if name not in shards[1]]
    index = {"metadata": {}, "weight_map": {}}
    for number, mine in shards.items():
        file = f"pytorch_model-0000{number}-of-00002.bin"
        torch.save({name: weights[name] for name in mine}, folder / file)
        index["weight_map"] |= dict.fromkeys(mine, file)
    (folder / "pytorch_model.bin").unlink()
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert convert_weights(str(folder), tmp_path / "new") == (2, len(names), [])
    written = json.loads((tmp_path / "new" / "model.safetensors.index.json").read_text())
    assert set(written["weight_map"].values()) == {f"model-0000{number}-of-00002.safetensors" for number in (1, 2)}
    assert written["metadata"]["total_size"] == sum(weight.nbytes for weight in weights.values())
    for name, file in written["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "new" / file)[name], weights[name])
    assert torch.equal(logits(tmp_path / "new"), logits(source))
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"a": "../a.bin"}}))
    with pytest.raises(ValueError, match=r"weight_map must name \.bin files there"):
        convert_weights(str(folder), tmp_path / "again")
    index["weight_map"]["extra"] = "pytorch_model-00001-of-00002.bin"
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"its shards name other weights, such as extra"):
        convert_weights(str(folder), tmp_path / "again")


@pytest.mark.usefixtures("here")
def test_an_adapter(tiny_llama, tmp_path):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(5)
    model = get_peft_model(
        load_language_model(tiny_llama), LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    )
    model.save_pretrained(tmp_path / "adapter")
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    expected = logits(tmp_path / "adapter")
    torch.save(load_file(weights), tmp_path / "adapter" / "adapter_model.bin")
    weights.unlink()
    with pytest.raises(
        FileNotFoundError, match=r"adapter_model\.bin, convert them with `tripletune checkpoints convert`"
    ):
        load_language_model(tmp_path / "adapter")
    convert_weights(str(tmp_path / "adapter"), tmp_path / "new")
    assert torch.equal(logits(tmp_path / "new"), expected)


class Evil:
    def __reduce__(self):
        return (Path.touch, (Path("PWNED"),))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (Evil(), r"holds more than tensors, and is not read: .*"),
        ({"a": torch.zeros(2), "b": Evil()}, r"holds more than tensors, and is not read: .*"),
        ({"a": torch.zeros(2), "epoch": 3}, r"not the state dictionary of a model \(epoch is no tensor\)"),
        ([torch.zeros(2)], r"not the state dictionary of a model \(it holds no tensors by name\)"),
        (b"nonsense", r"is damaged, or holds more than tensors"),
    ],
)
def test_what_is_no_state_dictionary_is_refused_unread(content, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "pytorch_model.bin"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        torch.save(content, file)
    with pytest.raises(ValueError, match=words):
        module.convert_file(file, tmp_path / "model.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["pytorch_model.bin"]


def test_numbers_are_kept_bit_by_bit(tmp_path):
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    weights = {
        "view": base[1:3], "turned": base.T, "one": torch.tensor(7), "none": torch.zeros(0, 3),
        "half": base.bfloat16(), "nan": torch.tensor([float("nan"), float("-inf")]),
        "bits": torch.tensor([True, False]), "whole": torch.nn.Parameter(base),
    }  # fmt: skip
    torch.save(weights, tmp_path / "a.bin")
    written = module.convert_file(tmp_path / "a.bin", tmp_path / "a.safetensors")
    found = load_file(tmp_path / "a.safetensors")
    assert (written.names, sorted(found)) == (sorted(weights), sorted(weights))
    for name, weight in weights.items():
        assert np.array_equal(found[name].float().numpy(), weight.detach().float().numpy(), equal_nan=True)
        assert found[name].dtype == weight.dtype


def test_what_was_written_is_compared(tiny_llama, tmp_path, monkeypatch):
    folder = pickled(tiny_llama, tmp_path / "old")
    monkeypatch.setattr(module, "_have_equal_bytes", lambda first, second: False)
    with pytest.raises(ValueError, match=r"does not hold the weights of .*pytorch_model\.bin"):
        module.convert_file(folder / "pytorch_model.bin", tmp_path / "a.safetensors")


@pytest.mark.usefixtures("here")
def test_only_what_it_made_is_replaced(tiny_llama, tmp_path):
    folder = pickled(tiny_llama, tmp_path / "old")
    convert_weights(str(folder), tmp_path / "new")
    with pytest.raises(FileExistsError, match="--overwrite"):
        convert_weights(str(folder), tmp_path / "new")
    convert_weights(str(folder), tmp_path / "new", overwrite=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(FileExistsError, match="did not make"):
        convert_weights(str(folder), tmp_path / "mine", overwrite=True)
    with pytest.raises(ValueError, match="holds or lies in the input"):
        convert_weights(str(folder), folder / "new")
