"""A source of a HotpotQA-SUBQ build with the teacher that labels it, and what became of its questions."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tripletune.core.data.questions import DropReason, Teacher
from tripletune.data_builders.subq.options import Source


@dataclass
class OpenSource:
    """A source with its teacher, and counts over at most `count` of its questions.

    `issues` counts warnings that drop no question. For `notes`, the card writes each count in a sentence.
    """

    source: Source
    teacher: Teacher
    issues: Counter[str]
    count: int | None = None
    labelled: int = 0
    drops: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)

    def ordered_drops(self) -> dict[str, int]:
        """The drops in the order of `DropReason`."""
        return {reason.value: self.drops[reason.value] for reason in DropReason if self.drops[reason.value]}
