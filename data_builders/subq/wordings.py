"""Sub-queries in words: a relation as a question, several questions as one, and tidy punctuation."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tripletune.core.config import read_yaml

# Questions by relation, with {} for the subject.
_QUESTIONS = read_yaml(Path(__file__).with_name("relation_questions.yaml"))
# "the owned by of X" is not English; such relations are quoted instead.
PREPOSITIONS = ("at", "by", "for", "from", "in", "of", "on", "to", "with")


def relation_question(subject: str, relation: str, plain: bool = False) -> str:
    """The question whose answer is the object of `(subject, relation, ?)`; `plain` ignores our own wordings."""
    key = " ".join(relation.replace("_", " ").casefold().split())
    template = None if plain else _QUESTIONS.get(key)
    if template is None and key.rsplit(" ", 1)[-1] in PREPOSITIONS:
        return f"What is “{key}” for {subject}?"
    if template is None:
        return f"What is the {key} of {subject}?"
    # Not str.format on the subject: names may hold braces.
    return template.replace("{}", subject)


def joined_question(questions: Iterable[str]) -> str:
    """Several questions as one: "When was X born and when did X die?"; a repeated question is asked once."""
    first, *others = dict.fromkeys(questions)
    clauses = [first.removesuffix("?")]
    clauses += [other[0].lower() + other[1:].removesuffix("?") for other in others]
    return " and ".join(clauses) + "?"


def tidy_question(question: str) -> str:
    """The question with a capital first letter, one closing question mark, and no stray spaces."""
    words = " ".join(question.split()).replace(" '", "'").rstrip(" ?")
    return f"{words[:1].upper()}{words[1:]}?"
