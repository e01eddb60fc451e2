"""Scores a model on SUBQ records, each with its gold history: the planner's decisions and the answers.

No retrieval runs, so this is fast and is what training watches. A planning record asks for one action; with the
paper's q_0 = Q the records without history all have the label `[SUBQ] Q`, which is why every planning score is also
given for the records that have at least one step. Intervals draw whole questions, because the records of one
question share most of their text.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from typing import Any, Protocol

from tripletune.eval.metrics import exact_match, f1, f1_hotpotqa
from tripletune.eval.statistics import RESAMPLES, bootstrap_mean
from tripletune.models.data.records import Action, ModelInput, Record
from tripletune.models.local.generation import Completion
from tripletune.models.prompts.rendering import parse_plan

MALFORMED = "malformed"
_LABELS = [action.value for action in Action]


class BatchGenerator(Protocol):
    """A model that replies to many inputs at once."""

    def generate_many(
        self, samples: list[ModelInput], max_new_tokens: int, evidence: str | None = None
    ) -> list[Completion]:
        """Reply to the inputs, in their order."""
        ...


def score_predictions(records: Iterable[Record], replies: Iterable[str], resamples: int = RESAMPLES) -> dict[str, Any]:
    """Score replies to records.

    Args:
        records: Planning and answering records, in any mixture.
        replies: The model's reply to each.
        resamples: Bootstrap samples of the intervals.

    Returns:
        `{"planning": {...}, "answering": {...}}`, see `summarise`.

    Raises:
        ValueError: there is not one reply for each record.
    """
    try:
        rows = [score_record(record, reply) for record, reply in zip(records, replies, strict=True)]
    except ValueError as error:
        if "zip()" not in str(error):
            raise
        raise ValueError(f"there must be one reply for each record: {error}") from None
    return summarise(rows, resamples)


def score_record(record: Record, reply: str) -> dict[str, Any]:
    """One row: what was asked, what was replied, and its scores."""
    row: dict[str, Any] = {
        "id": record.id,
        "question_id": record.question_id,
        "task": record.task,
        "history": len(record.steps),
        "gold": record.label,
        "reply": reply,
    }
    if record.task == "answering":
        answer = reply.strip()
        scored = ((metric.__name__, metric(answer, record.answers)) for metric in (exact_match, f1, f1_hotpotqa))
        return row | {"scores": dict(scored)}
    plan = parse_plan(reply)
    scores = {"action_accuracy": float(plan.action is record.action), MALFORMED: float(plan.malformed)}
    if record.action is Action.SUBQ:
        scores["subquery_f1"] = f1(plan.subquery, (record.subquery,)) if plan.action is Action.SUBQ else 0.0
    return row | {
        "gold_action": record.action.value,
        "action": plan.action.value if plan.action else MALFORMED,
        "scores": scores,
    }


def summarise(rows: Iterable[Mapping[str, Any]], resamples: int = RESAMPLES) -> dict[str, Any]:
    """Metrics of scored rows.

    Args:
        rows: Rows of `score_record`, streamed.
        resamples: Bootstrap samples of the intervals.

    Returns:
        Planning: `records`, `malformed`, `action_accuracy` and `subquery_f1` (another action than `[SUBQ]` scores 0),
        both also `_with_history`, `action_accuracy_by_label`, `action_accuracy_by_history` (number of steps) and
        `confusion` (gold action -> predicted action -> count). Answering: `records`, `exact_match`, `f1`,
        `f1_hotpotqa`. Scores are `{"mean", "low", "high", "n"}`, with None where there are no records.
    """
    values: dict[str, list[tuple[str, float]]] = defaultdict(list)
    confusion = {gold: dict.fromkeys([*_LABELS, MALFORMED], 0) for gold in _LABELS}
    records = {"planning": 0, "answering": 0}
    for row in rows:
        records[row["task"]] += 1
        for name, score in row["scores"].items():
            for key in _groups(row, name):
                values[key].append((row["question_id"], score))
        if row["task"] == "planning":
            confusion[row["gold_action"]][row["action"]] += 1

    def interval(key: str) -> dict[str, Any]:
        found = values.get(key, [])
        questions = [question for question, _ in found]
        return bootstrap_mean([score for _, score in found], questions, resamples).to_json()

    def family(prefix: str) -> dict[str, Any]:
        return {key.removeprefix(prefix): interval(key) for key in sorted(values) if key.startswith(prefix)}

    planning = {
        name: interval(name)
        for name in (
            "action_accuracy",
            "action_accuracy_with_history",
            "subquery_f1",
            "subquery_f1_with_history",
            MALFORMED,
        )
    }
    return {
        "planning": {
            "records": records["planning"],
            **planning,
            "action_accuracy_by_label": family("label:"),
            "action_accuracy_by_history": family("history:"),
            "confusion": confusion,
        },
        "answering": {
            "records": records["answering"],
            **{name: interval(name) for name in ("exact_match", "f1", "f1_hotpotqa")},
        },
    }


def flatten(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The means alone, as `planning/action_accuracy` and so on: what a training log records."""
    flat: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, Mapping) and "mean" in value:
            if value["mean"] is not None:
                flat[f"{prefix}{name}"] = value["mean"]
        elif isinstance(value, Mapping) and name != "confusion":
            flat |= flatten(value, f"{prefix}{name}/")
    return flat


