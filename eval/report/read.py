"""Reads what a report is made of: output folders of `tripletune eval`, whole or left by a run that was killed.

A folder of `eval run` becomes a `Run`, with one small `Row` a question. Any other folder that holds a `metrics.json`
(records, extraction, decisions) becomes an `Other`, whose figures are taken as they stand.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tripletune.eval.results import ABOUT, METRICS, RESULTS, SETTINGS

_LOOKED_FOR = f"{METRICS}, or {RESULTS} with {SETTINGS}"


@dataclass(frozen=True, slots=True)
class Row:
    """One question of a run.

    Attributes:
        id: The question.
        type: The benchmark's question type, or empty.
        scores: By metric.
        failed: Whether it ended with an error; its scores are 0.
        rounds: Rounds of retrieval.
        stop: Why the rounds ended.
        cost: Calls, tokens read and tokens written.
        tokens: Tokens read and written by role; None where the system does not note them.
        seconds: Wall-clock seconds, waiting for other questions included.
        tallies: The system's own counts.
        malformed: Decisions that could not be read.
        granularity: What CIRAG answered from; None for other systems.
        recall: Share of the supporting passages found up to each round; None where that is not known.
        kept: Share of the supporting passages that a kept triple comes from; None where that is not known.
    """

    id: str
    type: str
    scores: Mapping[str, float]
    failed: bool
    rounds: int
    stop: str
    cost: tuple[int, int, int]
    tokens: Mapping[str, Sequence[int]] | None
    seconds: float
    tallies: Mapping[str, int]
    malformed: int
    granularity: str | None
    recall: tuple[float, ...] | None
    kept: float | None


@dataclass(frozen=True, slots=True)
class Run:
    """An output folder of `tripletune eval run`.

    Attributes:
        folder: As it was named.
        name: The name given on the command line, or empty.
        settings: `settings.json`: all that the results depend on.
        about: `run.json`: the command, and how many questions a whole run has; empty for older results.
        rows: The questions that have a result.
        finished: Whether the run came to its end, so that no question is missing.
        cut_off: Whether the last line was cut off by a kill.
        session: Speed of the last session, from `metrics.json`.
    """

    folder: str
    name: str
    settings: Mapping[str, Any]
    about: Mapping[str, Any]
    rows: tuple[Row, ...]
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
    """A folder of another evaluation.

    Attributes:
        folder: As it was named.
        name: The name given on the command line, or empty.
        settings: `settings.json`, or empty.
        about: `run.json`, or empty.
        metrics: `metrics.json`; None when the evaluation was stopped before its end.
        rows: How many results there are.
    """

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
    settings, about, metrics = (_object(path / file) for file in (SETTINGS, ABOUT, METRICS))
    if metrics is None and not ((path / RESULTS).is_file() and settings):
        raise ValueError(_no_results(path))
    folder = str(path)
    if settings and "system" in settings and (path / RESULTS).is_file():
        lines = _Lines(path / RESULTS)
        scores = _scores_of(path, settings)
        rows = tuple(_row(where, row, scores) for where, row in lines)
        expected = (about or {}).get("questions") or (metrics or {}).get("questions")
        finished = metrics is not None and not lines.cut_off and len(rows) == expected
        session = (metrics or {}).get("session") or {}
        return Run(folder, name, settings, about or {}, rows, finished, lines.cut_off, session)
    if metrics is not None and "system" in metrics:
        raise ValueError(f"{path} has lost its {RESULTS} or {SETTINGS}: a report of a run needs both")
    results = sum(1 for _ in _Lines(path / RESULTS)) if (path / RESULTS).is_file() else 0
    return Other(folder, name, settings or {}, about or {}, metrics, results)


class _Lines:
    """The whole lines of a results file, which a killed run may have left with half a line at its end."""

    def __init__(self, path: Path) -> None:
        self.path, self.cut_off = path, False

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any]]]:
        with self.path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith(b"\n"):
                    self.cut_off = True
                    return
                where = f"{self.path}:{number}"
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise ValueError(f"{where}: not valid JSON ({error}); run the evaluation again") from None
                if not isinstance(row, dict) or "id" not in row:
                    raise ValueError(f"{where}: not a result: it has no id")
                yield where, row


def _scores_of(path: Path, settings: Mapping[str, Any]) -> list[str]:
    """The task's scores, the headline first."""
    task = settings.get("task")
    if not isinstance(task, dict) or not isinstance(task.get("name"), str) or not isinstance(task.get("metrics"), list):
        raise ValueError(f"{path / SETTINGS}: it names no task with its scores; run the evaluation again")
    return [str(name) for name in task["metrics"]]


def _row(where: str, row: dict[str, Any], metrics: Sequence[str]) -> Row:
    try:
        trace = row["trace"]
        details, steps = trace.get("details", {}), trace["steps"]
        wanted = set(row.get("supporting") or ())
        known = bool(wanted) and not row["error"]
        kept = details.get("core_passages")
        return Row(
            id=row["id"],
            type=row["type"] or "",
            scores={name: row["scores"][name] for name in metrics},
            failed=bool(row["error"]),
            rounds=len(steps),
            stop=trace["stop_reason"] or "error",
            cost=(trace["calls"], trace["prompt_tokens"], trace["completion_tokens"]),
            tokens=details.get("tokens"),
            seconds=trace["seconds"],
            tallies=trace.get("tallies", {}),
            malformed=trace["malformed"],
            granularity=details.get("granularity"),
            recall=_recall(steps, wanted) if known and steps else None,
            kept=len(wanted & set(kept)) / len(wanted) if known and kept is not None else None,
        )
    except KeyError as error:
        raise ValueError(f"{where}: not a result of `tripletune eval run`: it has no {error}") from None
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{where}: not a result of `tripletune eval run`: {error}") from None


def _recall(steps: Sequence[Mapping[str, Any]], wanted: set[str]) -> tuple[float, ...]:
    found: set[str] = set()
    shares = []
    for step in steps:
        found |= wanted & {passage["id"] for passage in step["passages"]}
        shares.append(len(found) / len(wanted))
    return tuple(shares)


def _object(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error}); is it a file of ours?") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def _no_results(path: Path) -> str:
    inside = sorted(part.name for part in path.iterdir() if part.is_dir() and (part / SETTINGS).is_file())
    if inside:
        more = f"; its folders {', '.join(inside[:4])} do: name those"
    else:
        names = sorted(part.name for part in path.iterdir())
        more = f" (it holds {', '.join(names[:6]) or 'nothing'})"
    return f"{path} holds no results of `tripletune eval`: there is no {_LOOKED_FOR}{more}"
