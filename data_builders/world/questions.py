"""Questions about the fictional world: chains of one to four hops, comparisons and intersections.

Every relation has one object, so a question that names its first entity and follows relations has one answer.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

from tripletune.data_builders.questions import CHAIN_KINDS, COMPARISON, INTERSECTION, QuestionKind
from tripletune.data_builders.world import RELATION_OF, RELATIONS, RELATIONS_OF_KIND, WH_WORDS, Entity, Relation

WorldKind = QuestionKind | Literal["common"]
COMMON: Final = "common"
KINDS: tuple[WorldKind, ...] = (*CHAIN_KINDS, COMPARISON, INTERSECTION, COMMON)
# What a comparison asks for: the smaller or larger value, or whether two values are equal.
Test = Literal["less", "more", "same", ""]
_ATTEMPTS = 2000
# Share of comparisons with the answer yes or no.
_YES_NO = 0.4
# Values that are closer are not compared: years, and the ratio of other numbers.
_CLOSEST_YEARS = 5
_CLOSEST_RATIO = 1.15
# Chance of "the film X" instead of "X", for the kinds below.
_NAMED_WITH_KIND = 0.4
# Nobody asks for "the birthplace of the spouse of …" through three people.
_MOST_OF_A_KIND = 2
_WITH_KIND = ("film", "novel", "album", "band", "company", "club")


@dataclass(frozen=True, slots=True)
class WorldQuestion:
    """A question, its answer, and the facts that lead to the answer.

    Attributes:
        helpful: Titles of the gold documents in reasoning order.
        predicates: The fact to read in each document.
        subqueries: The sub-query for each document.
        test: What a comparison asks for; "" for other questions.
    """

    kind: WorldKind
    text: str
    answer: str
    helpful: tuple[str, ...] = ()
    predicates: tuple[str, ...] = ()
    subqueries: tuple[str, ...] = ()
    test: Test = ""


# Relations to follow from an entity.
_Path = tuple[Relation, ...]


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
        self._wordings = wordings
        self._other_wordings = other_wordings
        self._of_kind: dict[str, list[Entity]] = {kind: [] for kind in RELATIONS_OF_KIND}
        # (kind of the object, object) -> the relations that have it, with their subjects.
        self._subjects = defaultdict[tuple[str, str], list[tuple[Relation, Entity]]](list)
        for entity in world.values():
            self._of_kind[entity.kind].append(entity)
            for predicate, object_ in entity.facts.items():
                relation = RELATION_OF[entity.kind, predicate]
                if relation in relations:
                    self._subjects[relation.target, object_].append((relation, entity))
        self._chain_decks: dict[WorldKind, Iterator[_Path]] = {}
        for hops, kind in enumerate(CHAIN_KINDS, 1):
            self._chain_decks[kind] = self._deal_paths(_paths_of_length(hops, relations))
        self._order_deck = self._deal_paths([(relation,) for relation in relations if relation.less or relation.more])
        self._same_deck = self._deal_paths([(relation,) for relation in relations if relation.same])
        # Objects that an intersection can ask for, since two facts say what they do.
        self._shared = []
        for key, facts in self._subjects.items():
            object_kind, _ = key
            if object_kind in WH_WORDS and len([relation for relation, _ in facts if relation.act]) > 1:
                self._shared.append(key)
        self._drawn: set[tuple[str, ...]] = set()

    def draw(self, kind: WorldKind) -> WorldQuestion:
        """Make a question of one kind that differs from all questions drawn before.

        A draw may not fit: a fact may be missing, or the question may be known already or name its answer. It is then
        tried again.

        Raises:
            ValueError: The world seems to have no further question of this kind, after `_ATTEMPTS` attempts.
        """
        attempt = self._maker_of(kind)
        for _ in range(_ATTEMPTS):
            question = attempt()
            if question is None:
                continue
            # "A or B?" and "B or A?" count as one question.
            named = question.helpful[:1] if kind in CHAIN_KINDS else question.helpful
            key = (kind, *sorted(named), *sorted(question.predicates), question.test)
            if key not in self._drawn and not _names_answer(question):
                self._drawn.add(key)
                return question
        raise ValueError(
            f"a world of {len(self._world)} articles has no further {kind} question: raise articles_per_question, "
            "lower the weight of this kind, set fewer questions, or set more relations in about"
        )

    def _maker_of(self, kind: WorldKind) -> Callable[[], WorldQuestion | None]:
        """A function that tries to make a question of one kind, and returns None if its draws don't fit."""
        if kind in CHAIN_KINDS:
            return partial(self._draw_chain, kind)
        if kind == INTERSECTION:
            return self._draw_intersection
        if self._rng.random() >= _YES_NO:
            return self._draw_order_comparison
        # The yes/no side is drawn once and kept while attempts fail: pairs that share something are rarer than pairs
        # that do not, so drawing the side again would make most answers "no".
        return partial(self._draw_equality_comparison, self._rng.random() < 0.5)

    def _draw_wording(self, forms: Sequence[str]) -> str:
        """Draw one of the wordings that the options allow, or of all if they allow none."""
        first_left_out = self._wordings
        if self._wordings < 0:
            first_left_out = max(1, len(forms) + self._wordings)
        if self._other_wordings:
            allowed = forms[first_left_out:]
        elif first_left_out:
            allowed = forms[:first_left_out]
        else:
            allowed = forms
        return self._rng.choice(allowed or forms)

    def _deal_paths(self, paths: list[_Path]) -> Iterator[_Path]:
        """Yield the paths like cards of a deck: every pattern is used once before any pattern is repeated."""
        while paths:
            self._rng.shuffle(paths)
            yield from paths

    def _draw_chain(self, kind: WorldKind) -> WorldQuestion | None:
        """A question that follows a path from an entity; None if a fact is missing or a document would not be needed.

        A path that leads back to one of its entities, or whose answer an earlier article names, has fewer hops than it
        says.
        """
        path = next(self._chain_decks[kind], None)
        if path is None:
            return None
        first_entity = self._rng.choice(self._of_kind[path[0].kind])
        hops = [first_entity]
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
        phrase = self._name_in_question(first_entity)
        for relation in path[:-1]:
            phrase = self._phrase_for_object(relation, phrase, nested=relation is not path[0])
        return _question_along_path(kind, self._draw_wording(path[-1].ask).format(x=phrase), answer, hops, path)

    def _phrase_for_object(self, relation: Relation, phrase: str, nested: bool) -> str:
        """A phrase for the object of a relation, around the phrase for its subject: "the director of X"."""
        forms = relation.refer
        if nested:
            # "the town where the director of X was born" reads well at one level; in deeper phrases {x} must come last.
            forms = tuple(form for form in forms if form.endswith("{x}"))
        return self._draw_wording(forms).format(x=phrase)

    def _name_in_question(self, entity: Entity) -> str:
        """An entity in a question, sometimes with its kind ("the film X"), unless its name says the kind."""
        # Avoid "the company Rolira Company".
        name_says_kind = entity.kind in entity.title.lower()
        if entity.kind in _WITH_KIND and not name_says_kind and self._rng.random() < _NAMED_WITH_KIND:
            return f"the {entity.kind} {entity.title}"
        return entity.mention

    def _draw_intersection(self) -> WorldQuestion | None:
        """A question for the one object of two facts of different entities; None if the two facts are of one entity.

        If both facts are told by the same words, they are joined ("directed both A and B").
        """
        if not self._shared:
            return None
        key = self._rng.choice(self._shared)
        with_act = [fact for fact in self._subjects[key] if fact[0].act]
        (relation_a, a), (relation_b, b) = self._rng.sample(with_act, 2)
        if a is b:
            return None
        name_a = self._name_in_question(a)
        name_b = self._name_in_question(b)
        if relation_a.act == relation_b.act:
            both = [f"both {a.mention} and {b.mention}", f"{a.mention} as well as {b.mention}"]
            acts = relation_a.act.format(x=self._rng.choice(both))
        else:
            link = self._rng.choice(["and", "and also"])
            acts = f"{relation_a.act.format(x=name_a)} {link} {relation_b.act.format(x=name_b)}"
        kind, answer = key
        return _question_along_path(INTERSECTION, f"{WH_WORDS[kind]} {acts}?", answer, (a, b), (relation_a, relation_b))

    def _draw_order_comparison(self) -> WorldQuestion | None:
        """A question which of two entities has less or more; None if a value is missing or both are too close.

        The test is drawn among those that the relation has words for, and the winner follows from it.
        """
        path = next(self._order_deck, None)
        if path is None:
            return None
        (relation,) = path
        a, b = self._rng.sample(self._of_kind[relation.kind], 2)
        value_a = a.facts.get(relation.predicate)
        value_b = b.facts.get(relation.predicate)
        if value_a is None or value_b is None or not _far_apart(value_a, value_b):
            return None
        worded: list[Test] = []
        if relation.less:
            worded.append("less")
        if relation.more:
            worded.append("more")
        test = self._rng.choice(worded)
        smaller, larger = (a, b) if number_in(value_a) < number_in(value_b) else (b, a)
        winner = smaller if test == "less" else larger
        return self._word_comparison(relation, test, a, b, winner.title)

    def _draw_equality_comparison(self, equal: bool) -> WorldQuestion | None:
        """A question whether two entities share a value; None if no second entity fits.

        For "yes" the partner comes from all entities with this value: among three random ones, hardly any two share
        one.
        """
        path = next(self._same_deck, None)
        if path is None:
            return None
        (relation,) = path
        with_fact = []
        for entity in self._rng.sample(self._of_kind[relation.kind], 3):
            if relation.predicate in entity.facts:
                with_fact.append(entity)
        if not with_fact:
            return None
        first = with_fact[0]
        value = first.facts[relation.predicate]
        if equal:
            others = []
            for other_relation, entity in self._subjects[relation.target, value]:
                if other_relation is relation and entity is not first:
                    others.append(entity)
        else:
            others = [entity for entity in with_fact if entity.facts[relation.predicate] != value]
        if not others:
            return None
        return self._word_comparison(relation, "same", first, self._rng.choice(others), "yes" if equal else "no")

    def _word_comparison(self, relation: Relation, test: Test, a: Entity, b: Entity, answer: str) -> WorldQuestion:
        """A comparison in one of the relation's wordings."""
        text = self._draw_wording(getattr(relation, test)).format(a=a.mention, b=b.mention)
        return _question_along_path(COMPARISON, text, answer, (a, b), (relation, relation), test)


