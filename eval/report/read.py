"""Reads what a report is made of: output folders of `tripletune eval`, whole or left by a run that was killed.

A folder of `eval run` becomes a `Run` with a table of its questions. Any other folder that holds a `metrics.json`
(records, extraction, decisions) becomes an `Other`, whose figures are taken as they stand.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from tripletune.eval.results import ABOUT, METRICS, RESULTS, SETTINGS, check_scores
from tripletune.models.files import read_json

_LOOKED_FOR = f"{METRICS}, or {RESULTS} with {SETTINGS}"


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
        found = self.about.get("questions")
        return len(self.rows) if self.finished and found is None else found


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
        read_json(path / file) if (path / file).is_file() else None for file in (SETTINGS, ABOUT, METRICS)
    )
    results = (path / RESULTS).is_file()
    if metrics is None and not (results and settings):
        raise ValueError(_no_results(path))
    if settings and "system" in settings and results:
        rows, cut_off = _rows(path / RESULTS, _scores_of(path, settings))
        expected = (about or {}).get("questions") or (metrics or {}).get("questions")
        finished = metrics is not None and not cut_off and len(rows) == expected
        session = (metrics or {}).get("session") or {}
        return Run(str(path), name, settings, about or {}, rows, finished, cut_off, session)
    if metrics is not None and "system" in metrics:
        raise ValueError(f"{path} has lost its {RESULTS} or {SETTINGS}: a report of a run needs both")
    count = len(_rows(path / RESULTS, None)[0]) if results else 0
    return Other(str(path), name, settings or {}, about or {}, metrics, count)


def _rows(path: Path, metrics: Sequence[str] | None) -> tuple[pd.DataFrame, bool]:
    """The whole lines of a results file, and whether a kill has left half a line at its end."""
    found: list[dict[str, Any]] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                return pd.DataFrame(found), True
            where = f"{path}:{number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{where}: not valid JSON ({error}); run the evaluation again") from None
            if not isinstance(row, dict) or "id" not in row:
                raise ValueError(f"{where}: not a result: it has no id")
            try:
                found.append({"id": row["id"]} if metrics is None else _row(where, row, metrics))
            except KeyError as error:
                raise ValueError(f"{where}: not a result of `tripletune eval run`: it has no {error}") from None
            except (TypeError, AttributeError) as error:
                raise ValueError(f"{where}: not a result of `tripletune eval run`: {error}") from None
    return pd.DataFrame(found), False


def _row(where: str, row: dict[str, Any], metrics: Sequence[str]) -> dict[str, Any]:
    trace = row["trace"]
    details, steps = trace.get("details", {}), trace["steps"]
    wanted = set(row.get("supporting") or ())
    known = bool(wanted) and not row["error"]
    kept = details.get("core_passages")
    check_scores(where, row)
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


def _scores_of(path: Path, settings: Mapping[str, Any]) -> list[str]:
    """The task's scores, the headline first."""
    task = settings.get("task")
    if not isinstance(task, dict) or not isinstance(task.get("name"), str) or not isinstance(task.get("metrics"), list):
        raise ValueError(f"{path / SETTINGS}: it names no task with its scores; run the evaluation again")
    return [str(name) for name in task["metrics"]]


def _no_results(path: Path) -> str:
    inside = sorted(part.name for part in path.iterdir() if part.is_dir() and (part / SETTINGS).is_file())
    if inside:
        more = f"; its folders {', '.join(inside[:4])} do: name those"
    else:
        names = sorted(part.name for part in path.iterdir())
        more = f" (it holds {', '.join(names[:6]) or 'nothing'})"
    return f"{path} holds no results of `tripletune eval`: there is no {_LOOKED_FOR}{more}"
