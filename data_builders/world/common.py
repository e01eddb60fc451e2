"""Questions of common knowledge, which need no retrieval.

Beside questions about coined names, they teach the planner when `[NO_RETRIEVAL]` is right (RAS, section 3.4). Every
such fact has three or more wordings, and each split has its own, so no question text is in two splits. Most facts of a
split are also in the training split, in other words.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, islice, pairwise, product
from operator import itemgetter
from string import ascii_uppercase
from typing import NamedTuple, TypeAlias

from tripletune.data_builders.world import SPLITS, WORLD, Split
from tripletune.data_builders.world.questions import COMMON, WorldQuestion

# The facts of a family are sorted, the plainest first, and are used up in groups of this size.
_GROUP = 6


# Two numbers, and the answer of the family: sum, difference or product.
_NumberRow: TypeAlias = tuple[int, int, int]


class _Fact(NamedTuple):
    """A piece of common knowledge: its wordings, three or more, and its answer."""

    wordings: list[str]
    answer: str


def common_questions(rng: random.Random, split: Split, count: int) -> list[WorldQuestion]:
    """Distinct questions of common knowledge, from all families in turn, plainest first; then larger sums.

    Small splits thereby have every family, and questions that even a small model can be expected to know. Larger sums
    fill up a split that needs more questions than the families have.

    Raises:
        ValueError: There are fewer questions than `count`.
    """
    families = [_questions_of_split(rng, facts, split) for facts in _facts_by_family()]
    chosen = list(islice(_in_turn(families), count))
    if len(chosen) < count:
        large_sums = _facts_of_rows("sum", _sum_rows(range(1, 200), range(11, 200)))
        chosen += islice(_questions_of_split(rng, large_sums, split), count - len(chosen))
    if len(chosen) < count:
        raise ValueError(
            f"{count} common-knowledge questions were set for the split {split!r}, but only {len(chosen)} exist: "
            "lower common_knowledge or the number of questions"
        )
    return chosen


def _questions_of_split(rng: random.Random, facts: Iterable[_Fact], split: Split) -> Iterator[WorldQuestion]:
    """The questions of one split: every fact once, in groups, then again in its other wordings.

    A small split has only the plainest facts. Facts of a group are shuffled, so that the numbers do not simply grow.
    """
    left = []
    for number, fact in enumerate(facts):
        left.append(_Fact(_wordings_of(fact, number, split), fact.answer))
    while left:
        for start in range(0, len(left), _GROUP):
            group = left[start : start + _GROUP]
            rng.shuffle(group)
            for wordings, answer in group:
                yield WorldQuestion(COMMON, wordings.pop(rng.randrange(len(wordings))), answer)
        left = [fact for fact in left if fact.wordings]


def _wordings_of(fact: _Fact, number: int, split: Split) -> list[str]:
    """The wordings of a fact that belong to a split: one to test, one to validation, the others to train.

    The held-out wordings move with the number of the fact, so that training has every wording of a family.
    """
    owners: dict[int, Split] = {number % len(fact.wordings): "test", (number + 1) % len(fact.wordings): "validation"}
    return [text for place, text in enumerate(fact.wordings) if owners.get(place, SPLITS[0]) == split]


def _in_turn(streams: list[Iterator[WorldQuestion]]) -> Iterator[WorldQuestion]:
    """One question of each stream after the other, until all have ended, so that a small split has every family."""
    while streams:
        for stream in list(streams):
            question = next(stream, None)
            if question is None:
                streams.remove(stream)
            else:
                yield question


def _facts_by_family() -> list[Iterable[_Fact]]:
    """The facts of each family, the plainest first, since small splits use only the first ones.

    The order of the families is the order in which questions take turns.
    """
    one_to_ten = range(1, 11)
    return [
        _facts_of_rows("sum", sorted(_sum_rows(one_to_ten, one_to_ten), key=itemgetter(2))),
        _facts_of_rows("difference", _difference_rows()),
        _facts_of_rows("product", sorted(_product_rows(one_to_ten, (2, 3, 5, 10)), key=itemgetter(2))),
        _facts_of_rows("next number", pairwise(range(1, 100))),
        _facts_of_rows("capital", _rows_of_list("capital")),
        _facts_of_rows("opposite", _rows_of_list("opposite")),
        _size_facts(),
        _facts_of_rows(
            "count", ((text, _as_indirect_question(text), number) for text, number in _rows_of_list("count"))
        ),
        _facts_of_rows("colour", _rows_of_list("colour")),
        _facts_of_rows("baby", _rows_of_list("baby")),
        _calendar_facts(),
        _facts_of_rows("next letter", pairwise(ascii_uppercase)),
    ]


def _facts_of_rows(family: str, rows: Iterable[Sequence[object]]) -> Iterator[_Fact]:
    """Facts from rows: the last value is the answer, the other values fill `{0}`, `{1}` of the family's wordings."""
    for *values, answer in rows:
        wordings = [wording.format(*values) for wording in WORLD["common"]["wordings"][family]]
        yield _Fact(wordings, str(answer))


def _rows_of_list(name: str) -> list[list[str]]:
    """The rows of a list in `world.yaml`: a text, and its last word, which is the answer."""
    return [row.rsplit(maxsplit=1) for row in WORLD["common"][name].split(", ")]


def _sum_rows(left: Iterable[int], right: Iterable[int]) -> Iterator[_NumberRow]:
    """Pairs of numbers with their sum."""
    for a, b in product(left, right):
        yield a, b, a + b


def _difference_rows() -> Iterator[_NumberRow]:
    """Pairs of numbers with their difference, which is never 0 or less."""
    for a in range(2, 11):
        for b in range(1, a):
            yield a, b, a - b


def _product_rows(left: Iterable[int], right: Iterable[int]) -> Iterator[_NumberRow]:
    """Pairs of numbers with their product."""
    for a, b in product(left, right):
        yield a, b, a * b


def _size_facts() -> Iterator[_Fact]:
    """Which of two things is larger, and which is smaller."""
    # The further apart two things are on a scale, the plainer the question; neighbours are not compared.
    pairs = sorted(combinations(range(10), 2), key=lambda pair: pair[0] - pair[1])
    scales = [scale.split(", ") for scale in WORLD["common"]["largest_first"]]
    for i, j in pairs:
        if j - i < 2:
            continue
        for scale in scales:
            larger = scale[i]
            smaller = scale[j]
            yield from _facts_of_rows("larger", [(larger, smaller, larger)])
            yield from _facts_of_rows("smaller", [(larger, smaller, smaller)])


def _as_indirect_question(text: str) -> str:
    """The end of "how many" in an indirect question: "legs a dog has" for "legs does a dog have"."""
    noun, does, owner = text.partition(" does ")
    if not does:
        return text.replace(" are in ", " there are in ")
    return f"{noun} {owner.removesuffix(' have')} has"


def _calendar_facts() -> Iterator[_Fact]:
    """The day or month after another, and before another."""
    for word, text in WORLD["common"]["calendar"].items():
        names = text.split()
        pairs = list(zip(names, [*names[1:], names[0]], strict=True))
        yield from _facts_of_rows("after", ((word, name, following) for name, following in pairs))
        yield from _facts_of_rows("before", ((word, following, name) for name, following in pairs))
