from typing import Any

import pytest
import torch

from tripletune.models.data.records import Record
from tripletune.models.graph_llm.embeddings import EmbeddingTable
from tripletune.models.graph_llm.processor import GraphLLMProcessor
from tripletune.train.collate import IGNORED, Collator
from tripletune.train.dataset import encode_row


@pytest.fixture
def processor(tokenizer: Any) -> GraphLLMProcessor:
    return GraphLLMProcessor.create(tokenizer)


def test_label_and_end_of_sequence_alone_are_learned(processor: GraphLLMProcessor, records: list[Record]) -> None:
    rows = [encode_row(record, processor, None) for record in records]
    batch = Collator(processor.tokenizer.pad_token_id, None)(rows)
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


def test_the_length_is_rounded_up(processor: GraphLLMProcessor, records: list[Record]) -> None:
    rows = [encode_row(record, processor, None) for record in records[:3]]
    longest = max(row["length"] for row in rows)
    assert Collator(3, None)(rows)["input_ids"].shape == (3, -(-longest // 8) * 8)
    assert Collator(3, None, pad_to_multiple_of=1)(rows)["input_ids"].shape == (3, longest)
    assert "attention_mask" not in Collator(3, None)(rows)


def test_graphs_are_those_of_the_records(
    processor: GraphLLMProcessor, records: list[Record], tiny_encoder: Any, tmp_path: Any
) -> None:
    strings = [text for record in records for graph in processor.graphs(record.steps) for text in graph.strings]
    table = EmbeddingTable.build(strings, str(tiny_encoder), tmp_path, progress=False)
    chosen = [records[1], records[3], records[9]]
    batch = Collator(3, table)([encode_row(record, processor, table) for record in chosen])
    graphs = batch["graphs"]
    assert graphs.num_graphs == 3
    names = [name for record in chosen for graph in processor.graphs(record.steps) for name in graph.nodes]
    rows = table.rows(names)
    assert torch.equal(graphs.x, table.vectors([rows[name] for name in names]))
    assert [int((graphs.batch == number).sum()) for number in range(3)] == [5, 0, 3]
    assert graphs.subgraph_of.tolist() == [0] * 3 + [1] * 2 + [2] * 3


def test_action_weight_reaches_the_marker_tokens_alone(records: list[Record], processor: GraphLLMProcessor) -> None:
    rows = [encode_row(record, processor, None) for record in records]
    batch = Collator(3, None, action_weight=4.0)(rows)
    for record, ids, weights in zip(records, batch["input_ids"], batch["label_weights"]):
        heavy = processor.tokenizer.decode(ids[weights == 4.0])
        assert heavy == (record.action.value if record.task == "planning" else "")
        assert set(weights.tolist()) <= {1.0, 4.0}
    assert "label_weights" not in Collator(3, None)(rows)


def test_answer_weight_reaches_the_labels_of_answers_alone(records: list[Record], processor: GraphLLMProcessor) -> None:
    rows = [encode_row(record, processor, None) for record in records]
    batch = Collator(3, None, action_weight=4.0, answer_weight=2.5)(rows)
    for record, row, ids, weights in zip(records, rows, batch["input_ids"], batch["label_weights"]):
        chosen = ids[weights == 2.5].tolist()
        assert chosen == ([] if record.task == "planning" else row["label_ids"])
        assert bool((weights == 4.0).any()) == (record.task == "planning")
