"""Read the answers of another program from a file, so that they can be scored and compared with the systems here.

The file has one JSON line per question: `{"id", "answer"}`, and if known the `passages` that were read, best first (ids
of the corpus, or `{"title", "text"}`), `calls`, `prompt_tokens`, `completion_tokens` and `seconds`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tripletune.core.data.fields import checked, name_field
from tripletune.core.data.jsonl import read_jsonl
from tripletune.core.data.passages import Passage, passages_by_key
from tripletune.core.data.records import Step
from tripletune.core.files import file_digest
from tripletune.core.options import CheckedOptions, setting
from tripletune.rag import Trace
from tripletune.rag.search.retrievers import Retrieved
from tripletune.rag.systems import System, Tools

_COUNTS = ("calls", "prompt_tokens", "completion_tokens")
_LAYOUT = {"answer": str, "passages?": list, "seconds?": float, **{f"{name}?": int for name in _COUNTS}}


@dataclass(frozen=True, slots=True)
class AnswersOptions(CheckedOptions):
    """The options for the file of answers."""

    answers: str = setting("", "file with another program's answers, JSON lines of id, answer")
    corpus: str | None = setting(None, "corpus whose ids replace titles and texts of passages")


async def answers(question: str, search: str, tools: Tools, options: AnswersOptions) -> Trace:
    """Return the answer that the file has for a question; a question without an answer raises an error."""
    rows, known = _rows(options)
    row = rows.get(tools.question_id)
    if row is None:
        raise ValueError(f"{options.answers} has no answer to question {tools.question_id}")
    counts: dict[str, Any] = {name: row.get(name) or 0 for name in (*_COUNTS, "seconds")}
    counts["details"] = {"unknown": ["dollars", *(one for one in (*counts, "passages") if row.get(one) is None)]}
    trace = Trace(question, answer=row["answer"].strip(), stop_reason="single_pass", **counts)
    if passages := row["read"]:
        known = {one.key: one for one in tools.context} | known
        trace.add_step(Step(search), [Retrieved(known.get(one.key, one), 0.0) for one in passages])
        trace.shown = list(trace.found)
    return trace


def _rows(options: AnswersOptions) -> tuple[dict[str, dict[str, Any]], dict[str, Passage]]:
    return _read(options.answers, os.stat(options.answers).st_mtime_ns, options.corpus)


@lru_cache(maxsize=4)
def _read(path: str, changed: int, corpus: str | None) -> tuple[dict[str, dict[str, Any]], dict[str, Passage]]:
    """The rows by question, and by `Passage.key` the passages of the corpus whose title and text they name."""
    found: dict[str, dict[str, Any]] = {}
    for where, row in read_jsonl(path):
        checked(row, where, _LAYOUT)
        name = name_field(row, where, "id", "_id", "question_id")
        if not name or name in found:
            raise ValueError(f"{where}: " + (f"a second answer to question {name}" if name else "the row has no id"))
        given = row.get("passages") or ()
        read = [Passage.from_json(one, where) if isinstance(one, dict) else Passage("", "", str(one)) for one in given]
        found[name] = {**row, "read": read}
    keys = {one.key for row in found.values() for one in row["read"] if one.text}
    return found, passages_by_key(corpus, keys) if corpus else {}


SYSTEM = System(
    name="answers",
    run=answers,
    needs_corpus=lambda options: False,
    options=AnswersOptions,
    model="none",
    # This reads all rows before the first question.
    files=lambda options: {"answers": file_digest(options.answers)} if _rows(options) else {},
)
