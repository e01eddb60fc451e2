import pytest

from tripletune.data_builders.hotpotqa_subq.wording import joined_question, mentions, relation_question, tidy_question


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
