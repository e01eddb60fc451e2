"""Hindsight for CIRAG's integrator: which tokens are taught, who reads what, the loss by hand, exact resume."""

import re
from collections import Counter
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from tests.cli import read_lines
from tripletune.core.data.pairs import Trajectory
from tripletune.core.data.triples import Triple
from tripletune.core.options import ConfigError
from tripletune.models.losses import token_divergences
from tripletune.rag.systems.cirag.integration import Decision, Round, decision_text, messages_of
from tripletune.train import engine_of, train
from tripletune.train.dry_run import dry_run_report
from tripletune.train.rows.hindsight_prompts import TrajectoryHindsight
from tripletune.train.tasks.cirag_on_policy import OnPolicyTask

QUESTION = "In which country was Ada born?"
BORN = Triple("Ada", "born in", "London")
NOISE = Triple("Ada", "knew", "Bo")
LOCATED = Triple("London", "located in", "England")
PART = Triple("England", "part of", "Britain")
FACTS = '{"fact": [["London", "located in", "England"], ["England", "part of", "Britain"]]}'
SETTINGS = {"train.hindsight_weight": 0.4, "train.gradient_accumulation": 2, "train.batch_size": 2, "seed": 5}
SETTINGS |= {"train.max_steps": 3, "train.save_steps": 2, "train.eval_generate_records": 0, "data.max_tokens": 1000}


def trajectory(name="q", layout="chat", role="cirag.integrate"):
    """Three rounds: two queries, of which the first finds what the second asks about, and the decision to stop."""
    history = [
        Round((NOISE, BORN), Decision("Ada is from London.", (BORN,), "Where is London?")),
        Round((LOCATED,), Decision("It is in England.", (LOCATED,), "What is England part of?")),
    ]
    last = {"role": "assistant", "content": decision_text(Decision("All is known.", (PART,), ""))}
    turns = (*messages_of("Integrate.", QUESTION, (PART,), history, layout), last)
    flags = tuple(turn["role"] == "assistant" for turn in turns)
    return Trajectory(f"{name}:0", name, role, "teacher", turns, flags)  # type: ignore[arg-type]


@pytest.fixture
def make(make_task, make_trajectory, write_trajectories):
    """A task with the trajectory above twice, and three of two rounds, of which one query has a teacher."""

    def make(overrides=None, rows=None):
        task = make_task("cirag_distill", SETTINGS | (overrides or {}))
        others = [make_trajectory(number) for number in range(3, 6)]
        write_trajectories(rows or [trajectory("q"), trajectory("r"), *others])
        return task

    return make


@pytest.fixture
def trainer_of(make):
    def trainer_of(overrides=None):
        task = make(overrides)
        task.begin()
        return engine_of(task)

    return trainer_of


def taught_texts(task, row):
    """The taught text of each span of a row."""
    texts = []
    for start, end, marker in row["spans"]:
        texts.append(task.tokenizer.decode(row["input_ids"][start + marker : end]))
    return texts


@pytest.mark.parametrize("rounds", ["together", "separate"])
def test_only_the_teacher_reads_the_facts_of_later_rounds(rounds, trainer_of):
    task = trainer_of({"data.rounds": rounds}).task
    decode = task.tokenizer.decode
    rows = list(task.train)[: 1 if rounds == "together" else 3]
    spans = []
    teachers = []
    for row in rows:
        spans += taught_texts(task, row)
        teachers += row["teacher_ids"]
        assert "Facts that the next" not in decode(row["input_ids"])
        for (start, end, _), teacher in zip(row["spans"], row["teacher_ids"], strict=True):
            assert teacher[start - end :] == row["input_ids"][start:end]
            question = f"Original Query ##]]\n{QUESTION}"
            student = decode(row["input_ids"][:start])
            hindsight = f"{question} Facts that the next searches find: "
            # All else is the student's prompt.
            assert re.sub(r" Facts that the next .*", "", decode(teacher[: start - end])) == student
            assert hindsight in decode(teacher)
    # The first token decides whether to ask; the last decision asks nothing.
    # This tokenizer begins queries with the tokens "Whe" and "W".
    assert spans == ["re is London?<|im_end|>", "hat is England part of?<|im_end|>"]
    assert f"find: {FACTS}\n" in decode(teachers[0])
    assert 'find: {"fact": [["England", "part of", "Britain"]]}\n' in decode(teachers[1])
    assert "teacher_ids" not in task.validation.column_names
    shown = dry_run_report(task)
    assert "sub queries with hindsight 7" in shown
    assert "40% of their loss is the divergence 0.5 from the model with hindsight" in shown
    shown = shown.split("first sub-query as the teacher reads it")[1]
    assert re.search(r"Facts that the next searches find: .*Whe⟦re is London\?<\|im_end\|>⟧", shown, re.DOTALL)


