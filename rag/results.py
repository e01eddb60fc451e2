"""Read the `results.jsonl` of `tripletune eval run`, one question and its `Trace` per row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tripletune.core.data.answers import mentions, normalize_answer
from tripletune.core.data.fields import checked
from tripletune.core.data.jsonl import read_jsonl

RESULTS = "results.jsonl"
_DETAILS = {
    **{"granularity?": str, "ranking?": [str], "core_passages?": [str], "unknown?": [str]},
    **{"calls?": {"": [str]}, "tokens?": {"": [int]}, "index?": {"": [int]}, "read?": {"": [list]}},
}
_TRACE = {
    "question": str,
    "steps": [{"query": str, "passages": [{"id": str}], "triples": list}],
    "actions": [{"action?": str, "subquery": str}],
    "stop_reason": str,
    **dict.fromkeys(("malformed", "unexpected", "calls", "prompt_tokens", "completion_tokens"), int),
    **{"seconds": float, "structuring_seconds?": float},
    **{"tallies": {"": int}, "details": _DETAILS, "cached?": {"": [int]}, "shown?": [str]},
}
_ROW = {
    **dict.fromkeys(("id", "question", "prediction", "error", "type"), str),
    **{"answers": [str], "short_answers?": [[str]], "scores": {"": float}, "trace": _TRACE},
    **{"supporting?": [str], "supporting_recall?": float},
}


def read_runs(path: str | Path, *needed: str, partial: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """Stream the rows as `("file:line", row)` and check their types; `needed` (default: all) fields are required."""
    named = ("id", *needed) if needed else _ROW
    layout = {name if name in named else f"{name.removesuffix('?')}?": one for name, one in _ROW.items()}
    for where, row in read_jsonl(path, partial):
        checked(row, where, layout)
        if wrong := [name for name, score in row.get("scores", {}).items() if not 0 <= score <= 1]:
            raise ValueError(f"{where}: score {wrong[0]} is {row['scores'][wrong[0]]}, but scores are from 0 to 1")
        yield where, row


def kept_facts(row: Mapping[str, Any]) -> tuple[int, bool] | None:
    """How many facts CIRAG kept, and whether one names a gold answer; None if it failed, or an answer is yes or no."""
    rounds, answers = row["trace"].get("details", {}).get("rounds"), row.get("answers", ())
    closed = any(normalize_answer(answer) in ("yes", "no", "noanswer") for answer in answers)
    if rounds is None or row.get("error") or closed or not answers:
        return None
    facts = [" ".join(triple) for one in rounds for triple in one.get("core_triples", ())]
    return len(facts), any(mentions(fact, answer) for fact in facts for answer in answers)
