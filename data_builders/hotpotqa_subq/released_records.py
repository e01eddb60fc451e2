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
the data has many (figure 10), are kept once. `graphs` is not read: the text of a step names the same triples.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tripletune.data_builders.readers._rows import Row, source_rows
from tripletune.models.data.records import Action, Record, Step, Task, normalize_answer
from tripletune.models.data.triples import Triple, parse_triples
from tripletune.models.rendering import parse_plan

HUB_ID = "pat-jj/ras_train_data"
REPEATED_TRIPLES = "triples that repeat another of their step, kept once"
MALFORMED_TRIPLES = "malformed triples, left out"
_FIRST_PLACES = 5
_GRAPH = "Retrieved Graph Information:"
_BODY = re.compile(r"^(?:\[SUBQ\]\s|Question: |\[NO_RETRIEVAL\]\s*Question: )", re.MULTILINE)
_NO_RETRIEVAL = re.compile(r"\[NO_RETRIEVAL\]\s*")
_SUBQ = re.compile(r"\[SUBQ\]\s+")
# Of the list of triples belongs all up to the next step or the question.
_NEXT = re.compile(r"\n\s*(?=\[SUBQ\]\s|Question: )")


class MalformedRow(ValueError):
    """A row of the released data that cannot be read; the message is in the words of the data set card."""


@dataclass
class Rejected:
    """The rows left out.

    Attributes:
        counts: How many, by reason.
        places: The first places of each reason.
    """

    counts: Counter[str] = field(default_factory=Counter)
    places: dict[str, list[str]] = field(default_factory=dict)

    def add(self, reason: str, where: str) -> None:
        """Count one row."""
        self.counts[reason] += 1
        places = self.places.setdefault(reason, [])
        if len(places) < _FIRST_PLACES:
            places.append(where)

    def sentences(self) -> list[str]:
        """One sentence per reason, with the first places."""
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
        rejected: Collects the rows that cannot be read.
        issues: Counts warnings that cost no row.
        source: The data set name written into the records.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not JSON, or not Parquet; the message has the line.
    """
    rejected = Rejected() if rejected is None else rejected
    issues = Counter() if issues is None else issues
    for number, (where, row) in enumerate(source_rows(location), 1):
        try:
            yield released_record(row, number, issues, source)
        except MalformedRow as error:
            rejected.add(str(error), where)


def released_record(row: Row, number: int, issues: Counter[str], source: str = "ras_released") -> Record:
    """One row as a record.

    Args:
        row: `input` and `label`.
        number: The row's number, which makes its id unique: the data has rows that say the same.
        issues: Counts warnings that cost no row.
        source: The data set name written into the record.

    Raises:
        MalformedRow: the row cannot be read.
    """
    text, label = row.get("input"), row.get("label")
    if not isinstance(text, str) or not isinstance(label, str) or not text.strip() or not label.strip():
        raise MalformedRow("input or label is missing, empty or no text")
    instruction, body = _split_instruction(text.replace("\r\n", "\n"))
    steps, question = _parse_body(body, issues)
    plan = parse_plan(" ".join(label.split()))
    task = _task(instruction, plan.action is not None)
    if task == "planning" and plan.action is None:
        raise MalformedRow("the label of a planning row is no action")
    answering = Action.SUFFICIENT if steps else Action.NO_RETRIEVAL
    action = plan.action if task == "planning" and plan.action else answering
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
            raise MalformedRow("a sub-query without graph information")
        query = " ".join(query.split())
        if not query:
            raise MalformedRow("an empty sub-query in the history")
        following = _NEXT.search(rest)
        if following is None:
            raise MalformedRow("no question in the input")
        steps.append(Step(query, _read_triples(rest[: following.start()], issues)))
        body = rest[following.end() :]
    question = body.removeprefix("Question:").strip()
    if not question:
        raise MalformedRow("no question in the input")
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


def _task(instruction: str, label_is_action: bool) -> Task:
    told = re.search(r"\b(planner|answerer)\b", instruction)
    if told:
        return "planning" if told.group() == "planner" else "answering"
    return "planning" if label_is_action else "answering"
