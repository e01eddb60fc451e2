"""The facts of a corpus as a graph, and drafts of questions: which facts a question is about, not yet in words.

Entities with the same normalised name are joined. `drafts.py` makes the drafts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from tripletune.core.data.passages import Passage, passage_id
from tripletune.core.data.triples import Triple
from tripletune.data_builders.questions import CHAIN_KINDS, QuestionKind
from tripletune.data_builders.questions.names import contains_name, is_name, name_key, searchable

# What a comparison asks for, in the words that the teacher reads.
ComparisonTest = Literal["smaller or earlier", "larger or later", "yes or no", ""]

_MAX_ANSWER_WORDS = 8
# Maximum facts that lead to a name on the way to an answer: facts on a country say little about the places in it.
_HUB = 50
# Predicates without a clear meaning.
_VAGUE = ("is", "are", "was", "were", "has", "have", "had")


# Subject, predicate and object, each as `names.name_key` makes it.
NormalizedFact: TypeAlias = tuple[str, str, str]


class _Ends(NamedTuple):
    """The names at the two ends of a fact."""

    subject: str
    object: str


class StatedFact(NamedTuple):
    """A triple, the number of its passage, and the normalised parts of the triple."""

    triple: Triple
    passage: int
    subject: str
    predicate: str
    object: str

    @property
    def names(self) -> _Ends:
        """Subject and object as the triple has them, before normalisation."""
        return _Ends(self.triple.subject, self.triple.object)

    @property
    def normalized(self) -> NormalizedFact:
        """The normalised parts: the same fact in two passages has the same parts."""
        return self.subject, self.predicate, self.object


@dataclass(frozen=True, slots=True)
class Draft:
    """A question without words.

    Attributes:
        facts: The facts in reasoning order, each from another passage.
        given: The name in each fact's sub-query.
        sought: The name that each fact's sub-query asks for.
        answer: The answer of the question.
        test: The test of a comparison; "" for other questions.
    """

    kind: QuestionKind
    facts: tuple[StatedFact, ...]
    given: tuple[str, ...]
    sought: tuple[str, ...]
    answer: str
    test: ComparisonTest = ""

    @property
    def id(self) -> str:
        """An id from the content; the order of a comparison or an intersection does not change the id."""
        facts = [fact.normalized for fact in self.facts]
        if self.kind not in CHAIN_KINDS:
            facts.sort()
        return passage_id(f"{self.kind} {self.test}", repr(facts))

    @property
    def named(self) -> tuple[str, ...]:
        """Names required in the question."""
        if self.kind in CHAIN_KINDS:
            return self.given[:1]
        return self.given


class FactSide(NamedTuple):
    """A fact seen from one of its two entities.

    Attributes:
        fact: The fact.
        name: The entity's name, as the triple has it.
        other_name: The name at the other end.
        fitting: The entities, normalised, that stand in this place of a fact with the same predicate and other end.
    """

    fact: StatedFact
    name: str
    other_name: str
    fitting: set[str]


class FactGraph:
    """The facts of a corpus.

    Args:
        passages: The passages of the corpus.
        triples: The triples of each passage.

    Attributes:
        facts: The facts that are fit for questions.
    """

    def __init__(self, passages: Sequence[Passage], triples: Sequence[Sequence[Triple]]) -> None:
        self._searchable_texts = [searchable(passage.content) for passage in passages]
        stated: list[StatedFact] = []
        for number, triples_of_passage in enumerate(triples):
            for triple in dict.fromkeys(triples_of_passage):
                stated.append(StatedFact(triple, number, *map(name_key, triple.as_list())))
        # The objects of a subject and predicate, and the subjects of an object and predicate.
        self._objects: dict[tuple[str, str], set[str]] = defaultdict(set)
        self._subjects: dict[tuple[str, str], set[str]] = defaultdict(set)
        for fact in stated:
            self._objects[fact.subject, fact.predicate].add(fact.object)
            self._subjects[fact.object, fact.predicate].add(fact.subject)
        # Number of facts that lead to an entity.
        self._leading = Counter(fact.object for fact in stated)
        self.facts = [fact for fact in stated if self._is_usable(fact)]
        # Facts that may continue a path, by subject.
        self._next: dict[str, list[StatedFact]] = defaultdict(list)
        for fact in self.facts:
            if self.is_single(fact) and not self.is_hub(fact.subject):
                self._next[fact.subject].append(fact)

    def _is_usable(self, fact: StatedFact) -> bool:
        """Whether a fact can be asked for: its subject names one entity, and its passage has its short object."""
        is_short = len(fact.object.split()) <= _MAX_ANSWER_WORDS
        is_clear = is_name(fact.triple.subject) and fact.predicate not in _VAGUE
        return is_short and is_clear and fact.subject != fact.object and self.mentions(fact, fact.triple.object)

    def mentions(self, fact: StatedFact, name: str) -> bool:
        """Whether the passage of a fact contains a name."""
        return contains_name(self._searchable_texts[fact.passage], name)

    def is_grounded(self, fact: StatedFact) -> bool:
        """Whether the passage of a fact contains subject and object."""
        return self.mentions(fact, fact.triple.subject) and self.mentions(fact, fact.triple.object)

    def is_single(self, fact: StatedFact) -> bool:
        """Whether subject and predicate have one object in the whole corpus, so that a question has one answer."""
        return len(self._objects[fact.subject, fact.predicate]) == 1

    def is_hub(self, entity: str) -> bool:
        """Whether so many facts lead to an entity (normalised) that a path through it is not worth asking for."""
        return self._leading[entity] > _HUB

    def side(self, fact: StatedFact, entity: str) -> FactSide:
        """The fact seen from its subject or object, whichever is the entity (normalised)."""
        subject_name, object_name = fact.names
        if fact.subject == entity:
            return FactSide(fact, subject_name, object_name, self._subjects[fact.object, fact.predicate])
        return FactSide(fact, object_name, subject_name, self._objects[fact.subject, fact.predicate])

    def continuations(self, path: Sequence[StatedFact]) -> list[StatedFact]:
        """The facts that may follow the last fact of a path."""
        followers = self._next.get(path[-1].object, ())
        return [fact for fact in followers if self._may_follow(path, fact)]

    def _may_follow(self, path: Sequence[StatedFact], fact: StatedFact) -> bool:
        """Whether a fact differs from all facts of a path, and none of their passages already names its object.

        Otherwise a passage could be skipped, and the question would have fewer hops than it says.
        """
        for earlier in path:
            if fact.predicate == earlier.predicate or fact.passage == earlier.passage:
                return False
            # The path would return to where it has been.
            if fact.object == earlier.subject:
                return False
            if self.mentions(earlier, fact.triple.object):
                return False
        return True

    def links(self, documents: Sequence[str]) -> Counter[tuple[str, str]]:
        """Number of links between the facts of each pair of documents.

        Args:
            documents: The document of each passage.

        Returns:
            How many facts continue a fact of the other document, by pair of documents in alphabetical order.
        """
        counts: Counter[tuple[str, str]] = Counter()
        for fact in self.facts:
            if not self.is_single(fact):
                continue
            for follower in self._next.get(fact.object, ()):
                first, second = sorted((documents[fact.passage], documents[follower.passage]))
                counts[first, second] += 1
        return counts
