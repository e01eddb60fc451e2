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
        question = required_text(row, where, "query")
        identity = question_id(row, where, question, "id", "_id")
        # The facts of each article, by its title.
        facts: dict[str, list[str]] = {}
        layout = {"evidence_list?": [{"title": str, "fact": str}]}
        for evidence in checked(row, where, layout).get("evidence_list", ()):
            facts.setdefault(evidence["title"], []).append(evidence["fact"])
        passages = tuple(Passage(title, "\n".join(texts)) for title, texts in facts.items())
        yield Question(
            id=identity,
            question=question,
            answers=gold_answers(row, where),
            passages=passages,
            supporting=tuple(range(len(passages))),
            type=name_field(row, where, "question_type"),
            source=source,
        )