def number_in(text: str) -> int:
    """The number in a value such as "312 km" or "48,200"; only for values of relations with a `range`."""
    return int("".join(filter(str.isdigit, text)))


def _paths_of_length(hops: int, relations: Sequence[Relation]) -> list[_Path]:
    """The paths of so many relations, each from the kind of entity to which the one before leads.

    A relation without `target` leads to a value, such as a year, which has no relations: it can only be the last one.
    """
    paths: list[_Path] = [(relation,) for relation in relations if relation.target or hops == 1]
    for length in range(2, hops + 1):
        longer = []
        for path in paths:
            for relation in RELATIONS_OF_KIND[path[-1].target]:
                is_last = length == hops
                if relation in relations and _may_follow(path, relation) and (relation.target or is_last):
                    longer.append((*path, relation))
        paths = longer
    return paths


def _may_follow(path: _Path, relation: Relation) -> bool:
    """Whether a path with this relation still reads well: no predicate twice, not three people in a row."""
    if relation.predicate in [step.predicate for step in path]:
        return False
    return [step.kind for step in path].count(relation.kind) < _MOST_OF_A_KIND


def _far_apart(value: str, other: str) -> bool:
    """Whether a comparison of two values has a clear answer: years by their distance, other numbers by their ratio."""
    low, high = sorted((number_in(value), number_in(other)))
    if value.isdigit() and other.isdigit():  # years
        return high - low >= _CLOSEST_YEARS
    return high >= _CLOSEST_RATIO * low


def _question_along_path(
    kind: WorldKind, text: str, answer: str, hops: Sequence[Entity], path: Sequence[Relation], test: Test = ""
) -> WorldQuestion:
    """A question with its documents and sub-queries: the relation to read in each entity's article.

    Sub-queries always have the first wording of their relation, so that the same fact is always asked alike.
    """
    subqueries = [relation.ask[0].format(x=hop.mention) for relation, hop in zip(path, hops, strict=True)]
    return WorldQuestion(
        kind=kind,
        text=_with_capital(text),
        answer=answer,
        helpful=tuple(hop.title for hop in hops),
        predicates=tuple(relation.predicate for relation in path),
        subqueries=tuple(map(_with_capital, subqueries)),
        test=test,
    )


def _names_answer(question: WorldQuestion) -> bool:
    """Whether a sub-query or the question of a chain contains the answer, so that no search would be needed."""
    if question.kind == COMPARISON:
        # Its answer is one of the two names in the question, or yes or no.
        return False
    answer = question.answer.lower()
    return any(answer in text.lower() for text in (question.text, *question.subqueries))


def _with_capital(text: str) -> str:
    """A text with a capital first letter; the other letters stay, since names have capitals of their own."""
    return text[0].upper() + text[1:]
