"""Rows and batches of a preferred and a rejected reply to one prompt, for TRL's `DPOTrainer`.

Shapes: B pairs of a batch, T tokens of the longest row.

Tested in `tests/train/test_preference.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from tripletune.core.data.pairs import Trajectory
from tripletune.core.data.records import IGNORED, Record
from tripletune.core.data.rendering import parse_plan
from tripletune.train.rows.cache import Row

# The name of the count of pairs of which not both replies become one row each.
PAIRS_LEFT_OUT = "pairs_left_out"


def rows_of_pairs(
    examples: Iterable[Record | Trajectory], counts: Counter[str], make: Callable[..., Iterator[Row]]
) -> Iterator[Row]:
    """Make rows of preferred replies with `make`, and add tokens and labels of the rejected reply to each row.

    A pair is left out, and counted as `PAIRS_LEFT_OUT`, if not exactly one row comes of each reply.
    """
    for example in examples:
        preferred = list(make([example], counts))
        # The rejected reply has no counts of its own: they would count its example twice.
        rejected = list(make([with_rejected_reply(example)], Counter()))
        if len(preferred) != 1 or len(rejected) != 1:
            counts[PAIRS_LEFT_OUT] += 1
            continue
        row = preferred[0]
        row["rejected_input_ids"] = rejected[0]["input_ids"]
        row["rejected_labels"] = rejected[0]["labels"]
        row["length"] = max(row["length"], rejected[0]["length"])
        yield row


def with_rejected_reply(example: Record | Trajectory) -> Record | Trajectory:
    """Return the example with its rejected reply as the reply to learn, so that both replies take the same way to rows.

    A plan is stored as text, but a record holds action and sub-query; a text that is no plan can't be one.
    """
    if isinstance(example, Trajectory):
        return replace(example, messages=(*example.messages[:-1], {"role": "assistant", "content": example.rejected}))
    plan = parse_plan(example.rejected)
    if plan.action is None:
        raise ValueError(f"record {example.id!r}: the rejected reply {example.rejected!r} is not a plan")
    return replace(example, action=plan.action, subquery=plan.subquery)


def pair_batch(collate: Callable[..., dict[str, Any]], rows: Sequence[Row]) -> dict[str, Any]:
    """Collate pairs into a batch for TRL: first all preferred replies, then all rejected replies.

    Returns:
        `input_ids`, `attention_mask` and `completion_mask` (2B, T), and the `graphs` that `collate` makes, if any.
    """
    rejected = []
    for row in rows:
        rejected.append({**row, "input_ids": row["rejected_input_ids"], "labels": row["rejected_labels"]})
    batch = collate([*rows, *rejected])
    learned = (batch["labels"] != IGNORED).long()
    inputs = {"input_ids": batch["input_ids"], "attention_mask": torch.ones_like(learned), "completion_mask": learned}
    if "graphs" in batch:
        inputs["graphs"] = batch["graphs"]
    return inputs
