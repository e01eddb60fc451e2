"""Self-distillation with hindsight: who reads what, the loss by hand, exact resume, what is refused."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.cli import read_lines
from tripletune.core.data.records import Action, Record, Step
from tripletune.core.data.triples import Triple
from tripletune.core.options import ConfigError
from tripletune.models.losses import token_divergences
from tripletune.train import engine_of, train
from tripletune.train.dry_run import dry_run_report
from tripletune.train.rows import records as record_rows
from tripletune.train.rows.hindsight_prompts import RecordHindsight, later_steps
from tripletune.train.rows.records import encode_rows

HINDSIGHT = "Facts that the next searches find: (S> London| P> located in| O> England) Answer: England"
SETTINGS = {"train.hindsight_weight": 0.4, "train.gradient_accumulation": 2, "train.batch_size": 2}
SETTINGS |= {"train.max_steps": 3, "train.save_steps": 2, "train.eval_generate_records": 0, "seed": 5}
QUESTION = "In which country was Ada Lovelace born?"
BORN = Step(QUESTION, (Triple("Ada Lovelace", "born in", "London"),))
LOCATED = Step("In which country is London?", (Triple("London", "located in", "England"),), "London is in England.")


@pytest.fixture(scope="module")
def question():
    """The records of a question with two searches, as a build writes them."""

    def record(name, task, action, steps, subquery=""):
        return Record(f"q:{name}", "q", task, QUESTION, action, steps, subquery, ("England",))

    return [
        record("plan0", "planning", Action.SUBQ, (), QUESTION),
        record("plan1", "planning", Action.SUBQ, (BORN,), LOCATED.query),
        record("plan2", "planning", Action.SUFFICIENT, (BORN, LOCATED)),
        record("answer", "answering", Action.SUFFICIENT, (BORN, LOCATED)),
    ]


@pytest.fixture
def make(make_task, question, records, write_records):
    """A task with two such questions, and the others of the tests, of which two have no later fact."""

    def make(overrides=None):
        task = make_task("ras", SETTINGS | {"data.max_input_tokens": 1000} | (overrides or {}))
        others = [replace(one, question_id="r", question=f"{QUESTION} Really?") for one in question]
        write_records([*question, *others, *records])
        return task

    return make


@pytest.fixture
def trainer_of(make):
    def trainer_of(overrides=None):
        task = make(overrides)
        task.begin()
        return engine_of(task)

    return trainer_of


def batch_of(trainer, numbers):
    return trainer._collator([trainer.task.train[number] for number in numbers])


def test_the_divergence_by_hand():
    student = torch.tensor([[0.5, 0.5]]).log() + 3.0
    teacher = torch.tensor([[0.9, 0.1]]).log() - 1.0
    # Forward: 0.9 ln 1.8 + 0.1 ln 0.2. Reverse: 0.5 ln (5/9) + 0.5 ln 5. With the mixture (0.6, 0.4): 0.25 of
    # 0.9 ln 1.5 + 0.1 ln 0.25, and 0.75 of 0.5 ln (5/6) + 0.5 ln 1.25. With the mixture (0.7, 0.3) alike.
    for divergence, expected in ((0.0, 0.368064), (1.0, 0.510826), (0.25, 0.071881), (0.5, 0.101749)):
        assert token_divergences(student, teacher, divergence).tolist() == pytest.approx([expected], abs=2e-6)
        assert token_divergences(teacher, teacher, divergence).tolist() == pytest.approx([0.0], abs=1e-6)
    student.requires_grad_()
    teacher.requires_grad_()
    token_divergences(student, teacher, 0.5).sum().backward()
    assert student.grad.abs().sum() > 0
    assert teacher.grad is None


def test_later_steps_are_those_of_the_longest_record(question):
    assert later_steps(question[0], question) == (BORN, LOCATED)
    assert later_steps(question[1], question) == (LOCATED,)
    assert later_steps(question[1], question[:2]) == ()
    # A run of the student may have asked otherwise, and then its facts answer another sub-query.
    assert later_steps(replace(question[1], subquery="Where is London?"), question) == ()


def test_the_teachers_question_is_a_file(question, tmp_path):
    file = tmp_path / "hindsight.md"

    def asked(text, record, evidence="triples"):
        file.write_text(text)
        return RecordHindsight.read(file).question(record, later_steps(record, question), evidence)

    assert asked("{question} {next_facts}", question[0]) == f"{QUESTION} (S> Ada Lovelace| P> born in| O> London)"
    assert asked("{answer}: {question} {facts}", question[1], "text") == f"England: {QUESTION} London is in England."
    assert asked("{question} {next_facts}", replace(question[1], subquery="Where?")) == ""
    assert asked("{question} {facts}", replace(question[1], question="{answer}")).startswith("{answer} (S>")
    for text in ("{question}", "{answer} {facts}", "Plan."):
        with pytest.raises(ValueError, match=r"hindsight_prompt .*needs {question}, and at least one of"):
            asked(text, question[0])


def test_only_the_teacher_reads_hindsight(trainer_of, question):
    task = trainer_of({"data.prompt_format": "plain"}).task
    decode = task.tokenizer.decode
    assert "sub queries with hindsight 7" in dry_run_report(task)
    for row in task.train:
        assert "Facts that the next" not in decode(row["input_ids"])
    second = task.train[1]
    ((start, end, marker),) = second["spans"]
    (teacher,) = second["teacher_ids"]
    assert teacher[start - end :] == second["input_ids"][start:]
    assert decode(teacher[: start - end]).endswith(f"Question: {QUESTION} {HINDSIGHT}\n")
    assert decode(second["input_ids"][start + marker : end]) == " In which country is London?<|im_end|>"
    # Neither the decision to stop nor an answer has a teacher.
    assert task.train[2]["teacher_ids"] == task.train[3]["teacher_ids"] == [[]]
    assert "teacher_ids" not in task.validation.column_names
    shown = dry_run_report(task).split("first sub-query as the teacher reads it")[1]
    assert re.search(r"Facts that the next .*Answer: England\s+\[SUBQ\]⟦ In which country was Ada", shown)


def test_hindsight_that_is_unknown_or_too_long_is_counted(question, make_graph_llm):
    _, processor = make_graph_llm(processor_settings={"max_input_tokens": 500})
    prompt = RecordHindsight.read()
    unknown = [replace(question[1], answers=())]
    long = [replace(question[1], answers=("England " * 500,))]
    for records, expected in ((question, [1, 1, 0, 0]), (unknown, [0]), (long, [0])):
        counts = Counter()
        rows = encode_rows(records, counts, processor, hindsight=prompt)
        assert [len(row["teacher_ids"][0]) > 0 for row in rows] == expected
        assert counts["sub_queries_with_hindsight"] == sum(expected)
        assert counts["sub_queries_without_hindsight"] == (records is not question)
        assert counts["hindsight_too_long"] == (records is long)


@pytest.mark.parametrize("divergence", [0.5, 1.0])
@pytest.mark.parametrize("weight", [0.4, 1.0])
def test_the_loss_by_hand(trainer_of, divergence, weight):
    trainer = trainer_of({"train.hindsight_weight": weight, "train.divergence": divergence, "train.answer_weight": 2.0})
    trainer.model.eval()
    batch = batch_of(trainer, range(4))
    divisor = trainer._get_num_items_in_batch([batch], torch.device("cpu"))
    total = labels = 0.0
    for row in (trainer.task.train[number] for number in range(4)):
        alone = trainer._collator([row])
        inputs = {"input_ids": alone["input_ids"], "graphs": alone["graphs"]}
        with torch.no_grad():
            log_probs = trainer.model(**inputs).logits[0].log_softmax(-1)
            if "teacher" in alone:
                seen = {name: alone["teacher"][name] for name in ("input_ids", "graphs")}
                of_teacher = trainer.model(**seen).logits[0].log_softmax(-1)
        ((start, end, marker),) = row["spans"]
        for place in range(start, end):
            label_loss = -log_probs[place - 1, row["labels"][place]].item()
            labels += 2.0 if marker == 0 else 1.0
            if row["teacher_ids"][0] and place >= start + marker:
                student, teacher = log_probs[place - 1], of_teacher[place - 1 + len(row["teacher_ids"][0]) - end]
                total += (1 - weight) * label_loss
                total += weight * token_divergences(student[None], teacher[None], divergence).item()
            else:
                total += label_loss * (2.0 if marker == 0 else 1.0)
    assert divisor.item() == pytest.approx(labels), "the weights of labels and teacher are those of the labels"
    loss = trainer.compute_loss(trainer.model, batch, num_items_in_batch=divisor)
    assert loss.item() == pytest.approx(total / labels, rel=1e-4)


def test_the_divergence_has_a_gradient_at_the_tokens_of_sub_queries_alone(trainer_of):
    trainer = trainer_of()
    batch = batch_of(trainer, range(4))
    logits = trainer.model(**{name: batch[name] for name in ("input_ids", "labels", "graphs")}).logits
    logits = logits.detach().requires_grad_()
    trainer._weighted_divergences(logits, batch).sum().backward()
    expected = []
    for row in (trainer.task.train[number] for number in range(4)):
        ((start, end, marker),) = row["spans"]
        has_teacher = bool(row["teacher_ids"][0])
        expected += [has_teacher and place >= start + marker for place in range(start, end)]
    assert (logits.grad.abs().sum(-1) > 0).tolist() == expected
    assert {True, False} == set(expected)
    assert all(weight.grad is None for weight in trainer.model.parameters())


@pytest.mark.parametrize("attention", ["sdpa", "blocks"])
def test_a_question_in_one_row_is_taught_as_its_records_are(attention, trainer_of, monkeypatch):
    overrides = {"data.prompt_order": "interleaved", "model.attention": attention, "model.graph_dropout": 0.0}
    overrides |= {"model.lora_dropout": 0.0}
    together = trainer_of(overrides)
    chained = list(together.task.train)[:2]
    assert [len(row["spans"]) for row in chained] == [4, 4]
    with monkeypatch.context() as patch:
        patch.setattr(record_rows, "chain_records", list)
        separate = trainer_of({**overrides, "data.cache": str(Path(together.config.output_dir) / "other")})
    apart = list(separate.task.train)[:8]
    results = []
    for rows in (chained, apart):
        together.model.zero_grad()
        loss = together.compute_loss(together.model, together._collator(rows), num_items_in_batch=torch.tensor(50.0))
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in together.model.named_parameters() if p.grad is not None}
        results.append(gradients | {"loss": loss.detach()})
    for name, gradient in results[0].items():
        assert torch.allclose(results[1][name], gradient, atol=1e-4 * gradient.abs().max().item() + 1e-6), name


def test_queries_of_the_students_own_are_taught_instead(trainer_of, monkeypatch):
    trainer = trainer_of({"train.hindsight_queries": "own", "data.prompt_order": "interleaved"})
    sampled = [trainer.task.processor.encode_text(text) for text in (" Who?", " Where is it?")]

    def decode(decoder, requests):
        for request, tokens, end in zip(requests, sampled, (trainer.task.tokenizer.eos_token_id, None), strict=True):
            assert trainer.task.tokenizer.decode(request.prompt).endswith("[SUBQ]")
            request.tokens, request.end = tokens, end

    monkeypatch.setattr("tripletune.train.self_distillation.decode", decode)
    batch = batch_of(trainer, [0])
    own = trainer._with_own_queries(batch)
    assert own["input_ids"].shape[0] == 3
    assert own["label_weights"][0].tolist()[: batch["label_weights"].shape[1]] == batch["label_weights"][0].tolist()
    expected = [[*sampled[0], trainer.task.tokenizer.eos_token_id], sampled[1]]
    for number, tokens in enumerate(expected):
        is_taught = own["taught_weights"][1 + number] > 0
        assert own["input_ids"][1 + number][is_taught].tolist() == tokens
        assert own["labels"][1 + number][is_taught].tolist() == tokens
        assert own["taught_weights"][1 + number][is_taught].tolist() == pytest.approx([0.4] * len(tokens))
        teacher = own["teacher"]["input_ids"][number][own["teacher"]["labels"][number] != -100]
        assert teacher.tolist() == tokens
    assert own["taught_weights"][0].sum() == 0
    assert own["label_weights"][1:].mul(own["labels"][1:] != -100).sum() == 0
    assert "Facts that the next" not in trainer.task.tokenizer.decode(own["input_ids"].flatten())
    assert trainer.compute_loss(trainer.model, batch, num_items_in_batch=torch.tensor(9.0)).isfinite()


@pytest.mark.parametrize(
    "more", [{}, {"train.hindsight_queries": "own"}, {"data.prompt_order": "interleaved", "train.batch_size": 1}]
)
def test_a_resumed_run_is_the_uninterrupted_run(more, make, tmp_path, killed_behind):
    noisy = {"model.graph_architecture": "gat_authors", "model.graph_attention_dropout": 0.3, **more}
    whole, parts = (make({**noisy, "output_dir": str(tmp_path / name)}) for name in ("whole", "parts"))
    train(whole)
    with killed_behind(3):
        train(parts)
    train(make({**noisy, "output_dir": str(tmp_path / "parts")}))
    logs = [read_lines(tmp_path / name / "losses.jsonl", "seconds") for name in ("whole", "parts")]
    assert logs[0] == logs[1]
    assert len({line["loss"] for line in logs[0]}) == 3
    one, other = (load_file(tmp_path / name / "final" / "adapter_model.safetensors") for name in ("whole", "parts"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_row_that_fills_the_batch_of_a_process_teaches_nothing(trainer_of):
    trainer = trainer_of()
    row = trainer.task.train[1]
    filler = trainer._collator([row | {"labels": [-100] * row["length"]}])
    assert "teacher" not in filler
    assert filler["taught_weights"].sum() == 0
    loss = trainer.compute_loss(trainer.model, filler, num_items_in_batch=torch.tensor(7.0))
    assert loss.item() == 0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"train.preference": "sigmoid"}, "with train.preference: the loss on pairs has no teacher"),
        ({"data.tasks": ["answering"]}, "data.tasks must have planning"),
        ({"train.hindsight_weight": 1.5}, r"hindsight_weight: 1\.5"),
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


def test_a_sharded_model_is_refused(make, monkeypatch):
    monkeypatch.setattr("tripletune.train.resume.sharding", lambda: "FSDP2")
    with pytest.raises(ValueError, match=r"hindsight_weight with FSDP2: .* use ddp\.yaml or zero2\.yaml"):
        make().load()
