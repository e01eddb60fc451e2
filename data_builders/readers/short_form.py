"""Questions with their answers: PopQA (Mallen et al., 2022), TriviaQA (Joshi et al., 2017), and files laid out alike.

PopQA rows: `{"id", "question", "possible_answers"}`, where copies store the answers as text. TriviaQA rows:
`{"question", "answers"}`, or the hub's `{"question_id", "question", "answer": {"value", "aliases"}}`. FlashRAG's files
of all sets: `{"id", "question", "golden_answers"}`. GraphRAG-Bench: `{"id", "source", "question", "answer",
"question_type"}`; its novels share ids, so the id of a question begins with its source. UltraDomain: `{"_id", "input",
"answers"}`. The texts of both are made a corpus by `tripletune data adapt`. A question's own passages, best first,
stand under `ctxs` (Self-RAG's files) or `docs` (ALCE's): `[{"title", "text"}, ...]`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from tripletune.data_builders.readers._rows import (
    gold_answers,
    own_passages,
    question_id,
    required_text,
    source_rows,
)
from tripletune.models.data.fields import name_field
from tripletune.models.data.questions import Dropped, Question

_GOLD = ("possible_answers", "golden_answers", "answers", "answer")


def read_questions(
    location: str, issues: Counter[str] | None = None, source: str = "short_form"
) -> Iterator[Question | Dropped]:
    """Stream the questions; see `data_builders.readers.Reader` for arguments and errors."""
    for where, row in source_rows(location):
        question = required_text(row, ("question", "input"), where)
        identity = question_id(row, where, question, "id", "question_id", "_id")
        kind, novel = name_field(row, where, "question_type"), name_field(row, where, "source")
        identity = f"{novel}:{identity}" if kind and novel else identity
        yield Question(identity, question, gold_answers(row, where, _GOLD), own_passages(row, where), (), kind, source)
