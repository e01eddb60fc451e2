"""Read ASQA (Stelmakh et al., 2022), ambiguous questions with long answers, or its rows in Self-RAG's training data.

On the hub a row is `{"sample_id", "ambiguous_question", "qa_pairs", "annotations": [{"long_answer", "knowledge":
[{"content", "wikipage"}]}]}`. The official `ASQA.json` is one object `{"train": {id: row}, "dev": {id: row}}`; if it
has `train`, only `train` is read. In Self-RAG's file only the rows of data set `asqa` are read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from tripletune.core.data.fields import checked, given, name_field, name_list, text_field
from tripletune.core.data.passages import Passage
from tripletune.core.data.questions import Issues, Question, Questions
from tripletune.core.rows import (
    Row,
    own_passages,
    part_questions,
    required_text,
    source_rows,
    whole_object,
)

_NO_CONTEXT = "No context provided"


def read_questions(location: str, issues: Issues = None, source: str = "asqa") -> Questions:
    """Stream the questions; see `data_builders.readers.Reader` for arguments and errors.

    The gold answer is the long answer of the first annotation; the other long answers are aliases. The passages are the
    annotations' knowledge and the contexts of the disambiguated questions, or the row's retrieved passages (ALCE).
    """
    return part_questions(_rows(location), "asqa", _question, Counter() if issues is None else issues, source)


def _rows(location: str) -> Iterator[tuple[str, Row]]:
    splits = checked(whole_object(location) or {}, location, {"train?": {"": {}}, "dev?": {"": {}}})
    if rows := splits.get("train") or splits.get("dev"):
        return ((f"{location}: question {name}", {"sample_id": name} | row) for name, row in rows.items())
    return source_rows(location)


def _question(row: Row, where: str, source: str) -> Question | None:
    identity = required_text(row, ("sample_id", "id"), where, name_field)
    text = required_text(row, ("ambiguous_question", "question"), where)
    annotations = [entry for entry in given(row, "annotations") or () if isinstance(entry, dict)]
    written = [entry for entry in annotations if text_field(entry, where, "long_answer")]
    if not written:
        return None
    answers = dict.fromkeys(" ".join(entry["long_answer"].split()) for entry in written)
    known = checked(written[0], where, {"knowledge?": [dict]}).get("knowledge", ())
    pairs = [pair for pair in given(row, "qa_pairs") or () if isinstance(pair, dict)]
    ranked = own_passages(row, where)
    sources = [*_passages(known, where, "content"), *_passages(pairs, where, "context")]
    gold = () if ranked else tuple(dict.fromkeys(sources))
    short = tuple(tuple(name_list(pair, where, "short_answers")) for pair in pairs)
    return Question(
        identity, text, tuple(answers), ranked or gold, tuple(range(len(gold))), "", source,
        short_answers=tuple(filter(None, short)),
    )  # fmt: skip


def _passages(rows: Iterable[Row], where: str, key: str) -> Iterator[Passage]:
    for row in rows:
        text = text_field(row, where, key).strip()
        if text and text != _NO_CONTEXT:
            yield Passage(name_field(row, where, "wikipage"), text)
