"""What the card of a HotpotQA-SUBQ build says besides its numbers: who labelled what with what, and what is missing."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tripletune.data_builders.datasets.card import BuildFacts
from tripletune.data_builders.hotpotqa_subq.options import BuildOptions, answers_file
from tripletune.data_builders.hotpotqa_subq.sources import OpenSource
from tripletune.data_builders.hotpotqa_subq.teacher import TRIPLES_ROLE, LLMTeacher, Prompts
from tripletune.data_builders.text_to_triples.mixing import shortages
from tripletune.models.files import file_digest
from tripletune.models.llm.client import LLMClient, Sampling
from tripletune.models.llm.replies import repair_digest

logger = logging.getLogger(__name__)


def build_facts(
    opened: list[OpenSource],
    options: BuildOptions,
    client: LLMClient | None,
    prompts: Prompts,
    sampling: Sampling,
    examples: dict[str, list[dict[str, Any]]],
) -> BuildFacts:
    """The facts of a build whose records are written.

    Args:
        opened: The sources with what was counted.
        options: Options of the build.
        client: The teacher LLM.
        prompts: Its prompts.
        sampling: How its replies were drawn.
        examples: Questions that were left out, by reason.
    """
    files = {path for one in opened for path in (one.source.location, one.source.annotations)} | {
        answers_file(options),
        options.triple_file,
        options.triples_from,
    }
    # One process of several sees only its share; merging looks at the whole.
    parts = [one for one in opened if one.is_part and options.shard is None]
    notes = shortages(
        {one.source.name: (one.source.reader, one.count or 0, one.labelled, one.drops.total()) for one in parts}
    )
    for note in notes:
        logger.warning("%s", note)
    if options.direct_answer_model is None and options.direct_answers is None:
        notes.append(
            "The direct-answer test was not run (no `--direct-answer-model`): only questions that their annotation "
            "marks as direct are labelled [NO_RETRIEVAL]."
        )
    models = {}
    if client is not None:
        models["teacher"] = f"{client.model}{_drawn(client, sampling)}"
    if options.direct_answer_model is not None:
        models["direct answers"] = options.direct_answer_model
    llm = {one.source.name: one.teacher for one in opened if isinstance(one.teacher, LLMTeacher)}
    return BuildFacts(
        title="HotpotQA-SUBQ records",
        summary="Planning and answering records for triple-based iterative retrieval, labelled as in RAS, appendix C.",
        teachers={one.source.name: one.teacher.name for one in opened},
        drops={one.source.name: one.ordered_drops() for one in opened if one.drops},
        questions={one.source.name: one.labelled for one in opened},
        repairs=_by_source(llm, "repairs"),
        refused=_by_source(llm, "refused"),
        recovered=_by_source(llm, "recovered"),
        examples=examples,
        issues={f"{one.source.name}: {what}": n for one in opened for what, n in one.issues.items() if n},
        files={path: file_digest(path) for path in sorted(filter(None, files)) if Path(path).is_file()},
        options={"sources": [one.source.text for one in opened], **asdict(options)},
        prompts=prompts.digests() | repair_digest() if llm else {},
        models=models,
        calls=_calls(list(llm.values())),
        notes=notes,
    )


def _drawn(client: LLMClient, sampling: Sampling) -> str:
    """How the replies were drawn; nothing for recorded ones, which were not."""
    backend = getattr(client, "backend", None)
    if backend is None:
        return ""
    if not getattr(backend, "send_temperature", True):
        return " (temperature and top_p are the provider's own: none was sent)"
    return f" (temperature {sampling.temperature:g}, top_p {sampling.top_p:g}, seed {sampling.seed})"


def _by_source(teachers: dict[str, LLMTeacher], name: str) -> dict[str, dict[str, int]]:
    """A counter of every teacher that counted something in it, in alphabetical order: the same in every build."""
    counters: dict[str, Counter[str]] = {source: getattr(teacher, name) for source, teacher in teachers.items()}
    return {source: dict(sorted(counter.items())) for source, counter in counters.items() if counter}


def _calls(teachers: list[LLMTeacher]) -> dict[str, dict[str, float]]:
    stages = sorted({stage for teacher in teachers for stage in teacher.calls})
    calls: dict[str, dict[str, float]] = {
        stage: {"calls": sum(teacher.calls[stage] for teacher in teachers)} for stage in stages
    }
    if TRIPLES_ROLE in calls:
        calls[TRIPLES_ROLE]["malformed_triples"] = sum(teacher.malformed for teacher in teachers)
    return calls
