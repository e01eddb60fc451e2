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
from typing import Any

from tripletune.core.calls import UnusableReply
from tripletune.core.data.answers import YES_NO, mentions, normalize_answer
from tripletune.core.data.questions import DropReason, Question
from tripletune.core.data.records import Action, Record
from tripletune.core.data.triples import Triple
from tripletune.data_builders.datasets.kinds import facts_name
from tripletune.data_builders.subq import gives_away_answer
from tripletune.data_builders.subq.annotations import PREPOSITIONS
from tripletune.data_builders.subq.searches import names_to_find
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
_SUB = [f"sub{mark}{noun}" for mark in ("", "_", "-") for noun in ("query", "question")]
_QUESTION_KEYS = ("question", "query", *_SUB)
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


def read_documents(text: str, shown: int, recovered: Counter[str] | None = None) -> tuple[list[int], bool]:
    """Read the document filter's reply: `{"documents": [2, 1], "answerable": true}`, or "2, 1".

    Args:
        recovered: Counts readable replies in another form; meaningless after an error.
    """
    forms = Counter[str]() if recovered is None else recovered
    plain = without_thoughts(text).strip()
    if plain == "[]" or (_NUMBERS.fullmatch(plain) and plain.count("[") == plain.count("]")):
        value = {"documents": re.findall("[0-9]+", plain)}
    else:
        value = find_json(text, dict, advice=_DOCUMENTS, notes=forms)
    listed = _only(value, _DOCUMENT_KEYS, forms)
    if not isinstance(listed, list):
        raise UnusableReply(DropReason.UNREADABLE_REPLY, f"The reply names no list of documents; {_DOCUMENTS}.")
    kept = [int(match[1]) if (match := _NUMBER.fullmatch(str(item))) else item for item in listed]
    answerable = value.get("answerable", True)
    if isinstance(answerable, str):
        answerable, forms[TEXT_VALUES] = _TRUTH.get(answerable.strip().casefold()), 1
    if not all(type(number) is int for number in kept) or not isinstance(answerable, bool):
        raise UnusableReply(DropReason.UNREADABLE_REPLY, f"Documents must be whole numbers; {_DOCUMENTS}.")
    if wrong := sorted({number for number in kept if not 1 <= number <= shown}):
        found = ", ".join(map(str, wrong))
        raise UnusableReply(
            DropReason.WRONG_DOCUMENTS, f"There is no document {found}: they are numbered from 1 to {shown}."
        )
    if len(set(kept)) < len(kept):
        raise UnusableReply(DropReason.WRONG_DOCUMENTS, "A document is named twice; name each at most once.")
    return kept, answerable


def _only(reply: dict[str, Any], keys: Sequence[str], forms: Counter[str]) -> Any:
    """The value of the first of `keys`, or else of the reply's only key among the others; None without either."""
    if keys[0] in reply:
        return reply[keys[0]]
    found = [value for key, value in reply.items() if str(key).casefold() in keys]
    forms[OTHER_KEYS] = 1
    return found[0] if len(found) == 1 else None


def check_answer_kept(question: Question, shown: Sequence[int], kept: Sequence[int]) -> None:
    """Check that a supporting document with a gold answer was kept; if none has one (yes, no, …), any of them."""
    supporting = [document for document in shown if document in question.supporting]
    names = [answer for answer in question.answers if normalize_answer(answer) not in YES_NO]
    holders = [one for one in supporting if any(mentions(question.passages[one].content, name) for name in names)]
    needed = holders or supporting
    if not set(needed) & set(kept):
        numbers = " or ".join(str(list(shown).index(document) + 1) for document in needed)
        raise UnusableReply(
            DropReason.ANSWER_NOT_KEPT, f"The answer can't be found without document {numbers}; keep it too."
        )


