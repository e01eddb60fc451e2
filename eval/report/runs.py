"""Output folders of `tripletune eval`, for reports and comparisons.

A folder may be of a finished or of a killed run. The questions of `eval run` become a table with one row per question,
from which all figures are computed, so that tables and plots agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from tripletune.eval.costs import Costs
from tripletune.eval.metrics import recall
from tripletune.eval.rescore import final_ranking
from tripletune.eval.results import (
    METRICS,
    SETTINGS,
    RunAbout,
    RunSettings,
    Session,
    read_results,
    read_rows_with_added_scores,
    read_run_files,
    recalls_of,
    run_folders,
)
from tripletune.eval.results.unreadable import UnreadableCounter, UnreadableReplies
from tripletune.llm.question_client import CALLS
from tripletune.rag.costs import Cost, Prices, with_batch_prices
from tripletune.rag.results import RESULTS, ResultRow, StoredTrace, fields_as_json, kept_facts

# Columns of `QuestionFigures` that need these fields of the trace, which answers of another program may lack.
_NEEDED: dict[str, tuple[str, ...]] = {
    "calls": ("calls",),
    "sent": ("calls",),
    "tokens_read": ("prompt_tokens",),
    "tokens_written": ("completion_tokens",),
    "tokens": ("prompt_tokens", "completion_tokens"),
    "weighted_tokens": ("prompt_tokens", "completion_tokens"),
    "dollars": ("prompt_tokens", "completion_tokens"),
    "seconds": ("seconds",),
}


@dataclass(frozen=True, slots=True)
class Run:
    """An output folder of `tripletune eval`.

    Attributes:
        name: Its name in the report, if the command gives one; else "".
        metrics: `metrics.json`; empty if the run did not end.
        gold: Where the gold passages of added scores are from; see `eval.results.RunFiles`.
        results: Number of items with a result.
        rows: For `eval run`, one row per question with a result: the columns of `QuestionFigures` and one column per
            score, None if unknown. Empty for other evaluations.
        added: Names of scores that `eval score` has added.
        indexing: The cost of reading the corpus.
        roles: The cost of answering by role; None for roles that only read the corpus.
        unreadable: The roles of which too many replies could not be read.
        headline: The score that stands for the others; "" for the first metric of the task.
    """

    folder: str
    name: str
    settings: RunSettings
    about: RunAbout
    metrics: Mapping[str, Any]
    gold: str = ""
    results: int = 0
    rows: pd.DataFrame = field(default_factory=pd.DataFrame)
    added: tuple[str, ...] = ()
    indexing: Cost = field(default_factory=Cost)
    roles: Mapping[str, Cost | None] = field(default_factory=dict)
    unreadable: Sequence[UnreadableReplies] = ()
    headline: str = ""

    @property
    def system(self) -> str:
        """Name of the system."""
        return self.settings.system

    @property
    def task(self) -> str:
        """The task's name."""
        return self.settings.task.name

    @property
    def scores(self) -> list[str]:
        """The headline, then the task's metrics and the added scores."""
        names = [*self.settings.task.metrics, *self.added]
        if self.headline:
            names.sort(key=lambda name: name != self.headline)
        return names

    @property
    def sessions(self) -> Sequence[Session]:
        """Time and code version of each session; empty for older runs."""
        return self.about.sessions

    @property
    def finished(self) -> bool:
        """Whether the run is complete."""
        return bool(self.metrics) and self.results == self.about.questions


