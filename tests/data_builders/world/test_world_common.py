import random
import re

import pytest

from tripletune.data_builders.world.common import common_questions
from tripletune.data_builders.world.names import SPLITS


def draw(split: str, count: int, seed: int = 1) -> list[tuple[str, str]]:
    return common_questions(random.Random(seed), split, count)


def test_splits_share_no_question_text():
    texts = {split: {question for question, _ in draw(split, 200)} for split in SPLITS}
    assert all(len(found) == 200 for found in texts.values())
    assert not texts["train"] & texts["test"]
    assert not texts["train"] & texts["validation"]
    assert not texts["validation"] & texts["test"]


def test_a_small_draw_has_all_families():
    text = "\n".join(question for question, _ in draw("test", 12))
    for word in (
        "plus|sum",
        "minus|take",
        "times|multiply",
        "number",
        "capital",
        "opposite",
        "bigger|larger|smaller",
        "[Hh]ow many",
    ):
        assert re.search(word, text), word


def test_arithmetic_is_right():
    operations = {"plus": int.__add__, "minus": int.__sub__, "times": int.__mul__}
    checked = 0
    for question, answer in draw("train", 2000):
        match = re.fullmatch(r"(?:What is|How much is) (\d+) (plus|minus|times) (\d+)\?", question)
        if match:
            checked += 1
            assert operations[match[2]](int(match[1]), int(match[3])) == int(answer)
    assert checked > 200


def test_training_meets_every_fact_of_a_smaller_test_split_in_other_words():
    for seed in range(5):
        learned = {answer for _, answer in draw("train", 72, seed)}
        asked = draw("test", 12, seed + 10)
        assert {answer for _, answer in asked} <= learned


@pytest.fixture(scope="module")
def everything():
    return dict(pair for split in SPLITS for pair in draw(split, 1100 if split == "train" else 596))


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("What is the capital of France?", "Paris"),
        ("Which is bigger, an elephant or a mouse?", "an elephant"),
        ("Which is smaller, an elephant or a mouse?", "a mouse"),
        ("What is the opposite of hot?", "cold"),
        ("How many days are in a week?", "7"),
        ("Tell me how many legs a spider has.", "8"),
        ("Which month comes after December?", "January"),
        ("Which number comes right after 86?", "87"),
        ("What letter follows M in the alphabet?", "N"),
    ],
)
def test_known_answers(everything, question, answer):
    assert everything[question] == answer


def test_larger_sums_fill_up_and_too_many_is_an_error():
    questions = draw("test", 3000)
    assert len({question for question, _ in questions}) == 3000
    with pytest.raises(ValueError, match="lower common_knowledge"):
        draw("test", 100_000)


def test_the_seed_decides():
    assert draw("train", 50) == draw("train", 50)
    assert draw("train", 50) != draw("train", 50, seed=2)
