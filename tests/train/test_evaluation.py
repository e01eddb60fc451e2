from collections.abc import Callable
from typing import Any

import pytest

from tripletune.models.data.records import ModelInput, Record
from tripletune.models.local.generation import Completion
from tripletune.models.local.generator import LocalGenerator
from tripletune.train.evaluation import generate_and_score

Make = Callable[..., Any]


@pytest.fixture
def gold(monkeypatch: pytest.MonkeyPatch, records: list[Record]) -> dict[str, str]:
    """Replies by question and task and number of steps, gold unless the test changes them."""
    replies = {repr(record.input): record.label for record in records}

    def generate_many(self: LocalGenerator, samples: list[ModelInput], limit: int, evidence: Any = None) -> Any:
        return [Completion(replies[repr(sample)]) for sample in samples]

    monkeypatch.setattr(LocalGenerator, "generate_many", generate_many)
    return replies


def scores(make_graph_llm: Make, records: list[Record]) -> dict[str, float]:
    model, processor = make_graph_llm(use_graph=False)
    return generate_and_score(model, processor, None, records, 4, 8)


def test_gold_replies_score_one(make_graph_llm: Make, records: list[Record], gold: dict[str, str]) -> None:
    found = scores(make_graph_llm, records)
    assert found["planning/action_accuracy"] == 1.0
    assert found["planning/malformed"] == 0.0
    assert found["answering/exact_match"] == 1.0


def test_wrong_and_malformed_replies_are_counted(
    make_graph_llm: Make, records: list[Record], gold: dict[str, str]
) -> None:
    gold[repr(records[0].input)] = "[SUFFICIENT]"
    gold[repr(records[1].input)] = "I think [SUFFICIENT]"
    gold[repr(records[2].input)] = "elsewhere"
    found = scores(make_graph_llm, records)
    assert found["planning/action_accuracy"] == pytest.approx(6 / 8)
    assert found["planning/malformed"] == pytest.approx(1 / 8)
    assert found["answering/exact_match"] == pytest.approx(3 / 4)


def test_no_records_no_scores(make_graph_llm: Make) -> None:
    assert scores(make_graph_llm, []) == {}


def test_a_real_model_is_scored(make_graph_llm: Make, records: list[Record]) -> None:
    model, processor = make_graph_llm()
    found = generate_and_score(model, processor, None, records[:4], 4, 4)
    assert 0 <= found["planning/action_accuracy"] <= 1
