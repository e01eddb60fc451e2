"""The kinds of rows: records of planner and answerer (RAS, table 4), text-to-triples pairs (RAS, section D.1) and
trajectories of a teacher in a loop (CIRAG, section 3.5)."""

from __future__ import annotations

import copy
import unicodedata
from collections.abc import Iterable, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from tripletune.core.data.answers import YES_NO, mentions, normalize_answer
from tripletune.core.data.pairs import ExtractionPair, Trajectory, entity_triple
from tripletune.core.data.records import TASKS, Action, Record
from tripletune.core.data.rendering import load_instructions, render
from tripletune.core.data.triples import Triple
from tripletune.core.tables import Table
from tripletune.data_builders.datasets import R, RowKind, Statistics, length_table

_INSTRUCTIONS = load_instructions()
# Separates facts that are searched as one text: no name contains the separator, so no match spans two facts.
_BETWEEN_FACTS = " \ue000 "
# Table 4: row name (with the statistics shown), key in our statistics, the paper's planning and answering values.
_TABLE_4: tuple[tuple[str, str, str, str], ...] = (
    ("Queries", "records", "129,902", "78,164"),
    ("Input tokens (mean, median, max)", "input_tokens", "338, 301, 1,910", "475, 466, 2,214"),
    ("Output tokens (mean, median, max)", "output_tokens", "13, 12, 62", "13, 4, 2,332"),
    ("Sub-queries (min, mean, max)", "subqueries", "0, 0.8, 5", "0, 1.2, 6"),
    ("[SUFFICIENT]", "[SUFFICIENT]", "45,722 (35.2%)", "-"),
    ("[SUBQ]", "[SUBQ]", "71,676 (55.2%)", "-"),
    ("[NO_RETRIEVAL]", "[NO_RETRIEVAL]", "12,504 (9.6%)", "-"),
    ("[SUBQ] tokens (min, mean, max)", "subq_tokens", "6, 18.3, 62", "-"),
    ("Nodes of a graph (mean, median, max)", "graph_nodes", "11.6, 11, 56", "11.7, 11, 84"),
    ("Edges of a graph (mean, median, max)", "graph_edges", "21.2, 20, 116", "21.3, 20, 160"),
)
_SOURCE_COLUMNS = (*(action.value for action in Action), "answering", "answering with triples", "yes/no answer",
                   "answer in triples")  # fmt: skip


class _Records(RowKind[Record]):
    """Planning and answering records."""

    name, plural, read = "record", "records", staticmethod(Record.from_json)
    layout = MappingProxyType({
        **dict.fromkeys(("id", "question_id", "task", "question"), "string"),
        "steps": [{"query": "string", "triples": [["string"]], "text": "string"}],
        "action": "string", "subquery": "string", "answers": ["string"], "source": "string",
    })  # fmt: skip
    keys = ("question_id", "task", "action")
    hub_task = "question-answering"
    labels = MappingProxyType({
        "subq": "[SUBQ]", "sufficient": "[SUFFICIENT]", "no_retrieval": "[NO_RETRIEVAL]",
        "answer": "answer after retrieval", "direct_answer": "answer without retrieval",
    })  # fmt: skip

    def label(self, row: Record) -> str:
        """The action of a planning record, or "answer" with or without retrieval."""
        if row.task == "planning":
            return row.action.value
        return "answer after retrieval" if row.steps else "answer without retrieval"

    def text(self, row: Record) -> tuple[str, str]:
        return render(row.input), row.label

    def describe(self, row: Record, split: str) -> list[str]:
        graphs = ", ".join(
            f"q_{number}: {len(set(step.triples))} triples, {len(_names(step.triples))} nodes"
            for number, step in enumerate(row.steps)
        )
        return [
            f"{row.id}  ({row.task}, split {split}, source {row.source or '-'}, question {row.question_id})",
            f"graphs: {graphs or 'none'}",
            f"gold answers: {' | '.join(row.answers) or 'none'}",
            *_rejected(row),
            "",
            _INSTRUCTIONS[row.task],
        ]

    def sides(self, row: Record) -> list[tuple[str, str]]:
        """Two questions count as the same if they share the id or the normalised text."""
        return [("question id", row.question_id), ("question text", normalize_answer(row.question))]

    def graphs(self, row: Record) -> list[Sequence[Triple]]:
        return [step.triples for step in row.steps]

    def count(self, row: Record, statistics: Statistics[Record]) -> None:
        for task in TASKS:
            statistics.count("tasks", task, "records", task == row.task)
        statistics.count("tasks", row.task, row.action.value)
        output, measure = statistics.length(row.label), partial(statistics.measure, row.task)
        measure("input_tokens", statistics.length(f"{_INSTRUCTIONS[row.task]}\n\n{render(row.input)}"))
        measure("output_tokens", output)
        measure("subqueries", len(row.steps))
        if row.task == "planning" and row.action is Action.SUBQ:
            measure("subq_tokens", output)
        for triples in filter(None, (set(step.triples) for step in row.steps)):
            # Each triple is an edge and its reverse, as in the authors' code.
            measure("graph_nodes", len(_names(triples)))
            measure("graph_edges", 2 * len(triples))
        statistics.count("sources", row.source, row.action.value if row.task == "planning" else "answering")
        if row.task == "answering" and row.steps:
            statistics.count("sources", row.source, "answering with triples")
            if row.answers[0].strip().lower() in YES_NO:
                statistics.count("sources", row.source, "yes/no answer")
            elif facts_name((triple for step in row.steps for triple in step.triples), row.answers):
                statistics.count("sources", row.source, "answer in triples")

    def tables(self, numbers: dict[str, Any], facts: Any) -> list[Table]:
        head = ["", "planning", "planning, paper", "answering", "answering, paper"]
        rows = [
            [name, _cell(numbers, "planning", name, key), planning, _cell(numbers, "answering", name, key), answering]
            for name, key, planning, answering in _TABLE_4
        ]
        note = (
            f"Lengths here are {numbers['unit']}; the paper counts LLaMA-2 tokens. A graph belongs to one step: its "
            "nodes are the distinct subjects and objects, and each triple is an edge and its reverse."
        )
        sources = [
            [name, facts.teachers.get(name, "-"), f"{facts.questions.get(name, 0):,}"]
            + [f"{counts.get(key, 0):,}" for key in _SOURCE_COLUMNS]
            for name, counts in numbers.get("sources", {}).items()
        ]
        explained = (
            "“Answer in triples” counts the answering records whose history has triples that name a gold answer "
            "(normalised, whole words); yes/no answers are not counted."
        )
        return [
            Table(head, rows, "Beside table 4 of RAS", note),
            Table(["source", "teacher", "questions", *_SOURCE_COLUMNS], sources, "Sources", explained),
        ]


