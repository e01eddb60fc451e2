import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tripletune.eval.triple_matching import (
    FieldVectors,
    Thresholds,
    aligned_fields,
    entity_words,
    grounded,
    normalize_entity,
    normalize_predicate,
    soft_matches,
)
from tripletune.models.data.triples import Triple

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


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("The Beatles", "beatles"),
        ("U.S.", "u s"),
        ("Moanin'", "moanin"),
        ("１９５８", "1958"),
        ("“Up” (film)", "up film"),
    ],
)
def test_names_that_are_the_same(left, right):
    assert normalize_entity(left) == normalize_entity(right)


@pytest.mark.parametrize(("left", "right"), [("मीरा", "मेरा"), ("กิน", "กัน"), ("♥️", "★️")])
def test_names_that_differ_in_a_mark_alone_are_not_the_same(left, right):
    assert normalize_entity(left) != normalize_entity(right)


def test_words_of_scripts_with_marks_stay_whole():
    assert entity_words("मीरा, दिल्ली (1498)") == ["मीरा", "दिल्ली", "1498"]
    assert grounded("मीरा", f" {' '.join(entity_words('मीरा दिल्ली में है।'))} ")


def test_a_name_is_never_emptied():
    assert normalize_entity("The The") == "the the"
    assert normalize_entity("!!!") == "!!!"
    assert normalize_entity("A") == "a"


@pytest.mark.parametrize("predicate", ["birthPlace", "birth place", "Birthplace", "has birth place", "the birth_place"])
def test_predicates_that_are_the_same(predicate):
    assert normalize_predicate(predicate) == "birthplace"


def test_predicates_that_are_not():
    assert normalize_predicate("is") == "is"
    assert normalize_predicate("was born in") == "bornin" != normalize_predicate("was born on")


@settings(deadline=None)
@given(st.text())
def test_normalising_twice_changes_nothing(text):
    assert normalize_entity(normalize_entity(text)) == normalize_entity(text)


def test_grounded_means_whole_words():
    words = f" {' '.join(entity_words('Ada (1815–1852), the mathematician, knew Timmons.'))} "
    assert grounded("ADA", words)
    assert grounded("1815", words)
    assert grounded("a mathematician", words)
    assert not grounded("Tim", words)
    assert not grounded("Ada knew", words)


def test_similarities_of_the_fields():
    gold = [Triple("Ada", "job", "lawyer")]
    predicted = [
        Triple("ada", "Job", "Lawyer"),
        Triple("Ada", "job", "attorney"),
        Triple("Ada", "job", "judge"),
        Triple("Bob", "job", "lawyer"),
    ]
    similar = FieldVectors([*gold, *predicted], embed).similarities(predicted, gold)
    assert similar.shape == (3, 4, 1)
    assert similar[0, :, 0] == pytest.approx([1.0, 1.0, 1.0, 0.0])
    assert similar[1, :, 0] == pytest.approx([1.0, 1.0, 1.0, 1.0])
    assert similar[2, :, 0] == pytest.approx([1.0, 0.9, 0.6, 1.0])


def test_other_numbers_are_never_similar():
    def same(texts):
        return np.ones((len(texts), 4))

    gold, predicted = [Triple("x", "year", "1958")], [Triple("x", "year", "1959"), Triple("x", "in year", "1958 AD")]
    similar = FieldVectors([*gold, *predicted], same).similarities(predicted, gold)
    assert similar[2, :, 0] == pytest.approx([0.0, 1.0])


def test_each_text_is_embedded_once():
    asked = []

    def counting(texts):
        asked.extend(texts)
        return np.ones((len(texts), 2))

    FieldVectors([Triple("a", "b", "c"), Triple("a", "B", "d")], counting)
    assert sorted(asked) == ["a", "b", "c", "d"]


def test_a_broken_embedder_is_named():
    with pytest.raises(ValueError, match=r"shape \(1, 2\) for 3 texts"):
        FieldVectors([Triple("a", "b", "c")], lambda texts: np.ones((1, 2)))


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
    assert soft_matches(fields, Thresholds(entity=0.5)) == best_by_trying(similar >= 0.5)


def test_a_greedy_choice_would_lose_a_match():
    assert soft_matches(np.array([[[0.95, 0.8], [0.9, 0.1]]] * 3), Thresholds()) == 2


def test_every_field_has_to_reach_its_threshold():
    def matches(*cosines):
        return soft_matches(np.array(cosines).reshape(3, 1, 1), Thresholds(entity=0.75, predicate=0.6))

    assert matches(0.75, 0.6, 0.75) == 1
    assert matches(0.74, 1.0, 1.0) == matches(1.0, 0.59, 1.0) == matches(1.0, 1.0, 0.74) == 0


@pytest.mark.parametrize("wrong", [{"entity": 0}, {"predicate": 1.5}, {"entity": -1}])
def test_unusable_thresholds(wrong):
    with pytest.raises(ValueError, match=r"threshold .*: it must be above 0 and at most 1"):
        Thresholds(**wrong)


def test_fields_are_counted_along_the_alignment():
    gold = [("a", "p", "x"), ("b", "q", "y")]
    assert aligned_fields([("a", "p", "x"), ("b", "r", "y")], gold) == (2, 1, 2)
    assert aligned_fields([("b", "q", "y"), ("a", "p", "x")], gold) == (2, 2, 2)
    assert aligned_fields([("a", "q", "y")], gold) == (0, 1, 1)
    assert aligned_fields([], gold) == aligned_fields(gold, []) == (0, 0, 0)
