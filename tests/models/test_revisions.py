"""Two revisions of a hub id are two models: wherever a spec is taken, `owner/name@revision` reads that revision."""

import asyncio
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli import run
from tests.conftest import GRAPH_WIDTHS
from tripletune import load_model
from tripletune.llm.backends import LLMOptions, read_spec
from tripletune.llm.backends.hf import HFBackend
from tripletune.models.adapters import adapter_base, load_adapter
from tripletune.models.encoders import load_encoder
from tripletune.models.fingerprints import content_fingerprint, model_fingerprint
from tripletune.models.graph_llm import add_adapter, build_graph_llm, load_graph_llm
from tripletune.models.graph_llm.embeddings import TextEncoder, encoder_dimension
from tripletune.models.loading import is_encoder_decoder, load_causal_lm, load_language_model
from tripletune.models.lora import add_lora
from tripletune.models.specs import ModelSource, resolve, source_of, split_revision, with_revision
from tripletune.rag.extractor import open_local_extractor
from tripletune.rag.graph_models import folder_or_base_model, open_generator
from tripletune.rag.search.embedding import open_embedder


def other(folder, target):
    """A copy of a model folder with other weights."""
    copy = shutil.copytree(folder, target)
    weights = load_file(copy / "model.safetensors")
    save_file({name: 1.5 * weight for name, weight in weights.items()}, copy / "model.safetensors", {"format": "pt"})
    return copy


@pytest.fixture
def commits(hub, tiny_llama, tiny_encoder, tmp_path):
    """The commits of `me/model` (tag v1, pull request 2) and of `me/encoder` (tag v1, branch main)."""
    changed = [other(folder, tmp_path / "other" / folder.name) for folder in (tiny_llama, tiny_encoder)]
    model = hub.add("me/model", tiny_llama, "v1"), hub.add("me/model", changed[0], "refs/pr/2")
    encoder = hub.add("me/encoder", tiny_encoder, "v1"), hub.add("me/encoder", changed[1], "main")
    return SimpleNamespace(model=model, encoder=encoder)


def numbers(spec):
    return load_language_model(spec, torch.float32).get_output_embeddings().weight.detach()


def test_what_a_spec_names(tmp_path, monkeypatch):
    assert source_of("me/model") == ModelSource("me/model", None)
    assert source_of("me/model@refs/pr/2") == ModelSource("me/model", "refs/pr/2")
    assert resolve("me/model@v1") == "me/model@v1"
    for spec in ("me/model@", "me/model@http://127.0.0.1:8000", "me/model@a@b", "model@v1", "me/model@../x/"):
        with pytest.raises(FileNotFoundError, match=r"nor pypi:package"):
            resolve(spec)
    monkeypatch.chdir(tmp_path)
    for folder in ("runs/a@b", "runs/c"):
        (tmp_path / folder).mkdir(parents=True)
    assert source_of("runs/a@b") == split_revision("runs/a@b") == ModelSource("runs/a@b", None)
    with pytest.raises(ValueError, match=r"'runs/c@v1': runs/c is a folder, and only hub ids have revisions"):
        resolve("runs/c@v1")
    with pytest.raises(ValueError, match=r"pypi:tiny@1\.0: only hub ids have revisions"):
        resolve("pypi:tiny@1.0")
    # What files record apart is put together where it can be read.
    assert with_revision("me/model", "v1") == "me/model@v1"
    assert [with_revision(name, "v1") for name in ("runs/c", "pypi:tiny")] == ["runs/c", "pypi:tiny"]
    assert with_revision("me/model", None) == "me/model"


def test_an_address_is_no_revision():
    assert read_spec("cirag.integrate=hf:me/student@v2") == (
        "cirag.integrate",
        {"backend": "hf", "model": "me/student@v2", "url": None},
    )
    served = {"backend": "openai", "model": "claude@20251001", "url": "http://127.0.0.1:8000/v1"}
    assert read_spec("openai:claude@20251001@http://127.0.0.1:8000/v1") == ("", served)
    with pytest.raises(ValueError, match=r"url http://host:8000 has no effect with backend hf"):
        LLMOptions(**read_spec("hf:me/student@v2@http://host:8000")[1])


def test_language_models(commits, tiny_llama):
    first, second = numbers("me/model@v1"), numbers("me/model@refs/pr/2")
    assert torch.equal(first, numbers(tiny_llama))
    assert torch.equal(second, 1.5 * first)
    assert torch.equal(second, numbers(f"me/model@{commits.model[1]}"))
    with pytest.raises(OSError, match="me/model"):
        load_language_model("me/model")  # no main
    assert not is_encoder_decoder("me/model@v1")
    prints = [content_fingerprint(spec) for spec in ("me/model@v1", "me/model@refs/pr/2", tiny_llama)]
    assert prints[0] == prints[2] not in ("", prints[1])
    assert content_fingerprint("me/model") == content_fingerprint("me/model@v9") == ""
    names = {HFBackend(f"me/model@{revision}").model for revision in ("v1", "refs/pr/2")}
    assert len(names) == 2


