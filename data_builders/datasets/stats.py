"""Statistics of records beside the paper's (RAS, table 4), filled one record at a time.

Every quantity is kept as a histogram of whole numbers, so medians are exact and memory does not grow with the number of
records. The samples of a label are the records whose ids have the smallest hashes: no order of reading changes them,
and a build in many processes shows the same ones as a build in one.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

from tripletune.models.data.records import TASKS, Action, Record, normalize_answer
from tripletune.models.prompts.rendering import Instructions, render

YES_NO = ("yes", "no")
SAMPLES = 5
# Stands between facts that are searched as one text: no name holds it, so no name is found across two facts.
_BETWEEN_FACTS = " \ue000 "
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
_ROWS = (
    ("Input tokens (mean, median, max)", "input_tokens", ("mean", "median", "max")),
    ("Output tokens (mean, median, max)", "output_tokens", ("mean", "median", "max")),
    ("Sub-queries (min, mean, max)", "subqueries", ("min", "mean", "max")),
    ("[SUBQ] tokens (min, mean, max)", "subq_tokens", ("min", "mean", "max")),
    ("Nodes of a graph (mean, median, max)", "graph_nodes", ("mean", "median", "max")),
    ("Edges of a graph (mean, median, max)", "graph_edges", ("mean", "median", "max")),
)


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


class Samples:
    """A few records of each label, the same ones in whatever order the records come."""

    def __init__(self, count: int = SAMPLES) -> None:
        self._count = count
        # Heaps of (minus the hash, minus the number, record): the largest hash of those kept stands first. Numbers tell
        # records of one id apart, which a data set should not have.
        self._heaps: dict[str, list[tuple[int, int, Record]]] = {label: [] for label in sample_labels()}
        self._number = 0

    def add(self, record: Record) -> None:
        """Keep the record when its id has one of the smallest hashes of its label."""
        heap = self._heaps[sample_label(record)]
        digest = hashlib.blake2b(record.id.encode(), digest_size=8).digest()
        self._number += 1
        entry = (-int.from_bytes(digest), -self._number, record)
        if len(heap) < self._count:
            heapq.heappush(heap, entry)
        elif entry[0] > heap[0][0]:
            heapq.heapreplace(heap, entry)

    def to_json(self) -> dict[str, list[dict[str, str]]]:
        """By label, the records with the input a model sees and the label it learns."""
        return {
            label: [
                {"id": record.id, "input": render(record.input), "label": record.label}
                for _, _, record in sorted(heap, reverse=True)
            ]
            for label, heap in self._heaps.items()
            if heap
        }


def sample_label(record: Record) -> str:
    """The kind of record: the action of a planning record, or "answer" with or without retrieval."""
    if record.task == "planning":
        return record.action.value
    return "answer after retrieval" if record.steps else "answer without retrieval"


def sample_labels() -> tuple[str, ...]:
    """All values of `sample_label`, in the card's order."""
    return (*(action.value for action in Action), "answer after retrieval", "answer without retrieval")


class Statistics:
    """Table 4 of any records, and a few samples of them.

    Args:
        tokenizer: A model spec whose tokenizer counts the tokens; None counts words between white space.
    """

    def __init__(self, tokenizer: str | None = None) -> None:
        self.unit = f"tokens of {tokenizer}" if tokenizer else "white-space words, no tokenizer was given"
        self.samples = Samples()
        self._length = _token_counter(tokenizer) if tokenizer else _word_count
        instructions = Instructions.load()
        self._instructions = {task: instructions.of(task) for task in TASKS}
        # Words of the instruction and of what follows are counted apart: a blank line stands between them.
        self._instruction_words = {task: _word_count(text) for task, text in self._instructions.items()}
        self._histograms: dict[str, dict[str, Histogram]] = {task: defaultdict(Histogram) for task in TASKS}
        self._actions: dict[str, Counter[str]] = {task: Counter() for task in TASKS}
        self._splits: Counter[str] = Counter()
        self._sources: dict[str, Counter[str]] = defaultdict(Counter)

    @property
    def records(self) -> int:
        """How many records were counted."""
        return self._splits.total()

    def add(self, record: Record, split: str) -> None:
        """Count one record of a split."""
        self._splits[split] += 1
        self._actions[record.task][record.action.value] += 1
        self.samples.add(record)
        source = self._sources[record.source]
        source[record.action.value if record.task == "planning" else "answering"] += 1
        self._count(record.task, "input_tokens", self._input_length(record))
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
            if record.answers[0].strip().lower() in YES_NO:
                source["yes/no answer"] += 1
            elif _named([" ".join(triple.as_list()) for triple in union], record.answers):
                source["answer in triples"] += 1

    def to_json(self) -> dict[str, Any]:
        """Everything that was counted, as plain numbers, and the samples."""
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
            "samples": self.samples.to_json(),
        }

    def _input_length(self, record: Record) -> int:
        body = render(record.input)
        if self._length is _word_count:
            return self._instruction_words[record.task] + _word_count(body)
        return self._length(f"{self._instructions[record.task]}\n\n{body}")

    def _count(self, task: str, name: str, value: int) -> None:
        self._histograms[task][name].add(value)


def table_rows(statistics: dict[str, Any]) -> list[tuple[str, str, str, str, str]]:
    """Rows of table 4: name, planning here and in the paper, answering here and in the paper."""
    ours: dict[str, list[str]] = {name: [] for name in PAPER}
    for task in TASKS:
        numbers = statistics["tasks"][task]
        total = numbers["records"]
        ours["Queries"].append(f"{total:,}")
        for name, key, parts in _ROWS:
            values = numbers.get(key)
            ours[name].append(", ".join(_number(values[part]) for part in parts) if values else "-")
        for action in Action:
            count = numbers["actions"].get(action.value, 0)
            ours[action.value].append(f"{count:,} ({count / total:.1%})" if task == "planning" and total else "-")
    return [
        (name, planning, PAPER[name][0] or "-", answering, PAPER[name][1] or "-")
        for name, (planning, answering) in ours.items()
    ]


def _named(facts: list[str], answers: tuple[str, ...]) -> bool:
    """Whether a fact names an answer in whole words, both normalised as answers are."""
    text = f" {normalize_answer(_BETWEEN_FACTS.join(facts))} "
    return any(f" {normalize_answer(answer)} " in text for answer in answers)


def _number(value: float) -> str:
    return f"{value:,.1f}".removesuffix(".0")


def _word_count(text: str) -> int:
    return len(text.split())


def _token_counter(spec: str) -> Callable[[str], int]:
    from tripletune.models.loading import load_tokenizer

    tokenizer = load_tokenizer(spec)
    return lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"])
