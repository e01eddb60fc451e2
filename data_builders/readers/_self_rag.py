"""Rows of Self-RAG's training data (Asai et al., 2023; hub id `selfrag/selfrag_train_data`), from which RAS takes the
ASQA and ARC-Easy questions it trains on (section 4.1).

`{"id", "dataset_name", "instruction", "input", "output"}`: the task's instruction stands before `## Input:`, and the
output mixes the answer with reflection tokens and the passages that were retrieved while it was written.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator

from tripletune.data_builders.hotpotqa_subq.questions import Question
from tripletune.data_builders.readers._rows import Row, required_text
from tripletune.models.data.records import Passage

NO_ANSWER = "rows without an answer, passed over"
_INPUT = re.compile(r"## Input:\s*")
_PARAGRAPH = re.compile(r"<paragraph>(.*?)</paragraph>\s*(\[Relevant\]|\[Irrelevant\])?", re.DOTALL)
# Named one by one: an answer may hold square brackets of its own.
_REFLECTION = re.compile(
    r"\[(?:Retrieval|No Retrieval|Continue to Use Evidence|Relevant|Irrelevant|Fully supported|Partially supported|"
    r"No support / Contradictory|Utility:[1-5])\]"
)


def is_self_rag(row: Row) -> bool:
    """Whether a row has this layout."""
    return "instruction" in row and "output" in row


def self_rag_question(row: Row, where: str, source: str) -> Question | None:
    """The question of a row, its answer and the passages that were called relevant; None when the answer is empty.

    Raises:
        ValueError: instruction or output is missing.
    """
    instruction, output = required_text(row, ("instruction",), where), required_text(row, ("output",), where)
    more = row.get("input")
    parts = _INPUT.split(f"{instruction}\n## Input:\n{more}" if isinstance(more, str) and more.strip() else instruction)
    question = " ".join(parts[-1].split())
    answer = " ".join(_REFLECTION.sub(" ", _PARAGRAPH.sub(" ", output)).split())
    if not question or not answer:
        return None
    passages = tuple(dict.fromkeys(_passages(output)))
    identity = row.get("id")
    if not isinstance(identity, str) or not identity:
        identity = hashlib.blake2b(question.encode(), digest_size=8).hexdigest()
    return Question(identity, question, (answer,), passages, tuple(range(len(passages))), "", source)


def _passages(output: str) -> Iterator[Passage]:
    for text, verdict in _PARAGRAPH.findall(output):
        title, newline, body = text.strip().partition("\n")
        if verdict != "[Irrelevant]" and (body if newline else title).strip():
            yield Passage(title.strip(), body.strip()) if newline else Passage("", title.strip())
