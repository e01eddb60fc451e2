"""Output folders of `tripletune eval` and their figures, for reports.

A folder may be of a finished or of a killed run. The figures of `eval run` are computed from its rows, so that tables
and plots agree; figures of other evaluations (records, extraction, decisions) are copied. All figures are JSON values;
an interval is `{"mean", "low", "high", "n"}`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from tripletune.eval.costs import COSTS as SUMMED
from tripletune.eval.costs import WEIGHTED, Costs, Prices, weighted
from tripletune.eval.metrics import recall
from tripletune.eval.results import METRICS, SETTINGS, mean_recalls, read_about, read_results, read_scored, recalls_of
from tripletune.eval.statistics import bootstrap_mean, bootstrap_means
from tripletune.rag.results import RESULTS, kept_facts
from tripletune.rag.systems.cirag import DEFAULT, GRANULARITIES

LEVELS = (*GRANULARITIES, DEFAULT)
COSTS = ("calls", "tokens_read", "tokens_written", WEIGHTED)
_CALLS = "calls."
_FACTS = ("facts_shown", "facts_kept", "answer_kept")
# Columns of `_row` -> parts of the trace that must be known for the column to be known.
_TOKENS = ("prompt_tokens", "completion_tokens")
_SUMS = {"calls": ("calls",), "sent": ("calls",), "tokens_read": _TOKENS[:1], "tokens_written": _TOKENS[1:],
         **dict.fromkeys(("tokens", WEIGHTED, "dollars"), _TOKENS), "seconds": ("seconds",)}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Run:
    """An output folder of `tripletune eval`.

    Attributes:
        about: `run.json`: the command, and the number of questions of a whole run.
        metrics: `metrics.json`; empty if the run did not end.
        rows: For `eval run`, one row per question with a result: the columns of `_row` and one column per score, None
            if unknown. Empty for other evaluations.
    """

    folder: str
    name: str
    settings: Mapping[str, Any]
    about: Mapping[str, Any]
    metrics: Mapping[str, Any]
    results: int = 0
    rows: pd.DataFrame = field(default_factory=pd.DataFrame)
    added: tuple[str, ...] = ()
    indexing: Mapping[str, Any] = field(default_factory=dict)
    roles: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @property
    def system(self) -> str:
        """Name of the system."""
        return str(self.settings["system"])

    @property
    def task(self) -> str:
        """The task's name."""
        return str(self.settings["task"]["name"])

    @property
    def scores(self) -> list[str]:
        """The task's metrics, the headline first, then the added scores."""
        return [*self.settings["task"]["metrics"], *self.added]

    @property
    def sessions(self) -> Sequence[Mapping[str, Any]]:
        """Time and code version of each session; empty for older runs."""
        return self.about.get("sessions") or ()

    @property
    def finished(self) -> bool:
        """Whether the run is complete."""
        return bool(self.metrics) and self.results == self.about.get("questions")


def named_folder(spec: str) -> tuple[str, Path]:
    """The name and folder of NAME=FOLDER; the name is empty for a folder alone."""
    name, equals, rest = spec.partition("=")
    return (name, Path(rest)) if equals and not Path(spec).exists() else ("", Path(spec))


def read_folder(spec: str, prices: Prices | None = None) -> Run:
    """Read one output folder; NAME=FOLDER gives it a name in the report."""
    name, path = named_folder(spec)
    if not path.is_dir():
        raise FileNotFoundError(f"no such folder: {path}")
    settings, about, metrics = read_about(path)
    results = path / RESULTS
    if not metrics and not (results.is_file() and settings):
        raise ValueError(
            f"{path} holds no results of `tripletune eval`: it has neither {METRICS} nor {RESULTS} with {SETTINGS}"
        )
    if "system" in settings and results.is_file():
        costs = Costs(prices or {})
        rows, added = _rows(path, settings, costs)
        run = Run(str(path), name, settings, about, metrics, len(rows), rows, added, costs.indexing, costs.roles)
        if len(rows) and untimed(run):
            rows["seconds"] = None
        return run
    count = sum(1 for _ in read_results(results, partial=True)) if results.is_file() else 0
    return Run(str(path), name, settings, about, metrics, count)


