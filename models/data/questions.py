"""Benchmark questions, the reasons to leave one out, and a teacher's annotations.

RAS, appendix C, starts from triples (Q, {d_0, ..., d_n}, A). Every benchmark reader yields `Question`s: that triple,
plus the gold evidence triples and decompositions of 2WikiMultiHopQA and MuSiQue. A `Teacher` does the two steps before
sample labelling (sections C.1 and C.2, figures 7 and 8) and reads triples out of a document (f_t2t of Algorithm 1):
which documents help, one sub-query for each, its triples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from tripletune.models.data.records import Passage, Record
from tripletune.models.data.triples import Triple


class DropReason(StrEnum):
    """Why a question gives no records; the values are the words of the data set card."""

    SUPPORT_NOT_IN_CONTEXT = "a supporting title is not in the context"
    NO_SUPPORT = "no supporting document"
    NO_ANSWER = "no gold answer"
    UNANSWERABLE = "marked unanswerable by the benchmark"
    REPEATED_ID = "question id seen before"
    NO_ANNOTATION = "no annotation for the question"
    NO_HELPFUL = "no helpful document"
    HELPFUL_NOT_IN_CONTEXT = "a helpful title is not in the context"
    NO_SUBQUERY = "a helpful document has no sub-query"
    NO_TRIPLES = "a helpful document has no triples"
    BROKEN_REFERENCE = "a hop refers to a hop that is not before it"
    UNPLACED_EVIDENCE = "an evidence triple fits no supporting document"
    ANSWER_IN_SUBQUERY = "a sub-query gives away the gold answer"
    CALL_REFUSED = "a call to the teacher can't be answered"
    UNREADABLE_REPLY = "a teacher's reply cannot be read"
    WRONG_DOCUMENTS = "the teacher kept documents that are not there, or one twice"
    ANSWER_NOT_KEPT = "the teacher kept no supporting document with the answer"
    NOT_ANSWERABLE = "the teacher says that the documents don't hold the answer"
    NOT_ONE_QUESTION = "a sub-query is not exactly one question"
    COPIED_QUESTION = "a sub-query repeats the main question or an earlier sub-query"
    ANSWER_NOT_IN_FACTS = "the facts do not hold the answer"
    NAME_NOT_IN_FACTS = "a sub-query names what neither question nor facts hold"


@dataclass(frozen=True, slots=True)
class Hop:
    """One step of a gold decomposition (MuSiQue).

    Attributes:
        question: The single-hop question; `#k` stands for the answer of the k-th hop, counted from 1.
        passage_index: Where the answer stands: an index into the question's passages.
        triples: The passage's facts, where the row gives them.
    """

    question: str
    answer: str
    passage_index: int
    triples: tuple[Triple, ...] = ()


@dataclass(frozen=True, slots=True)
class Question:
    """One benchmark question.

    Attributes:
        answers: Gold answer first, then its aliases; empty where none is known.
        passages: All passages of the row, distractors included.
        supporting: Indices of the supporting passages, distinct, in order of their first supporting fact or of the
            gold reasoning. Empty when the row names none.
        search: The text to search with, if `question` also lists choices.
        short_answers: Aliases of the short answer of each reading, for an ambiguous question (ASQA).
        links: Ids or titles of the supporting passages in a corpus; `data_builders.readers.linked` appends these to
            `passages`.
    """

    id: str
    question: str
    answers: tuple[str, ...]
    passages: tuple[Passage, ...]
    supporting: tuple[int, ...]
    type: str
    source: str
    hops: tuple[Hop, ...] = ()
    evidences: tuple[Triple, ...] = ()
    search: str = ""
    short_answers: tuple[tuple[str, ...], ...] = ()
    links: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Dropped:
    """A row that was read and cannot be used."""

    id: str
    reason: DropReason


# What readers of benchmarks count in, and what they give.
Issues = Counter[str] | None
Questions = Iterator[Question | Dropped]


class UnlabelledQuestion(Exception):
    """A teacher cannot label a question; the builder leaves the question out and counts the reason.

    The `stage` is the role of the teacher LLM's faulty call, if any.
    """

    def __init__(self, reason: DropReason, detail: str = "", stage: str = "", reply: str = "") -> None:
        super().__init__(": ".join(part for part in (reason.value, stage, detail) if part))
        self.reason, self.detail, self.stage, self.reply = reason, detail, stage, reply


class Annotation(NamedTuple):
    """A teacher's sub-query and triples for one document.

    Attributes:
        document: Its index into `question.passages`.
        reworded: Rewordings of the sub-query to ask after a failed search, if known.
    """

    document: int
    subquery: str
    triples: list[Triple]
    reworded: str = ""


class Teacher:
    """The teacher in sample labelling; a subclass must write only `annotate`.

    Attributes:
        name: As the data card calls it.
        collects_failures: Whether it also annotates documents of other questions, for failed searches.
        triples_of: The file of triples that it reads, if any; `check` is called at the end of a build.
    """

    name: str
    collects_failures = True
    triples_of: Any = None

    async def annotate(self, question: Question) -> list[Annotation]:
        """The documents that help, in reasoning order; none where none does. May raise `UnlabelledQuestion`."""
        raise NotImplementedError

    def answers_directly(self, question: Question) -> bool:
        """Whether the question is known to need no retrieval."""
        return False

    async def helpful_documents(self, question: Question) -> list[int]:
        """Documents that the filter keeps (RAS, section C.1), as indices into `question.passages`."""
        return [one.document for one in await self.annotate(question)]

    async def keeps_nothing(self, question: Question) -> bool:
        """Whether the document filter keeps no document."""
        try:
            return not question.supporting or not await self.helpful_documents(question)
        except UnlabelledQuestion as error:
            return error.reason in (DropReason.NO_HELPFUL, DropReason.ANSWER_NOT_KEPT, DropReason.NOT_ANSWERABLE)

    async def records(
        self, question: Question, label: Callable[[Question, Teacher], Awaitable[list[Record]]]
    ) -> list[Record]:
        """The records of a question; `label` makes them of its annotations."""
        return await label(question, self)
