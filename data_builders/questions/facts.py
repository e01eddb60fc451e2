"""What a corpus's own facts can be asked: paths over its triples, comparisons and intersections, not yet in words.

Entities join by their normalised name. A path follows relations that have one object in the whole corpus, so a question
that names its first entity has one answer; its passages differ, and no earlier one names what a later one is read for.
Each fact of an intersection fits several things, and one thing fits both.
"""

from __future__ import annotations

import heapq
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cache

from tripletune.data_builders.hotpotqa_subq import BRACKETED
from tripletune.data_builders.questions import CHAIN_KINDS, COMPARISON, INTERSECTION
from tripletune.models.data.records import Passage, normalize_answer, passage_id
from tripletune.models.data.triples import Triple

PATH_KINDS = (*CHAIN_KINDS, COMPARISON, INTERSECTION)
CROSSING = "paths whose passages lie in both parts, dropped"
# Words of an object that is asked for; facts that a step chooses from; passes without a new draft that end a kind.
_LONGEST, _CHOICES, _PASSES = 8, 40, 6
_YES_NO, _STARTS = 0.4, 12
_DATES = ("%d %B %Y", "%B %d, %Y", "%Y-%m-%d", "%B %Y")
_QUANTITY = re.compile(r"(\D*?)(\d[\d,.]*)(\D*)")
_POSSESSIVE = re.compile(r"[’']s\b")
key = cache(normalize_answer)


def spoken(text: str) -> str:
    """A text in which `names` finds whole names, also before a possessive."""
    return f" {normalize_answer(_POSSESSIVE.sub('', text))} "


def names(plain: str, name: str) -> bool:
    """Whether a text, as `spoken` gives it, holds a name; what a name has in brackets need not be there."""
    return f" {key(BRACKETED.sub('', name) or name)} " in plain


def is_name(text: str) -> bool:
    """Whether it can name one thing: "the capital", in small letters, is another one in every document."""
    return not re.sub("^(the|an?) ", "", text, flags=re.IGNORECASE).islower()


def quantity(text: str) -> tuple[str, float] | None:
    """Unit and number of a date, a year or a measure; None where there is none."""
    for form in _DATES:
        with suppress(ValueError):
            return "date", datetime.strptime(text, form).toordinal()
    if match := _QUANTITY.fullmatch(text):
        with suppress(ValueError):
            return key(f"{match[1]} {match[3]}"), float(match[2].strip(",.").replace(",", ""))
    return None


@dataclass(frozen=True, slots=True)
class StatedFact:
    """A triple and the number of the passage that states it."""

    triple: Triple
    passage: int

    @property
    def relation(self) -> tuple[str, str]:
        """Subject and predicate, as they are compared."""
        return key(self.triple.subject), key(self.triple.predicate)

    @property
    def ends(self) -> tuple[str, str]:
        """Subject and object."""
        return self.triple.subject, self.triple.object


@dataclass(frozen=True, slots=True)
class Draft:
    """A question without words.

    Attributes:
        facts: In reasoning order, each from another passage.
        given: Of each fact the name that its sub-query holds; `sought`: what it asks for.
        test: Of a comparison: "smaller or earlier", "larger or later", "yes or no".
    """

    kind: str
    facts: tuple[StatedFact, ...]
    given: tuple[str, ...]
    sought: tuple[str, ...]
    answer: str
    test: str = ""

    @property
    def id(self) -> str:
        """Names it by what it asks; in which order two things are compared does not matter."""
        ends = [(*fact.relation, key(fact.triple.object)) for fact in self.facts]
        return passage_id(f"{self.kind} {self.test}", repr(ends if self.kind in CHAIN_KINDS else sorted(ends)))

    @property
    def named(self) -> tuple[str, ...]:
        """Names that the question must hold."""
        return self.given[:1] if self.kind in CHAIN_KINDS else self.given


