"""Teachers that need no model: MuSiQue's decompositions, 2WikiMultiHopQA's evidence, gold answers."""

from __future__ import annotations

import asyncio
import tempfile
import weakref
from collections import Counter
from dataclasses import replace
from pathlib import Path

import regex as re

from tripletune.core.data.answers import facts_name
from tripletune.core.data.jsonl import read_jsonl
from tripletune.core.data.passages import Passage
from tripletune.core.data.questions import Annotation, DropReason, Question, Teacher, UnlabelledQuestion
from tripletune.core.data.records import Action, Record
from tripletune.core.data.triples import Triple
from tripletune.core.files import PROMPTS
from tripletune.core.rows import Row
from tripletune.data_builders.readers.qa import read_question
from tripletune.data_builders.subq import label_question, record_of, step_of
from tripletune.data_builders.subq.evidences import name_seen_by_planner, place_evidences
from tripletune.data_builders.subq.options import LABELLED, PARTS
from tripletune.data_builders.subq.recorded import RecordedTeacher
from tripletune.data_builders.subq.searches import passages_and_triples
from tripletune.data_builders.subq.wordings import joined_question, relation_question, tidy_question
from tripletune.rag.triple_store import FileCount, open_triples

PROMPT_FOLDER = PROMPTS / "data"
MALFORMED_TRIPLES = "malformed triples in the triple file"
_REFERENCE = re.compile(r"#(\d+)")


class GoldTeacher(Teacher):
    """Labels questions by the benchmark's annotations; a triple file `{"title", "text", "triples"}` adds facts.

    Args:
        triple_file: The file; None: facts are the benchmark's own.
        issues: Counts malformed triples of the file.
    """

    def __init__(self, triple_file: str | None, issues: Counter[str]) -> None:
        self.triples_of = TripleLookup(triple_file, issues) if triple_file else None
        if triple_file:
            self.name += f", triples of {Path(triple_file).name}"


class DecomposingTeacher(GoldTeacher):
    """Labels by gold decompositions (MuSiQue's, or the steps of a plain file), with answers instead of `#k`.

    Two hops that read the same paragraph give one document with the first hop's question, since a second search for the
    same triples would be useless. A hop's own triples are preferred to those of the triple file.
    """

    name = "gold decompositions"

    async def annotate(self, question: Question) -> list[Annotation]:
        """See `Teacher`; the triple file is asked after all hops, because a later hop may bring its own triples."""
        if not question.hops:
            raise UnlabelledQuestion(DropReason.NO_ANNOTATION)
        by_document: dict[int, Annotation] = {}
        for number, hop in enumerate(question.hops, 1):
            document = hop.passage_index
            subquery = hop_question(question, number)
            reworded = hop_question(question, number, plain=True)
            annotation = by_document.setdefault(document, Annotation(document, subquery, [], reworded))
            annotation.triples.extend(hop.triples)
        for document, annotation in by_document.items():
            if not annotation.triples and self.triples_of:
                by_document[document] = annotation._replace(triples=self.triples_of(question.passages[document]))
        return list(by_document.values())


class LabelledTeacher(GoldTeacher):
    """Labels by the sub-queries that RAS's authors published (`data_builders/readers/ras_labels.py`), word for word.

    A sentence's triples are looked up under its topic, then without it, as the authors extracted from bare sentences.
    """

    name = "published sub-queries"

    async def annotate(self, question: Question) -> list[Annotation]:
        """An annotation per hop, in the order of the file; see `Teacher`.

        Triples are found by the passage or its text.
        """
        annotations = []
        for hop in question.hops:
            passage = question.passages[hop.passage_index]
            if not hop.question:
                raise UnlabelledQuestion(DropReason.NO_SUBQUERY, passage.text)
            triples = []
            if self.triples_of:
                triples = self.triples_of(passage) or self.triples_of(Passage("", passage.text))
            annotations.append(Annotation(hop.passage_index, hop.question, triples))
        return annotations


