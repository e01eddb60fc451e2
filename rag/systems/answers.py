"""Read the answers of another program from a file, so that they can be scored and compared with the systems here.

The file has one JSON line per question: `{"id", "answer"}`, and if known the `passages` that were read, best first (ids
of the corpus, or `{"title", "text"}`), `calls`, `prompt_tokens`, `completion_tokens` and `seconds`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

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
_LAYOUT = {
    "answer": str,
    "passages?": list,
    "seconds?": float,
    "calls?": int,
    "prompt_tokens?": int,
    "completion_tokens?": int,
}


@dataclass(frozen=True, slots=True)
class AnswersOptions(CheckedOptions):
    """The options for the file of answers."""

    answers: str = setting("", "file with another program's answers, JSON lines of id, answer")
    corpus: str | None = setting(None, "corpus whose ids replace titles and texts of passages")


class _GivenAnswer(NamedTuple):
    """A row of the file.

    Attributes:
        counts: Numbers of the row by name, a name of `_COUNTS` or "seconds"; 0 if the row lacks it.
        passages: Passages that were read; one named by an id has only that, one with title and text has no other id.
        unknown: What the row does not say.
    """

    answer: str
    counts: dict[str, Any]
    passages: list[Passage]
    unknown: list[str]


class _AnswerFile(NamedTuple):
    """The rows by question, and by `Passage.key` the passages of the corpus that they name by title and text."""

    by_question: dict[str, _GivenAnswer]
    corpus_passages: dict[str, Passage]


async def answers(question: str, search: str, tools: Tools, options: AnswersOptions) -> Trace:
    """Return the answer that the file has for a question; a question without an answer raises an error."""
    file = _answer_file(options)
    given = file.by_question.get(tools.question_id)
    if given is None:
        raise ValueError(f"{options.answers} has no answer to question {tools.question_id}")
    details = {"unknown": given.unknown}
    trace = Trace(question, answer=given.answer, stop_reason="single_pass", details=details, **given.counts)
    if given.passages:
        # With the ids of the corpus or of the question's context, passages can be compared with the gold passages.
        named = {passage.key: passage for passage in tools.context} | file.corpus_passages
        hits = []
        for passage in given.passages:
            hits.append(Retrieved(named.get(passage.key, passage), 0.0))
        trace.add_step(Step(search), hits)
        trace.shown = list(trace.found)
    return trace


def _answer_file(options: AnswersOptions) -> _AnswerFile:
    return _read(options.answers, os.stat(options.answers).st_mtime_ns, options.corpus)


@lru_cache(maxsize=4)
def _read(path: str, changed: int, corpus: str | None) -> _AnswerFile:
    """Read a file of answers; `changed` is the time of its last change, for the cache."""
    by_question: dict[str, _GivenAnswer] = {}
    named_by_text: set[str] = set()
    for where, row in read_jsonl(path):
        checked(row, where, _LAYOUT)
        name = name_field(row, where, "id", "_id", "question_id")
        if not name:
            raise ValueError(f"{where}: the row has no id")
        if name in by_question:
            raise ValueError(f"{where}: a second answer to question {name}")
        given = _given_answer(row, where)
        by_question[name] = given
        named_by_text |= {passage.key for passage in given.passages if passage.text}
    corpus_passages = passages_by_key(corpus, named_by_text) if corpus else {}
    return _AnswerFile(by_question, corpus_passages)


def _given_answer(row: dict[str, Any], where: str) -> _GivenAnswer:
    counts = {name: row.get(name) or 0 for name in (*_COUNTS, "seconds")}
    unknown = ["dollars"]
    for name in (*counts, "passages"):
        if row.get(name) is None:
            unknown.append(name)
    passages = []
    for passage in row.get("passages") or ():
        if isinstance(passage, dict):
            passages.append(Passage.from_json(passage, where))
        else:
            passages.append(Passage("", "", str(passage)))
    return _GivenAnswer(row["answer"].strip(), counts, passages, unknown)


SYSTEM = System(
    name="answers",
    run=answers,
    needs_corpus=lambda options: False,
    options=AnswersOptions,
    model="none",
    # This reads all rows before the first question.
    files=lambda options: {"answers": file_digest(options.answers)} if _answer_file(options) else {},
)