def figures_of(run: Run) -> dict[str, Any]:
    """All figures of a run that has results; figures that the results do not allow are None."""
    rows, metrics = run.rows, run.scores
    seconds, reason, facts = rows["seconds"], untimed(run), rows[list(_FACTS)].dropna()
    share = {"answer_kept": bootstrap_mean(facts["answer_kept"])}
    costs = {name: rows[name] for name in (*COSTS, "tokens", "sent", "dollars") if rows[name].notna().all()}
    return {
        "scores": _means_of(rows, metrics),
        "by_type": _slices(rows, "type", metrics),
        "by_hops": _slices(rows, "hops", metrics),
        "rounds": {
            "mean": bootstrap_mean(rows["rounds"], None),
            "questions": _counted(rows["rounds"]),
            "ended_by": _counted(rows["stop"]),
        },
        "cost": bootstrap_means(costs, None),
        "indexing": {} if run.settings["system"] == "answers" else weighted(run.indexing),
        "embedded": max((one.get("embedded", 0) for one in run.sessions), default=None),
        "roles": {role: _per_question(found, len(rows)) for role, found in run.roles.items() if found} or None,
        "latency": {"unknown": reason}
        if reason
        else {
            "mean": bootstrap_mean(seconds, None),
            "structuring": float(rows["structuring"].mean()),
            "percentiles": {str(share): float(seconds.quantile(share / 100)) for share in (10, 50, 90)},
            "questions_per_second": run.metrics.get("session", {}).get("questions_per_second"),
            "concurrency": run.about.get("concurrency"),
        },
        "granularity": _granularity(rows, metrics),
        "facts": bootstrap_means(facts, None) | share if len(facts) else None,
        "recall": mean_recalls(rows["recall"]) if rows["rounds"].any() else {},
        "kept": bootstrap_mean(rows["kept"].dropna()),
        "decisions": _decisions(rows),
        "errors": int(rows["failed"].sum()),
    }


def untimed(run: Run) -> str:
    """Why a run's seconds do not measure its system; empty if they do."""
    alone = [one.get("alone") for one in run.sessions] or [None]
    if False in alone:
        return "another evaluation used the machine at the time"
    if None in alone:
        return "it is not known whether another evaluation used the machine at the time"
    if spared := (run.rows["calls"].astype(float) - run.rows["sent"].astype(float)).sum():
        return f"{spared:,.0f} of its calls were not sent: the ledger had the replies"
    if run.rows["sent"].isna().any() and "--ledger" in str(run.about.get("command")):
        return "it is not known which of its calls the ledger answered"
    return "the file of answers has no seconds" if run.rows["seconds"].isna().any() else ""


def _rows(path: Path, settings: Mapping[str, Any], costs: Costs) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """The table of a folder's results, and the names of added scores."""
    found, added, metrics = [], dict[str, None](), settings["task"]["metrics"]
    for row in read_scored(path, partial=True):
        if row["answers"] and (lacking := [name for name in metrics if name not in row["scores"]]):
            raise ValueError(f"{path / RESULTS}: question {row['id']!r} has no score {', '.join(lacking)}")
        found.append({**dict.fromkeys(metrics), **row["scores"], **_row(row, costs)})
        added |= dict.fromkeys(name for name in row["scores"] if name not in metrics)
    return pd.DataFrame(found), tuple(added)


