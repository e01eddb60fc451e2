"""Build questions over a custom corpus; these kinds of questions are also those of the fictional world."""

from __future__ import annotations

from typing import Final, Literal

QuestionKind = Literal["1-hop", "2-hop", "3-hop", "4-hop", "comparison", "intersection"]

CHAIN_KINDS: tuple[QuestionKind, ...] = ("1-hop", "2-hop", "3-hop", "4-hop")
COMPARISON: Final = "comparison"
INTERSECTION: Final = "intersection"
# In the order of the card's table.
QUESTION_KINDS: tuple[QuestionKind, ...] = (*CHAIN_KINDS, COMPARISON, INTERSECTION)
