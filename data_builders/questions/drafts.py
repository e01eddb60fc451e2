"""Draft questions over the facts of a split: chains, comparisons and intersections.

A chain follows relations with one object in the whole corpus, so a question that names the first entity has one answer.
Each fact of a chain is in another passage, and no passage names the object of a later fact. Each fact of an
intersection fits several entities, but only one entity fits both facts.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from tripletune.data_builders.datasets.split import drawn_number
from tripletune.data_builders.questions import CHAIN_KINDS, COMPARISON, INTERSECTION, QuestionKind
from tripletune.data_builders.questions.facts import (
    ComparisonTest,
    Draft,
    FactGraph,
    FactSide,
    NormalizedFact,
    StatedFact,
)
from tripletune.data_builders.questions.names import Quantity, is_name, name_key, read_quantity

CROSSING = "paths whose passages lie in both parts, dropped"
# Facts that a step chooses from.
_CHOICES = 40
# Passes over the first facts without a new draft that end a kind.
_IDLE_PASSES = 6
# Maximum questions of a kind that use one fact.
_USES = 4
# Share of the facts without a number that begin a comparison.
_YES_NO_SHARE = 0.4
_SMALLER: Final = "smaller or earlier"
_LARGER: Final = "larger or later"
_EQUAL: Final = "yes or no"


def draft_questions(
    graph: FactGraph, passages: set[int], weights: Mapping[QuestionKind, float], seed: int, counts: Counter[str]
) -> Iterator[Draft]:
    """Yield distinct drafts; each comes from the kind that is furthest behind its weight.

    So the first drafts already have the wanted shares, however many of them are used.

    Args:
        passages: Numbers of the split's passages; all facts of a draft are in them.
        weights: The weight of each kind of question; a kind without further drafts is replaced by the others.
        counts: Counts drafts with facts of both splits, under `CROSSING`.
    """
    streams: dict[QuestionKind, Iterator[Draft]] = {}
    for kind in weights:
        streams[kind] = _DraftStream(graph, kind, passages, f"{seed}/{kind}").drafts(counts)
    taken = Counter[QuestionKind]()
    while streams:
        kind = min(streams, key=lambda kind: (taken[kind] + 0.5) / weights[kind])
        taken[kind] += 1
        draft = next(streams[kind], None)
        if draft is None:
            del streams[kind]
        else:
            yield draft


class _DraftStream:
    """Makes the drafts of one kind.

    Order and choices depend on the first fact, so if a document changes, most drafts and their calls stay the same.

    Args:
        graph: The facts, by the entities that they connect.
        kind: The kind of questions.
        passages: Places of the passages whose facts a draft may begin with.
        seed: Seed of order and choices.
    """

    def __init__(self, graph: FactGraph, kind: QuestionKind, passages: set[int], seed: str) -> None:
        self._graph = graph
        self._kind = kind
        self._passages = passages
        self._seed = seed
        # The facts that a draft may begin with.
        self._starts: list[StatedFact] = []
        for fact in graph.facts:
            if fact.passage in passages and (kind == INTERSECTION or graph.is_single(fact)):
                self._starts.append(fact)
        # The facts that may be the second fact, by predicate (comparison) or by entity (intersection).
        self._partners: dict[str, list[StatedFact]] = defaultdict(list)
        for fact in self._starts:
            if kind == INTERSECTION:
                self._partners[fact.subject].append(fact)
                self._partners[fact.object].append(fact)
            else:
                self._partners[fact.predicate].append(fact)
        # Number of drafts by their answer "yes" or "no".
        self._equality_answers: Counter[str] = Counter()

    def drafts(self, counts: Counter[str]) -> Iterator[Draft]:
        """Yield distinct drafts; each pass makes one draft per possible first fact.

        A first fact has many continuations and partners, so passes are repeated until several give nothing new. Each
        pass has an order of its own, since the limit of uses per fact would favour the facts that come first.

        A draft that crosses the split or whose facts are used up can't fit later, so it enters `seen` before these
        tests, and a crossing one is counted once. A surplus "no" does not, since it fits after the next "yes".

        Args:
            counts: Counts drafts with facts of both splits, each once, under `CROSSING`.
        """
        seen: set[str] = set()
        uses: Counter[NormalizedFact] = Counter()
        passes = 0
        idle_passes = 0
        while idle_passes < _IDLE_PASSES:
            passes += 1
            idle_passes += 1
            self._starts.sort(key=lambda fact: drawn_number(passes, f"{self._seed} {fact.normalized}"))
            for start in self._starts:
                draft = self._draft_from(start, random.Random(f"{self._seed}/{passes}/{start.normalized}"))
                if draft is None or draft.id in seen or self._is_surplus(draft):
                    continue
                seen.add(draft.id)
                if not self._is_inside(draft):
                    counts[CROSSING] += 1
                    continue
                facts = [fact.normalized for fact in draft.facts]
                if max(uses[fact] for fact in facts) < _USES:
                    uses.update(facts)
                    idle_passes = 0
                    if draft.test == _EQUAL:
                        self._equality_answers[draft.answer] += 1
                    yield draft

    def _is_surplus(self, draft: Draft) -> bool:
        """Whether the draft's answer, "yes" or "no", already leads the other by one.

        Few pairs of facts share a value and nearly all others do not, so without this limit most answers are "no", and
        a model that always says "no" scores well. Guarded by `test_yes_and_no_are_equally_frequent`.
        """
        if draft.test != _EQUAL:
            return False
        other = "no" if draft.answer == "yes" else "yes"
        return self._equality_answers[draft.answer] > self._equality_answers[other]

    def _is_inside(self, draft: Draft) -> bool:
        """Whether all passages of a draft are the split's; else a test question would be about a training passage."""
        return self._passages.issuperset(fact.passage for fact in draft.facts)

    def _draft_from(self, start: StatedFact, rng: random.Random) -> Draft | None:
        """A draft of this kind that begins with a fact; None if the graph has none or the draw does not fit."""
        if self._kind == COMPARISON:
            return self._draft_comparison(start, rng)
        if self._kind == INTERSECTION:
            return self._draft_intersection(start, rng)
        return self._draft_chain(start, rng)

    def _draft_chain(self, start: StatedFact, rng: random.Random) -> Draft | None:
        """A question for the object at the end of a path.

        A path that cannot reach its length gives no draft: a shorter one would be of another kind.
        """
        path = [start]
        hops = CHAIN_KINDS.index(self._kind) + 1
        while len(path) < hops:
            continuations = self._graph.continuations(path)
            if not continuations:
                return None
            path.append(rng.choice(continuations))
        return _draft_of_objects(self._kind, path, answer=path[-1].triple.object)

    def _draft_comparison(self, first: StatedFact, rng: random.Random) -> Draft | None:
        """A question which of two entities has the smaller or larger value, or whether two entities share a value.

        Names are only compared where some entities share one, since a question whose answer is always "no" tells
        nothing. The second fact is in another passage, as one passage with both would answer in a single search.
        """
        group = self._partners[first.predicate]
        others = []
        for fact in _sample_facts(group, rng):
            is_other = fact.subject != first.subject and fact.passage != first.passage
            if is_other and self._graph.is_grounded(fact):
                others.append(fact)
        if not self._graph.is_grounded(first):
            return None
        value = read_quantity(first.triple.object)
        if value is not None:
            return _comparison_of_numbers(first, value, others, rng)
        has_shared_values = len({fact.object for fact in group}) < len(group)
        if rng.random() < _YES_NO_SHARE and has_shared_values:
            return _comparison_of_names(first, others, rng)
        return None

    def _draft_intersection(self, first: StatedFact, rng: random.Random) -> Draft | None:
        """A question for the one entity with two facts that others also have; no passage names the other fact's end.

        Names of hubs, such as countries, are not asked for, since too many entities share their facts.
        """
        for entity in (first.subject, first.object):
            side = self._graph.side(first, entity)
            if not is_name(side.name) or self._graph.is_hub(entity):
                continue
            for fact in _sample_facts(self._partners[entity], rng):
                other = self._graph.side(fact, entity)
                if self._identify_together(entity, side, other):
                    given = (side.other_name, other.other_name)
                    return Draft(INTERSECTION, (first, fact), given, (side.name, side.name), side.name)
        return None

    def _identify_together(self, entity: str, side: FactSide, other: FactSide) -> bool:
        """Whether two facts identify an entity, but neither fact nor passage does so alone."""
        if len(side.fitting) == 1 or len(other.fitting) == 1 or side.fitting & other.fitting != {entity}:
            return False
        ends_differ = len({name_key(side.other_name), name_key(other.other_name), entity}) == 3
        if not ends_differ or not self._graph.is_grounded(side.fact) or not self._graph.is_grounded(other.fact):
            return False
        first_tells_second = self._graph.mentions(side.fact, other.other_name)
        second_tells_first = self._graph.mentions(other.fact, side.other_name)
        return not first_tells_second and not second_tells_first


