"""Options of `tripletune build questions`.

Tested in `tests/data_builders/questions/test_build.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

from tripletune.core.options import CheckedOptions, rare, setting
from tripletune.data_builders.questions import QUESTION_KINDS, QuestionKind

TRAIN, TEST = "train", "test"
_WEIGHTS = "1-hop=25,2-hop=40,3-hop=12,4-hop=5,comparison=10,intersection=8"


@dataclass(frozen=True, slots=True)
class QuestionBuildOptions(CheckedOptions):
    """What questions to make."""

    corpus: str = field(metadata={"help": "passages: JSON lines, or the folder of `build passages`"})
    triples: str = field(metadata={"help": "triples of the passages: a store of `rag extract`, or JSON lines"})
    count: int = setting(500, "questions to make, including held-out questions", at_least=1)
    holdout: float = setting(
        0.2, "share of test questions; their documents have the same share of the facts", at_least=0, below=1
    )
    seed: int = setting(0, "seed of split and draws")
    kinds: str = setting(_WEIGHTS, "weights of the kinds of questions; if a kind runs out, other kinds replace it")
    tries: float = setting(3.0, "maximum drafts per question, since some are rejected", at_least=1)
    context: int = setting(10, "passages in the context of a question, distractors included", at_least=4)
    prompts: str | None = setting(
        None, "folder of custom prompts: any of questions_word.md, questions_read.md, questions_recall.md"
    )
    copied: int = rare(8, "reject a question that shares N consecutive words with a passage", at_least=2)

    def check(self) -> list[str]:
        """The problem that `kinds` can't be read."""
        problem = (
            f"kinds: {self.kinds!r} is not like {_WEIGHTS}: set weights above 0 for some of {', '.join(QUESTION_KINDS)}"
        )
        try:
            weights = self.weights()
        except ValueError:
            return [problem]
        if not weights.keys() <= set(QUESTION_KINDS) or min(weights.values()) <= 0:
            return [problem]
        return []

    def weights(self) -> dict[QuestionKind, float]:
        """The weight of each kind; a `ValueError` if `kinds` has other text than NAME=NUMBER between its commas."""
        weights: dict[QuestionKind, float] = {}
        for entry in self.kinds.split(","):
            name, weight = entry.split("=")
            # `check` refuses other names.
            weights[cast(QuestionKind, name.strip())] = float(weight)
        return weights

    def wanted(self) -> dict[str, int]:
        """Number of questions per split; a split without questions is not in it."""
        held_out = round(self.count * self.holdout)
        numbers = {}
        if held_out < self.count:
            numbers[TRAIN] = self.count - held_out
        if held_out:
            numbers[TEST] = held_out
        return numbers