def test_an_adapter_keeps_the_revision_of_its_base(commits, tmp_path):
    base, _ = load_causal_lm("me/model@refs/pr/2", torch.float32)
    options = {"rank": 2, "alpha": 4, "dropout": 0.0, "targets": ["q_proj"]}
    add_lora(base, base="me/model@refs/pr/2", **options).save_pretrained(tmp_path / "adapter")
    # The commit, since a branch moves on.
    settings = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert (settings["base_model_name_or_path"], settings["revision"]) == ("me/model", commits.model[1])
    assert adapter_base(tmp_path / "adapter") == f"me/model@{commits.model[1]}"
    assert torch.equal(numbers(tmp_path / "adapter"), numbers("me/model@refs/pr/2"))
    with pytest.raises(ValueError, match=r"trained on me/model \(0+2\), but me/model@v1 holds other weights"):
        load_adapter(load_language_model("me/model@v1"), tmp_path / "adapter", "me/model@v1")


def test_encoders(commits, tiny_encoder):
    texts = ["Oslo", "Which river crosses Kelm?"]
    first, second, newest = (load_encoder(f"me/encoder{at}").encode(texts) for at in ("@v1", "@main", ""))
    assert (first == load_encoder(tiny_encoder).encode(texts)).all()
    assert np.abs(first - second).max() > 0.01
    assert (second == newest).all()
    opened = [open_embedder(f"me/encoder@{revision}") for revision in ("v1", "main")]
    assert [embedder.name for embedder in opened] == ["me/encoder@v1", "me/encoder@main"]
    assert np.abs(opened[0].encode(texts) - opened[1].encode(texts)).max() > 0.01
    assert encoder_dimension("me/encoder@v1") == 16
    for revision, vectors in (("v1", first), ("main", second)):
        assert TextEncoder(f"me/encoder@{revision}").encode(texts) == pytest.approx(vectors, abs=1e-2)
    with pytest.raises(OSError, match="me/encoder"):
        load_encoder("me/encoder@v9")


def test_an_index_of_one_revision_is_not_searched_with_another(commits, two_pages, tmp_path):
    files = [*two_pages[:2], "--index", tmp_path / "index", "--retriever", "dense", "--encoder"]
    assert run("rag", "index", *files, "me/encoder@v1").code == 0
    ran = run("rag", "index", *files, "me/encoder@main")
    assert ran.code == 2
    assert "was built with encoder me/encoder@v1, not with me/encoder@main" in ran.error


def test_graph_llms(commits, hub, tmp_path):
    names = {"encoder": "me/encoder@v1", "dtype": torch.float32, **GRAPH_WIDTHS}
    model, processor = build_graph_llm("me/model@v1", **names)
    assert (model.config.base_model, model.config.base_revision) == ("me/model", commits.model[0])
    add_adapter(model).save_pretrained(tmp_path / "adapter")
    model.config.save_pretrained(tmp_path / "adapter")
    processor.save_pretrained(tmp_path / "adapter")
    assert load_graph_llm(tmp_path / "adapter")[0].config.encoder == "me/encoder@v1"
    assert folder_or_base_model(str(tmp_path / "adapter"), untrained=True) == f"me/model@{commits.model[0]}"
    # A Graph-LLM that somebody pushed is a planner as its folder is.
    commit = hub.add("me/h1", tmp_path / "adapter", "v3")
    assert resolve("me/h1@v3") == str(hub.cache / "models--me--h1" / "snapshots" / commit)
    assert open_generator("me/h1@v3").graph_llm.config.base_revision == commits.model[0]
    assert model_fingerprint("me/h1@v3") == model_fingerprint(tmp_path / "adapter") != ""
    assert type(load_model("me/h1@v3")[1]).__name__ == "GraphLLMProcessor"
    config = json.loads((tmp_path / "adapter/config.json").read_text())
    (tmp_path / "adapter/config.json").write_text(json.dumps(config | {"encoder": "me/encoder@main"}))
    with pytest.raises(ValueError, match="trained with a text encoder other than me/encoder@main"):
        load_graph_llm(tmp_path / "adapter")


@pytest.mark.slow
def test_training_and_its_result_on_the_hub(commits, hub, make_extraction_config, tmp_path):
    from tripletune.train import train
    from tripletune.train.tasks.text_to_triples import PairTask

    config = make_extraction_config({"model.base": "me/model@v1", "train.epochs": 1})
    train(PairTask(config))
    final = tmp_path / "run" / "final"
    about = json.loads((final / "extractor.json").read_text())
    assert (about["base_model"], about["base_revision"]) == ("me/model", commits.model[0])
    with pytest.raises(ValueError, match=r"model\.base was 'me/model@v1' and is 'me/model@refs/pr/2'"):
        train(PairTask(make_extraction_config({"model.base": "me/model@refs/pr/2"})))
    # The whole folder is read from the hub, so its prompt is, too.
    hub.add("me/extractor", final, "v1")
    (final / "prompt.md").write_text("Another prompt.")
    hub.add("me/extractor", final, "v2")
    extractors = [open_local_extractor(f"me/extractor@{revision}") for revision in ("v1", "v2")]
    assert extractors[0].instruction != extractors[1].instruction == "Another prompt."
    assert extractors[0].model != extractors[1].model
    for extractor in extractors:
        asyncio.run(extractor.close())
