"""HotpotQA-SUBQ: questions and what a teacher says of them become planning and answering records (RAS, Algorithm 1).

RAS, appendix C, starts from triples (Q, {d_0, ..., d_n}, A). A `Question`, which every benchmark reader yields, is that
triple plus what 2WikiMultiHopQA and MuSiQue give besides: gold evidence triples and gold decompositions. A `Teacher`
does the two steps before sample labelling (sections C.1 and C.2, figures 7 and 8) and reads triples out of a document
(f_t2t of Algorithm 1): which documents help, one sub-query for each, its triples. `label_question` makes the records.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain, cycle, islice
from typing import Literal, NamedTuple, Protocol

from tripletune.models.data.records import YES_NO, Action, Passage, Record, Step, mentions, normalize_answer
from tripletune.models.data.triples import Triple

FirstSubquery = Literal["main_question", "generated"]
Shown = Literal["supporting", "all"]
Found = tuple[Passage, list[Triple]]
# The end of the id of a record whose last search failed.
AGAIN = "-again"
# Two letters stand in many texts by chance: MuSiQue lists "NO" as an alias of Norway.
_SHORTEST_ALIAS = 3
# Of a passage's title: "Waterloo (1970 film)".
BRACKETED = re.compile(r"\s*\([^()]*\)")


class DropReason(StrEnum):
    """Why a question gives no records; the values are the words of the data set card."""

    SUPPORT_NOT_IN_CONTEXT = "a supporting title is not in the context"
    NO_SUPPORT = "no supporting document"
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
        answer: Its gold answer.
        passage_index: Where the answer stands: an index into the question's passages.
    """

    question: str
    answer: str
    passage_index: int


