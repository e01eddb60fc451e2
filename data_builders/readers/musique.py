"""Read MuSiQue (Trivedi et al., 2022): questions of 2 to 4 hops with their gold decompositions.

Official rows: `{"id", "question", "answer", "answer_aliases", "answerable", "paragraphs": [{"idx", "title",
"paragraph_text", "is_supporting"}], "question_decomposition": [{"question", "answer", "paragraph_support_idx"}]}`.
The unanswerable twins of the full version are dropped and counted.
"""

from __future__ import annotations

from typing import NamedTuple

from tripletune.core.data.fields import checked, is_true, name_field
from tripletune.core.data.passages import Passage
from tripletune.core.data.questions import Dropped, DropReason, Hop, Issues, Question, Questions
from tripletune.core.rows import Row, gold_answers, require_fields, required_name, required_text, source_rows


def read_questions(location: str, issues: Issues = None, source: str = "musique") -> Questions:
    """Stream the questions of a MuSiQue file; see `data_builders.readers.Reader` for arguments and errors.

    The hops are those of the gold decomposition, in its order. They say which paragraphs support the question; the
    marks of the paragraphs count only where there are no hops.
    """
    for where, row in source_rows(location):
        identity = required_name(row, where, "id", "_id")
        if not is_true(row, where, "answerable", True):
            yield Dropped(identity, DropReason.UNANSWERABLE)
            continue
        question = required_text(row, where, "question")
        answers = gold_answers(row, where)
        require_fields(row, where, "paragraphs", "question_decomposition")
        paragraphs = marked_paragraphs(row, where)
        hops = _gold_hops(row, paragraphs.indices, where)
        if hops is None:
            yield Dropped(identity, DropReason.SUPPORT_NOT_IN_CONTEXT)
            continue
        supporting = tuple(dict.fromkeys(hop.passage_index for hop in hops))
        yield Question(
            id=identity,
            question=question,
            answers=answers,
            passages=paragraphs.passages,
            supporting=supporting or paragraphs.supporting,
            type=shape_of(identity),
            source=source,
            hops=hops,
        )


def shape_of(identity: str) -> str:
    """The shape of the reasoning, with which MuSiQue's ids begin: "2hop__…", "3hop1__…"; "" for other ids."""
    shape, separator, _ = identity.partition("__")
    return shape if separator else ""


class MarkedParagraphs(NamedTuple):
    """The paragraphs of a row.

    Attributes:
        indices: The index in `passages` of each paragraph number ("idx") that a hop may name.
        supporting: Indices of the paragraphs that are marked as supporting.
    """

    passages: tuple[Passage, ...]
    indices: dict[str, int]
    supporting: tuple[int, ...]


def marked_paragraphs(row: Row, where: str, name: str = "paragraphs") -> MarkedParagraphs:
    """The paragraphs of a row in MuSiQue's layout, of which some are marked as supporting; IRCoT's are `contexts`.

    A hop names a paragraph by its number "idx"; where a row has none, by its place from 0.
    """
    passages = []
    indices = {}
    supporting = []
    for index, paragraph in enumerate(checked(row, where, {name: [dict]})[name]):
        # Some copies call the text "text".
        text = required_text(paragraph, where, "paragraph_text", "text")
        passages.append(Passage(name_field(paragraph, where, "title"), text))
        indices[_number_as_text(paragraph, where, "idx") or str(index)] = index
        if is_true(paragraph, where, "is_supporting"):
            supporting.append(index)
    return MarkedParagraphs(tuple(passages), indices, tuple(supporting))


def _gold_hops(row: Row, indices: dict[str, int], where: str) -> tuple[Hop, ...] | None:
    """The decomposition, with paragraph numbers converted to indices; None if a paragraph is not in the row."""
    hops = []
    for hop in checked(row, where, {"question_decomposition": [dict]})["question_decomposition"]:
        number = _number_as_text(hop, where, "paragraph_support_idx")
        if number not in indices:
            return None
        question = required_text(hop, where, "question")
        hops.append(Hop(question, name_field(hop, where, "answer"), indices[number]))
    return tuple(hops)


def _number_as_text(row: Row, where: str, name: str) -> str:
    """A whole number as text; copies that went through pandas hold "3.0"."""
    return name_field(row, where, name).removesuffix(".0")
