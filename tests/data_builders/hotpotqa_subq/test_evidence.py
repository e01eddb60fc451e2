import pytest

from tripletune.data_builders.hotpotqa_subq.evidence import (
    joined_question,
    mentions,
    place_evidences,
    relation_question,
    spoken_name,
    tidy_question,
)
from tripletune.data_builders.hotpotqa_subq.questions import DropReason, Question, UnlabelledQuestion
from tripletune.models.data.records import Passage
from tripletune.models.data.triples import Triple


def asked(text: str, passages: list[tuple[str, str]], evidences: list[tuple[str, str, str]]) -> Question:
    built = tuple(Passage(*passage) for passage in passages)
    triples = tuple(Triple(*evidence) for evidence in evidences)
    return Question("q", text, ("x",), built, tuple(range(len(built))), "", "test", evidences=triples)


def test_names_that_differ_from_titles_are_placed():
    question = asked(
        "What is the cause of death of Joan, Lady Of Wales's father?",
        [("John, King of England", "John died of dysentery."), ("Joan, Lady of Wales", "Daughter of King John.")],
        [("Joan, Lady of Wales", "father", "King John"), ("John", "cause of death", "dysentery")],
    )
    assert place_evidences(question) == [1, 0]
    assert spoken_name(question, question.evidences[1], 0, [question.evidences[0]]) == "King John"


def test_subjects_are_placed_together_not_one_by_one():
    # By itself "Shirvanshah Ali" fits either title; the other subject needs "Abbas Shirvanshah".
    question = asked(
        "Who is Abbas Shirvanshah's paternal grandfather?",
        [("Abbas Shirvanshah", "Son of Ali."), ("Ali I of Shirvan", "Son of Haytham II.")],
        [("Abbas Shirvanshah", "father", "Shirvanshah Ali"), ("Shirvanshah Ali", "father", "Haytham II")],
    )
    assert place_evidences(question) == [0, 1]


def test_all_triples_of_a_subject_stay_together():
    question = asked(
        "Who lived longer, Ann or Bob?",
        [("Bob", "Bob."), ("Ann", "Ann.")],
        [("Ann", "date of birth", "1900"), ("Bob", "date of birth", "1901"), ("Ann", "date of death", "1950")],
    )
    assert place_evidences(question) == [1, 0, 1]


def test_name_that_only_resembles_a_word_of_the_question_is_not_taken_from_it():
    question = asked(
        "When was the composer Johnsonville hired born?",
        [("John (composer)", "John was born in 1953.")],
        [("John", "date of birth", "1953")],
    )
    earlier = [Triple("Song", "composer", "John Smith")]
    assert spoken_name(question, question.evidences[0], 0, earlier) == "John Smith"


@pytest.mark.parametrize(
    ("evidences", "reason"),
    [([], DropReason.NO_ANNOTATION), ([("Zed", "father", "Yod")], DropReason.UNPLACED_EVIDENCE)],
)
def test_evidence_without_a_place(evidences, reason):
    with pytest.raises(UnlabelledQuestion) as caught:
        place_evidences(asked("Who?", [("Ann", "Ann.")], evidences))
    assert caught.value.reason is reason


@pytest.mark.parametrize(
    ("relation", "expected"),
    [
        ("director", "Who directed {x}?"),
        ("place_of_birth", "Where was {x} born?"),
        ("Chief engineer", "What is the chief engineer of {x}?"),
        ("adapted from", "What is “adapted from” for {x}?"),
    ],
)
def test_relation_question(relation, expected):
    # The subject holds braces: it must be put in as it is.
    assert relation_question("{x}", relation) == expected


def test_joined_question_repeats_nothing():
    assert joined_question(["When was A born?", "When did A die?", "When was A born?"]) == (
        "When was A born and when did A die?"
    )
    assert joined_question(["Who?"]) == "Who?"


@pytest.mark.parametrize(
    ("typed", "tidy"),
    [
        ("how many stores are in  Ohio", "How many stores are in Ohio?"),
        ("Who ruled #1 ?", "Who ruled #1?"),
        ("what was Italy 's currency?", "What was Italy's currency?"),
    ],
)
def test_tidy_question(typed, tidy):
    assert tidy_question(typed) == tidy


def test_mentions_takes_whole_words():
    assert mentions("Born in (New York), 1900.", "new york")
    assert not mentions("The Normans", "Norman")
