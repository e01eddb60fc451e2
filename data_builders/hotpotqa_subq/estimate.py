"""`--dry-run`: what a build with a teacher LLM will cost at most. Nothing is sent.

Every question is read and its calls are counted as if the teacher kept all supporting passages, no two questions shared
a passage and the ledger were empty; in one question of eight a teacher keeps fewer. Tokens per call are those of a
sample of questions with our prompts. Repair turns are not foreseen.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator

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

ROLES = (FILTER_ROLE, QUERY_ROLE, TRIPLES_ROLE)
SAMPLE = 200
# A triple list as JSON has 1.3 times the characters of its paragraph: 4,031 triples that a strong teacher read out of
# 300 paragraphs of HotpotQA have 1.24, 370 others of its supporting paragraphs 1.39. Its sub-queries have 86 as JSON.
_TRIPLES_PER_CHARACTER, _SUBQUERY_CHARACTERS, _FILTER_CHARACTERS = 1.3, 86, 40


def estimate(
    sources: list[Source], options: BuildOptions, count_tokens: Callable[[str], float] = lambda text: len(text) / 4
) -> tuple[int, dict[str, tuple[int, float, float]]]:
    """Count the calls of a build.

    Args:
        sources: As for `build`.
        options: As for `build`.
        count_tokens: Counts the tokens of a text.

    Returns:
        Questions that the teacher labels; and by role the calls, input tokens and output tokens at most.

    Raises:
        FileNotFoundError: an input file is missing.
        ValueError: an input file is malformed.
    """
    calls = Counter[str](dict.fromkeys(ROLES, 0))
    sample: list[Question] = []
    chance, number = random.Random(0), 0
    for number, question in enumerate(_questions(sources, options), 1):
        calls.update(_calls(question, options))
        # Every question is in the sample with the same chance (reservoir sampling).
        if len(sample) < SAMPLE:
            sample.append(question)
        elif (place := chance.randrange(number)) < SAMPLE:
            sample[place] = question
    prompts = load_subq_prompts(options.prompts)
    system = {role: count_tokens(prompts.texts[role.replace(".", "_")]) for role in ROLES}
    sampled, read, written = Counter[str](), dict.fromkeys(ROLES, 0.0), dict.fromkeys(ROLES, 0.0)
    for role, text, reply in (call for question in sample for call in _prompts(question, options)):
        sampled[role] += 1
        tokens = count_tokens(text)
        read[role] += system[role] + tokens
        written[role] += reply * tokens / len(text)
    share = {role: calls[role] / max(1, sampled[role]) for role in ROLES}
    return number, {role: (calls[role], share[role] * read[role], share[role] * written[role]) for role in ROLES}


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
