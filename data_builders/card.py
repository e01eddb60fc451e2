"""Statistics of record data sets beside the paper's (RAS, table 4), and the data set card that shows them.

All counts are kept as histograms, so medians are exact and memory does not grow with the number of records.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_builders.shards import CARD, STATISTICS, Format, front_matter, write_text
from data_builders.wording import mentions
from models.records import TASKS, Action, Record
from models.rendering import Instructions, render

YES_NO = ("yes", "no")
# Table 4; None stands for a cell the paper leaves empty.
PAPER: dict[str, tuple[str | None, str | None]] = {
    "Queries": ("129,902", "78,164"),
    "Input tokens (mean, median, max)": ("338, 301, 1,910", "475, 466, 2,214"),
    "Output tokens (mean, median, max)": ("13, 12, 62", "13, 4, 2,332"),
    "Sub-queries (min, mean, max)": ("0, 0.8, 5", "0, 1.2, 6"),
    "[SUFFICIENT]": ("45,722 (35.2%)", None),
    "[SUBQ]": ("71,676 (55.2%)", None),
    "[NO_RETRIEVAL]": ("12,504 (9.6%)", None),
    "[SUBQ] tokens (min, mean, max)": ("6, 18.3, 62", None),
    "Nodes of a graph (mean, median, max)": ("11.6, 11, 56", "11.7, 11, 84"),
    "Edges of a graph (mean, median, max)": ("21.2, 20, 116", "21.3, 20, 160"),
}


class Histogram:
    """How often each whole number occurs."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, value: int) -> None:
        """Count one value."""
        self._counts[value] += 1

    def summary(self) -> dict[str, float]:
        """Count, min, mean, median and max; zeros when nothing was counted."""
        total = self._counts.total()
        if not total:
            return {"count": 0, "min": 0, "mean": 0.0, "median": 0.0, "max": 0}
        mean = sum(value * count for value, count in self._counts.items()) / total
        median = (self._at((total - 1) // 2) + self._at(total // 2)) / 2
        return {
            "count": total,
            "min": min(self._counts),
            "mean": round(mean, 2),
            "median": median,
            "max": max(self._counts),
        }

    def _at(self, rank: int) -> int:
        for value in sorted(self._counts):
            rank -= self._counts[value]
            if rank < 0:
                return value
        raise ValueError(f"rank {rank} lies beyond the values counted")


class Statistics:
    """Table 4 of any records, filled one record at a time.

    Args:
        tokenizer: A model spec whose tokenizer counts the tokens; None counts words between white space.
    """

    def __init__(self, tokenizer: str | None = None) -> None:
        self.unit = f"tokens of {tokenizer}" if tokenizer else "white-space words, no tokenizer was given"
        self._length = _token_counter(tokenizer) if tokenizer else _word_count
        self._instructions = Instructions.load()
        self._histograms: dict[str, dict[str, Histogram]] = {task: {} for task in TASKS}
        self._actions: dict[str, Counter[str]] = {task: Counter() for task in TASKS}
        self._splits: Counter[str] = Counter()
        self._sources: dict[str, Counter[str]] = {}

    def add(self, record: Record, split: str) -> None:
        """Count one record of a split."""
        self._splits[split] += 1
        self._actions[record.task][record.action.value] += 1
        source = self._sources.setdefault(record.source, Counter())
        source[record.action.value if record.task == "planning" else "answering"] += 1
        prompt = f"{self._instructions.of(record.task)}\n\n{render(record.input)}"
        self._count(record.task, "input_tokens", self._length(prompt))
        output = self._length(record.label)
        self._count(record.task, "output_tokens", output)
        if record.task == "planning" and record.action is Action.SUBQ:
            self._count(record.task, "subq_tokens", output)
        self._count(record.task, "subqueries", len(record.steps))
        union = {triple for step in record.steps for triple in step.triples}
        for prefix, graphs in (("graph", [set(step.triples) for step in record.steps]), ("record", [union])):
            for triples in filter(None, graphs):
                self._count(record.task, f"{prefix}_nodes", len({n for t in triples for n in (t.subject, t.object)}))
                # Each triple is an edge and its reverse (RAS, section 3.2).
                self._count(record.task, f"{prefix}_edges", 2 * len(triples))
        if record.task == "answering" and record.steps:
            source["answering with triples"] += 1
            facts = " ; ".join(" ".join(triple.as_list()) for triple in union)
            if record.answers[0].strip().lower() in YES_NO:
                source["yes/no answer"] += 1
            elif any(mentions(facts, answer) for answer in record.answers):
                source["answer in triples"] += 1

    def to_json(self) -> dict[str, Any]:
        """Everything that was counted, as plain numbers."""
        return {
            "unit": self.unit,
            "records": self._splits.total(),
            "splits": dict(self._splits),
            "tasks": {
                task: {
                    "records": self._actions[task].total(),
                    "actions": dict(self._actions[task]),
                    **{name: histogram.summary() for name, histogram in self._histograms[task].items()},
                }
                for task in TASKS
            },
            "sources": {name: dict(counts) for name, counts in self._sources.items()},
        }

    def _count(self, task: str, name: str, value: int) -> None:
        self._histograms[task].setdefault(name, Histogram()).add(value)


def table_rows(statistics: dict[str, Any]) -> list[tuple[str, str, str, str, str]]:
    """Rows of table 4: name, planning here and in the paper, answering here and in the paper."""
    ours: dict[str, list[str]] = {name: [] for name in PAPER}
    for task in TASKS:
        numbers = statistics["tasks"][task]
        total = numbers["records"]
        ours["Queries"].append(f"{total:,}")
        for name, key, parts in (
            ("Input tokens (mean, median, max)", "input_tokens", ("mean", "median", "max")),
            ("Output tokens (mean, median, max)", "output_tokens", ("mean", "median", "max")),
            ("Sub-queries (min, mean, max)", "subqueries", ("min", "mean", "max")),
            ("[SUBQ] tokens (min, mean, max)", "subq_tokens", ("min", "mean", "max")),
            ("Nodes of a graph (mean, median, max)", "graph_nodes", ("mean", "median", "max")),
            ("Edges of a graph (mean, median, max)", "graph_edges", ("mean", "median", "max")),
        ):
            values = numbers.get(key)
            ours[name].append(", ".join(_number(values[part]) for part in parts) if values else "-")
        for action in Action:
            count = numbers["actions"].get(action.value, 0)
            ours[action.value].append(f"{count:,} ({count / total:.1%})" if task == "planning" and total else "-")
    return [
        (name, planning, PAPER[name][0] or "-", answering, PAPER[name][1] or "-")
        for name, (planning, answering) in ours.items()
    ]


@dataclass
class BuildFacts:
    """What a card says besides the numbers.

    Attributes:
        title: Heading of the card.
        summary: One paragraph on what the records are.
        teachers: By source, who labelled it.
        drops: By source, questions left out by reason.
        questions: By source, questions that gave records.
        issues: Oddities of the input that cost no question.
        files: Input files and their SHA-256.
        options: The options of the build.
        notes: Sentences to be printed as they are.
    """

    title: str
    summary: str
    teachers: dict[str, str] = field(default_factory=dict)
    drops: dict[str, dict[str, int]] = field(default_factory=dict)
    questions: dict[str, int] = field(default_factory=dict)
    issues: dict[str, int] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def card_body(facts: BuildFacts, statistics: dict[str, Any]) -> str:
    """The card's text below the YAML head, in Markdown."""
    parts = [f"# {facts.title}", facts.summary, *facts.notes, "## Records"]
    parts.append(_table(["split", "records"], [[name, f"{n:,}"] for name, n in statistics["splits"].items()]))
    head = ["", "planning", "planning, paper", "answering", "answering, paper"]
    parts += [
        f"Beside table 4 of RAS. Lengths here are {statistics['unit']}; the paper counts LLaMA-2 tokens. A graph is "
        "that of one step: nodes are its distinct subjects and objects, and each triple is an edge and its reverse.",
        _table(head, [list(row) for row in table_rows(statistics)]),
    ]
    if statistics["sources"]:
        parts += ["## Sources", _source_table(facts, statistics["sources"])]
        parts.append(
            "“Answer in triples” counts the answering records with a history whose triples name a gold answer "
            "(normalised, whole words); yes/no answers are left out of it."
        )
    for heading, counts in (
        ("Questions left out", {f"{s}: {r}": n for s, drops in facts.drops.items() for r, n in drops.items()}),
        ("Oddities of the input", facts.issues),
    ):
        if counts:
            parts += [f"## {heading}", _table(["what", "count"], [[name, f"{n:,}"] for name, n in counts.items()])]
    if facts.files:
        rows = [[f"`{name}`", f"`{digest}`"] for name, digest in facts.files.items()]
        parts += ["## Input files", _table(["file", "SHA-256"], rows)]
    if facts.options:
        rows = [[f"`{name}`", f"`{value}`"] for name, value in facts.options.items()]
        parts += ["## Options", _table(["option", "value"], rows)]
    return "\n\n".join(parts) + "\n"


def write_card(folder: str | Path, facts: BuildFacts, statistics: Statistics, format: Format) -> None:
    """Write `README.md` and `statistics.json` into a data set folder that holds its shards."""
    folder, numbers = Path(folder), statistics.to_json()
    head = front_matter(list(numbers["splits"]), format, facts.title)
    write_text(folder / CARD, f"{head}\n{card_body(facts, numbers)}")
    content = {"statistics": numbers, "build": dataclasses.asdict(facts)}
    write_text(folder / STATISTICS, json.dumps(content, ensure_ascii=False, indent=1) + "\n")


def file_digest(path: str | Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _source_table(facts: BuildFacts, sources: dict[str, dict[str, int]]) -> str:
    actions = [action.value for action in Action]
    head = ["source", "teacher", "questions", *actions, "answering", "with triples", "yes/no", "answer in triples"]
    keys = [*actions, "answering", "answering with triples", "yes/no answer", "answer in triples"]
    return _table(
        head,
        [
            [name, facts.teachers.get(name, "-"), f"{facts.questions.get(name, 0):,}"]
            + [f"{counts.get(key, 0):,}" for key in keys]
            for name, counts in sources.items()
        ],
    )


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _number(value: float) -> str:
    return f"{value:,.1f}".removesuffix(".0")


def _word_count(text: str) -> int:
    return len(text.split())


def _token_counter(spec: str) -> Callable[[str], int]:
    from models.sources import load_tokenizer

    tokenizer = load_tokenizer(spec)
    return lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"])
