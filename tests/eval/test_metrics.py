from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tripletune.eval import Metric, find_metrics, score_answer
from tripletune.eval.metrics import accuracy, exact_match, f1, f1_hotpotqa, golden_match, match_raw

METRICS = find_metrics()

words = st.lists(
    st.sampled_from(["yes", "no", "noanswer", "the", "a", "Paris", "A", "1889", "O'Neil", "é", "日本", "-"]), max_size=6
).map(" ".join)
texts = st.one_of(words, st.text(max_size=30))
golds = st.lists(texts.filter(str.strip), min_size=1, max_size=4)


def test_yes_with_an_explanation_separates_the_two_f1_rules():
    prediction, gold = "Yes, both are American", ["yes"]
    assert f1(prediction, gold) == pytest.approx(0.4)
    assert f1_hotpotqa(prediction, gold) == 0.0
    assert f1_hotpotqa("no", ["no way"]) == 0.0
    assert f1_hotpotqa("Yes.", gold) == 1.0
    assert f1_hotpotqa("yes both", ["yes", "yes both"]) == 1.0


def test_f1_by_hand():
    assert f1("the Eiffel Tower in Paris", ["Eiffel Tower"]) == pytest.approx(2 * (2 / 4) * 1 / (2 / 4 + 1))
    assert f1("tower tower", ["tower"]) == pytest.approx(2 * 0.5 * 1 / 1.5)
    assert f1("Seine", ["Eiffel Tower", "La Seine"]) == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("prediction", "gold", "right"),
    [
        ("A", "A", 1),
        ("a.", "A", 1),
        ("(A)", "A", 1),
        ("B", "A", 0),
        ("", "A", 0),
        ("The answer", "A", 0),
        ("an", "A", 0),
    ],
)
def test_the_choice_a_is_not_an_article(prediction, gold, right):
    assert accuracy(prediction, [gold]) == right


def test_golden_match_normalises_and_match_raw_does_not():
    assert golden_match("It was the U.S.A. of course", ["usa"]) == 1.0
    assert match_raw("It was the U.S.A. of course", ["usa"]) == 0.0
    assert match_raw("by John Berger.", ["john berger", "John Berger"]) == 1.0
    assert golden_match("nobody", ["John Berger", "The Body"]) == 1.0, "a substring test, as in the paper"


def test_gold_answers_must_be_a_filled_list():
    with pytest.raises(TypeError, match="read by letters"):
        score_answer("Paris", "Paris", METRICS)
    for empty in ([], [""], ["  "]):
        with pytest.raises(ValueError, match="needs one that is not blank"):
            score_answer("Paris", empty, METRICS)
    assert set(score_answer("Paris", ["", "Rome"], METRICS).values()) == {0.0}, "a blank alias matches nothing"
    assert set(score_answer("", ["Paris"], METRICS).values()) == {0.0}
    assert set(score_answer("Paris", ("Rome", "Paris"), METRICS).values()) == {1.0}


def test_a_score_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="metric odd gives"):
        score_answer("x", ["y"], {"odd": Metric(lambda prediction, answers: float("nan"), "")})


@given(texts, golds)
def test_scores_lie_between_0_and_1_and_aliases_have_no_order(prediction, answers):
    for metric in METRICS.values():
        score = metric.score(prediction, answers)
        assert 0.0 <= score <= 1.0
        assert score == metric.score(prediction, answers[::-1])
        assert score == max(metric.score(prediction, [answer]) for answer in answers)


@given(texts, golds)
def test_exact_match_implies_the_others_and_the_official_f1_is_never_higher(prediction, answers):
    assert f1_hotpotqa(prediction, answers) <= f1(prediction, answers)
    if exact_match(prediction, answers):
        assert f1(prediction, answers) == f1_hotpotqa(prediction, answers) == golden_match(prediction, answers) == 1.0


@given(texts.filter(str.strip), texts.filter(str.strip))
def test_f1_is_symmetric(left, right):
    assert f1(left, [right]) == pytest.approx(f1(right, [left]))


@given(golds)
@example([":\x1f"])
def test_a_gold_answer_is_always_right(answers):
    for name in ("exact_match", "f1", "f1_hotpotqa", "golden_match", "match_raw", "accuracy"):
        assert METRICS[name].score(answers[-1], answers) == 1.0
