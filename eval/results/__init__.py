"""What the output folders of `tripletune eval` hold: a type for each file, written and read in this folder alone.

| file | content | type |
|---|---|---|
| `results.jsonl` | one item per line; of `eval run` a question | `rag.results.ResultRow` |
| `settings.json` | what the rows depend on | `RunSettings` |
| `run.json` | the command, and when it ran | `RunAbout` |
| `metrics.json` | scores and costs of a finished run | `RunMetrics` |
| `scores.jsonl` | scores that `eval score` has added | `AddedScores` |

`RunSettings` and `RunMetrics` describe `eval run`; other evaluations have other settings and figures, of which only the
common part has a type (`RunSettings.others`, `MetricsHead`). Folders of older revisions lack some fields, which are
then None or empty. `eval/result_log.py` writes the rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from tripletune.core.data.fields import checked
from tripletune.core.data.jsonl import read_jsonl
from tripletune.core.files import read_json
from tripletune.eval.metrics import recall
from tripletune.eval.results.metrics import MetricsHead, RunCounts, RunMetrics, SessionSpeed
from tripletune.eval.results.settings import ORACLE, ChatModel, LocalModel, RunSettings, SamplingSettings
from tripletune.eval.statistics import Interval, bootstrap_means
from tripletune.models.run_folders import Training
from tripletune.rag.results import RESULTS, ResultRow, fields_as_json, non_null_fields, present_values, read_result_rows

# All types are imported from here.
__all__ = [
    "ABOUT",
    "BUDGETS",
    "METRICS",
    "ORACLE",
    "RANKINGS",
    "SCORES",
    "SETTINGS",
    "AddedScores",
    "ChatModel",
    "LocalModel",
    "MetricsHead",
    "RunAbout",
    "RunCounts",
    "RunFiles",
    "RunMetrics",
    "RunSettings",
    "SamplingSettings",
    "Session",
    "SessionSpeed",
    "mean_recalls",
    "read_added_scores",
    "read_results",
    "read_rows_with_added_scores",
    "read_run_files",
    "recalls_of",
    "run_folders",
]

SETTINGS = "settings.json"
METRICS = "metrics.json"
ABOUT = "run.json"
SCORES = "scores.jsonl"
# Rankings whose recall is measured, in words, and the numbers of passages that count.
RANKINGS = {"first": "first search", "retrieved": "all retrieved", "shown": "shown to the reader"}
BUDGETS = (2, 5, 15)
# The layout of `run.json`, for `core.data.fields.checked`.
_SESSION = {"began": str, "version?": str, "commit?": str, "alone?": bool, "embedded?": int}
_ABOUT = {
    "questions?": int,
    "corpus?": str,
    "triples?": str,
    "concurrency?": int,
    "command?": [str],
    "sessions?": [_SESSION],
    "passes?": [str],
    "backends?": {"": str},
    "trainings?": {"": {"config": str, "seed": int}},
}
# The layout of what is read of `metrics.json` of any evaluation; all else is shown as it is.
_FIGURES = {
    "evaluation?": str,
    "task?": str,
    "system?": str,
    "primary?": str,
    "failed?": int,
    "counts?": {"errors?": int},
    "unreadable?": [{"role": str}],
    "cost_per_question?": dict,
    "cost_per_text?": dict,
    "session?": {"": float},
}


@dataclass(slots=True)
class Session:
    """One call of a command that has added rows to its folder.

    Attributes:
        began: Start in UTC, in ISO format.
        version: Version of this code; `commit` is its git commit, with "+changes" if files were changed.
        alone: Whether no other evaluation of this user ran on the machine; None if that is not known.
        embedded: Number of texts in the indexes of vectors.
    """

    began: str
    version: str | None = None
    commit: str | None = None
    alone: bool | None = None
    embedded: int | None = None

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Session:
        """Read a session of `run.json`; names of other versions are left out."""
        return cls(**non_null_fields(cls, values))

    def to_json(self) -> dict[str, Any]:
        """The session as JSON values, without those that are not known."""
        return present_values(fields_as_json(self))


@dataclass(slots=True, kw_only=True)
class RunAbout:
    """`run.json`: facts about a run that change no row.

    Attributes:
        command: The words of the command line, without secrets.
        questions: Number of items of the whole run.
        data: File or folder of the questions, as the command named it.
        corpus: File or folder of the passages, if the command named one.
        triples: File or store of the triples, if the command named one.
        concurrency: Batches of items in progress at once.
        sessions: The calls that have added rows, the first one first; empty for older runs.
        passes: When the calls began that left items waiting for a Batch API, in UTC, in ISO format.
        backends: Kinds of the chat models' backends by role ("": all other roles), if one of them is "batch".
        trainings: How the models of this machine were trained, by role ("model", "planner", "integrator"), as far as
            their folders say it.
    """

    command: list[str] = field(default_factory=list)
    questions: int | None = None
    data: str | None = None
    corpus: str | None = None
    triples: str | None = None
    concurrency: int | None = None
    sessions: list[Session] = field(default_factory=list)
    passes: list[str] = field(default_factory=list)
    backends: Mapping[str, str] = field(default_factory=dict)
    trainings: Mapping[str, Training] = field(default_factory=dict)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RunAbout:
        """Read `run.json`; what an older version did not note keeps its default, which stands for "not known"."""
        arguments = non_null_fields(cls, values)
        trainings = arguments.get("trainings", {})
        arguments["trainings"] = {role: Training(**training) for role, training in trainings.items()}
        arguments["sessions"] = list(map(Session.from_json, arguments.get("sessions", ())))
        return cls(**arguments)

    def to_json(self) -> dict[str, Any]:
        """The facts as JSON values, without those that are not known; `tests/stores` has files of earlier versions."""
        values = present_values(fields_as_json(self)) | {"sessions": [session.to_json() for session in self.sessions]}
        if self.trainings:
            values["trainings"] = {role: training._asdict() for role, training in self.trainings.items()}
        if not self.passes:
            del values["passes"]
        return values


@dataclass(slots=True)
class AddedScores:
    """A line of `scores.jsonl`: newer scores of a question.

    Attributes:
        links: Where the gold passages of a score of rankings are from: the digest of `--gold`, or words.
    """

    id: str
    scores: dict[str, float] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> AddedScores:
        """Read a line of the file of added scores; older lines have no links."""
        return cls(values["id"], values.get("scores") or {}, values.get("links") or {})

    def to_json(self) -> dict[str, Any]:
        """The line as JSON values, as `from_json` reads it."""
        return fields_as_json(self)


class RunFiles(NamedTuple):
    """The small files of a folder.

    Attributes:
        metrics: `metrics.json` as it stands, since every evaluation has other figures; empty if the run did not end.
        gold: Where the gold passages of added scores are from, in words; "" if no score needs them.
    """

    settings: RunSettings
    about: RunAbout
    metrics: Mapping[str, Any]
    gold: str = ""


def read_results(path: str | Path, partial: bool = False) -> Iterator[dict[str, Any]]:
    """Stream the rows of any evaluation; `partial` ignores a last line that a kill has cut off."""
    for where, row in read_jsonl(path, partial):
        checked(row, where, {"id": str, "scores?": {"": float}})
        yield row


def read_added_scores(folder: str | Path) -> dict[str, AddedScores]:
    """The added scores of a folder by question; empty if nothing was added (`tripletune eval score`)."""
    path = Path(folder) / SCORES
    if not path.is_file():
        return {}
    return {row["id"]: AddedScores.from_json(row) for row in read_results(path)}


def read_rows_with_added_scores(folder: str | Path, *needed: str, partial: bool = False) -> Iterator[ResultRow]:
    """Stream the rows of `eval run` with the newer scores of `tripletune eval score`.

    The newer scores lie in a file of their own, so that the results stay what the run has written. `needed` and
    `partial` are those of `rag.results.read_result_rows`.
    """
    added = read_added_scores(folder)
    for _, values in read_result_rows(Path(folder) / RESULTS, *needed, partial=partial):
        row = ResultRow.from_json(values)
        if row.id in added:
            row.scores = {**row.scores, **added[row.id].scores}
        yield row


def read_run_files(folder: str | Path) -> RunFiles:
    """Read settings, `run.json` and metrics of any evaluation; a file that is missing is empty."""
    path = Path(folder)
    about = _read_json_or_empty(path / ABOUT)
    checked(about, str(path / ABOUT), _ABOUT)
    metrics = _read_json_or_empty(path / METRICS)
    checked(metrics, str(path / METRICS), _FIGURES)
    sources: set[str] = set()
    for added in read_added_scores(path).values():
        sources.update(added.links.values())
    settings = RunSettings.from_json(_read_json_or_empty(path / SETTINGS))
    return RunFiles(settings, RunAbout.from_json(about), metrics, " and ".join(sorted(sources)))


def _read_json_or_empty(path: Path) -> dict[str, Any]:
    """The content of a JSON file; empty if there is none, as in folders of older or unfinished runs."""
    return read_json(path) if path.is_file() else {}


def run_folders(folders: Iterable[str | Path]) -> list[Path]:
    """Folders with results: the given folders, or the folders inside a given folder without results.

    A run over several tasks and systems writes TASK/SYSTEM below its output folder, which can be named as a whole.
    """
    runs: list[Path] = []
    for folder in map(Path, folders):
        if (folder / RESULTS).is_file():
            runs.append(folder)
            continue
        inside = sorted(folder.rglob(RESULTS))
        if not inside:
            raise FileNotFoundError(f"{folder}: neither this folder nor a folder inside it has {RESULTS}")
        for path in inside:
            runs.append(path.parent)
    return runs


def recalls_of(row: ResultRow) -> dict[str, float]:
    """Recall at each of `BUDGETS` of a question's three rankings, such as "first@5".

    A number above all that the ranking has is left out, since its recall is that of the number before it.
    The rankings are the first search, all retrieved passages round by round, and the reader's passages, which older
    traces lack. A failed question has recall 0; without known supporting passages, or a known ranking, there is none.
    """
    trace = row.trace
    if not row.supporting or "passages" in trace.unknown:
        return {}
    searches = trace.passage_rounds
    rankings = {"first": searches[:1], "retrieved": searches}
    if "shown" not in trace.not_noted:
        rankings["shown"] = [trace.shown]
    recalls = {}
    for name, rounds in rankings.items():
        if name in trace.unknown:
            continue
        distinct = list(dict.fromkeys(chain.from_iterable(rounds)))
        for smaller, budget in pairwise((0, *BUDGETS)):
            if smaller and len(distinct) <= smaller:
                break
            share = 0.0 if row.error else recall(distinct[:budget], row.supporting)
            recalls[f"{name}@{budget}"] = share
    return recalls


def mean_recalls(rows: Iterable[Mapping[str, float]]) -> dict[str, Interval]:
    """Means of `recalls_of` over the questions with recalls, for the rankings that all these questions have.

    A number of passages that no ranking reaches is left out: its mean would look like that of a longer search.
    Traces of older versions lack some rankings; a mean over the other questions would not compare with the other means.
    """
    known = [recalls for recalls in rows if recalls]
    columns: dict[str, list[float]] = {}
    for ranking in RANKINGS:
        smallest = f"{ranking}@{BUDGETS[0]}"
        if any(smallest not in recalls for recalls in known):
            continue
        shares = [recalls[smallest] for recalls in known]
        for budget in BUDGETS:
            name = f"{ranking}@{budget}"
            if all(name not in recalls for recalls in known):
                break
            # A question with a shorter ranking keeps its recall.
            shares = [recalls.get(name, share) for recalls, share in zip(known, shares, strict=True)]
            columns[name] = shares
    return bootstrap_means(columns)
