import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tripletune.core.data.pairs import ExtractionPair
from tripletune.core.data.triples import Triple, format_triples
from tripletune.data_builders.readers.triples import read_source
from tripletune.data_builders.subq.options import Source
from tripletune.eval.statistics import flatten_means
from tripletune.eval.triple_matching import (
    aligned_fields,
    field_similarities,
    field_vectors,
    is_grounded,
    normalize_entity,
    normalize_predicate,
    soft_matches,
)
from tripletune.eval.triples import (
    Prediction,
    TextScores,
    precision_recall_f1,
    rouge_scores,
    score_extractions,
    score_texts,
    summarise_extractions,
)

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
NAME = st.text(alphabet="abcAB é1", min_size=1, max_size=5).filter(str.strip)
TRIPLES = st.lists(st.builds(Triple, NAME, NAME, NAME), max_size=5)


def prediction(gold, reply, text="a b", identity="x"):
    return Prediction(ExtractionPair(identity, text, "", tuple(Triple(*fields) for fields in gold)), [reply])


TABLE = {"lawyer": [1.0, 0.0], "attorney": [0.9, np.sqrt(1 - 0.81)], "judge": [0.6, 0.8]}


def embed(texts):
    """Words of the table have their vectors; every other text one of its own."""
    vectors = np.zeros((len(texts), 2 + len(texts)))
    for row, text in enumerate(texts):
        if text in TABLE:
            vectors[row, :2] = TABLE[text]
        else:
            vectors[row, 2 + row] = 3.0
    return vectors


ADA = prediction(
    [("Ada", "occupation", "lawyer"), ("Ada", "birthPlace", "London"), ("Ada", "born", "1815")],
    "(S> Ada| P> occupation| O> attorney), (S> The Ada| P> birth place| O> london), "
    "(S> Ada| P> born| O> 1816), (S> Ada",
    "Ada, an attorney born in London in 1815.",
    "ada",
)
NOTHING = prediction([], "NONE", "Hello!", "nothing")
INVENTED = prediction([], "(S> Hello| P> is| O> Bob)", "Hello!", "invented")
MISSED = prediction([("Oslo", "in", "Norway")], "I can't say.", "Oslo is in Norway.", "missed")


def test_rows_by_hand():
    ada, nothing, invented, missed = score_texts([ADA, NOTHING, INVENTED, MISSED], embed)
    assert (ada.exact, ada.normalised, ada.soft) == ((0, 3, 3), (1, 3, 3), (2, 3, 3))
    assert (ada.subject, ada.predicate, ada.object) == (3, 3, 1)
    assert (ada.malformed_triples, ada.malformed) == (1, True)
    # Ada, The Ada, attorney, london and 1816; only 1816 is not in the text.
    assert (ada.entities, ada.grounded) == (5, 4)
    assert (ada.unsupported, invented.unsupported) == (1, 1)
    assert (nothing.exact, nothing.malformed, nothing.entities) == ((0, 0, 0), False, 0)
    assert (invented.exact, invented.grounded, invented.entities) == ((0, 1, 0), 1, 2)
    assert (missed.exact, missed.malformed, missed.malformed_triples) == ((0, 0, 1), True, 0)


def test_summary_by_hand():
    summary = score_extractions([ADA, NOTHING, INVENTED, MISSED], embed)
    flat = flatten_means(summary)
    # Normalised: 1 match; 3 + 1 triples predicted, 3 + 1 gold.
    assert flat["normalised/micro/precision"] == pytest.approx(1 / 4)
    assert flat["normalised/micro/recall"] == pytest.approx(1 / 4)
    assert flat["normalised/micro/f1"] == pytest.approx(2 / 8)
    # By text: 1/3, 1 (nothing to find, nothing found), 0, 0.
    assert flat["normalised/macro/f1"] == pytest.approx((1 / 3 + 1) / 4)
    assert flat["soft/micro/f1"] == pytest.approx(4 / 8)
    assert flat["exact/micro/f1"] == 0
    assert summary["soft"]["thresholds"] == {"entity": 0.75, "predicate": 0.6}
    assert flat["accuracy/subject"] == flat["accuracy/predicate"] == pytest.approx(3 / 4)
    assert flat["accuracy/object"] == pytest.approx(1 / 4)
    assert flat["malformed_output"] == pytest.approx(2 / 4)
    assert flat["malformed_triples"] == pytest.approx(1 / 5)
    assert flat["groundedness"] == pytest.approx(5 / 7)
    assert flat["unsupported"] == pytest.approx(2 / 4)
    interval = summary["normalised"]["micro"]["f1"]
    assert interval["low"] <= interval["mean"] <= interval["high"]
    assert interval["n"] == 4


