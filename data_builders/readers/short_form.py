"""Questions with their answers: PopQA (Mallen et al., 2022), TriviaQA (Joshi et al., 2017), and files laid out alike.

PopQA rows: `{"id", "question", "possible_answers"}`, where the hub stores the answers as JSON text. TriviaQA rows:
`{"question", "answers"}`, or the hub's `{"question_id", "question", "answer": {"value", "aliases"}}`. FlashRAG's files
of all sets: `{"id", "question", "golden_answers"}`. GraphRAG-Bench: `{"id", "source", "question", "answer",
"question_type"}`; its novels share ids, so the id of a question begins with its source. UltraDomain: `{"_id", "input",
"answers"}`. The texts of both are made a corpus by `tripletune data adapt`. A question's own passages, best first,
stand under `ctxs` (Self-RAG's files) or `docs` (ALCE's): `[{"title", "text"}, ...]`.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator

from tripletune.data_builders.readers._rows import Row, as_list, own_passages, required_text, source_rows
from tripletune.models.data.questions import Dropped, Question

_GOLD = ("possible_answers", "golden_answers", "answers", "answer")


def read_questions(
    location: str, issues: Counter[str] | None = None, source: str = "short_form"
) -> Iterator[Question | Dropped]:
    """Stream the questions; see `data_builders.readers.Reader` for arguments and errors.

    A row without an id is named by its question, so the name does not depend on its place in the file.
    """
    for where, row in source_rows(location):
        question = required_text(row, ("question", "input"), where)
        given = next((row[key] for key in ("id", "question_id", "_id") if row.get(key) not in (None, "")), None)
        identity = str(given) if given is not None else hashlib.blake2b(question.encode(), digest_size=8).hexdigest()
        kind = str(row.get("question_type") or "")
        identity = f"{row['source']}:{identity}" if kind and row.get("source") else identity
        yield Question(identity, question, _answers(row, where), own_passages(row), (), kind, source)


def _answers(row: Row, where: str) -> tuple[str, ...]:
    value = next((row[key] for key in _GOLD if row.get(key)), None)
    if isinstance(value, dict):
        value = [value.get("value"), *(value.get("aliases") or ())]
    elif isinstance(value, str):
        # A list stored as text must not be read letter by letter, and a plain answer is a list of one.
        value = found if isinstance(found := as_list(value), list) else [value]
    names = [name.strip() for name in value or () if isinstance(name, str) and name.strip()]
    if not names:
        raise ValueError(
            f"{where}: the row has no gold answer ({', '.join(_GOLD[:-1])} or {_GOLD[-1]}); it has {', '.join(row)}"
        )
    return tuple(dict.fromkeys(names))
