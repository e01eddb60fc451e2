from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tripletune.core.data.records import IGNORED
from tripletune.models.graph_llm.embeddings import EmbeddingTable
from tripletune.models.graph_llm.graphs import build_graph
from tripletune.models.graph_llm.processor import GraphLLMProcessor
from tripletune.train.rows.records import RecordCollator, chain_records, encode_rows

FAMILIES = ("llama", "smollm2", "qwen2", "qwen3", "gemma", "gemma3", "granite", "cohere", "gpt2", "gptj", "lfm2")


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
