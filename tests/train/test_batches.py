import json
import os
from collections import Counter

import pyarrow
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from tests.cli import write_lines
from tripletune.core.data.records import IGNORED
from tripletune.models.graph_llm.embeddings import EmbeddingTable
from tripletune.models.graph_llm.graphs import build_graph
from tripletune.models.graph_llm.processor import GraphLLMProcessor
from tripletune.train.batches import (
    RecordCollator,
    cached_rows,
    chain_records,
    encode_rows,
    pack_rows,
    pad_batch,
    rows_meta,
)
from tripletune.train.tasks import Examples

FAMILIES = ("llama", "smollm2", "qwen2", "qwen3", "gemma", "gemma3", "granite", "cohere", "gpt2", "gptj", "lfm2")


def rows_of(lengths):
    def rows(counts):
        counts["seen"] += len(lengths)
        for number, length in enumerate(lengths):
            yield {"input_ids": [number] * length, "labels": [-100] * (length - 1) + [number], "length": length}

    return rows


def never(counts):
    raise AssertionError("tokenised again")
    yield {}


def test_rows_are_written_once(tmp_path):
    found = cached_rows(["key"], tmp_path, [rows_of([3]), rows_of([]), rows_of([4, 5])])
    assert found[2] == {"input_ids": [1] * 5, "labels": [-100] * 4 + [1], "length": 5}
    assert rows_meta(found) == {"rows": 3, "tokens": 12, "label_tokens": 3, "seen": 3}
    again = cached_rows(["key"], tmp_path, [never])
    assert again[:] == found[:]
    # Another key, another file.
    assert len(cached_rows(["other"], tmp_path, [rows_of([4])])) == 1


def test_rows_that_were_cut_off_are_written_anew(tmp_path):
    def dies(counts):
        yield from rows_of([3])(counts)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached_rows(["key"], tmp_path, [dies])
    assert len(cached_rows(["key"], tmp_path, [rows_of([3, 5])])) == 2


def test_packs_are_made_once_and_hold_whole_rows(tmp_path, monkeypatch):
    dataset = cached_rows(["key"], tmp_path, [rows_of([60, 30, 40, 64, 1])])
    packs = pack_rows(dataset, 64)
    assert sorted(length for pack in packs for length in pack["seq_lengths"]) == [1, 30, 40, 60, 64]
    assert all(sum(pack["seq_lengths"]) == len(pack["input_ids"]) == len(pack["labels"]) <= 64 for pack in packs)
    monkeypatch.setattr("trl.pack_dataset", lambda *args: pytest.fail("packed again"))
    assert pack_rows(cached_rows(["key"], tmp_path, [never]), 64)[:] == packs[:]


def test_a_row_longer_than_a_pack_is_an_error_and_not_cut(tmp_path):
    dataset = cached_rows(["key"], tmp_path, [rows_of([3, 65])])
    with pytest.raises(ValueError, match="pack_tokens 64: the longest sample has 65 tokens"):
        pack_rows(dataset, 64)


@pytest.mark.parametrize("limit", [None, 5])
@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_parts_are_the_examples_in_their_order(ending, limit, tmp_path, monkeypatch):
    monkeypatch.setattr("tripletune.core.data.jsonl.PART_BYTES", 25)
    rows = [{"id": number} for number in range(9)]
    for name in ("train-00000", "train-00001"):
        if ending == "jsonl":
            (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps(row) + "\n" * (row["id"] % 2) for row in rows))
        else:
            parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / f"{name}.parquet", row_group_size=2)
    places = ((str(tmp_path), 0.5), (str(tmp_path), 0.2))
    source = Examples(
        lambda row, where: (row, where), places, "train", limit, lambda one, share: one[0]["id"] > 5 * share
    )
    parts = [list(part) for part in source.parts()]
    assert [one for part in parts for one in part] == list(source)
    assert len(parts) == 2 if limit else all(len(part) <= 3 for part in parts)


def test_the_digest_follows_content_and_selection(tmp_path):
    path = tmp_path / "data.jsonl"

    def digest(**options):
        return Examples(lambda row, where: row, ((str(path), 1.0),), "train", **options).digest

    write_lines(path, [{"id": "1"}])
    first = digest(limit=5)
    assert digest(limit=5) == first
    assert len({first, digest(limit=6), digest(limit=5, selection=("planning",))}) == 3
    write_lines(path, [{"id": "2"}])
    assert digest(limit=5) != first


def test_the_digest_of_a_folder_like_one_of_the_hub_is_its_content(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name / "data").mkdir(parents=True)
        for split in ("train", "validation"):
            write_lines(tmp_path / name / "data" / f"{split}-00000.jsonl", [{"id": "1"}])

    def digest(name, split="train"):
        return Examples(lambda row, where: row, ((str(tmp_path / name), 1.0),), split).digest

    file = tmp_path / "one" / "data" / "train-00000.jsonl"
    first, stamp = digest("one"), file.stat().st_mtime_ns
    write_lines(file.with_name("validation-00000.jsonl"), [{"id": "3"}])
    os.utime(tmp_path / "two" / "data" / file.name, ns=(1, 1))
    assert digest("one") == digest("two") == first != digest("one", "validation")
    write_lines(file, [{"id": "2"}])
    os.utime(file, ns=(stamp, stamp))
    assert digest("one") != first


@pytest.fixture
def processor(tokenizer):
    return GraphLLMProcessor.create(tokenizer)


