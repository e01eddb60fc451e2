"""The kinds of rows: records of planner and answerer (RAS, table 4), text-to-triples pairs (RAS, section D.1) and
trajectories of a teacher in a loop (CIRAG, section 3.5)."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tripletune.core.data.answers import YES_NO, facts_name, normalize_answer, one_spelling
from tripletune.core.data.chats import UNNAMED_MODEL
from tripletune.core.data.pairs import ExtractionPair, Trajectory, entity_triple
from tripletune.core.data.records import TASKS, Action, Record
from tripletune.core.data.rendering import load_instructions, render
from tripletune.core.data.triples import Triple
from tripletune.core.tables import Table
from tripletune.data_builders.datasets import (
    Numbers,
    R,
    RowKind,
    SampleTexts,
    SplitValue,
    Statistics,
    length_table,
)
from tripletune.data_builders.datasets.ras_table import TABLE_4, own_cell
from tripletune.data_builders.datasets.split import text_key

if TYPE_CHECKING:
    from tripletune.data_builders.datasets.writer import BuildFacts

_INSTRUCTIONS = load_instructions()


_SOURCE_COLUMNS = (
    *(action.value for action in Action),
    "answering",
    "answering with triples",
    "yes/no answer",
    "answer in triples",
)


class _Records(RowKind[Record]):
    """Planning and answering records."""

    name = "record"
    plural = "records"
    read = staticmethod(Record.from_json)
    layout = MappingProxyType({
        "id": "string",
        "question_id": "string",
        "task": "string",
        "question": "string",
        "steps": [{"query": "string", "triples": [["string"]], "text": "string"}],
        "action": "string",
        "subquery": "string",
        "answers": ["string"],
        "source": "string",
    })  # fmt: skip
    keys = ("question_id", "task", "action")
    hub_task = "question-answering"
    labels = MappingProxyType({
        "subq": "[SUBQ]",
        "sufficient": "[SUFFICIENT]",
        "no_retrieval": "[NO_RETRIEVAL]",
        "answer": "answer after retrieval",
        "direct_answer": "answer without retrieval",
    })  # fmt: skip

    def label(self, row: Record) -> str:
        """The action of a planning record, or "answer" with or without retrieval; `peek --label` filters by it."""
        if row.task == "planning":
            return row.action.value
        return "answer after retrieval" if row.steps else "answer without retrieval"

    def text(self, row: Record) -> SampleTexts:
        """The model's input without its instruction, and the label."""
        return SampleTexts(render(row.input), row.label)

    def describe(self, row: Record, split: str) -> list[str]:
        """Ids, gold answers and sizes of the graphs, and the instruction."""
        graphs = []
        for number, step in enumerate(row.steps):
            graphs.append(
                f"q_{number}: {len(set(step.triples))} triples, {len(_subjects_and_objects(step.triples))} nodes"
            )
        return [
            f"{row.id}  ({row.task}, split {split}, source {row.source or '-'}, question {row.question_id})",
            f"graphs: {', '.join(graphs) or 'none'}",
            f"gold answers: {' | '.join(row.answers) or 'none'}",
            "",
            _INSTRUCTIONS[row.task],
        ]

    def split_values(self, row: Record) -> list[SplitValue]:
        """Two questions count as the same if they share the id or the normalised text."""
        return [
            SplitValue("question id", row.question_id),
            SplitValue("question text", normalize_answer(row.question)),
        ]

    def graphs(self, row: Record) -> list[Sequence[Triple]]:
        """The triples of each step: each step is a graph of its own."""
        return [step.triples for step in row.steps]

    def count(self, row: Record, split: str, statistics: Statistics[Record]) -> None:
        """Count a record, and measure its lengths: the quantities of table 4, and the rows of the table of sources.

        The names of sections and counts are those that `tables` looks up, and that stored `statistics.json` files have.
        """
        for task in TASKS:
            # Both tasks are named in the statistics, also one without records.
            statistics.count("tasks", task, "records", 1 if task == row.task else 0)
        statistics.count("tasks", row.task, row.action.value)
        self._measure_table_4(row, statistics)
        if row.task == "planning":
            statistics.count("sources", row.source, row.action.value)
            return
        statistics.count("sources", row.source, "answering")
        if not row.steps:
            return
        statistics.count("sources", row.source, "answering with triples")
        if row.answers[0].strip().lower() in YES_NO:
            statistics.count("sources", row.source, "yes/no answer")
        elif facts_name(chain.from_iterable(step.triples for step in row.steps), row.answers):
            statistics.count("sources", row.source, "answer in triples")

    def _measure_table_4(self, row: Record, statistics: Statistics[Record]) -> None:
        """Measure the quantities of table 4; steps without triples have no graph, and would pull the means down.

        Input tokens count the instruction, as the paper's do; the label alone is the output.
        """
        model_input = f"{_INSTRUCTIONS[row.task]}\n\n{render(row.input)}"
        output_length = statistics.length(row.label)
        statistics.measure(row.task, "input_tokens", statistics.length(model_input))
        statistics.measure(row.task, "output_tokens", output_length)
        statistics.measure(row.task, "subqueries", len(row.steps))
        if row.task == "planning" and row.action is Action.SUBQ:
            statistics.measure(row.task, "subq_tokens", output_length)
        for step in row.steps:
            triples = set(step.triples)
            if triples:
                # Each triple is an edge and its reverse, as in the authors' code.
                statistics.measure(row.task, "graph_nodes", len(_subjects_and_objects(triples)))
                statistics.measure(row.task, "graph_edges", 2 * len(triples))

    def tables(self, numbers: Numbers, facts: BuildFacts) -> list[Table]:
        """Table 4 of RAS with ours beside it, and what each source gave.

        Statistics of an older build may lack a section or a count; its cells are then "-" or 0.
        """
        rows = []
        for paper in TABLE_4:
            planning = own_cell(numbers, "planning", paper)
            answering = own_cell(numbers, "answering", paper)
            rows.append([paper.name, planning, paper.planning, answering, paper.answering])
        note = (
            f"Lengths here are {numbers['unit']}; the paper counts LLaMA-2 tokens. A graph belongs to one step: its "
            "nodes are the distinct subjects and objects, and each triple is an edge and its reverse."
        )
        head = ["", "planning", "planning, paper", "answering", "answering, paper"]
        table_4 = Table(head, rows, "Beside table 4 of RAS", note)

        sources = []
        for name, counts in numbers.get("sources", {}).items():
            cells = [name, facts.teachers.get(name, "-"), f"{facts.questions.get(name, 0):,}"]
            cells += [f"{counts.get(column, 0):,}" for column in _SOURCE_COLUMNS]
            sources.append(cells)
        note = (
            "“Answer in triples” counts the answering records whose history has triples that name a gold answer "
            "(normalised, whole words); yes/no answers are not counted."
        )
        return [table_4, Table(["source", "teacher", "questions", *_SOURCE_COLUMNS], sources, "Sources", note)]


