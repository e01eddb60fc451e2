"""Benchmark questions, the reasons to drop a question, and a teacher's annotations.

Every benchmark reader yields `Question`s: question, documents and answer (RAS, appendix C), plus the gold evidence
triples and decompositions of 2WikiMultiHopQA and MuSiQue. A `Teacher` selects the documents that help (section C.1,
figure 7), writes one sub-query for each document (section C.2, figure 8) and extracts the document's triples (f_t2t of
Algorithm 1).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

from tripletune.core.data.passages import Passage
from tripletune.core.data.records import Record
from tripletune.core.data.triples import Triple


class DropReason(StrEnum):
    """Why a question gives no records; the values are printed in the data set card."""

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
        passage_index: Index of the passage with the answer in the question's passages.
        triples: The passage's facts, if the row has them.
    """

    question: str
    answer: str
    passage_index: int
    triples: tuple[Triple, ...] = ()


@dataclass(frozen=True, slots=True)
class Question:
    """One benchmark question.

    Attributes:
        answers: Gold answer first, then its aliases; empty if no answer is known.
        passages: All passages of the row, distractors included.
        supporting: Distinct indices of the supporting passages, in order of their first supporting fact or of the
            gold reasoning; empty if the row names no supporting passage.
        search: The text to search with, if `question` also lists choices.
        short_answers: For an ambiguous question (ASQA), the aliases of the short answer to each reading.
        links: Ids or titles of the supporting passages in a corpus; `data_builders.readers.with_linked_passages`
            appends these passages to `passages`.
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
    """A benchmark row that cannot be used."""

    id: str
    reason: DropReason


# The counter that benchmark readers count warnings in, and what the readers yield.
Issues = Counter[str] | None
Questions = Iterator[Question | Dropped]


class UnlabelledQuestion(Exception):
    """A teacher cannot label a question; the builder drops the question and counts the reason.

    The `stage` is the role of the faulty teacher call, if there is one.

    Args:
        reason: Why, as the card counts it.
        detail: What is wrong in this question.
        stage: The role of the call, or "".
        reply: The faulty reply, for `dropped.ndjson`.
    """

    def __init__(self, reason: DropReason, detail: str = "", stage: str = "", reply: str = "") -> None:
        super().__init__(": ".join(text for text in (reason.value, stage, detail) if text))
        self.reason, self.detail, self.stage, self.reply = reason, detail, stage, reply


class Annotation(NamedTuple):
    """A teacher's sub-query and triples for one document.

    Attributes:
        document: Index of the document in `question.passages`.
        reworded: A rewording of the sub-query to ask after a failed search, if known.
    """

    document: int
    subquery: str
    triples: list[Triple]
    reworded: str = ""


class TripleFile(Protocol):
    """Triples by passage, from a file that a build checks at its end."""

    def __call__(self, passage: Passage) -> list[Triple]:
        """The triples of a passage; empty if the file has none."""

    def refuse_useless_file(self) -> None:
        """Raise `ValueError` if the file had triples of no passage: it is then probably another corpus's."""


class Teacher:
    """The teacher in sample labelling; a subclass must define only `annotate`.

    Attributes:
        name: The teacher's name in the data card.
        collects_failures: Whether the teacher also annotates documents of other questions, for failed searches.
        triples_of: The file of triples that the teacher reads, if any.
    """

    name: str
    collects_failures = True
    triples_of: TripleFile | None = None

    async def annotate(self, question: Question) -> list[Annotation]:
        """Annotate the documents that help (maybe none), in reasoning order, or raise `UnlabelledQuestion`."""
        raise NotImplementedError

    def answers_directly(self, question: Question) -> bool:
        """Whether the question is known to need no retrieval."""
        return False

    async def helpful_documents(self, question: Question) -> list[int]:
        """Indices in `question.passages` of the documents that the document filter keeps (RAS, section C.1)."""
        return [annotation.document for annotation in await self.annotate(question)]

    async def keeps_nothing(self, question: Question) -> bool:
        """Whether the document filter keeps no document; a refusal of its reply for this reason means the same."""
        try:
            return not question.supporting or not await self.helpful_documents(question)
        except UnlabelledQuestion as error:
            return error.reason in (DropReason.NO_HELPFUL, DropReason.ANSWER_NOT_KEPT, DropReason.NOT_ANSWERABLE)

    async def records(
        self, question: Question, label: Callable[[Question, Teacher], Awaitable[list[Record]]]
    ) -> list[Record]:
        """The records of a question; `label` builds them from its annotations."""
        return await label(question, self)