@dataclass(slots=True, kw_only=True)
class QuestionFigures:
    """The figures of one question, which are columns of `Run.rows`; None for what is not known.

    Attributes:
        hops: Number of gold passages.
        failed: Whether the question failed.
        rounds: Number of searches.
        stop: Why planning ended; "error" if the question failed.
        calls: Calls that are not for reading the corpus; the token columns are those of the same calls.
        sent: Calls that neither the ledger nor another question's equal call answered.
        dollars: Dollars per 1,000 such questions.
        seconds: Wall-clock seconds from the question's start to its answer; `structuring` is the part for triples.
        tallies: Counts that are specific to the system.
        malformed: Planning replies that could not be read.
        granularity: The level of CIRAG's cascade that answered.
        facts_shown: Candidate triples; `facts_kept` is the number of core triples (CIRAG).
        answer_kept: 1 if a core triple names a gold answer, else 0.
        recall: See `eval.results.recalls_of`.
        kept: Recall of the gold passages among those of the core triples.
        support: Share of the gold passages that the answer's reader was shown; 0 for a failed question.
        confidence: How sure the answer is, by the measures of `rag.systems._confidence`.
        withheld: Whether "I don't know" replaced the answer.
        ranked: Number of passages in `eval.rescore.final_ranking`.
    """

    id: str
    type: str
    question: str
    answers: list[str]
    prediction: str
    hops: int | None
    failed: bool
    rounds: int
    stop: str
    calls: int | None
    tokens_read: int | None
    tokens_written: int | None
    tokens: int | None
    weighted_tokens: int | None
    sent: int | None = None
    dollars: float | None = None
    seconds: float | None
    structuring: float
    tallies: dict[str, int]
    malformed: int
    granularity: str | None
    facts_shown: float | None = None
    facts_kept: float | None = None
    answer_kept: float | None = None
    recall: dict[str, float]
    kept: float | None = None
    support: float | None = None
    confidence: dict[str, float]
    withheld: bool
    ranked: int


class NamedFolder(NamedTuple):
    """An output folder, and its name in a report; "" if the command gives none."""

    name: str
    folder: Path


def named_folder(spec: str) -> NamedFolder:
    """The name and folder of NAME=FOLDER, or of a folder alone, whose own name may have a "="."""
    name, equals, folder = spec.partition("=")
    if equals and not Path(spec).exists():
        return NamedFolder(name, Path(folder))
    return NamedFolder("", Path(spec))


def output_folders(spec: str) -> list[str]:
    """The output folders inside a folder, the oldest run first; an output folder or NAME=FOLDER is not changed.

    The oldest run comes first because differences are to the first one, which is mostly the baseline.
    """
    path = Path(spec)
    if not path.is_dir() or (path / SETTINGS).is_file() or (path / METRICS).is_file():
        return [spec]
    began = {}
    for folder in run_folders([spec]):
        began[str(folder)] = [session.began for session in read_run_files(folder).about.sessions]
    return sorted(began, key=began.__getitem__)


def read_run_without_questions(folder: str | Path, name: str = "") -> Run:
    """A run with its small files, without its questions.

    `read_run` adds the questions. Commands that may still refuse a run open it this way, since reading a large
    result file takes minutes.
    """
    files = read_run_files(folder)
    return Run(str(folder), name, files.settings, files.about, files.metrics, files.gold)


def why_unfinished(run: Run) -> str:
    """Why a run without metrics is not compared: it was stopped, or its folder is of something else."""
    results = Path(run.folder) / RESULTS
    if not results.is_file():
        return f"{run.folder} has no {METRICS}, so it is not the output of a finished `tripletune eval`"
    done = f"{sum(1 for _ in read_results(results, partial=True)):,}"
    if run.about.questions:
        done += f" of {run.about.questions:,}"
    return (
        f"{run.folder} is not finished: it has {done} results. Run its command again to complete it, or give it to "
        "`tripletune eval report`, which takes unfinished runs"
    )


def read_run(spec: str, prices: Prices | None = None) -> Run:
    """Read one output folder; NAME=FOLDER gives it a name in the report.

    A killed run has no metrics but is reported with the questions that it has answered, if rows and settings say what
    they are. Folders of other evaluations have only their metrics, and the number of their rows.
    """
    name, path = named_folder(spec)
    if not path.is_dir():
        advice = ""
        if "," in str(path):
            advice = "; name each folder as an argument of its own: runs that differ in the seed alone become one row"
        raise FileNotFoundError(f"no such folder: {path}{advice}")
    run = read_run_without_questions(path, name)
    has_rows = (path / RESULTS).is_file()
    has_settings = run.settings != RunSettings()
    if not run.metrics and not (has_rows and has_settings):
        raise ValueError(
            f"{path} holds no results of `tripletune eval`: it has neither {METRICS} nor {RESULTS} with {SETTINGS}"
        )
    if run.system and has_rows:
        return _with_table_of_questions(run, prices or {})
    if has_rows:
        return replace(run, results=sum(1 for _ in read_results(path / RESULTS, partial=True)))
    return run


