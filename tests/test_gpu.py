"""Every recipe on a GPU, through the commands a user types: `pytest -m gpu`, with tiny models, in minutes.

`TRIPLETUNE_GPU_TESTS=cpu pytest -m gpu` does the same on a CPU, which shows that the test itself is sound.
"""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from tests.recipes.command_lines import ROOT, command_line, run

ON_CPU = os.environ.get("TRIPLETUNE_GPU_TESTS") == "cpu"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() or ON_CPU), reason="no GPU; TRIPLETUNE_GPU_TESTS=cpu runs it on the CPU"
    ),
]
LAUNCHER = ROOT / "recipes" / "accelerate" / ("cpu.yaml" if ON_CPU else "single.yaml")
# A task, its recipe, and how what it has trained is evaluated.
RECIPES = {
    "ras": ("ras_multitask", ["records"]),
    "text_to_triples": ("text_to_triples", ["extraction", "--split", "validation", "--max-tokens", "8"]),
    "cirag_distill": ("cirag_distill", ["decisions", "--max-reply-tokens", "8"]),
    "cirag_on_policy": ("cirag_on_policy", ["decisions", "--max-reply-tokens", "8"]),
}
STEPS = {"train.max_steps": 20, "train.save_steps": 10, "train.gradient_accumulation": 1, "train.bf16": "true"}


def command(*words):
    """Run a command as a process of its own; what it logs."""
    done = run(["-m", *map(str, words)])
    assert done.returncode == 0, f"{words}\n{done.stderr}"
    return done.stderr


def losses(folder):
    return [json.loads(line)["loss"] for line in (folder / "losses.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_resumes_evaluates_and_exports(name, make_task, tmp_path):
    recipe, evaluation = RECIPES[name]
    config = make_task(name, {**STEPS, "model.dtype": "bfloat16"}).config
    launch = ["accelerate.commands.accelerate_cli", "launch", "--quiet", "--config_file", LAUNCHER]
    launch += command_line(recipe, config)
    folder = Path(config.output_dir)
    said = command(*launch)
    assert ("cpu" if ON_CPU else "cuda") in said.split("process(es) on ")[1].splitlines()[0]
    found = losses(folder)
    assert len(found) == 20
    assert all(torch.isfinite(torch.tensor(found)))
    assert sum(found[-5:]) < sum(found[:5])
    # As after a kill behind the first checkpoint.
    shutil.rmtree(folder / "checkpoint-20")
    assert "continuing from" in command(*launch)
    assert losses(folder) == pytest.approx(found, rel=0.05)
    (data,) = config.data.train
    command("tripletune", "eval", *evaluation, "--data", data, "--model", folder, "--output", tmp_path / "scores")
    assert (tmp_path / "scores" / "metrics.json").is_file()
    command("tripletune", "checkpoints", "export", folder, "--output", tmp_path / "export")
    command("tripletune", "checkpoints", "verify", tmp_path / "export")
