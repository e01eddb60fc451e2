"""Read the labels that a reply selects from a list (TH-RAG)."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from tripletune.core.calls import UnusableReply
from tripletune.llm.reading.lines import lines_of, unquoted
from tripletune.llm.reply_json import json_values, nested_lists


def read_labels(reply: str, allowed: Collection[str], advice: str) -> list[str]:
    """Read the labels that a reply selects from `allowed` (compared without case), from JSON, bullets, or commas.

    Of several lists, that with most allowed labels counts, so that a list of reasons is not taken for the selection.
    Labels that are not allowed are returned, too, so that the caller can count them. An empty list is a valid reply.

    Raises:
        UnusableReply: "no_labels": the reply has no list and names no allowed label; `advice` is sent to the model.
    """
    names = {_plain_label(name) for name in allowed}
    values = json_values(reply, dict, list)
    lists = [_labels_in(value) for value in nested_lists(values)]
    if not lists and values:
        raise UnusableReply("no_labels", f"There is no list in the JSON; {advice}.")
    if not lists:
        texts = [line.text for line in lines_of(reply) if line.text]
        by_line = [unquoted(text.rstrip(",;.")) for text in texts]
        lists = [[label for label in by_line if _plain_label(label) in names]]
        for text in texts:
            lists.append([unquoted(label) for label in re.split(r"[,;]", text.rstrip("."))])

    def count_allowed(labels: Sequence[str]) -> int:
        """How many of the labels are allowed."""
        return sum(_plain_label(label) in names for label in labels)

    best = max(lists, key=count_allowed)
    if not values and not count_allowed(best):
        raise UnusableReply("no_labels", f"There is no list of labels; {advice}.")
    return best


def _plain_label(label: str) -> str:
    """A label as it is compared: without case, and with single spaces."""
    return " ".join(label.split()).casefold()


def _labels_in(values: Sequence[object]) -> list[str]:
    """The labels in the values of a JSON list: texts, numbers, or objects whose first value is the label."""
    labels = []
    for value in values:
        if isinstance(value, dict):
            value = next(iter(value.values()), None)
        if isinstance(value, str | int | float):
            labels.append(str(value))
    return labels
