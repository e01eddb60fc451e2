"""Parse and check a teacher LLM's replies, and check finished labels.

`missing_facts` checks that labels follow from the facts before them. All other functions raise `UnusableReply` with a
reason: a `DropReason`, or one of `llm.replies` for unreadable text. Our prompts ask for JSON; the paper's plain
forms (RAS, figures 7, 8 and 19: "1, 3", the question alone, "(S> s| P> p| O> o)") are also read, so that the paper's
prompts can replace ours. JSON with other keys and replies with a label in front, as small models write them, are
accepted, and the card counts them by the names below. All other unreadable replies are sent back.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

from tripletune.core.calls import UnusableReply
from tripletune.core.data.answers import YES_NO, facts_name, mentions, normalize_name
from tripletune.core.data.questions import DropReason, Question
from tripletune.core.data.records import Action, Record
from tripletune.core.data.triples import Triple
from tripletune.data_builders.subq import gives_away_answer
from tripletune.data_builders.subq.searches import names_to_find
from tripletune.data_builders.subq.wordings import PREPOSITIONS
from tripletune.llm.reply_json import find_json, without_thoughts
from tripletune.llm.reply_triples import find_triples

TEXT_VALUES = "yes or no as text"
OTHER_KEYS = "JSON with another key"
LABEL = "a label before the sub-query"

_DOCUMENTS = 'write one JSON object {"documents": [numbers], "answerable": true or false} and nothing else'
_QUESTION = 'write one JSON object {"question": "the sub-query"} and nothing else'
_TRIPLES = 'write one JSON object {"triples": [["subject", "predicate", "object"], ...]} and nothing else'
# Keys that may stand for "documents" and "question", unlike "rejected" or "answer".
_DOCUMENT_KEYS = ("documents", "document", "docs", "doc", "numbers", "kept", "keep")
_QUESTION_KEYS = (
    "question",
    "query",
    "subquery",
    "subquestion",
    "sub_query",
    "sub_question",
    "sub-query",
    "sub-question",
)
_TRUTH = {"true": True, "yes": True, "false": False, "no": False}
# For example "1, 3" and "[1] [3]".
_NUMBERS = re.compile(r"\[*[0-9]{1,4}(?:[\s,\[\]]+[0-9]{1,4})*\]*\.?")
_NUMBER = re.compile(r"\s*\[?([0-9]{1,4})\]?\s*")
_LABEL = re.compile(
    r"(?:[-*•]\s+|\(?\d{1,2}[.)]\s+)?"
    r"(?:\**(?:here is |here's )?(?:(?:the|a|my|your) )?(?:next |first )?"
    r"(?:sub-? ?quer(?:y|ies)|sub-? ?questions?|question|reply|q)(?: \d{1,2})?\**\s*:\**\s*)?",
    re.IGNORECASE,
)
_QUOTES = ('""', "''", "“”", "**", "``")


class FilterReply(NamedTuple):
    """What the document filter replied.

    Attributes:
        numbers: The kept documents in reasoning order, counted from 1.
        answerable: Whether they answer the question.
    """

    numbers: list[int]
    answerable: bool


def read_documents(text: str, shown: int, recovered: Counter[str] | None = None) -> FilterReply:
    """Read the document filter's reply: `{"documents": [2, 1], "answerable": true}`, or "2, 1".

    Args:
        shown: Number of documents that the filter was shown.
        recovered: Counts readable replies in another form; meaningless after an error.
    """
    forms = Counter[str]() if recovered is None else recovered
    plain = without_thoughts(text).strip()
    if plain == "[]" or (_NUMBERS.fullmatch(plain) and plain.count("[") == plain.count("]")):
        reply = {"documents": re.findall("[0-9]+", plain)}
    else:
        reply = find_json(text, dict, advice=_DOCUMENTS, notes=forms)
    listed = _value_of(reply, _DOCUMENT_KEYS, forms)
    if not isinstance(listed, list):
        raise UnusableReply(DropReason.UNREADABLE_REPLY, f"The reply names no list of documents; {_DOCUMENTS}.")
    answerable = reply.get("answerable", True)
    if isinstance(answerable, str):
        answerable = _TRUTH.get(answerable.strip().casefold())
        forms[TEXT_VALUES] = 1
    if not isinstance(answerable, bool):
        raise _not_whole_numbers()
    numbers = [_document_number(item) for item in listed]
    missing = sorted({number for number in numbers if not 1 <= number <= shown})
    if missing:
        named = ", ".join(map(str, missing))
        raise UnusableReply(
            DropReason.WRONG_DOCUMENTS, f"There is no document {named}: they are numbered from 1 to {shown}."
        )
    if len(set(numbers)) < len(numbers):
        raise UnusableReply(DropReason.WRONG_DOCUMENTS, "A document is named twice; name each at most once.")
    return FilterReply(numbers, answerable)


def _document_number(item: object) -> int:
    """The number of a document, from JSON: 2, "2" or "[2]".

    Whether there is such a document is checked later, with other advice to the teacher.
    """
    # A negative number is a number, but that of no document, so the advice differs.
    if type(item) is int:
        return item
    match = _NUMBER.fullmatch(str(item))
    if match is None:
        raise _not_whole_numbers()
    return int(match[1])


def _not_whole_numbers() -> UnusableReply:
    """The error for a list with anything else than numbers, with advice for the repair turn."""
    return UnusableReply(DropReason.UNREADABLE_REPLY, f"Documents must be whole numbers; {_DOCUMENTS}.")


def _value_of(reply: dict[str, Any], keys: Sequence[str], forms: Counter[str]) -> object:
    """The value of the first of `keys`, or else of the reply's only key among the others; None without either.

    `forms` counts a reply with another key than the first, which is the one that the prompt asks for.
    """
    if keys[0] in reply:
        return reply[keys[0]]
    forms[OTHER_KEYS] = 1
    values = [value for key, value in reply.items() if str(key).casefold() in keys]
    if len(values) == 1:
        return values[0]
    return None


def check_answer_kept(question: Question, shown: Sequence[int], kept: Sequence[int]) -> None:
    """Check that a supporting document with a gold answer was kept; if none has one (yes, no, …), any of them."""
    supporting = [document for document in shown if document in question.supporting]
    with_answer = [document for document in supporting if _holds_answer(question, document)]
    needed = with_answer or supporting
    if not set(needed) & set(kept):
        # As the teacher sees them, counted from 1.
        numbers = " or ".join(str(number) for number, document in enumerate(shown, 1) if document in needed)
        raise UnusableReply(
            DropReason.ANSWER_NOT_KEPT, f"The answer can't be found without document {numbers}; keep it too."
        )


def _holds_answer(question: Question, document: int) -> bool:
    """Whether a document contains a gold answer; "yes" and "no" in a text are no answers."""
    content = question.passages[document].content
    names = [answer for answer in question.answers if normalize_name(answer) not in YES_NO]
    return any(mentions(content, name) for name in names)


def read_subquery(text: str, title: str = "", recovered: Counter[str] | None = None) -> str:
    """Read a sub-query: `{"question": "..."}`, or the question alone; question marks of the `title` are not counted.

    Exactly one question is accepted, since a loop searches with it as a whole.
    """
    forms = Counter[str]() if recovered is None else recovered
    plain = _without_quotes(without_thoughts(text))
    value: object = plain
    if "{" in plain:
        value = _value_of(find_json(text, dict, advice=_QUESTION, notes=forms), _QUESTION_KEYS, forms)
    if not isinstance(value, str) or not value.strip():
        raise UnusableReply(DropReason.UNREADABLE_REPLY, f"The reply holds no question; {_QUESTION}.")
    subquery = " ".join(_without_label(value).split())
    if subquery != " ".join(value.split()):
        forms[LABEL] = 1
    outside_title = subquery
    if "?" in title:
        outside_title = subquery.replace(title, "")
    if not subquery.endswith("?") or outside_title.count("?") > 1:
        raise UnusableReply(
            DropReason.NOT_ONE_QUESTION, "Ask exactly one question: one sentence with one question mark, at its end."
        )
    return subquery


def _without_label(text: str) -> str:
    """A sub-query without a number, bullet, "Sub-query:" or quotation marks around it."""
    bare = text.strip()
    unlabelled = bare
    label = _LABEL.match(bare)
    if label is not None:
        unlabelled = bare[label.end() :]
    # A label alone may be the question, as far as this function knows.
    return _without_quotes(unlabelled) or bare


def _without_quotes(text: str) -> str:
    """A text without pairs of quotation marks or Markdown marks around the whole of it."""
    text = text.strip()
    while len(text) > 2 and text[0] + text[-1] in _QUOTES:
        text = text[1:-1].strip()
    return text


def check_subquery(subquery: str, question: Question, earlier: Sequence[str]) -> None:
    """Check that a sub-query is not a copy and does not name the answer.

    A planner would learn to repeat the question, or to know the answer before it has searched.

    Raises:
        UnusableReply: It does one of both; the teacher is told which.
    """
    asked_before = {normalize_name(asked) for asked in (question.question, *earlier)}
    if normalize_name(subquery) in asked_before:
        raise UnusableReply(
            DropReason.COPIED_QUESTION,
            "This repeats the main question or an earlier sub-query; ask for what this document adds.",
        )
    if gives_away_answer(subquery, question):
        raise UnusableReply(
            DropReason.ANSWER_IN_SUBQUERY,
            "The sub-query names the answer of the main question; ask for it without naming it.",
        )


class TriplesReply(NamedTuple):
    """The triples in a reply, and the number of malformed ones."""

    triples: tuple[Triple, ...]
    malformed: int


def read_triples(text: str) -> TriplesReply:
    """Read the triples in a reply; see `llm.reply_triples.find_triples`.

    A reply that was cut off is sent back even if it has triples: those of the end of the document would be missing.
    """
    reply = find_triples(text, _TRIPLES)
    if reply.cut_off:
        raise UnusableReply(
            DropReason.UNREADABLE_REPLY, f"In the reply: the JSON in it is cut off or malformed; {_TRIPLES}."
        )
    if not reply.triples:
        raise UnusableReply(
            DropReason.NO_TRIPLES,
            "There is no complete triple in the reply; list at least one fact of the document as "
            '["subject", "predicate", "object"], three non-empty strings.',
        )
    return TriplesReply(reply.triples, reply.malformed)


class MissingFact(NamedTuple):
    """Why a label needs a fact that nothing before it states, and the name that is missing."""

    reason: DropReason
    name: str


def missing_facts(question: Question, records: Sequence[Record]) -> list[MissingFact]:
    """Return why labels need facts that nothing before them states; such labels teach a model to invent facts.

    - The facts before `[SUFFICIENT]` must name a gold answer, unless the answer is yes or no, the question compares, or
      the question names the answer.
    - A sub-query may name a hop's answer, a supporting passage or a name of the gold evidence only if the question and
      the facts before the sub-query have all words of that name, even apart ("Abdullah II of Jordan").

    Each reason is returned at most once, with the first missing name.
    """
    names = names_to_find(question)
    needs_answer = _answer_comes_from_facts(question)
    first_missing: dict[DropReason, str] = {}
    for record in records:
        facts: list[Triple] = []
        for step in record.steps:
            facts += step.triples
        if needs_answer and record.action is Action.SUFFICIENT and not facts_name(facts, question.answers):
            first_missing.setdefault(DropReason.ANSWER_NOT_IN_FACTS, question.answers[0])
        known_text = " ".join([question.question, *chain.from_iterable(triple.as_list() for triple in facts)])
        known_words = {*normalize_name(known_text).split(), *PREPOSITIONS}
        for name in names:
            is_new = mentions(record.subquery, name) and not mentions(known_text, name)
            if is_new and not known_words.issuperset(normalize_name(name).split()):
                first_missing.setdefault(DropReason.NAME_NOT_IN_FACTS, name)
    return [MissingFact(reason, name) for reason, name in first_missing.items()]


def _answer_comes_from_facts(question: Question) -> bool:
    """Whether only facts can name the gold answer: it is not yes or no, and the question does not offer it."""
    if "comparison" in question.type or normalize_name(question.answers[0]) in YES_NO:
        return False
    return not any(mentions(question.question, answer) for answer in question.answers)
