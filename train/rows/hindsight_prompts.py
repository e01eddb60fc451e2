"""What a teacher with hindsight reads: the question with the facts that later searches found, of records or of chats.

The teacher is the student's own model. Its prompt is the student's, except for the question, which a prompt file
replaces (SDFT, Shenfeld et al., 2026; SDPO, Hübotter et al., 2026). How a taught sub-query lies in a row and a batch
is in `train.rows.hindsight`.

Tested in `tests/train/test_self_distillation.py` and `tests/train/test_cirag_hindsight.py`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

from tripletune.core.calls import Message
from tripletune.core.data.pairs import Trajectory
from tripletune.core.data.records import Action, Record, Step
from tripletune.core.data.triples import Triple, format_triples
from tripletune.core.files import PROMPTS, read_prompt
from tripletune.models.graph_llm.processor import GraphLLMProcessor, QuestionTooLong
from tripletune.models.local.requests import common_prefix_length
from tripletune.rag.systems.cirag.integration import (
    INTEGRATE_ROLE,
    MAIN_QUESTION_HEADING,
    QUERY_HEADING,
    read_decision,
    triples_as_json,
)
from tripletune.rag.systems.cirag.shortening import shown_candidates
from tripletune.train.rows.cache import TEACHER_IDS, Row

if TYPE_CHECKING:
    from tripletune.train.rows.trajectories import LearnedChat, TrajectoryEncoder

# Counts of sub-queries of the rows.
WITH_HINDSIGHT = "sub_queries_with_hindsight"
WITHOUT_HINDSIGHT = "sub_queries_without_hindsight"
HINDSIGHT_TOO_LONG = "hindsight_too_long"
_PLACEHOLDER = re.compile(r"\{(question|facts|next_facts|answer)\}")


@dataclass(frozen=True)
class HindsightPrompt:
    """The text that stands in the teacher's prompt instead of the question.

    Attributes:
        text: Has `{question}`, and some of what `known` names.
        file: Name of the default text in `tripletune/prompts/models`.
        known: What the teacher can know besides: "facts" (of all later steps), "next_facts" (of the step that answers
            the sub-query), "answer" (the gold answer).
        unknown: Why the data may hold nothing of it, and what to do; for an error.
    """

    text: str
    file: ClassVar[str]
    known: ClassVar[tuple[str, ...]]
    unknown: ClassVar[str]

    @classmethod
    def read(cls, path: str | Path | None = None) -> Self:
        """Read the file of a user, or the default.

        Raises:
            ValueError: The text has no question, nothing that the student does not see, or what the data do not have.
        """
        text = read_prompt(path or PROMPTS / "models" / cls.file)
        names = set(_PLACEHOLDER.findall(text))
        choices = [f"{{{name}}}" for name in cls.known]
        listed = f"{', '.join(choices[:-1])} and {choices[-1]}"
        if "question" not in names or names.isdisjoint(cls.known):
            raise ValueError(
                f"data.hindsight_prompt {path}: the text needs {{question}}, and at least one of {listed}, which is "
                "what the teacher sees and the student does not"
            )
        foreign = sorted(names - {"question", *cls.known})
        if foreign:
            raise ValueError(
                f"data.hindsight_prompt {path}: the data of this training have no {{{foreign[0]}}}; the teacher can "
                f"read {listed}"
            )
        return cls(text)

    def fill(self, question: str, values: Mapping[str, str]) -> str:
        """The question as the teacher reads it; "" if nothing is known that the student does not see.

        Args:
            values: A text for each name of `known`; "" for what is not known.
        """
        names = _PLACEHOLDER.findall(self.text)
        if not any(values.get(name) for name in names):
            return ""
        texts = {**values, "question": question}
        # In one pass, because a fact could contain a placeholder.
        return _PLACEHOLDER.sub(lambda match: texts[match[1]], self.text)

    @classmethod
    def refuse_nothing_taught(cls, counts: Mapping[str, int]) -> None:
        """Raise `ValueError` if no sub-query of the rows has a teacher, as the run would learn labels alone."""
        if not counts.get(WITH_HINDSIGHT):
            without = counts.get(WITHOUT_HINDSIGHT, 0)
            too_long = counts.get(HINDSIGHT_TOO_LONG, 0)
            raise ValueError(
                f"train.hindsight_weight: no sub-query of the training rows has a teacher ({without:,} without "
                f"hindsight, {too_long:,} of them too long): {cls.unknown}"
            )


class RecordHindsight(HindsightPrompt):
    """Hindsight of a question's records, for a planner that is a Graph-LLM."""

    file = "ras_hindsight.md"
    known = ("facts", "next_facts", "answer")
    unknown = (
        "planning records need an answer, or later records of the same question; where they are too long, raise "
        "data.max_input_tokens"
    )

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
        return self.fill(record.question, values)

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


