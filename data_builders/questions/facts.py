"""Draft questions over a corpus's triples, not yet in words: paths, comparisons and intersections.

Entities with the same normalised name are joined. A path follows relations with one object in the whole corpus, so a
question that names the first entity has one answer. Each fact of a path is in another passage, and no passage names the
object of a later fact. Each fact of an intersection fits several entities, but only one entity fits both facts.
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
from functools import cache, partial
from typing import Any, NamedTuple

from tripletune.core.data.answers import normalize_answer
from tripletune.core.data.passages import Passage, passage_id
from tripletune.core.data.triples import Triple
from tripletune.data_builders.datasets.split import drawn
from tripletune.data_builders.questions import CHAIN_KINDS, COMPARISON, INTERSECTION
from tripletune.data_builders.subq.searches import BRACKETED

PATH_KINDS = (*CHAIN_KINDS, COMPARISON, INTERSECTION)
CROSSING = "paths whose passages lie in both parts, dropped"
# Maximum words of an answer; facts that a step chooses from; passes without a new draft that end a kind; maximum facts
# that lead to a name on the way to an answer (facts on a country say little about the places in it).
_LONGEST, _CHOICES, _PASSES, _HUB = 8, 40, 6, 50
# Maximum questions of a kind that use one fact; predicates without a clear meaning.
_USES, _VAGUE = 4, ("is", "are", "was", "were", "has", "have", "had")
_YES_NO, _STARTS, _BETTER = 0.4, 12, 1.25
_DATES = ("%d %B %Y", "%B %d, %Y", "%Y-%m-%d", "%B %Y")
_QUANTITY = re.compile(r"((?:about|around|nearly|over|some)?\W*?)([-−–]?\d[\d,.]*)(\D*)")
_POSSESSIVE = re.compile(r"[’']s\b")
key = cache(normalize_answer)


def spoken(text: str) -> str:
    """Prepare a text for `names`; possessive endings are removed."""
    return f" {normalize_answer(_POSSESSIVE.sub('', text))} "


def names(plain: str, name: str) -> bool:
    """Whether a text from `spoken` contains a name; the part of the name in brackets is ignored."""
    return f" {key(BRACKETED.sub('', name) or name)} " in plain


@cache
def is_name(text: str) -> bool:
    """Whether a text names one entity, unlike a year, or "the capital", which differs by document."""
    return not re.sub("^(the|an?) ", "", text, flags=re.IGNORECASE).islower() and quantity(text) is None


def quantity(text: str) -> tuple[str, float] | None:
    """Unit and number of a date, a year or a measure; None for any other text."""
    for form in _DATES:
        with suppress(ValueError):
            return "date", datetime.strptime(text, form).toordinal()
    if match := _QUANTITY.fullmatch(text):
        with suppress(ValueError):
            unit, number = key(f"{match[1]} {match[3]}"), re.sub("[−–]", "-", match[2].strip(",.").replace(",", ""))
            return unit, float(number) * (-1 if unit in ("bc", "bce") else 1)
    return None


class StatedFact(NamedTuple):
    """A triple, the number of its passage, and the normalised parts of the triple."""

    triple: Triple
    passage: int
    subject: str
    predicate: str
    object: str

    @property
    def names(self) -> tuple[str, str]:
        """Subject and object as the triple has them."""
        return self.triple.subject, self.triple.object


@dataclass(frozen=True, slots=True)
class Draft:
    """A question without words.

    Attributes:
        facts: The facts in reasoning order, each from another passage.
        given: The name in each fact's sub-query; `sought` is the name that the sub-query asks for.
        test: The test of a comparison: "smaller or earlier", "larger or later", "yes or no".
    """

    kind: str
    facts: tuple[StatedFact, ...]
    given: tuple[str, ...]
    sought: tuple[str, ...]
    answer: str
    test: str = ""

    @property
    def id(self) -> str:
        """An id from the content; the order of a comparison does not change the id."""
        facts = [fact[2:] for fact in self.facts]
        return passage_id(f"{self.kind} {self.test}", repr(facts if self.kind in CHAIN_KINDS else sorted(facts)))

    @property
    def named(self) -> tuple[str, ...]:
        """Names required in the question."""
        return self.given[:1] if self.kind in CHAIN_KINDS else self.given


class FactGraph:
    """The facts of a corpus, from each passage's triples; `facts` are those fit for questions."""

    def __init__(self, passages: Sequence[Passage], triples: Sequence[Sequence[Triple]]) -> None:
        self._texts = [spoken(passage.content) for passage in passages]
        stated = [
            StatedFact(triple, number, *map(key, triple.as_list()))
            for number, found in enumerate(triples)
            for triple in dict.fromkeys(found)
        ]
        # The objects of a subject and predicate (0), and the subjects of an object and predicate (1).
        self._fits: dict[tuple[str, str, int], set[str]] = defaultdict(set)
        for fact in stated:
            self._fits[fact.subject, fact.predicate, 0].add(fact.object)
            self._fits[fact.object, fact.predicate, 1].add(fact.subject)
        self._leading = Counter(fact.object for fact in stated)
        self.facts = [fact for fact in stated if self._is_usable(fact)]
        # Facts that continue a path, by subject.
        self._next: dict[str, list[StatedFact]] = defaultdict(list)
        for fact in filter(self._is_single, self.facts):
            if self._leading[fact.subject] <= _HUB:
                self._next[fact.subject].append(fact)

    def _is_usable(self, fact: StatedFact) -> bool:
        is_short = len(fact.object.split()) <= _LONGEST and fact.subject != fact.object
        is_clear = is_name(fact.triple.subject) and fact.predicate not in _VAGUE
        return is_short and is_clear and names(self._texts[fact.passage], fact.triple.object)

    def _is_single(self, fact: StatedFact) -> bool:
        return len(self._fits[fact.subject, fact.predicate, 0]) == 1

    def links(self, documents: Sequence[str]) -> Counter[tuple[str, str]]:
        """Number of links between the facts of each pair of documents, given each passage's document."""
        found: Counter[tuple[str, str]] = Counter()
        for fact in filter(self._is_single, self.facts):
            for other in self._next.get(fact.object, ()):
                one, two = sorted((documents[fact.passage], documents[other.passage]))
                found[one, two] += 1
        return found

    def drafts(self, part: set[int], weights: Mapping[str, float], seed: int, counts: Counter[str]) -> Iterator[Draft]:
        """Yield distinct drafts over a part of the passages, with kinds by weight; count `CROSSING` in `counts`."""
        streams = {kind: self._stream(kind, part, f"{seed}/{kind}", counts) for kind in weights}
        taken = Counter[str]()
        while streams:
            kind = min(streams, key=lambda kind: (taken[kind] + 0.5) / weights[kind])
            taken[kind] += 1
            if (draft := next(streams[kind], None)) is None:
                del streams[kind]
            else:
                yield draft

    def _stream(self, kind: str, part: set[int], seed: str, counts: Counter[str]) -> Iterator[Draft]:
        """Yield the distinct drafts of a kind; each pass makes one draft per possible first fact.

        Order and choices depend on the first fact, so if a document changes, most drafts and their calls stay the same.
        """
        starts = [f for f in self.facts if f.passage in part and (kind == INTERSECTION or self._is_single(f))]
        peers: dict[str, list[StatedFact]] = defaultdict(list)
        for fact in starts:
            for name in (fact.subject, fact.object) if kind == INTERSECTION else (fact.predicate,):
                peers[name].append(fact)
        make: Callable[[StatedFact, Mapping[str, list[StatedFact]], random.Random], Draft | None]
        make = {COMPARISON: self._comparison, INTERSECTION: self._intersection}.get(kind, partial(self._chain, kind))
        seen, uses, idle, turn = set[str](), Counter[tuple[str, str, str]](), 0, 0
        while idle < _PASSES:
            idle, turn = idle + 1, turn + 1
            starts.sort(key=lambda fact: drawn(turn, f"{seed} {fact[2:]}"))
            made = (make(fact, peers, random.Random(f"{seed}/{turn}/{fact[2:]}")) for fact in starts)
            for draft in (found for found in made if found and found.id not in seen):
                seen.add(draft.id)
                if not part.issuperset(fact.passage for fact in draft.facts):
                    counts[CROSSING] += 1
                elif max(uses[fact[2:]] for fact in draft.facts) < _USES:
                    uses.update(fact[2:] for fact in draft.facts)
                    idle = 0
                    yield draft

    def _chain(self, kind: str, start: StatedFact, _: Any, rng: random.Random) -> Draft | None:
        path = [start]
        while len(path) <= CHAIN_KINDS.index(kind):
            steps = [fact for fact in self._next.get(path[-1].object, ()) if self._continues(path, fact)]
            if not steps:
                return None
            path.append(rng.choice(steps))
        subjects, objects = zip(*(fact.names for fact in path))
        return Draft(kind, tuple(path), subjects, objects, objects[-1])

    def _continues(self, path: Sequence[StatedFact], fact: StatedFact) -> bool:
        return not any(
            fact.predicate == one.predicate
            or fact.object == one.subject
            or fact.passage == one.passage
            or names(self._texts[one.passage], fact.triple.object)
            for one in path
        )

    def _says(self, fact: StatedFact) -> bool:
        return all(names(self._texts[fact.passage], name) for name in fact.names)

    def _comparison(self, one: StatedFact, peers: Mapping[str, list[StatedFact]], rng: random.Random) -> Draft | None:
        """Ask which of two entities has the smaller or larger value, or whether two entities share a value."""
        group, mine = peers[one.predicate], quantity(one.triple.object)
        others = (fact for fact in _some(group, rng) if fact.subject != one.subject and fact.passage != one.passage)
        known = list(filter(self._says, others))
        test, answer, values = "yes or no", "no", {fact: quantity(fact.triple.object) for fact in known}
        if mine:
            known = [fact for fact in known if (value := values[fact]) and value[0] == mine[0] and value[1] != mine[1]]
        elif rng.random() < _YES_NO and len({fact.object for fact in group}) < len(group):
            wanted = rng.random() < 0.5
            known = [fact for fact in known if (fact.object == one.object) is wanted]
        else:
            return None
        if not known or not self._says(one):
            return None
        pair = (one, rng.choice(known))
        if mine and (other := values[pair[1]]):
            test = rng.choice(["smaller or earlier", "larger or later"])
            answer = pair[(mine < other) != test.startswith("smaller")].triple.subject
        elif one.object == pair[1].object:
            answer = "yes"
        subjects, objects = zip(*(fact.names for fact in pair))
        return Draft(COMPARISON, pair, subjects, objects, answer, test)

    def _intersection(self, one: StatedFact, peers: Mapping[str, list[StatedFact]], rng: random.Random) -> Draft | None:
        """Ask for the one entity with two facts that others also have; no passage names the end of the other fact."""
        for place, (thing, name) in enumerate(zip((one.subject, one.object), one.names)):
            is_thing = is_name(name) and self._leading[thing] <= _HUB
            for other in _some(peers[thing], rng) if is_thing else ():
                side = 0 if other.subject == thing else 1
                given = one.names[1 - place], other.names[1 - side]
                fits = [
                    self._fits[key(end), fact.predicate, 1 - own]
                    for end, fact, own in zip(given, (one, other), (place, side))
                ]
                if (
                    min(map(len, fits)) > 1
                    and fits[0] & fits[1] == {thing}
                    and len({*map(key, given), thing}) == 3
                    and self._says(one)
                    and self._says(other)
                    and not names(self._texts[one.passage], given[1])
                    and not names(self._texts[other.passage], given[0])
                ):
                    return Draft(INTERSECTION, (one, other), given, (name, name), name)
        return None


def _some(facts: Sequence[StatedFact], rng: random.Random) -> list[StatedFact]:
    return rng.sample(facts, min(len(facts), _CHOICES))


def hold_out(sizes: Mapping[str, int], links: Mapping[tuple[str, str], int], share: float, seed: int) -> set[str]:
    """Documents with about this share of all facts and few links to the other documents.

    From each of several starts, a part grows by the document with the largest share of its links into the part. The
    part with the best ratio of kept to cut links is returned.
    """
    near: dict[str, Counter[str]] = defaultdict(Counter)
    for (one, other), count in links.items():
        near[one][other] = near[other][one] = count
    best, total = (-1.0, set[str]()), sum(sizes.values())
    order = sorted(sizes, key=lambda name: drawn(seed, name))
    for start in sorted(order, key=lambda name: not near[name])[:_STARTS]:
        part, ties, spare, waiting, left = set[str](), Counter[str](), iter(order), [(0.0, start)], 0.9 * share * total
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
        ratio = inside / (1 + touched - inside)
        # A part must be clearly better, so that after a small change the same documents stay held out.
        best = (ratio, part) if ratio > _BETTER * best[0] else best
    return best[1]
