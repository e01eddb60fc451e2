"""Wikidata relations as questions: `("Steel", "director")` -> "Who directed Steel?".

2WikiMultiHopQA gives gold evidence as triples, and MuSiQue writes many of its hops as `Steel >> director`. The
planner learns sub-queries in plain language (RAS, figures 8 and 10), so both are worded here.
"""

from __future__ import annotations

from collections.abc import Iterable

from tripletune.models.data.records import normalize_answer

_QUESTIONS = {
    "applies to jurisdiction": "To which jurisdiction does {} apply?",
    "author": "Who is the author of {}?",
    "award received": "Which award did {} receive?",
    "capital": "What is the capital of {}?",
    "capital of": "Of which place is {} the capital?",
    "cast member": "Who is a cast member of {}?",
    "cause of death": "What was the cause of death of {}?",
    "characters": "Which characters appear in {}?",
    "child": "Who is the child of {}?",
    "composer": "Who composed the music of {}?",
    "conflict": "In which conflict did {} take part?",
    "continent": "On which continent is {}?",
    "country": "In which country is {}?",
    "country of citizenship": "What is the nationality of {}?",
    "country of origin": "What is the country of origin of {}?",
    "creator": "Who created {}?",
    "date of birth": "When was {} born?",
    "date of death": "When did {} die?",
    "developer": "Who developed {}?",
    "director": "Who directed {}?",
    "editor": "Who is the editor of {}?",
    "educated at": "Where was {} educated?",
    "employer": "Who employed {}?",
    "father": "Who is the father of {}?",
    "follows": "What does {} follow?",
    "followed by": "What follows {}?",
    "founded by": "Who founded {}?",
    "genre": "What is the genre of {}?",
    "has part": "Who or what is a part of {}?",
    "headquarters location": "Where are the headquarters of {}?",
    "inception": "When was {} founded?",
    "instance of": "What kind of thing is {}?",
    "language of work or name": "In which language is {}?",
    "licensed to broadcast to": "To which place is {} licensed to broadcast?",
    "located in or next to body of water": "On which body of water is {} located?",
    "located in the administrative territorial entity": "In which administrative area is {} located?",
    "location": "Where is {}?",
    "location of formation": "Where was {} formed?",
    "manufacturer": "Who manufactured {}?",
    "member of": "Of which group is {} a member?",
    "member of political party": "To which political party does {} belong?",
    "member of sports team": "For which sports team did {} play?",
    "mother": "Who is the mother of {}?",
    "mouth of the watercourse": "Into what does {} flow?",
    "named after": "After whom or what is {} named?",
    "native language": "What is the native language of {}?",
    "occupation": "What is the occupation of {}?",
    "owned by": "Who owns {}?",
    "part of": "Of what is {} a part?",
    "performer": "Who performed {}?",
    "place of birth": "Where was {} born?",
    "place of burial": "Where was {} buried?",
    "place of death": "Where did {} die?",
    "place of detention": "Where was {} detained?",
    "position held": "Which position did {} hold?",
    "producer": "Who produced {}?",
    "production company": "Which company produced {}?",
    "publication date": "When was {} published or released?",
    "publisher": "Who published {}?",
    "record label": "On which record label was {} released?",
    "religion": "What is the religion of {}?",
    "residence": "Where did {} live?",
    "screenwriter": "Who wrote the screenplay of {}?",
    "shares border with": "Which place shares a border with {}?",
    "sibling": "Who is a sibling of {}?",
    "sport": "Which sport does {} belong to?",
    "spouse": "Who is the spouse of {}?",
    "student of": "Who taught {}?",
    "work location": "Where did {} work?",
}
# "the owned by of X" is no English; such relations are quoted instead.
_PREPOSITIONS = ("at", "by", "for", "from", "in", "of", "on", "to", "with")


def relation_question(subject: str, relation: str) -> str:
    """The question whose answer is the object of `(subject, relation, ?)`.

    A relation without a wording of its own becomes "What is the <relation> of <subject>?", or is quoted when it
    ends in a preposition.
    """
    key = " ".join(relation.replace("_", " ").casefold().split())
    template = _QUESTIONS.get(key)
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