def _cell(numbers: dict[str, Any], task: str, name: str, key: str) -> str:
    """One cell of table 4: a count, a share, or the statistics that the row's name lists in brackets."""
    counts = numbers.get("tasks", {}).get(task, {})
    total = counts.get("records", 0)
    if key == "records":
        return f"{total:,}"
    if name == key:
        return f"{counts.get(key, 0):,} ({counts.get(key, 0) / total:.1%})" if task == "planning" and total else "-"
    values = numbers["lengths"].get(task, {}).get(key)
    parts = name[name.index("(") + 1 : -1].split(", ")
    return ", ".join(f"{values[part]:,.1f}".removesuffix(".0") for part in parts) if values else "-"


def _names(triples: Any) -> set[str]:
    return {name for triple in triples for name in (triple.subject, triple.object)}


def facts_name(facts: Iterable[Triple], names: Iterable[str]) -> bool:
    """Whether a fact contains one of the names as whole words, after answer normalisation."""
    text = _BETWEEN_FACTS.join(" ".join(fact.as_list()) for fact in facts)
    return any(mentions(text, name) for name in names)


# RAS, section D.1.
PAPER_PAIRS = 5_851_776
_COLUMNS = ("with facts", "without facts", "only a name", "with a title", "triples")


class _Pairs(RowKind[ExtractionPair]):
    """Texts with their triples."""

    name, plural, read = "pair", "pairs", staticmethod(ExtractionPair.from_json)
    layout = MappingProxyType(
        {"id": "string", "text": "string", "title": "string", "triples": [["string"]], "source": "string"}
    )
    keys = ("text", "triples")
    labels = MappingProxyType({"facts": "with facts", "no_facts": "without facts", "name": "only a name"})

    def label(self, row: ExtractionPair) -> str:
        if not row.triples:
            return "without facts"
        return "only a name" if row.triples == (entity_triple(row.triples[0].subject),) else "with facts"

    def text(self, row: ExtractionPair) -> tuple[str, str]:
        return row.source_text, row.target or "(nothing: the text has no facts)"

    def describe(self, row: ExtractionPair, split: str) -> list[str]:
        head = f"{row.id}  (split {split}, source {row.source or '-'}, {self.label(row)})"
        return [head, f"{len(row.triples)} triples, {len(_names(row.triples))} entities"]

    def sides(self, row: ExtractionPair) -> list[tuple[str, str]]:
        """Texts that differ only in spaces, case or Unicode form count as the same."""
        return [("text", text_key(row.text))]

    def graphs(self, row: ExtractionPair) -> list[Sequence[Triple]]:
        return [row.triples]

    def count(self, row: ExtractionPair, statistics: Statistics[ExtractionPair]) -> None:
        names, searched = _names(row.triples), f"{row.title}\n{row.text}".casefold()
        for what, number in (
            ("pairs", 1),
            (self.label(row), 1),
            ("with a title", bool(row.title)),
            ("triples", len(row.triples)),
            ("entities", len(names)),
            ("entities in the text", sum(name.casefold() in searched for name in names)),
        ):
            statistics.count("sources", row.source, what, number)
        statistics.measure("all", "source", statistics.length(row.source_text))
        statistics.measure("all", "target", statistics.length(row.target))
        statistics.measure("all", "triples", len(row.triples))

    def tables(self, numbers: dict[str, Any], facts: Any) -> list[Table]:
        sources = [
            [name, *(f"{counts.get(key, 0):,}" for key in _COLUMNS), _share(counts)]
            for name, counts in numbers.get("sources", {}).items()
        ]
        note = (
            "“Entities in the text” is the share of subjects and objects that occur in title or text, ignoring case. "
            f"The paper trains on {PAPER_PAIRS:,} pairs of WikiOFGraph (RAS, section D.1)."
        )
        head = ["source", *_COLUMNS, "entities in the text"]
        return [Table(head, sources, "Sources", note), length_table(numbers)]


