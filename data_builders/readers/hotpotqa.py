"""HotpotQA (Yang et al., 2018), distractor setting: the official files and the hub's layout of them.

Official: `{"_id", "question", "answer", "type", "supporting_facts": [[title, index]],
"context": [[title, [sentences]]]}`; on the hub `id`, and `supporting_facts` and `context` as dictionaries of columns,
lists of objects, or either as text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from tripletune.data_builders.readers._rows import (
    Row,
    context_passages,
    gold_answers,
    required_text,
    source_rows,
    supporting_passages,
)
from tripletune.models.data.fields import name_field
from tripletune.models.data.questions import Dropped, DropReason, Issues, Question, Questions
from tripletune.models.data.triples import Triple

OUT_OF_RANGE = "supporting facts with a sentence index out of range"


def read_questions(
    location: str, issues: Issues = None, source: str = "hotpotqa",
    evidences: Callable[[Row, str], tuple[Triple, ...]] = lambda row, where: (),
) -> Questions:  # fmt: skip
    """Stream the questions of a HotpotQA file; see `data_builders.readers.Reader` for arguments and errors.

    A row without supporting facts has no supporting passages; the builder drops it unless it needs no retrieval.
    `evidences` reads a row's gold triples, given its place.
    """
    issues = Counter() if issues is None else issues
    for where, row in source_rows(location):
        identity = required_text(row, ("_id", "id"), where, name_field)
        question = required_text(row, ("question",), where)
        answers = gold_answers(row, where)
        passages, lengths = context_passages(row.get("context"), where)
        supporting, out_of_range = supporting_passages(row.get("supporting_facts"), passages, lengths, where)
        issues[OUT_OF_RANGE] += out_of_range
        triples = evidences(row, where)
        if supporting is None:
            yield Dropped(identity, DropReason.SUPPORT_NOT_IN_CONTEXT)
            continue
        kind = name_field(row, where, "type")
        yield Question(identity, question, answers, passages, supporting, kind, source, evidences=triples)
