"""Tests of the evidence that fits a budget."""

import pytest

from tripletune.core.data.passages import Passage
from tripletune.rag.evidence import Found, _keys_that_fit, best_passages, by_worth


def passage(name, text="."):
    """A passage whose content is its name as title, a line break and a text."""
    return Passage(name, text, name)


FIRST, SECOND, THIRD = [["a1", "a2", "a3"], ["b1"], ["c1", "c2"]]


@pytest.mark.parametrize(
    ("rounds", "ordered"),
    [
        ([FIRST], ["a1", "a2", "a3"]),
        ([FIRST, SECOND, THIRD], ["c1", "b1", "a1", "c2", "a2", "a3"]),
        ([[], SECOND, []], ["b1"]),
        ([], []),
    ],
)
def test_the_best_of_each_round_comes_first_and_the_last_round_before_the_others(rounds, ordered):
    assert by_worth(rounds) == ordered


def test_without_need_nothing_is_left_out_and_the_order_is_that_of_the_search():
    found = Found([[passage("a"), passage("b")], [passage("c"), passage("a")]], [["x", "y"], ["z", "x"]])
    assert found.within(2000) == found.everything()
    assert [item.id for item in found.everything().passages] == ["a", "b", "c"]
    assert found.everything().facts == ["x", "y", "z"]


def test_a_budget_keeps_the_best_of_late_rounds():
    facts = [[f"{name}{number:03}" for number in range(50)] for name in "abc"]
    kept = Found((), facts).within(12).facts
    # 12 tokens are 48 bytes; facts may have half of them: six facts of four bytes, two of each round.
    assert kept == ["a000", "a001", "b000", "b001", "c000", "c001"]
    passages = [[passage(f"{name}{number}") for number in range(5)] for name in "abc"]
    # 16 bytes hold four passages of four.
    assert [item.id for item in Found(passages).within(4).passages] == ["a0", "b0", "c0", "c1"]


def test_a_passage_that_is_too_long_makes_way_for_shorter_ones():
    long = passage("long", "word after word")
    assert [item.id for item in Found([[long, passage("s")]]).within(2).passages] == ["s"]
    (beginning,) = Found([[long]]).within(2).passages
    assert (beginning.id, beginning.text) == ("long", "word aft")


def test_an_item_that_does_not_fit_leaves_its_room_to_later_ones():
    assert _keys_that_fit([("a", 4), ("b", 7), ("a", 4), ("c", 6), ("d", 1)], 10) == {"a", "c"}


def test_the_number_of_passages_in_a_prompt():
    rounds = [[passage("a1"), passage("a2")], [passage("a1"), passage("b2")], [passage("c1"), passage("c2")]]
    assert [item.id for item in best_passages(rounds, 3)] == ["a1", "c1", "c2"]
    assert [item.id for item in best_passages(rounds, 9)] == ["a1", "a2", "b2", "c1", "c2"]
