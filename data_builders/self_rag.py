"""Read rows of Self-RAG's training data (Asai et al., 2024), which hold the questions of ARC-Easy and ASQA.

A row is `{"instruction", "input", "output", "dataset_name"}`. The output holds the answer between reflection tokens and
retrieved paragraphs, of which those that are not called irrelevant become the question's passages.

Tested in `tests/data_builders/subq/test_labelling.py`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from tripletune.core.data.passages import Passage
from tripletune.core.data.questions import Question
from tripletune.core.rows import Row, question_id, required_text

NO_ANSWER = "rows without an answer, skipped"
_INPUT = re.compile(r"## Input:\s*")
_PARAGRAPH = re.compile(r"<paragraph>(.*?)</paragraph>\s*(\[Relevant\]|\[Irrelevant\])?", re.DOTALL)
# Each token is listed, since an answer may contain square brackets.
_REFLECTION = re.compile(
    r"\[(?:Retrieval|No Retrieval|Continue to Use Evidence|Relevant|Irrelevant|Fully supported|Partially supported|"
    r"No support / Contradictory|Utility:[1-5])\]"
)


def part_questions(
    rows: Iterable[tuple[str, Row]],
    part: str,
    read: Callable[[Row, str, str], Question | None],
    issues: Counter[str],
    source: str,
) -> Iterator[Question]:
    """The questions of a part of RAS's mix, from the benchmark's own rows or from Self-RAG's file.

    Args:
        rows: Rows after their places (`core.rows.source_rows`).
        part: The part's `dataset_name` in Self-RAG's file, whose other rows are skipped.
        read: Reads a row of the benchmark, given the row, its place and `source`; None: it has no answer.
        issues: Counts the rows without an answer.
        source: The data set name written into the questions.
    """
    for where, row in rows:
        is_self_rag = {"instruction", "output"} <= row.keys()
        if is_self_rag and row.get("dataset_name", part) != part:
            continue
        if is_self_rag:
            question = _self_rag_question(row, where, source)
        else:
            question = read(row, where, source)
        if question is None:
            issues[NO_ANSWER] += 1
        else:
            yield question


def _self_rag_question(row: Row, where: str, source: str) -> Question | None:
    """The question of a row, with answer and relevant passages; None if question or answer is empty.

    The output holds the answer between reflection tokens and retrieved paragraphs, both of which are removed; the
    paragraphs that the tokens call relevant become the passages.
    """
    instruction = required_text(row, where, "instruction")
    output = required_text(row, where, "output")
    asked = row.get("input")
    if isinstance(asked, str) and asked.strip():
        instruction = f"{instruction}\n## Input:\n{asked}"
    # The question stands after the last heading, or is the whole instruction.
    question = " ".join(_INPUT.split(instruction)[-1].split())
    without_paragraphs = _PARAGRAPH.sub(" ", output)
    answer = " ".join(_REFLECTION.sub(" ", without_paragraphs).split())
    if not question or not answer:
        return None
    passages = tuple(dict.fromkeys(_relevant_passages(output)))
    return Question(
        id=question_id(row, where, question, "id"),
        question=question,
        answers=(answer,),
        passages=passages,
        supporting=tuple(range(len(passages))),
        type="",
        source=source,
        # ARC's choices stand after the question; they are not searched.
        search=question.partition(" A: ")[0],
    )


def _relevant_passages(output: str) -> Iterator[Passage]:
    """The retrieved paragraphs that are not called irrelevant; the first of several lines is the title."""
    for paragraph, verdict in _PARAGRAPH.findall(output):
        if verdict == "[Irrelevant]":
            continue
        first_line, line_break, body = paragraph.strip().partition("\n")
        if not line_break:
            passage = Passage("", first_line.strip())
        else:
            passage = Passage(first_line.strip(), body.strip())
        if passage.text:
            yield passage
