"""What a report is made of: output folders of `tripletune eval`, whole or left by a run that was killed.

A folder of `eval run` becomes a `Run` with a table of its questions. Any other folder that holds a `metrics.json`
(records, extraction, decisions) becomes an `Other`, whose figures are taken as they stand. The figures of a run are
computed from its rows, also for one that was killed, so that tables and plots agree with each other. They are JSON
values; an interval is `{"mean", "low", "high", "n"}`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from tripletune.eval.results import ABOUT, METRICS, RESULTS, SETTINGS, read_results
from tripletune.eval.statistics import bootstrap_mean
from tripletune.models.files import read_json
from tripletune.rag.systems.cirag import DEFAULT, GRANULARITIES

LEVELS = (*GRANULARITIES, DEFAULT)
COSTS = ("calls", "tokens_read", "tokens_written")
_CALLS = "calls."


@dataclass(frozen=True, slots=True)
class Run:
    """An output folder of `tripletune eval run`.

    Attributes:
        folder: As it was named.
        name: The name given on the command line, or empty.
        settings: `settings.json`: all that the results depend on.
        about: `run.json`: the command, and how many questions a whole run has.
        rows: The questions that have a result, one row each: `id`, `type`, a column per score (`f1`), `failed`,
            `rounds`, `stop`, `calls`, `tokens_read`, `tokens_written`, `seconds`, `tallies`, `malformed`, and, where
            they are known and else None, `tokens` (by role), `granularity`, `recall` (share of the supporting passages
            found up to each round) and `kept` (share that a kept triple comes from).
        finished: Whether the run came to its end, so that no question is missing.
        cut_off: Whether the last line was cut off by a kill.
        session: Speed of the last session, from `metrics.json`.
    """

    folder: str
    name: str
    settings: Mapping[str, Any]
    about: Mapping[str, Any]
    rows: pd.DataFrame
    finished: bool
    cut_off: bool
    session: Mapping[str, Any]

    @property
    def system(self) -> str:
        """The system's name."""
        return str(self.settings["system"])

    @property
    def task(self) -> str:
        """The task's name."""
        return str(self.settings["task"]["name"])

    @property
    def metrics(self) -> list[str]:
        """The task's scores, the headline first."""
        return list(self.settings["task"]["metrics"])

    @property
    def expected(self) -> int | None:
        """Questions of the whole run; None where nothing says so."""
        return self.about.get("questions")


@dataclass(frozen=True, slots=True)
class Other:
    """A folder of another evaluation; `metrics` is None when it was stopped before its end, `rows` counts results."""

    folder: str
    name: str
    settings: Mapping[str, Any]
    about: Mapping[str, Any]
    metrics: Mapping[str, Any] | None
    rows: int


def read_folder(spec: str) -> Run | Other:
    """Read one output folder.

    Args:
        spec: The folder, or NAME=FOLDER to give it a name in the report.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: it holds no results, or a file in it is damaged.
    """
    name, equals, rest = spec.partition("=")
    name, path = (name, Path(rest)) if equals and not Path(spec).exists() else ("", Path(spec))
    if not path.is_dir():
        raise FileNotFoundError(f"no such folder: {path}")
    settings, about, metrics = (
        read_json(path / file) if (path / file).is_file() else {} for file in (SETTINGS, ABOUT, METRICS)
    )
    results = path / RESULTS
    if not metrics and not (results.is_file() and settings):
        inside = sorted(part.parent.name for part in path.glob(f"*/{SETTINGS}"))
        more = f"; its folders {', '.join(inside[:4])} do: name those" if inside else ""
        raise ValueError(
            f"{path} holds no results of `tripletune eval`: there is no {METRICS}, or {RESULTS} with {SETTINGS}{more}"
        )
    if "system" in settings and results.is_file():
        rows, cut_off = _rows(results, settings), results.read_bytes()[-1:] not in (b"\n", b"")
        finished = bool(metrics) and not cut_off and len(rows) == about.get("questions")
        return Run(str(path), name, settings, about, rows, finished, cut_off, metrics.get("session") or {})
    if "system" in metrics:
        raise ValueError(f"{path} has lost its {RESULTS} or {SETTINGS}: a report of a run needs both")
    count = sum(1 for _ in read_results(results, partial=True)) if results.is_file() else 0
    return Other(str(path), name, settings, about, metrics or None, count)


def figures_of(run: Run) -> dict[str, Any]:
    """All figures of a run.

    Returns:
        `scores`, `by_type`, `rounds`, `cost`, `roles`, `latency`, `granularity`, `recall`, `decisions` and `errors`;
        those that its results do not allow are None. Nothing at all for a run without a result.
    """
    rows, metrics = run.rows, run.metrics
    if rows.empty:
        return {}
    types = {kind or "none": _means_of(part, metrics) for kind, part in rows.groupby("type")}
    seconds = rows["seconds"]
    return {
        "scores": _means_of(rows, metrics),
        "by_type": types if len(types) > 1 else None,
        "rounds": {
            "mean": _mean(rows["rounds"]),
            "questions": _counted(rows["rounds"]),
            "ended_by": _counted(rows["stop"]),
        },
        "cost": {name: _mean(rows[name]) for name in COSTS},
        "roles": _roles(rows),
        "latency": {
            "mean": _mean(seconds),
            "percentiles": {str(share): float(seconds.quantile(share / 100)) for share in (10, 50, 90)},
            "questions_per_second": run.session.get("questions_per_second"),
            "concurrency": run.about.get("concurrency"),
        },
        "granularity": _granularity(rows, metrics),
        "recall": _recall_by_round(rows),
        "decisions": _decisions(rows),
        "errors": int(rows["failed"].sum()),
    }


