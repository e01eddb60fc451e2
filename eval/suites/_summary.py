"""What is told of all rows of `tripletune eval run`: scores with intervals, what the loop did, what it cost."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tripletune.eval.costs import Costs, Prices
from tripletune.eval.results import ResultLog
from tripletune.eval.statistics import bootstrap_mean, bootstrap_means
from tripletune.models.llm.replies import is_refusal

_SECONDS = ("seconds", "structuring_seconds")
_TRUNCATED = ("truncated_triples", "truncated_words")


def summarise_questions(log: ResultLog, names: tuple[str, ...], prices: Prices) -> dict[str, Any]:
    """Metrics of scored questions.

    Args:
        log: Its rows are streamed.
        names: The scores, the headline first.
        prices: See `eval.costs.read_prices`.
    """
    scores: dict[str, list[float]] = {name: [] for name in names}
    by_type: dict[str, list[float]] = {}
    stops, actions, tallies = Counter[str](), Counter[str](), Counter[str]()
    sums: Counter[str] = Counter()
    recalls: list[float] = []
    seconds, costs = Counter[str](), Costs(prices)
    for row in log.rows():
        trace, steps = row["trace"], row["trace"]["steps"]
        for name in names:
            scores[name].append(row["scores"][name])
        by_type.setdefault(row["type"] or "all", []).append(row["scores"][names[0]])
        if row["supporting_recall"] is not None:
            recalls.append(row["supporting_recall"])
        stops[trace["stop_reason"] or "error"] += 1
        actions.update(action["action"] or "malformed" for action in trace["actions"])
        tallies.update(trace["tallies"])
        sums.update({
            "errors": int(bool(row["error"])),
            "refusals": int(is_refusal(row["prediction"])),
            "malformed_plans": trace["malformed"],
            "unexpected_plans": trace["unexpected"],
            "rounds": len(steps),
            "passages": sum(len(step["passages"]) for step in steps),
            "passages_without_triples": sum(step["passages_without_triples"] for step in steps),
            "triples": sum(len(step["triples"]) for step in steps),
            **{name: trace[name] for name in _TRUNCATED},
        })  # fmt: skip
        seconds.update({name: trace.get(name, 0.0) for name in _SECONDS})
        costs.add(trace)
    total = len(scores[names[0]])
    cost = costs.questions | {name: sums[name] for name in _TRUNCATED}
    listed = {"stop_reasons": stops, "actions": actions, "tallies": tallies}
    return {
        "primary": names[0],
        "questions": total,
        "metrics": bootstrap_means(scores),
        "by_type": {kind: bootstrap_mean(values) for kind, values in sorted(by_type.items())},
        "supporting_recall": bootstrap_mean(recalls),
        "counts": {name: count for name, count in sums.items() if name not in _TRUNCATED}
        | {name: dict(sorted(counter.items())) for name, counter in listed.items()},
        "cost": cost,
        "cost_per_question": {name: round(value / total, 6 if "dollars" in name else 3) for name, value in cost.items()}
        | {name: round(seconds[name] / total, 4) for name in _SECONDS},
        "indexing": costs.indexing,
        "roles": list(costs.roles),
    }
