"""Read the labelled HotpotQA questions of RAS's authors (`hotpot_filtered.json`, `hotpot_with_subqueries.json`).

Rows are `{"question", "answer", "type", "supporting_docs": {topic: [sentences]}, "sub_queries": [{"sub_query",
"doc_topic", "supporting_doc"}]}`. A document is one sentence, and a model wrote a sub-query for each. The filter of the
authors removed sentences from `supporting_docs`, but kept the sub-queries of their topics, so a sub-query counts only
if its sentence is still there. Rows have no id: it is a hash of the question. `is_fallback` marks the sentence that the
authors' code writes where the model gave no question; it is no sub-query.
"""

from __future__ import annotations

from tripletune.core.data.fields import checked, is_true, name_field
from tripletune.core.data.passages import Passage
from tripletune.core.data.questions import Hop, Issues, Question, Questions
from tripletune.core.rows import Row, gold_answers, question_id, required_text, source_rows

NO_QUESTION = "sub-queries that the authors' code wrote where the model gave none, not used"
_LAYOUT = {
    "supporting_docs": {"": [str]},
    "sub_queries": [{"sub_query": str, "supporting_doc": str}],
}


def read_questions(location: str, issues: Issues = None, source: str = "ras_labels") -> Questions:
    """Stream the questions, each with a hop per sentence; see `data_builders.readers.Reader`.

    A hop without a question stands for a sentence without a sub-query.
    """
    for where, row in source_rows(location):
        question = required_text(row, where, "question")
        passages = labelled_passages(row, where)
        queries = _subqueries_by_sentence(row, where, issues)
        hops = []
        for index, passage in enumerate(passages):
            hops.append(Hop(queries.get(passage.text, ""), "", index))
        yield Question(
            id=question_id(row, where, question),
            question=question,
            answers=gold_answers(row, where),
            passages=passages,
            supporting=tuple(range(len(passages))),
            type=name_field(row, where, "type"),
            source=source,
            hops=tuple(hops),
        )


def labelled_passages(row: Row, where: str) -> tuple[Passage, ...]:
    """The kept sentences of a row as passages, under their topics (titles in lower case), each once.

    Raises:
        ValueError: The row has no labels, or another layout.
    """
    if "sub_queries" not in row:
        raise ValueError(
            f"{where}: the row has no 'sub_queries'; it has {', '.join(row)}. Files without labels are made from "
            "HotpotQA's own: --source hotpotqa:FILE with a teacher"
        )
    checked(row, where, _LAYOUT)
    passages: dict[Passage, None] = {}
    for topic, sentences in row["supporting_docs"].items():
        for sentence in sentences:
            if sentence.strip():
                passages[Passage(topic, sentence.strip())] = None
    return tuple(passages)


def _subqueries_by_sentence(row: Row, where: str, issues: Issues) -> dict[str, str]:
    """The sub-query of each sentence, by the sentence; `issues` counts those that are left out (`is_fallback`)."""
    queries = {}
    for entry in row["sub_queries"]:
        if is_true(entry, where, "is_fallback"):
            if issues is not None:
                issues[NO_QUESTION] += 1
            continue
        queries[entry["supporting_doc"].strip()] = " ".join(entry["sub_query"].split())
    return queries