def _rows(path: Path, settings: Mapping[str, Any]) -> pd.DataFrame:
    """The table of a results file."""
    found = []
    for number, row in enumerate(read_results(path, partial=True), 1):
        try:
            found.append(_row(row, settings["task"]["metrics"]))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}:{number}: not a result of `tripletune eval run`: {error!r}") from None
    return pd.DataFrame(found)


def _row(row: Mapping[str, Any], metrics: Sequence[str]) -> dict[str, Any]:
    trace = row["trace"]
    details, steps = trace.get("details", {}), trace["steps"]
    wanted = set(row.get("supporting") or ())
    known = bool(wanted) and not row["error"]
    kept = details.get("core_passages")
    return {
        "id": row["id"],
        "type": row["type"] or "",
        **{name: row["scores"][name] for name in metrics},
        "failed": bool(row["error"]),
        "rounds": len(steps),
        "stop": trace["stop_reason"] or "error",
        "calls": trace["calls"],
        "tokens_read": trace["prompt_tokens"],
        "tokens_written": trace["completion_tokens"],
        "tokens": details.get("tokens"),
        "seconds": trace["seconds"],
        "tallies": trace["tallies"],
        "malformed": trace["malformed"],
        "granularity": details.get("granularity"),
        "recall": _recall(steps, wanted) if known and steps else None,
        "kept": len(wanted & set(kept)) / len(wanted) if known and kept is not None else None,
    }


def _recall(steps: Sequence[Mapping[str, Any]], wanted: set[str]) -> list[float]:
    found: set[str] = set()
    shares = []
    for step in steps:
        found |= wanted & {passage["id"] for passage in step["passages"]}
        shares.append(len(found) / len(wanted))
    return shares


def _mean(values: Iterable[float]) -> dict[str, Any]:
    return bootstrap_mean([float(value) for value in values])


def _counted(values: pd.Series) -> dict[str, int]:
    return {str(value): int(count) for value, count in values.value_counts().sort_index().items()}


def _means_of(rows: pd.DataFrame, metrics: Sequence[str]) -> dict[str, Any]:
    return {name: _mean(rows[name]) for name in metrics}


def _roles(rows: pd.DataFrame) -> dict[str, dict[str, float]] | None:
    """Calls, tokens read and tokens written per question, by role, in the order in which questions meet them."""
    sums: dict[str, Counter[str]] = {}
    for tallies, used in zip(rows["tallies"], rows["tokens"]):
        for key, count in tallies.items():
            if key.startswith(_CALLS):
                role = key.removeprefix(_CALLS)
                costs = (count, *((used or {}).get(role) or (0, 0)))
                sums.setdefault(role, Counter()).update(dict(zip(COSTS, costs)))
    return {role: {name: found[name] / len(rows) for name in COSTS} for role, found in sums.items()} or None


def _granularity(rows: pd.DataFrame, metrics: Sequence[str]) -> dict[str, Any] | None:
    """Share of the questions each level answered, and how well (CIRAG, figures 3 and 5)."""
    # A question that failed has no level and stays in the denominator of the shares.
    levels = {level: rows["granularity"] == level for level in LEVELS}
    if not any(chosen.any() for chosen in levels.values()):
        return None
    return {level: {"share": _mean(chosen), **_means_of(rows[chosen], metrics)} for level, chosen in levels.items()}


def _recall_by_round(rows: pd.DataFrame) -> dict[str, Any] | None:
    """Recall of the supporting passages up to each round; a question that has ended keeps its last value."""
    known = rows["recall"].dropna()
    if known.empty:
        return None
    return {
        "by_round": {
            str(number): _mean(shares[min(number, len(shares)) - 1] for shares in known)
            for number in range(1, known.map(len).max() + 1)
        },
        "kept": _mean(rows["kept"].dropna()),
    }


def _decisions(rows: pd.DataFrame) -> dict[str, int]:
    """What was noted, by name: the system's tallies, and decisions that cannot be read."""
    counts: Counter[str] = Counter(rounds=int(rows["rounds"].sum()), unreadable_decisions=int(rows["malformed"].sum()))
    for tallies in rows["tallies"]:
        # Calls and answers by granularity have tables of their own.
        counts.update({key: n for key, n in tallies.items() if not key.startswith((_CALLS, "answered."))})
    return dict(sorted((name, n) for name, n in counts.items() if n))
