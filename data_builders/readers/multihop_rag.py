"""Read MultiHop-RAG, questions over news articles (Tang and Yang, 2024).

Rows: `{"query", "answer", "question_type", "evidence_list": [{"title", "fact", …}]}`. The articles are in a separate
file for `--corpus`; the evidence of a row holds only facts, which become one passage per article.
"""

from __future__ import annotations

from tripletune.core.data.fields import checked, name_field
from tripletune.core.data.passages import Passage
from tripletune.core.data.questions import Issues, Question, Questions
from tripletune.core.rows import gold_answers, question_id, required_text, source_rows


def read_questions(location: str, issues: Issues = None, source: str = "multihoprag") -> Questions:
    """Stream the questions; see `data_builders.readers.Reader` for arguments and errors.

    A row without an id, as in the published file, gets an id from its question. Null questions have no evidence.
    """
    for where, row in source_rows(location):
        question = required_text(row, ("query",), where)
        identity = question_id(row, where, question, "id", "_id")
        facts: dict[str, list[str]] = {}
        evidences = checked(row, where, {"evidence_list?": [{"title": str, "fact": str}]}).get("evidence_list", ())
        for evidence in evidences:
            facts.setdefault(evidence["title"], []).append(evidence["fact"])
        passages = tuple(Passage(title, "\n".join(texts)) for title, texts in facts.items())
        kind = name_field(row, where, "question_type")
        yield Question(
            identity, question, gold_answers(row, where), passages, tuple(range(len(passages))), kind, source
        )