def plain_records(row: Row, where: str) -> list[Record]:
    """The records of a row of the plain format (`data_builders/readers/qa.py`) whose steps have triples.

    Training reads such rows directly, without a build.

    Args:
        row: The row.
        where: "file:line", for errors.

    Raises:
        ValueError: The row gives no records; the message says what it lacks.
    """
    question = read_question(row, where)
    # An empty list says that no retrieval is needed; an empty cell of a table says nothing.
    if row.get("steps") in (None, ""):
        raise ValueError(
            f"{where}: the question has no steps: add steps with question and triples, or [] if nothing is to be "
            "retrieved; or make records with tripletune build subq --source READER:FILE:TEACHER_FILE, where the "
            "teacher's file has the steps (`build world` writes one); without one, --source qa:FILE asks a model"
        )
    # Passages of a corpus are only named here, since their facts are in the steps.
    placed = [Passage(name, "") for name in question.links]
    passages = (*question.passages, *placed)
    supporting = question.supporting or tuple(range(len(question.passages), len(passages)))
    question = replace(question, passages=passages, supporting=supporting, links=())
    try:
        if not question.answers:
            raise UnlabelledQuestion(DropReason.NO_ANSWER)
        label = label_question(question, DecomposingTeacher(None, Counter()), direct_answer=not question.hops)
        return asyncio.run(label)
    except UnlabelledQuestion as error:
        raise ValueError(
            f"{where}: {error}: change the row, or leave such rows out with tripletune build subq --source qa:FILE"
        ) from None


class TwoWikiTeacher(GoldTeacher):
    """Labels by gold evidence: each evidence triple belongs to a supporting passage, whose sub-query asks for it.

    The facts of a passage are its triples in the triple file, and the evidence triples whose object none of them names.
    """

    name = "2WikiMultiHopQA evidence"

    async def annotate(self, question: Question) -> list[Annotation]:
        """See `Teacher`.

        Several evidence triples of one passage are one search, so their questions are joined; a second search for the
        passage would show the same facts.
        """
        subqueries: dict[int, list[str]] = {}
        rewordings: dict[int, list[str]] = {}
        facts: dict[int, list[Triple]] = {}
        for number, document in enumerate(place_evidences(question)):
            evidence = question.evidences[number]
            name = name_seen_by_planner(question, evidence, document, question.evidences[:number])
            subqueries.setdefault(document, []).append(relation_question(name, evidence.predicate))
            rewordings.setdefault(document, []).append(relation_question(name, evidence.predicate, plain=True))
            if document not in facts:
                facts[document] = self.triples_of(question.passages[document]) if self.triples_of else []
            if not self.triples_of or not facts_name(facts[document], [evidence.object]):
                facts[document].append(evidence)
        annotations = []
        for document, questions in subqueries.items():
            subquery = joined_question(questions)
            reworded = joined_question(rewordings[document])
            annotations.append(Annotation(document, subquery, facts[document], reworded))
        return annotations


class PartTeacher(GoldTeacher):
    """Labels the questions of ASQA or ARC-Easy, the parts that RAS adds to HotpotQA-SUBQ (sections 4.1, C.4).

    The paper leaves three choices open:

    - **Only answering records** are made, since table 4 counts the parts in the answering column, and appendix C.4
      names them as the reason why answering records outnumber `[SUFFICIENT]` and `[NO_RETRIEVAL]` labels.
    - **The history** is empty without triples (direct answering). With triples it is one step: q_0 is the question,
      with the triples of all its passages, as in figure 25.
    - **The question** has the words of its evaluation task (the roles of table 5). The sub-query is the bare question,
      as in retrieval.

    Args:
        reader: "asqa" or "arc_easy", which decides the words of the question.
        triple_file: A file with the triples of passages; None: direct answering.
        issues: Counts malformed triples of the file.
    """

    name = "gold answers"
    collects_failures = False

    def __init__(self, reader: str, triple_file: str | None, issues: Counter[str]) -> None:
        super().__init__(triple_file, issues)
        self._template = (PROMPT_FOLDER / f"{reader}.md").read_text(encoding="utf-8").strip()
        if not triple_file:
            self.name += ", no triples"

    async def records(self, question: Question, label: object = None) -> list[Record]:
        """The one answering record of a question, with one step if its passages have triples; see the class."""
        facts = list(passages_and_triples(question.passages, self.triples_of)) if self.triples_of else []
        if facts:
            step = step_of(question.search or question.question, facts)
            record = record_of(question, "answer", Action.SUFFICIENT, (step,))
        else:
            record = record_of(question, "answer", Action.NO_RETRIEVAL)
        return [replace(record, question=self._template.replace("{question}", question.question))]


