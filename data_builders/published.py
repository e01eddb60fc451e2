"""Read published training data that needs no teacher: the data of RAS, and ExplaGraphs.

**RAS** (hub data set `pat-jj/ras_train_data`, `train_data.jsonl`). A row is `{"input", "label", "graphs"}` with the
finished prompt in `input` (figures 9-13):

    <instruction>

    [SUBQ] q_0
    Retrieved Graph Information: ['(S> s| P> p| O> o)', "(S> s| P> p| O> o's)"]
    ...
    Question: Q

Without history the body is `Question: Q`, or `[NO_RETRIEVAL]` and `Question: Q`, or the bare question. The task is
read from the instruction, else from the label; the question's id is a hash of its normalised text. Planning rows have
no answers, and steps have no text. Repeated triples of a step are kept once. `graphs` repeats them and is not read.

**ExplaGraphs** (Saha et al., 2021): does argument 2 support argument 1? The file is tab-separated `arg1, arg2, label,
graph`, with graphs as `(s; p; o)(s; p; o)`. A row becomes an answering record whose only step holds the graph.
G-Retriever (He et al., 2024) splits the 2,766 rows at random 60/20/20. `split_names` does the same with another seed.
"""

from __future__ import annotations

import ast
import csv
import hashlib
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tripletune.core.data.answers import normalize_answer
from tripletune.core.data.records import Action, Record, Step
from tripletune.core.data.rendering import parse_plan
from tripletune.core.data.triples import Triple, parse_triples
from tripletune.core.files import read_text
from tripletune.core.rows import Row, source_rows

HUB_ID = "pat-jj/ras_train_data"
REPEATED_TRIPLES = "triples that repeat another triple of their step, kept once"
MALFORMED_TRIPLES = "malformed triples, left out"
OPPOSITE = "questions whose first plan is [NO_RETRIEVAL] in one row and [SUBQ] in another"
OPPOSITE_CHAIN = "plans that search for a question labelled [NO_RETRIEVAL]"
_SOURCE = "ras_released"
_GRAPH = "Retrieved Graph Information:"
_BODY = re.compile(r"^(?:\[SUBQ\]\s|Question: |\[NO_RETRIEVAL\]\s*Question: )", re.MULTILINE)
_SUBQ = re.compile(r"\[SUBQ\]\s+")
# The list of triples ends at the next step or the question.
_NEXT = re.compile(r"\n\s*(?=\[SUBQ\]\s|Question: )")


def opposite_questions(location: str) -> set[str]:
    """Ids of the questions that have both first plans: [NO_RETRIEVAL] and [SUBQ] label the same prompt.

    In the authors' data a question that was answered directly also kept its chain of searches; Algorithm 1 (line 7) of
    the paper leaves the chain out.
    """
    first_plans: dict[str, set[Action]] = {}
    for record in read_released(location, Counter(), Counter()):
        if record.task == "planning" and not record.steps:
            first_plans.setdefault(record.question_id, set()).add(record.action)
    return {question for question, actions in first_plans.items() if {Action.NO_RETRIEVAL, Action.SUBQ} <= actions}


class MalformedRow(ValueError):
    """A row of the released data that can't be read; the card shows the message."""


def read_released(location: str, drops: Counter[str], issues: Counter[str]) -> Iterator[Record]:
    """Stream the records of the released data.

    Args:
        location: A file or hub id (`core.rows.source_rows`).
        drops: Counts the rows that can't be read, by the reason.
        issues: Counts malformed and repeated triples.
    """
    # The number makes an id unique, since the data has repeated rows.
    for number, (_, row) in enumerate(source_rows(location), 1):
        try:
            yield released_record(row, number, issues)
        except MalformedRow as error:
            drops[str(error)] += 1


