"""The teacher whose replies were recorded in a file."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from tripletune.core.data.contexts import find_passage
from tripletune.core.data.fields import checked, is_true
from tripletune.core.data.questions import Annotation, DropReason, Question, Teacher, UnlabelledQuestion
from tripletune.core.data.triples import triples_from_json
from tripletune.core.rows import Row, required_name
from tripletune.data_builders.datasets.lookup import JsonlIndex

_RECORDED = {"helpful": [str], "subqueries": [{"title": str, "question": str}], "triples": {"": list}}


class RecordedTeacher(Teacher):
    """Replies recorded in a file, one line per question.

    `{"_id", "helpful": [titles in reasoning order], "subqueries": [{"title", "question"}],
    "triples": {title: [[s, p, o]]}}`, optionally with `"direct": true` for a question that needs no retrieval.
    """

    def __init__(self, path: str | Path) -> None:
        self.name = f"recorded replies ({Path(path).name})"
        self._index = JsonlIndex(path, _recorded_key)
        number = self._index.repeated_line
        if number:
            raise ValueError(f"{path}:{number}: an earlier line annotates the same question; keep one of them")

    async def annotate(self, question: Question) -> list[Annotation]:
        """The recorded annotations of a question, in the order of the reply; see `Teacher`."""
        entry = self._index.get(question.id)
        if entry is None:
            raise UnlabelledQuestion(DropReason.NO_ANNOTATION)
        where, row = entry
        find = partial(find_passage, passages=question.passages)
        subqueries = {find(item["title"]): item["question"].strip() for item in row.get("subqueries", [])}
        # If two titles name one passage, the first title counts.
        triples = {find(title): rows for title, rows in reversed(row.get("triples", {}).items())}
        documents: dict[int, None] = {}
        for title in row.get("helpful", []):
            document = find(title)
            if document is None:
                raise UnlabelledQuestion(DropReason.HELPFUL_NOT_IN_CONTEXT, title)
            documents[document] = None
        annotations = []
        for document in documents:
            if not subqueries.get(document):
                raise UnlabelledQuestion(DropReason.NO_SUBQUERY, question.passages[document].title)
            own_triples = list(triples_from_json(triples.get(document, []), where))
            annotations.append(Annotation(document, subqueries[document], own_triples))
        return annotations

    def answers_directly(self, question: Question) -> bool:
        """Whether the recorded row has `"direct": true`."""
        entry = self._index.get(question.id)
        if entry is None:
            return False
        where, row = entry
        return is_true(row, where, "direct")


def _recorded_key(where: str, row: Row) -> str:
    """The id of a recorded reply, whose layout is checked now, since the build would otherwise stop in the middle."""
    identity = required_name(row, where, "_id", "id")
    if not is_true(row, where, "direct"):
        checked(row, where, _RECORDED)
    for rows in row.get("triples", {}).values():
        triples_from_json(rows, where)
    return identity