def _with_table_of_questions(run: Run, prices: Prices) -> Run:
    """The run with the table of its questions.

    A question with gold must have all scores of the task; a gap would change the mean without a word. If the seconds
    do not measure the system, the table has none, so that no figure can use them.
    """
    metrics = run.settings.task.metrics
    costs = Costs(with_batch_prices(prices, run.about.backends))
    unreadable = UnreadableCounter()
    rows = []
    added: dict[str, None] = {}
    for row in read_rows_with_added_scores(run.folder, partial=True):
        lacking = [name for name in metrics if name not in row.scores]
        if row.answers and lacking and "answer" not in row.trace.unknown:
            raise ValueError(f"{Path(run.folder) / RESULTS}: question {row.id!r} has no score {', '.join(lacking)}")
        figures = _figures_of_question(row, costs.add(row.trace))
        unreadable.add(row.trace)
        rows.append({**dict.fromkeys(metrics), **row.scores, **fields_as_json(figures)})
        added |= dict.fromkeys(name for name in row.scores if name not in metrics)
    table = pd.DataFrame(rows)
    whole = replace(
        run,
        results=len(table),
        rows=table,
        added=tuple(added),
        indexing=costs.indexing,
        roles=costs.roles,
        unreadable=unreadable.roles_to_report(),
    )
    if len(table) and why_untimed(whole):
        table["seconds"] = None
    return whole


def why_untimed(run: Run) -> str:
    """Why a run's seconds do not measure its system; empty if they do.

    Seconds count only if the run had the machine for itself and sent all its calls, since replies from the ledger take
    no time.
    """
    if run.about.backends:
        return "its replies came from a Batch API"
    alone = [session.alone for session in run.sessions] or [None]
    if False in alone:
        return "another evaluation used the machine at the time"
    if None in alone:
        return "it is not known whether another evaluation used the machine at the time"
    # A missing number of sent calls adds nothing to the sum.
    spared = (run.rows["calls"].astype(float) - run.rows["sent"].astype(float)).sum()
    if spared:
        return f"{spared:,.0f} of its calls were not sent: the ledger had the replies"
    if run.rows["sent"].isna().any() and any("--ledger" in word for word in run.about.command):
        return "it is not known which of its calls the ledger answered"
    if run.rows["seconds"].isna().any():
        return "the file of answers has no seconds"
    return ""


def _figures_of_question(row: ResultRow, cost: Cost) -> QuestionFigures:
    """The figures of a question, from its row and the cost of its own calls.

    What the trace does not note stays None, and not 0, so that no mean or sum takes an unknown figure for a small one.
    """
    trace = row.trace
    figures = QuestionFigures(
        id=row.id,
        type=row.type,
        question=row.question,
        answers=row.answers,
        prediction=row.prediction,
        hops=len(set(row.supporting)) or None,
        failed=bool(row.error),
        rounds=len(trace.steps),
        stop=trace.stop_reason or "error",
        calls=cost.total.calls,
        tokens_read=cost.total.read,
        tokens_written=cost.total.written,
        tokens=cost.total.read + cost.total.written,
        weighted_tokens=cost.weighted_tokens,
        seconds=trace.seconds,
        structuring=trace.structuring_seconds,
        tallies=trace.tallies,
        malformed=trace.malformed,
        granularity=None if row.error else trace.granularity,
        recall=recalls_of(row),
        confidence=trace.confidence,
        withheld=bool(trace.withheld),
        ranked=len(final_ranking(trace)),
    )
    if _knows_roles(trace):
        if "cached" not in trace.not_noted:
            figures.sent = cost.total.calls - cost.cached.calls
        if cost.dollars is not None:
            figures.dollars = 1000 * cost.dollars
    facts = kept_facts(row)
    if facts is not None:
        figures.facts_shown = float(sum(len(step.triples) for step in trace.steps))
        figures.facts_kept = float(facts.number)
        figures.answer_kept = float(facts.name_answer)
    if row.supporting and not row.error and trace.core_passages is not None:
        figures.kept = recall(trace.core_passages, row.supporting)
    knows_shown = "shown" not in trace.not_noted and not trace.unknown & {"shown", "passages"}
    if row.supporting and knows_shown:
        figures.support = 0.0 if row.error else recall(trace.shown, row.supporting)
    for column, needed in _NEEDED.items():
        if trace.unknown.intersection(needed):
            setattr(figures, column, None)
    return figures


def _knows_roles(trace: StoredTrace) -> bool:
    """Whether the roles of all calls are noted; else neither their prices nor which calls were sent are known."""
    noted = sum(count for key, count in trace.tallies.items() if key.startswith(CALLS))
    return noted == trace.calls
