import pytest

from tests.data_builders.subq.test_annotations import question
from tripletune.core.data.questions import DropReason, UnlabelledQuestion
from tripletune.core.data.triples import Triple
from tripletune.data_builders.subq.evidences import name_seen_by_planner, place_evidences


def test_names_that_differ_from_titles_are_placed():
    asked = question(
        ("John, King of England", "John died of dysentery."),
        ("Joan, Lady of Wales", "Daughter of King John."),
        text="What is the cause of death of Joan, Lady Of Wales's father?",
        evidences=[("Joan, Lady of Wales", "father", "King John"), ("John", "cause of death", "dysentery")],
    )
    assert place_evidences(asked) == [1, 0]
    assert name_seen_by_planner(asked, asked.evidences[1], 0, [asked.evidences[0]]) == "King John"


def test_subjects_are_placed_together_not_one_by_one():
    # By itself "Shirvanshah Ali" fits either title; the other subject needs "Abbas Shirvanshah".
    facts = [("Abbas Shirvanshah", "father", "Shirvanshah Ali"), ("Shirvanshah Ali", "father", "Haytham II")]
    passages = ("Abbas Shirvanshah", "Son of Ali."), ("Ali I of Shirvan", "Son of Haytham II.")
    assert place_evidences(question(*passages, evidences=facts)) == [0, 1]
    # All triples of a subject stay together.
    facts = [("Ann", "date of birth", "1900"), ("Bob", "date of birth", "1901"), ("Ann", "date of death", "1950")]
    assert place_evidences(question("Bob", "Ann", evidences=facts)) == [1, 0, 1]


def test_name_that_only_resembles_a_word_of_the_question_is_not_taken_from_it():
    asked = question("John (composer)", text="When was the composer Johnsonville hired born?")
    earlier = [Triple("Song", "composer", "John Smith")]
    assert name_seen_by_planner(asked, Triple("John", "date of birth", "1953"), 0, earlier) == "John Smith"


def test_evidence_without_a_place():
    places = ([], DropReason.NO_ANNOTATION), ([("Zed", "father", "Yod")], DropReason.UNPLACED_EVIDENCE)
    for evidences, expected in places:
        with pytest.raises(UnlabelledQuestion) as caught:
            place_evidences(question("Ann", evidences=evidences))
        assert caught.value.reason is expected
