"""Checks on the replies of a teacher LLM: read them strictly, and say in a sentence what is wrong.

Every function raises `UnusableReply` with a member of `DropReason` and an explanation for the teacher, which gets one
chance to mend its reply. JSON is what our prompts ask for; the plain forms of the paper (RAS, figures 7, 8 and 19: "1,
3", the question alone, "(S> s| P> p| O> o)") are read too, so that its prompts can be put in the place of ours. Other
forms are read where they leave no doubt, and counted by name (`data_builders.reply_recovery`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from tripletune.data_builders.datasets.kinds.records import YES_NO
from tripletune.data_builders.hotpotqa_subq import reply_recovery as recovery
from tripletune.data_builders.hotpotqa_subq.labelling import gives_away_answer
from tripletune.data_builders.hotpotqa_subq.questions import DropReason, Question
from tripletune.data_builders.hotpotqa_subq.wording import mentions
from tripletune.models.data.records import normalize_answer
from tripletune.models.data.triples import Triple, parse_triples
from tripletune.models.llm.replies import UnusableReply, find_json, without_thoughts

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


def read_documents(text: str, shown: int, recovered: Counter[str] | None = None) -> KeptDocuments:
    """Read the document filter's reply: `{"documents": [2, 1], "answerable": true}`, or "2, 1".

    Args:
        text: The reply.
        shown: How many documents were shown.
        recovered: Counts what was not in this form and could be read all the same.

    Raises:
        UnusableReply: it can't be read, or a number is out of range or occurs twice.
    """
    notes: Counter[str] = Counter()
    value = _documents_value(text, notes)
    listed = value.get("documents")
    if not isinstance(listed, list):
        listed = recovery.documents_of(value)
        notes[recovery.TEXT_VALUES if "documents" in value else recovery.OTHER_KEYS] = 1
    if listed is None:
        _refuse(DropReason.UNREADABLE_REPLY, f"The reply names no list of documents; {_DOCUMENTS}.")
    numbers, answerable = [_whole(number) for number in listed], value.get("answerable", True)
    if None in numbers:
        numbers = [recovery.number_of(item) if number is None else number for item, number in zip(listed, numbers)]
        notes[recovery.TEXT_VALUES] = 1
    if not isinstance(answerable, bool):
        answerable = recovery.truth(answerable)
        notes[recovery.TEXT_VALUES] = 1
    if None in numbers or answerable is None:
        _refuse(DropReason.UNREADABLE_REPLY, f"Documents must be whole numbers; {_DOCUMENTS}.")
    kept = tuple(number for number in numbers if number is not None)
    wrong = sorted({number for number in kept if not 1 <= number <= shown})
    if wrong:
        found = ", ".join(map(str, wrong))
        _refuse(DropReason.WRONG_DOCUMENTS, f"There is no document {found}: they are numbered from 1 to {shown}.")
    if len(set(kept)) < len(kept):
        _refuse(DropReason.WRONG_DOCUMENTS, "A document is named twice; name each at most once.")
    _note(recovered, notes)
    return KeptDocuments(kept, answerable)


def _documents_value(text: str, notes: Counter[str]) -> dict[str, Any]:
    """The filter's reply as a dictionary, whatever its form."""
    plain = without_thoughts(text).strip()
    if _NUMBERS.fullmatch(plain):
        return {"documents": re.findall(r"\d+", plain)}
    if plain.startswith("[") and plain.count("[") > 1 and (read := recovery.bare_numbers(plain)) is not None:
        notes[recovery.BARE_NUMBERS] = 1
        return {"documents": read[0]}
    try:
        value = _json(text, _DOCUMENTS)
    except UnusableReply:
        literal = recovery.python_literal(plain)
        if literal is not None:
            notes[recovery.PYTHON_LITERAL] = 1
            return literal
        read = recovery.bare_numbers(plain)
        if read is None:
            raise
        notes[recovery.BARE_NUMBERS] = 1
        return {"documents": read[0], "answerable": read[1]}
    return {"documents": value} if isinstance(value, list) else value


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