@dataclass(frozen=True, slots=True)
class Question:
    """One benchmark question.

    Attributes:
        id: The benchmark's own id.
        question: The main question Q.
        answers: Gold answer first, then its aliases.
        passages: All passages of the row, distractors included.
        supporting: Indices of the supporting passages, distinct, in order of their first supporting fact or of the
            gold reasoning. Empty when the row names none.
        type: The benchmark's question type ("bridge", "comparison", "3hop1", ...).
        source: The data set's name, as it appears in the records.
        hops: Gold decomposition, in order.
        evidences: Gold evidence triples, in reasoning order.
        search: The question as it is searched, where `question` has choices behind it.
        short_answers: Of a question with several readings the aliases of each one's short answer (ASQA).
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


@dataclass(frozen=True, slots=True)
class Dropped:
    """A row that was read and cannot be used."""

    id: str
    reason: DropReason


class UnlabelledQuestion(Exception):
    """A teacher cannot label a question; the builder leaves the question out and counts the reason.

    Attributes:
        reason: What the card counts.
        detail: What exactly is wrong; may be empty.
        stage: The role of the teacher LLM's call whose reply is at fault; empty when none is.
        reply: That reply.
    """

    def __init__(self, reason: DropReason, detail: str = "", stage: str = "", reply: str = "") -> None:
        super().__init__(": ".join(part for part in (reason.value, stage, detail) if part))
        self.reason, self.detail, self.stage, self.reply = reason, detail, stage, reply


class Annotation(NamedTuple):
    """What a teacher says of one document.

    Attributes:
        document: Its index into `question.passages`.
        subquery: What to ask of it.
        triples: Its facts f_t2t.
        reworded: The same in other words, to ask again after a failed search; empty where none are known.
    """

    document: int
    subquery: str
    triples: list[Triple]
    reworded: str = ""


class Teacher(Protocol):
    """What sample labelling asks of a teacher."""

    name: str

    async def annotate(self, question: Question) -> list[Annotation]:
        """The documents that help, in reasoning order; empty when none does.

        Raises:
            UnlabelledQuestion: it cannot say; the question is left out and the reason counted.
        """


async def label_question(
    question: Question,
    teacher: Teacher,
    direct_answer: bool = False,
    first_subquery: FirstSubquery = "main_question",
    distractors: int = 0,
    triples_of: Callable[[Passage], list[Triple]] | None = None,
    seed: int = 0,
    failures: Callable[[Question, list[Annotation], Annotation], list[list[Found]]] | None = None,
) -> list[Record]:
    """Label one question (Algorithm 1).

    With n kept documents there are n + 1 planning records: after i steps the label is `[SUBQ] q_i`, after all of them
    `[SUFFICIENT]`. Algorithm 1 as printed starts at i = 1, but table 4 needs the record with an empty history: it
    counts 71,676 SUBQ for 45,722 SUFFICIENT labels and 0.8 sub-queries in a history on average. With that record
    this means 1.57 documents a question and 0.75 steps a record; without it 2.57 documents, where HotpotQA has two
    supporting paragraphs, and 1.66 steps.

    Args:
        question: The question.
        teacher: Says which documents help, what to ask of each and which facts it holds.
        direct_answer: Whether the base model answers the question without retrieval. Then there is one
            `[NO_RETRIEVAL]` record for planning and one for answering, and no other (line 7).
        first_subquery: "main_question": q_0 is the main question, as in the paper; "generated": it is the first
            generated sub-query, as in the authors' code.
        distractors: Unrelated passages of the question whose triples join those of each kept document, as a
            retriever with k > 1 would bring them. The paper has none; a small model trained without them takes any
            longer list for sufficient (docs/data.md).
        triples_of: Gives the triples of those passages.
        seed: Seed of their choice.
        failures: Gives what failed searches for a document brought, before the one that finds it. The label after a
            failed search asks for the same again, in other words where the teacher knows some. The paper has none.

    Returns:
        The planning records in order, then the answering record.

    Raises:
        UnlabelledQuestion: there is no helpful document, one of them has no sub-query or no triples, or a sub-query
            would give away the answer.
    """
    if direct_answer:
        return [record_of(question, name, Action.NO_RETRIEVAL) for name in ("plan0", "answer")]
    kept = await _kept(question, teacher, first_subquery)
    others = [n for n in range(len(question.passages)) if n not in [one.document for one in kept]]
    records: list[Record] = []
    history: tuple[Step, ...] = ()
    for one in kept:
        document, subquery, found, reworded = one
        if not found:
            raise UnlabelledQuestion(DropReason.NO_TRIPLES, question.passages[document].title)
        shown = [(question.passages[document], found)]
        if distractors and triples_of is not None:
            chance = random.Random(f"{seed} {question.id} {subquery}")
            drawn = (question.passages[number] for number in chance.sample(others, len(others)))
            covered = ((passage, triples) for passage in drawn if (triples := triples_of(passage)))
            shown += islice(covered, distractors)
            chance.shuffle(shown)
        wordings = cycle(filter(None, (subquery, reworded)))
        searches = [*(failures(question, kept, one) if failures else ()), shown]
        for number, (brought, asked) in enumerate(zip(searches, wordings)):
            name = f"plan{len(records)}{AGAIN if number else ''}"
            records.append(record_of(question, name, Action.SUBQ, history, asked))
            history = (*history, step_of(asked, brought))
    records.append(record_of(question, f"plan{len(records)}", Action.SUFFICIENT, history))
    records.append(record_of(question, "answer", Action.SUFFICIENT, history))
    return records


async def _kept(question: Question, teacher: Teacher, first_subquery: FirstSubquery) -> list[Annotation]:
    """The documents that help, with the sub-queries that become labels."""
    if not question.supporting:
        raise UnlabelledQuestion(DropReason.NO_SUPPORT)
    kept = await teacher.annotate(question)
    if not kept:
        raise UnlabelledQuestion(DropReason.NO_HELPFUL)
    first = kept[0]
    if first_subquery == "main_question":
        first = first._replace(subquery=question.question, reworded=first.subquery)
    # Nothing is found yet that it could name.
    found = [name for name in names_to_find(question) if not mentions(question.question, name)]
    if not first.reworded or any(mentions(first.reworded, name) for name in found):
        first = first._replace(reworded=question.question)
    kept = [first, *kept[1:]]
    for one in kept:
        if gives_away_answer(one.subquery, question):
            raise UnlabelledQuestion(DropReason.ANSWER_IN_SUBQUERY, one.subquery)
    return [one._replace(reworded="") if gives_away_answer(one.reworded, question) else one for one in kept]


def names_to_find(question: Question) -> list[str]:
    """Names on the way to the answer: of the hops' answers, the supporting passages and the gold evidence."""
    return [
        *(hop.answer for hop in question.hops),
        *(BRACKETED.sub("", question.passages[number].title) for number in question.supporting),
        *(name for evidence in question.evidences for name in (evidence.subject, evidence.object)),
    ]


def step_of(subquery: str, shown: Iterable[Found]) -> Step:
    """A step of the history: what was asked, and the distinct triples of the passages that it shows."""
    passages, triples = zip(*shown)
    return Step(subquery, tuple(dict.fromkeys(chain(*triples))), "\n".join(one.content for one in passages))


def gives_away_answer(subquery: str, question: Question) -> bool:
    """Whether a sub-query holds a gold answer that the question itself does not hold.

    Yes and no are no names to give away; aliases of one or two letters are passed over.
    """
    for position, answer in enumerate(question.answers):
        normal = normalize_answer(answer)
        if normal in YES_NO or (position and len(normal) < _SHORTEST_ALIAS):
            continue
        if mentions(subquery, answer) and not mentions(question.question, answer):
            return True
    return False


def record_of(
    question: Question, name: str, action: Action, steps: tuple[Step, ...] = (), subquery: str = ""
) -> Record:
    """A record of a question; its name, "plan0" or "answer", is the end of its id."""
    return Record(
        id=f"{question.source}:{question.id}:{name}",
        question_id=question.id,
        task="answering" if name == "answer" else "planning",
        question=question.question,
        action=action,
        steps=steps,
        subquery=subquery,
        answers=question.answers,
        source=question.source,
    )
