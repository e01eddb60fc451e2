"""Variants of LoRA, optimisers and schedules: they train, and what is saved is what was trained."""

import pytest
import torch

from tests.cli import read_lines
from tripletune.models.loading import load_language_model
from tripletune.models.run_folders import stored_weights
from tripletune.train import engine_of, train

STEPS = {
    "train.max_steps": 3,
    "train.gradient_accumulation": 1,
    "train.save_steps": 3,
    "train.eval_generate_records": 0,
}
STEPS |= {"model.lora_targets": "q_proj,down_proj", "model.lora_dropout": 0}
LORA = {
    "rslora": "{use_rslora: true}",
    "dora": "{use_dora: true}",
    "pissa": "{init_lora_weights: pissa}",
    "olora, rslora": "{init_lora_weights: olora, use_rslora: true}",
    "pissa, patterns": "{init_lora_weights: pissa, rank_pattern: {q_proj: 2}, alpha_pattern: {q_proj: 3}}",
    "a layer": "{layers_to_transform: [1]}",
    "modules": "{modules_to_save: [lm_head, embed_tokens]}",
}
IDS = torch.tensor([[5, 9, 30, 7, 44, 12]])


def logits(model):
    with torch.inference_mode():
        return model.eval()(input_ids=IDS).logits


@pytest.mark.parametrize("name", LORA)
@pytest.mark.parametrize("task", ["ras", "cirag_distill"])
def test_a_variant_of_lora_is_saved_as_it_was_trained(task, name, make_task, tmp_path, tiny_llama):
    from tripletune.models.graph_llm import load_graph_llm

    one = make_task(task, {**STEPS, "model.lora_options": LORA[name]})
    engines = []
    train(one, run=lambda task, checkpoint: engines.append(run(task, checkpoint)))
    final = tmp_path / "run" / "final"
    trained = logits(engines[0].model)
    base = logits(load_language_model(tiny_llama, torch.float32))
    for folder in (final, tmp_path / "run" / "checkpoint-3"):
        loaded = (
            load_graph_llm(folder, torch.float32)[0] if task == "ras" else load_language_model(folder, torch.float32)
        )
        torch.testing.assert_close(logits(loaded), trained, atol=1e-4, rtol=1e-4)
    assert (trained[..., : base.shape[-1]] - base).abs().max() > 0.01
    numbers = {name.split("layers.")[1][0] for name, _ in stored_weights(final) if "lora_A" in name and "model" in name}
    assert numbers == ({"1"} if name == "a layer" else {"0", "1"})


def run(task, checkpoint):
    task.begin()
    engine = engine_of(task)
    engine.run(checkpoint)
    engine.save_result()
    return engine


def test_pissa_resumes_exactly(make_task, tmp_path, killed_behind):
    options = {**STEPS, "model.lora_options": LORA["pissa"], "train.max_steps": 4, "train.save_steps": 2}
    for name in ("whole", "parts"):
        one = make_task("ras", {**options, "output_dir": str(tmp_path / name)})
        if name == "parts":
            with killed_behind(3):
                train(one)
            changed = {**options, "model.lora_options": "{}", "output_dir": str(tmp_path / name)}
            with pytest.raises(ValueError, match=r"lora_options\.init_lora_weights was 'pissa' and is None"):
                train(make_task("ras", changed))
            one = make_task("ras", {**options, "output_dir": str(tmp_path / name)})
        train(one)
    whole, parts = (dict(stored_weights(tmp_path / name / "final")) for name in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("{layers_to_transform: [0, 7]}", r"the layers are 0 to 1"),
        ("{modules_to_save: [lm_hed]}", r"no module has the name lm_hed \(did you mean lm_head\?\)"),
        ("{rank_pattern: {'.*q_proj': 2}}", "regular expression"),
        ("{init_lora_weights: pisa}", "pisa"),
    ],
)
@pytest.mark.parametrize("task", ["ras", "text_to_triples"])
def test_an_option_that_fits_no_layer(task, options, message, make_task):
    with pytest.raises(ValueError, match=message):
        make_task(task, {"model.lora_options": options}).open_model()


@pytest.mark.parametrize("scheduler", ["cosine_with_restarts", "reduce_lr_on_plateau"])
def test_an_optimiser_and_a_schedule(scheduler, make_task, tmp_path):
    settings = {**STEPS, "train.optimizer": "adafactor", "train.scheduler": scheduler, "train.eval_steps": 1}
    settings["train.scheduler_arguments"] = {"cosine_with_restarts": "{num_cycles: 2}"}.get(scheduler, "{patience: 1}")
    train(make_task("text_to_triples", settings | {"train.arguments": "{neftune_noise_alpha: 5}"}))
    assert len(read_lines(tmp_path / "run" / "losses.jsonl")) == 3
