import re

import pytest
import torch
from peft import LoraConfig, PeftModel, inject_adapter_in_model
from safetensors import safe_open

from tests.checkpoints.conftest import train_tiny
from tests.cli import run
from tripletune.checkpoints import _share_lost_by_rounding, merge_adapter
from tripletune.checkpoints.observation import LoadedModel, cases_of
from tripletune.checkpoints.verify import verify
from tripletune.core.data.records import ModelInput, Step
from tripletune.core.files import read_json
from tripletune.llm.graph_generator import load_generator
from tripletune.models.graph_llm import load_graph_llm
from tripletune.models.graph_llm.model import GraphLLM


def _names(folder):
    with safe_open(folder / "model.safetensors", framework="pt") as tensors:
        return set(tensors.keys())


def _texts(folder):
    samples = [
        ModelInput(case["task"], case["question"], tuple(map(Step.from_json, case["steps"])))
        for case in cases_of(LoadedModel(None, None, True, folder))
    ]
    return [reply.text for reply in load_generator(folder).generate_many(samples, 12)]


@pytest.fixture(scope="module")
def merged(tiny_export, tmp_path_factory):
    folder = tmp_path_factory.mktemp("merged") / "h1"
    found = merge_adapter(tiny_export, folder)
    assert found.difference < 1e-4
    assert (found.same_replies, found.cases) == (3, 3)
    return folder


def test_replies_as_the_adapter_without_peft(merged, tiny_export):
    model, _ = load_graph_llm(merged, torch.float32)
    assert type(model) is GraphLLM
    assert not [name for name, _ in model.named_parameters() if "lora" in name]
    assert _texts(merged) == _texts(tiny_export)


def test_tied_weights_stay_tied(merged):
    model = GraphLLM.from_pretrained(merged)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert "language_model.lm_head.weight" not in _names(merged)
    assert not torch.equal(model.get_input_embeddings().weight, torch.zeros_like(model.get_input_embeddings().weight))


@pytest.mark.usefixtures("same_process")
def test_merged_folder_verifies(merged, tiny_run):
    comparisons = verify(merged, tiny_run)
    assert [comparison.passed for comparison in comparisons] == [True, True]


@pytest.mark.parametrize("tune", ["lora", "graph_token"])
def test_untied_weights_with_and_without_lora(tune, tiny_model, tiny_encoder, tmp_path):
    train_tiny(tiny_model("llama"), tiny_encoder, tmp_path / "run", tune=tune)
    found = merge_adapter(tmp_path / "run", tmp_path / "out")
    assert found.difference < 1e-3
    assert found.same_replies == 3
    assert "language_model.lm_head.weight" in _names(tmp_path / "out")
    assert _texts(tmp_path / "out") == _texts(tmp_path / "run")


@pytest.mark.parametrize("module", ["lm_head", "embed_tokens"])
@pytest.mark.parametrize("language_model_only", [False, True])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_configuration_says_that_a_trained_layer_is_no_longer_tied(
    module, language_model_only, tiny_model, tiny_encoder, tmp_path
):
    train_tiny(tiny_model("smollm2"), tiny_encoder, tmp_path / "run", options={"modules_to_save": [module]})
    found = merge_adapter(tmp_path / "run", tmp_path / "out", language_model_only=language_model_only)
    assert found.difference < 1e-3
    assert [name for name in _names(tmp_path / "out") if name.endswith("lm_head.weight")]
    config = read_json(tmp_path / "out" / "config.json")
    assert config.get("text_config", config)["tie_word_embeddings"] is False


def test_bfloat16_rounds_the_language_model_alone(tiny_export, tmp_path, caplog):
    report = merge_adapter(tiny_export, tmp_path / "out", dtype="bfloat16")
    # The tiny adapter's updates are as large as the weights.
    assert re.search(r"weights in bfloat16 lose 0\.\d+ % of the adapter", caplog.text)
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as tensors:
        types = {(name.split(".")[0], tensors.get_tensor(name).dtype) for name in tensors.keys()}  # noqa: SIM118
    graph = {("graph_encoder", torch.float32), ("projector", torch.float32)}
    assert types == {("language_model", torch.bfloat16)} | graph
    assert report.difference > 1e-3


def test_a_third_of_a_small_update_is_share_lost_by_rounding():
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(256, 256))
    torch.nn.init.normal_(model[0].weight, std=0.02)
    # As a base model is published.
    inject_adapter_in_model(LoraConfig(target_modules=["0"]), model.to(torch.bfloat16).float())
    assert _share_lost_by_rounding(model, torch.bfloat16) == 0
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=(1e-4 / 8**0.5) ** 0.5)
    assert 0.25 < _share_lost_by_rounding(model, torch.bfloat16) < 0.4
    assert _share_lost_by_rounding(model, torch.float32) < 1e-3


def test_language_model_alone_with_graph(tiny_export, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    code, _, err = run("checkpoints", "merge", tiny_export, "--output", tmp_path / "lm", "--language-model-only")
    assert code == 0
    phases = ["loading the adapter", "generating replies", "merging the adapter", "writing", "loading the merged model"]
    begins = [err.find(phase) for phase in phases]
    assert -1 not in begins
    assert begins == sorted(begins)
    assert "trained with a graph token" in err
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "lm")
    assert model.config.model_type == "llama"
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert not [name for name in _names(tmp_path / "lm") if name.startswith(("language_model", "graph", "projector"))]
    # The placeholder has no embedding here, so the tokenizer must not know it.
    assert len(AutoTokenizer.from_pretrained(tmp_path / "lm")) == model.config.vocab_size
    assert "The graph token is lost" in (tmp_path / "lm" / "README.md").read_text()


def test_language_model_alone_without_graph(tiny_model, tiny_encoder, tmp_path):
    train_tiny(tiny_model("smollm2"), tiny_encoder, tmp_path / "run", use_graph=False)
    code, _, err = run("checkpoints", "merge", tmp_path / "run", "--output", tmp_path / "lm", "--language-model-only")
    assert code == 0
    assert "graph token" not in err
    assert _texts(tmp_path / "lm") == _texts(tmp_path / "run")


def test_a_merge_that_went_wrong_writes_nothing(tiny_export, tmp_path, monkeypatch):
    def unload(self):
        self.unmerge_adapter()
        return self.base_model.unload()

    monkeypatch.setattr(PeftModel, "unload", unload, raising=False)
    for options in ([], ["--language-model-only"]):
        code, _, err = run("checkpoints", "merge", tiny_export, "--output", tmp_path / "out", *options)
        assert code == 2
        assert "nothing was written" in err
        assert not list(tmp_path.iterdir())


def test_what_can_not_be_merged(merged, tiny_export, tmp_path):
    code, _, err = run("checkpoints", "merge", merged, "--output", tmp_path / "out")
    assert (code, err.count("\n")) == (2, 1)
    assert "with nothing to merge; export it" in err
    code, _, err = run("checkpoints", "merge", tiny_export, "--output", merged)
    assert (code, err.count("\n")) == (2, 1)
    assert "is not empty" in err
