import string
import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rouge_score.tokenizers import DefaultTokenizer

from tests.data_builders.rows import shared
from tripletune.data_builders.readers import get_reader
from tripletune.eval import Metric, find_metrics, load_task, score_answer
from tripletune.eval.metrics import (
    accuracy,
    exact_match,
    exact_match_triviaqa,
    f1,
    f1_hotpotqa,
    f1_triviaqa,
    golden_match,
    label_accuracy,
    match_raw,
    rouge_l,
    rouge_lsum,
    str_em,
)
from tripletune.eval.rouge import RougeWords
from tripletune.eval.triples import rouge_scores

METRICS = {name: metric for name, metric in find_metrics().items() if metric.reads == "answers"}

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


@pytest.mark.parametrize(
    ("prediction", "label"),
    [
        ("A. Paris", "A"), ("(B) because", "B"), ("**B**", "B"), ("The correct answer is (C).", "C"),
        ("I think B", "B"), ("Answer: D) foo", "D"), ("A: red, not B: blue", "A"),
        ("The answer is B because A is wrong.", "B"),
        ("B is correct", "B"), ("The answer is A", "A"), ("Both A) and B) are right", ""), ("The answer is a dog.", ""),
        ("I", ""), ("The claim is true.", "true"), ("False, because it is not true", "false"), ("untrue", "false"),
        ("This is not true", "false"), ("It isn't entirely true.", "false"), ("True. It is not false", "true"),
        ("A - heat", "A"), ("A (heat)", "A"), ("A\nheat", "A"), ("**A** \u2013 heat", "A"),
        ("A because heat rises", "A"), ("A heat wave", ""), ("A-level physics", ""),
        ("", ""), ("The answer is not B.", ""), ("A or B", ""), ("A, B, C", ""), ("It may be vitamin C, D or A.", ""),
        ("A) red B) blue\n\nThe answer is B.", "B"), ("None fits: I cannot tell whether B is right.", ""),
        ("True or false", ""), ("The claim cannot be verified as true.", ""),
        ("True stories are told here.\n\nSo the claim is false, as there is not enough evidence.", "false"),
        ("The passages do not mention whether this is true, so it cannot be determined.", ""),
    ],
)  # fmt: skip
def test_labels_are_read_out_of_sentences(prediction, label):
    assert not label_accuracy("It could be true or false", ["true"])
    for gold in ("true", "false") if label in ("true", "false") else ("A", "B", "C", "D"):
        assert label_accuracy(prediction, [gold]) == (gold == label)


NULL = "Insufficient information."
LONG = "The first article praises the plan of the council. " * 6


@pytest.mark.parametrize(
    ("prediction", "label"),
    [
        (NULL, NULL), ("Unanswerable", NULL), ("I cannot answer this question.", NULL), ("I don't know", NULL),
        ("The articles do not mention it.", NULL), ("It cannot be determined whether the answer is yes or no.", NULL),
        ("No information is provided.", NULL), ("There isn't enough information, so I can't say yes or no.", NULL),
        ("It is not possible to verify this from the passages.", NULL), ("Based on them, it remains unclear.", NULL),
        (f"{LONG}\n\nTherefore the answer cannot be determined.", NULL), (f"{LONG}\n\nAnswer: Unanswerable", NULL),
        (f"The first does not say so. {LONG}\n\nAnswer: Google", "Google"), (f"{LONG}\n\nThe answer is no.", "no"),
        ("No, the articles do not mention it.", "no"), ("Yes, although no article says when.", "Yes"),
        ("There is no discrepancy.", "no"), ("No one cannot", "no"),
        ("It could be yes or no, but there is insufficient information to be sure.", ""), ("Yes and no.", ""),
        (f"Yes, no, or {NULL}", ""), ("Google or Meta", ""),
        ("Google, Apple, or Meta", ""), ("It is Google, not Meta.", "Google"),
        ("No. The article on Google says so of none.", "no"), ("The articles provide no evidence for this.", NULL),
        ("It is not Google", ""), ("Googles", ""), ("nobody", ""), ("Yes, no changes were reported.", "Yes"),
        ("Google. The articles do not mention any other company.", "Google"),
        ("I think it is Google, but I am not sure.", "Google"), ("I'm sorry. I cannot answer.", NULL),
        ("", ""), ("\n\n", ""),
    ],
)  # fmt: skip
def test_a_refusal_earns_the_tasks_own_word_and_no_other_label(prediction, label):
    task = load_task("multihoprag")
    metrics = {name: metric for name, metric in find_metrics().items() if name in task.metrics}
    for gold in (NULL, "Yes", "no", "Google"):
        scores = score_answer(prediction, [gold], metrics, refusal=task.refusal)
        assert scores["label_accuracy"] == (gold == label), gold
        assert scores["exact_match"] == (gold == label == NULL) or label == NULL != gold
    assert task.metrics[0] == "label_accuracy", "golden_match pays for refusals"