def _row(row: Mapping[str, Any], costs: Costs) -> dict[str, Any]:
    trace = row["trace"]
    details, steps = trace.get("details", {}), trace["steps"]
    wanted = set(row.get("supporting") or ())
    kept, own = details.get("core_passages"), costs.add(trace)
    facts = kept_facts(row)
    counts = (sum(len(step["triples"]) for step in steps), *facts) if facts else ()
    # A trace that does not note the roles of calls knows neither their prices nor which calls were sent.
    unknown = details.get("unknown", ())
    roles = sum(count for key, count in trace["tallies"].items() if key.startswith(_CALLS)) == trace["calls"]
    figures = {
        **{name: row[name] for name in ("id", "type", "question", "answers", "prediction")},
        "hops": len(wanted) or None,  # None if the supporting passages are not known
        "failed": bool(row["error"]),
        "rounds": len(steps),
        "stop": trace["stop_reason"] or "error",
        "calls": own["calls"],
        "tokens_read": own["prompt_tokens"],
        "tokens_written": own["completion_tokens"],
        "tokens": own["prompt_tokens"] + own["completion_tokens"],
        WEIGHTED: weighted(own)[WEIGHTED],
        "sent": own["calls"] - own["cached_calls"] if roles and "cached" in trace else None,
        # Dollars per 1,000 such questions.
        "dollars": 1000 * own["dollars"] if "dollars" in own and roles else None,
        "seconds": trace["seconds"],
        "structuring": trace.get("structuring_seconds", 0.0),
        "tallies": trace["tallies"],
        "malformed": trace["malformed"],
        "granularity": None if row["error"] else details.get("granularity"),
        **dict.fromkeys(_FACTS) | dict(zip(_FACTS, map(float, counts))),
        "recall": recalls_of(row),
        "kept": recall(kept, wanted) if wanted and not row["error"] and kept is not None else None,
    }
    # Answers of another program may lack some costs.
    return figures | {name: None for name, parts in _SUMS.items() if any(part in unknown for part in parts)}


def _counted(values: pd.Series) -> dict[str, int]:
    return {str(value): int(count) for value, count in values.value_counts().sort_index().items()}


def _means_of(rows: pd.DataFrame, metrics: Sequence[str]) -> dict[str, Any]:
    # Questions without known gold passages have no score of a ranking.
    return bootstrap_means({name: rows[name].dropna() for name in metrics})


def _slices(rows: pd.DataFrame, column: str, metrics: Sequence[str]) -> dict[str, Any] | None:
    """Scores by the values of a column; None if all rows have the same value."""
    parts = list(rows.dropna(subset=column).groupby(column))
    names = [f"{value:g}" if column == "hops" else value or "none" for value, _ in parts]
    return {name: _means_of(part, metrics) for name, (_, part) in zip(names, parts)} if len(parts) > 1 else None


def _per_question(sums: Mapping[str, int], questions: int) -> dict[str, float]:
    """`COSTS` of a role per question."""
    return {name: weighted(sums)[key] / questions for name, key in zip(COSTS, (*SUMMED, WEIGHTED))}


def _granularity(rows: pd.DataFrame, metrics: Sequence[str]) -> dict[str, Any] | None:
    """Share and scores of the questions that each level answered (CIRAG, figures 3 and 5)."""
    found = {}
    for level in LEVELS if rows["granularity"].isin(LEVELS).any() else ():
        # A failed question has no level but counts in the shares.
        chosen = rows["granularity"] == level
        found[level] = {"share": bootstrap_mean(chosen), **_means_of(rows[chosen], metrics)}
    return found or None


def _decisions(rows: pd.DataFrame) -> dict[str, int]:
    """Counts by name: the system's tallies, and unreadable decisions."""
    counts: Counter[str] = Counter(rounds=int(rows["rounds"].sum()), unreadable_decisions=int(rows["malformed"].sum()))
    for tallies in rows["tallies"]:
        # Calls and answers by granularity have separate tables.
        counts.update({key: n for key, n in tallies.items() if not key.startswith((_CALLS, "answered."))})
    return dict(sorted((name, n) for name, n in counts.items() if n))
