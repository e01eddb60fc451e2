"""Read HotpotQA (Yang et al., 2018), distractor setting, in the official layout or the layout of the hub.

Official rows: `{"_id", "question", "answer", "type", "supporting_facts": [[title, index]],
"context": [[title, [sentences]]]}`. Rows of the hub have `id`, and their `supporting_facts` and `context` are
dictionaries of columns, lists of objects, or either as text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from tripletune.core.data.contexts import context_passages, supporting_passages
from tripletune.core.data.fields import name_field
from tripletune.core.data.questions import Dropped, DropReason, Issues, Question, Questions
from tripletune.core.data.triples import Triple
from tripletune.core.rows import Row, gold_answers, require_fields, required_name, required_text, source_rows

OUT_OF_RANGE = "supporting facts with a sentence index out of range"


def read_questions(
    location: str,
    issues: Issues = None,
    source: str = "hotpotqa",
    evidences: Callable[[Row, str], tuple[Triple, ...]] | None = None,
) -> Questions:
    """Stream the questions of a HotpotQA file; see `data_builders.readers.Reader` for arguments and errors.

    A row without supporting facts has no supporting passages; builders drop it unless the question needs no retrieval.

    Args:
        evidences: Reads the gold triples, given a row and its place (2WikiMultiHopQA).
    """
    issues = Counter() if issues is None else issues
    for where, row in source_rows(location):
        identity = required_name(row, where, "_id", "id")
        question = required_text(row, where, "question")
        answers = gold_answers(row, where)
        require_fields(row, where, "context")
        passages, lengths = context_passages(row["context"], where)
        support = supporting_passages(row.get("supporting_facts"), passages, lengths, where)
        issues[OUT_OF_RANGE] += support.out_of_range
        triples = evidences(row, where) if evidences else ()
        if support.passages is None:
            yield Dropped(identity, DropReason.SUPPORT_NOT_IN_CONTEXT)
            continue
        yield Question(
            id=identity,
            question=question,
            answers=answers,
            passages=passages,
            supporting=support.passages,
            type=name_field(row, where, "type"),
            source=source,
            evidences=triples,
        )
