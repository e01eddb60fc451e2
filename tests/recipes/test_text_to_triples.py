"""The text-to-triples recipe as people run it: a whole run, a real kill, and one clear message for every bad input."""

import json
from pathlib import Path

import pytest

from tests.recipes.command_lines import ROOT, command_line, lines
from tripletune.core.config import load_config
from tripletune.train.tasks.text_to_triples import PairConfig

RECIPE = "text_to_triples"
STEPS = {"train.max_steps": 8, "train.save_steps": 3, "train.eval_steps": 2}


@pytest.fixture(params=["decoder", "encoder-decoder"])
def seq2seq(request):
    return bool(request.param == "encoder-decoder")


def test_a_run_and_its_result(make_extraction_config, tmp_path, seq2seq, run_recipe):
    config = make_extraction_config({**STEPS, "model.lora_dropout": 0.0}, seq2seq)
    assert run_recipe(command_line(RECIPE, config)) == ""
    found = lines(config, "losses.jsonl")
    assert found[-1]["loss"] < found[0]["loss"]
    folder = Path(config.output_dir) / "final"
    result = json.loads((folder / "training.json").read_text())
    assert (result["steps"], result["rows"]) == (8, 12)
    assert result["tokenised"]["train"]["no_facts"] == 1
    assert "eval_normalised/micro/f1" in result["evaluation"]
    assert result["data"]["train"]["sha256"] != result["data"]["validation"]["sha256"]
    assert (folder / "prompt.md").exists() == (not seq2seq)

    # The adapter loads in plain transformers and PEFT.
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    auto = AutoModelForSeq2SeqLM if seq2seq else AutoModelForCausalLM
    PeftModel.from_pretrained(auto.from_pretrained(config.model.base), folder)


def test_without_validation_pairs_nothing_is_evaluated(make_extraction_config, tmp_path, seq2seq, run_recipe):
    config = make_extraction_config({"train.max_steps": 2, "train.eval_steps": 1}, seq2seq)
    for shard in Path(config.data.train[0]).glob("validation*"):
        shard.unlink()
    assert run_recipe(command_line(RECIPE, config)) == ""
    folder = Path(config.output_dir)
    assert json.loads((folder / "final" / "training.json").read_text())["evaluation"] == {}
    assert not (folder / "evaluations.jsonl").exists()


def test_pairs_without_room_and_packs_of_an_encoder_decoder_are_refused(make_extraction_config, run_recipe):
    config = make_extraction_config({"data.max_target_tokens": 32}, seq2seq=True)
    row = {"id": "1", "text": "x", "triples": [["a " * 200, "b", "c"]]}
    (Path(config.data.train[0]) / "train-00000.jsonl").write_text(json.dumps(row) + "\n")
    refused = "in all 1 pairs, the first triple is longer than data.max_target_tokens 32: raise it"
    assert refused in run_recipe(command_line(RECIPE, config))
    config.train.packing = True
    assert "is an encoder-decoder" in run_recipe(command_line(RECIPE, config))
    assert not (Path(config.output_dir) / "final").exists()


@pytest.mark.parametrize(("source", "rate", "batch"), [("text", 2e-5, 32), ("table", 5e-5, 8)])
def test_the_settings_of_the_paper(source, rate, batch):
    configs = [load_config(PairConfig, path) for path in (ROOT / "recipes/configs").glob(f"*t2t_paper_{source}.yaml")]
    assert configs
    for config in configs:
        assert (config.train.learning_rate, config.train.batch_size) == (rate, batch)
        assert (config.data.max_source_tokens, config.data.max_target_tokens) == (512, 256)
        assert (config.train.micro_batches(8), config.train.eval_steps) == (4, 5000)
        assert config.model.tune == "all"
