"""Read the splits of IRCoT (Trivedi et al., 2023), on which GEAR's tables 2 to 7 are made.

Rows: `{"question_id", "question_text", "answers_objects": [{"number", "date", "spans"}], "contexts": [{"idx", "title",
"paragraph_text", "is_supporting"}]}`, in `test_subsampled.jsonl` 500 questions of a set. `tripletune data adapt` makes
the corpus, which holds the paragraphs of all questions of the set's own files, not those of the split alone.
"""

from __future__ import annotations

from tripletune.core.data.fields import checked, name_field, name_list
from tripletune.core.data.questions import Issues, Question, Questions
from tripletune.core.rows import Row, required_name, required_text, source_rows
from tripletune.data_builders.readers.musique import marked_paragraphs, shape_of


def read_questions(location: str, issues: Issues = None, source: str = "ircot") -> Questions:
    """Stream the questions; see `data_builders.readers.Reader` for arguments and errors."""
    for where, row in source_rows(location):
        identity = required_name(row, where, "question_id")
        paragraphs = marked_paragraphs(row, where, "contexts")
        yield Question(
            id=identity,
            question=required_text(row, where, "question_text"),
            answers=_answers_in_words(row, where),
            passages=paragraphs.passages,
            supporting=paragraphs.supporting,
            type=name_field(row, where, "type") or shape_of(identity),
            source=source,
        )


def _answers_in_words(row: Row, where: str) -> tuple[str, ...]:
    """The gold answers: each object is one, made of spans, of a number or of a date, as in DROP."""
    layout = {"answers_objects": [{"spans?": list, "date?": {}}]}
    answers = []
    for stored in checked(row, where, layout)["answers_objects"]:
        words = name_list(stored, where, "spans")
        if words:
            answers.append(", ".join(words))
            continue
        date = stored.get("date") or {}
        dated = [name_field(date, where, name) for name in ("day", "month", "year")]
        answer = name_field(stored, where, "number") or " ".join(word for word in dated if word)
        if answer:
            answers.append(answer)
    if not answers:
        raise ValueError(f"{where}: no object of answers_objects has spans, a number or a date")
    return tuple(dict.fromkeys(answers))