def _comparison_of_numbers(
    first: StatedFact, value: Quantity, others: Sequence[StatedFact], rng: random.Random
) -> Draft | None:
    """A question which of two entities has the smaller or the larger of two numbers; None without two of one unit.

    Equal numbers are left out, because neither entity would be the answer.
    """
    comparable: list[tuple[StatedFact, Quantity]] = []
    for fact in others:
        other_value = read_quantity(fact.triple.object)
        if other_value is not None and other_value.unit == value.unit and other_value.number != value.number:
            comparable.append((fact, other_value))
    if not comparable:
        return None
    second, second_value = rng.choice(comparable)
    tests: list[ComparisonTest] = [_SMALLER, _LARGER]
    test = rng.choice(tests)
    smaller, larger = first, second
    if second_value.number < value.number:
        smaller, larger = second, first
    winner = smaller if test == _SMALLER else larger
    return _draft_of_objects(COMPARISON, [first, second], winner.triple.subject, test)


def _comparison_of_names(first: StatedFact, others: Sequence[StatedFact], rng: random.Random) -> Draft | None:
    """A question whether two entities share a value; None without a partner for the drawn answer.

    The answer is drawn before the partner: a partner drawn at random would nearly always give "no". What is still
    uneven, since "yes" has a partner less often, `_DraftStream._is_surplus` evens out.
    """
    is_yes = rng.random() < 0.5
    fitting = [fact for fact in others if (fact.object == first.object) == is_yes]
    if not fitting:
        return None
    answer = "yes" if is_yes else "no"
    return _draft_of_objects(COMPARISON, [first, rng.choice(fitting)], answer, _EQUAL)


def _draft_of_objects(kind: QuestionKind, facts: Sequence[StatedFact], answer: str, test: ComparisonTest = "") -> Draft:
    """A draft in which each sub-query gives the subject of its fact and asks for the object."""
    subjects, objects = zip(*(fact.names for fact in facts), strict=True)
    return Draft(kind, tuple(facts), subjects, objects, answer, test)


def _sample_facts(facts: Sequence[StatedFact], rng: random.Random) -> list[StatedFact]:
    """At most `_CHOICES` of the facts, in random order, since a popular predicate or entity has thousands."""
    return rng.sample(facts, min(len(facts), _CHOICES))