def counted(task, trajectories, prompt=None):
    """The rows' counts that are about hindsight."""
    counts: Counter[str] = Counter()
    list(task.encoder.rows(trajectories, counts, prompt or TrajectoryHindsight.read()))
    return {name: number for name, number in counts.items() if "hindsight" in name}


def test_queries_without_a_teacher_are_counted(trainer_of, make, tmp_path):
    task = trainer_of().task
    whole = trajectory()
    cut = replace(whole, messages=whole.messages[:5], learned=whole.learned[:5])
    assert counted(task, [whole]) == {"sub_queries_with_hindsight": 2}
    # The loop ended at the second query, whose search nobody saw.
    assert counted(task, [cut]) == {"sub_queries_with_hindsight": 1, "sub_queries_without_hindsight": 1}
    file = tmp_path / "hindsight.md"
    file.write_text("{question} {next_facts} " + "word " * 900)
    long = TrajectoryHindsight.read(file)
    assert counted(task, [whole], long) == {"hindsight_too_long": 2, "sub_queries_without_hindsight": 2}
    assert counted(task, [replace(whole, role="t2rag.resolve")]) == {}
    assert counted(task, [trajectory(layout="section")]) == {}
    with pytest.raises(ValueError, match=r"no sub-query of the training rows has a teacher .*history=section"):
        make(rows=[trajectory(role="t2rag.resolve")]).begin()


