"""Teachers that need no model: recorded replies, MuSiQue's decompositions, 2WikiMultiHopQA's evidence.

A teacher does the two steps before sample labelling (RAS, sections C.1 and C.2, figures 7 and 8) and reads triples out
of a document (f_t2t of Algorithm 1): which documents help, one sub-query for each, its triples.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from tripletune.data_builders.datasets.lookup import JsonlIndex
from tripletune.data_builders.hotpotqa_subq.questions import DropReason, Question, UnlabelledQuestion
from tripletune.data_builders.readers._rows import Row, find_passage, title_key
from tripletune.models.data.records import Passage, normalize_answer, read_jsonl, shown, text_fields
from tripletune.models.data.triples import Triple, triples_from_json
from tripletune.models.llm.replies import triple_of
from tripletune.models.options import read_yaml

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
        if self._index.repeated_line is not None:
            raise ValueError(
                f"{path}:{self._index.repeated_line}: an earlier line annotates the same question; keep one of them"
            )

    async def helpful_documents(self, question: Question) -> list[int]:
        """See `Teacher`."""
        _, row = self._row(question)
        documents = [find_passage(title, question.passages) for title in row.get("helpful", [])]
        for title, document in zip(row.get("helpful", []), documents):
            if document is None:
                raise UnlabelledQuestion(DropReason.HELPFUL_NOT_IN_CONTEXT, title)
        return list(dict.fromkeys(document for document in documents if document is not None))

    async def subqueries(self, question: Question, documents: list[int]) -> list[str]:
        """See `Teacher`."""
        _, row = self._row(question)
        asked = {
            find_passage(entry["title"], question.passages): entry["question"].strip()
            for entry in row.get("subqueries", [])
        }
        for document in documents:
            if not asked.get(document):
                raise UnlabelledQuestion(DropReason.NO_SUBQUERY, question.passages[document].title)
        return [asked[document] for document in documents]

    async def triples(self, question: Question, document: int) -> list[Triple]:
        """See `Teacher`."""
        where, row = self._row(question)
        found = row.get("triples", {}).items()
        rows = [rows for title, rows in found if find_passage(title, question.passages) == document]
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
        raise ValueError(
            f"source {reader!r} has no annotations; add {needed}, {reader}:FILE:ANNOTATIONS, or a teacher LLM, for "
            "example --teacher openai --teacher-model MODEL"
        )
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


_BRACKETS = re.compile(r"\s*\([^()]*\)")
_WORD = re.compile(r"\w+")
# Questions have two or four supporting passages; beyond this, trying every order would take long.
_MOST_PLACED_TOGETHER = 6
# "the owned by of X" is no English; such relations are quoted instead.
_PREPOSITIONS = ("at", "by", "for", "from", "in", "of", "on", "to", "with")


def place_evidences(question: Question) -> list[int]:
    """The supporting passage of every evidence triple, as indices into `question.passages`.

    Raises:
        UnlabelledQuestion: there is no evidence, or a triple has nothing in common with any supporting passage.
    """
    subjects: dict[str, list[Triple]] = {}
    for evidence in question.evidences:
        subjects.setdefault(title_key(evidence.subject), []).append(evidence)
    if not subjects:
        raise UnlabelledQuestion(DropReason.NO_ANNOTATION, "no evidence triples")
    fits = [[_fit(question, triples, document) for document in question.supporting] for triples in subjects.values()]
    if len(subjects) <= len(question.supporting) <= _MOST_PLACED_TOGETHER:
        orders = itertools.permutations(range(len(question.supporting)), len(subjects))
        chosen = max(orders, key=lambda order: sum(row[place] for row, place in zip(fits, order)))
    else:
        chosen = tuple(max(range(len(row)), key=row.__getitem__, default=0) for row in fits)
    for (triples, row), place in zip(zip(subjects.values(), fits), chosen):
        if not row or row[place] <= 0:
            raise UnlabelledQuestion(DropReason.UNPLACED_EVIDENCE, str(triples[0]))
    placed = dict(zip(subjects, (question.supporting[place] for place in chosen)))
    return [placed[title_key(evidence.subject)] for evidence in question.evidences]


def spoken_name(question: Question, evidence: Triple, document: int, earlier: list[Triple]) -> str:
    """The name by which a sub-query may ask for the evidence's subject.

    A planner knows the question and the triples found so far, nothing else: a name it cannot have seen, such as the
    bracketed part of the next passage's title, must not be in a label. So the name comes from the question where
    it stands there, else from the object of an earlier evidence triple.

    Args:
        question: The question.
        evidence: The evidence triple to ask for.
        document: Its passage.
        earlier: The evidence triples before it.
    """
    title = question.passages[document].title
    asked = title_key(question.question)
    for name in (title, evidence.subject):
        if re.search(rf"(?<!\w){re.escape(title_key(name))}(?!\w)", asked):
            return name
    known = [triple.object for triple in earlier]
    overlap = [max(_similarity(name, evidence.subject), _similarity(name, title)) for name in known]
    if known and max(overlap) > 0:
        return known[overlap.index(max(overlap))]
    return evidence.subject


def _fit(question: Question, triples: list[Triple], document: int) -> float:
    """How well the triples of one subject suit a passage; 0 for nothing in common.

    The subject's name against the title decides; whether the passage's text holds subject and objects breaks ties
    and places names that share no word with the title.
    """
    passage = question.passages[document]
    text = title_key(passage.text)
    objects = sum(title_key(triple.object) in text for triple in triples) / len(triples)
    named = title_key(triples[0].subject) in text
    return 4 * _similarity(triples[0].subject, passage.title) + objects + named


def _similarity(name: str, other: str) -> float:
    first, second = title_key(name), title_key(other)
    if first == second:
        return 1.0
    if _BRACKETS.sub("", first) == _BRACKETS.sub("", second):
        return 0.9
    words, others = set(_WORD.findall(first)), set(_WORD.findall(second))
    shared = len(words & others)
    if not shared:
        return 0.0
    contained = 0.2 if words <= others or others <= words else 0.0
    return contained + 0.6 * shared / len(words | others)


@lru_cache(maxsize=1)
def _questions() -> dict[str, Any]:
    return read_yaml(Path(__file__).with_name("relation_questions.yaml"))


def relation_question(subject: str, relation: str) -> str:
    """The question whose answer is the object of `(subject, relation, ?)`.

    A relation without a wording of its own becomes "What is the <relation> of <subject>?", or is quoted when it
    ends in a preposition.
    """
    key = " ".join(relation.replace("_", " ").casefold().split())
    template = _questions().get(key)
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
