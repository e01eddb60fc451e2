import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tripletune.models.data.records import Action, Record
from tripletune.models.graph_llm.embeddings import EmbeddingTable
from tripletune.models.graph_llm.processor import GraphLLMProcessor
from tripletune.train import dataset
from tripletune.train.dataset import RecordSource, build_table, encode_row, tokenize

Write = Callable[..., Path]


@pytest.fixture
def processor(tokenizer: Any) -> GraphLLMProcessor:
    return GraphLLMProcessor.create(tokenizer, planning_instruction="Plan.", answering_instruction="Answer.")


def source(path: Path, **options: Any) -> RecordSource:
    return RecordSource(str(path), "train", **options)


def table_of(path: Path, processor: GraphLLMProcessor, encoder: Path, cache: Path) -> EmbeddingTable:
    return build_table([source(path)], processor, str(encoder), cache)


def test_rows_are_the_encoded_records(
    tmp_path: Path, records: list[Record], write_records: Write, processor: GraphLLMProcessor, tiny_encoder: Path
) -> None:
    path = write_records(records)
    table = table_of(path, processor, tiny_encoder, tmp_path)
    rows = tokenize(source(path), processor, table, tmp_path)
    assert len(rows) == len(records)
    for row, record in zip(rows, records):
        expected = encode_row(record, processor, table)
        expected.pop("lost")
        assert row == expected
        assert row["length"] == len(row["input_ids"]) + len(row["label_ids"])
        graphs = processor.graphs(record.steps)
        found = table.vectors(row["node_rows"])
        names = [name for graph in graphs for name in graph.nodes]
        rows_of = table.rows(names)
        assert np.array_equal(found, table.vectors([rows_of[name] for name in names]))