def _subjects_and_objects(triples: Iterable[Triple]) -> set[str]:
    """The distinct subjects and objects: the nodes of a graph."""
    names: set[str] = set()
    for triple in triples:
        names.update((triple.subject, triple.object))
    return names


# RAS, section D.1.
PAPER_PAIRS = 5_851_776
_COLUMNS = ("with facts", "without facts", "only a name", "with a title", "triples")


class _Pairs(RowKind[ExtractionPair]):
    """Texts with their triples."""

    name = "pair"
    plural = "pairs"
    read = staticmethod(ExtractionPair.from_json)
    layout = MappingProxyType(
        {"id": "string", "text": "string", "title": "string", "triples": [["string"]], "source": "string"}
    )
    keys = ("text", "triples")
    labels = MappingProxyType({"facts": "with facts", "no_facts": "without facts", "name": "only a name"})

    def label(self, row: ExtractionPair) -> str:
        """Whether a text has facts, has none, or is only a name: a single triple that `entity_triple` makes."""
        if not row.triples:
            return "without facts"
        if row.triples == (entity_triple(row.triples[0].subject),):
            return "only a name"
        return "with facts"

    def text(self, row: ExtractionPair) -> SampleTexts:
        """The text with its title, and the target of training."""
        return SampleTexts(row.source_text, row.target or "(nothing: the text has no facts)")

    def describe(self, row: ExtractionPair, split: str) -> list[str]:
        """The id, and the numbers of triples and entities."""
        head = f"{row.id}  (split {split}, source {row.source or '-'}, {self.label(row)})"
        return [head, f"{len(row.triples)} triples, {len(_subjects_and_objects(row.triples))} entities"]

    def split_values(self, row: ExtractionPair) -> list[SplitValue]:
        """The text alone; see `text_key`."""
        return [SplitValue("text", text_key(row.text))]

    def graphs(self, row: ExtractionPair) -> list[Sequence[Triple]]:
        """The triples of the text as one graph."""
        return [row.triples]

    def count(self, row: ExtractionPair, split: str, statistics: Statistics[ExtractionPair]) -> None:
        """Count a pair by its label, and its entities, also those that title or text name in these words.

        The share of entities in the text shows pairs from which a model would learn to invent names.
        """
        entities = _subjects_and_objects(row.triples)
        searched = one_spelling(f"{row.title}\n{row.text}").casefold()
        in_text = [name for name in entities if one_spelling(name).casefold() in searched]
        statistics.count("sources", row.source, "pairs")
        statistics.count("sources", row.source, self.label(row))
        statistics.count("sources", row.source, "with a title", 1 if row.title else 0)
        statistics.count("sources", row.source, "triples", len(row.triples))
        statistics.count("sources", row.source, "entities", len(entities))
        statistics.count("sources", row.source, "entities in the text", len(in_text))
        statistics.measure("all", "source", statistics.length(row.source_text))
        statistics.measure("all", "target", statistics.length(row.target))
        statistics.measure("all", "triples", len(row.triples))

    def tables(self, numbers: Numbers, facts: BuildFacts) -> list[Table]:
        """What each source gave, and the lengths."""
        sources = []
        for name, counts in numbers.get("sources", {}).items():
            cells = [f"{counts.get(column, 0):,}" for column in _COLUMNS]
            sources.append([name, *cells, _share_in_text(counts)])
        note = (
            "“Entities in the text” is the share of subjects and objects that occur in title or text, ignoring case. "
            f"The paper trains on {PAPER_PAIRS:,} pairs of WikiOFGraph (RAS, section D.1)."
        )
        head = ["source", *_COLUMNS, "entities in the text"]
        return [Table(head, sources, "Sources", note), length_table(numbers)]