def released_record(row: Row, number: int, issues: Counter[str]) -> Record:
    """Row `number` as a record; see `read_released`.

    The instruction names the role in the authors' files; without it, a label that is an action means planning.
    """
    text = row.get("input")
    label = row.get("label")
    if not isinstance(text, str) or not isinstance(label, str) or not text.strip() or not label.strip():
        raise MalformedRow("input or label is missing, empty or not text")
    instruction, body = _split_prompt(text.replace("\r\n", "\n"))
    steps, question = _parse_body(body, issues)
    question_digest = hashlib.blake2b(normalize_answer(question).encode(), digest_size=8).hexdigest()
    plan = parse_plan(" ".join(label.split()))
    role = re.search(r"\b(planner|answerer)\b", instruction)
    is_planning = role[0] == "planner" if role else plan.action is not None
    if not is_planning:
        return Record(
            id=f"{_SOURCE}:{number}:answer",
            question_id=f"{_SOURCE}-{question_digest}",
            task="answering",
            question=question,
            action=Action.SUFFICIENT if steps else Action.NO_RETRIEVAL,
            steps=steps,
            answers=(label.strip(),),
            source=_SOURCE,
        )
    if plan.action is None:
        raise MalformedRow("the label of a planning row is not an action")
    return Record(
        id=f"{_SOURCE}:{number}:plan",
        question_id=f"{_SOURCE}-{question_digest}",
        task="planning",
        question=question,
        action=plan.action,
        steps=steps,
        subquery=plan.subquery,
        source=_SOURCE,
    )


class _Prompt(NamedTuple):
    """A released prompt: its instruction, and what follows it."""

    instruction: str
    body: str


def _split_prompt(text: str) -> _Prompt:
    """A prompt in its two parts; no line of an instruction begins like a body."""
    body = _BODY.search(text)
    if body:
        return _Prompt(text[: body.start()], text[body.start() :])
    # A bare question comes after a blank line, and may contain blank lines.
    instruction, blank_line, question = text.lstrip("\n").partition("\n\n")
    if blank_line:
        return _Prompt(instruction, question)
    return _Prompt(text, "")


class _Body(NamedTuple):
    """What a prompt says below its instruction: the steps so far, and the question."""

    steps: tuple[Step, ...]
    question: str


def _parse_body(body: str, issues: Counter[str]) -> _Body:
    """Read a body: the steps `[SUBQ] …` with their graphs, then the question.

    A step ends where the next one or the question begins, since its list of triples may be broken. Each turn of the
    loop takes one step off the body; what is left at the end is the question.

    Raises:
        MalformedRow: A step lacks its sub-query or its graph, or the question is missing.
    """
    steps: list[Step] = []
    body = body.removeprefix(Action.NO_RETRIEVAL.value).lstrip()
    while step_start := _SUBQ.match(body):
        query, heading, after_heading = body[step_start.end() :].partition(_GRAPH)
        query = " ".join(query.split())
        # Where the next step begins before the heading, the heading is that of the next step.
        heading_is_of_next = _NEXT.search(body[: body.find(_GRAPH)], step_start.end()) is not None
        if not heading or not query or heading_is_of_next:
            raise MalformedRow("a step without sub-query or graph information")
        step_end = _NEXT.search(after_heading)
        if step_end is None:
            raise MalformedRow("no question in the input")
        steps.append(Step(query, _read_triples(after_heading[: step_end.start()], issues)))
        body = after_heading[step_end.end() :]
    question = body.removeprefix("Question:").strip()
    if not question:
        raise MalformedRow("no question in the input")
    return _Body(tuple(steps), question)


