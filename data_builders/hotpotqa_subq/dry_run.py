"""`--dry-run`: how many calls a build with a teacher LLM will make, what they cost and how long they take.

Nothing is sent. The build itself is rehearsed: every question is read, the real prompts are rendered by `LLMTeacher`
and looked up in the ledger, and where there is no reply yet a stand-in takes its place: all supporting passages are
kept, a sub-query of ordinary length, triples. So the number of calls and the length of the prompts are exact as far as
the ledger reaches. Beyond it a teacher keeps fewer passages and drops some questions: once the ledger has the document
filter's replies to 20 questions, the later stages' calls are scaled by what came of those. Replies that need a repair
turn are not foreseen.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Protocol

from tripletune.data_builders.datasets.lookup import SeenTable
from tripletune.data_builders.datasets.progress import progress
from tripletune.data_builders.hotpotqa_subq.build import answered_directly, open_teachers, usable_questions
from tripletune.data_builders.hotpotqa_subq.direct_answer import read_answers
from tripletune.data_builders.hotpotqa_subq.labelling import LabelOptions, label_question
from tripletune.data_builders.hotpotqa_subq.options import BuildOptions, answers_file
from tripletune.data_builders.hotpotqa_subq.prices import Price
from tripletune.data_builders.hotpotqa_subq.questions import Question, UnlabelledQuestion
from tripletune.data_builders.hotpotqa_subq.sources import OpenSource, Source
from tripletune.data_builders.hotpotqa_subq.teacher import (
    FILTER_ROLE,
    QUERY_ROLE,
    ROLES,
    TRIPLES_ROLE,
    LLMTeacher,
    Prompts,
)
from tripletune.models.llm.client import Message, Sampling
from tripletune.models.llm.ledger import make_call
from tripletune.models.llm.replies import REPAIR_ROLE
from tripletune.models.local.generation import Completion

CHARACTERS_A_TOKEN = 4.0
# A triple list as JSON has 1.3 times the characters of its paragraph: 4,031 triples that a strong teacher read out of
# 300 paragraphs of HotpotQA have 1.24, 370 others of its supporting paragraphs 1.39.
_TRIPLES_A_CHARACTER = 1.3
# A sub-query of 86 characters as JSON, the mean of the same teacher. No word of it can be a gold answer.
_STAND_IN = "Qx{n}zq qx{n}zq qx{n}zq qx{n}zq qx{n}zq qx{n}zq qx{n}zq qx{n}zq qx{n}zq qx{n}zq?"
# Replies in the ledger from which the length of those to come is taken instead.
_ENOUGH = 20
_SAMPLED = 100


class Replies(Protocol):
    """The look-up of a ledger."""

    def get(self, key: str) -> Completion | None:
        """The stored reply of a call, or None."""
        ...


@dataclass
class Stage:
    """One stage of the calls.

    Attributes:
        calls: Calls that will be sent if all supporting passages are kept.
        stored: Calls that the ledger answers.
        input_characters: Characters of the prompts of those calls.
        output_characters: Characters of their replies, as stand-ins.
        stored_tokens: Output tokens of the stored replies.
        sampled: Characters and tokens of the prompts that were counted with a tokenizer.
        assumed: How many of `calls` belong to questions whose documents are not known yet.
        came_true: For the questions whose documents are known: calls that came of them, and calls that there would be
            if all supporting passages had been kept.
    """

    calls: int = 0
    stored: int = 0
    input_characters: int = 0
    output_characters: float = 0.0
    stored_tokens: int = 0
    sampled: tuple[int, int] = (0, 0)
    assumed: int = 0
    came_true: tuple[int, int] = (0, 0)

    @property
    def ratio(self) -> float:
        """Of the calls that "all supporting passages are kept" foresees, the share that comes of a question."""
        came, foreseen = self.came_true
        return came / foreseen if foreseen >= _ENOUGH else 1.0

    @property
    def expected_calls(self) -> float:
        """Calls that will be sent, as far as can be told."""
        return self.calls - self.assumed * (1 - self.ratio)

    @property
    def _share(self) -> float:
        return self.expected_calls / self.calls if self.calls else 1.0

    @property
    def tokens_a_character(self) -> float:
        """From the prompts that were counted with a tokenizer; without any, a quarter."""
        characters, tokens = self.sampled
        return tokens / characters if characters else 1 / CHARACTERS_A_TOKEN

    @property
    def input_tokens(self) -> float:
        """Tokens that will be read."""
        return self.input_characters * self.tokens_a_character * self._share

    @property
    def output_tokens(self) -> float:
        """Tokens that will be written."""
        if self.stored >= _ENOUGH:
            return self.expected_calls * self.stored_tokens / self.stored
        return self.output_characters * self.tokens_a_character * self._share


@dataclass
class Estimate:
    """What a build will take.

    Attributes:
        model: The teacher.
        questions: Questions that the teacher labels.
        known: Questions among them whose documents the ledger knows.
        direct: Questions that need no teacher, since they are answered without retrieval.
        stages: By role.
        counted: How tokens were counted.
        price: Of the model; None when it is not known.
        limits: What bounds the speed.
    """

    model: str
    counted: str
    price: Price | None = None
    limits: Speed = field(default_factory=lambda: Speed())
    questions: int = 0
    known: int = 0
    direct: int = 0
    stages: dict[str, Stage] = field(default_factory=lambda: {role: Stage() for role in ROLES})

    @property
    def calls(self) -> float:
        """Calls of all stages that will be sent."""
        return sum(stage.expected_calls for stage in self.stages.values())

    @property
    def tokens(self) -> tuple[float, float]:
        """Input and output tokens of all stages."""
        stages = self.stages.values()
        return sum(stage.input_tokens for stage in stages), sum(stage.output_tokens for stage in stages)

    @property
    def dollars(self) -> float | None:
        """Cost of all stages, None without a price."""
        return None if self.price is None else self.price.cost(*self.tokens)


@dataclass(frozen=True)
class Speed:
    """The limits of the client; None stands for no limit.

    Attributes:
        requests_per_minute: Most calls a minute.
        tokens_per_minute: Most tokens a minute, prompts and replies together.
        concurrency: Most calls under way.
        latency: Seconds that a call is assumed to take.
    """

    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    concurrency: int | None = None
    latency: float = 2.0

    def minutes(self, calls: float, tokens: float) -> tuple[float, str]:
        """The longest of the times that each limit alone would take, and which limit that is."""
        times = []
        if self.requests_per_minute:
            times.append((calls / self.requests_per_minute, f"{self.requests_per_minute:,.0f} requests a minute"))
        if self.tokens_per_minute:
            times.append((tokens / self.tokens_per_minute, f"{self.tokens_per_minute:,.0f} tokens a minute"))
        if self.concurrency:
            text = f"{self.concurrency:,} calls at a time of {self.latency:g} s each (assumed)"
            times.append((calls * self.latency / 60 / self.concurrency, text))
        return max(times, default=(0.0, "no limit was given"))


class RehearsalClient:
    """An `LLMClient` that sends nothing: replies come from the ledger or are stand-ins, and everything is counted.

    Args:
        estimate: Where it is counted.
        ledger: Stored replies.
        seen: Calls that were met before in this rehearsal; the ledger will answer them.
        count_tokens: A tokenizer's count.

    Attributes:
        kept: Numbers of the documents that the stand-in keeps of the question at work.
        asked: Calls for the question at work, by stage, repair turns left out.
        knows_documents: Whether its documents come from the ledger.
    """

    def __init__(
        self,
        estimate: Estimate,
        ledger: Replies | None,
        seen: SeenTable,
        count_tokens: Callable[[str], int] | None = None,
    ) -> None:
        self.model = estimate.model
        self.kept: list[int] = []
        self.asked: Counter[str] = Counter()
        self.knows_documents = False
        self._estimate, self._ledger, self._seen, self._count_tokens = estimate, ledger, seen, count_tokens

    async def chat(
        self, messages: Sequence[Message], *, role: str, sampling: Sampling | None = None, question_id: str = ""
    ) -> Completion:
        """A stored reply or a stand-in for it."""
        stage = self._estimate.stages.setdefault(role.removesuffix(REPAIR_ROLE), Stage())
        call = make_call(self.model, sampling or Sampling(), messages)
        stored = self._ledger.get(call.key) if self._ledger else None
        self.asked[role] += 1
        if role.removesuffix(REPAIR_ROLE) == FILTER_ROLE:
            self.knows_documents = stored is not None
        new = self._seen.first("call", call.key) is None
        if stored is not None:
            stage.stored += new
            stage.stored_tokens += stored.completion_tokens if new else 0
            return stored
        reply, characters = self._stand_in(role.removesuffix(REPAIR_ROLE), messages)
        if new:
            self._count(stage, messages, characters)
        return Completion(reply)

    async def close(self) -> None:
        """Nothing is held open."""

    def _count(self, stage: Stage, messages: Sequence[Message], characters: float) -> None:
        prompt = sum(len(message["content"]) for message in messages)
        stage.calls += 1
        stage.assumed += not self.knows_documents
        stage.input_characters += prompt
        stage.output_characters += characters
        if self._count_tokens is not None and stage.calls <= _SAMPLED:
            tokens = sum(self._count_tokens(message["content"]) for message in messages)
            stage.sampled = stage.sampled[0] + prompt, stage.sampled[1] + tokens

    def _stand_in(self, role: str, messages: Sequence[Message]) -> tuple[str, float]:
        prompt = messages[1]["content"]
        if role == FILTER_ROLE:
            reply = json.dumps({"documents": self.kept, "answerable": True})
        elif role == QUERY_ROLE:
            reply = json.dumps({"question": _STAND_IN.replace("{n}", str(prompt.count("\n- Qx") + 1))})
        else:
            return json.dumps({"triples": [["a", "b", "c"]]}), _TRIPLES_A_CHARACTER * len(prompt)
        return reply, len(reply)


def rehearse(
    sources: list[Source],
    options: BuildOptions,
    estimate: Estimate,
    ledger: Replies | None = None,
    count_tokens: Callable[[str], int] | None = None,
    sampling: Sampling | None = None,
) -> Estimate:
    """Count the calls of a build.

    Args:
        sources: As for `build`.
        options: As for `build`.
        estimate: Model, price and limits; it is filled in.
        ledger: Stored replies, whose calls are not counted as calls to be sent.
        count_tokens: Counts the tokens of a text; None: characters / 4.
        sampling: As for `build`.

    Returns:
        The estimate.

    Raises:
        FileNotFoundError: an input file is missing.
        ValueError: an input file is malformed.
    """
    with ExitStack() as stack:
        ids, calls = stack.enter_context(SeenTable()), stack.enter_context(SeenTable())
        client = RehearsalClient(estimate, ledger, calls, count_tokens)
        opened = open_teachers(sources, options, client, Prompts.load(options.prompts), sampling)
        path = answers_file(options)
        # Direct answers that a model is still to give are not known: such questions are counted as needing retrieval.
        answers = read_answers(path) if path is not None and options.direct_answer_model is None else None
        asyncio.run(_walk(opened, options, estimate, client, ids, answers))
    return estimate


async def _walk(
    opened: list[OpenSource],
    options: BuildOptions,
    estimate: Estimate,
    client: RehearsalClient,
    ids: SeenTable,
    answers: Mapping[str, str] | None,
) -> None:
    labels = LabelOptions(options.first_subquery)
    for one in opened:
        if not isinstance(one.teacher, LLMTeacher):
            continue
        rows = progress(one.questions(), one.source.name)
        for _, question in usable_questions(rows, one, ids, options):
            if answered_directly(question, one, answers):
                estimate.direct += 1
                continue
            estimate.questions += 1
            client.kept = _supporting_numbers(question, options)
            client.asked.clear()
            client.knows_documents = False
            with suppress(UnlabelledQuestion):
                await label_question(question, one.teacher, False, labels)
            if client.knows_documents:
                estimate.known += 1
                _compare(estimate, client.asked, len(question.supporting), options)


def _compare(estimate: Estimate, asked: Mapping[str, int], supporting: int, options: BuildOptions) -> None:
    """Note what came of a question whose documents are known, beside what all its supporting passages would give."""
    foreseen = {
        # A single document needs no sub-query that is not a label.
        QUERY_ROLE: supporting if supporting > 1 or options.first_subquery == "generated" else 0,
        TRIPLES_ROLE: supporting if options.triples_from == "teacher" else 0,
    }
    for role, calls in foreseen.items():
        stage = estimate.stages[role]
        came, would = stage.came_true
        stage.came_true = came + asked.get(role, 0), would + calls


def _supporting_numbers(question: Question, options: BuildOptions) -> list[int]:
    shown = sorted(question.supporting) if options.show_documents == "supporting" else range(len(question.passages))
    return [list(shown).index(document) + 1 for document in question.supporting]


# Named for `Estimate.stages` and the table: what each stage asks for.
STAGE_NAMES = {FILTER_ROLE: "document filter", QUERY_ROLE: "sub-queries", TRIPLES_ROLE: "triples"}
