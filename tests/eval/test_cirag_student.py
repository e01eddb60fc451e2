"""From the oracle's run to the student in its place: the commands of docs/cirag.md, "Distil a student", at toy size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tripletune.data_builders.trajectories import main as build_trajectories
from tripletune.data_builders.world.build import WorldOptions, write_world
from tripletune.eval.__main__ import main
from tripletune.eval.systems import other_prompt
from tripletune.models.data.trajectories import read_trajectories

ROOT = Path(__file__).resolve().parents[2]
SHORT = ROOT / "recipes" / "configs" / "cirag_short_prompts"
OPTIONS = WorldOptions(seed=5, train=8, validation=0, test=3, common_knowledge=0, one_hop=0)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    write_world(OPTIONS, folder)
    return folder


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    """A run folder with an adapter, as the recipe leaves it."""
    import torch
    from peft import LoraConfig, get_peft_model

    from tripletune.models.loading import load_causal_lm

    model, tokenizer = load_causal_lm(tiny_llama, torch.float32)
    torch.manual_seed(5)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    folder = tmp_path_factory.mktemp("run")
    adapted.save_pretrained(folder / "final")
    tokenizer.save_pretrained(folder / "final")
    return folder


def command(world: Path, split: str, output: Path, *more: str) -> list[str]:
    return [
        "run", "--system", "cirag", "--task", "hotpotqa", "--data", f"{world}/{split}.jsonl",
        "--corpus", f"{world}/{split}.corpus.jsonl", "--oracle", f"{world}/{split}", "--set", "rerank=no",
        "--set", f"prompts={SHORT}", "--set", "repairs=0", "--set", "max_integration_tokens=4", "--top-k", "1",
        "--output", str(output), *more,
    ]  # fmt: skip


def results(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def test_the_chain_of_commands(world: Path, student: Path, tmp_path: Path) -> None:
    oracle = tmp_path / "oracle"
    assert main(command(world, "train", oracle)) == 0
    built = ["--results", str(oracle), "--output", str(tmp_path / "data"), "--validation-fraction", "0.4"]
    assert build_trajectories(built) == 0
    chats = [one for split in ("train", "validation") for one in read_trajectories(tmp_path / "data", split)]
    assert len(chats) == 8
    assert {one.messages[0]["content"] for one in chats} == {(SHORT / "cirag_integrate.md").read_text().strip()}
    decisions = ["decisions", "--data", str(tmp_path / "data"), "--model", str(student), "--dtype", "float32"]
    decisions += ["--max-reply-tokens", "4", "--limit", "3", "--output", str(tmp_path / "decisions")]
    assert main(decisions) == 0
    assert json.loads((tmp_path / "decisions" / "metrics.json").read_text())["metrics"]["malformed"]["mean"] == 1.0

    # The oracle extracts and answers, the student integrates.
    more = ["--integrator", str(student), "--teacher-dtype", "float32", "--set", "max_prompt_tokens=900"]
    output = tmp_path / "student"
    assert main(command(world, "test", output, *more)) == 0
    rows = results(output)
    assert len(rows) == 3
    for row in rows:
        assert row["error"] == ""
        calls = row["trace"]["tallies"]
        assert calls["calls.cirag.integrate"] == calls["cut_off.cirag.integrate"] == 1
        assert calls["calls.cirag.triples"] >= 1
        assert row["trace"]["stop_reason"] == "malformed"
    settings = json.loads((output / "settings.json").read_text())
    assert settings["teacher"].startswith("oracle:")
    assert settings["integrator"]["weights"]
    # The same command answers out of the results; another student's weights are another run.
    assert main(command(world, "test", output, *more)) == 0
    assert results(output) == rows


def test_a_student_that_is_asked_in_other_words_is_told(student: Path, tiny_llama: Path) -> None:
    assert other_prompt(str(student), str(SHORT)) is None  # it brings no prompt
    assert other_prompt(str(tiny_llama), None) is None
    learned = student / "final" / "prompt.md"
    learned.write_text((SHORT / "cirag_integrate.md").read_text().strip() + "\n")
    try:
        assert other_prompt(str(student), str(SHORT)) is None
        warning = other_prompt(str(student), None)
        assert warning is not None
        assert str(learned) in warning
    finally:
        learned.unlink()