def test_a_summary_is_made_of_stored_rows():
    stored = [json.dumps(scores.to_json()) for scores in score_texts([ADA, MISSED], embed)]
    rows = [TextScores.from_json(json.loads(line)) for line in stored]
    assert summarise_extractions(rows) == score_extractions([ADA, MISSED], embed)
    assert "soft" not in score_extractions([ADA]), "there is no embedder"
    assert score_extractions([]) == {"texts": 0}


@settings(deadline=None, max_examples=50)
@given(TRIPLES, TRIPLES)
def test_bounds_and_symmetry(gold, found):
    (row,) = score_texts([prediction([t.as_list() for t in gold], format_triples(found))], embed)
    (other,) = score_texts([prediction([t.as_list() for t in found], format_triples(gold))], embed)
    for level in ("exact", "normalised", "soft"):
        matches, predicted, wanted = getattr(row, level)
        assert 0 <= matches <= min(predicted, wanted)
        assert (matches, wanted, predicted) == getattr(other, level)
        assert all(0 <= value <= 1 for value in precision_recall_f1(matches, predicted, wanted))
    assert row.soft.matches >= row.normalised.matches
    assert row.normalised.matches <= min(row.subject, row.predicate, row.object)
    assert not row.malformed


@settings(deadline=None, max_examples=50)
@given(TRIPLES, st.randoms(use_true_random=False))
def test_a_perfect_reply_scores_one_in_any_order(gold, chance):
    shuffled = gold[:]
    chance.shuffle(shuffled)
    summary = score_extractions([prediction([t.as_list() for t in gold], format_triples(shuffled))], embed)
    flat = flatten_means(summary)
    for level in ("exact", "normalised", "soft"):
        assert flat[f"{level}/macro/f1"] == 1
        assert flat.get(f"{level}/micro/f1", 1) == 1


def test_rouge_by_hand():
    # Words: s ada p is o x, six of them, in both; five pairs.
    same = "(S> Ada| P> is| O> x)"
    assert rouge_scores(same, same) == {"rouge1": 1.0, "rouge2": 1.0, "rougeL": 1.0}
    # s ada p is o y: five of six words, four of five pairs, a common run of five.
    scores = rouge_scores("(S> Ada| P> is| O> y)", same)
    assert scores == {"rouge1": pytest.approx(5 / 6), "rouge2": pytest.approx(4 / 5), "rougeL": pytest.approx(5 / 6)}
    assert rouge_scores("", "") == {"rouge1": 1.0, "rouge2": 1.0, "rougeL": 1.0}
    assert rouge_scores("NONE", same)["rouge1"] == 0


def test_rouge_takes_the_word_for_no_facts_for_an_empty_reply():
    right, empty, wrong, odd = score_texts(
        [
            NOTHING,
            prediction([], "", "Hello!"),
            prediction([("Ada", "is", "x")], "NONE"),
            prediction([], "I can't.", "Hello!"),
        ]
    )
    assert (right.rouge1, right.rougeL, empty.rouge1) == (1, 1, 1)
    assert (wrong.rouge1, odd.rouge1) == (0, 0)


def test_a_text_without_a_reply_is_never_right():
    failed = Prediction(ExtractionPair("f", "Hello!"), [""], failed=True)
    rows = list(score_texts([failed, NOTHING]))
    assert [row.rougeL for row in rows] == [0, 1]
    summary = summarise_extractions(rows)
    assert summary["normalised"]["macro"]["f1"]["mean"] == 0.5


def test_the_replies_to_pieces_are_read_one_by_one():
    thought = ("(S> Ada| P> was| O> born)", "<think>(S> x| P> y| O> z)</think>NONE")
    json_cut = ('[["Ada", "was", "bo', '[["Ada", "was", "born"]]')
    gold = (Triple("Ada", "was", "born"),)
    asked = [((), ("NONE", "NONE")), (gold, thought), (gold, json_cut)]
    rows = list(score_texts(Prediction(ExtractionPair("a", "Ada was born.", "", *one), both) for *one, both in asked))
    assert [row.malformed for row in rows] == [False, False, True]
    assert [row.exact for row in rows] == [(0, 0, 0), (1, 1, 1), (1, 1, 1)]
    assert rows[0].rougeL == 1


def test_the_pair_is_shown_as_the_model_saw_it():
    pair = ExtractionPair("a", "It is in Norway.", "Oslo", (Triple("Oslo", "located in", "Norway"),))
    (row,) = score_texts([Prediction(pair, [pair.target])])
    assert (row.entities, row.grounded) == (2, 2)


def test_gold_triples_of_genwiki_are_grounded_and_perfect():
    if not (DATA / "genwiki_test.jsonl").is_file():
        pytest.skip("the data sets are not here")
    from collections import Counter

    rows = list(read_source(Source.parse(f"genwiki:{DATA / 'genwiki_test.jsonl'}"), Counter(), Counter()))
    pairs = [ExtractionPair(str(number), row.text, "", row.triples) for number, row in enumerate(rows)]
    predictions = [Prediction(pair, [pair.target]) for pair in pairs]
    flat = flatten_means(score_extractions(predictions))
    assert flat["exact/micro/f1"] == flat["normalised/macro/f1"] == flat["accuracy/object"] == 1
    assert flat["groundedness"] > 0.98
    assert flat["malformed_output"] == 0


