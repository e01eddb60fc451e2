"""What the output folders of `tripletune eval` hold: a type for each file, written and read here alone.

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

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from tripletune.core.data.fields import checked
from tripletune.core.data.records import read_jsonl
from tripletune.core.files import read_json
from tripletune.eval import Task
from tripletune.eval.metrics import recall
from tripletune.eval.statistics import Interval, bootstrap_means
from tripletune.rag.results import RESULTS, ResultRow, given_fields, part_json, read_runs

SETTINGS = "settings.json"
METRICS = "metrics.json"
ABOUT = "run.json"
SCORES = "scores.jsonl"
# Rankings whose recall is measured, in words, and the numbers of passages that count.
RANKINGS = {"first": "first search", "retrieved": "all retrieved", "shown": "shown to the reader"}
BUDGETS = (2, 5, 15)
# The layout of `run.json`, for `core.data.fields.checked`.
_SESSION = {"began": str, "version?": str, "commit?": str, "alone?": bool, "embedded?": int}
_ABOUT = {"questions?": int, "concurrency?": int, "command?": [str], "sessions?": [_SESSION]}


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on this machine: its name, a fingerprint of its weights, and for CIRAG's integrator the weight type."""

    spec: str
    weights: str | None = None
    dtype: str | None = None

    @classmethod
    def from_json(cls, value: Mapping[str, Any] | str | None) -> LocalModel | None:
        """Read the value of `to_json`, or a name alone."""
        if not value:
            return None
        if isinstance(value, str):
            return cls(value)
        return cls(value["spec"], value.get("weights"), value.get("dtype"))

    def to_json(self) -> dict[str, Any]:
        """The model as JSON values."""
        values = {"spec": self.spec, "weights": self.weights}
        if self.dtype is not None:
            values["dtype"] = self.dtype
        return values


@dataclass(frozen=True, slots=True)
class ChatModel:
    """A chat model: its name in the ledger, and a fingerprint of its weights if it runs on this machine."""

    model: str
    weights: str | None = None

    @classmethod
    def from_json(cls, value: Mapping[str, Any] | str) -> ChatModel:
        """Read the value of `to_json`, or a name alone."""
        if isinstance(value, str):
            return cls(value)
        return cls(value["model"], value.get("model_weights"))

    def to_json(self) -> dict[str, Any]:
        """The model as JSON values."""
        if self.weights is None:
            return {"model": self.model}
        return {"model": self.model, "model_weights": self.weights}


