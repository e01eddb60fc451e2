"""MultiHop-RAG: questions over news articles (Tang and Yang, 2024).

Rows: `{"query", "answer", "question_type", "evidence_list": [{"title", "fact", …}]}`. The articles are a file of their
own, to be made a `--corpus`; what a row brings are the facts that its evidence quotes, a passage for each article.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator

from tripletune.data_builders.readers._rows import gold_answers, required_text, source_rows
from tripletune.models.data.questions import Dropped, Question
from tripletune.models.data.records import Passage, shown


def read_questions(
    location: str, issues: Counter[str] | None = None, source: str = "multihoprag"
) -> Iterator[Question | Dropped]:
    """Stream the questions; see `data_builders.readers.Reader` for arguments and errors.

    A row without an id, as the published file has them, is named by its question. Null questions have no evidence.
    """
    for where, row in source_rows(location):
        question = required_text(row, ("query",), where)
        identity = str(row.get("id") or hashlib.blake2b(question.encode(), digest_size=8).hexdigest())
        facts: dict[str, list[str]] = {}
        for evidence in row.get("evidence_list") or ():
            if not isinstance(evidence, dict) or not evidence.get("title") or not evidence.get("fact"):
                raise ValueError(f"{where}: an entry of 'evidence_list' needs title and fact, found {shown(evidence)}")
            facts.setdefault(str(evidence["title"]), []).append(str(evidence["fact"]))
        passages = tuple(Passage(title, "\n".join(texts)) for title, texts in facts.items())
        kind = str(row.get("question_type") or "")
        yield Question(
            identity, question, gold_answers(row, where), passages, tuple(range(len(passages))), kind, source
        )
