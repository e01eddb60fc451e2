"""Hindsight: what a question's later searches find, and how a model that reads it teaches a planner its sub-queries.

The teacher is the student's own model. Its prompt is the student's, except for the question, which a prompt file
replaces by the question with facts of later steps and the gold answer (SDFT, Shenfeld et al., 2026; SDPO, Hübotter et
al., 2026). Only the tokens of sub-queries are taught (SD-Search, Ma et al., 2026, whose hindsight is instead what a
group of runs found).

Shapes: B rows of a batch, T tokens of the longest row.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from tripletune.core.data.records import IGNORED, Action, Record, Step
from tripletune.core.data.triples import Triple, format_triples
from tripletune.core.files import PROMPTS, read_prompt
from tripletune.models.graph_llm.graphs import SampleGraph
from tripletune.models.graph_llm.processor import GraphLLMProcessor, QuestionTooLong
from tripletune.train.rows.cache import Row

# The column of a row with the teacher's tokens for each of its spans; empty for a span without a teacher.
TEACHER_IDS = "teacher_ids"
# Counts of sub-queries of the rows.
WITH_HINDSIGHT = "sub_queries_with_hindsight"
WITHOUT_HINDSIGHT = "sub_queries_without_hindsight"
HINDSIGHT_TOO_LONG = "hindsight_too_long"
_PLACEHOLDER = re.compile(r"\{(question|facts|next_facts|answer)\}")


@dataclass(frozen=True)
class HindsightPrompt:
    """The text that stands in the teacher's prompt instead of the question.

    Attributes:
        text: Has `{question}`, and what the teacher knows besides: `{facts}` (of all later steps), `{next_facts}` (of
            the step that answers the sub-query), `{answer}` (the gold answer).
    """

    text: str

    @classmethod
    def read(cls, path: str | Path | None = None) -> HindsightPrompt:
        """Read the file of a user, or the default.

        Raises:
            ValueError: The text has no question, or nothing that the student does not see.
        """
        text = read_prompt(path or PROMPTS / "models" / "ras_hindsight.md")
        names = set(_PLACEHOLDER.findall(text))
        if "question" not in names or len(names) == 1:
            raise ValueError(
                f"data.hindsight_prompt {path}: the text needs {{question}}, and at least one of {{facts}}, "
                "{next_facts} and {answer}, which is what the teacher sees and the student does not"
            )
        return cls(text)

    def question(self, record: Record, later: Sequence[Step], evidence: str) -> str:
        """The question as the teacher reads it; "" if nothing is known that the student does not see.

        Args:
            later: The steps after the record's history; see `later_steps`.
            evidence: Whether prompts show the "text" of steps; else facts are triples.
        """
        values = {
            "facts": _facts_of(later, evidence),
            "next_facts": _facts_of(later[:1], evidence),
            "answer": record.answers[0] if record.answers else "",
        }
        names = _PLACEHOLDER.findall(self.text)
        if not any(values.get(name) for name in names):
            return ""
        values["question"] = record.question
        # In one pass, because a fact could contain a placeholder.
        return _PLACEHOLDER.sub(lambda match: values[match[1]], self.text)

    def teacher_ids(
        self, record: Record, records: Sequence[Record], row: Row, processor: GraphLLMProcessor, counts: Counter[str]
    ) -> list[int]:
        """The tokens that the teacher reads: its prompt with the record's label; [] if the record has no sub-query.

        Args:
            records: All records of the question.
            row: The record's row.
            processor: Renders and tokenises the prompt.
            counts: Receives the number of sub-queries with and without a teacher.
        """
        ((start, end, marker),) = row["spans"]
        if record.action is not Action.SUBQ or start + marker == end:
            return []
        question = self.question(record, later_steps(record, records), processor.settings.evidence)
        ids: list[int] = []
        if question:
            try:
                prompt = processor.encode_input(replace(record.input, question=question)).input_ids
                ids = [*prompt, *row["input_ids"][start:end]]
            except QuestionTooLong:
                counts[HINDSIGHT_TOO_LONG] += 1
        counts[WITH_HINDSIGHT if ids else WITHOUT_HINDSIGHT] += 1
        return ids


def later_steps(record: Record, records: Sequence[Record]) -> tuple[Step, ...]:
    """The steps that follow a record's history in the longest record of its question; the first asks its sub-query.

    Args:
        record: A planning record with a sub-query.
        records: All records of the question.
    """
    taken = len(record.steps)
    later: tuple[Step, ...] = ()
    for other in records:
        continuation = other.steps[taken:]
        is_continued = other.steps[:taken] == record.steps and len(continuation) > len(later)
        if is_continued and continuation[0].query == record.subquery:
            later = continuation
    return later


def _facts_of(steps: Sequence[Step], evidence: str) -> str:
    """What steps found, each fact once."""
    if evidence == "text":
        return " ".join(step.text for step in steps)
    triples: list[Triple] = []
    for step in steps:
        triples += step.triples
    return format_triples(tuple(dict.fromkeys(triples)))


class TaughtQuery(NamedTuple):
    """A sub-query of a row that has a teacher.

    Attributes:
        row: Index of the row in the batch.
        start: Index of the first token of the action marker in the row.
        query: Index of the sub-query's first token, after the marker.
        end: Index after the last token, which ends the sequence.
        teacher_ids: The teacher's prompt with the same label.
        graphs: Columns of `SampleGraph` with the graphs that both prompts read; empty without graphs.
    """

    row: int
    start: int
    query: int
    end: int
    teacher_ids: list[int]
    graphs: Row

    @property
    def teacher_prompt(self) -> list[int]:
        """The teacher's tokens before the sub-query, with the action marker."""
        return self.teacher_ids[: self.query - self.end]

    def teacher_row(self) -> Row:
        """The row that the teacher reads, with labels at the sub-query's tokens."""
        prompt = self.teacher_prompt
        labels = [IGNORED] * len(prompt) + self.teacher_ids[len(prompt) :]
        return {"input_ids": self.teacher_ids, "labels": labels, **self.graphs}

    def own_row(self, prompt: list[int], sampled: list[int]) -> Row:
        """A row of the student with a sub-query that it sampled, and with the teacher's tokens for it.

        Args:
            prompt: The student's tokens before the sub-query, with the action marker.
            sampled: Tokens of the sampled sub-query.
        """
        marker = self.query - self.start
        ids = [*prompt, *sampled]
        return {
            "input_ids": ids,
            "labels": [IGNORED] * len(prompt) + sampled,
            "spans": [[len(prompt) - marker, len(ids), marker]],
            TEACHER_IDS: [[*self.teacher_prompt, *sampled]],
            **self.graphs,
        }


