"""Common-knowledge questions, which need no retrieval: arithmetic, calendars, capitals, opposites, animals, colours.

Together with questions about coined names they teach the planner when `[NO_RETRIEVAL]` is right (RAS, section 3.4).
Every fact has three wordings or more, of which each split has its own: no question text is in two splits, and a fact
that a split asks for is one that training has met in other words, if training has clearly more questions: the planner
is tested on telling the two sorts of question apart, and the small model behind it on nothing it never saw.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from itertools import combinations, islice, pairwise
from string import ascii_uppercase
from typing import NamedTuple

from tripletune.data_builders.world.names import SPLITS

# Facts of a family stand with the plainest first and are used up in groups of this size.
_GROUP = 6
_CAPITALS = (
    "France Paris, Germany Berlin, Italy Rome, Spain Madrid, Japan Tokyo, China Beijing, Russia Moscow, Greece Athens, "
    "Egypt Cairo, Austria Vienna, Portugal Lisbon, Poland Warsaw, Ireland Dublin, Norway Oslo, Sweden Stockholm, "
    "Denmark Copenhagen, Finland Helsinki, Hungary Budapest, England London, Canada Ottawa, Cuba Havana, Peru Lima, "
    "Belgium Brussels, Kenya Nairobi, Thailand Bangkok, Turkey Ankara, Iran Tehran, Iraq Baghdad"
)
_OPPOSITES = (
    "hot cold, big small, day night, up down, left right, open closed, happy sad, fast slow, old new, young old, "
    "hard soft, light dark, wet dry, rich poor, strong weak, high low, long short, full empty, good bad, true false, "
    "early late, first last, in out, yes no, black white, win lose, love hate, push pull, buy sell, start stop"
)
_LARGEST_FIRST = (
    ("a whale", "an elephant", "a horse", "a sheep", "a dog", "a cat", "a rat", "a mouse", "a bee", "an ant"),
    ("the sun", "the Earth", "the moon", "a city", "a house", "a car", "a chair", "a book", "a spoon", "a coin"),
)
_COUNTS = (
    "days are in a week:7, months are in a year:12, hours are in a day:24, minutes are in an hour:60, "
    "seconds are in a minute:60, legs does a spider have:8, legs does a dog have:4, legs does a cat have:4, "
    "legs does a horse have:4, legs does a bird have:2, legs does an ant have:6, sides does a triangle have:3, "
    "sides does a square have:4, wheels does a bicycle have:2, wheels does a car have:4, "
    "fingers are on one hand:5, eyes does a person have:2, ears does a person have:2, letters are in the alphabet:26, "
    "years are in a century:100, years are in a decade:10, seasons are in a year:4, players are in a football team:11, "
    "weeks are in a year:52, cents are in a dollar:100"
)
_COLOURS = (
    "grass green, the sky blue, snow white, blood red, coal black, milk white, a banana yellow, a lemon yellow, "
    "a strawberry red, a tomato red, a carrot orange, a frog green, the sun yellow, chocolate brown"
)
_BABIES = "dog puppy, cat kitten, cow calf, sheep lamb, horse foal, duck duckling, hen chick, goat kid, pig piglet"
_CALENDAR = {
    "month": "January February March April May June July August September October November December",
    "day": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
}


class Fact(NamedTuple):
    """One piece of common knowledge: its wordings, three or more, and its answer."""

    wordings: tuple[str, ...]
    answer: str


def common_questions(rng: random.Random, split: str, count: int) -> list[tuple[str, str]]:
    """Draw questions about what everybody knows.

    Args:
        rng: Source of chance.
        split: A member of `data_builders.world_names.SPLITS`; splits share no question text.
        count: How many.

    Returns:
        `count` distinct pairs of question and answer, spread evenly over the families of questions, the plainest
        facts first; when the families run out, the rest is arithmetic with larger numbers.

    Raises:
        ValueError: there are not so many questions.
    """
    chosen = list(islice(_in_turn([_questions(rng, family(), split) for family in _FAMILIES]), count))
    if len(chosen) < count:
        chosen += islice(_questions(rng, _large_sums(), split), count - len(chosen))
    if len(chosen) < count:
        raise ValueError(
            f"{count} common-knowledge questions were asked for in the split {split!r} and there are {len(chosen)}: "
            "lower common_knowledge or the number of questions"
        )
    return chosen


def _questions(rng: random.Random, facts: Iterable[Fact], split: str) -> Iterator[tuple[str, str]]:
    """The questions of one split: every fact once in groups, then again in other words as long as there are some."""
    left = [(_wordings_of(fact, number, split), fact.answer) for number, fact in enumerate(facts)]
    while left:
        for start in range(0, len(left), _GROUP):
            group = left[start : start + _GROUP]
            rng.shuffle(group)
            for wordings, answer in group:
                yield wordings.pop(rng.randrange(len(wordings))), answer
        left = [(wordings, answer) for wordings, answer in left if wordings]


def _wordings_of(fact: Fact, number: int, split: str) -> list[str]:
    # The wording that is held out moves from fact to fact, so that each one also occurs in training.
    owner = {number % len(fact.wordings): "test", (number + 1) % len(fact.wordings): "validation"}
    return [wording for i, wording in enumerate(fact.wordings) if owner.get(i, SPLITS[0]) == split]


def _in_turn(streams: list[Iterator[tuple[str, str]]]) -> Iterator[tuple[str, str]]:
    while streams:
        for stream in list(streams):
            question = next(stream, None)
            if question is None:
                streams.remove(stream)
            else:
                yield question


def _table(text: str, separator: str | None = None) -> list[list[str]]:
    return [row.rsplit(separator, 1) for row in text.split(", ")]


def _facts(templates: Iterable[str], rows: Iterable[tuple[object, ...]]) -> Iterator[Fact]:
    """Facts from rows whose last value is the answer and whose others fill `{0}`, `{1}` of the templates."""
    templates = tuple(templates)
    for *values, answer in rows:
        yield Fact(tuple(template.format(*values) for template in templates), str(answer))


_SUM_WORDINGS = ("What is {0} plus {1}?", "How much is {0} plus {1}?", "What is the sum of {0} and {1}?")


def _sums() -> Iterator[Fact]:
    pairs = sorted(((a, b) for a in range(1, 11) for b in range(1, 11)), key=sum)
    return _facts(_SUM_WORDINGS, ((a, b, a + b) for a, b in pairs))


def _large_sums() -> Iterator[Fact]:
    return _facts(_SUM_WORDINGS, ((a, b, a + b) for a in range(1, 200) for b in range(11, 200)))


def _differences() -> Iterator[Fact]:
    wordings = ("What is {0} minus {1}?", "How much is {0} minus {1}?", "What do you get if you take {1} from {0}?")
    return _facts(wordings, ((a, b, a - b) for a in range(2, 11) for b in range(1, a)))


def _products() -> Iterator[Fact]:
    pairs = sorted(((a, b) for a in range(1, 11) for b in (2, 3, 5, 10)), key=lambda pair: pair[0] * pair[1])
    wordings = ("What is {0} times {1}?", "How much is {0} times {1}?", "What do you get if you multiply {0} by {1}?")
    return _facts(wordings, ((a, b, a * b) for a, b in pairs))


def _next_numbers() -> Iterator[Fact]:
    wordings = ("Which number comes after {0}?", "What number follows {0}?", "Which number comes right after {0}?")
    return _facts(wordings, pairwise(range(1, 100)))


def _capitals() -> Iterator[Fact]:
    wordings = (
        "What is the capital of {0}?",
        "Which city is the capital of {0}?",
        "What is the capital city of {0}?",
        "Name the capital of {0}.",
    )
    return _facts(wordings, map(tuple, _table(_CAPITALS)))


def _opposites() -> Iterator[Fact]:
    wordings = (
        "What is the opposite of {0}?",
        "Which word is the opposite of {0}?",
        "What word means the opposite of {0}?",
        "Name the opposite of {0}.",
    )
    return _facts(wordings, map(tuple, _table(_OPPOSITES)))


def _sizes() -> Iterator[Fact]:
    # The further apart two things stand on a scale, the plainer the question.
    places = sorted(combinations(range(10), 2), key=lambda pair: pair[0] - pair[1])
    pairs = [(scale[i], scale[j]) for i, j in places if j - i > 1 for scale in _LARGEST_FIRST]
    for larger, smaller in pairs:
        for words, answer in ((("is bigger", "is larger"), larger), (("is smaller", "one is smaller"), smaller)):
            yield Fact(
                tuple(
                    f"Which {word}, {one} or {other}?"
                    for word in words
                    for one, other in ((larger, smaller), (smaller, larger))
                ),
                answer,
            )


def _counts() -> Iterator[Fact]:
    for text, number in _table(_COUNTS, ":"):
        asked = _indirect(text)
        yield Fact((f"How many {text}?", f"Do you know how many {asked}?", f"Tell me how many {asked}."), number)


def _indirect(text: str) -> str:
    """ "legs does a dog have" -> "legs a dog has", as an indirect question says it."""
    noun, _, rest = text.partition(" does ")
    return f"{noun} {rest.removesuffix(' have')} has" if rest else text.replace(" are in ", " there are in ")


def _colours() -> Iterator[Fact]:
    wordings = (
        "What colour is {0}?",
        "What color is {0}?",
        "Which colour does {0} have?",
        "Name the colour of {0}.",
    )
    return _facts(wordings, map(tuple, _table(_COLOURS)))


def _babies() -> Iterator[Fact]:
    wordings = (
        "What is a baby {0} called?",
        "What do you call a baby {0}?",
        "What is the name for a young {0}?",
        "What is a young {0} called?",
    )
    return _facts(wordings, map(tuple, _table(_BABIES)))


def _calendar() -> Iterator[Fact]:
    after = ("Which {0} comes after {1}?", "What {0} follows {1}?", "Which {0} comes right after {1}?")
    before = ("Which {0} comes before {1}?", "What {0} precedes {1}?", "Which {0} comes right before {1}?")
    for word, text in _CALENDAR.items():
        names = text.split()
        pairs = list(zip(names, [*names[1:], names[0]]))
        yield from _facts(after, ((word, one, following) for one, following in pairs))
        yield from _facts(before, ((word, following, one) for one, following in pairs))


def _alphabet() -> Iterator[Fact]:
    wordings = (
        "Which letter comes after {0} in the alphabet?",
        "What letter follows {0} in the alphabet?",
        "Which letter comes right after {0} in the alphabet?",
    )
    return _facts(wordings, pairwise(ascii_uppercase))


_FAMILIES: tuple[Callable[[], Iterator[Fact]], ...] = (
    _sums,
    _differences,
    _products,
    _next_numbers,
    _capitals,
    _opposites,
    _sizes,
    _counts,
    _colours,
    _babies,
    _calendar,
    _alphabet,
)