def _share_in_text(counts: dict[str, int]) -> str:
    """The share of entities that their texts name, in percent; a dash if there are no entities."""
    entities = counts.get("entities", 0)
    if not entities:
        return "-"
    return f"{counts['entities in the text'] / entities:.1%}"


class _Trajectories(RowKind[Trajectory]):
    """Chats with their loss mask."""

    name = "trajectory"
    plural = "trajectories"
    read = staticmethod(Trajectory.from_json)
    layout = MappingProxyType({
        "id": "string",
        "question_id": "string",
        "role": "string",
        "model": "string",
        "messages": [{"role": "string", "content": "string"}],
        "learned": ["bool"],
    })  # fmt: skip
    keys: tuple[str, ...] = ("messages", "learned")
    table_title = "Turns and teachers"

    def label(self, row: Trajectory) -> str:
        """The role, so that the card shows samples of each role."""
        return row.role

    def text(self, row: Trajectory) -> SampleTexts:
        """All turns but the last, which is the label; turns with a loss are marked.

        `preference_pairs` compares the replies of rows whose first texts are equal, so the marks and roles must stay in
        the text: the same words with another loss mask are another prompt.
        """
        return SampleTexts(_turns_text(row, len(row.messages) - 1), row.messages[-1]["content"])

    def describe(self, row: Trajectory, split: str) -> list[str]:
        """The id, teacher and numbers of turns."""
        head = f"{row.id}  ({row.role}, split {split}, teacher {row.model}, question {row.question_id})"
        return [head, f"{len(row.messages)} turns, {sum(row.learned)} learned"]

    def split_values(self, row: Trajectory) -> list[SplitValue]:
        """The question's id alone, since a chat does not say which of its texts is the question."""
        return [SplitValue("question id", row.question_id)]

    def count(self, row: Trajectory, split: str, statistics: Statistics[Trajectory]) -> None:
        """Count a chat by its teacher and its number of learned turns, and measure the text, whole and learned.

        A training reads the whole length, and only the learned part of it counts in the loss.
        """
        statistics.count("trajectories", "learned_turns", str(sum(row.learned)))
        statistics.count("trajectories", "models", row.model)
        if row.rejected:
            statistics.count("trajectories", "pairs", "rejected")
        whole = 0
        learned = 0
        for message, is_learned in zip(row.messages, row.learned, strict=True):
            length = statistics.length(message["content"])
            whole += length
            if is_learned:
                learned += length
        statistics.measure("all", "whole", whole)
        statistics.measure("all", "learned", learned)

    def tables(self, numbers: Numbers, facts: BuildFacts) -> list[Table]:
        """Chats by their number of learned turns and by teacher, and the lengths.

        The counts are those of `count`; a data set without rows has none of them.
        """
        counts = numbers.get("trajectories", {"learned_turns": {}, "models": {}})
        rows = []
        for turns in sorted(counts["learned_turns"], key=int):
            rows.append([f"with {turns} learned turns", f"{counts['learned_turns'][turns]:,}"])
        for model, number in sorted(counts["models"].items()):
            if model != UNNAMED_MODEL:
                rows.append([f"of {model}", f"{number:,}"])
        for number in counts.get("pairs", {}).values():
            rows.append(["with a rejected reply (pairs)", f"{number:,}"])
        return [Table(["", self.plural], rows, self.table_title), length_table(numbers)]


