"""Where records come from, what a row of them is, what settings reach, and scores of replies."""

import copy
import dataclasses
import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset

from tripletune.core.calls import Completion
from tripletune.core.data.records import Action, Record
from tripletune.llm.graph_generator import LocalGenerator
from tripletune.models.graph_llm.embeddings import EmbeddingTable
from tripletune.models.graph_llm.graphs import build_graph
from tripletune.models.graph_llm.processor import GraphLLMProcessor
from tripletune.train import train
from tripletune.train.dry_run import dry_run_report
from tripletune.train.rows.records import encode_rows
from tripletune.train.sources import Examples, PlaceAndShare, Sources
from tripletune.train.tasks._ras_rows import AnswerShares, answer_shares, label_spans
from tripletune.train.tasks._ras_settings import GraphTrainSection
from tripletune.train.tasks.ras import GraphTask


@pytest.fixture
def processor(tokenizer):
    return GraphLLMProcessor.create(tokenizer, planning_instruction="Plan.", answering_instruction="Answer.")


def source(path, split="train", tasks=(), **options):
    keep = (lambda record: record.task in tasks) if tasks else None
    return Examples(Record.from_json, (PlaceAndShare(str(path), 1.0),), split, keep=keep, selection=tasks, **options)


@pytest.fixture
def task_of(make_config, processor):
    """A task on sources of its own; without graph unless it is asked for one."""
    config = make_config()

    def task_of(training, validation=None, own=processor, use_graph=False, copies=True):
        task = GraphTask(copy.deepcopy(config))
        task.config.model.use_graph, task.config.data.learn_copies = use_graph, copies
        task.sources, task.processor = Sources(training, validation), own
        return task

    return task_of


def test_rows_are_the_encoded_records(tmp_path, records, write_records, processor, task_of):
    data = source(write_records(records))
    task = task_of(data, use_graph=True)
    table, rows = task.embedding_table, task.rows(data, tmp_path)
    assert len(rows) == len(records)
    assert rows.to_list() == list(encode_rows(records, Counter(), processor))
    for row, record in zip(rows, records):
        assert row["length"] == len(row["input_ids"]) == len(row["labels"])
        assert np.array_equal(table[row["nodes"][0]], table.vectors(build_graph(record.steps).nodes))


def test_rows_and_embeddings_are_shared_by_runs(tmp_path, records, write_records, task_of, monkeypatch):
    def run(name):
        task = task_of(source(write_records(records)), use_graph=True)
        task.config.output_dir, task.cache = str(tmp_path / name), tmp_path / "shared"
        return task

    task = run("one")
    first = task.rows(task.sources[0], task.cache)
    assert Path(first.cache_files[0]["filename"]).is_relative_to(tmp_path / "shared")

    def fail(*args, **kwargs):
        raise AssertionError("done a second time")

    monkeypatch.setattr("tripletune.train.rows.records.encode_rows", fail)
    monkeypatch.setattr(EmbeddingTable, "build", fail)
    again = run("two")
    assert again.rows(again.sources[0], again.cache)[:] == first[:]
    assert not (tmp_path / "two").exists()


def test_the_cache_depends_on_all_that_changes_a_row(
    tmp_path, records, write_records, task_of, tokenizer_folder, processor
):
    from transformers import AutoTokenizer

    counts = []

    def tokenise(data, **options):
        task_of(data, **options).rows(data, tmp_path)
        counts.append(len(list(tmp_path.glob("tokens-*"))))

    path = write_records(records)
    settings = processor.settings
    tokenise(source(path))
    for change in (
        {"max_input_tokens": 400},
        {"evidence": "text"},
        {"evidence": "graph"},
        {"prompt_format": "plain"},
        {"planning_instruction": "Plan!"},
    ):
        fresh = AutoTokenizer.from_pretrained(tokenizer_folder)
        tokenise(source(path), own=GraphLLMProcessor(fresh, dataclasses.replace(settings, **change)))
    templated = AutoTokenizer.from_pretrained(tokenizer_folder)
    templated.chat_template = templated.chat_template.replace("assistant", "model")
    tokenise(source(path), own=GraphLLMProcessor(templated, settings))
    tokenise(source(path, limit=3))
    tokenise(source(path), copies=False)
    tokenise(source(path, tasks=("planning",)))
    write_records(records[1:])
    tokenise(source(path))
    assert counts == list(range(1, 12))