def _read_triples(text: str, issues: Counter[str]) -> tuple[Triple, ...]:
    """The distinct triples of a printed list, or the readable triples of a broken list.

    `issues` counts malformed and repeated triples, so that the card says what the released data lacks.
    """
    triples: list[Triple] = []
    malformed = 0
    for item in _printed_items(text):
        # In this list a backslash is not an escape, and a line break inside a name is a space.
        folded = " ".join(item.split()).replace("\\", "\\\\")
        if folded and not folded.endswith((")", "]")):
            # The authors' code split the list at "), ", so a last bracket may be missing.
            folded += ")"
        parsed = parse_triples(folded)
        triples += parsed.triples
        malformed += parsed.malformed
        if folded and not parsed.triples and not parsed.malformed:
            # A text without any marker is one malformed triple.
            malformed += 1
    distinct = tuple(dict.fromkeys(triples))
    issues[MALFORMED_TRIPLES] += malformed
    issues[REPEATED_TRIPLES] += len(triples) - len(distinct)
    return distinct


def _printed_items(text: str) -> list[str]:
    """The items of a list of texts as Python prints it; the whole text as one item if it is no such list.

    The authors wrote `str(list)` into the prompts, and some lists are broken. `literal_eval` runs no code.
    """
    try:
        items = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return [text]
    if isinstance(items, list) and all(isinstance(item, str) for item in items):
        return items
    return [text]


LABELS = ("support", "counter")
MALFORMED = "malformed triples in graphs"
_BETWEEN_TRIPLES = re.compile(r"\)\s*,?\s*\(")


def read_explagraphs(path: str | Path, issues: Counter[str]) -> Iterator[Record]:
    """Stream the rows of an ExplaGraphs file as answering records, in file order; `issues` counts malformed triples.

    A label or an argument that is missing is an error, not a skipped row: the file has 2,766 rows by design.
    """
    lines = read_text(path).removeprefix("\ufeff").split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        # Each line is parsed alone, so that an open quotation mark does not include the lines after it.
        (columns,) = csv.reader([line], delimiter="\t")
        if len(columns) != 4:
            raise ValueError(f"{where}: expected 4 tab-separated columns, found {len(columns)}")
        first, second, label, graph = (column.strip() for column in columns)
        if label == "label":
            continue
        if label not in LABELS:
            raise ValueError(f"{where}: the label is {label!r}; it must be {' or '.join(LABELS)}")
        if not first or not second:
            raise ValueError(f"{where}: an argument is empty")
        triples, malformed = parse_graph(graph)
        issues[MALFORMED] += malformed
        yield Record(
            id=f"explagraphs:{number}:answer",
            question_id=f"explagraphs-{number}",
            task="answering",
            question=f"Argument 1: {first} Argument 2: {second} Does argument 2 support or counter argument 1?",
            action=Action.SUFFICIENT,
            steps=(Step("How are the two arguments connected?", triples),),
            answers=(label,),
            source="explagraphs",
        )


class ParsedGraph(NamedTuple):
    """The distinct triples of a written graph, and the number of malformed ones."""

    triples: tuple[Triple, ...]
    malformed: int


def parse_graph(text: str) -> ParsedGraph:
    """Read a graph of ExplaGraphs, `(s; p; o)(s; p; o)`; names may have brackets.

    Triples are divided where a closing bracket meets an opening one, so all other brackets belong to names.
    """
    text = text.strip()
    if not text:
        return ParsedGraph((), 0)
    triples = []
    malformed = 0
    for fields in _BETWEEN_TRIPLES.split(text.removeprefix("(").removesuffix(")")):
        try:
            triples.append(Triple(*fields.split(";")))
        except (TypeError, ValueError):
            # Not three fields, or an empty one.
            malformed += 1
    return ParsedGraph(tuple(dict.fromkeys(triples)), malformed)


def split_names(count: int, seed: int = 0) -> list[str]:
    """The split of each of `count` rows, drawn 60/20/20: "train", "validation" or "test"."""
    train_rows = round(count * 0.6)
    validation_rows = round(count * 0.2)
    test_rows = count - train_rows - validation_rows
    names = ["train"] * train_rows + ["validation"] * validation_rows + ["test"] * test_rows
    random.Random(seed).shuffle(names)
    return names