def _turns_text(row: Trajectory, number: int) -> str:
    """The first turns of a chat, so many, each with its role; those with a loss are marked."""
    turns = []
    for message, has_loss in zip(row.messages[:number], row.learned[:number], strict=True):
        mark = " (learned)" if has_loss else ""
        turns.append(f"{message['role']}{mark}: {message['content']}")
    return "\n\n".join(turns)


class _Chats(_Trajectories):
    """Chats as people have them, in any layout of other trainers (`core.data.chats`)."""

    name = "chat"
    plural = "chats"
    # Their layouts share no key; `core.data.chats.is_chat` knows them.
    keys = ()
    table_title = "Replies"

    def text(self, row: Trajectory) -> SampleTexts:
        """As of a trajectory; a chat that ends with a user's turn has no label."""
        if row.messages[-1]["role"] == "assistant":
            return super().text(row)
        return SampleTexts(_turns_text(row, len(row.messages)), "")

    def describe(self, row: Trajectory, split: str) -> list[str]:
        """The numbers of turns; most rows have no id or teacher."""
        return [f"chat {row.id} ({split}): {len(row.messages)} turns, {sum(row.learned)} learned"]

    def split_values(self, row: Trajectory) -> list[SplitValue]:
        """The first question, by which training holds chats out."""
        questions = [message["content"] for message in row.messages if message["role"] == "user"]
        return [SplitValue("first question", questions[0] if questions else "")]


def with_rejected(kind: RowKind[R]) -> RowKind[R]:
    """A copy of a kind whose rows also have a rejected reply: preference pairs. `kind` itself stays as it is."""
    pairs = copy.copy(kind)
    pairs.layout = MappingProxyType({**kind.layout, "rejected": "string"})
    return pairs


RECORDS = _Records()
PAIRS = _Pairs()
TRAJECTORIES = _Trajectories()
CHATS = _Chats()
KINDS: dict[str, RowKind[Any]] = {kind.plural: kind for kind in (PAIRS, RECORDS, TRAJECTORIES)}
