"""2WikiMultiHopQA (Ho et al., 2020): HotpotQA's layout plus `evidences`, gold triples in reasoning order.

Some supporting facts of the published files name a sentence that does not exist; they are counted and still name
their passage.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator

from tripletune.data_builders.hotpotqa_subq.questions import Dropped, DropReason, Question
from tripletune.data_builders.readers._rows import (
    Row,
    context_passages,
    gold_answers,
    required_text,
    source_rows,
    supporting_facts,
    supporting_passages,
)
from tripletune.data_builders.readers.hotpotqa import OUT_OF_RANGE
from tripletune.models.data.triples import Triple, triples_from_json

logger = logging.getLogger(__name__)


def read_questions(
    location: str, issues: Counter[str] | None = None, source: str = "two_wiki"
) -> Iterator[Question | Dropped]:
    """Stream the questions of a 2WikiMultiHopQA file; see `data_builders.readers.Reader` for arguments and errors."""
    issues = Counter() if issues is None else issues
    before = issues[OUT_OF_RANGE]
    for where, row in source_rows(location):
        identity = required_text(row, ("_id", "id"), where)
        question = required_text(row, ("question",), where)
        answers = gold_answers(row, where)
        passages, lengths = context_passages(row.get("context"), where)
        supporting, out_of_range = supporting_passages(
            supporting_facts(row.get("supporting_facts"), where), passages, lengths
        )
        issues[OUT_OF_RANGE] += out_of_range
        evidences = _evidences(row, where)
        if supporting is None:
            yield Dropped(identity, DropReason.SUPPORT_NOT_IN_CONTEXT, where)
            continue
        kind = str(row.get("type") or "")
        yield Question(identity, question, answers, passages, supporting, kind, source, evidences=evidences)
    if issues[OUT_OF_RANGE] > before:
        logger.warning("%s: %d %s", location, issues[OUT_OF_RANGE] - before, OUT_OF_RANGE)


def _evidences(row: Row, where: str) -> tuple[Triple, ...]:
    value = row.get("evidences")
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: 'evidences' is text that is not JSON ({error.msg})") from None
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{where}: 'evidences' must be a list of [subject, relation, object]; it is {value!r}")
    return tuple(dict.fromkeys(triples_from_json(value, where)))