def taught_queries(rows: Sequence[Row], graph_token_id: int | None) -> Iterator[TaughtQuery]:
    """Yield the sub-queries of rows that have a teacher, in the order of their tokens, which is that of the logits.

    The spans of a chain stand from its last reply to its first. A row that fills the batch of another process has no
    labels, and teaches nothing.

    Args:
        rows: Rows with `TEACHER_IDS`; the others teach nothing, such as validation rows.
        graph_token_id: The placeholder of a graph. A prompt in a chain reads only the first graphs of its row.
    """
    for index, row in enumerate(rows):
        spans = zip(row["spans"], row.get(TEACHER_IDS) or [], strict=False)
        for (start, end, marker), teacher_ids in sorted(spans):
            if not teacher_ids or row["labels"][end - 1] == IGNORED:
                continue
            placeholders = teacher_ids.count(graph_token_id)
            graphs = {name: row[name][:placeholders] for name in SampleGraph._fields if name in row}
            yield TaughtQuery(index, start, start + marker, end, teacher_ids, graphs)


@dataclass(eq=False)
class BatchRows:
    """The rows of a batch, as an object, since lists and dictionaries of a batch are moved to the device item by item.

    Attributes:
        rows: The rows as the collator got them.
    """

    rows: Sequence[dict[str, Any]]