def test_label_and_end_of_sequence_alone_are_learned(processor, records):
    rows = list(encode_rows(records, Counter(), processor))
    batch = RecordCollator(processor.tokenizer.pad_token_id, None)(rows)
    eos = processor.tokenizer.eos_token
    for ids, labels, record in zip(batch["input_ids"], batch["labels"], records):
        learned = labels != IGNORED
        assert torch.equal(labels[learned], ids[learned])
        assert processor.tokenizer.decode(ids[learned]) == record.label + eos
        # The learned tokens follow the prompt without a gap, and padding follows them.
        places = learned.nonzero().flatten().tolist()
        assert places == list(range(places[0], places[-1] + 1))
        assert ids[: places[0]].tolist() == processor.encode_input(record.input).input_ids
        assert set(ids[places[-1] + 1 :].tolist()) <= {processor.tokenizer.pad_token_id}


def test_graphs_are_those_of_the_records(processor, records, tiny_encoder, tmp_path):
    strings = [text for record in records for part in build_graph(record.steps)[:2] for text in part]
    table = EmbeddingTable.build(strings, str(tiny_encoder), tmp_path)
    chosen = [records[1], records[3], records[9]]
    batch = RecordCollator(3, table)(list(encode_rows(chosen, Counter(), processor)))
    graphs = batch["graphs"]
    assert graphs.num_graphs == 3
    names = [name for record in chosen for name in build_graph(record.steps).nodes]
    assert torch.equal(graphs.x, table.vectors(names))
    assert [int((graphs.batch == number).sum()) for number in range(3)] == [5, 0, 3]
    assert graphs.subgraph_of.tolist() == [0] * 3 + [1] * 2 + [2] * 3


def test_weights_reach_markers_and_answers_alone(records, processor):
    rows = list(encode_rows(records, Counter(), processor))
    batch = RecordCollator(3, None, action_weight=4.0, answer_weight=2.5)(rows)
    assert batch["input_ids"].shape[1] == -(-max(row["length"] for row in rows) // 8) * 8
    for record, row, ids, weights in zip(records, rows, batch["input_ids"], batch["label_weights"]):
        planning = record.task == "planning"
        assert processor.tokenizer.decode(ids[weights == 4.0]) == (record.action.value if planning else "")
        assert ids[weights == 2.5].tolist() == ([] if planning else [one for one in row["labels"] if one >= 0])
        assert set(weights.tolist()) <= {1.0, 2.5, 4.0}
    assert RecordCollator(3, None)(rows).keys() == {"input_ids", "labels", "label_parts"}


def test_with_a_loss_per_record_all_records_weigh_alike(records, processor):
    rows = list(encode_rows(records, Counter(), processor))
    batch = RecordCollator(3, None, action_weight=3.0, answer_weight=2.0, per_record=True)(rows)
    for record, labels, weights, parts in zip(
        records, batch["labels"], batch["label_weights"], batch["label_parts"], strict=True
    ):
        answers = record.task == "answering"
        assert float(weights[labels != -100].sum()) == pytest.approx(2.0 if answers else 1.0)
        assert set(parts[labels != -100].tolist()) == {int(answers)}


# Interleaved


def a_row(prompt, label):
    start, end = len(prompt), len(prompt) + len(label)
    return {"input_ids": prompt + label, "labels": [IGNORED] * start + label, "spans": [[start, end, 0]], "length": end}


# Few different tokens: prompts are equal, or the beginning of another's prompt and label.
prompts = st.lists(st.sampled_from([1, 2]), min_size=1, max_size=8)
labels = st.lists(st.sampled_from([1, 2]), min_size=1, max_size=3)


@settings(deadline=None)
@given(st.lists(st.tuples(prompts, labels), min_size=1, max_size=8))
def test_every_record_can_be_read_off_its_chain(records):
    found = []
    for chain in chain_records([a_row(*record) for record in records]):
        learned = [place for start, end, _ in chain["spans"] for place in range(start, end)]
        assert len(learned) == len(set(learned)), "no place has two labels"
        assert sorted(learned) == [place for place, label in enumerate(chain["labels"]) if label != IGNORED]
        for start, end, _ in chain["spans"]:
            label = chain["labels"][start:end]
            assert chain["input_ids"][start : end - 1] == label[:-1]
            found.append((chain["input_ids"][:start], label))
    assert sorted(found) == sorted(records)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("limit", [1000, 380])
def test_a_question_in_one_row_teaches_what_its_records_do(
    family, limit, make_graph_llm, tiny_encoder, tmp_path, records
):
    made = {"prompt_order": "interleaved", "max_input_tokens": limit}
    model, processor = make_graph_llm(family, graph_dropout=0.0, processor_settings=made)
    strings = [text for record in records for part in build_graph(record.steps)[:2] for text in part]
    table = EmbeddingTable.build(strings, str(tiny_encoder), tmp_path)
    collate = RecordCollator(processor.tokenizer.pad_token_id, table, 3.0, 2.0, per_record=True)
    separate = [row for record in records for row in encode_rows([record], Counter(), processor)]
    together = list(encode_rows(records, Counter(), processor))
    # Of four questions, one has records of two; triples were left out of the longer prompts.
    assert (len(separate), len(together)) == (12, 5 if limit == 1000 else 8)
    found = []
    for rows in (separate, together):
        model.zero_grad()
        batch = collate(rows)
        del batch["label_parts"]
        loss = model(**batch).loss
        loss.backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        found[-1]["loss"] = loss.detach()
    for name, gradient in found[0].items():
        assert torch.allclose(found[1][name], gradient, atol=1e-4 * gradient.abs().max().item() + 1e-6), name


def test_padding():
    assert pad_batch([[1, 2, 3], [4]], 9, 4).tolist() == [[1, 2, 3, 9], [4, 9, 9, 9]]