def read_subquery(text: str, title: str = "", recovered: Counter[str] | None = None) -> str:
    """Read a sub-query: `{"question": "..."}`, or the question alone; white space is folded.

    Args:
        text: The reply.
        title: The document's title; question marks that belong to it are not counted.
        recovered: Counts what was not in this form and could be read all the same.

    Raises:
        UnusableReply: it can't be read, or is not exactly one question.
    """
    notes: Counter[str] = Counter()
    plain: Any = recovery.without_quotes(without_thoughts(text))
    value = _question_value(plain, text, notes) if "{" in plain else plain
    if not isinstance(value, str) or not value.strip():
        _refuse(DropReason.UNREADABLE_REPLY, f"The reply holds no question; {_QUESTION}.")
    subquery = " ".join(value.split())
    bare = " ".join(recovery.without_label(value).split())
    if bare != subquery:
        subquery, notes[recovery.LABEL] = bare, 1
    if not _is_one_question(subquery, title):
        first = recovery.first_question(value)
        if first is None or not _is_one_question(first, title):
            _refuse(
                DropReason.NOT_ONE_QUESTION,
                "Ask exactly one question: one sentence with one question mark, at its end.",
            )
        subquery, notes[recovery.MORE_TEXT] = " ".join(first.split()), 1
    _note(recovered, notes)
    return subquery


def _question_value(plain: str, text: str, notes: Counter[str]) -> Any:
    """The question in a reply with a JSON object."""
    try:
        found = _json(text, _QUESTION)
    except UnusableReply:
        found = recovery.python_literal(plain)
        if found is None:
            raise
        notes[recovery.PYTHON_LITERAL] = 1
    if not isinstance(found, dict):
        return None
    if "question" not in found and (other := recovery.question_of(found)) is not None:
        notes[recovery.OTHER_KEYS] = 1
        return other
    return found.get("question")


def _is_one_question(text: str, title: str) -> bool:
    outside = text.replace(title, "").count("?") if "?" in title else text.count("?")
    return text.endswith("?") and outside <= 1


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


def read_triples(text: str, recovered: Counter[str] | None = None) -> ReadTriples:
    """Read triples: `{"triples": [["s", "p", "o"]]}`, the list alone, or "(S> s| P> p| O> o)".

    A malformed triple is counted and costs no neighbour.

    Args:
        text: The reply.
        recovered: Counts what was not in this form and could be read all the same.

    Raises:
        UnusableReply: it can't be read, or holds no well-formed triple.
    """
    if "S>" in text and (marked := parse_triples(without_thoughts(text))).triples:
        return ReadTriples(marked.triples, marked.malformed)
    try:
        return _read_triples(_json(text, _TRIPLES))
    except UnusableReply as error:
        name, rows = _other_triples(without_thoughts(text))
        if not rows:
            raise
        try:
            found = _read_triples(rows)
        except UnusableReply:
            raise error from None
        _note(recovered, Counter([name]))
        return found


def _read_triples(value: Any) -> ReadTriples:
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


def _other_triples(text: str) -> tuple[str, list[Any]]:
    """Triples in another form, and what that form is called; an empty list where there are none."""
    if rows := recovery.loose_triples(text):
        return recovery.LOOSE_TRIPLES, rows
    try:
        value, name = find_json(text, dict), recovery.OTHER_KEYS
    except UnusableReply:
        value, name = recovery.python_literal(text) or {}, recovery.PYTHON_LITERAL
    listed = value.get("triples") or recovery.facts_of(value)
    return name, listed if isinstance(listed, list) else []


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


def _note(recovered: Counter[str] | None, notes: Counter[str]) -> None:
    if recovered is not None:
        recovered.update(+notes)


def _refuse(reason: DropReason, explanation: str) -> NoReturn:
    raise UnusableReply(reason.value, explanation)
