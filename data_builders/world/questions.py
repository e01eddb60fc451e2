"""Questions about the fictional world (chains of one to four hops, comparisons, intersections) and common knowledge.

Every relation has one object, so a question that names its first entity and follows relations has one answer.

Questions of common knowledge need no retrieval; beside questions about coined names, they teach the planner when
`[NO_RETRIEVAL]` is right (RAS, section 3.4). Every such fact has three or more wordings, and each split has its own, so
no question text is in two splits. Most facts of a split are also in the training split, in other words.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, islice, pairwise
from operator import itemgetter
from string import ascii_uppercase

from tripletune.data_builders.questions import CHAIN_KINDS, COMPARISON, INTERSECTION
from tripletune.data_builders.world import (
    RELATION_OF,
    RELATIONS,
    RELATIONS_OF_KIND,
    SPLITS,
    WH_WORDS,
    WORLD,
    Entity,
    Relation,
)

COMMON = "common"
KINDS: tuple[str, ...] = (*CHAIN_KINDS, COMPARISON, INTERSECTION, COMMON)
_ATTEMPTS = 2000
_YES_NO = 0.4
_CLOSEST_YEARS = 5
_CLOSEST_RATIO = 1.15
# Nobody asks for "the birthplace of the spouse of …" through three people.
_MOST_OF_A_KIND = 2
_WITH_KIND = ("film", "novel", "album", "band", "company", "club")


@dataclass(frozen=True, slots=True)
class WorldQuestion:
    """A question, its answer, and the facts that lead to the answer.

    Attributes:
        kind: A member of `KINDS`.
        helpful: Titles of the gold documents in reasoning order.
        predicates: The fact to read in each document.
        subqueries: The sub-query for each document.
        test: "less", "more" or "same" for comparisons, else "".
    """

    kind: str
    text: str
    answer: str
    helpful: tuple[str, ...] = ()
    predicates: tuple[str, ...] = ()
    subqueries: tuple[str, ...] = ()
    test: str = ""


class QuestionMaker:
    """Draws distinct questions about a world, given as entities by title.

    Args:
        relations: Predicates of questions.
        wordings: See `build.WorldOptions`; -N keeps at least one wording.
        other_wordings: Use the wordings that `wordings` leaves out.
    """

    def __init__(
        self,
        rng: random.Random,
        world: Mapping[str, Entity],
        relations: Sequence[Relation] = RELATIONS,
        wordings: int = 0,
        other_wordings: bool = False,
    ) -> None:
        self._rng = rng
        self._world = world
        self._wordings, self._others = wordings, other_wordings
        self._of = {kind: [e for e in world.values() if e.kind == kind] for kind in RELATIONS_OF_KIND}
        self._subjects = defaultdict[tuple[str, str], list[tuple[Relation, Entity]]](list)
        for entity in world.values():
            for predicate, object_ in entity.facts.items():
                if (relation := RELATION_OF[entity.kind, predicate]) in relations:
                    self._subjects[relation.target, object_].append((relation, entity))
        self._decks: dict[str, Iterator[tuple[Relation, ...]]] = {
            kind: self._deal(_paths(hops, relations)) for hops, kind in enumerate(CHAIN_KINDS, 1)
        }
        self._decks["order"] = self._deal([(r,) for r in relations if r.less or r.more])
        self._decks["same"] = self._deal([(r,) for r in relations if r.same])
        self._shared = [
            key
            for key, pairs in self._subjects.items()
            if key[0] in WH_WORDS and sum(bool(relation.act) for relation, _ in pairs) > 1
        ]
        self._drawn: set[tuple[str, ...]] = set()

    def draw(self, kind: str) -> WorldQuestion:
        """Make a new question of one kind."""
        attempt = self._attempt(kind)
        for _ in range(_ATTEMPTS):
            question = attempt()
            if question is None:
                continue
            # "A or B?" and "B or A?" count as one question.
            named = question.helpful[:1] if kind in CHAIN_KINDS else question.helpful
            key = (kind, *sorted(named), *sorted(question.predicates), question.test)
            if key not in self._drawn and not _leaks(question):
                self._drawn.add(key)
                return question
        raise ValueError(
            f"a world of {len(self._world)} articles has no further {kind} question: raise articles_per_question, "
            "lower the weight of this kind, set fewer questions, or set more relations in about"
        )

    def _attempt(self, kind: str) -> Callable[[], WorldQuestion | None]:
        # The yes/no side is drawn once and kept while attempts fail: pairs that share something are rarer than pairs
        # that do not, so drawing the side again would make most answers "no".
        if kind in CHAIN_KINDS:
            return partial(self._chain, kind)
        if kind == INTERSECTION:
            return self._intersection
        return partial(self._same, self._rng.random() < 0.5) if self._rng.random() < _YES_NO else self._order

    def _word(self, forms: Sequence[str]) -> str:
        end = self._wordings if self._wordings >= 0 else max(1, len(forms) + self._wordings)
        return self._rng.choice((forms[end:] if self._others else forms[: end or None]) or forms)

    def _deal(self, paths: list[tuple[Relation, ...]]) -> Iterator[tuple[Relation, ...]]:
        # Like a deck of cards, every pattern is used once before any pattern is repeated.
        while paths:
            self._rng.shuffle(paths)
            yield from paths

    def _chain(self, kind: str) -> WorldQuestion | None:
        path = next(self._decks[kind], None)
        if path is None:
            return None
        seed = self._rng.choice(self._of[path[0].kind])
        hops = [seed]
        for relation in path[:-1]:
            object_ = hops[-1].facts.get(relation.predicate)
            if object_ is None:
                return None
            hops.append(self._world[object_])
        answer = hops[-1].facts.get(path[-1].predicate)
        titles = [hop.title for hop in hops]
        if answer is None or len({*titles, answer}) < len(titles) + 1:
            return None
        # Each document must be needed: a bridge's own article names the river of the town it stands in.
        if any(answer in hop.facts.values() for hop in hops[:-1]):
            return None
        phrase = self._named(seed)
        for relation in path[:-1]:
            phrase = self._refer(relation, phrase, nested=relation is not path[0])
        return _question(kind, self._word(path[-1].ask).format(x=phrase), answer, hops, path)

    def _refer(self, relation: Relation, phrase: str, nested: bool) -> str:
        # "the town where the director of X was born" reads well at one level; in deeper phrases {x} must come last.
        forms = [form for form in relation.refer if form.endswith("{x}")] if nested else relation.refer
        return self._word(forms).format(x=phrase)

    def _named(self, entity: Entity) -> str:
        # Avoid "the company Rolira Company".
        named_after = entity.kind in entity.title.lower()
        if entity.kind in _WITH_KIND and not named_after and self._rng.random() < 0.4:
            return f"the {entity.kind} {entity.title}"
        return entity.mention

    def _intersection(self) -> WorldQuestion | None:
        if not self._shared:
            return None
        key = self._rng.choice(self._shared)
        pairs = [pair for pair in self._subjects[key] if pair[0].act]
        (first, one), (second, other) = self._rng.sample(pairs, 2)
        if one is other:
            return None
        a, b = self._named(one), self._named(other)
        if first.act == second.act:
            a, b = one.mention, other.mention
            does = first.act.format(x=self._rng.choice([f"both {a} and {b}", f"{a} as well as {b}"]))
        else:
            link = self._rng.choice(["and", "and also"])
            does = f"{first.act.format(x=a)} {link} {second.act.format(x=b)}"
        return _question(INTERSECTION, f"{WH_WORDS[key[0]]} {does}?", key[1], (one, other), (first, second))

    def _order(self) -> WorldQuestion | None:
        (relation,) = next(self._decks["order"], (None,))
        if relation is None:
            return None
        one, other = self._rng.sample(self._of[relation.kind], 2)
        values = [entity.facts.get(relation.predicate) for entity in (one, other)]
        if values[0] is None or values[1] is None or not _far_apart(values[0], values[1]):
            return None
        test = self._rng.choice([name for name in ("less", "more") if getattr(relation, name)])
        first_is_less = number_in(values[0]) < number_in(values[1])
        winner = one if first_is_less == (test == "less") else other
        return self._compare(relation, test, one, other, winner.title)

    def _same(self, equal: bool) -> WorldQuestion | None:
        (relation,) = next(self._decks["same"], (None,))
        if relation is None:
            return None
        with_fact = [e for e in self._rng.sample(self._of[relation.kind], 3) if relation.predicate in e.facts]
        if not with_fact:
            return None
        one = with_fact[0]
        if equal:
            peers = self._subjects[relation.target, one.facts[relation.predicate]]
            others = [e for r, e in peers if r is relation and e is not one]
        else:
            others = [e for e in with_fact if e.facts[relation.predicate] != one.facts[relation.predicate]]
        if not others:
            return None
        return self._compare(relation, "same", one, self._rng.choice(others), "yes" if equal else "no")

    def _compare(self, relation: Relation, test: str, one: Entity, other: Entity, answer: str) -> WorldQuestion:
        text = self._word(getattr(relation, test)).format(a=one.mention, b=other.mention)
        return _question(COMPARISON, text, answer, (one, other), (relation, relation), test)


def number_in(text: str) -> int:
    """The number in a value such as "312 km" or "48,200"."""
    return int("".join(filter(str.isdigit, text)))


def _paths(hops: int, relations: Sequence[Relation]) -> list[tuple[Relation, ...]]:
    paths: list[tuple[Relation, ...]] = [(relation,) for relation in relations if relation.target or hops == 1]
    for length in range(2, hops + 1):
        paths = [
            (*path, relation)
            for path in paths
            for relation in RELATIONS_OF_KIND[path[-1].target]
            if relation in relations
            and all(step.predicate != relation.predicate for step in path)
            and [step.kind for step in path].count(relation.kind) < _MOST_OF_A_KIND
            and (relation.target or length == hops)
        ]
    return paths


def _far_apart(one: str, other: str) -> bool:
    low, high = sorted((number_in(one), number_in(other)))
    is_year = one.isdigit() and other.isdigit()
    return high - low >= _CLOSEST_YEARS if is_year else high >= _CLOSEST_RATIO * low


def _question(
    kind: str, text: str, answer: str, hops: Sequence[Entity], path: Sequence[Relation], test: str = ""
) -> WorldQuestion:
    titles, predicates = tuple(hop.title for hop in hops), tuple(relation.predicate for relation in path)
    subqueries = tuple(_sentence(relation.ask[0].format(x=hop.mention)) for relation, hop in zip(path, hops))
    return WorldQuestion(kind, _sentence(text), answer, titles, predicates, subqueries, test)


def _leaks(question: WorldQuestion) -> bool:
    """Whether a sub-query or the question of a chain contains the answer."""
    texts = () if question.kind == COMPARISON else (question.text, *question.subqueries)
    return any(question.answer.lower() in text.lower() for text in texts)


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


# Common knowledge -----------------------------------------------------------------------------------------------------

# A piece of common knowledge: its wordings, three or more, and its answer.
_Fact = tuple[list[str], str]
# The facts of a family are sorted, the plainest first, and are used up in groups of this size.
_GROUP = 6


def common_questions(rng: random.Random, split: str, count: int) -> list[WorldQuestion]:
    """Distinct questions of common knowledge, from all families in turn, plainest first; then larger sums."""
    chosen = list(islice(_in_turn([_asked(rng, family, split) for family in _families()]), count))
    if len(chosen) < count:
        large_sums = _facts("sum", ((a, b, a + b) for a in range(1, 200) for b in range(11, 200)))
        chosen += islice(_asked(rng, large_sums, split), count - len(chosen))
    if len(chosen) < count:
        raise ValueError(
            f"{count} common-knowledge questions were set for the split {split!r}, but only {len(chosen)} exist: "
            "lower common_knowledge or the number of questions"
        )
    return chosen


def _asked(rng: random.Random, facts: Iterable[_Fact], split: str) -> Iterator[WorldQuestion]:
    """The questions of one split: every fact once, in groups, then again in its other wordings."""
    left = []
    for number, (wordings, answer) in enumerate(facts):
        # The held-out wording moves from fact to fact, so that training also has every wording.
        owner = {number % len(wordings): "test", (number + 1) % len(wordings): "validation"}
        left.append(([text for i, text in enumerate(wordings) if owner.get(i, SPLITS[0]) == split], answer))
    while left:
        for start in range(0, len(left), _GROUP):
            group = left[start : start + _GROUP]
            rng.shuffle(group)
            for wordings, answer in group:
                yield WorldQuestion(COMMON, wordings.pop(rng.randrange(len(wordings))), answer)
        left = [(wordings, answer) for wordings, answer in left if wordings]


def _in_turn(streams: list[Iterator[WorldQuestion]]) -> Iterator[WorldQuestion]:
    while streams:
        for stream in list(streams):
            if question := next(stream, None):
                yield question
            else:
                streams.remove(stream)


def _families() -> list[Iterable[_Fact]]:
    ten = range(1, 11)
    return [
        _facts("sum", sorted(((a, b, a + b) for a in ten for b in ten), key=itemgetter(2))),
        _facts("difference", ((a, b, a - b) for a in range(2, 11) for b in range(1, a))),
        _facts("product", sorted(((a, b, a * b) for a in ten for b in (2, 3, 5, 10)), key=itemgetter(2))),
        _facts("next number", pairwise(range(1, 100))),
        _facts("capital", _rows("capital")),
        _facts("opposite", _rows("opposite")),
        _sizes(),
        _facts("count", ((text, _indirect(text), number) for text, number in _rows("count"))),
        _facts("colour", _rows("colour")),
        _facts("baby", _rows("baby")),
        _calendar(),
        _facts("next letter", pairwise(ascii_uppercase)),
    ]


def _facts(family: str, rows: Iterable[Sequence[object]]) -> Iterator[_Fact]:
    """Facts from rows: the last value is the answer, the other values fill `{0}`, `{1}` of the family's wordings."""
    for *values, answer in rows:
        yield [wording.format(*values) for wording in WORLD["common"]["wordings"][family]], str(answer)


def _rows(name: str) -> list[list[str]]:
    return [row.rsplit(maxsplit=1) for row in WORLD["common"][name].split(", ")]


def _sizes() -> Iterator[_Fact]:
    # The further apart two things are on a scale, the plainer the question.
    places = sorted(combinations(range(10), 2), key=lambda pair: pair[0] - pair[1])
    scales = [scale.split(", ") for scale in WORLD["common"]["largest_first"]]
    for larger, smaller in ((scale[i], scale[j]) for i, j in places if j - i > 1 for scale in scales):
        yield from _facts("larger", [(larger, smaller, larger)])
        yield from _facts("smaller", [(larger, smaller, smaller)])


def _indirect(text: str) -> str:
    """ "legs does a dog have" -> "legs a dog has", for an indirect question."""
    noun, _, rest = text.partition(" does ")
    return f"{noun} {rest.removesuffix(' have')} has" if rest else text.replace(" are in ", " there are in ")


def _calendar() -> Iterator[_Fact]:
    for word, text in WORLD["common"]["calendar"].items():
        names = text.split()
        pairs = list(zip(names, [*names[1:], names[0]]))
        yield from _facts("after", ((word, one, following) for one, following in pairs))
        yield from _facts("before", ((word, following, one) for one, following in pairs))
