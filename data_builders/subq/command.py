"""Run a parsed command line of `tripletune build subq`: build, or say what it would cost (`--dry-run`)."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from tripletune.core.calls import LLMClient
from tripletune.core.data.questions import Question
from tripletune.core.files import check_new
from tripletune.data_builders.datasets import token_counter
from tripletune.data_builders.datasets.lookup import SeenTable
from tripletune.data_builders.subq.build import build
from tripletune.data_builders.subq.options import (
    BuildOptions,
    Source,
    read_command,
    usable_questions,
)
from tripletune.data_builders.subq.teacher import (
    FILTER_ROLE,
    QUERY_ROLE,
    TRIPLES_ROLE,
    document_text,
    filter_text,
    load_subq_prompts,
    query_text,
    shown_documents,
)
from tripletune.llm.backends import open_client
from tripletune.llm.prices import BATCH, cost_lines, prices_per_million


def build_or_estimate(parsed: argparse.Namespace) -> str:
    """Run a parsed command, and return what to print.

    Models are only opened by `build`, after the sources were checked, so it gets functions that open them: a
    wrong path is then reported before a model has loaded for minutes.
    """
    sources, options, llm = read_command(parsed)
    if parsed.dry_run:
        return _show_costs(sources, options, parsed.price, parsed.teacher == BATCH)
    ledger = parsed.teacher_ledger or options.ledger
    check_new(options.output, [ledger])
    open_teacher = None
    sampling = None
    if llm is not None:
        open_teacher = partial(open_client, llm)
        sampling = llm.sampling(1)
    open_direct = None
    if options.direct_answer_model:
        open_direct = partial(open_base_model, options, ledger)
    build(sources, options, open_teacher, sampling, open_direct)
    return ""


def open_base_model(options: BuildOptions, ledger: str) -> LLMClient:
    """The client of the direct-answer test: a base model without chat template, on this machine."""
    from tripletune.llm.backends.hf import HFBackend
    from tripletune.llm.ledger import Ledger
    from tripletune.llm.ledger_client import LedgerClient

    # `plain` marks the calls in the ledger, since a chat with the same model is another call.
    return LedgerClient(HFBackend(str(options.direct_answer_model), options.batch_size, plain=True), Ledger(ledger))


def _show_costs(sources: list[Source], options: BuildOptions, price: str | None, batch: bool) -> str:
    """The questions, calls, tokens and cost of a build as text, without a call.

    The figures are the most that a build can cost: the teacher may keep fewer documents.
    """
    prices = prices_per_million(price, batch)
    counted = "as characters / 4 (no --tokenizer)"
    count = None
    if options.tokenizer:
        count = token_counter(options.tokenizer)
        counted = f"as the tokenizer of {options.tokenizer} splits the first {SAMPLE} prompts"
    questions, stages = estimate(sources, options, count)
    lines = [
        f"{questions:,} questions; nothing was sent",
        *cost_lines(stages, prices, counted, batch, "all questions, once"),
    ]
    if options.direct_answer_model or options.direct_answers:
        lines.append("Questions that the base model answers directly cost nothing.")
    return "\n".join(lines)


# Prompts on which the tokens per character are measured.
SAMPLE = 500
# A triple list as JSON has 1.3 times the characters of its paragraph: a strong teacher's 4,031 triples of 300 HotpotQA
# paragraphs have 1.24 times, those of 370 other supporting paragraphs 1.39. A sub-query as JSON has 86 characters.
_TRIPLES_PER_CHARACTER, _SUBQUERY_CHARACTERS, _FILTER_CHARACTERS = 1.3, 86, 40


class Estimate(NamedTuple):
    """The number of questions to label, and by role the maximum calls, input tokens and output tokens."""

    questions: int
    stages: dict[str, list[float]]


def estimate(
    sources: list[Source], options: BuildOptions, count_tokens: Callable[[str], int] | None = None
) -> Estimate:
    """Estimate calls and tokens of a build without a call.

    Characters are summed, and tokens per character are measured on the first prompts alone: to tokenize all prompts of
    a benchmark would take long.
    """
    system = load_subq_prompts(options.prompts).texts
    stages: dict[str, list[float]] = {role: [0, 0, 0] for role in (FILTER_ROLE, QUERY_ROLE, TRIPLES_ROLE)}
    number = 0
    sample: list[str] = []
    for question in _questions_to_label(sources, options):
        number += 1
        for call in _expected_calls(question, options):
            prompt = system[call.role.replace(".", "_")] + call.text
            if len(sample) < SAMPLE:
                sample.append(prompt)
            numbers = stages[call.role]
            numbers[0] += 1
            numbers[1] += len(prompt)
            numbers[2] += call.reply_characters
    per_character = 0.25
    if count_tokens is not None and sample:
        per_character = sum(map(count_tokens, sample)) / sum(map(len, sample))
    for numbers in stages.values():
        numbers[1] *= per_character
        numbers[2] *= per_character
    return Estimate(number, stages)


def _questions_to_label(sources: list[Source], options: BuildOptions) -> Iterator[Question]:
    """The questions that the teacher LLM labels; one without supporting documents is left out, as it needs no call."""
    with SeenTable() as seen:
        for source in sources:
            if not source.needs_teacher:
                continue
            count = options.most_questions(source.reader)
            for question in usable_questions(source, seen, Counter(), None, count, options.corpus):
                if question.supporting:
                    yield question


class _Call(NamedTuple):
    """A call that a build would make.

    Attributes:
        text: The user's turn.
        reply_characters: Expected length of the reply.
    """

    role: str
    text: str
    reply_characters: float


def _expected_calls(question: Question, options: BuildOptions) -> Iterator[_Call]:
    """The calls of a question, if the teacher keeps all supporting documents, which is the most that it can cost.

    Lengths of replies are estimated from usual ones; prompts are those that the build sends.
    """
    shown = shown_documents(question, options.show_documents)
    yield _Call(FILTER_ROLE, filter_text(question, shown), _FILTER_CHARACTERS)
    earlier: list[str] = []
    for document in question.supporting:
        passage = question.passages[document]
        # The sub-query of a single document is asked for only if it is a label.
        if len(question.supporting) > 1 or options.first_subquery == "generated":
            yield _Call(QUERY_ROLE, query_text(question, passage, earlier), _SUBQUERY_CHARACTERS)
            earlier.append("q" * _SUBQUERY_CHARACTERS)
        if options.triples_from == "teacher":
            text = f"Document: {document_text(passage)}"
            yield _Call(TRIPLES_ROLE, text, _TRIPLES_PER_CHARACTER * len(text))
