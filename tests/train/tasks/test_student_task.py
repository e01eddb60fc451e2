"""Several teachers, held-out questions, prompts for on-policy distillation, and scores while training."""

import json
from collections import Counter

import pytest
import torch

from tests.cli import write_lines
from tripletune.core.data.pairs import Trajectory
from tripletune.core.data.triples import Triple
from tripletune.models.loading import load_causal_lm
from tripletune.rag.systems.cirag.integration import Decision, Round, decision_text, messages_of
from tripletune.train.rows.sampling import EpochSampler, RepeatedSteps
from tripletune.train.sources import Sources, place_and_share
from tripletune.train.tasks import cirag_distill
from tripletune.train.tasks.cirag_distill import StudentTask
from tripletune.train.tasks.cirag_on_policy import OnPolicyTask


def facts(name):
    return (Triple(name, "saw", "Kelm"),)


def trajectory(number, teacher="a", prompt="Go."):
    rounds_before = [Round(facts(f"x{number}"), Decision("One.", facts(f"x{number}"), "Who?"))]
    last = {"role": "assistant", "content": decision_text(Decision("All.", (), ""))}
    turns = (*messages_of(prompt, f"Which {number}?", facts(f"y{number}"), rounds_before), last)
    flags = tuple(turn["role"] == "assistant" for turn in turns)
    return Trajectory(f"{teacher}{number}", f"q{number}", "cirag.integrate", teacher, turns, flags)  # type: ignore[arg-type]


@pytest.fixture
def folders(tmp_path):
    """Two teachers on the same hundred questions; the second has validation questions of its own."""
    for teacher, splits in (("a", {"train": range(100)}), ("b", {"train": range(90), "validation": range(90, 100)})):
        for split, numbers in splits.items():
            rows = (trajectory(number, teacher).to_json() for number in numbers)
            write_lines(tmp_path / teacher / f"{split}-00000.jsonl", rows)
    return tmp_path / "a", tmp_path / "b"


def task_of(kind=StudentTask, **data):
    config = kind.Config()
    for name, value in data.items():
        setattr(config.data, name, value)
    return kind(config)


def test_no_question_of_validation_is_trained_on(folders):
    first, second = map(str, folders)
    train, validation = task_of(train=[first, second]).sources
    assert validation is not None
    held_out = {one.question_id for one in validation}
    assert held_out == {f"q{n}" for n in range(90, 100)}
    found = list(train)
    assert Counter(one.model for one in found) == {"a": 90, "b": 90}
    assert not held_out & {one.question_id for one in found}
    # Also those that a limit passes over while evaluating.
    train, validation = task_of(train=[first, second], max_validation_records=3).sources
    assert validation is not None
    assert (len(list(train)), len(list(validation))) == (180, 3)
    train, validation = task_of(train=[first]).sources
    assert (len(list(train)), validation) == (100, None)
    with pytest.raises(FileNotFoundError, match=r"no validation\*\.jsonl"):
        list(task_of(train=[first], validation=[first]).sources)


def test_shares_take_whole_questions(folders):
    first, second = map(str, folders)

    def taken(*places, **data):
        return task_of(train=list(places), validation=[f"{second}"], **data).sources[0]

    part = taken(f"{first}=0.4", f"{second}=0.4")
    chosen = {teacher: {one.question_id for one in part if one.model == teacher} for teacher in ("a", "b")}
    assert 25 <= len(chosen["a"]) <= 55
    assert chosen["b"] == chosen["a"]
    assert part.digest != taken(f"{first}=0.4", f"{second}=0.5").digest
    limited = taken(first, second, max_train_records=7)
    assert Counter(one.model for one in limited) == {"a": 7, "b": 7}
    assert place_and_share("runs/x=0.25") == ("runs/x", 0.25)
    assert place_and_share("runs/lr=low") == ("runs/lr=low", 1.0)


def test_the_prompt_that_all_trajectories_have(folders):
    places = [str(folder) for folder in folders]
    assert task_of(train=places).learned_calls.system_prompt == "Go."
    with (folders[0] / "train-00000.jsonl").open("a") as file:
        file.write(json.dumps(trajectory(200, prompt="Go on.").to_json()) + "\n")
    assert task_of(train=places).learned_calls.system_prompt is None


