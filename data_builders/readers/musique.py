"""Read MuSiQue (Trivedi et al., 2022): questions of 2 to 4 hops with their gold decompositions.

Official rows: `{"id", "question", "answer", "answer_aliases", "answerable", "paragraphs": [{"idx", "title",
"paragraph_text", "is_supporting"}], "question_decomposition": [{"question", "answer", "paragraph_support_idx"}]}`.
The unanswerable twins of the full version are dropped and counted.
"""

from __future__ import annotations

from tripletune.core.data.fields import checked, is_true, name_field
from tripletune.core.data.passages import Passage
from tripletune.core.data.questions import Dropped, DropReason, Hop, Issues, Question, Questions
from tripletune.core.rows import Row, gold_answers, required_text, source_rows


def read_questions(location: str, issues: Issues = None, source: str = "musique") -> Questions:
    """Stream the questions of a MuSiQue file; see `data_builders.readers.Reader` for arguments and errors."""
    for where, row in source_rows(location):
        identity = required_text(row, ("id", "_id"), where, name_field)
        if not is_true(row, where, "answerable", True):
            yield Dropped(identity, DropReason.UNANSWERABLE)
            continue
        question = required_text(row, ("question",), where)
        answers = gold_answers(row, where)
        passages, positions, marked = _paragraphs(row, where)
        hops = _hops(row, positions, where)
        if hops is None:
            yield Dropped(identity, DropReason.SUPPORT_NOT_IN_CONTEXT)
            continue
        supporting = tuple(dict.fromkeys(hop.passage_index for hop in hops)) or marked
        kind = identity.split("__", 1)[0] if "__" in identity else ""
        yield Question(identity, question, answers, passages, supporting, kind, source, hops=hops)


def _paragraphs(row: Row, where: str) -> tuple[tuple[Passage, ...], dict[str, int], tuple[int, ...]]:
    passages, positions, marked = [], {}, []
    for index, paragraph in enumerate(checked(row, where, {"paragraphs": [{"paragraph_text": str}]})["paragraphs"]):
        passages.append(Passage(name_field(paragraph, where, "title"), paragraph["paragraph_text"]))
        positions[name_field(paragraph, where, "idx").removesuffix(".0") or str(index)] = index
        if is_true(paragraph, where, "is_supporting"):
            marked.append(index)
    return tuple(passages), positions, tuple(marked)


def _hops(row: Row, positions: dict[str, int], where: str) -> tuple[Hop, ...] | None:
    """The decomposition, with paragraph numbers converted to indices; None if a paragraph is not in the row."""
    hops = []
    for hop in checked(row, where, {"question_decomposition": [dict]})["question_decomposition"]:
        number = name_field(hop, where, "paragraph_support_idx").removesuffix(".0")
        if number not in positions:
            return None
        hops.append(Hop(required_text(hop, ("question",), where), name_field(hop, where, "answer"), positions[number]))
    return tuple(hops)
