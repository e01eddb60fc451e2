"""Teachers that need no model: recorded replies, MuSiQue's decompositions, 2WikiMultiHopQA's evidence.

A teacher does the two steps before sample labelling (RAS, sections C.1 and C.2, figures 7 and 8) and reads triples out
of a document (f_t2t of Algorithm 1): which documents help, one sub-query for each, its triples.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from pathlib import Path
from typing import Protocol, runtime_checkable

from tripletune.data_builders.datasets.lookup import JsonlIndex
from tripletune.data_builders.hotpotqa_subq.evidence import (
    joined_question,
    place_evidences,
    relation_question,
    spoken_name,
    tidy_question,
)
from tripletune.data_builders.hotpotqa_subq.questions import DropReason, Question, UnlabelledQuestion
from tripletune.data_builders.readers._rows import PassageFinder, Row, title_key
from tripletune.models.data.records import Passage, read_jsonl, shown, text_fields
from tripletune.models.data.triples import Triple, triples_from_json
from tripletune.models.llm.replies import triple_of

MALFORMED_TRIPLES = "malformed triples in the triple file"
_REFERENCE = re.compile(r"#(\d+)")


class Teacher(Protocol):
    """What sample labelling asks of a teacher.

    A method raises `UnlabelledQuestion` when it cannot say; the question is left out and the reason counted.
    """

    name: str

    async def helpful_documents(self, question: Question) -> list[int]:
        """Indices into `question.passages`, in reasoning order; empty when nothing helps (section C.1)."""
        ...

    async def subqueries(self, question: Question, documents: list[int]) -> list[str]:
        """One sub-query for each kept document (section C.2)."""
        ...

    async def triples(self, question: Question, document: int) -> list[Triple]:
        """The facts of one document, f_t2t(d_i)."""
        ...


@runtime_checkable
class KnowsDirectAnswers(Protocol):
    """A teacher whose annotations also say which questions need no retrieval."""

    def answers_directly(self, question: Question) -> bool:
        """Whether the question counts as answered without retrieval, as if it had passed the direct-answer test."""
        ...


class RecordedTeacher:
    """Replies recorded in a file, one line per question.

    `{"_id", "helpful": [titles in reasoning order], "subqueries": [{"title", "question"}],
    "triples": {title: [[s, p, o]]}}`, optionally with `"direct": true` for a question that needs no retrieval.
    Other keys, `closed_book` among them, are not used: what a strong teacher knows says nothing about the base model.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line is malformed, or two lines annotate the same question.
    """

    def __init__(self, path: str | Path) -> None:
        self.name = f"recorded replies ({Path(path).name})"
        self._index = JsonlIndex(path, _recorded_keys)
        if self._index.repeated_lines:
            line = self._index.repeated_lines[0]
            raise ValueError(f"{path}:{line}: an earlier line annotates the same question; keep one of them")

    async def helpful_documents(self, question: Question) -> list[int]:
        """See `Teacher`."""
        _, row = self._row(question)
        find = PassageFinder(question.passages)
        documents = [find(title) for title in row.get("helpful", [])]
        for title, document in zip(row.get("helpful", []), documents):
            if document is None:
                raise UnlabelledQuestion(DropReason.HELPFUL_NOT_IN_CONTEXT, title)
        return list(dict.fromkeys(document for document in documents if document is not None))

    async def subqueries(self, question: Question, documents: list[int]) -> list[str]:
        """See `Teacher`."""
        _, row = self._row(question)
        find = PassageFinder(question.passages)
        asked = {find(entry["title"]): entry["question"].strip() for entry in row.get("subqueries", [])}
        for document in documents:
            if not asked.get(document):
                raise UnlabelledQuestion(DropReason.NO_SUBQUERY, question.passages[document].title)
        return [asked[document] for document in documents]

    async def triples(self, question: Question, document: int) -> list[Triple]:
        """See `Teacher`."""
        where, row = self._row(question)
        find = PassageFinder(question.passages)
        rows = [rows for title, rows in row.get("triples", {}).items() if find(title) == document]
        return list(triples_from_json(rows[0], where)) if rows else []

    def answers_directly(self, question: Question) -> bool:
        """Whether the recorded row has `"direct": true`."""
        found = self._index.get(question.id)
        return found is not None and found[1].get("direct") is True

    def _row(self, question: Question) -> tuple[str, Row]:
        found = self._index.get(question.id)
        if found is None:
            raise UnlabelledQuestion(DropReason.NO_ANNOTATION)
        return found


class MusiqueTeacher:
    """Gold decompositions: the hops in order, each `#k` replaced by the gold answer of hop k.

    Two hops that read the same paragraph give one document with the first hop's question: its triples are in the
    history by then, and asking for them again would teach a useless retrieval.

    Args:
        triple_file: JSON lines `{"title", "text", "triples"}` that cover the supporting paragraphs.
        issues: Counts malformed triples of that file.
    """

    def __init__(self, triple_file: str | Path, issues: Counter[str] | None = None) -> None:
        self.name = f"MuSiQue decompositions, triples of {Path(triple_file).name}"
        self._triples = TripleFile(triple_file, issues)

    async def helpful_documents(self, question: Question) -> list[int]:
        """See `Teacher`."""
        return list(dict.fromkeys(hop.passage_index for hop in question.hops))

    async def subqueries(self, question: Question, documents: list[int]) -> list[str]:
        """See `Teacher`."""
        asked: dict[int, str] = {}
        for number, hop in enumerate(question.hops, 1):
            asked.setdefault(hop.passage_index, hop_question(question, number))
        return [asked[document] for document in documents]

    async def triples(self, question: Question, document: int) -> list[Triple]:
        """See `Teacher`."""
        return self._triples.of(question.passages[document])


class TwoWikiTeacher:
    """Gold evidence: each evidence triple belongs to a supporting passage and is what is asked of it."""

    name = "2WikiMultiHopQA evidence"

    async def helpful_documents(self, question: Question) -> list[int]:
        """See `Teacher`."""
        return list(dict.fromkeys(place_evidences(question)))

    async def subqueries(self, question: Question, documents: list[int]) -> list[str]:
        """See `Teacher`."""
        asked: dict[int, list[str]] = {}
        earlier: list[Triple] = []
        for evidence, document in zip(question.evidences, place_evidences(question)):
            name = spoken_name(question, evidence, document, earlier)
            asked.setdefault(document, []).append(relation_question(name, evidence.predicate))
            earlier.append(evidence)
        return [joined_question(asked[document]) for document in documents]

    async def triples(self, question: Question, document: int) -> list[Triple]:
        """See `Teacher`."""
        return [e for e, placed in zip(question.evidences, place_evidences(question)) if placed == document]


class TripleFile:
    """Triples by passage, from JSON lines `{"title", "text", "triples"}`.

    A passage is found by its content (NFKC, spaces folded), else by its title when one line alone has that title.
    Malformed triples, of which model output has some, are left out and counted.
    """

    def __init__(self, path: str | Path, issues: Counter[str] | None = None) -> None:
        self.path = Path(path)
        self.issues: Counter[str] = Counter() if issues is None else issues

        def keys(where: str, row: Row) -> list[str]:
            texts = text_fields(row, where, "line of a triple file", ("title", "text"))
            title, text = texts["title"], texts["text"]
            if not isinstance(row.get("triples"), list):
                raise ValueError(f"{where}: triples must be a list, found {shown(row.get('triples'))}")
            self.issues[MALFORMED_TRIPLES] += len(row["triples"]) - len(_good_triples(row["triples"]))
            return [f"content {_folded(title)} {_folded(text)}", f"title {title_key(title)}"]

        self._index = JsonlIndex(path, keys)

    def of(self, passage: Passage) -> list[Triple]:
        """The well-formed triples of a passage; empty when the file does not cover it."""
        found = self._index.get(f"content {_folded(passage.title)} {_folded(passage.text)}")
        title = f"title {title_key(passage.title)}"
        if found is None and not self._index.is_repeated(title):
            found = self._index.get(title)
        return _good_triples(found[1]["triples"]) if found else []


def hop_question(question: Question, number: int) -> str:
    """Hop `number` (from 1) of a gold decomposition as a plain question, references resolved.

    Raises:
        UnlabelledQuestion: it refers to itself or to a later hop.
    """
    hop = question.hops[number - 1]

    def answer(match: re.Match[str]) -> str:
        referred = int(match.group(1))
        if not 1 <= referred < number:
            raise UnlabelledQuestion(DropReason.BROKEN_REFERENCE, hop.question)
        return question.hops[referred - 1].answer

    text = _REFERENCE.sub(answer, hop.question)
    subject, arrow, relation = text.rpartition(">>")
    return relation_question(subject.strip(), relation.strip()) if arrow else tidy_question(text)


def open_teacher(reader: str, annotations: str | None, issues: Counter[str]) -> Teacher:
    """The teacher of one source.

    Args:
        reader: The reader's name; `musique` and `two_wiki` bring gold annotations of their own.
        annotations: A file of recorded replies, good for every reader, or a triple file for `musique`.
        issues: Counts warnings about the annotations.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the source needs another kind of file than it got.
    """
    if annotations is None:
        if reader == "two_wiki":
            return TwoWikiTeacher()
        needed = "a triple file" if reader == "musique" else "a file of recorded teacher replies"
        raise ValueError(f"source {reader!r} has no annotations; add {needed}: {reader}:FILE:ANNOTATIONS")
    where, row = next(read_jsonl(annotations), (annotations, {}))
    if "helpful" in row or "subqueries" in row or "direct" in row:
        return RecordedTeacher(annotations)
    if "triples" in row and "title" in row:
        if reader != "musique":
            raise ValueError(f"{annotations} holds triples alone, and {reader!r} needs recorded teacher replies")
        return MusiqueTeacher(annotations, issues)
    raise ValueError(
        f"{where}: neither recorded teacher replies (_id, helpful, subqueries, triples) nor a triple file "
        f"(title, text, triples); the line has {', '.join(row) or 'nothing'}"
    )


def _recorded_keys(where: str, row: Row) -> list[str]:
    identity = row.get("_id", row.get("id"))
    if not isinstance(identity, str) or not identity:
        raise ValueError(f"{where}: a recorded reply needs the question's '_id'; it has {', '.join(row)}")
    for key, empty in (("helpful", []), ("subqueries", []), ("triples", {})):
        if not isinstance(row.get(key, empty), type(empty)) or (key not in row and row.get("direct") is not True):
            raise ValueError(f"{where}: {key!r} of a recorded reply must be a {type(empty).__name__}")
    if not all(isinstance(title, str) for title in row.get("helpful", [])):
        raise ValueError(f"{where}: 'helpful' must be a list of titles")
    for entry in row.get("subqueries", []):
        well_formed = isinstance(entry, dict) and isinstance(entry.get("title"), str)
        if not well_formed or not isinstance(entry.get("question"), str):
            raise ValueError(f"{where}: a sub-query must be {{'title', 'question'}}; found {entry!r}")
    for rows in row.get("triples", {}).values():
        triples_from_json(rows, where)
    return [identity]


def _folded(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).split())


def _good_triples(rows: list[object]) -> list[Triple]:
    return [triple for row in rows if (triple := triple_of(row)) is not None]
