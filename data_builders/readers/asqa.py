"""Read ASQA (Stelmakh et al., 2022), ambiguous questions with long answers, or its rows in Self-RAG's training data.

On the hub a row is `{"sample_id", "ambiguous_question", "qa_pairs", "annotations": [{"long_answer", "knowledge":
[{"content", "wikipage"}]}]}`. The official `ASQA.json` is one object `{"train": {id: row}, "dev": {id: row}}`; if it
has `train`, only `train` is read. In Self-RAG's file only the rows of data set `asqa` are read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from tripletune.core.data.contexts import own_passages
from tripletune.core.data.fields import checked, given, name_field, name_list, text_field
from tripletune.core.data.passages import Passage
from tripletune.core.data.questions import Issues, Question, Questions
from tripletune.core.rows import Row, required_name, required_text, source_rows, whole_object
from tripletune.data_builders.self_rag import part_questions

_NO_CONTEXT = "No context provided"


def read_questions(location: str, issues: Issues = None, source: str = "asqa") -> Questions:
    """Stream the questions; see `data_builders.readers.Reader` for arguments and errors.

    The gold answer is the long answer of the first annotation; the other long answers are aliases. The passages are
    this annotation's knowledge and the contexts of the disambiguated questions, or the row's retrieved ones (ALCE).
    """
    issues = Counter() if issues is None else issues
    return part_questions(_read_rows(location), "asqa", _question_of_row, issues, source)


def _read_rows(location: str) -> Iterator[tuple[str, Row]]:
    """The rows of a file after their places; those of the official file get the id under which they are stored."""
    splits = checked(whole_object(location) or {}, location, {"train?": {"": {}}, "dev?": {"": {}}})
    rows = splits.get("train") or splits.get("dev")
    if not rows:
        yield from source_rows(location)
        return
    for name, row in rows.items():
        yield f"{location}: question {name}", {"sample_id": name, **row}


def _question_of_row(row: Row, where: str, source: str) -> Question | None:
    """The question of a row; None if no annotation has a long answer.

    Only the first annotation's knowledge is read, since a record learns only the first answer, and its history is to
    hold the facts from which that answer was written. Guarded by
    `test_asqa_takes_the_first_long_answer_and_the_knowledge_behind_it`.
    """
    identity = required_name(row, where, "sample_id", "id")
    text = required_text(row, where, "ambiguous_question", "question")
    annotations = _answered_annotations(row, where)
    if not annotations:
        return None
    answers = dict.fromkeys(" ".join(annotation["long_answer"].split()) for annotation in annotations)
    # The disambiguated questions, one per meaning of the question.
    readings = [reading for reading in given(row, "qa_pairs") or () if isinstance(reading, dict)]
    knowledge = checked(annotations[0], where, {"knowledge?": [dict]}).get("knowledge", ())
    gold = dict.fromkeys(
        [*_passages_with_text(knowledge, where, "content"), *_passages_with_text(readings, where, "context")]
    )
    # Retrieved passages (ALCE) are not known to support the answer.
    passages = own_passages(row, where)
    supporting: tuple[int, ...] = ()
    if not passages:
        passages = tuple(gold)
        supporting = tuple(range(len(passages)))
    return Question(
        id=identity,
        question=text,
        answers=tuple(answers),
        passages=passages,
        supporting=supporting,
        type="",
        source=source,
        short_answers=_short_answers(readings, where),
    )


def _answered_annotations(row: Row, where: str) -> list[Row]:
    """The annotations with a long answer; one without it says nothing about the question's answer."""
    annotations = []
    for annotation in given(row, "annotations") or ():
        if isinstance(annotation, dict) and text_field(annotation, where, "long_answer"):
            annotations.append(annotation)
    return annotations


def _short_answers(readings: Iterable[Row], where: str) -> tuple[tuple[str, ...], ...]:
    """The aliases of each disambiguated question that has some, for the metric STR-EM."""
    short_answers = []
    for reading in readings:
        aliases = name_list(reading, where, "short_answers")
        if aliases:
            short_answers.append(tuple(aliases))
    return tuple(short_answers)


def _passages_with_text(rows: Iterable[Row], where: str, text_name: str) -> Iterator[Passage]:
    """The passages of rows with a text in the field `text_name`; ASQA writes `_NO_CONTEXT` where it has none."""
    for row in rows:
        text = text_field(row, where, text_name).strip()
        if text and text != _NO_CONTEXT:
            yield Passage(name_field(row, where, "wikipage"), text)
