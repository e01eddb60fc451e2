"""ARC-Easy (Clark et al., 2018) as a training part of RAS: ARC's own rows, or Self-RAG's training data.

ARC's rows are read as `multiple_choice` reads them; of Self-RAG's file only the rows of data set `arc_easy` are taken.
"""

from __future__ import annotations

from collections import Counter

from tripletune.data_builders.readers._rows import Row, part_questions, source_rows
from tripletune.data_builders.readers.multiple_choice import choice_question
from tripletune.models.data.fields import name_field
from tripletune.models.data.questions import Issues, Question, Questions

NOT_TRAIN = "rows that say of themselves that they are not of the train split"


def read_questions(location: str, issues: Issues = None, source: str = "arc_easy") -> Questions:
    """Stream the questions; see `data_builders.readers.Reader` for arguments and errors.

    Rows with a `split` other than train are also read, and counted in `issues`, for the caller to decide.
    """
    issues = Counter() if issues is None else issues

    def read(row: Row, where: str, source: str) -> Question:
        issues[NOT_TRAIN] += (name_field(row, where, "split") or "train") != "train"
        return choice_question(row, where, source)

    return part_questions(source_rows(location), "arc_easy", read, issues, source)
