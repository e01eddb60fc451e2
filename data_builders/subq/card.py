"""What the card of a HotpotQA-SUBQ build says about its teacher: sampling, replies and calls."""

from __future__ import annotations

from collections import Counter

from tripletune.core.calls import LLMClient, Sampling
from tripletune.data_builders.subq.teacher import TRIPLES_ROLE, LLMTeacher


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