@pytest.mark.parametrize(
    ("prediction", "share"), [("I cannot answer.", 22), ("Yes, no, or insufficient information.", 0)]
)
def test_always_refusing_and_hedging_on_multihop_rag(prediction, share):
    questions = list(get_reader("multihop_rag")(str(shared("multihoprag_queries.jsonl"))))
    assert sum(label_accuracy(prediction, question.answers) for question in questions) == share


def test_triviaqa_takes_punctuation_for_spaces():
    assert exact_match("Muang Thai", ["Muang-Thai"]) == 0
    assert exact_match_triviaqa("Muang_Thai’", ["Muang-Thai"]) == 1
    assert f1_triviaqa("the Coca-Cola Company", ["coca cola"]) == pytest.approx(0.8)


def test_long_answers_by_hand():
    readings = (("ConAgra", "Sara Lee"), ("United States",), ("1993",))
    assert str_em("Sara Lee makes it in the U.S.; it was launched in 1993.", readings) == pytest.approx(2 / 3)
    gold = "The cat sat. The dogs barked."
    assert rouge_lsum("The dog barks. The cat sat.", [gold, "x"]) == 1.0, "sentences have no order, words are stemmed"
    assert rouge_l("The dog barks. The cat sat.", [gold]) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="needs short answers"):
        score_answer("x", ["y"], find_metrics())


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("Київ столиця України", "Львів столиця України"),
        ("北京是中国的首都", "南京是中国的首都"),
        ("Η Αθήνα είναι πρωτεύουσα", "Η Σπάρτη είναι πρωτεύουσα"),
        ("Karl Möller", "Karl Müller"),
        ("हिन्दी भाषा", "तमिल भाषा"),
    ],
)
def test_rouge_reads_words_of_any_script(text, other):
    for metric in (rouge_l, rouge_lsum):
        assert metric(text, [unicodedata.normalize("NFD", text)]) == 1
        assert 0 < metric(other, [text]) < 1
    assert rouge_scores(text, text) == {"rouge1": 1, "rouge2": 1, "rougeL": 1}
    assert rouge_scores(other, text)["rouge1"] < 1


@given(st.text(string.printable, max_size=80))
def test_rouge_of_ascii_has_the_words_of_rouge_score(text):
    for stems in (True, False):
        assert RougeWords(stems).tokenize(text) == DefaultTokenizer(stems).tokenize(text)


def test_asqa_rows_score_their_own_long_answers():
    questions = list(get_reader("asqa")(str(shared("asqa_dev.jsonl"))))
    assert len(questions) == 150
    scores = [str_em(question.answers[0], question.short_answers) for question in questions]
    assert 0.6 < sum(scores) / len(scores) < 1
    assert rouge_lsum(questions[0].answers[1], questions[0].answers) == pytest.approx(1)


def test_golden_match_normalises_and_match_raw_does_not():
    assert golden_match("It was the U.S.A. of course", ["usa"]) == 1.0
    assert match_raw("It was the U.S.A. of course", ["usa"]) == 0.0
    assert match_raw("by John Berger.", ["john berger", "John Berger"]) == 1.0
    assert golden_match("nobody", ["John Berger", "The Body"]) == 1.0, "a substring test, as in the paper"


def test_gold_answers_must_be_a_filled_list():
    for empty in ([], [""], ["  "]):
        with pytest.raises(ValueError, match="needs a gold answer that is not blank"):
            score_answer("Paris", empty, METRICS)
    assert set(score_answer("Paris", ["", "Rome"], METRICS).values()) == {0.0}, "a blank alias matches nothing"
    assert set(score_answer("", ["Paris"], METRICS).values()) == {0.0}
    assert set(score_answer("Paris", ("Rome", "Paris"), METRICS).values()) == {1.0}


def test_a_score_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="metric odd returns"):
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
    for name in METRICS.keys() - {"rouge_l", "rouge_lsum"}:
        assert METRICS[name].score(answers[-1], answers) == 1.0
