"""Which predicates of triples mean one relation, and in which direction: rules for English words, and vectors.

"directed by" and "director" are one relation, and "director of" and "directed" are the same one read backwards. "born
in" is a birth year before "1903" and a birth place before "Oslo", so a spelling counts once per kind of its objects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from tripletune.core.data.pairs import predicate_words
from tripletune.core.data.triples import Triple
from tripletune.rag.search.embedding import to_length_one
from tripletune.rag.triples.vocabulary import Objects, objects_of, spelling_key, without_light_words

LETTERS = "letters"

# Forms that no rule of endings finds, and what they are written as before the rules.
_FORMS = {
    "birthplace": "birth place",
    "birthdate": "birth date",
    "birthday": "birth date",
    "birthyear": "birth year",
    "birthname": "birth name",
    "born": "birth",
    "died": "death",
    "deceased": "death",
    "deathplace": "death place",
    "written": "writ",
    "wrote": "writ",
    "writer": "writ",
    "led": "lead",
    "leader": "lead",
    "built": "build",
    "builder": "build",
    "made": "make",
    "maker": "make",
    "won": "win",
    "winner": "win",
    "sung": "sing",
    "sang": "sing",
    "singer": "sing",
    "taught": "teach",
    "teacher": "teach",
    "location": "locat place",
    "located": "locat",
    "situated": "locat",
    "found": "find",
    "founding": "found",
    "foundation": "found",
    "established": "found",
    "publication": "publish",
    "construction": "construct",
    "opening": "open",
    "stars": "star",
    "starred": "star",
    "starring": "star",
}
# Past forms whose subject does nothing, although they have no "by": "(Vienna, located, Austria)".
_IS_PLACED = frozenset(["located", "situated", "based", "born", "died", "deceased"])
_OBJECT_IS_GIVEN = _IS_PLACED | frozenset(
    [
        "named",
        "called",
        "titled",
        "nicknamed",
        "known",
        "starred",
        "awarded",
        "elected",
        "appointed",
        "nominated",
        "given",
        "ranked",
    ]
)
# Verbs whose subject acts, like that of a past form without "by".
_ACTIVE = frozenset(["include", "contain", "comprise", "represent", "win", "produce", "create", "publish", "own"])
_BE, _HAVE = frozenset(["is", "are", "was", "were", "be", "been", "being"]), frozenset(("has", "have", "had"))
_PAST = frozenset(["wrote", "won", "led", "built", "made", "sang", "taught"])
_PLACE_WORDS = frozenset(("in", "at", "on"))
# A film "based on" a novel is in no place.
_SOURCE_WORDS = ["based", "on"]
# "X type of Y" says what "X type Y" says, and does not turn it around.
_KINDS = frozenset(["type", "kind", "form", "sort", "class", "instance", "example", "species"])
# "X starred in Y" is "Y starring X".
_STARS = frozenset(["star", "stars", "starred", "starring"])
_ARTICLES = frozenset(("the", "a", "an"))
# Words by which two similar predicates differ: prepositions, negations and those of time.
_TELLING = frozenset(
    [
        "in",
        "on",
        "at",
        "for",
        "from",
        "to",
        "with",
        "under",
        "into",
        "near",
        "as",
        "not",
        "non",
        "former",
        "first",
        "last",
        "other",
        "previous",
        "next",
        "co",
    ]
)
_ENDINGS = ("ing", "ed", "er", "or", "e")
_LEAST_STEM = 3


class RelationForm(NamedTuple):
    """The meaning of a spelling: equal roots are one relation; `is_reversed` if its object is what others call subject.

    Only the relative direction counts: of two spellings with one root, one may be the other read backwards.
    """

    root: str
    is_reversed: bool


class Use(NamedTuple):
    """A spelling before a kind of objects."""

    spelling: str
    objects: Objects


@dataclass(slots=True)
class Uses:
    """How often triples use each spelling.

    Attributes:
        counts: Per source the number of triples of each use.
        examples: The first triple of each use.
    """

    counts: list[Counter[Use]] = field(default_factory=list)
    examples: dict[Use, Triple] = field(default_factory=dict)

    def add(self, triples: Iterable[Triple]) -> None:
        """Count the triples of one more source."""
        counts: Counter[Use] = Counter()
        for triple in triples:
            use = Use(predicate_words(triple.predicate), objects_of(triple.object))
            counts[use] += 1
            self.examples.setdefault(use, triple)
        self.counts.append(counts)

    def weight(self, uses: Iterable[Use]) -> float:
        """The share of the triples that have these uses, as a mean over the sources: a long source is no better."""
        uses = list(uses)
        shares = []
        for counts in self.counts:
            shares.append(sum(counts[use] for use in uses) / max(counts.total(), 1))
        return sum(shares) / max(len(shares), 1)

    def triples(self, use: Use) -> int:
        """The number of triples of a use in all sources."""
        return sum(counts[use] for counts in self.counts)


@dataclass(slots=True)
class PredicateGroup:
    """The spellings of one relation.

    Attributes:
        leading: The spelling that gives the predicate its name.
        members: By use: whether it reads backwards, compared with the leading spelling, and why it is in the group.
        relations: The relation of the leading spelling, and those that vectors joined to it.
    """

    leading: Use
    relations: list[RelationForm]
    members: dict[Use, tuple[bool, str]]


def relation_of(use: Use) -> RelationForm:
    """The relation of a spelling, by the forms of its words.

    The object of a noun ("director"), of a form with "by" and of a place or time is taken as the usual direction. A
    noun with "of" ("director of") and a past form without "by" ("directed") turn it around; "is named" and "has a
    population of" do not.
    """
    spelling = spelling_key(use.spelling)
    words = without_light_words(spelling).split()
    before = set(spelling.split()[: -len(words)])
    last = words[-1]
    is_reversed = False
    if len(words) == 1:
        is_reversed = last in _ACTIVE or (_is_past(last) and last not in _OBJECT_IS_GIVEN and not before & _BE)
        if _is_past(last) and use.objects in (Objects.YEAR, Objects.DATE):
            words.append(str(use.objects))
    elif last == "by":
        words.pop()
    elif last == "of" and not _is_past(words[-2]):
        words.pop()
        is_reversed = words[-1] not in _KINDS and not before & _HAVE
    elif last in _PLACE_WORDS and words[-2:] != _SOURCE_WORDS:
        words.pop()
        if words[-1] in _STARS:
            is_reversed = True
        else:
            words.append(_place_or_time(words[-1], use.objects))
    elif _is_past(last):
        is_reversed = last not in _OBJECT_IS_GIVEN and not before & _BE
    stems = []
    for place, word in enumerate(words):
        # "place of birth" is "birth place", but "composed of" is not "composed".
        is_small = word in _ARTICLES or (word == "of" and place < len(words) - 1)
        if not is_small:
            stems += [_without_ending(part) for part in _FORMS.get(word, word).split()]
    root = " ".join(sorted(dict.fromkeys(stems))) or spelling
    return RelationForm(root, is_reversed)


def _place_or_time(word: str, kind: Objects) -> str:
    """What a past form with "in", "at" or "on" asks for; other words keep "in"."""
    if _is_past(word) and kind in (Objects.YEAR, Objects.DATE):
        return str(kind)
    return "place" if word in _IS_PLACED else "in"


def _is_past(word: str) -> bool:
    return word in _PAST or word in _IS_PLACED or (word.endswith("ed") and len(word) > _LEAST_STEM + 1)


def _without_ending(word: str) -> str:
    """A word without its ending, so that "director", "directed" and "directing" are one.

    The stemmers of a search (Snowball, Porter) keep "director" and "direct" apart, since they don't know that the one
    does the other.
    """
    for ending in _ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= _LEAST_STEM:
            return word.removesuffix(ending)
    return word


def induce(
    uses: Uses, size: int, encode: Callable[[Sequence[str]], np.ndarray] | None = None, threshold: float = 1.0
) -> list[PredicateGroup]:
    """The most used relations, each with its spellings, the most used first.

    A relation beside the `size` most used ones joins one of these if their names are similar; so does one of them that
    is similar to a more used one, which leaves room for another relation.

    Args:
        size: Maximum number of relations.
        encode: Vectors of names; None: only words are compared.
        threshold: Minimum cosine of two names.
    """
    by_root: dict[str, dict[Use, bool]] = {}
    for use in uses.examples:
        relation = relation_of(use)
        by_root.setdefault(relation.root, {})[use] = relation.is_reversed
    groups = [_group_of_root(root, members, uses) for root, members in by_root.items()]
    groups.sort(key=lambda group: (-uses.weight(group.members), group.leading))
    if encode is None:
        return groups[:size]
    vectors = to_length_one(encode([group.leading.spelling for group in groups]))
    kept: list[int] = []
    for number, group in enumerate(groups):
        nearest, cosine = _nearest_group(number, kept, groups, vectors)
        if nearest is not None and cosine >= threshold:
            for use, (is_reversed, _) in group.members.items():
                groups[nearest].members[use] = is_reversed, f"cosine {cosine:.2f}"
            groups[nearest].relations += group.relations
        elif len(kept) < size:
            kept.append(number)
    return [groups[number] for number in kept]


def _group_of_root(root: str, members: Mapping[Use, bool], uses: Uses) -> PredicateGroup:
    """The group of a root. The first source that knows the relation names it, by its most used spelling."""

    def rank(use: Use) -> tuple[int, int, Use]:
        """The first source that has the use, and how often."""
        for source, counts in enumerate(uses.counts):
            if counts[use]:
                return source, -counts[use], use
        return len(uses.counts), 0, use

    leading = min(members, key=rank)
    relative: dict[Use, tuple[bool, str]] = {}
    for use, is_reversed in members.items():
        # A year or a quantity is never a subject: (Oslo, population of, 500) keeps its direction.
        turned = is_reversed != members[leading] and use.objects is Objects.NAME
        relative[use] = turned, LETTERS
    return PredicateGroup(leading, [RelationForm(root, members[leading])], relative)


def _nearest_group(
    number: int, kept: Sequence[int], groups: Sequence[PredicateGroup], vectors: np.ndarray
) -> tuple[int | None, float]:
    """The most similar kept group that may mean the same, and the cosine of the names."""
    own = groups[number]
    for place in sorted(kept, key=lambda other: (-float(vectors[other] @ vectors[number]), other)):
        other = groups[place]
        is_alike = own.leading.objects is other.leading.objects
        if is_alike and all(_may_be_one(own.relations[0], relation) for relation in other.relations):
            return place, float(vectors[place] @ vectors[number])
    return None, 0.0


def _may_be_one(relation: RelationForm, other: RelationForm) -> bool:
    """Whether vectors may join two relations: alike in direction, and not told apart by a word.

    "birth place" and "death place" have similar vectors, share a word and exchange another: they are two relations. So
    are "published by" and "published under", which differ in a small word.
    """
    if relation.is_reversed != other.is_reversed:
        return False
    words, others = set(relation.root.split()), set(other.root.split())
    alone, others_alone = words - others, others - words
    if (alone | others_alone) & _TELLING or (words & others and alone and others_alone):
        return False
    # "owns" and "owner" differ in their direction, and so may other forms of one word.
    for word in alone:
        if any(word.startswith(other_word) or other_word.startswith(word) for other_word in others_alone):
            return False
    return True