def test_the_teachers_question_is_a_file(tmp_path):
    file = tmp_path / "hindsight.md"
    for text, message in (
        ("{question}", r"needs {question}, and at least one of {facts} and {next_facts}"),
        ("{question} {facts} {answer}", r"the data of this training have no {answer}"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            TrajectoryHindsight.read(file)


@pytest.mark.parametrize("weight", [0.4, 1.0])
def test_the_loss_by_hand(trainer_of, weight):
    trainer = trainer_of({"train.hindsight_weight": weight})
    trainer.model.eval()
    rows = [trainer.task.train[number] for number in (0, 2)]
    batch = trainer._collator(rows)
    divisor = trainer._get_num_items_in_batch([batch], torch.device("cpu"))
    total = labels = taught_tokens = 0.0
    for row in rows:
        with torch.no_grad():
            log_probs = trainer.model(input_ids=torch.tensor([row["input_ids"]])).logits[0].log_softmax(-1)
        teacher_of = {}
        for (start, end, marker), ids in zip(row["spans"], row["teacher_ids"], strict=True):
            with torch.no_grad():
                of_teacher = trainer.model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
            for place in range(start + marker, end):
                teacher_of[place] = of_teacher[place - 1 + len(ids) - end]
        for place, label in enumerate(row["labels"]):
            if label == -100:
                continue
            labels += 1
            label_loss = -log_probs[place - 1, label].item()
            if place in teacher_of:
                taught_tokens += 1
                divergence = token_divergences(log_probs[place - 1][None], teacher_of[place][None], 0.5).item()
                total += (1 - weight) * label_loss + weight * divergence
            else:
                total += label_loss
    assert 0 < taught_tokens < labels / 2
    assert divisor.item() == pytest.approx(labels), "the weights of labels and teacher are those of the labels"
    loss = trainer.compute_loss(trainer.model, batch, num_items_in_batch=divisor)
    assert loss.item() == pytest.approx(total / labels, rel=1e-4)
    # The filler of another process teaches nothing.
    filler = trainer._collator([rows[0] | {"labels": [-100] * rows[0]["length"]}])
    assert trainer.compute_loss(trainer.model, filler, num_items_in_batch=divisor).item() == 0


def test_rounds_in_one_row_are_taught_as_rounds_apart(trainer_of):
    results = []
    for rounds, last in (("together", 1), ("separate", 3)):
        trainer = trainer_of({"data.rounds": rounds, "model.lora_dropout": 0.0})
        batch = trainer._collator(list(trainer.task.train)[:last])
        results.append(trainer.compute_loss(trainer.model, batch, num_items_in_batch=torch.tensor(50.0)).item())
    assert results[0] == pytest.approx(results[1], rel=1e-5)


def test_without_weight_the_run_is_that_without_the_setting(make, tmp_path):
    # An untaught batch has nothing that the trainer of before did not have.
    task = make({"train.hindsight_weight": 0.0})
    task.begin()
    assert set(task.train.column_names) == {"input_ids", "labels", "length"}
    assert set(task.collator()([task.train[0]])) == {"input_ids", "labels"}
    assert type(engine_of(task)).__name__ == "Engine"


def test_queries_of_the_students_own_are_taught_instead(trainer_of, monkeypatch):
    trainer = trainer_of({"train.hindsight_queries": "own"})
    sampled = [trainer.task.tokenizer(text, add_special_tokens=False)["input_ids"] for text in (" was it?", " is")]
    end = trainer.task.query_ends()[0]

    def decode(decoder, requests):
        for request, tokens, last in zip(requests, sampled, (end, None), strict=True):
            assert re.search(r"question ##\]\]\n(Whe|W)$", trainer.task.tokenizer.decode(request.prompt))
            request.tokens, request.end = tokens, last

    monkeypatch.setattr("tripletune.train.self_distillation.decode", decode)
    batch = trainer._collator([trainer.task.train[0]])
    own = trainer._with_own_queries(batch)
    assert own["input_ids"].shape[0] == 3
    for number, tokens in enumerate([[*sampled[0], end], sampled[1]]):
        is_taught = own["taught_weights"][1 + number] > 0
        assert own["input_ids"][1 + number][is_taught].tolist() == tokens
    assert own["taught_weights"][0].sum() == 0
    assert own["label_weights"][1:].mul(own["labels"][1:] != -100).sum() == 0
    assert trainer.compute_loss(trainer.model, batch, num_items_in_batch=torch.tensor(9.0)).isfinite()


@pytest.mark.parametrize("queries", ["gold", "own"])
def test_a_resumed_run_is_the_uninterrupted_run(queries, make, tmp_path, killed_behind):
    overrides = {"train.hindsight_queries": queries}
    whole, parts = (make({**overrides, "output_dir": str(tmp_path / name)}) for name in ("whole", "parts"))
    train(whole)
    with killed_behind(3):
        train(parts)
    train(make({**overrides, "output_dir": str(tmp_path / "parts")}))
    logs = [read_lines(tmp_path / name / "losses.jsonl", "seconds") for name in ("whole", "parts")]
    assert logs[0] == logs[1]
    assert len({line["loss"] for line in logs[0]}) == 3
    one, other = (load_file(tmp_path / name / "final" / "adapter_model.safetensors") for name in ("whole", "parts"))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"train.preference": "sigmoid"}, "with train.preference: the loss on pairs has no teacher"),
        ({"train.packing": True}, "with train.packing: a pack has no place for what the teacher reads"),
        ({"train.hindsight_weight": 0.0, "train.divergence": 1.0}, "divergence has no effect without hindsight_weight"),
        (
            {"train.hindsight_weight": 0.0, "data.hindsight_prompt": __file__},
            r"hindsight_prompt has no effect without train\.hindsight_weight",
        ),
    ],
)
def test_what_cannot_work_is_refused(overrides, message, make):
    with pytest.raises(ConfigError, match=message):
        make(overrides)


def test_a_student_of_its_own_replies_has_no_hindsight(make_student_config):
    with pytest.raises(ConfigError, match=r"train\.hindsight_weight: the student learns from its own replies"):
        make_student_config({"train.teacher": "x", "train.hindsight_weight": 0.5}, OnPolicyTask.Config)


def test_models_and_launchers_that_cannot_be_their_own_teacher_are_refused(make, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("tripletune.train.resume.sharding", lambda: "FSDP2")
        with pytest.raises(ValueError, match=r"hindsight_weight with FSDP2: .* use ddp\.yaml or zero2\.yaml"):
            make().load()
    monkeypatch.setattr("tripletune.models.losses.learn_labels_only", lambda model: False)
    with pytest.raises(ValueError, match=r"computes a loss of its own .* leave train\.hindsight_weight out"):
        make().load()
