"""Read the answers of another program from a file, so that they can be scored and compared with the systems here.

The file has one row per question, as JSON lines or an array: `{"id", "answer"}`, and if known the `passages` that were
read, best first (ids or titles of the corpus, or `{"title", "text"}`), `calls`, `prompt_tokens`, `completion_tokens`
and `seconds`. A row without id is matched by its `question` or `query`; the answer may be called `result` or
`prediction`. With `passages`, a row needs no answer: then only its ranking is scored.

The files of RAS's public code are read, too: `NAME_test_output_…json`, an object with the lists `question` and
`output`, and its answerer's rows `{"input", "prediction", "label"}`, where the question ends the `input`. `</s>` at the
end of an answer is the model's end token, and is left out.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypedDict

from tripletune.core.calls import CallError
from tripletune.core.data.fields import checked, name_field, text_field
from tripletune.core.data.passages import Passage, passages_by_key, passages_by_name
from tripletune.core.data.records import Step
from tripletune.core.files import file_digest
from tripletune.core.options import CheckedOptions, setting
from tripletune.core.rows import Row, source_rows, whole_object
from tripletune.rag import Trace
from tripletune.rag.search.retrievers import Retrieved
from tripletune.rag.systems import System, Tools

# An empty answer is an answer, so the field counts that is there.
_ANSWER = ("answer", "result", "prediction")
# The end token of LLaMA-2.
_END = "</s>"
_LAYOUT = {
    "passages?": list,
    "seconds?": float,
    "calls?": int,
    "prompt_tokens?": int,
    "completion_tokens?": int,
}


@dataclass(frozen=True, slots=True)
class AnswersOptions(CheckedOptions):
    """The options for the file of answers."""

    answers: str = setting("", "file with another program's answers: rows of id (or question) and answer")
    corpus: str | None = setting(None, "corpus whose ids replace titles and texts of passages")


class _Cost(TypedDict):
    """The fields of a `Trace` for what an answer cost."""

    calls: int
    prompt_tokens: int
    completion_tokens: int
    seconds: float


class _GivenAnswer(NamedTuple):
    """A row of the file.

    Attributes:
        cost: What the row says of the answer's cost; 0 if it lacks a number, which is then in `unknown`.
        passages: Passages that were read; one named by an id has only that, one with title and text has no other id.
        unknown: What the row does not say.
    """

    answer: str
    cost: _Cost
    passages: list[Passage]
    unknown: list[str]


class _AnswerFile(NamedTuple):
    """The rows of a file.

    Attributes:
        by_id: Rows with the id of a question.
        by_text: Rows without id, by `_text_key` of their question.
        corpus_passages: The passages of the corpus that rows name, by `_name_of` what the row says.
    """

    by_id: dict[str, _GivenAnswer]
    by_text: dict[str, _GivenAnswer]
    corpus_passages: dict[str, Passage]


async def answers(question: str, search: str, tools: Tools, options: AnswersOptions) -> Trace:
    """Return the answer that the file has for a question; a question without an answer raises an error.

    An answer is found by the question's id, or else by its text. Passages of another program have no ids of ours: they
    are looked up by their texts, so that they can be compared with the gold passages.
    """
    file = _answer_file(options)
    answer_row = file.by_id.get(tools.question_id) or file.by_text.get(_text_key(search))
    if answer_row is None:
        raise CallError(f"{options.answers} has no line with the id or the text of question {tools.question_id}")
    details = {"unknown": answer_row.unknown}
    trace = Trace(question, answer=answer_row.answer, stop_reason="single_pass", details=details, **answer_row.cost)
    if answer_row.passages:
        # With the ids of the corpus or of the question's context, passages can be compared with the gold passages.
        named = {passage.key: passage for passage in tools.context} | file.corpus_passages
        hits = []
        for passage in answer_row.passages:
            hits.append(Retrieved(named.get(_name_of(passage), passage), 0.0))
        trace.add_step(Step(search), hits)
        trace.shown = list(trace.found)
    return trace


def _answer_file(options: AnswersOptions) -> _AnswerFile:
    """The file of answers, read once: all questions of a run ask for it, and a changed file is read again."""
    return _read_answer_file(options.answers, os.stat(options.answers).st_mtime_ns, options.corpus)


@lru_cache(maxsize=4)
def _read_answer_file(path: str, changed: int, corpus: str | None) -> _AnswerFile:
    """Read a file of answers; `changed` is the time of its last change, for the cache.

    Raises:
        ValueError: A row has neither an id nor a question, two rows answer one question, or no passage of any row is in
            the corpus, so that every recall would be 0.
    """
    by_id: dict[str, _GivenAnswer] = {}
    by_text: dict[str, _GivenAnswer] = {}
    passages: list[Passage] = []
    for where, row in _answer_rows(path):
        checked(row, where, _LAYOUT)
        answers_of, name = by_id, name_field(row, where, "id", "_id", "question_id")
        if not name:
            answers_of, name = by_text, _text_key(text_field(row, where, "question", "query"))
        if not name:
            raise ValueError(f"{where}: the row has neither an id nor the text of its question")
        if name in answers_of:
            raise ValueError(f"{where}: a second answer to question {name}")
        answer_row = _given_answer(row, where)
        answers_of[name] = answer_row
        passages += answer_row.passages
    corpus_passages: dict[str, Passage] = {}
    if corpus and passages:
        with_text = {_name_of(passage) for passage in passages if passage.text}
        without_text = {_name_of(passage) for passage in passages if not passage.text}
        corpus_passages = passages_by_key(corpus, with_text) | passages_by_name(corpus, without_text)
        if not corpus_passages:
            first = passages[0]
            raise ValueError(
                f"{path}: none of its passages is in {corpus}, for example {first.title or first.id!r}: name passages "
                "by the ids or unique titles of this corpus, or give their title and text as they are in it"
            )
    return _AnswerFile(by_id, by_text, corpus_passages)


def _name_of(passage: Passage) -> str:
    """How a passage of a row is looked up: by its content, or without a text by its id or title."""
    return passage.key if passage.text else passage.id


def _answer_rows(path: str) -> Iterator[tuple[str, Row]]:
    """The rows of a file after their places, those of RAS's public code as rows of question and answer.

    That code writes either one object with lists of questions and outputs, or rows of a prompt and its prediction.

    Raises:
        ValueError: The lists differ in length, so it is not known which answer belongs to which question.
    """
    whole = whole_object(path)
    if whole is not None and isinstance(whole.get("output"), list) and isinstance(whole.get("question"), list):
        lists = checked(whole, path, {"question": [str], "output": [str]})
        questions, outputs = lists["question"], lists["output"]
        if len(questions) != len(outputs):
            raise ValueError(
                f"{path}: {len(outputs)} answers to {len(questions)} questions. The loop that writes such files leaves "
                "out questions that fail, so it is not known which answers are missing: cut `question` to those that "
                "were answered"
            )
        for number, (question, output) in enumerate(zip(questions, outputs, strict=True), 1):
            yield f"{path}: {number}", {"question": question, "answer": output.removesuffix(_END)}
        return
    for where, row in source_rows(path):
        if "input" in row and "prediction" in row:
            *_, question = text_field(row, where, "input").split("Question: ")
            prediction = text_field(row, where, "prediction").removesuffix(_END)
            row = {"question": question, "prediction": prediction}
        yield where, row


def _given_answer(row: Row, where: str) -> _GivenAnswer:
    """The answer of a row with its passages and cost; `unknown` names what the row lacks.

    The report shows a dash for these, instead of 0. A row with passages alone is a retriever's. Passages may be texts,
    ids, titles or objects; a text alone is taken for an id or title.
    """
    cost = _Cost(
        calls=row.get("calls") or 0,
        prompt_tokens=row.get("prompt_tokens") or 0,
        completion_tokens=row.get("completion_tokens") or 0,
        seconds=row.get("seconds") or 0,
    )
    unknown = ["dollars"]
    for name in (*cost, "passages"):
        if row.get(name) is None:
            unknown.append(name)
    passages = []
    for passage in row.get("passages") or ():
        if not isinstance(passage, dict):
            passages.append(Passage("", "", str(passage)))
            continue
        given = Passage.from_json(passage, where)
        if not given.text and given.title and "id" not in passage and "_id" not in passage:
            # A title alone names a passage; the id made of it and an empty text would not.
            given = Passage(given.title, "", given.title)
        passages.append(given)
    if all(row.get(name) is None for name in _ANSWER):
        if "passages" in unknown:
            names = ", ".join(map(repr, _ANSWER))
            raise ValueError(f"{where}: the row has none of {names} and no 'passages'; it has {', '.join(row)}")
        unknown += ["answer", "shown"]
        return _GivenAnswer("", cost, passages, unknown)
    return _GivenAnswer(text_field(row, where, *_ANSWER).strip(), cost, passages, unknown)


def _text_key(question: str) -> str:
    """The text of a question for comparison: spaces folded, as other programs break lines elsewhere."""
    return " ".join(question.split())


SYSTEM = System(
    name="answers",
    run=answers,
    needs_corpus=lambda options: False,
    options=AnswersOptions,
    model="none",
    # This reads all rows before the first question.
    files=lambda options: {"answers": file_digest(options.answers)} if _answer_file(options) else {},
)
