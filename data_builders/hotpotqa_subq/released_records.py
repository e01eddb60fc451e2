"""The authors' released training data of RAS as our records (hub data set `pat-jj/ras_train_data`, `train_data.jsonl`).

A row is `{"input", "label", "graphs"}` with the finished prompt in `input` (figures 9-13):

    <instruction>

    [SUBQ] q_0
    Retrieved Graph Information: ['(S> s| P> p| O> o)', "(S> s| P> p| O> o's)"]
    ...
    Question: Q

Triples stand as the printed form of a Python list and are read one by one, so a malformed one costs no neighbour. An
input without history is `Question: Q`, or `[NO_RETRIEVAL]` and `Question: Q`, or, in rows of older code, the bare
question. The task is told by the instruction, else by the label.

What a row does not say is decided so: the question's id is a hash of its normalised text, so that all rows of a
question fall on one side of a split; planning rows have no answers, steps no text; repeated triples of a step, of which
the data has many (figure 10), are kept once. `graphs` held the graphs of the steps; where they can still be read as
triples they stand in for a step without any, and differences are counted.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from tripletune.data_builders.readers._rows import Row, first_character, read_rows
from tripletune.models.data.records import Action, Record, Step, Task, normalize_answer
from tripletune.models.data.triples import Triple, parse_triples
from tripletune.models.prompts.rendering import parse_plan

HUB_ID = "pat-jj/ras_train_data"
REPEATED_TRIPLES = "triples that repeat another of their step, kept once"
MALFORMED_TRIPLES = "malformed triples, left out"
OTHER_GRAPHS = "rows whose graphs are of other steps or triples than the text; the text counts"
UNREAD_GRAPHS = "rows whose graphs are not triples (embeddings, say); the text counts"
_FIRST_PLACES = 5
_GRAPH = "Retrieved Graph Information:"
_BODY = re.compile(r"^(?:\[SUBQ\]\s|Question: |\[NO_RETRIEVAL\]\s*Question: )", re.MULTILINE)
_NO_RETRIEVAL = re.compile(r"\[NO_RETRIEVAL\]\s*")
_SUBQ = re.compile(r"\[SUBQ\]\s+")
# Of the list of triples belongs all up to the next step or the question.
_NEXT = re.compile(r"\n\s*(?=\[SUBQ\]\s|Question: )")


class Malformed(StrEnum):
    """Why a row gives no record; the values are the words of the data set card."""

    NOT_JSON = "not a JSON object"
    NO_TEXT = "input or label is missing, empty or no text"
    NO_QUESTION = "no question in the input"
    NO_GRAPH = "a sub-query without graph information"
    NO_SUBQUERY = "an empty sub-query in the history"
    NO_ACTION = "the label of a planning row is no action"


class MalformedRow(ValueError):
    """A row of the released data that can't be read."""

    def __init__(self, reason: Malformed) -> None:
        super().__init__(reason.value)
        self.reason = reason


@dataclass
class Rejected:
    """The rows left out.

    Attributes:
        counts: How many, by reason.
        places: The first places of each reason.
    """

    counts: Counter[str] = field(default_factory=Counter)
    places: dict[str, list[str]] = field(default_factory=dict)

    def add(self, reason: Malformed, where: str) -> None:
        """Count one row."""
        self.counts[reason.value] += 1
        places = self.places.setdefault(reason.value, [])
        if len(places) < _FIRST_PLACES:
            places.append(where)

    def sentences(self) -> list[str]:
        """One sentence a reason, with the first places."""
        return [
            f"{count:,} rows left out, {reason}: {', '.join(self.places[reason])}"
            f"{', ...' if count > len(self.places[reason]) else ''}."
            for reason, count in self.counts.items()
        ]


def read_released(
    location: str, rejected: Rejected | None = None, issues: Counter[str] | None = None, source: str = "ras_released"
) -> Iterator[Record]:
    """Stream the records of the released data.

    Args:
        location: A `.jsonl`, `.json` (an array) or `.parquet` file, or a hub id such as `pat-jj/ras_train_data`.
        rejected: Collects the rows that can't be read.
        issues: Counts oddities that cost no row.
        source: The data set name written into the records.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file as a whole can't be read.
    """
    rejected = Rejected() if rejected is None else rejected
    issues = Counter() if issues is None else issues
    for number, (where, row) in enumerate(_rows(location), 1):
        try:
            if row is None:
                raise MalformedRow(Malformed.NOT_JSON)
            yield released_record(row, number, issues, source)
        except MalformedRow as error:
            rejected.add(error.reason, where)


def released_record(row: Row, number: int, issues: Counter[str], source: str = "ras_released") -> Record:
    """One row as a record.

    Args:
        row: `input`, `label` and perhaps `graphs`.
        number: The row's number, which makes its id unique: the data has rows that say the same.
        issues: Counts oddities that cost no row.
        source: The data set name written into the record.

    Raises:
        MalformedRow: the row can't be read.
    """
    text, label = row.get("input"), row.get("label")
    if not isinstance(text, str) or not isinstance(label, str) or not text.strip() or not label.strip():
        raise MalformedRow(Malformed.NO_TEXT)
    instruction, body = _split_instruction(text.replace("\r\n", "\n"))
    steps, question = _parse_body(body, issues)
    steps = _with_graphs(steps, row.get("graphs"), issues)
    plan = parse_plan(" ".join(label.split()))
    task = _task(instruction, plan.action is not None)
    if task == "planning" and plan.action is None:
        raise MalformedRow(Malformed.NO_ACTION)
    action = plan.action if task == "planning" and plan.action else _answering_action(steps)
    normal = normalize_answer(question)
    identity = hashlib.blake2b(normal.encode(), digest_size=8).hexdigest()
    return Record(
        id=f"{source}:{number}:{'plan' if task == 'planning' else 'answer'}",
        question_id=f"{source}-{identity}",
        task=task,
        question=question,
        action=action,
        steps=steps,
        subquery=plan.subquery if task == "planning" else "",
        answers=(label.strip(),) if task == "answering" else (),
        source=source,
    )