class TrajectoryHindsight(HindsightPrompt):
    """Hindsight of a trajectory of CIRAG's integrator: the core triples of its later rounds.

    Taught are the tokens of the section `question` after the first one. The first token also decides between a query
    and `<no question>`, and a teacher that has read the facts would rather stop; so it is learned from the label alone,
    like the thought, in which such a teacher would state facts that the student has not read yet.
    """

    file = "cirag_hindsight.md"
    known = ("facts", "next_facts")
    unknown = (
        f"it needs trajectories of {INTEGRATE_ROLE} with several rounds, of which a later one keeps a triple (with the "
        "loop's history=section, a trajectory has one round); where they are too long, raise data.max_tokens"
    )

    def columns(
        self,
        trajectory: Trajectory,
        chat: LearnedChat,
        ids: list[int],
        encoder: TrajectoryEncoder,
        counts: Counter[str],
    ) -> Row:
        """The columns of a row that `train.rows.hindsight` reads, with a span for each learned query.

        Args:
            trajectory: All rounds.
            chat: The turns of the row, with indices as in the trajectory.
            ids: The row's tokens.
            encoder: Tokenises the teacher's prompt.
            counts: Receives the number of queries with and without a teacher.
        """
        spans = []
        teachers = []
        for turn in sorted(chat.learned):
            if trajectory.role != INTEGRATE_ROLE or not _asks(chat.turns[turn]):
                continue
            start, end = encoder.reply_span(chat.turns, turn, chat.text, ids)
            taught = _taught_start(chat, turn, ids, encoder)
            if not start < taught < end:
                continue
            spans.append([start, end, taught - start])
            teacher = self._teacher_prompt(trajectory, chat.turns[:turn], encoder)
            if len(teacher) + end - start > encoder.max_tokens:
                counts[HINDSIGHT_TOO_LONG] += 1
                teacher = []
            counts[WITH_HINDSIGHT if teacher else WITHOUT_HINDSIGHT] += 1
            teachers.append([*teacher, *ids[start:end]] if teacher else [])
        return {"spans": spans, TEACHER_IDS: teachers}

    def _teacher_prompt(
        self, trajectory: Trajectory, prompt: Sequence[Message], encoder: TrajectoryEncoder
    ) -> list[int]:
        """The tokens of a prompt with the teacher's question; [] if nothing is known of later rounds.

        Args:
            prompt: The turns that the student reads before its reply, as they were shortened for it.
        """
        later = _later_cores(trajectory, len(prompt))
        values = {"facts": _as_json(later), "next_facts": _as_json(later[:1])}
        turns = list(prompt)
        for place, turn in enumerate(turns):
            before, heading, after = turn["content"].partition(MAIN_QUESTION_HEADING)
            if turn["role"] != "user" or not heading:
                continue
            question, line_end, rest = after.partition("\n")
            taught = self.fill(question, values)
            if not taught:
                return []
            # The section has one line.
            content = f"{before}{heading}{' '.join(taught.split())}{line_end}{rest}"
            turns[place] = {"role": "user", "content": content}
            return encoder.chat.encode(turns)
        return []


def _asks(turn: Message) -> bool:
    """Whether a turn is a decision with a next query, in the form that the loop writes."""
    if turn["role"] != "assistant" or QUERY_HEADING not in turn["content"]:
        return False
    return bool(read_decision(turn["content"], ()).query)


def _taught_start(chat: LearnedChat, turn: int, ids: list[int], encoder: TrajectoryEncoder) -> int:
    """The index of the second token of a decision's query in a row; the first one is not taught.

    Where the tokenizer joins the query's beginning with the line break before it, the first token is the joined one.
    """
    through = encoder.chat.render(chat.turns[: turn + 1], reply=False)
    heading_end = through.rfind(QUERY_HEADING) + len(QUERY_HEADING)
    before_query = encoder.chat.tokens(chat.text[:heading_end])
    return common_prefix_length(ids, before_query) + 1


def _later_cores(trajectory: Trajectory, turn: int) -> list[tuple[Triple, ...]]:
    """The core triples of each round after the decision at an index of a trajectory's turns."""
    cores = []
    for place in range(turn + 1, len(trajectory.messages)):
        message = trajectory.messages[place]
        if message["role"] == "assistant":
            candidates = shown_candidates(trajectory.messages[place - 1]["content"]) or []
            cores.append(read_decision(message["content"], candidates).core)
    return cores


def _as_json(cores: Sequence[tuple[Triple, ...]]) -> str:
    """The triples of rounds as CIRAG's prompts write them, each once; "" without any."""
    triples: dict[Triple, None] = {}
    for core in cores:
        triples.update(dict.fromkeys(core))
    return triples_as_json(triples) if triples else ""