def test_rows_prompts_and_counts(folders, tiny_llama, tmp_path):
    def begun(kind):
        places = [str(folder) for folder in folders]
        task = task_of(kind, train=places, max_train_records=3, max_tokens=1024, max_prompt_tokens=900)
        task.model, task.processor = load_causal_lm(tiny_llama, torch.float32)
        task.config.model.base = str(tiny_llama)
        task.train, task.validation = (task.rows(source, tmp_path) for source in task.sources)
        return task

    task = begun(StudentTask)
    assert (len(task.train), len(task.validation)) == (6, 10)
    assert task.facts() == {"teachers": {"a": 3, "b": 3}}
    prompts = begun(OnPolicyTask).train
    assert len(prompts) == 12
    assert task.processor.decode(prompts[0]["input_ids"]).endswith("<|im_start|>assistant\n")
    assert prompts[0]["length"] == len(prompts[0]["input_ids"])
    # Each prompt begins the row of its trajectory.
    assert task.train[0]["input_ids"][: prompts[1]["length"]] == prompts[1]["input_ids"]


def test_scores_while_training(folders, tiny_llama, monkeypatch):
    task, reversed_data = (task_of(train=[str(folders[1])], max_prompt_tokens=900) for _ in range(2))
    task.config.train.eval_generate_records = reversed_data.config.train.eval_generate_records = 5
    task.model, task.processor = load_causal_lm(tiny_llama, torch.float32)
    reversed_data.sources = Sources(None, list(reversed(list(task.sources[1]))))
    assert [case.id for case in task.scored] == [case.id for case in reversed_data.scored]
    asked: list[list[int]] = []

    def reply(model, tokenizer, prompts, *rest):
        asked.extend(prompts)
        return [decision_text(case.gold) for case in task.scored]

    monkeypatch.setattr(cirag_distill, "generate_replies", reply)
    scores = task.score(task.model)
    assert (scores["core_f1"], scores["stop_accuracy"], scores["malformed"]) == (1.0, 1.0, 0.0)
    assert asked == [task.encoder.prompt(case.messages) for case in task.scored]
    assert task.next_command.startswith("tripletune eval decisions --data TRAJECTORIES --model {run} --output FOLDER")
    # A student of other calls has no decisions.
    task = task_of(train=[str(folders[1])], max_prompt_tokens=900)
    task.scored = []
    assert task.next_command == "tripletune checkpoints export {run} --output FOLDER"


def test_prompts_of_a_step_come_once_for_each_micro_batch():
    order = EpochSampler([1] * 7, 3, seed=5, group_by_length=False)
    steps = RepeatedSteps(order, rows=3, times=2)
    found = list(steps)
    assert len(found) == len(steps) == 12
    assert found[:3] == found[3:6]
    assert found[6:9] == found[9:]
    assert len(set(found)) == 6
    steps.set_epoch(1)
    assert list(steps) != found
    assert list(steps) == list(RepeatedSteps(order, rows=3, times=2))


def test_an_evaluation_counts_decisions_whatever_is_learned(begin_task):
    decisions, everything = (
        begin_task("cirag_distill", {"data.learn": learn}) for learn in ("decisions", "everything")
    )
    assert everything.validation["labels"][:] == decisions.validation["labels"][:]
    assert everything.train["labels"][:] != decisions.train["labels"][:]


# On-policy distillation


def test_a_student_that_is_its_teacher_has_nothing_to_learn(begin_task, tiny_llama, tmp_path, monkeypatch):
    trainer = begin_task("cirag_on_policy", {"train.teacher": str(tiny_llama), "train.max_steps": 1}).trainer()
    generate, modes = trainer.model.generate, []
    monkeypatch.setattr(trainer.model, "generate", lambda **of: modes.append(trainer.model.training) or generate(**of))
    trainer.train()
    assert modes == [False], "it writes without dropout"
    losses = (tmp_path / "run" / "losses.jsonl").read_text().splitlines()
    assert json.loads(losses[0])["loss"] == pytest.approx(0, abs=2e-3)  # the teacher is in bfloat16


def test_too_few_prompts_for_a_step(begin_task):
    trainer = begin_task("cirag_on_policy", {"train.gradient_accumulation": 40}).trainer()
    with pytest.raises(ValueError, match="there are 12 prompts, but a rollout needs 80"):
        trainer.train()
