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

from tripletune.core.data.answers import normalize_answer
from tripletune.core.data.records import Action, Record, Step
from tripletune.core.data.rendering import parse_plan
from tripletune.core.data.triples import Triple, parse_triples
from tripletune.core.files import read_text
from tripletune.core.rows import Row, source_rows

HUB_ID = "pat-jj/ras_train_data"
REPEATED_TRIPLES = "triples that repeat another triple of their step, kept once"
MALFORMED_TRIPLES = "malformed triples, left out"
_SOURCE = "ras_released"
_GRAPH = "Retrieved Graph Information:"
_BODY = re.compile(r"^(?:\[SUBQ\]\s|Question: |\[NO_RETRIEVAL\]\s*Question: )", re.MULTILINE)
_SUBQ = re.compile(r"\[SUBQ\]\s+")
# The list of triples ends at the next step or the question.
_NEXT = re.compile(r"\n\s*(?=\[SUBQ\]\s|Question: )")


class MalformedRow(ValueError):
    """An unreadable row of the released data; the card shows the message."""


def read_released(location: str, drops: Counter[str], issues: Counter[str]) -> Iterator[Record]:
    """Stream the records of the released data."""
    # The number makes an id unique, since the data has repeated rows.
    for number, (_, row) in enumerate(source_rows(location), 1):
        try:
            yield released_record(row, number, issues)
        except MalformedRow as error:
            drops[str(error)] += 1


def released_record(row: Row, number: int, issues: Counter[str]) -> Record:
    """Row `number` as a record."""
    text, label = row.get("input"), row.get("label")
    if not isinstance(text, str) or not isinstance(label, str) or not text.strip() or not label.strip():
        raise MalformedRow("input or label is missing, empty or not text")
    instruction, body = _split_instruction(text.replace("\r\n", "\n"))
    steps, question = _parse_body(body, issues)
    plan = parse_plan(" ".join(label.split()))
    role = re.search(r"\b(planner|answerer)\b", instruction)
    planning = role[0] == "planner" if role else plan.action is not None
    if planning and plan.action is None:
        raise MalformedRow("the label of a planning row is not an action")
    answering = Action.SUFFICIENT if steps else Action.NO_RETRIEVAL
    identity = hashlib.blake2b(normalize_answer(question).encode(), digest_size=8).hexdigest()
    name, asked = f"{_SOURCE}:{number}", f"{_SOURCE}-{identity}"
    if planning and plan.action:
        return Record(f"{name}:plan", asked, "planning", question, plan.action, steps, plan.subquery, (), _SOURCE)
    return Record(f"{name}:answer", asked, "answering", question, answering, steps, "", (label.strip(),), _SOURCE)


def _split_instruction(text: str) -> tuple[str, str]:
    """Return instruction and body; no line of an instruction begins like a body."""
    if start := _BODY.search(text):
        return text[: start.start()], text[start.start() :]
    # A bare question comes after a blank line, and may contain blank lines.
    head, blank, rest = text.lstrip("\n").partition("\n\n")
    return (head, rest) if blank else (text, "")


def _parse_body(body: str, issues: Counter[str]) -> tuple[tuple[Step, ...], str]:
    steps: list[Step] = []
    body = body.removeprefix(Action.NO_RETRIEVAL.value).lstrip()
    while opening := _SUBQ.match(body):
        query, graph, rest = body[opening.end() :].partition(_GRAPH)
        query = " ".join(query.split())
        following = _NEXT.search(rest)
        if not graph or not query or _NEXT.search(body[: body.find(_GRAPH)], opening.end()):
            raise MalformedRow("a step without sub-query or graph information")
        if following is None:
            raise MalformedRow("no question in the input")
        steps.append(Step(query, _read_triples(rest[: following.start()], issues)))
        body = rest[following.end() :]
    question = body.removeprefix("Question:").strip()
    if not question:
        raise MalformedRow("no question in the input")
    return tuple(steps), question


def _read_triples(text: str, issues: Counter[str]) -> tuple[Triple, ...]:
    """The triples of a printed list, or the readable triples of a broken list."""
    try:
        items = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        items = None
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        items = [text]
    found: list[Triple] = []
    for item in items:
        # In this list a backslash is not an escape, and a line break inside a name is a space.
        folded = " ".join(item.split()).replace("\\", "\\\\")
        # The authors' code split the list at "), ", so a last bracket may be missing.
        parsed = parse_triples(folded if folded.endswith((")", "]")) else f"{folded})")
        found += parsed.triples
        issues[MALFORMED_TRIPLES] += parsed.malformed or bool(folded and not parsed.triples)
    distinct = tuple(dict.fromkeys(found))
    issues[REPEATED_TRIPLES] += len(found) - len(distinct)
    return distinct


LABELS = ("support", "counter")
MALFORMED = "malformed triples in graphs"
_BETWEEN_TRIPLES = re.compile(r"\)\s*,?\s*\(")


def read_explagraphs(path: str | Path, issues: Counter[str]) -> Iterator[Record]:
    """Stream the rows of an ExplaGraphs file as answering records, in file order."""
    for number, line in enumerate(read_text(path).removeprefix("\ufeff").split("\n"), 1):
        if not line.strip():
            continue
        # Each line is parsed alone, so that an open quotation mark does not include the lines after it.
        (columns,), where = csv.reader([line], delimiter="\t"), f"{path}:{number}"
        if len(columns) != 4:
            raise ValueError(f"{where}: expected 4 tab-separated columns, found {len(columns)}")
        first, second, label, graph = map(str.strip, columns)
        if label == "label":
            continue
        if label not in LABELS:
            raise ValueError(f"{where}: the label is {label!r}; it must be {' or '.join(LABELS)}")
        if not first or not second:
            raise ValueError(f"{where}: an argument is empty")
        triples, malformed = parse_graph(graph)
        issues[MALFORMED] += malformed
        asked = f"Argument 1: {first} Argument 2: {second} Does argument 2 support or counter argument 1?"
        steps = (Step("How are the two arguments connected?", triples),)
        names = f"explagraphs:{number}:answer", f"explagraphs-{number}"
        yield Record(*names, "answering", asked, Action.SUFFICIENT, steps, "", (label,), "explagraphs")


def parse_graph(text: str) -> tuple[tuple[Triple, ...], int]:
    """Return the distinct triples of `(s; p; o)(s; p; o)` and the number of malformed ones; names may have brackets."""
    text = text.strip()
    triples, malformed = [], 0
    for part in _BETWEEN_TRIPLES.split(text.removeprefix("(").removesuffix(")")) if text else ():
        try:
            triples.append(Triple(*part.split(";")))
        except (TypeError, ValueError):
            malformed += 1
    return tuple(dict.fromkeys(triples)), malformed


def split_names(count: int, seed: int = 0) -> list[str]:
    """Split `count` rows at random 60/20/20 into train, validation and test."""
    names = ["train"] * round(count * 0.6) + ["validation"] * round(count * 0.2)
    names += ["test"] * (count - len(names))
    random.Random(seed).shuffle(names)
    return names