def read_subquery(text: str, title: str = "", recovered: Counter[str] | None = None) -> str:
    """Read a sub-query: `{"question": "..."}`, or the question alone; question marks of the `title` are not counted."""
    forms = Counter[str]() if recovered is None else recovered
    value: Any = _without_quotes(without_thoughts(text))
    if "{" in value:
        value = _only(find_json(text, dict, advice=_QUESTION, notes=forms), _QUESTION_KEYS, forms)
    if not isinstance(value, str) or not value.strip():
        raise UnusableReply(DropReason.UNREADABLE_REPLY, f"The reply holds no question; {_QUESTION}.")
    subquery = " ".join(_without_label(value).split())
    if subquery != " ".join(value.split()):
        forms[LABEL] = 1
    outside = subquery.replace(title, "") if "?" in title else subquery
    if not subquery.endswith("?") or outside.count("?") > 1:
        raise UnusableReply(
            DropReason.NOT_ONE_QUESTION, "Ask exactly one question: one sentence with one question mark, at its end."
        )
    return subquery


def _without_label(text: str) -> str:
    """A sub-query without a number, bullet, "Sub-query:" or quotation marks around it."""
    bare = text.strip()
    rest = bare[len(match[0]) :] if (match := _LABEL.match(bare)) else bare
    return _without_quotes(rest) or bare


def _without_quotes(text: str) -> str:
    text = text.strip()
    while len(text) > 2 and text[0] + text[-1] in _QUOTES:
        text = text[1:-1].strip()
    return text


def check_subquery(subquery: str, question: Question, earlier: Sequence[str]) -> None:
    """Check that a sub-query is not a copy and does not name the answer."""
    if normalize_answer(subquery) in {normalize_answer(other) for other in (question.question, *earlier)}:
        raise UnusableReply(
            DropReason.COPIED_QUESTION,
            "This repeats the main question or an earlier sub-query; ask for what this document adds.",
        )
    if gives_away_answer(subquery, question):
        raise UnusableReply(
            DropReason.ANSWER_IN_SUBQUERY,
            "The sub-query names the answer of the main question; ask for it without naming it.",
        )


def read_triples(text: str) -> tuple[tuple[Triple, ...], int]:
    """The triples in a reply, and the number of malformed ones; see `llm.replies.find_triples`."""
    found = find_triples(text, _TRIPLES)
    if found.cut_off:
        raise UnusableReply(
            DropReason.UNREADABLE_REPLY, f"In the reply: the JSON in it is cut off or malformed; {_TRIPLES}."
        )
    if not found.triples:
        raise UnusableReply(
            DropReason.NO_TRIPLES,
            "There is no complete triple in the reply; list at least one fact of the document as "
            '["subject", "predicate", "object"], three non-empty strings.',
        )
    return found.triples, found.malformed


def missing_facts(question: Question, records: Sequence[Record]) -> list[tuple[DropReason, str]]:
    """Return why labels need facts that nothing before them states; such labels teach a model to invent facts.

    - The facts before `[SUFFICIENT]` must name a gold answer, unless the answer is yes or no, the question compares, or
      the question names the answer.
    - A sub-query may name a hop's answer, a supporting passage or a name of the gold evidence only if the question and
      the facts before the sub-query have all words of that name, even apart ("Abdullah II of Jordan").

    Each reason is returned at most once, with the first missing name.
    """
    names, answers = names_to_find(question), question.answers
    free = "comparison" in question.type or normalize_answer(answers[0]) in YES_NO
    free = free or any(mentions(question.question, answer) for answer in answers)
    found: dict[DropReason, str] = {}
    for record in records:
        facts = [triple for step in record.steps for triple in step.triples]
        if not free and record.action is Action.SUFFICIENT and not facts_name(facts, answers):
            found.setdefault(DropReason.ANSWER_NOT_IN_FACTS, answers[0])
        read = " ".join([question.question, *(part for triple in facts for part in triple.as_list())])
        words = {*normalize_answer(read).split(), *PREPOSITIONS}
        for name in names:
            new = mentions(record.subquery, name) and not mentions(read, name)
            if new and not words.issuperset(normalize_answer(name).split()):
                found.setdefault(DropReason.NAME_NOT_IN_FACTS, name)
    return list(found.items())
