"""The supporting passage of each gold triple of 2WikiMultiHopQA, and the name by which a sub-query asks for it."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence

import regex as re

from tripletune.core.data.contexts import title_key
from tripletune.core.data.questions import DropReason, Question, UnlabelledQuestion
from tripletune.core.data.triples import Triple
from tripletune.core.data.words import words as words_of
from tripletune.data_builders.subq.searches import BRACKETED

# Questions have two or four supporting passages; with more than this number, trying every order would take long.
_MOST_PLACED_TOGETHER = 6


def place_evidences(question: Question) -> list[int]:
    """The index of the supporting passage of every evidence triple; two subjects are placed in different passages.

    The triples name no passage. Of all ways to give each subject a passage, the one in which titles and texts fit best
    is taken; with more passages than can be tried, each subject takes its best one.

    Raises:
        UnlabelledQuestion: There are no triples, or one fits no passage.
    """
    subjects = defaultdict[str, list[Triple]](list)
    for evidence in question.evidences:
        subjects[title_key(evidence.subject)].append(evidence)
    if not subjects:
        raise UnlabelledQuestion(DropReason.NO_ANNOTATION, "no evidence triples")
    # How well the triples of each subject fit each supporting passage.
    fits = []
    for triples in subjects.values():
        fits.append([_fit_to_passage(question, triples, document) for document in question.supporting])
    if len(subjects) <= len(question.supporting) <= _MOST_PLACED_TOGETHER:
        orders = itertools.permutations(range(len(question.supporting)), len(subjects))
        places = max(orders, key=lambda order: sum(row[place] for row, place in zip(fits, order, strict=True)))
    else:
        places = tuple(max(range(len(row)), key=row.__getitem__, default=0) for row in fits)
    document_of = {}
    for (subject, triples), row, place in zip(subjects.items(), fits, places, strict=True):
        if not row or row[place] <= 0:
            raise UnlabelledQuestion(DropReason.UNPLACED_EVIDENCE, str(triples[0]))
        document_of[subject] = question.supporting[place]
    return [document_of[title_key(evidence.subject)] for evidence in question.evidences]


def name_seen_by_planner(question: Question, evidence: Triple, document: int, earlier: Sequence[Triple]) -> str:
    """A name of the evidence's subject that a planner has seen, for the sub-query that asks for its object.

    The name comes from the question if the question has it, else from the object of an earlier evidence triple.
    """
    title = question.passages[document].title
    asked = title_key(question.question)
    for name in (title, evidence.subject):
        if re.search(rf"(?<!\w){re.escape(title_key(name))}(?!\w)", asked):
            return name
    names = [triple.object for triple in earlier]

    def overlap(name: str) -> float:
        """How alike a name is to the subject or to the title of its document."""
        return max(_name_similarity(name, evidence.subject), _name_similarity(name, title))

    best = max(names, key=overlap, default="")
    if best and overlap(best) > 0:
        return best
    return evidence.subject


def _fit_to_passage(question: Question, triples: list[Triple], document: int) -> float:
    """How well the triples of one subject fit a passage: first by subject and title, then by the passage's text.

    The text gives at most 2 (all objects, and the subject), and an equal title 4: it beats any passage whose title is
    less than half alike. 0 means that nothing speaks for the passage.
    """
    passage = question.passages[document]
    text = title_key(passage.text)
    objects = sum(title_key(triple.object) in text for triple in triples) / len(triples)
    named = title_key(triples[0].subject) in text
    return 4 * _name_similarity(triples[0].subject, passage.title) + objects + named


def _name_similarity(name: str, other: str) -> float:
    """How alike two names are, from 0 to 1: equal, equal but for brackets, or by the share of common words.

    The numbers only order these cases: common words give at most 0.8, so they come after names that are equal.
    """
    first = title_key(name)
    second = title_key(other)
    if first == second:
        return 1.0
    if BRACKETED.sub("", first) == BRACKETED.sub("", second):
        return 0.9
    words = set(words_of(first))
    others = set(words_of(second))
    if words.isdisjoint(others):
        return 0.0
    contained = 0.2 if words <= others or others <= words else 0.0
    return contained + 0.6 * len(words & others) / len(words | others)
