"""Whether the steps of records have the evidence that prompts shall show; a missing one would leave prompts empty."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from tripletune.core.data.records import Step

STEPS = "steps"
WITHOUT_TEXT = "steps_without_text"
WITHOUT_TRIPLES = "steps_without_triples"
ONLY_TRIPLES = "steps_with_only_triples"
# The beginning of the names of counts of steps by their number of triples.
STEPS_BY_TRIPLES = "steps_by_triples_"


def count_steps(steps: Iterable[Step], counts: Counter[str]) -> None:
    """Add to the counts of steps, of steps without text or triples, and of steps that have triples but no text."""
    for step in steps:
        has_text = bool(step.text.strip())
        counts[STEPS] += 1
        counts[WITHOUT_TEXT] += not has_text
        counts[WITHOUT_TRIPLES] += not step.triples
        counts[ONLY_TRIPLES] += bool(step.triples) and not has_text


def most_triples(counts: Mapping[str, int]) -> int:
    """The number of triples of the step that has most."""
    sizes = [name.removeprefix(STEPS_BY_TRIPLES) for name in counts if name.startswith(STEPS_BY_TRIPLES)]
    return max(map(int, sizes), default=0)


def check_evidence(option: str, evidence: str, counts: Mapping[str, int], data: str) -> None:
    """Refuse rows whose steps lack what the prompts shall show.

    A passage may state no fact, so steps without triples are an error only if no step has any.

    Args:
        option: The option that chooses the evidence, for the error.
        counts: Those of `count_steps`.
    """
    steps = counts.get(STEPS, 0)
    if not steps:
        return
    if evidence == "text":
        missing = counts.get(ONLY_TRIPLES, 0)
        if counts.get(WITHOUT_TEXT, 0) == steps:
            missing = steps
        if missing:
            raise ValueError(
                f"{option} text: {missing:,} of {steps:,} steps in {data} have no text, so their prompts would show "
                "nothing. Build the records again from questions with passages (`build subq`; the released data have "
                f"none), or take {option} triples"
            )
    elif counts.get(WITHOUT_TRIPLES, 0) == steps:
        raise ValueError(
            f"{option} {evidence}: none of the {steps:,} steps in {data} has triples. Build the records with triples "
            f"(`build subq --triple-file`), or take {option} text"
        )
