"""Preference training of planner and integrator: the loss by hand, the reference, exact resume, what is refused."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from tests.cli import read_lines
from tripletune.core.data.records import Action
from tripletune.core.options import ConfigError
from tripletune.rag.systems.cirag.integration import Decision, decision_text
from tripletune.train import engine_of, train
from tripletune.train.dry_run import estimate_computation, estimate_memory

PREFERENCE = {"train.preference": "sigmoid", "train.beta": 0.5, "model.lora_dropout": 0.1, "train.logging_steps": 1}
PREFERENCE |= {"train.gradient_accumulation": 2, "train.batch_size": 2, "train.max_steps": 3, "train.save_steps": 2}
PREFERENCE |= {"train.eval_steps": None, "train.eval_generate_records": 0, "train.learning_rate": 0.003}
WORSE = {Action.SUBQ: "[SUFFICIENT]", Action.SUFFICIENT: "[SUBQ] What else?", Action.NO_RETRIEVAL: "[SUFFICIENT]"}
DECISION = decision_text(Decision("None.", (), "Who else?"))
KINDS = ("ras", "cirag_distill")


@pytest.fixture
def make(make_task, records, write_records, make_trajectory, write_trajectories):
    """A task of a kind whose rows are pairs."""

    def make(kind, overrides=None):
        noisy = {"model.graph_architecture": "gat_authors", "model.graph_attention_dropout": 0.3}
        task = make_task(kind, PREFERENCE | (noisy if kind == "ras" else {}) | (overrides or {}))
        plans = [replace(one, rejected=WORSE[one.action]) for one in records if not one.answers]
        chats = [replace(make_trajectory(number), rejected=DECISION) for number in range(9)]
        for rows, write in ((plans, write_records), (chats, write_trajectories)):
            write(rows[:6])
            write(rows[6:], "validation")
        return task

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_dpos_against_the_model_at_the_start(kind, make):
    task = make(kind)
    task.begin()
    trainer = engine_of(task)
    start = task.load()[0].eval()
    torch.manual_seed(0)
    for name, weight in trainer.model.named_parameters():
        if "default" in name:
            weight.data += 0.1 * torch.randn_like(weight)
    rows = [task.train[number] for number in range(3)]
    collate, graphs = task.collator(), kind == "ras"

    def log_prob(model, row, worse):
        """Of one reply in a row by itself, whose logits are computed everywhere."""
        reply = row | {"input_ids": row["rejected_input_ids"], "labels": row["rejected_labels"]} if worse else row
        batch = collate([reply])
        labels = batch["labels"][0, 1:]
        inputs = {"graphs": batch["graphs"]} if graphs else {}
        with torch.no_grad():
            logits = model.get_base_model()(input_ids=batch["input_ids"], **inputs).logits[0, :-1]
        found = logits.log_softmax(-1).gather(1, labels.clamp(min=0)[:, None])[:, 0]
        return found[labels != -100].sum()

    trainer.model.eval()
    margins = [
        sum(
            sign * (log_prob(trainer.model, row, worse) - log_prob(start, row, worse))
            for sign, worse in ((1, False), (-1, True))
        )
        for row in rows
    ]
    assert max(map(abs, margins)) > 0.1
    expected = torch.stack([-functional.logsigmoid(0.5 * margin) for margin in margins]).mean()
    batch = trainer.data_collator(rows)
    assert len(batch["input_ids"]) == 6
    with torch.no_grad():
        assert trainer.compute_loss(trainer.model, batch).item() == pytest.approx(expected.item(), rel=1e-5)
    rewards = trainer._metrics["eval"]["rewards/margins"]
    assert rewards == pytest.approx([0.5 * sum(margins).item() / 3], rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_the_uninterrupted_run(kind, make, tmp_path, killed_behind):
    whole, parts = (make(kind, {"output_dir": str(tmp_path / name)}) for name in ("whole", "parts"))
    train(whole)
    with killed_behind(3):
        train(parts)
    train(make(kind, {"output_dir": str(tmp_path / "parts")}))

    def rows(name, file):
        return read_lines(tmp_path / name / file, "seconds")

    for file in ("losses.jsonl", "rewards.jsonl"):
        assert rows("parts", file) == rows("whole", file)
    found = rows("whole", "rewards.jsonl")
    assert [row["step"] for row in found] == [1, 2, 3]
    assert rows("whole", "losses.jsonl")[0]["loss"] == pytest.approx(math.log(2)), "at first it is the reference"
    assert found[0]["rewards/margins"] == pytest.approx(0, abs=1e-6) != found[-1]["rewards/margins"]
    assert found[-1]["rewards/accuracies"] > 0.5
    (evaluated,) = rows("whole", "evaluations.jsonl")
    assert evaluated["loss"] < math.log(2)
    assert evaluated["rewards/margins"] > 0
    one, other = (load_file(tmp_path / name / "final" / "adapter_model.safetensors") for name in ("whole", "parts"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not list(Path(tmp_path / "whole").rglob("ref"))


def test_rewards_of_an_evaluation_are_means_over_pairs(make):
    found = []
    for size in (1, 2, 8):
        task = make("cirag_distill", {"train.eval_batch_size": size})
        task.begin()
        trainer = engine_of(task)
        torch.manual_seed(0)
        for name, weight in trainer.model.named_parameters():
            if "default" in name:
                weight.data += 0.1 * torch.randn_like(weight)
        metrics = trainer.evaluate()
        found.append({name: metrics[f"eval_{name}"] for name in trainer.more_metrics})
    assert len(task.validation) == 3
    assert found[0]["rewards/margins"] != 0
    assert all(one == pytest.approx(found[0], rel=1e-4) for one in found)


def test_a_pair_in_a_small_micro_batch_weighs_as_much_as_the_others(make, tmp_path):
    same = {"train.max_steps": 1, "model.lora_dropout": 0.0, "data.max_train_records": 3, "train.warmup_ratio": 0}
    for size, count in ((3, 1), (2, 2)):
        sizes = {
            "train.batch_size": size,
            "train.gradient_accumulation": count,
            "output_dir": str(tmp_path / str(size)),
        }
        train(make("cirag_distill", same | sizes))
    (one,), (other,) = (read_lines(tmp_path / name / "losses.jsonl") for name in ("3", "2"))
    assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4) != 0


def test_an_adapter_is_trained_on_and_is_the_reference(make, tmp_path):
    first, folder = make("ras"), tmp_path / "first"
    first.begin()
    for weight in first.model.parameters():
        weight.data += 0.1 * weight.requires_grad
    first.model.save_pretrained(folder)
    first.save(folder)
    task = make("ras", {"model.adapter": str(folder), "train.preference": "ipo", "train.max_steps": 2})
    task.begin()
    trainer, before = engine_of(task), task.load()[0]
    reference = {name: one for name, one in trainer.model.named_parameters() if ".ref." in name}
    assert any("graph_encoder" in name for name in reference)
    trainer.run(None)
    started = dict(before.named_parameters())
    for name, weight in reference.items():
        assert torch.equal(weight, started[name.replace(".ref.", ".default.")])
    now = dict(trainer.model.named_parameters())
    changed = {name for name in started if started[name].requires_grad and not torch.equal(started[name], now[name])}
    assert changed
    assert not {name for name, weight in now.items() if weight.requires_grad and ".default." not in name}


@pytest.mark.parametrize("architecture", ["gat_authors", "gcn_authors"])
def test_the_reference_has_the_batch_statistics_of_the_adapter(architecture, make, make_task, tmp_path):
    start = {"model.graph_architecture": architecture}
    make("ras")
    train(make_task("ras", {**start, "train.learning_rate": 0.01, "output_dir": str(tmp_path / "first")}))
    task = make(
        "ras", {**start, "model.adapter": str(tmp_path / "first" / "final"), "output_dir": str(tmp_path / "run")}
    )
    train(task)
    assert read_lines(tmp_path / "run" / "losses.jsonl")[0]["loss"] == pytest.approx(math.log(2))
    assert read_lines(tmp_path / "run" / "rewards.jsonl")[0]["rewards/margins"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_reward_chooses_the_best_step(kind, make, tmp_path):
    best = {"train.eval_steps": 1, "train.best_metric": "rewards/margins", "output_dir": str(tmp_path / "run")}
    train(make(kind, best))
    margins = [row["rewards/margins"] for row in read_lines(tmp_path / "run" / "evaluations.jsonl")]
    result = json.loads((tmp_path / "run" / "final" / "training.json").read_text())
    assert (result["highest_rewards/margins"], len(margins)) == (max(margins), 3)
    known = "loss, rewards/chosen, rewards/rejected, rewards/accuracies, rewards/margins"
    with pytest.raises(ValueError, match=f"'loss_planning' is not one of {known}"):
        train(make(kind, best | {"train.best_metric": "loss_planning", "output_dir": str(tmp_path / "other")}))


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("ras", {"model.tune": "all"}, "model.tune: train.preference needs an adapter"),
        ("cirag_distill", {"train.packing": True}, r"train.packing: train.preference needs .* no packing"),
        ("cirag_distill", {"train.preference": "kto"}, "train.preference: 'kto' is not one of dpo, sigmoid"),
        ("cirag_distill", {"train.preference": None}, "train.beta has no effect without preference"),
        ("cirag_on_policy", {}, "train.preference: the student learns from its own replies"),
    ],
)
def test_what_does_not_go_with_pairs(kind, change, message, make):
    with pytest.raises(ConfigError, match=message):
        make(kind, change)


def test_dpo_is_another_name_of_its_loss(make, tmp_path):
    losses = []
    for name in ("sigmoid", "dpo"):
        task = make("cirag_distill", {"train.preference": name, "output_dir": str(tmp_path / name)})
        train(task)
        losses.append(read_lines(tmp_path / name / "losses.jsonl", "seconds", "tokens_per_second"))
    assert losses[0] == losses[1] != []


def test_a_dry_run_counts_both_replies_of_a_pair(make):
    """Both replies are kept for the backward; they are read again without gradient, two operations per weight."""
    task = make("ras", {"train.bf16": "false", "train.max_steps": 300})
    task.begin()
    text = task.model.config.get_text_config()
    per_token = text.hidden_size * text.num_hidden_layers * 17 * 4
    size = task.config.train.batch_size
    memory = estimate_memory(task)
    assert memory.activations == 2 * size * max(task.train["length"]) * per_token
    assert memory.rows.startswith(f"{size} x 2 replies x ")
    weights = list(task.model.parameters())
    trained = sum(weight.numel() for weight in weights if weight.requires_grad)
    total = sum(weight.numel() for weight in weights)
    tokens = 300 * task.rows_per_step(1) * 2 * sum(task.train["length"]) / len(task.train)
    operations = tokens * (6 * total + 2 * trained)
    assert estimate_computation(task).startswith(f"{tokens:.2g} tokens, {operations:.2g} operations: ")


@pytest.mark.parametrize("kind", KINDS)
def test_rows_without_a_rejected_reply_are_refused(kind, make_task):
    with pytest.raises(ValueError, match=r"validation-00000\.jsonl:1: train\.preference learns from pairs, but"):
        train(make_task(kind, PREFERENCE))


def test_a_rejected_reply_that_is_no_plan(make, records, write_records):
    task = make("ras")
    write_records([replace(records[0], rejected="Hm")])
    with pytest.raises(ValueError, match="record 'q0-p0': the rejected reply 'Hm' is not a plan"):
        task.begin()