def _rows(location: str) -> Iterator[tuple[str, Row | None]]:
    """Rows with their places; None for a line that is no JSON object, which costs no other line here."""
    path = Path(location)
    if not path.is_file() or path.suffix == ".parquet" or first_character(path) == "[":
        yield from read_rows(location)
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except ValueError:
                row = None
            yield f"{path}:{number}", row if isinstance(row, dict) else None


def _split_instruction(text: str) -> tuple[str, str]:
    """Instruction and body; no line of an instruction begins as a body does."""
    start = _BODY.search(text)
    if start is not None:
        return text[: start.start()], text[start.start() :]
    # The bare question of older rows stands behind a blank line, and may hold blank lines itself.
    head, blank, rest = text.lstrip("\n").partition("\n\n")
    return (head, rest) if blank else (text, "")


def _parse_body(body: str, issues: Counter[str]) -> tuple[tuple[Step, ...], str]:
    steps: list[Step] = []
    body = _NO_RETRIEVAL.sub("", body, count=1) if _NO_RETRIEVAL.match(body) else body
    while opening := _SUBQ.match(body):
        query, graph, rest = body[opening.end() :].partition(_GRAPH)
        if not graph or _NEXT.search(query):
            raise MalformedRow(Malformed.NO_GRAPH)
        query = " ".join(query.split())
        if not query:
            raise MalformedRow(Malformed.NO_SUBQUERY)
        following = _NEXT.search(rest)
        if following is None:
            raise MalformedRow(Malformed.NO_QUESTION)
        steps.append(Step(query, _read_triples(rest[: following.start()], issues)))
        body = rest[following.end() :]
    question = body.removeprefix("Question:").strip()
    if not question:
        raise MalformedRow(Malformed.NO_QUESTION)
    return tuple(steps), question


def _read_triples(text: str, issues: Counter[str]) -> tuple[Triple, ...]:
    """The triples of a printed list; when it is broken, those that can be read from its text."""
    try:
        items = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        items = [text]
    if isinstance(items, (list, tuple)) and all(isinstance(item, str) for item in items):
        return _parsed(items, issues)
    return _parsed([items if isinstance(items, str) else text], issues)


def _parsed(items: Sequence[str], issues: Counter[str]) -> tuple[Triple, ...]:
    found: list[Triple] = []
    for item in items:
        # Backslashes are no escapes there, and a line break inside a name is a space.
        folded = " ".join(item.split()).replace("\\", "\\\\")
        # The authors' code split the list at "), ", so a last bracket may be missing.
        parsed = parse_triples(folded if folded.endswith((")", "]")) else f"{folded})")
        found += parsed.triples
        issues[MALFORMED_TRIPLES] += parsed.malformed or bool(folded and not parsed.triples)
    distinct = tuple(dict.fromkeys(found))
    issues[REPEATED_TRIPLES] += len(found) - len(distinct)
    return distinct


def _with_graphs(steps: tuple[Step, ...], graphs: object, issues: Counter[str]) -> tuple[Step, ...]:
    """Steps without triples in the text get those of their graph; anything else that differs is counted."""
    if not graphs or not isinstance(graphs, (list, tuple)):
        return steps
    read = [_graph_triples(graph) for graph in graphs]
    if any(triples is None for triples in read):
        issues[UNREAD_GRAPHS] += 1
        return steps
    if len(read) != len(steps):
        issues[OTHER_GRAPHS] += 1
        return steps
    filled = tuple(
        step if step.triples or not triples else Step(step.query, triples) for step, triples in zip(steps, read)
    )
    issues[OTHER_GRAPHS] += any(set(step.triples) != set(triples or ()) for step, triples in zip(filled, read))
    return filled


def _graph_triples(graph: Any) -> tuple[Triple, ...] | None:
    """Triples of one graph: a text or texts with the markers, or rows [subject, predicate, object]; None if neither."""
    if isinstance(graph, dict):
        graph = graph.get("triples", graph)
    rows = [graph] if isinstance(graph, str) else graph
    if not isinstance(rows, (list, tuple)):
        return None
    scratch: Counter[str] = Counter()
    if all(isinstance(row, str) for row in rows):
        if not rows or any("S>" in row for row in rows):
            return _parsed(tuple(rows), scratch)
        return None
    try:
        return tuple(dict.fromkeys(Triple(*row) for row in rows))
    except (TypeError, ValueError, AttributeError):
        return None


def _task(instruction: str, label_is_action: bool) -> Task:
    told = re.search(r"\b(planner|answerer)\b", instruction)
    if told:
        return "planning" if told.group() == "planner" else "answering"
    return "planning" if label_is_action else "answering"


def _answering_action(steps: tuple[Step, ...]) -> Action:
    return Action.SUFFICIENT if steps else Action.NO_RETRIEVAL