def test_files_are_memory_mapped_and_reused(
    tmp_path: Path,
    records: list[Record],
    write_records: Write,
    processor: GraphLLMProcessor,
    tiny_encoder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = write_records(records)
    table = table_of(path, processor, tiny_encoder, tmp_path)
    first = tokenize(source(path), processor, table, tmp_path)
    assert first.cache_files
    assert Path(first.cache_files[0]["filename"]).is_relative_to(tmp_path)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("done a second time")

    monkeypatch.setattr(dataset, "encode_row", fail)
    monkeypatch.setattr(EmbeddingTable, "build", fail)
    again = table_of(path, processor, tiny_encoder, tmp_path)
    assert again.digest == table.digest
    assert tokenize(source(path), processor, again, tmp_path)[:] == first[:]


def test_a_file_cut_off_in_the_middle_is_written_again(
    tmp_path: Path,
    records: list[Record],
    write_records: Write,
    processor: GraphLLMProcessor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = write_records(records)
    original = dataset.encode_row
    calls: list[str] = []

    def killed(record: Record, *args: Any) -> dict[str, Any]:
        calls.append(record.id)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return original(record, *args)

    with monkeypatch.context() as patch:
        patch.setattr(dataset, "encode_row", killed)
        with pytest.raises(KeyboardInterrupt):
            tokenize(source(path), processor, None, tmp_path)
    assert len(tokenize(source(path), processor, None, tmp_path)) == len(records)


def test_the_cache_depends_on_all_that_changes_a_row(
    tmp_path: Path, records: list[Record], write_records: Write, processor: GraphLLMProcessor, tokenizer_folder: Path
) -> None:
    from transformers import AutoTokenizer

    def folders() -> set[str]:
        return {folder.name for folder in tmp_path.glob("tokens-*")}

    path = write_records(records)
    settings = processor.settings
    tokenize(source(path), processor, None, tmp_path)
    counts = [len(folders())]
    for change in (
        {"max_input_tokens": 400},
        {"evidence": "text"},
        {"prompt_format": "plain"},
        {"planning_instruction": "Plan!"},
    ):
        fresh = AutoTokenizer.from_pretrained(tokenizer_folder)
        tokenize(source(path), GraphLLMProcessor(fresh, dataclasses.replace(settings, **change)), None, tmp_path)
        counts.append(len(folders()))
    templated = AutoTokenizer.from_pretrained(tokenizer_folder)
    templated.chat_template = templated.chat_template.replace("assistant", "model")
    tokenize(source(path), GraphLLMProcessor(templated, settings), None, tmp_path)
    counts.append(len(folders()))
    tokenize(source(path, limit=3), processor, None, tmp_path)
    counts.append(len(folders()))
    tokenize(source(path), processor, None, tmp_path, learn_copies=False)
    counts.append(len(folders()))
    tokenize(source(path, tasks=("planning",)), processor, None, tmp_path)
    counts.append(len(folders()))
    write_records(records[1:])
    tokenize(source(path), processor, None, tmp_path)
    counts.append(len(folders()))
    assert counts == list(range(1, 11))


def test_limit_and_tasks(records: list[Record], write_records: Write) -> None:
    path = write_records(records)
    planning = [record for record in records if record.task == "planning"]
    assert list(source(path, tasks=("planning",))) == planning
    assert list(source(path, tasks=("planning",), limit=2)) == planning[:2]
    assert source(path).digest() != source(path, limit=2).digest()


def test_nothing_to_learn_from_is_an_error(
    tmp_path: Path, records: list[Record], write_records: Write, processor: GraphLLMProcessor
) -> None:
    path = write_records([record for record in records if record.task == "planning"])
    for _ in range(2):
        with pytest.raises(ValueError, match=r"tasks answering\) holds no records"):
            tokenize(source(path, tasks=("answering",)), processor, None, tmp_path)


def test_truncation_is_counted(
    tmp_path: Path, records: list[Record], write_records: Write, tokenizer: Any, tiny_encoder: Path
) -> None:
    whole = GraphLLMProcessor.create(tokenizer, planning_instruction="Plan.", answering_instruction="Answer.")
    lengths = [len(whole.encode_input(record.input).input_ids) for record in records]
    processor = GraphLLMProcessor(tokenizer, dataclasses.replace(whole.settings, max_input_tokens=max(lengths) - 1))
    path = write_records(records)
    tokenize(source(path), processor, None, tmp_path)
    meta = json.loads(next(tmp_path.glob("tokens-*/meta.json")).read_text())
    over = sum(length == max(lengths) for length in lengths)
    assert (meta["records"], meta["truncated_records"], meta["truncated_triples"]) == (len(records), over, over)
    assert meta["label_tokens"] == sum(len(whole.encode_label(record)) for record in records)


def test_a_table_holds_the_strings_of_training_and_validation(
    tmp_path: Path, records: list[Record], write_records: Write, processor: GraphLLMProcessor, tiny_encoder: Path
) -> None:
    path = write_records(records[:3])
    write_records(records[9:], "validation", path)
    both = [source(path), RecordSource(str(path), "validation")]
    table = build_table(both, processor, str(tiny_encoder), tmp_path)
    strings = {
        text for record in records[:3] + records[9:] for g in processor.graphs(record.steps) for text in g.strings
    }
    assert len(table) == len(strings)
    assert set(table.rows(strings)) == strings


def test_a_copied_question_is_left_out_of_the_label_and_nothing_else(
    records: list[Record], processor: GraphLLMProcessor
) -> None:
    question = "In which country was Ada Lovelace born?"
    copied = Record("c", "c", "planning", question, Action.SUBQ, (), question)
    other = Record("o", "o", "planning", question, Action.SUBQ, (), "In which town was Ada Lovelace born?")
    later = dataclasses.replace(copied, id="l", steps=records[0].steps)
    row = encode_row(copied, processor, None, learn_copies=False)
    assert processor.tokenizer.decode(row["label_ids"]) == "[SUBQ]"
    assert row["length"] == len(row["input_ids"]) + len(row["label_ids"])
    assert row["marker"] == len(row["label_ids"])
    assert processor.tokenizer.decode(encode_row(copied, processor, None)["label_ids"]).startswith(f"[SUBQ] {question}")
    for record in (other, later, *records):
        assert encode_row(record, processor, None, learn_copies=False) == encode_row(record, processor, None)
