"""Read multiple-choice questions in the layout of ARC (Clark et al., 2018); the choices become part of the question.

Rows: `{"id", "question", "choices": {"text": [...], "label": [...]}, "answerKey"}`. A row has three to five choices
with letters or numbers as labels; numbers are read as letters, so that one instruction fits every row. Self-RAG's file
has the passages `ctxs` beside them.
"""

from __future__ import annotations

from tripletune.core.data.contexts import own_passages
from tripletune.core.data.fields import checked, shown
from tripletune.core.data.questions import Issues, Question, Questions
from tripletune.core.rows import Row, required_name, required_text, source_rows

_LETTERS = "ABCDEFGHIJ"


def read_questions(location: str, issues: Issues = None, source: str = "arc") -> Questions:
    """Stream the questions; see `data_builders.readers.Reader` for arguments and errors."""
    for where, row in source_rows(location):
        yield choice_question(row, where, source)


def choice_question(row: Row, where: str, source: str) -> Question:
    """A row as a question, followed by its choices; the answer is the letter of the right choice.

    Searches use the question without its choices, of which all but one lead astray.
    """
    stem = required_text(row, where, "question")
    choices = checked(row, where, {"choices": {"text": list, "label": list}})["choices"]
    letters = [_capital_letter(str(label)) for label in choices["label"]]
    if not letters or len(choices["text"]) != len(letters):
        raise ValueError(f"{where}: 'choices' needs as many texts as labels; it is {shown(choices)}")
    asked = stem
    for letter, text in zip(letters, choices["text"], strict=True):
        asked += f" {letter}: {required_name({'choices': text}, where, 'choices')}"
    right = _capital_letter(required_name(row, where, "answerKey"))
    if right not in letters:
        raise ValueError(f"{where}: answerKey {row['answerKey']!r} is not one of the labels {', '.join(letters)}")
    return Question(
        id=required_name(row, where, "id", "_id"),
        question=asked,
        answers=(right,),
        passages=own_passages(row, where),
        supporting=(),
        type="",
        source=source,
        search=stem,
    )


def _capital_letter(label: str) -> str:
    """A label as a capital letter: "1" and "a" become "A", so that one instruction fits every row."""
    label = label.strip()
    if label.isdecimal() and 1 <= int(label) <= len(_LETTERS):
        return _LETTERS[int(label) - 1]
    return label.upper()