class SamplingSettings(NamedTuple):
    """How the chat model draws its replies."""

    temperature: float
    top_p: float
    seed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """`settings.json`: everything that a row depends on; batch size and concurrency change no row.

    Digests are SHA-256 of files. A setting that the system does not use is None.

    Attributes:
        system: Name of the system; "" for an evaluation other than `eval run`.
        data: Digest of the file of questions, digests of a folder's files, or a hub id.
        limit: Only the first questions were asked.
        dtype: Type of the weights of the Graph-LLMs.
        model: The Graph-LLM that answers, and plans if no other model does.
        planner: The Graph-LLM that plans.
        student_seed: Seed of the sampled replies of `model` or `integrator`.
        prompt_embeds: The model that gets embeddings instead of text, without its address.
        sampling: How the teacher draws.
        teacher: The chat model for all roles without an own one in `llm`; "oracle:FOLDER" knows the facts.
        llm: Chat models by role, such as "t2rag.resolve", "t2rag" for all its roles, or "extract".
        integrator: CIRAG's distilled student.
        files: Digests of prompts and other files of the system, by name.
        query_prompt: What the encoder reads before a query.
        text_prompt: What the encoder reads before a passage.
        similarity: How vectors are compared, if not as the encoder says.
        encoder_weights: Fingerprint of a local encoder.
        vectors: Kind of vector index, if not "flat".
        language: Language of BM25's words, if it is not guessed.
        control: A `eval.controls.Control`.
        control_run: Digest of the results whose facts `control` gives to other questions.
        gold: Digest of the file of gold links.
        corpus: Digest of the passages; None if they are the questions' own contexts.
        triples: Digest of a file of triples; of a store, its extractor and digest; or the extractor in the loop.
        retriever: "bm25", "dense" or "hybrid".
        encoder: Name of the encoder of queries and passages.
        options: Options of the system, such as "top_k".
        others: Settings of other evaluations, and of revisions that have other settings.
    """

    system: str = ""
    task: Task = field(default_factory=lambda: Task(""))
    data: str | list[str] | None = None
    limit: int | None = None
    dtype: str | None = None
    model: LocalModel | None = None
    planner: LocalModel | None = None
    student_seed: int | None = None
    prompt_embeds: str | None = None
    sampling: SamplingSettings | None = None
    teacher: ChatModel | None = None
    llm: Mapping[str, ChatModel] = field(default_factory=dict)
    integrator: LocalModel | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    query_prompt: str | None = None
    text_prompt: str | None = None
    similarity: str | None = None
    encoder_weights: str | None = None
    vectors: str | None = None
    language: str | None = None
    control: str | None = None
    control_run: str | None = None
    gold: str | None = None
    corpus: str | None = None
    triples: str | Mapping[str, Any] | None = None
    retriever: str | None = None
    encoder: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    others: Mapping[str, Any] = field(default_factory=dict)

    @property
    def reads_passages(self) -> bool:
        """Whether an extractor made the triples while the system ran, so that their cost belongs to the run."""
        return isinstance(self.triples, Mapping) and "extractor" in self.triples

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RunSettings:
        """Read the settings of any evaluation."""
        if "system" not in values:
            # Names such as "model" have another meaning in other evaluations.
            others = _without(values, ("data", "limit"))
            return cls(data=values.get("data"), limit=values.get("limit"), others=others)
        given = given_fields(cls, values)
        given["others"] = _without(values, [*(item.name for item in fields(cls)), "teacher_weights"])
        task = given_fields(Task, given.get("task", {}))
        given["task"] = Task(**{"name": "", **task, "metrics": tuple(task.get("metrics", ()))})
        for name in ("model", "planner", "integrator"):
            given[name] = LocalModel.from_json(given.get(name))
        if "teacher" in given:
            given["teacher"] = ChatModel(given["teacher"], values.get("teacher_weights"))
        if "sampling" in given:
            given["sampling"] = SamplingSettings(*given["sampling"])
        if "llm" in given:
            given["llm"] = {role: ChatModel.from_json(model) for role, model in given["llm"].items()}
        return cls(**given)

    def to_json(self) -> dict[str, Any]:
        """The settings as JSON values; a setting that most systems do not have is left out if it is None or empty."""
        if not self.system:
            return {"data": self.data, "limit": self.limit, **self.others}
        optional = {
            "dtype": self.dtype,
            "model": _model_json(self.model),
            "planner": _model_json(self.planner),
            "student_seed": self.student_seed,
            "prompt_embeds": self.prompt_embeds,
            "sampling": self.sampling,
            "teacher": None if self.teacher is None else self.teacher.model,
            "teacher_weights": None if self.teacher is None else self.teacher.weights,
            "llm": {role: model.to_json() for role, model in self.llm.items()},
            "integrator": _model_json(self.integrator),
            "files": dict(self.files),
            "query_prompt": self.query_prompt,
            "text_prompt": self.text_prompt,
            "similarity": self.similarity,
            "encoder_weights": self.encoder_weights,
            "vectors": self.vectors,
            "language": self.language,
            "control": self.control,
            "control_run": self.control_run,
            "gold": self.gold,
        }
        return {
            "system": self.system,
            "task": _present(part_json(self.task)),
            "data": self.data,
            "limit": self.limit,
            **_present(optional),
            "corpus": self.corpus,
            "triples": self.triples,
            "retriever": self.retriever,
            "encoder": self.encoder,
            "options": dict(self.options),
            **self.others,
        }


def _model_json(model: LocalModel | None) -> dict[str, Any] | None:
    return None if model is None else model.to_json()


