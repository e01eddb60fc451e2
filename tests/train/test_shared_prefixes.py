"""Records in one sequence against the same records by themselves: tokens, losses and gradients."""

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tripletune.models.data.records import Record
from tripletune.models.graph_llm.embeddings import EmbeddingTable
from tripletune.models.graph_llm.graphs import build_graph
from tripletune.train.batches import RecordCollator, chain_records, share_prefixes
from tripletune.train.record_rows import encode_rows

FAMILIES = ("llama", "smollm2", "qwen2", "qwen3", "gemma", "granite", "cohere", "gpt2", "gptj")
OWN = 9


def row(prompt: list[int], label: list[int], question: int = 0) -> dict[str, Any]:
    return {"input_ids": prompt, "label_ids": label, "length": len(prompt) + len(label), "question": question}


# Few different tokens: prompts begin alike, are equal, or are the beginning of another's prompt and label.
prompts = st.lists(st.sampled_from([1, 2, OWN]), min_size=1, max_size=8)
labels = st.lists(st.sampled_from([1, 2]), min_size=1, max_size=3)


@settings(deadline=None)
@given(st.lists(st.builds(row, prompts, labels, st.integers(0, 2)), min_size=1, max_size=8))
def test_every_record_can_be_read_off_its_sequence(rows: list[dict[str, Any]]) -> None:
    sequences = share_prefixes(rows, OWN)
    assert sorted(number for sequence in sequences for number in sequence.records) == list(range(len(rows)))
    assert len(sequences) == len({row["question"] for row in rows})
    for sequence in sequences:
        assert len({rows[number]["question"] for number in sequence.records}) == 1
        for record, (number, start) in enumerate(zip(sequence.records, sequence.labels)):
            places = [place for place, other in enumerate(sequence.record_of) if other == record]
            begin = sequence.shared[places[0]]
            whole = [*rows[number]["input_ids"], *rows[number]["label_ids"]]
            tokens = [sequence.tokens[place] for place in places]
            assert sequence.tokens[:begin] + tokens == whole
            assert [sequence.positions[place] for place in places] == list(range(begin, len(whole)))
            assert {sequence.shared[place] for place in places} == {begin}
            assert OWN not in sequence.tokens[:begin]
            # The label follows a token of this record's own, whose prediction is its first token.
            assert start - 1 in places
            assert sequence.tokens[start : start + len(rows[number]["label_ids"])] == rows[number]["label_ids"]


def test_as_much_as_possible_is_shared() -> None:
    long, short, other = row([1, 1, 2, 2, OWN, 1], [2]), row([1, 1, 2, OWN, 1], [2]), row([1, 1, 2, 2, OWN, 2], [1])
    (sequence,) = share_prefixes([short, long, other], OWN)
    assert sequence.records == [1, 2, 0]
    assert sequence.tokens == [1, 1, 2, 2, OWN, 1, 2, OWN, 2, 1, OWN, 1, 2]
    assert sequence.shared == [0] * 7 + [4] * 3 + [3] * 3


@pytest.fixture
def collated(tiny_encoder: Path, tmp_path: Path, records: list[Record]) -> Callable[..., Any]:
    """Both batches of the twelve records: as they are, and with shared prefixes."""

    def collate(processor: Any, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        table = None
        if processor.settings.use_graph:
            strings = [text for record in records for part in build_graph(record.steps)[:2] for text in part]
            table = EmbeddingTable.build(strings, str(tiny_encoder), tmp_path)
        rows = list(encode_rows(records, Counter(), processor))
        pad, own = processor.tokenizer.pad_token_id, processor.graph_token_id
        return (
            RecordCollator(pad, table, **options)(rows),
            RecordCollator(pad, table, **options, shared_prefixes=True, graph_token_id=own)(rows),
        )

    return collate


def learned(model: Any, batch: dict[str, Any]) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("family", "attention"),
    [*itertools.product(FAMILIES, ["sdpa", "eager"]), *((family, "blocks") for family in FAMILIES if family != "gptj")],
)
def test_loss_and_gradients_are_those_of_separate_records(
    family: str, attention: str, make_graph_llm: Any, collated: Callable[..., Any]
) -> None:
    settings = {"prompt_order": "history_first"}
    model, processor = make_graph_llm(family, graph_dropout=0.0, attention=attention, processor_settings=settings)
    separate, shared = collated(processor, action_weight=3.0, answer_weight=2.0)
    assert shared["input_ids"].numel() < 0.75 * separate["input_ids"].numel()
    assert shared["input_ids"].shape[0] == 4
    assert shared["graphs"].num_graphs == separate["graphs"].num_graphs == 12
    loss, gradients = learned(model, separate)
    found, others = learned(model, shared)
    assert found == pytest.approx(loss, rel=1e-4)
    assert gradients.keys() == others.keys()
    for name, gradient in gradients.items():
        assert torch.allclose(others[name], gradient, atol=1e-3 * gradient.abs().max().item() + 1e-6), name


@settings(deadline=None)
@given(st.lists(st.builds(row, prompts, labels), min_size=1, max_size=8))
def test_every_record_can_be_read_off_its_chain(rows: list[dict[str, Any]]) -> None:
    chains = chain_records(rows)
    assert sorted(number for chain in chains for number in chain.records) == list(range(len(rows)))
    for chain in chains:
        learned = []
        for number, start in zip(chain.records, chain.labels):
            whole = [*rows[number]["input_ids"], *rows[number]["label_ids"]]
            assert (start, chain.tokens[: len(whole) - 1]) == (len(rows[number]["input_ids"]), whole[:-1])
            learned += range(start, len(whole))
        assert len(learned) == len(set(learned)), "no place has two labels"


@pytest.mark.parametrize("family", [*FAMILIES, "gemma3", "lfm2"])
@pytest.mark.parametrize("limit", [1000, 380])
def test_an_interleaved_question_in_one_pass_learns_what_its_records_do(
    family: str, limit: int, make_graph_llm: Any, collated: Callable[..., Any]
) -> None:
    made = {"prompt_order": "interleaved", "max_input_tokens": limit}
    model, processor = make_graph_llm(family, graph_dropout=0.0, processor_settings=made)
    options = {"action_weight": 3.0, "answer_weight": 2.0, "tokens_per_record": 7.0, "interleaved": True}
    separate, shared = collated(processor, **options)
    # Of four questions, one has records of two; triples were left out of the longer prompts.
    assert len(shared["input_ids"]) == (5 if limit == 1000 else 8)
    assert (shared.keys(), len(separate["input_ids"])) == (separate.keys(), 12)
    (loss, gradients), (found, others) = learned(model, separate), learned(model, shared)
    assert found == pytest.approx(loss, rel=1e-5)
    for name, gradient in gradients.items():
        assert torch.allclose(others[name], gradient, atol=1e-4 * gradient.abs().max().item() + 1e-6), name


def test_without_graph_the_paper_order_shares_what_a_task_has_in_common(
    make_graph_llm: Any, collated: Callable[..., Any]
) -> None:
    model, processor = make_graph_llm(use_graph=False)
    separate, shared = collated(processor)
    assert "graphs" not in shared
    assert int((shared["record_of"] >= 0).sum()) < int((separate["input_ids"] != 3).sum())
    assert learned(model, shared)[0] == pytest.approx(learned(model, separate)[0], rel=1e-4)