class TripleLookup:
    """Looks up the triples of a passage by its content; a passage that the source lacks has none.

    Args:
        source: A triple store, or JSON lines `{"title", "text", "triples"}`, which are read into a temporary store.
    """

    def __init__(self, source: str | Path, issues: Counter[str]) -> None:
        scratch = tempfile.TemporaryDirectory(prefix="tripletune-")
        counts = Counter[str]()
        self._source = source
        self._stored = open_triples(source, Path(scratch.name) / "triples.sqlite", counts=counts)
        # Numbers of look-ups, and of those with triples.
        self._asked = 0
        self._found = 0
        issues[MALFORMED_TRIPLES] += counts[FileCount.MALFORMED_TRIPLES]
        weakref.finalize(self._stored.store, scratch.cleanup)

    def __call__(self, passage: Passage) -> list[Triple]:
        """The triples of a passage, none if the file lacks it; hits are counted, since a wrong file has none."""
        triples = list(self._stored.get(passage) or ())
        self._asked += 1
        self._found += bool(triples)
        return triples

    def refuse_useless_file(self) -> None:
        """Raise `ValueError` if no look-up succeeded: the file is probably of another corpus."""
        if self._asked and not self._found:
            raise ValueError(
                f"{self._source} has no triples of the {self._asked:,} passages that were looked up: does the file "
                "belong to these questions?"
            )


def hop_question(question: Question, number: int, plain: bool = False) -> str:
    """Hop `number` (from 1) of a gold decomposition as a question, with references resolved.

    "#1" stands for the answer of hop 1 (MuSiQue). For `plain` see `relation_question`.

    Raises:
        UnlabelledQuestion: A reference is to this hop or a later one, or to none.
    """
    hop = question.hops[number - 1]

    def answer(match: re.Match[str]) -> str:
        """The answer of the earlier hop that a reference names."""
        referred = int(match[1])
        if not 1 <= referred < number:
            raise UnlabelledQuestion(DropReason.BROKEN_REFERENCE, hop.question)
        return question.hops[referred - 1].answer

    text = _REFERENCE.sub(answer, hop.question)
    # MuSiQue writes some hops as "subject >> relation".
    subject, arrow, relation = text.rpartition(">>")
    if not arrow:
        return tidy_question(text)
    return relation_question(subject.strip(), relation.strip(), plain)


_GOLD: dict[str, type[GoldTeacher]] = {
    "two_wiki": TwoWikiTeacher,
    "musique": DecomposingTeacher,
    "qa": DecomposingTeacher,
    LABELLED: LabelledTeacher,
}


def open_teacher(reader: str, annotations: str | None, issues: Counter[str]) -> Teacher:
    """Open the teacher of a source without a model; for the readers in `_GOLD`, annotations may be a triple file.

    What a file of annotations holds is read from its first line, since both kinds are JSON lines. A triple file alone
    suffices only where the benchmark has sub-queries or evidence triples of its own, which HotpotQA has not.
    """
    if reader in PARTS:
        return PartTeacher(reader, annotations, issues)
    gold = _GOLD.get(reader)
    if annotations is None:
        if reader == LABELLED:
            raise ValueError(
                f"source {reader!r} has sub-queries, but no triples: name a triple file ({reader}:FILE:TRIPLES), as "
                "`data adapt` makes of the authors' text_triples.json, or `rag extract` of their sentences"
            )
        if gold and reader != "musique":
            return gold(None, issues)
        needed = "a triple file" if reader == "musique" else "a file of recorded teacher replies"
        raise ValueError(
            f"source {reader!r} has no annotations; add {needed} ({reader}:FILE:ANNOTATIONS) or a teacher LLM (for "
            "example --teacher openai --teacher-model MODEL)"
        )
    where, row = next(read_jsonl(annotations), (annotations, {}))
    if "helpful" in row or "subqueries" in row or "direct" in row:
        return RecordedTeacher(annotations)
    if "triples" in row and "title" in row:
        if gold is None:
            raise ValueError(f"{annotations} holds only triples, but {reader!r} needs recorded teacher replies")
        return gold(annotations, issues)
    raise ValueError(
        f"{where}: the line is neither a recorded teacher reply (_id, helpful, subqueries, triples) nor a row of a "
        f"triple file (title, text, triples); it has {', '.join(row) or 'no fields'}"
    )