def text_key(text: str) -> str:
    """A text with normalised spaces, case and Unicode form."""
    return "".join(unicodedata.normalize("NFKC", text).casefold().split())


def _share(counts: dict[str, int]) -> str:
    entities = counts.get("entities", 0)
    return f"{counts['entities in the text'] / entities:.1%}" if entities else "-"


class _Trajectories(RowKind[Trajectory]):
    """Chats with their loss mask."""

    name, plural, read = "trajectory", "trajectories", staticmethod(Trajectory.from_json)
    layout = MappingProxyType({
        **dict.fromkeys(("id", "question_id", "role", "model"), "string"),
        "messages": [{"role": "string", "content": "string"}], "learned": ["bool"],
    })  # fmt: skip
    keys = ("messages", "learned")

    def label(self, row: Trajectory) -> str:
        return row.role

    def text(self, row: Trajectory) -> tuple[str, str]:
        turns = [
            f"{message['role']}{' (learned)' if learned else ''}: {message['content']}"
            for message, learned in zip(row.messages[:-1], row.learned)
        ]
        return "\n\n".join(turns), row.messages[-1]["content"]

    def describe(self, row: Trajectory, split: str) -> list[str]:
        head = f"{row.id}  ({row.role}, split {split}, teacher {row.model}, question {row.question_id})"
        return [head, f"{len(row.messages)} turns, {sum(row.learned)} learned", *_rejected(row)]

    def sides(self, row: Trajectory) -> list[tuple[str, str]]:
        return [("question id", row.question_id)]

    def count(self, row: Trajectory, statistics: Statistics[Trajectory]) -> None:
        statistics.count("trajectories", "learned_turns", str(sum(row.learned)))
        statistics.count("trajectories", "models", row.model)
        lengths = [statistics.length(message["content"]) for message in row.messages]
        statistics.measure("all", "whole", sum(lengths))
        statistics.measure("all", "learned", sum(n for n, learned in zip(lengths, row.learned) if learned))

    def tables(self, numbers: dict[str, Any], facts: Any) -> list[Table]:
        counts = numbers.get("trajectories", {"learned_turns": {}, "models": {}})
        turns = sorted(counts["learned_turns"].items(), key=lambda item: int(item[0]))
        rows = [[f"with {name} learned turns", f"{count:,}"] for name, count in turns]
        rows += [[f"of {model}", f"{count:,}"] for model, count in sorted(counts["models"].items())]
        return [Table(["", "trajectories"], rows, "Turns and teachers"), length_table(numbers)]


def _rejected(row: Record | Trajectory) -> list[str]:
    return [f"rejected: {row.rejected}"] if row.rejected else []


def with_rejected(kind: RowKind[R]) -> RowKind[R]:
    """The same kind of rows, where each row also has a rejected reply."""
    found = copy.copy(kind)
    found.layout = MappingProxyType({**kind.layout, "rejected": "string"})
    return found


RECORDS, PAIRS, TRAJECTORIES = _Records(), _Pairs(), _Trajectories()
KINDS: dict[str, RowKind[Any]] = {kind.plural: kind for kind in (PAIRS, RECORDS, TRAJECTORIES)}
