"""Read claims to classify as true or false, in the layout of PubHealth (Kotonya and Toni, 2020).

Rows: `{"claim_id", "claim", "label"}`, in Self-RAG's file with passages (`ctxs`). RAS tests only on the labels true and
false (section E.1); mixture and unproven claims are left out and counted in `issues`.
"""

from __future__ import annotations

from collections import Counter

from tripletune.core.data.contexts import own_passages
from tripletune.core.data.fields import given
from tripletune.core.data.questions import Issues, Question, Questions
from tripletune.core.rows import Row, question_id, required_text, source_rows

NOT_BINARY = "claims labelled neither true nor false, which the task leaves out"
# The hub stores the labels of health_fact as class numbers in this order; -1 marks rows without a label.
_NUMBERED = {"0": "false", "1": "mixture", "2": "true", "3": "unproven", "-1": "unlabelled"}


def read_questions(location: str, issues: Issues = None, source: str = "pubhealth") -> Questions:
    """Stream the claims labelled true or false; see `data_builders.readers.Reader` for arguments and errors."""
    issues = Counter() if issues is None else issues
    for where, row in source_rows(location):
        claim = required_text(row, where, "claim", "question")
        identity = question_id(row, where, claim, "claim_id", "id")
        label = _label_in_words(row, where)
        if label not in ("true", "false"):
            issues[NOT_BINARY] += 1
            continue
        passages = own_passages(row, where)
        yield Question(identity, claim, answers=(label,), passages=passages, supporting=(), type="", source=source)


def _label_in_words(row: Row, where: str) -> str:
    """The label of a claim in words, also where it is stored as a number ("2", or "2.0" after pandas).

    Raises:
        ValueError: There is no label, or a number that none of the published files has.
    """
    stored = given(row, "label")
    word = str(stored).strip().lower().removesuffix(".0")
    label = _NUMBERED.get(word, word)
    is_unknown_number = label.lstrip("-").isdecimal()
    if stored is None or is_unknown_number:
        raise ValueError(f"{where}: label {stored!r} is none of true, false, mixture, unproven")
    return label