def _present(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that say something: not None, and no empty mapping."""
    return {name: value for name, value in values.items() if value not in (None, {})}


def _without(values: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


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
        """Read a session."""
        return cls(**given_fields(cls, values))

    def to_json(self) -> dict[str, Any]:
        """The session as JSON values, without those that are not known."""
        return _present(part_json(self))


@dataclass(slots=True, kw_only=True)
class RunAbout:
    """`run.json`: facts about a run that change no row.

    Attributes:
        command: The words of the command line, without secrets.
        questions: Number of items of the whole run.
        data: File or folder of the questions, as the command named it.
        concurrency: Batches of items in progress at once.
        sessions: The calls that have added rows, the first one first; empty for older runs.
    """

    command: list[str] = field(default_factory=list)
    questions: int | None = None
    data: str | None = None
    concurrency: int | None = None
    sessions: list[Session] = field(default_factory=list)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RunAbout:
        """Read `run.json`."""
        given = given_fields(cls, values)
        given["sessions"] = list(map(Session.from_json, given.get("sessions", ())))
        return cls(**given)

    def to_json(self) -> dict[str, Any]:
        """The facts as JSON values, without those that are not known."""
        return _present(part_json(self)) | {"sessions": [session.to_json() for session in self.sessions]}


@dataclass(slots=True)
class SessionSpeed:
    """How fast the last session that answered something was; `items` were answered in `seconds`."""

    items: int
    seconds: float
    per_second: float

    @classmethod
    def from_json(cls, values: Mapping[str, Any], units: str = "questions") -> SessionSpeed | None:
        """Read the value of `to_json`; None if there is none."""
        if units not in values:
            return None
        return cls(values[units], values["seconds"], values[f"{units}_per_second"])

    def to_json(self, units: str) -> dict[str, Any]:
        """The speed as JSON values, whose names say what was answered, for example "questions"."""
        return {units: self.items, "seconds": self.seconds, f"{units}_per_second": self.per_second}


@dataclass(slots=True, kw_only=True)
class RunCounts:
    """Counts over all questions of a run.

    Attributes:
        without_gold: Questions without a gold answer, which have no scores.
        errors: Failed questions, whose scores are 0.
        refusals: Answers that refuse to answer.
        malformed_plans: Planning replies without a readable action.
        unexpected_plans: `[SUFFICIENT]` before any search, or `[NO_RETRIEVAL]` after one.
        rounds: Searches.
        passages: Found passages, each as often as it was found; `passages_without_triples` are not in the store.
        triples: Triples shown to the model, each as often as it was shown.
        stop_reasons: By why planning ended; "error" for failed questions.
        actions: By action of the planner; "malformed" for unreadable ones.
        tallies: Counts that are specific to the system.
    """

    without_gold: int = 0
    errors: int = 0
    refusals: int = 0
    malformed_plans: int = 0
    unexpected_plans: int = 0
    rounds: int = 0
    passages: int = 0
    passages_without_triples: int = 0
    triples: int = 0
    stop_reasons: dict[str, int] = field(default_factory=dict)
    actions: dict[str, int] = field(default_factory=dict)
    tallies: dict[str, int] = field(default_factory=dict)

    def numbers(self) -> dict[str, int]:
        """The counts that are one number, by name."""
        numbers = _without(part_json(self), ("stop_reasons", "actions", "tallies"))
        if not self.without_gold:
            del numbers["without_gold"]
        return numbers

    def to_json(self) -> dict[str, Any]:
        """The counts as JSON values."""
        return {
            **self.numbers(),
            "stop_reasons": dict(sorted(self.stop_reasons.items())),
            "actions": dict(sorted(self.actions.items())),
            "tallies": dict(sorted(self.tallies.items())),
        }


@dataclass(slots=True, kw_only=True)
class RunMetrics:
    """`metrics.json` of `eval run`.

    Costs have the names "calls", "prompt_tokens", "completion_tokens", "weighted_tokens" and with prices "dollars";
    the prefix "cached_" marks the part that was not sent. What another program's answers do not say is left out.

    Attributes:
        primary: The score that stands for the others, which is the task's first metric.
        metrics: The scores of all questions.
        by_type: The primary score by the benchmark's kind of question; "all" for questions without one.
        recall: Means of `recalls_of`; empty if nothing was searched.
        cost: Sums over the questions, without `indexing`, and the numbers of words and triples that were cut off.
        cost_per_question: `cost` and seconds per question.
        indexing: What it cost to read the corpus into triples, once.
        roles: Roles that calls had.
        failed: Number of failed questions; `run_suites` adds it and `session` for every kind of evaluation.
    """

    system: str
    task: str
    primary: str
    questions: int
    metrics: dict[str, Interval] = field(default_factory=dict)
    by_type: dict[str, Interval] = field(default_factory=dict)
    recall: dict[str, Interval] = field(default_factory=dict)
    counts: RunCounts = field(default_factory=RunCounts)
    cost: dict[str, float] = field(default_factory=dict)
    cost_per_question: dict[str, float] = field(default_factory=dict)
    indexing: dict[str, float] = field(default_factory=dict)
    roles: list[str] = field(default_factory=list)
    failed: int = 0
    session: SessionSpeed | None = None

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RunMetrics:
        """Read `metrics.json`; figures that an older run lacks are empty."""
        given: dict[str, Any] = {"system": "", "task": "", "primary": "", "questions": 0}
        given |= given_fields(cls, values)
        given["counts"] = RunCounts(**given_fields(RunCounts, given.get("counts", {})))
        given["session"] = SessionSpeed.from_json(given.get("session", {}))
        return cls(**given)

    def to_json(self) -> dict[str, Any]:
        """The metrics as JSON values, without `failed` and `session`."""
        return _without(part_json(self), ("failed", "session")) | {"counts": self.counts.to_json()}


@dataclass(frozen=True, slots=True)
class MetricsHead:
    """The part of `metrics.json` that `eval compare` reads of every evaluation.

    Attributes:
        evaluation: "extraction", "judge", or "" for the others.
        task: The task of `eval run`; "" for other evaluations.
        name: The system, or the model of an evaluation without systems.
        primary: The score that stands for the others; None if an evaluation has none.
        failed: Number of failed items.
        cost: Cost per item.
    """

    evaluation: str
    task: str
    name: str
    primary: str | None
    failed: int
    cost: Mapping[str, float]

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> MetricsHead:
        """Read the metrics of any evaluation."""
        # Older runs have the failed items only among their counts.
        failed = values.get("failed", values.get("counts", {}).get("errors", 0))
        cost = values.get("cost_per_question") or values.get("cost_per_text") or {}
        name = values.get("system") or values.get("model") or ""
        return cls(values.get("evaluation", ""), values.get("task", ""), name, values.get("primary"), failed, cost)


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
        """Read a line."""
        return cls(values["id"], values.get("scores") or {}, values.get("links") or {})

    def to_json(self) -> dict[str, Any]:
        """The line as JSON values."""
        return part_json(self)


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


def read_added(folder: str | Path) -> dict[str, AddedScores]:
    """The added scores of a folder by question; empty if nothing was added."""
    path = Path(folder) / SCORES
    if not path.is_file():
        return {}
    return {row["id"]: AddedScores.from_json(row) for row in read_results(path)}


def read_scored(folder: str | Path, *needed: str, partial: bool = False) -> Iterator[ResultRow]:
    """Stream the rows of `eval run` with the newer scores of `tripletune eval score`.

    `needed` and `partial` are those of `rag.results.read_runs`.
    """
    added = read_added(folder)
    for _, values in read_runs(Path(folder) / RESULTS, *needed, partial=partial):
        row = ResultRow.from_json(values)
        if row.id in added:
            row.scores = {**row.scores, **added[row.id].scores}
        yield row


def read_files(folder: str | Path) -> RunFiles:
    """Read settings, `run.json` and metrics of any evaluation; a file that is missing is empty."""
    path = Path(folder)
    about = _read_if_there(path / ABOUT)
    checked(about, str(path / ABOUT), _ABOUT)
    sources: set[str] = set()
    for added in read_added(path).values():
        sources.update(added.links.values())
    settings = RunSettings.from_json(_read_if_there(path / SETTINGS))
    return RunFiles(settings, RunAbout.from_json(about), _read_if_there(path / METRICS), " and ".join(sorted(sources)))


def _read_if_there(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def run_folders(folders: Iterable[str | Path]) -> list[Path]:
    """Folders with results: the given folders, or the folders inside a given folder without results."""
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
        for budget in BUDGETS:
            share = 0.0 if row.error else recall(distinct[:budget], row.supporting)
            recalls[f"{name}@{budget}"] = share
    return recalls


def mean_recalls(rows: Iterable[Mapping[str, float]]) -> dict[str, Interval]:
    """Means of `recalls_of` over the questions with recalls, for the rankings that all these questions have."""
    questions = 0
    columns: dict[str, list[float]] = {}
    for recalls in rows:
        questions += bool(recalls)
        for name, share in recalls.items():
            columns.setdefault(name, []).append(share)
    return bootstrap_means({name: column for name, column in columns.items() if len(column) == questions})
