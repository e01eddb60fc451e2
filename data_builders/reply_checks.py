"""Checks on the replies of a teacher LLM: read them strictly, and say in a sentence what is wrong.

Every function raises `UnusableReply` with a member of `DropReason` and an explanation for the teacher, which gets one
chance to mend its reply. JSON is what our prompts ask for; the plain forms of the paper (RAS, figures 7, 8 and 19: "1,
3", the question alone, "(S> s| P> p| O> o)") are read too, so that its prompts can be put in the place of ours.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from data_builders.card import YES_NO
from data_builders.labelling import gives_away_answer
from data_builders.questions import DropReason, Question
from data_builders.wording import mentions
from models.llm.replies import UnusableReply, find_json, without_thoughts
from models.normalize import normalize_answer
from models.triples import Triple, parse_triples

_NUMBERS = re.compile(r"\d{1,4}(\s*,\s*\d{1,4})*\s*\.?")
_DOCUMENTS = 'write one JSON object {"documents": [numbers], "answerable": true or false} and nothing else'
_QUESTION = 'write one JSON object {"question": "the sub-query"} and nothing else'
_TRIPLES = 'write one JSON object {"triples": [["subject", "predicate", "object"], ...]} and nothing else'


@dataclass(frozen=True, slots=True)
class KeptDocuments:
    """The reply of the document filter.

    Attributes:
        numbers: Numbers of the kept documents as the teacher was shown them, from 1, in reasoning order.
        answerable: Whether it says that they hold the answer.
    """

    numbers: tuple[int, ...]
    answerable: bool = True


@dataclass(frozen=True, slots=True)
class ReadTriples:
    """The reply of the triple extraction: the well-formed triples in order, and how many were malformed."""

    triples: tuple[Triple, ...]
    malformed: int = 0


def read_documents(text: str, shown: int) -> KeptDocuments:
    """Read the document filter's reply: `{"documents": [2, 1], "answerable": true}`, or "2, 1".

    Args:
        text: The reply.
        shown: How many documents were shown.

    Raises:
        UnusableReply: it can't be read, or a number is out of range or occurs twice.
    """
    plain = without_thoughts(text).strip()
    if _NUMBERS.fullmatch(plain):
        value: Any = re.findall(r"\d+", plain)
    else:
        value = _json(text, _DOCUMENTS)
    if isinstance(value, list):
        value = {"documents": value}
    if not isinstance(value.get("documents"), list):
        _refuse(DropReason.UNREADABLE_REPLY, f"The reply names no list of documents; {_DOCUMENTS}.")
    numbers, answerable = [_whole(number) for number in value["documents"]], value.get("answerable", True)
    if not all(number is not None for number in numbers) or not isinstance(answerable, bool):
        _refuse(DropReason.UNREADABLE_REPLY, f"Documents must be whole numbers; {_DOCUMENTS}.")
    kept = tuple(number for number in numbers if number is not None)
    wrong = sorted({number for number in kept if not 1 <= number <= shown})
    if wrong:
        found = ", ".join(map(str, wrong))
        _refuse(DropReason.WRONG_DOCUMENTS, f"There is no document {found}: they are numbered from 1 to {shown}.")
    if len(set(kept)) < len(kept):
        _refuse(DropReason.WRONG_DOCUMENTS, "A document is named twice; name each at most once.")
    return KeptDocuments(kept, answerable)


def check_answer_kept(question: Question, shown: Sequence[int], kept: Sequence[int]) -> None:
    """Check that an answerable document was kept.

    That is a supporting document that names a gold answer. Where none does (yes and no, comparisons, numbers in
    other words), any supporting document will do.

    Args:
        question: The question.
        shown: The passages that were shown, as indices into `question.passages`.
        kept: Those that were kept.

    Raises:
        UnusableReply: no such document was kept.
    """
    supporting = [document for document in shown if document in question.supporting]
    names = [answer for answer in question.answers if normalize_answer(answer) not in YES_NO]
    holders = [
        document
        for document in supporting
        if any(mentions(question.passages[document].content, name) for name in names)
    ]
    needed = holders or supporting
    if not set(needed) & set(kept):
        numbers = " or ".join(str(list(shown).index(document) + 1) for document in needed)
        _refuse(DropReason.ANSWER_NOT_KEPT, f"The answer can't be found without document {numbers}; keep it too.")


def read_subquery(text: str, title: str = "") -> str:
    """Read a sub-query: `{"question": "..."}`, or the question alone; white space is folded.

    Args:
        text: The reply.
        title: The document's title; question marks that belong to it are not counted.

    Raises:
        UnusableReply: it can't be read, or is not exactly one question.
    """
    value: Any = without_thoughts(text).strip().strip("\"'“”").strip()
    if "{" in value:
        found = _json(text, _QUESTION)
        value = found.get("question") if isinstance(found, dict) else None
    if not isinstance(value, str) or not value.strip():
        _refuse(DropReason.UNREADABLE_REPLY, f"The reply holds no question; {_QUESTION}.")
    subquery = " ".join(value.split())
    outside = subquery.replace(title, "").count("?") if "?" in title else subquery.count("?")
    if not subquery.endswith("?") or outside > 1:
        _refuse(
            DropReason.NOT_ONE_QUESTION, "Ask exactly one question: one sentence with one question mark, at its end."
        )
    return subquery


def check_subquery(subquery: str, question: Question, earlier: Sequence[str]) -> None:
    """Check a sub-query that becomes a label: no copy, and the answer is not in it.

    Args:
        subquery: The sub-query.
        question: The main question.
        earlier: The sub-queries before it.

    Raises:
        UnusableReply: it repeats the main question or an earlier sub-query (normalised), or names a gold answer that
            the question does not name.
    """
    if normalize_answer(subquery) in {normalize_answer(other) for other in (question.question, *earlier)}:
        _refuse(
            DropReason.COPIED_QUESTION,
            "This repeats the main question or an earlier sub-query; ask for what this document adds.",
        )
    if gives_away_answer(subquery, question):
        _refuse(
            DropReason.ANSWER_IN_SUBQUERY,
            "The sub-query names the answer of the main question; ask for it without naming it.",
        )


def read_triples(text: str) -> ReadTriples:
    """Read triples: `{"triples": [["s", "p", "o"]]}`, the list alone, or "(S> s| P> p| O> o)".

    A malformed triple is counted and costs no neighbour.

    Raises:
        UnusableReply: it can't be read, or holds no well-formed triple.
    """
    if "S>" in text and (marked := parse_triples(without_thoughts(text))).triples:
        return ReadTriples(marked.triples, marked.malformed)
    value = _json(text, _TRIPLES)
    if isinstance(value, dict):
        value = value.get("triples")
    if not isinstance(value, list):
        _refuse(DropReason.UNREADABLE_REPLY, f"The reply holds no list of triples; {_TRIPLES}.")
    triples = [triple for row in value if (triple := _triple(row)) is not None]
    if not triples:
        _refuse(
            DropReason.NO_TRIPLES,
            "There is no complete triple in the reply; list at least one fact of the document as "
            '["subject", "predicate", "object"], three non-empty strings.',
        )
    return ReadTriples(tuple(triples), len(value) - len(triples))


def _triple(row: object) -> Triple | None:
    if isinstance(row, dict):
        row = [row.get("subject"), row.get("predicate"), row.get("object")]
    if not isinstance(row, list) or len(row) != 3:
        return None
    # A year or a number is often written without quotation marks.
    fields = [str(field) if isinstance(field, (int, float)) and not isinstance(field, bool) else field for field in row]
    if not all(isinstance(field, str) and field.strip() for field in fields):
        return None
    return Triple(*fields)


def _json(text: str, advice: str) -> Any:
    """The JSON object of a reply, or the list that the reply is."""
    try:
        return find_json(text, dict)
    except UnusableReply as error:
        if text.strip().startswith("["):
            with suppress(UnusableReply):
                return find_json(text, list)
        what = "The reply is empty" if not text.strip() else f"In the reply: {error.explanation.rstrip('.')}"
        _refuse(DropReason.UNREADABLE_REPLY, f"{what}; {advice}.")


def _whole(value: object) -> int | None:
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,4}", value.strip()):
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10_000 else None


def _refuse(reason: DropReason, explanation: str) -> NoReturn:
    raise UnusableReply(reason.value, explanation)