class FactGraph:
    """The facts of a corpus, given the triples of each passage; `facts` are those that can be asked for."""

    def __init__(self, passages: Sequence[Passage], triples: Sequence[Sequence[Triple]]) -> None:
        self._texts = [spoken(passage.content) for passage in passages]
        # What fits beside a name and a predicate: objects beside a subject, and the other way round.
        self._fits: dict[tuple[str, str, int], set[str]] = defaultdict(set)
        self._of: dict[str, list[StatedFact]] = defaultdict(list)
        for fact in (StatedFact(one, n) for n, found in enumerate(triples) for one in dict.fromkeys(found)):
            ends = [key(name) for name in fact.ends]
            for place in (0, 1):
                self._fits[ends[place], fact.relation[1], place].add(ends[1 - place])
            is_short = len(ends[1].split()) <= _LONGEST and ends[0] != ends[1]
            if is_short and is_name(fact.triple.subject) and names(self._texts[fact.passage], fact.triple.object):
                self._of[ends[0]].append(fact)
        self.facts = [fact for found in self._of.values() for fact in found]

    def _others(self, fact: StatedFact, place: int) -> set[str]:
        """What stands beside one end of a fact, its subject (0) or object, in all facts of its predicate."""
        return self._fits[key(fact.ends[place]), fact.relation[1], place]

    def _is_single(self, fact: StatedFact) -> bool:
        return len(self._others(fact, 0)) == 1

    def links(self, documents: Sequence[str]) -> Counter[tuple[str, str]]:
        """By two documents, given for each passage, how often a fact of one leads to a fact of the other."""
        found: Counter[tuple[str, str]] = Counter()
        for fact in filter(self._is_single, self.facts):
            for other in self._of.get(key(fact.triple.object), ())[:_CHOICES]:
                one, two = sorted((documents[fact.passage], documents[other.passage]))
                found[one, two] += 1
        return found

    def drafts(self, part: set[int], weights: Mapping[str, float], seed: str, counts: Counter[str]) -> Iterator[Draft]:
        """Distinct drafts over a part of the passages; kinds by weight, as long as each has some. Counts `CROSSING`."""
        streams = {kind: self._stream(kind, part, random.Random(f"{seed}/{kind}"), counts) for kind in weights}
        drawn = Counter[str]()
        while streams:
            kind = min(streams, key=lambda kind: (drawn[kind] + 0.5) / weights[kind])
            drawn[kind] += 1
            if (draft := next(streams[kind], None)) is None:
                del streams[kind]
            else:
                yield draft

    def _stream(self, kind: str, part: set[int], rng: random.Random, counts: Counter[str]) -> Iterator[Draft]:
        """The drafts of a kind, each once; a pass over all facts gives one for each that it can start from."""
        starts = [f for f in self.facts if f.passage in part and (kind == INTERSECTION or self._is_single(f))]
        peers: dict[str, list[StatedFact]] = defaultdict(list)
        for fact in starts:
            for name in map(key, fact.ends) if kind == INTERSECTION else fact.relation[1:]:
                peers[name].append(fact)
        make: Callable[[StatedFact, Mapping[str, list[StatedFact]], random.Random], Draft | None]
        make = {COMPARISON: self._comparison, INTERSECTION: self._intersection}.get(
            kind, lambda fact, _, rng: self._chain(fact, kind, rng)
        )
        seen, idle = set[str](), 0
        while idle < _PASSES:
            before = len(seen)
            rng.shuffle(starts)
            for draft in (found for fact in starts if (found := make(fact, peers, rng)) and found.id not in seen):
                seen.add(draft.id)
                if part.issuperset(fact.passage for fact in draft.facts):
                    yield draft
                else:
                    counts[CROSSING] += 1
            idle = idle + 1 if len(seen) == before else 0

    def _chain(self, start: StatedFact, kind: str, rng: random.Random) -> Draft | None:
        path = [start]
        while len(path) <= CHAIN_KINDS.index(kind):
            steps = _some(self._of.get(key(path[-1].triple.object), ()), rng)
            if (step := next((fact for fact in steps if self._continues(path, fact)), None)) is None:
                return None
            path.append(step)
        subjects, objects = zip(*(fact.ends for fact in path))
        return Draft(kind, tuple(path), subjects, objects, objects[-1])

    def _continues(self, path: Sequence[StatedFact], fact: StatedFact) -> bool:
        return self._is_single(fact) and not any(
            fact.relation[1] == one.relation[1]
            or key(fact.triple.object) == one.relation[0]
            or fact.passage == one.passage
            or names(self._texts[one.passage], fact.triple.object)
            for one in path
        )

    def _says(self, fact: StatedFact) -> bool:
        return all(names(self._texts[fact.passage], name) for name in fact.ends)

    def _comparison(self, one: StatedFact, peers: Mapping[str, list[StatedFact]], rng: random.Random) -> Draft | None:
        """Which has less or more; or, of values that several things have, whether two have the same."""
        group = peers[one.relation[1]]
        others = [fact for fact in _some(group, rng) if fact.relation[0] != one.relation[0] and self._says(fact)]
        known = [fact for fact in others if fact.passage != one.passage and self._says(one)]
        mine, test, answer = quantity(one.triple.object), "yes or no", "no"
        same = {fact: key(fact.triple.object) == key(one.triple.object) for fact in known}
        if mine and rng.random() >= _YES_NO:
            values = {fact: value for fact in known if (value := quantity(fact.triple.object)) and not same[fact]}
            others = [fact for fact, value in values.items() if value[0] == mine[0] and value[1] != mine[1]]
            test = rng.choice(["smaller or earlier", "larger or later"])
        else:
            is_shared = len({key(fact.triple.object) for fact in group}) < len(group)
            wanted = rng.random() < 0.5
            others = [fact for fact in known if is_shared and same[fact] is wanted]
        if not others:
            return None
        pair = (one, rng.choice(others))
        if test != "yes or no" and mine:
            is_less = mine[1] < values[pair[1]][1]
            answer = pair[is_less != test.startswith("smaller")].triple.subject
        elif same[pair[1]]:
            answer = "yes"
        subjects, objects = zip(*(fact.ends for fact in pair))
        return Draft(COMPARISON, pair, subjects, objects, answer, test)

    def _intersection(self, one: StatedFact, peers: Mapping[str, list[StatedFact]], rng: random.Random) -> Draft | None:
        """What has two facts, each of which other things have too; no passage names what the other is read for."""
        for place, thing in enumerate(one.ends):
            for other in _some(peers[key(thing)], rng) if is_name(thing) else ():
                side = 0 if key(other.triple.subject) == key(thing) else 1
                given = one.ends[1 - place], other.ends[1 - side]
                fits = self._others(one, 1 - place), self._others(other, 1 - side)
                if (
                    min(map(len, fits)) > 1
                    and fits[0] & fits[1] == {key(thing)}
                    and len({*map(key, given), key(thing)}) == 3
                    and self._says(one)
                    and self._says(other)
                    and not names(self._texts[one.passage], given[1])
                    and not names(self._texts[other.passage], given[0])
                ):
                    return Draft(INTERSECTION, (one, other), given, (thing, thing), thing)
        return None