def predict_records(
    records: Iterable[Record],
    generator: BatchGenerator,
    batch: int = 128,
    evidence: str | None = None,
    max_plan_tokens: int = 64,
    max_answer_tokens: int = 100,
) -> Iterator[dict[str, Any]]:
    """Reply to records and score the replies, `batch` records at a time.

    Args:
        records: Streamed; only one batch is in memory.
        generator: The model; it may split a batch further.
        batch: Records handed over at once; larger ones are grouped better by length.
        evidence: "triples" or "text"; None keeps the model's own setting.
        max_plan_tokens: Longest planning reply.
        max_answer_tokens: Longest answer.

    Yields:
        Rows of `score_record` with the cost of the call; within a batch the planning records come first.
    """
    stream = iter(records)
    while block := list(islice(stream, batch)):
        block.sort(key=lambda record: record.task != "planning")
        for task, group in groupby(block, key=lambda record: record.task):
            members = list(group)
            limit = max_plan_tokens if task == "planning" else max_answer_tokens
            completions = generator.generate_many([record.input for record in members], limit, evidence)
            for record, completion in zip(members, completions, strict=True):
                yield score_record(record, completion.text) | {
                    "prompt_tokens": completion.prompt_tokens,
                    "completion_tokens": completion.completion_tokens,
                    "truncated_triples": completion.truncated_triples,
                    "truncated_words": completion.truncated_words,
                    "seconds": completion.seconds,
                }


def evaluate_records(
    records: Sequence[Record],
    generator: BatchGenerator,
    batch: int = 128,
    evidence: str | None = None,
    max_plan_tokens: int = 64,
    max_answer_tokens: int = 100,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Reply to records and score the replies.

    Args:
        records: The records.
        generator: The model.
        batch: Records handed over at once.
        evidence: "triples" or "text"; None keeps the model's own setting.
        max_plan_tokens: Longest planning reply.
        max_answer_tokens: Longest answer.

    Returns:
        The rows in the order of the records, and their metrics.
    """
    order = {record.id: number for number, record in enumerate(records)}
    predicted = predict_records(records, generator, batch, evidence, max_plan_tokens, max_answer_tokens)
    rows = sorted(predicted, key=lambda row: order[row["id"]])
    return rows, summarise(rows)


def _groups(row: Mapping[str, Any], name: str) -> list[str]:
    """The metrics a score counts in."""
    keys = [name]
    if row["task"] == "planning":
        if row["history"] and name != MALFORMED:
            keys.append(f"{name}_with_history")
        if name == "action_accuracy":
            keys += [f"label:{row['gold_action']}", f"history:{row['history']}"]
    return keys
