"""Read ARC-Easy (Clark et al., 2018) as a training part of RAS, from ARC's rows or Self-RAG's training data.

ARC's rows are read as in `multiple_choice`. In Self-RAG's file only the rows of data set `arc_easy` are read.
"""

from __future__ import annotations

from collections import Counter

from tripletune.core.data.fields import name_field
from tripletune.core.data.questions import Issues, Question, Questions
from tripletune.core.rows import Row, source_rows
from tripletune.data_builders.readers.multiple_choice import choice_question
from tripletune.data_builders.self_rag import part_questions

NOT_TRAIN = "rows whose split is not train"


def read_questions(location: str, issues: Issues = None, source: str = "arc_easy") -> Questions:
    """Stream the questions; see `data_builders.readers.Reader` for arguments and errors.

    Rows with a `split` other than train are also read, and are counted in `issues`.
    """
    issues = Counter() if issues is None else issues

    def read(row: Row, where: str, source: str) -> Question:
        """A row as a question; rows of another split are counted, since they are read into training data."""
        if name_field(row, where, "split") not in ("", "train"):
            issues[NOT_TRAIN] += 1
        return choice_question(row, where, source)

    return part_questions(source_rows(location), "arc_easy", read, issues, source)
