"""The distillation recipe as people run it: a whole run, a real kill, and one clear message for every bad input.

Training a decoder needs TRL; what comes before it is tested without.
"""

import json
from pathlib import Path

import pytest

from tests.recipes.command_lines import command_line, lines
from tripletune.core.config import load_config
from tripletune.train.tasks.cirag_distill import StudentConfig
from tripletune.train.tasks.cirag_on_policy import OnPolicyConfig

RECIPE = "cirag_distill"
STEPS = {"train.max_steps": 6, "train.save_steps": 2, "train.eval_steps": 3}


def test_a_run_and_its_student(make_student_config, make_trajectory, write_trajectories, tmp_path, run_recipe):
    other = write_trajectories([make_trajectory(n, "gpt") for n in (20, 21)], "train", tmp_path / "other")
    config = make_student_config({**STEPS, "model.lora_dropout": 0.0})
    config.data.train.append(str(other))
    assert run_recipe(command_line(RECIPE, config)) == ""
    found = lines(config, "losses.jsonl")
    assert found[-1]["loss"] < found[0]["loss"]
    evaluations = lines(config, "evaluations.jsonl")
    assert {"loss", "core_f1", "stop_accuracy", "malformed"} <= evaluations[0].keys()
    folder = Path(config.output_dir) / "final"
    result = json.loads((folder / "training.json").read_text())
    assert (result["steps"], result["rows"]) == (6, 8)
    assert result["teachers"] == {"gpt": 2, "oracle": 6}
    assert result["tokenised"]["train"]["rounds"] == 16
    assert json.loads((folder / "student.json").read_text())["max_prompt_tokens"] == 900
    assert (folder / "prompt.md").read_text() == "Go.\n"

    # The student in the place where the loop loads it from.
    from tripletune.models.loading import load_causal_lm

    model, tokenizer = load_causal_lm(config.output_dir)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert tokenizer.chat_template

    from tripletune.checkpoints.__main__ import main as checkpoints

    exported = tmp_path / "exported"
    assert checkpoints(["export", config.output_dir, "--output", str(exported)]) == 0
    assert (exported / "prompt.md").read_text() == "Go.\n"
    assert "chats of `gpt` | 2" in (exported / "README.md").read_text()


def test_a_student_for_the_calls_of_another_system(make_student_config, tmp_path, run_recipe):
    from tripletune.checkpoints.__main__ import main as checkpoints
    from tripletune.data_builders.trajectories.build import main as build
    from tripletune.data_builders.world.build import WorldOptions, write_world
    from tripletune.eval.__main__ import main as evaluate

    world, run, built = tmp_path / "world", tmp_path / "answers", tmp_path / "built"
    write_world(WorldOptions(seed=5, train=0, validation=0, test=6, common_knowledge=0), world)
    where = ["--data", f"{world}/test.jsonl", "--corpus", f"{world}/test.corpus.jsonl", "--oracle", f"{world}/test"]
    options = ["--triples", f"{world}/test.triples.jsonl", "--set", "passages=no", "--output", str(run)]
    assert evaluate(["run", "--system", "t2rag", "--task", "hotpotqa", *where, *options]) == 0
    kept = ["--system", "t2rag", "--roles", "decompose", "--roles", "resolve", "--min-score", "exact_match=1"]
    assert build(["--results", str(run), "--output", str(built), *kept]) == 0
    data = {"data.train": [str(built)], "data.max_tokens": 4096, "data.max_prompt_tokens": 3900}
    config = make_student_config({**data, "train.max_steps": 2, "train.eval_steps": None})
    assert run_recipe(command_line(RECIPE, config)) == ""
    about = json.loads((Path(config.output_dir) / "final" / "student.json").read_text())
    assert (about["systems"], about["roles"]) == (["t2rag"], ["t2rag.decompose", "t2rag.resolve"])
    assert checkpoints(["export", config.output_dir, "--output", str(tmp_path / "exported")]) == 0
    card = (tmp_path / "exported" / "README.md").read_text()
    assert "# Student of t2rag: exported" in card
    assert "replies to the calls t2rag.decompose, t2rag.resolve of t2rag" in card
    assert "--system t2rag --llm t2rag.decompose=hf:exported --llm t2rag.resolve=hf:exported …" in card
    assert "chats of `oracle:world5-test`" in card


def test_a_dry_run_says_which_rounds_are_too_long(make_student_config, tmp_path, run_recipe, capsys):
    config = make_student_config({"data.max_tokens": 400, "data.max_prompt_tokens": 390})
    assert run_recipe([*command_line(RECIPE, config), "--dry-run"]) == ""
    assert "6 of 12 rounds do not fit into data.max_tokens and are left out" in capsys.readouterr().err


def test_rows_that_are_held_out_or_too_long_leave_nothing_to_learn(make_student_config, run_recipe):
    config = make_student_config({"data.max_tokens": 80, "data.max_prompt_tokens": 70})
    assert "trajectories are longer than data.max_tokens 80: raise it" in run_recipe(command_line(RECIPE, config))
    folder = Path(config.data.train[0])
    (folder / "validation-00000.jsonl").write_text((folder / "train-00000.jsonl").read_text())
    said = run_recipe(command_line(RECIPE, config))
    assert "holds no trajectories but those of the validation data" in said
    assert not (Path(config.output_dir) / "final").exists()


@pytest.mark.parametrize(
    ("kind", "settings", "messages"),
    [
        (StudentConfig, {"data.train": ["a=1.5"]}, ["'a=1.5': the share must be above 0 and at most 1"]),
        (StudentConfig, {"data.max_tokens": 1024}, ["data.max_tokens 1024 leaves prompts only 1"]),
        (
            OnPolicyConfig,
            {"train.packing": True, "data.rounds": "separate", "data.learn": "everything"},
            ["train.teacher: name the teacher", "nothing to pack", "data.rounds", "data.learn"],
        ),
    ],
)
def test_settings_that_make_no_sense(kind, settings, messages):
    with pytest.raises(ValueError, match="problem") as raised:
        load_config(kind, None, settings)
    assert all(message in str(raised.value) for message in messages)
