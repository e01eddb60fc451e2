"""What the card of a HotpotQA-SUBQ build says besides its numbers: notes, models, and the teacher's replies."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tripletune.core.calls import LLMClient, Sampling
from tripletune.data_builders.datasets.writer import BuildFacts
from tripletune.data_builders.subq.opened import OpenSource
from tripletune.data_builders.subq.options import PARTS, BuildOptions
from tripletune.data_builders.subq.teacher import TRIPLES_ROLE, LLMTeacher
from tripletune.llm.question_client import PromptSet
from tripletune.llm.replies import repair_digest

logger = logging.getLogger(__name__)
# By reason: lines of `dropped.ndjson`, each with the digest by which it was chosen (`datasets.add_to_sample`).
Examples = Mapping[str, list[tuple[bytes, dict[str, Any]]]]


def build_facts(
    options: BuildOptions,
    opened_sources: Sequence[OpenSource],
    prompts: PromptSet,
    client: LLMClient | None,
    sampling: Sampling,
    examples: Examples,
) -> BuildFacts:
    """Facts on a build for the card, besides its numbers.

    Args:
        opened_sources: The sources after labelling, with their counts.
        client: The teacher LLM; None if no source needs one.
        examples: Questions that the teacher LLM could not label.
    """
    by_source = {opened.source.name: opened for opened in opened_sources}
    teachers: dict[str, LLMTeacher] = {}
    for name, opened in by_source.items():
        if isinstance(opened.teacher, LLMTeacher):
            teachers[name] = opened.teacher
    digests = {prompts.files[name]: digest for name, digest in prompts.digests().items()}
    return BuildFacts(
        title="HotpotQA-SUBQ records",
        summary="Planning and answering records for triple-based iterative retrieval, labelled as in RAS, appendix C.",
        teachers={name: opened.teacher.name for name, opened in by_source.items()},
        drops={name: opened.ordered_drops() for name, opened in by_source.items() if opened.drops},
        questions={name: opened.labelled for name, opened in by_source.items()},
        repairs=counts_by_source(teachers, "repairs"),
        refused=counts_by_source(teachers, "refused"),
        recovered=counts_by_source(teachers, "recovered"),
        examples={reason: _without_digests(chosen) for reason, chosen in sorted(examples.items())},
        issues=_issues_by_source(by_source),
        options={"sources": [opened.source.text for opened in opened_sources], **asdict(options)},
        # The repair prompt belongs to the teacher LLM, which also asks for corrections of its replies.
        prompts=digests | repair_digest() if teachers else {},
        models=_model_of_role(options, client, sampling),
        calls=calls_by_stage(list(teachers.values())),
        notes=_card_notes(options, opened_sources),
    )


def _card_notes(options: BuildOptions, opened_sources: Sequence[OpenSource]) -> list[str]:
    """The card's paragraphs on what a reader of the data would not expect; missing questions are also logged.

    The card is all that such a reader has, so it says what was not done, too: the test that was not run, and the
    questions that a source lacks.
    """
    notes: list[str] = []
    for opened in opened_sources:
        source = opened.source
        if source.reader in PARTS and opened.count and opened.labelled < opened.count:
            gave = f"gave {opened.labelled:,} of the {opened.count:,} requested questions"
            notes.append(f"Source {source.name} ({source.reader}) {gave}.")
            logger.warning("%s", notes[-1])
    if options.direct_answer_model is None and options.direct_answers is None:
        notes.append(
            "The direct-answer test was not run (no `--direct-answer-model`): only questions that their annotation "
            "marks as direct are labelled [NO_RETRIEVAL]."
        )
    for opened in opened_sources:
        counted = sorted((outcome, count) for outcome, count in opened.notes.items() if count)
        notes += [f"Source {opened.source.name}: {count:,} {outcome}." for outcome, count in counted]
    if options.retriever:
        notes.append(f"Histories come from real searches ({options.retriever}, top {options.top_k}).")
    return notes


def _model_of_role(options: BuildOptions, client: LLMClient | None, sampling: Sampling) -> dict[str, str]:
    """The model of each role; none where annotations label all questions."""
    models = {}
    if client is not None:
        models["teacher"] = f"{client.model}{how_drawn(client, sampling)}"
    if options.direct_answer_model is not None:
        models["direct answers"] = options.direct_answer_model
    return models


def _issues_by_source(by_source: Mapping[str, OpenSource]) -> dict[str, int]:
    """The warnings of all sources with their counts, each after the name of its source."""
    issues = {}
    for name, opened in by_source.items():
        for issue, count in opened.issues.items():
            if count:
                issues[f"{name}: {issue}"] = count
    return issues


def _without_digests(examples: list[tuple[bytes, dict[str, Any]]]) -> list[dict[str, Any]]:
    """The lines of examples without the digests that chose them."""
    return [line for _, line in examples]


def how_drawn(client: LLMClient, sampling: Sampling) -> str:
    """How the teacher's replies were drawn, in words."""
    if not client.send_temperature:
        return " (the provider's default temperature and top_p: neither was sent)"
    return f" (temperature {sampling.temperature:g}, top_p {sampling.top_p:g}, seed {sampling.seed})"


def counts_by_source(teachers: dict[str, LLMTeacher], name: str) -> dict[str, dict[str, int]]:
    """The named counter of each teacher that has counts, in alphabetical order."""
    counters: dict[str, Counter[str]] = {source: getattr(teacher, name) for source, teacher in teachers.items()}
    return {source: dict(sorted(counter.items())) for source, counter in counters.items() if counter}


def calls_by_stage(teachers: list[LLMTeacher]) -> dict[str, dict[str, float]]:
    """Calls by stage, and the malformed triples of the stage that extracts."""
    calls: Counter[str] = sum((teacher.calls for teacher in teachers), Counter())
    by_stage: dict[str, dict[str, float]] = {stage: {"calls": count} for stage, count in sorted(calls.items())}
    if TRIPLES_ROLE in by_stage:
        by_stage[TRIPLES_ROLE]["malformed_triples"] = sum(teacher.malformed for teacher in teachers)
    return by_stage
