from __future__ import annotations

import pytest

from tripletune.eval.suites.records import evaluate_records, flatten, score_predictions
from tripletune.models.data.records import Action, Record, Step
from tripletune.models.data.triples import Triple
from tripletune.models.local.generation import Completion

STEP = Step("Q1?", (Triple("a", "b", "c"),), "text")


def plan(name: str, action: Action, subquery: str = "", steps: int = 0) -> Record:
    question = name.split(":")[0]
    return Record(name, question, "planning", "Q?", action, (STEP,) * steps, subquery)


def answer(name: str, *answers: str) -> Record:
    return Record(name, name.split(":")[0], "answering", "Q?", Action.SUFFICIENT, (STEP,), "", answers)


RECORDS = [
    plan("q1:0", Action.SUBQ, "Q?"),
    plan("q1:1", Action.SUBQ, "Who is sufficient?", 1),
    plan("q1:2", Action.SUFFICIENT, steps=2),
    answer("q1:a", "yes"),
    plan("q2:0", Action.NO_RETRIEVAL),
    answer("q2:a", "A", "Alpha Centauri"),
]
REPLIES = ["[SUBQ] Q?", "[SUBQ] Who is not sufficient?", "[SUBQ] more?", "Yes, both", "maybe", "alpha centauri"]


def test_scores_by_hand():
    metrics = score_predictions(RECORDS, REPLIES)
    planning, answering = metrics["planning"], metrics["answering"]
    assert (planning["records"], answering["records"]) == (4, 2)
    assert planning["action_accuracy"]["mean"] == 0.5
    assert planning["action_accuracy_with_history"] == pytest.approx({"mean": 0.5, "low": 0.5, "high": 0.5, "n": 2}), (
        "one question alone has no spread"
    )
    assert planning["malformed"]["mean"] == 0.25
    assert planning["subquery_f1"]["n"] == 2
    assert planning["subquery_f1"]["mean"] == pytest.approx((1 + 6 / 7) / 2)
    assert planning["subquery_f1_with_history"]["mean"] == pytest.approx(6 / 7)
    assert {k: v["mean"] for k, v in planning["action_accuracy_by_label"].items()} == {
        "[NO_RETRIEVAL]": 0.0,
        "[SUBQ]": 1.0,
        "[SUFFICIENT]": 0.0,
    }
    assert {k: v["mean"] for k, v in planning["action_accuracy_by_history"].items()} == {"0": 0.5, "1": 1.0, "2": 0.0}
    assert planning["confusion"]["[SUFFICIENT]"] == {
        "[SUBQ]": 1,
        "[SUFFICIENT]": 0,
        "[NO_RETRIEVAL]": 0,
        "malformed": 0,
    }
    assert planning["confusion"]["[NO_RETRIEVAL]"]["malformed"] == 1
    assert answering["exact_match"]["mean"] == 0.5
    assert answering["f1"]["mean"] == pytest.approx((2 / 3 + 1) / 2)
    assert answering["f1_hotpotqa"]["mean"] == 0.5


def test_another_action_scores_0_in_subquery_f1():
    record = plan("q:0", Action.SUBQ, "Who?")
    for reply in ("[SUFFICIENT] Who?", "Who?", "[SUBQ]", "[NO_RETRIEVAL]"):
        assert score_predictions([record], [reply])["planning"]["subquery_f1"]["mean"] == 0.0


def test_a_subquery_about_sufficient_is_no_stop():
    record = plan("q:0", Action.SUFFICIENT, steps=1)
    metrics = score_predictions([record], ["[SUBQ] Is it sufficient? [SUFFICIENT]"])
    assert metrics["planning"]["action_accuracy"]["mean"] == 0.0


def test_missing_kinds_are_none_and_left_out_of_the_flat_form():
    metrics = score_predictions([answer("q:a", "x")], ["x"])
    assert metrics["planning"]["action_accuracy"] == {"mean": None, "low": None, "high": None, "n": 0}
    assert flatten(metrics) == {"answering/exact_match": 1.0, "answering/f1": 1.0, "answering/f1_hotpotqa": 1.0}
    assert flatten(score_predictions(RECORDS, REPLIES))["planning/action_accuracy_by_history/1"] == 1.0


def test_one_reply_for_each_record():
    for replies in (["x"], ["x", "y", "z"]):
        with pytest.raises(ValueError, match="one reply for each record"):
            score_predictions([answer("a", "x"), answer("b", "x")], replies)


class Parrot:
    """Replies with the label of the record it is asked about; remembers its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int, str | None]] = []

    def generate_many(self, samples, max_new_tokens, evidence=None):
        self.calls.append((samples[0].task, len(samples), max_new_tokens, evidence))
        assert len({sample.task for sample in samples}) == 1
        return [Completion(f"[SUBQ] {s.question}" if s.task == "planning" else "x", 3, 1) for s in samples]


def test_evaluate_records_keeps_order_and_separates_lengths():
    parrot = Parrot()
    rows, metrics = evaluate_records(RECORDS, parrot, batch=4, evidence="text", max_plan_tokens=8, max_answer_tokens=5)
    assert [row["id"] for row in rows] == [record.id for record in RECORDS]
    assert parrot.calls == [
        ("planning", 3, 8, "text"),
        ("answering", 1, 5, "text"),
        ("planning", 1, 8, "text"),
        ("answering", 1, 5, "text"),
    ]
    replies = ["[SUBQ] Q?", "[SUBQ] Q?", "[SUBQ] Q?", "x", "[SUBQ] Q?", "x"]
    assert metrics == score_predictions(RECORDS, replies)
    assert rows[0]["prompt_tokens"] == 3
