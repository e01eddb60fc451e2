import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tripletune.data_builders.text_to_triples.build import PAPER_ROWS, CountedSplit
from tripletune.models.data.pairs import ExtractionPair


def pairs(count, prefix="text"):
    return [ExtractionPair(f"id{number}", f"{prefix} {number}") for number in range(count)]


def sides(split, rows):
    found = {"train": [], "validation": []}
    for pair, side in split.split(rows):
        found[side].append(pair)
    return found


@settings(deadline=None)
@given(st.integers(1, 80), st.integers(0, 100), st.integers(0, 3), st.randoms(use_true_random=False))
def test_the_count_is_exact_and_the_rows_do_not_depend_on_the_order(total, wanted, seed, chance):
    wanted %= total
    rows = pairs(total)
    first = sides(CountedSplit(wanted, seed), rows)
    shuffled = rows[:]
    chance.shuffle(shuffled)
    second = sides(CountedSplit(wanted, seed), shuffled)
    assert len(first["validation"]) == wanted
    assert {pair.id for pair in first["validation"]} == {pair.id for pair in second["validation"]}
    assert sorted(pair.id for side in first.values() for pair in side) == sorted(pair.id for pair in rows)


@settings(deadline=None)
@given(st.lists(st.integers(0, 12), min_size=2, max_size=60), st.integers(1, 20))
def test_one_text_is_never_on_both_sides(numbers, wanted):
    rows = [ExtractionPair(f"id{place}", f"Text  {n}" if place % 2 else f"text {n}") for place, n in enumerate(numbers)]
    wanted = min(wanted, len(rows) - 1)
    split = CountedSplit(wanted)
    found = sides(split, rows)
    texts = {side: {pair.text.lower().replace(" ", "") for pair in found[side]} for side in found}
    assert not texts["train"] & texts["validation"]
    assert len(found["validation"]) == split.kept <= wanted


def test_growing_data_keeps_most_validation_rows():
    rows = pairs(1000)
    small = {pair.id for pair in sides(CountedSplit(100), rows[:900])["validation"]}
    large = {pair.id for pair in sides(CountedSplit(100), rows)["validation"]}
    assert len(small & large) >= 80


def test_by_default_a_tenth_of_a_small_data_set_and_the_card_says_so():
    split = CountedSplit()
    assert len(sides(split, pairs(57))["validation"]) == 5
    assert f"keeps {PAPER_ROWS:,}" in split.sentence()
    assert "the 5 of 57 pairs" in split.sentence()


def test_by_default_the_papers_number_of_a_large_one():
    split = CountedSplit()
    rows = (ExtractionPair(str(number), str(number)) for number in range(60_000))
    assert sum(side == "validation" for _, side in split.split(rows)) == PAPER_ROWS
    assert "tenth" not in split.sentence()


def test_seeds_draw_differently():
    rows = pairs(200)
    one, two = ({pair.id for pair in sides(CountedSplit(50, seed), rows)["validation"]} for seed in (0, 1))
    assert one != two


def test_too_many_rows_are_an_error():
    with pytest.raises(ValueError, match="validation rows 10: there are only 10 pairs"):
        sides(CountedSplit(10), pairs(10))


def test_few_pairs_wait_in_memory():
    waiting, written = 0, 0
    split = CountedSplit(10)

    def source():
        nonlocal waiting
        for pair in pairs(500):
            waiting = max(waiting, split.total - written)
            yield pair

    random.seed(0)
    for _, side in split.split(source()):
        written += 1
        assert side in ("train", "validation")
    assert waiting <= 11