def _some(facts: Sequence[StatedFact], rng: random.Random) -> list[StatedFact]:
    return rng.sample(facts, min(len(facts), _CHOICES))


def hold_out(sizes: Mapping[str, int], links: Mapping[tuple[str, str], int], share: float, seed: int) -> set[str]:
    """Documents with about this share of all facts, chosen so that few links lead from them to the others.

    From several starts the part grows by the document that the largest share of its links ties to it; the part is
    taken that keeps most links for each one that it cuts.
    """
    near: dict[str, Counter[str]] = defaultdict(Counter)
    for (one, other), count in links.items():
        near[one][other] = near[other][one] = count
    best, total = (-1.0, set[str]()), sum(sizes.values())
    order = random.Random(f"{seed}/documents").sample(sorted(sizes), len(sizes))
    for start in sorted(order, key=lambda name: not near[name])[:_STARTS]:
        part, ties, spare, waiting, left = set[str](), Counter[str](), iter(order), [(0.0, start)], share * total
        while left > 0 and len(part) + 1 < len(sizes):
            one = heapq.heappop(waiting)[1] if waiting else next(spare)
            if one not in part:
                part.add(one)
                left -= sizes[one]
                ties.update(near[one])
                for other in near[one].keys() - part:
                    heapq.heappush(waiting, (-ties[other] / near[other].total(), other))
        inside = sum(count for pair, count in links.items() if part.issuperset(pair))
        touched = sum(count for pair, count in links.items() if not part.isdisjoint(pair))
        best = max(best, (inside / (1 + touched - inside), part), key=lambda found: found[0])
    return best[1]