# When two triples are the same.


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        ("The Beatles", "beatles", True),
        ("U.S.", "u s", True),
        ("Moanin'", "moanin", True),
        ("１９５８", "1958", True),
        ("“Up” (film)", "up film", True),
        # They differ in a mark alone.
        ("मीरा", "मेरा", False),
        ("กิน", "กัน", False),
        ("♥️", "★️", False),
    ],
)
def test_which_names_are_the_same(left, right, same):
    assert (normalize_entity(left) == normalize_entity(right)) is same


def test_words_of_scripts_with_marks_stay_whole_and_no_name_is_emptied():
    assert normalize_entity("मीरा, दिल्ली (1498)") == "मीरा दिल्ली 1498"
    assert is_grounded("मीरा", f" {normalize_entity('मीरा दिल्ली में है।')} ")
    assert [normalize_entity(name) for name in ("The The", "!!!", "A")] == ["the the", "!!!", "a"]


@pytest.mark.parametrize(
    ("predicate", "normal"),
    [
        *((name, "birthplace") for name in ("birthPlace", "birth place", "Birthplace", "has birth place")),
        ("the birth_place", "birthplace"),
        ("is", "is"),
        ("was born in", "bornin"),
        ("was born on", "bornon"),
    ],
)
def test_normal_predicates(predicate, normal):
    assert normalize_predicate(predicate) == normal


@settings(deadline=None)
@given(st.text())
def test_normalising_twice_changes_nothing(text):
    assert normalize_entity(normalize_entity(text)) == normalize_entity(text)


def test_grounded_means_whole_words():
    words = f" {normalize_entity('Ada (1815–1852), the mathematician, knew Timmons.')} "
    names = ("ADA", "1815", "a mathematician", "Tim", "Ada knew")
    assert [is_grounded(name, words) for name in names] == [True, True, True, False, False]


def test_similarities_of_the_fields():
    gold = [Triple("Ada", "job", "lawyer")]
    fields = (("ada", "Job", "Lawyer"), ("Ada", "job", "attorney"), ("Ada", "job", "judge"), ("Bob", "job", "lawyer"))
    predicted = [Triple(*one) for one in fields]
    similar = field_similarities(predicted, gold, field_vectors([*gold, *predicted], embed))
    assert similar.shape == (3, 4, 1)
    assert similar[0, :, 0] == pytest.approx([1.0, 1.0, 1.0, 0.0])
    assert similar[1, :, 0] == pytest.approx([1.0, 1.0, 1.0, 1.0])
    assert similar[2, :, 0] == pytest.approx([1.0, 0.9, 0.6, 1.0])


def test_other_numbers_are_never_similar():
    gold, predicted = [Triple("x", "year", "1958")], [Triple("x", "year", "1959"), Triple("x", "in year", "1958 AD")]
    vectors = field_vectors([*gold, *predicted], lambda texts: np.ones((len(texts), 4)))
    assert field_similarities(predicted, gold, vectors)[2, :, 0] == pytest.approx([0.0, 1.0])


def best_by_trying(fits):
    rows, columns = fits.shape
    if rows > columns:
        return best_by_trying(fits.T)
    return max(
        (sum(fits[i, j] for i, j in enumerate(chosen)) for chosen in itertools.permutations(range(columns), rows)),
        default=0,
    )


@settings(deadline=None)
@given(st.integers(0, 4), st.integers(0, 4), st.randoms(use_true_random=False))
def test_the_assignment_is_the_best_there_is(rows, columns, chance):
    similar = np.array([[chance.random() for _ in range(columns)] for _ in range(rows)]).reshape(rows, columns)
    fields = np.stack([similar, np.ones_like(similar), np.ones_like(similar)])
    assert soft_matches(fields) == best_by_trying(similar >= 0.75)


def test_every_field_has_to_reach_its_threshold():
    def matches(*cosines):
        return soft_matches(np.array(cosines).reshape(3, 1, 1))

    assert matches(0.75, 0.6, 0.75) == 1
    assert matches(0.74, 1.0, 1.0) == matches(1.0, 0.59, 1.0) == matches(1.0, 1.0, 0.74) == 0


def test_fields_are_counted_along_the_alignment():
    gold = [("a", "p", "x"), ("b", "q", "y")]
    assert aligned_fields([("a", "p", "x"), ("b", "r", "y")], gold) == (2, 1, 2)
    assert aligned_fields([("b", "q", "y"), ("a", "p", "x")], gold) == (2, 2, 2)
    assert aligned_fields([("a", "q", "y")], gold) == (0, 1, 1)
    assert aligned_fields([], gold) == aligned_fields(gold, []) == (0, 0, 0)
