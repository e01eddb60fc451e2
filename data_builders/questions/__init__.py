"""Multi-hop questions: their kinds, and their rows in HotpotQA's layout with the gold decisions beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

CHAIN_KINDS: tuple[str, ...] = ("1-hop", "2-hop", "3-hop", "4-hop")
COMPARISON = "comparison"
INTERSECTION = "intersection"
# One that needs no retrieval.
COMMON = "common"
_LEVELS = {"1-hop": "easy", "3-hop": "hard", "4-hop": "hard", COMMON: "easy"}


def question_row(
    identity: str, kind: str, text: str, answer: str, facts: Sequence[tuple[str, int]], context: Mapping[str, list[str]]
) -> dict[str, Any]:
    """A question in HotpotQA's official layout.

    Args:
        facts: Titles and numbers of the sentences that support the answer, in reasoning order.
        context: Sentences by title, distractors included.
    """
    return {
        "_id": identity,
        "question": text,
        "answer": answer,
        "type": COMPARISON if kind == COMPARISON else "bridge",
        "level": _LEVELS.get(kind, "medium"),
        "supporting_facts": [list(fact) for fact in facts],
        "context": [list(passage) for passage in context.items()],
    }


def decision_row(
    identity: str, kind: str, subqueries: Mapping[str, str], triples: Mapping[str, list[list[str]]]
) -> dict[str, Any]:
    """The gold decisions of a question in the layout of recorded teacher replies, with its kind added.

    Args:
        subqueries: By the title of each helpful passage, in reasoning order.
        triples: By title.
    """
    return {
        "_id": identity,
        "helpful": list(subqueries),
        "subqueries": [{"title": title, "question": text} for title, text in subqueries.items()],
        "triples": dict(triples),
        "closed_book": "",
        "note": "",
        "kind": kind,
        **({"direct": True} if kind == COMMON else {}),
    }