def test_truncation_is_counted(tmp_path, records, write_records, tokenizer, task_of, processor):
    lengths = [len(processor.encode_input(record.input).input_ids) for record in records]
    shorter = GraphLLMProcessor(tokenizer, dataclasses.replace(processor.settings, max_input_tokens=max(lengths) - 1))
    data = source(write_records(records))
    task_of(data, own=shorter).rows(data, tmp_path)
    meta = json.loads(next(tmp_path.glob("tokens-*/meta.json")).read_text())
    over = sum(length == max(lengths) for length in lengths)
    assert (meta["rows"], meta["truncated_records"], meta["truncated_triples"]) == (len(records), over, over)
    assert meta["label_tokens"] == sum(len(processor.encode_label(record)[0]) for record in records)


@pytest.mark.parametrize(("long_labels", "rows", "what"), [("truncate", 12, "truncated"), ("skip", 9, "skipped")])
def test_long_labels_are_counted(long_labels, rows, what, begin_task, records):
    labels = [begin_task("ras").processor.encode_label(record)[0] for record in records]
    limit = sorted(map(len, labels))[-4]
    over = sum(len(label) > limit for label in labels)
    task = begin_task("ras", {"data.max_label_tokens": limit, "data.long_labels": long_labels})
    kept = [label[:limit] for label in labels if len(label) <= limit or long_labels == "truncate"]
    assert [[token for token in row if token >= 0] for row in task.train["labels"][:]] == kept
    assert len(kept) == rows
    assert over == 3
    assert f"{what} labels {over}" in dry_run_report(task)


def test_a_long_label_can_be_an_error(begin_task):
    with pytest.raises(ValueError, match=r"the label has \d+ tokens, but max_label_tokens is 3"):
        begin_task("ras", {"data.max_label_tokens": 3, "data.long_labels": "error"})


def test_the_weight_of_answers_is_shown(begin_task, records):
    task = begin_task("ras")
    sizes = [sum(token >= 0 for token in row) for row in task.train["labels"][:]]
    answers = [size for size, record in zip(sizes, records) if record.task == "answering"]
    assert f"33% of the records and have {sum(answers) / sum(sizes):.0%} of the weight" in dry_run_report(task)
    task.config.train.loss_per = "record"
    assert "loss per record: answering records are 33% of the records and have 33% of" in dry_run_report(task)
    task.config.train.answer_weight = 2.0
    assert "and have 50% of the weight" in dry_run_report(task)


def test_a_table_holds_the_strings_of_training_and_validation(records, write_records, task_of):
    path = write_records(records[:3])
    write_records(records[9:], "validation", path)
    table = task_of(source(path), source(path, "validation"), use_graph=True).embedding_table
    graphs = [build_graph(record.steps) for record in records[:3] + records[9:]]
    strings = {text for graph in graphs for text in graph.nodes + graph.edges}
    assert len(table.vectors([*strings])) == len(table)


def test_a_copied_question_is_left_out_of_the_label_and_nothing_else(records, processor):
    question = "In which country was Ada Lovelace born?"
    copied = Record("c", "c", "planning", question, Action.SUBQ, (), question)
    other = Record("o", "o", "planning", question, Action.SUBQ, (), "In which town was Ada Lovelace born?")
    later = dataclasses.replace(copied, id="l", steps=records[0].steps)
    (row,) = encode_rows([copied], Counter(), processor, learn_copies=False)
    ((start, end, marker),) = row["spans"]
    assert processor.tokenizer.decode(row["labels"][start:]) == "[SUBQ]"
    assert start + marker == end == row["length"] == len(row["input_ids"])
    (whole,) = encode_rows([copied], Counter(), processor)
    assert processor.tokenizer.decode(whole["labels"][start:]).startswith(f"[SUBQ] {question}")
    left, learned = (list(encode_rows([other, later, *records], Counter(), processor, on)) for on in (False, True))
    assert left == learned


