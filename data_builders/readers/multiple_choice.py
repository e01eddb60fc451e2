"""Read multiple-choice questions in the layout of ARC (Clark et al., 2018); the choices become part of the question.

Rows: `{"id", "question", "choices": {"text": [...], "label": [...]}, "answerKey"}`. A row has three to five choices
with letters or numbers as labels; numbers are read as letters, so that one instruction fits every row.
"""

from __future__ import annotations

from tripletune.core.data.fields import checked, name_field, shown
from tripletune.core.data.questions import Issues, Question, Questions
from tripletune.core.rows import Row, required_text, source_rows

_LETTERS = "ABCDEFGHIJ"


def read_questions(location: str, issues: Issues = None, source: str = "arc") -> Questions:
    """Stream the questions; see `data_builders.readers.Reader` for arguments and errors."""
    for where, row in source_rows(location):
        yield choice_question(row, where, source)


def choice_question(row: Row, where: str, source: str) -> Question:
    """One row as a question, followed by its choices; the answer is the letter of the right choice."""
    stem = required_text(row, ("question",), where)
    choices = checked(row, where, {"choices": {"text": list, "label": list}})["choices"]
    texts, labels = choices["text"], [_letter(str(label)) for label in choices["label"]]
    if not texts or len(texts) != len(labels):
        raise ValueError(f"{where}: 'choices' needs as many texts as labels; it is {shown(choices)}")
    texts = [required_text({"choices": text}, ("choices",), where, name_field) for text in texts]
    key = _letter(required_text(row, ("answerKey",), where, name_field))
    if key not in labels:
        raise ValueError(f"{where}: answerKey {row['answerKey']!r} is not one of the labels {', '.join(labels)}")
    asked = " ".join([stem, *(f"{label}: {text}" for label, text in zip(labels, texts))])
    identity = required_text(row, ("id", "_id"), where, name_field)
    return Question(identity, asked, (key,), (), (), "", source, search=stem)


def _letter(label: str) -> str:
    label = label.strip()
    return _LETTERS[int(label) - 1] if label.isdecimal() and 1 <= int(label) <= len(_LETTERS) else label.upper()
