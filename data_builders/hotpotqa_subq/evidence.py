"""Gold evidence in words: where a benchmark's evidence stands, and the questions whose answers it is.

2WikiMultiHopQA gives gold evidence as triples, and MuSiQue writes many of its hops as `Steel >> director`. The planner
learns sub-queries in plain language (RAS, figures 8 and 10), so both are worded here (`relation_questions.yaml`).

The subject of an evidence triple is Wikidata's or the text's name, the passage has its Wikipedia title: "Steel"
and "Steel (1979 film)", "John" and "John, King of England". One passage is about one subject, so the subjects of a
question are placed together, in the way that fits best overall.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from tripletune.data_builders.hotpotqa_subq.questions import DropReason, Question, UnlabelledQuestion
from tripletune.data_builders.readers._rows import title_key
from tripletune.models.data.records import normalize_answer
from tripletune.models.data.triples import Triple
from tripletune.models.options import read_yaml

_BRACKETS = re.compile(r"\s*\([^()]*\)")
_WORD = re.compile(r"\w+")
# Questions have two or four supporting passages; beyond this, trying every order would take long.
_MOST_PLACED_TOGETHER = 6
# "the owned by of X" is no English; such relations are quoted instead.
_PREPOSITIONS = ("at", "by", "for", "from", "in", "of", "on", "to", "with")


def place_evidences(question: Question) -> list[int]:
    """The supporting passage of every evidence triple, as indices into `question.passages`.

    Raises:
        UnlabelledQuestion: there is no evidence, or a triple has nothing in common with any supporting passage.
    """
    subjects: dict[str, list[Triple]] = {}
    for evidence in question.evidences:
        subjects.setdefault(title_key(evidence.subject), []).append(evidence)
    if not subjects:
        raise UnlabelledQuestion(DropReason.NO_ANNOTATION, "no evidence triples")
    fits = [[_fit(question, triples, document) for document in question.supporting] for triples in subjects.values()]
    if len(subjects) <= len(question.supporting) <= _MOST_PLACED_TOGETHER:
        orders = itertools.permutations(range(len(question.supporting)), len(subjects))
        chosen = max(orders, key=lambda order: sum(row[place] for row, place in zip(fits, order)))
    else:
        chosen = tuple(max(range(len(row)), key=row.__getitem__, default=0) for row in fits)
    for (triples, row), place in zip(zip(subjects.values(), fits), chosen):
        if not row or row[place] <= 0:
            raise UnlabelledQuestion(DropReason.UNPLACED_EVIDENCE, str(triples[0]))
    placed = dict(zip(subjects, (question.supporting[place] for place in chosen)))
    return [placed[title_key(evidence.subject)] for evidence in question.evidences]


def spoken_name(question: Question, evidence: Triple, document: int, earlier: list[Triple]) -> str:
    """The name by which a sub-query may ask for the evidence's subject.

    A planner knows the question and the triples found so far, nothing else: a name it cannot have seen, such as the
    bracketed part of the next passage's title, must not be in a label. So the name comes from the question where
    it stands there, else from the object of an earlier evidence triple.

    Args:
        question: The question.
        evidence: The evidence triple to ask for.
        document: Its passage.
        earlier: The evidence triples before it.
    """
    title = question.passages[document].title
    asked = title_key(question.question)
    for name in (title, evidence.subject):
        if re.search(rf"(?<!\w){re.escape(title_key(name))}(?!\w)", asked):
            return name
    known = [triple.object for triple in earlier]
    overlap = [max(_similarity(name, evidence.subject), _similarity(name, title)) for name in known]
    if known and max(overlap) > 0:
        return known[overlap.index(max(overlap))]
    return evidence.subject


def _fit(question: Question, triples: list[Triple], document: int) -> float:
    """How well the triples of one subject suit a passage; 0 for nothing in common.

    The subject's name against the title decides; whether the passage's text holds subject and objects breaks ties
    and places names that share no word with the title.
    """
    passage = question.passages[document]
    text = title_key(passage.text)
    objects = sum(title_key(triple.object) in text for triple in triples) / len(triples)
    named = title_key(triples[0].subject) in text
    return 4 * _similarity(triples[0].subject, passage.title) + objects + named


def _similarity(name: str, other: str) -> float:
    first, second = title_key(name), title_key(other)
    if first == second:
        return 1.0
    if _BRACKETS.sub("", first) == _BRACKETS.sub("", second):
        return 0.9
    words, others = set(_WORD.findall(first)), set(_WORD.findall(second))
    shared = len(words & others)
    if not shared:
        return 0.0
    contained = 0.2 if words <= others or others <= words else 0.0
    return contained + 0.6 * shared / len(words | others)


@lru_cache(maxsize=1)
def _questions() -> dict[str, Any]:
    return read_yaml(Path(__file__).with_name("relation_questions.yaml"))


def relation_question(subject: str, relation: str) -> str:
    """The question whose answer is the object of `(subject, relation, ?)`.

    A relation without a wording of its own becomes "What is the <relation> of <subject>?", or is quoted when it
    ends in a preposition.
    """
    key = " ".join(relation.replace("_", " ").casefold().split())
    template = _questions().get(key)
    if template is None and key.rsplit(" ", 1)[-1] in _PREPOSITIONS:
        return f"What is “{key}” for {subject}?"
    # Not str.format on the subject: names may hold braces.
    return template.replace("{}", subject) if template else f"What is the {key} of {subject}?"


def joined_question(questions: Iterable[str]) -> str:
    """Several questions as one: "When was X born and when did X die?"."""
    first, *others = dict.fromkeys(questions)
    parts = [first.removesuffix("?"), *(other[0].lower() + other[1:].removesuffix("?") for other in others)]
    return " and ".join(parts) + "?"


def tidy_question(question: str) -> str:
    """A question typed in haste, put in order: capital letter, closing question mark, no space before either."""
    words = " ".join(question.split()).replace(" '", "'").rstrip(" ?")
    return f"{words[:1].upper()}{words[1:]}?"


def mentions(text: str, phrase: str) -> bool:
    """Whether a text holds a phrase as whole words, both normalised as answers are."""
    return f" {normalize_answer(phrase)} " in f" {normalize_answer(text)} "
