"""`--dry-run`: what a build with a teacher LLM will cost at most. Nothing is sent.

Every question is read and its calls are counted as if the teacher kept all supporting passages, no two questions shared
a passage and the ledger were empty; in one question of eight a teacher keeps fewer. Tokens per call are those of a
sample of questions with our prompts. Repair turns are not foreseen.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tripletune.data_builders.datasets.lookup import SeenTable
from tripletune.data_builders.datasets.progress import progress
from tripletune.data_builders.hotpotqa_subq.options import BuildOptions, Source
from tripletune.data_builders.hotpotqa_subq.questions import Dropped, Question
from tripletune.data_builders.hotpotqa_subq.teacher import (
    FILTER_ROLE,
    QUERY_ROLE,
    TRIPLES_ROLE,
    filter_text,
    load_subq_prompts,
    query_text,
    shown_documents,
    triples_text,
)

SAMPLE = 200
# A triple list as JSON has 1.3 times the characters of its paragraph: 4,031 triples that a strong teacher read out of
# 300 paragraphs of HotpotQA have 1.24, 370 others of its supporting paragraphs 1.39. Its sub-queries have 86 as JSON.
_TRIPLES_PER_CHARACTER, _SUBQUERY_CHARACTERS, _FILTER_CHARACTERS = 1.3, 86, 40


@dataclass
class Stage:
    """The calls of one stage.

    Attributes:
        calls: How many at most.
        sampled: Input and output tokens of each call of the sample.
    """

    calls: int = 0
    sampled: list[tuple[float, float]] = field(default_factory=list)

    @property
    def tokens(self) -> tuple[float, float]:
        """Input and output tokens of all calls."""
        share = self.calls / max(1, len(self.sampled))
        return share * sum(read for read, _ in self.sampled), share * sum(written for _, written in self.sampled)


def estimate(
    sources: list[Source], options: BuildOptions, count_tokens: Callable[[str], float] = lambda text: len(text) / 4
) -> tuple[int, dict[str, Stage]]:
    """Count the calls of a build.

    Args:
        sources: As for `build`.
        options: As for `build`.
        count_tokens: Counts the tokens of a text.

    Returns:
        Questions that the teacher labels, and the stages by role.

    Raises:
        FileNotFoundError: an input file is missing.
        ValueError: an input file is malformed.
    """
    stages = {role: Stage() for role in (FILTER_ROLE, QUERY_ROLE, TRIPLES_ROLE)}
    sample: list[Question] = []
    chance, number = random.Random(0), 0
    for number, question in enumerate(_questions(sources, options), 1):
        for role, calls in _calls(question, options).items():
            stages[role].calls += calls
        # Every question is in the sample with the same chance (reservoir sampling).
        if len(sample) < SAMPLE:
            sample.append(question)
        elif (place := chance.randrange(number)) < SAMPLE:
            sample[place] = question
    prompts = load_subq_prompts(options.prompts)
    system = {role: count_tokens(prompts.texts[role.replace(".", "_")]) for role in stages}
    for question in sample:
        for role, text, reply in _prompts(question, options):
            per_character = count_tokens(text) / len(text)
            stages[role].sampled.append((system[role] + count_tokens(text), reply * per_character))
    return number, stages


def _questions(sources: list[Source], options: BuildOptions) -> Iterator[Question]:
    with SeenTable() as seen:
        for source in sources:
            if not source.needs_teacher:
                continue
            rows = progress(source.questions(options.most_questions(source.reader)), source.name)
            for position, row in enumerate(rows):
                if isinstance(row, Dropped) or seen.first("id", row.id) is not None or not row.supporting:
                    continue
                if options.is_mine(position):
                    yield row


def _calls(question: Question, options: BuildOptions) -> dict[str, int]:
    kept = len(question.supporting)
    # A single document needs no sub-query that is not a label.
    queries = kept if kept > 1 or options.first_subquery == "generated" else 0
    return {FILTER_ROLE: 1, QUERY_ROLE: queries, TRIPLES_ROLE: kept if options.triples_from == "teacher" else 0}


def _prompts(question: Question, options: BuildOptions) -> Iterator[tuple[str, str, float]]:
    """Role, user's turn and characters of the reply of each call."""
    calls = _calls(question, options)
    yield FILTER_ROLE, filter_text(question, shown_documents(question, options.show_documents)), _FILTER_CHARACTERS
    earlier: list[str] = []
    for document in question.supporting:
        passage = question.passages[document]
        if calls[QUERY_ROLE]:
            yield QUERY_ROLE, query_text(question, passage, earlier), _SUBQUERY_CHARACTERS
            earlier.append("q" * _SUBQUERY_CHARACTERS)
        if calls[TRIPLES_ROLE]:
            text = triples_text(passage)
            yield TRIPLES_ROLE, text, _TRIPLES_PER_CHARACTER * len(text)


def estimate_table(stages: dict[str, Stage], price: tuple[float, float] | None) -> list[str]:
    """The lines of a table: calls, tokens and, with a price in dollars per million tokens, the cost of each stage."""
    rows = [(role, stage.calls, *stage.tokens) for role, stage in stages.items()]
    rows.append(("all", sum(row[1] for row in rows), sum(row[2] for row in rows), sum(row[3] for row in rows)))
    lines = [f"{'stage, at most':16}{'calls':>14}{'input tokens':>18}{'output tokens':>18}{'cost':>14}"]
    for role, calls, read, written in rows:
        cost = "-" if price is None else f"${(read * price[0] + written * price[1]) / 1e6:,.2f}"
        lines.append(f"{role:16}{calls:>14,}{read:>18,.0f}{written:>18,.0f}{cost:>14}")
    return lines
