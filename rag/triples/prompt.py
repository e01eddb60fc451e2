"""What an extractor is asked: an instruction, examples as turns of the chat, and the text.

A trained extractor gets the instruction it was trained with. One that was not trained gets that of a teacher
(`rag/prompts/extract_triples.md`), which explains the format, and examples if it is to have some.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tripletune.models.data.pairs import NO_FACTS, extraction_chat, read_pairs
from tripletune.models.llm.client import Message

TEACHER_PROMPT = Path(__file__).parents[1] / "prompts" / "extract_triples.md"
# Examples that a small model can follow: some facts, and not so long that they fill its context.
_SHOT_TRIPLES, _SHOT_CHARACTERS = (2, 8), 400


@dataclass(frozen=True, slots=True)
class ExtractionPrompt:
    """An instruction with examples.

    Attributes:
        instruction: The system's turn.
        shots: Examples: the source text and the reply to it.
    """

    instruction: str
    shots: tuple[tuple[str, str], ...] = ()

    def chat(self, source_text: str) -> list[Message]:
        """The chat that asks for the triples of a text from `models.extraction_pairs.render_source`."""
        system, user = extraction_chat(source_text, self.instruction)
        turns: list[Message] = [system]
        for text, reply in self.shots:
            turns += [{"role": "user", "content": text}, {"role": "assistant", "content": reply or NO_FACTS}]
        return [*turns, user]

    def to_json(self) -> dict[str, Any]:
        """What replies depend on, for the settings of a store or a run."""
        shots = {"shots": [list(shot) for shot in self.shots]} if self.shots else {}
        return {"instruction": self.instruction, **shots}


def choose_shots(data: str | Path, count: int, split: str | None = "train") -> tuple[tuple[str, str], ...]:
    """Examples out of training pairs: short texts with two to eight triples, those with the smallest hashes.

    The choice depends on the texts alone, not on their order. Memory does not grow with the pairs.

    Args:
        data: Folder or file of text-to-triples pairs.
        count: How many examples; 0 reads nothing.
        split: Split of a folder.

    Returns:
        Source texts and replies.

    Raises:
        FileNotFoundError: there are no such pairs.
        ValueError: too few pairs are fit for examples.
    """
    if not count:
        return ()
    least, most = _SHOT_TRIPLES
    fit = (
        (hashlib.sha256(pair.source_text.encode(errors="replace")).digest(), pair.source_text, pair.target)
        for pair in read_pairs(data, split)
        if least <= len(pair.triples) <= most and len(pair.source_text) <= _SHOT_CHARACTERS
    )
    chosen: Sequence[tuple[bytes, str, str]] = heapq.nsmallest(count, fit)
    distinct = {digest: (text, target) for digest, text, target in chosen}
    if len(distinct) < count:
        raise ValueError(
            f"{data}: only {len(distinct)} of {count} examples found; they need {least} to {most} triples and at most "
            f"{_SHOT_CHARACTERS} characters: take fewer, or another folder"
        )
    return tuple(distinct.values())