@pytest.mark.parametrize("question", ["Who?", "Who was it?"])
def test_copies_left_out_are_warned_of_if_the_planner_writes_the_first_query(
    question, records, make_task, write_records
):
    record = next(record for record in records if record.steps)
    steps = (dataclasses.replace(record.steps[0], query="Who?"),)
    for copies in (True, False):
        task = make_task(
            "ras", {"data.validation_split": "none", "train.eval_steps": None, "data.learn_copies": copies}
        )
        # After `make_task`, which writes all records there.
        write_records([dataclasses.replace(record, question=question, steps=steps)])
        task.begin()
        is_warned = any("set data.learn_copies true" in line for line in task.warnings())
        assert is_warned == (not copies and question != "Who?")


def test_where_records_come_from(make_task, records, tmp_path):
    task = make_task("ras")
    config, (train, validation) = task.config, task.sources
    assert list(train) == records
    assert validation is not None
    assert [record.id for record in validation] == [record.id for record in records[:4]]

    config.data.max_train_records, config.data.max_validation_records = 5, 2
    config.data.tasks = ["planning"]
    train, validation = type(task)(config).sources
    assert list(train) == [record for record in records if record.task == "planning"][:5]
    assert validation is not None
    assert len(list(validation)) == 2


def test_validation_is_optional_where_no_shards_exist(make_task):
    task = make_task("ras")
    config, kind = task.config, type(task)
    (Path(config.data.train[0]) / "validation-00000.jsonl").unlink()
    assert kind(config).sources[1] is None
    # A single file has no splits.
    config.data.train = [f"{config.data.train[0]}/train-00000.jsonl"]
    assert kind(config).sources[1] is None
    kind(config).sources[0].check()
    # But a place that was named must exist.
    config.data.validation = ["/nowhere"]
    with pytest.raises(FileNotFoundError, match="/nowhere"):
        kind(config).sources[1].check()


def test_inputs_are_checked_before_anything_is_loaded(make_task, write_records):
    task = make_task("ras", {"data.tasks": ["answering"]})
    write_records([], "validation", Path(task.config.data.train[0]))
    with pytest.raises(ValueError, match=r"split 'validation'\) holds no records of the tasks answering"):
        train(task)
    write_records([], "train", Path(task.config.data.train[0]))
    with pytest.raises(ValueError, match="split 'train'"):
        train(task)


@pytest.mark.parametrize("task", ["planning", "answering"])
def test_an_empty_instruction_is_refused(make_task, task, tmp_path):
    (tmp_path / "empty.md").write_text(" \n")
    with pytest.raises(ValueError, match=r"empty\.md: the prompt is empty"):
        make_task("ras", {f"data.{task}_prompt": str(tmp_path / "empty.md")}).load()


def test_a_prompt_without_room_names_the_question(begin_task, records):
    with pytest.raises(ValueError, match=r"question '.{9,}': without any evidence .* max_input_tokens=16 allows"):
        begin_task("ras", {"data.max_input_tokens": 16})


def test_prompt_formats_that_do_not_fit_the_tokenizer(begin_task, tmp_path, tiny_llama, caplog):
    begin_task("ras", {"data.prompt_format": "llama2"})
    assert "llama2: the base model's chat template has no [INST]" in caplog.text
    base = shutil.copytree(tiny_llama, tmp_path / "base")
    (base / "chat_template.jinja").unlink()
    caplog.clear()
    begin_task("ras", {"data.prompt_format": "llama2", "model.base": str(base)})
    assert "[INST]" not in caplog.text
    with pytest.raises(ValueError, match=r"data\.prompt_format chat: the tokenizer lacks a chat template; set plain"):
        begin_task("ras", {"data.prompt_format": "chat", "model.base": str(base)})


def test_settings_reach_model_and_processor(make_task, tmp_path):
    plan = tmp_path / "plan.md"
    plan.write_text("Plan it my way.\n")
    values = {
        "data.planning_prompt": str(plan), "data.prompt_format": "plain", "data.prompt_order": "history_first",
        "data.max_input_tokens": 321, "data.max_label_tokens": 45, "data.evidence": "text",
        "model.graph_architecture": "gat", "model.graph_pooling": "union", "model.lora_rank": 3,
        "model.lora_alpha": 5, "model.lora_targets": ["k_proj"],
    }  # fmt: skip
    task = make_task("ras", values)
    model, processor = task.load()
    settings = processor.settings
    assert settings.planning_instruction == "Plan it my way."
    assert (settings.prompt_format, settings.max_input_tokens, settings.max_label_tokens) == ("plain", 321, 45)
    assert settings.prompt_order == "history_first"
    assert (settings.evidence, settings.graph_pooling, settings.use_graph) == ("text", "union", True)
    base = model.get_base_model()
    assert (base.config.graph_architecture, base.config.graph_pooling) == ("gat", "union")
    assert (base.config.graph_hidden_width, base.config.projector_width) == (16, 16)
    lora = model.peft_config["default"]
    assert (lora.r, lora.lora_alpha, lora.lora_dropout) == (3, 5, 0.1)
    adapted = {name for name, p in model.named_parameters() if p.requires_grad and "lora_" in name}
    assert adapted
    assert all("k_proj" in name for name in adapted)


