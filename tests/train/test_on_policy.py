"""On-policy distillation on tiny models: it learns from the student's own replies, and goes on where it was."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tripletune.models.loading import load_causal_lm
from tripletune.train.distill_config import DistillConfig

pytest.importorskip("trl", reason="TRL is not installed")


def prompts(tokenizer: Any, count: int) -> Any:
    from datasets import Dataset

    ids = [tokenizer(f"Where is number {n}?" * (n % 3 + 1))["input_ids"] for n in range(count)]
    return Dataset.from_dict({"input_ids": ids, "labels": [[]] * count, "length": [len(row) for row in ids]})


def trainer_of(folder: Path, tiny_llama: Path, teacher: Path, count: int = 12, **train: Any) -> Any:
    from tripletune.models.loading import add_lora
    from tripletune.train.on_policy import OnPolicyTrainer

    config = DistillConfig()
    config.output_dir = str(folder)
    values = {
        "method": "on_policy", "teacher": str(teacher), "batch_size": 2, "gradient_accumulation": 2, "max_steps": 4,
        "learning_rate": 0.01, "bf16": "false", "logging_steps": 1, "save_steps": 2, "save_total_limit": None,
        "max_reply_tokens": 5, "eval_generate_records": 0, **train,
    }  # fmt: skip
    for name, value in values.items():
        setattr(config.train, name, value)
    assert config.check() == []
    student, tokenizer = load_causal_lm(tiny_llama, torch.float32)
    torch.manual_seed(3)
    adapted = add_lora(student, rank=4, alpha=8, dropout=0.1, targets=["q_proj", "v_proj"], base=str(tiny_llama))
    other, _ = load_causal_lm(teacher, torch.float32)
    rows = prompts(tokenizer, count)
    return OnPolicyTrainer(adapted, other.requires_grad_(False), config, tokenizer, rows, rows.select(range(3)))


def losses(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "losses.jsonl").read_text().splitlines()]
    return [{key: row[key] for key in ("step", "loss", "tokens")} for row in rows]


@pytest.fixture
def teacher(tiny_model: Any) -> Path:
    folder: Path = tiny_model("smollm2")
    return folder


def test_it_learns_and_goes_on_where_it_was(tiny_llama: Path, teacher: Path, tmp_path: Path) -> None:
    whole = trainer_of(tmp_path / "whole", tiny_llama, teacher)
    whole.train()
    found = losses(tmp_path / "whole")
    assert [row["step"] for row in found] == [1, 2, 3, 4]
    assert all(row["loss"] > 0 and row["tokens"] > 0 for row in found)
    metrics = whole.evaluate()
    assert metrics["eval_loss"] > 0
    assert not list((tmp_path / "whole").rglob("README.md"))
    # As after a kill behind the second step: its checkpoint, and the lines of the steps that were done.
    shutil.copytree(tmp_path / "whole" / "checkpoint-2", tmp_path / "again" / "checkpoint-2")
    shutil.copy(tmp_path / "whole" / "losses.jsonl", tmp_path / "again" / "losses.jsonl")
    again = trainer_of(tmp_path / "again", tiny_llama, teacher)
    again.train(resume_from_checkpoint=str(tmp_path / "again" / "checkpoint-2"))
    assert losses(tmp_path / "again") == found
    one, other = (
        load_file(tmp_path / name / "checkpoint-4" / "adapter_model.safetensors") for name in ("whole", "again")
    )
    assert one.keys() == other.keys()
    assert all(one[name].equal(other[name]) for name in one)


def test_a_student_that_is_its_teacher_has_nothing_to_learn(tiny_llama: Path, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path / "run", tiny_llama, tiny_llama, max_steps=1)
    trainer.train()
    assert losses(tmp_path / "run")[0]["loss"] == pytest.approx(0, abs=1e-5)


def test_too_few_prompts_for_a_step(tiny_llama: Path, teacher: Path, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path / "run", tiny_llama, teacher, count=3)
    with pytest.raises(ValueError, match="there are 3 prompts, and an optimiser step takes 4"):
        trainer.train()