def test_without_graph_nothing_is_embedded(begin_task):
    task = begin_task("ras", {"model.use_graph": False})
    assert task.embedding_table is None
    assert set(task.train.column_names) == {"input_ids", "labels", "spans", "length"}
    assert not list((Path(task.config.output_dir) / "cache").glob("[sv]*s-*"))


@pytest.fixture
def gold(monkeypatch, records):
    """Replies by question and task and number of steps, gold unless the test changes them."""
    replies = {repr(record.input): record.label for record in records}

    def generate_many(self, samples, limit, evidence=None):
        return [Completion(replies[repr(sample)]) for sample in samples]

    monkeypatch.setattr(LocalGenerator, "generate_many", generate_many)
    return replies


def scores(make_graph_llm, task, records):
    model, task.processor = make_graph_llm(use_graph=False)
    task.embedding_table, task.scored = None, records
    return task.score(model)


def test_wrong_and_malformed_replies_are_counted(make_graph_llm, make_task, records, gold):
    task = make_task("ras")
    assert scores(make_graph_llm, task, records)["answering/exact_match"] == 1.0
    gold[repr(records[0].input)] = "[SUFFICIENT]"
    gold[repr(records[1].input)] = "I think [SUFFICIENT]"
    gold[repr(records[2].input)] = "elsewhere"
    found = scores(make_graph_llm, task, records)
    assert found["planning/action_accuracy"] == pytest.approx(6 / 8)
    assert found["planning/malformed"] == pytest.approx(1 / 8)
    assert found["answering/exact_match"] == pytest.approx(3 / 4)


def test_a_warm_graph_token_says_what_the_label_says(begin_task):
    answers = {"data.tasks": ["answering"], "model.graph_token": "normalised", "data.evidence": "graph"}
    task = begin_task("ras", {**answers, "train.graph_warmup_steps": 80})
    base = task.model.get_base_model()
    rows = task.collator()([task.train[number] for number in range(len(task.train))])
    labels = [[token for token in row if token >= 0][:-1] for row in rows["labels"].tolist()]
    words = torch.stack([base.get_input_embeddings().weight[row].mean(0) for row in labels])

    def error():
        base.eval()
        return torch.nn.functional.mse_loss(base.projector(base.graph_encoder(rows["graphs"])), words).item()

    before, frozen = error(), {name: p.clone() for name, p in base.language_model.named_parameters()}
    task.prepare()
    assert error() < 0.75 * before
    assert all(torch.equal(p, frozen[name]) for name, p in base.language_model.named_parameters())


def test_a_run_that_continues_is_not_warmed_up_again(make_task, caplog):
    for _ in range(2):
        with caplog.at_level("INFO"):
            train(make_task("ras", {"train.graph_warmup_steps": 3, "train.max_steps": 1}))
    assert caplog.text.count("graph warm-up, step 3/3") == 1


def test_how_much_answers_weigh_by_hand():
    """A plan of 4 tokens, of which 1 is its marker, and an answer of 2 tokens, in one interleaved row."""
    rows = Dataset.from_dict({"spans": [[[3, 7, 1], [9, 11, 0]]]})
    spans = label_spans(rows)
    assert (spans.tokens.tolist(), spans.is_answer.tolist()) == ([4, 2], [False, True])
    shares = {
        (): 2 / 6,
        (("action_weight", 3.0),): 2 / 8,
        (("answer_weight", 2.0),): 4 / 8,
        (("answer_weight", 2.0), ("loss_per", "record")): 2 / 3,
    }
    for settings, of_weights in shares.items():
        assert answer_shares(rows, GraphTrainSection(**dict(settings))) == AnswerShares(0.5, pytest.approx(of_weights))
