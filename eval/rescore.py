"""Compute new scores of finished runs from their stored results (`tripletune eval score`).

Scores of questions are written to `scores.jsonl` beside the unchanged results; `compare` and `report` read both files.
"""

from __future__ import annotations

import argparse
import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from rich.console import Console

from tripletune.core.files import file_digest, json_line, lock_folder, new_file, read_json
from tripletune.core.options import convert, not_one_of
from tripletune.eval import Metric, find_metrics, score_answer
from tripletune.eval.results import (
    SCORES,
    SETTINGS,
    AddedScores,
    RunSettings,
    read_added_scores,
    read_rows_with_added_scores,
    run_folders,
)
from tripletune.eval.statistics import Interval, bootstrap_means
from tripletune.eval.suites import interval_cells, show_table
from tripletune.rag.results import ResultRow, StoredTrace
from tripletune.rag.triple_store import gold_links_in_file

logger = logging.getLogger(__name__)
_LINKS_IN_RESULTS = "links in the results"


@dataclass(frozen=True, slots=True)
class GoldFile:
    """Ids of the supporting passages by question, and the digest of their file, which is noted beside the scores."""

    passages: Mapping[str, Collection[str]]
    digest: str

    @classmethod
    def read(cls, path: str) -> GoldFile:
        """Read a file of `tripletune build corpus`; scores with other links are told apart by its digest."""
        return cls(gold_links_in_file(path), file_digest(path))


@dataclass(frozen=True, slots=True)
class NewScores:
    """The new scores of a run by metric, and how many of its questions failed and score 0."""

    intervals: Mapping[str, Interval]
    failed: int


def beyond_ranking(metrics: Sequence[str], longest: int) -> list[str]:
    """The metrics such as "recall@10" whose k is more than any ranking of a run has, so that they say less than k."""
    beyond = []
    for name in metrics:
        _, _, k = name.partition("@")
        if k.isdigit() and int(k) > longest:
            beyond.append(name)
    return beyond


def score(args: argparse.Namespace, console: Console) -> None:
    """`tripletune eval score`: score finished runs with `args.metrics` and print the scores.

    A run that cannot be scored does not stop the others; all problems are one error at the end.
    """
    metrics = _named_metrics(args.metrics)
    gold = GoldFile.read(args.gold) if args.gold else None
    folders = run_folders(args.folders)
    rows = []
    problems = []
    for folder in folders:
        try:
            scored = score_run(folder, metrics, gold)
        except (OSError, ValueError) as error:
            problems.append(str(error))
            continue
        for name, interval in scored.intervals.items():
            rows.append((str(folder), name, *interval_cells(interval), str(scored.failed), str(interval["n"])))
    if rows:
        heads = ("run", "metric", "score", "95 % interval", "failed", "questions")
        show_table(console, f"scores of stored answers and rankings, in {SCORES}", heads, rows, "questions")
        for name, metric in metrics.items():
            console.print(f"{name}: {metric.explanation}.")
    if problems:
        raise ValueError(f"{len(problems)} of {len(folders)} runs could not be scored: {'; '.join(problems)}")


def _named_metrics(text: str) -> dict[str, Metric]:
    """The metrics of `--metrics`, separated by commas; all unknown names are reported at once."""
    metrics = find_metrics()
    named = {}
    problems = []
    for name in convert(text, list[str]):
        if name in metrics:
            named[name] = metrics[name]
        else:
            problems.append(not_one_of("metrics", name, list(metrics)))
    if problems:
        raise ValueError("; ".join(problems))
    return named


def score_run(folder: Path, metrics: Mapping[str, Metric], gold: GoldFile | None = None) -> NewScores:
    """Score one run, and write the scores beside its results and other scores.

    Args:
        gold: Supporting passages, instead of those in the results.

    Returns:
        The scores, without metrics for which no question has gold; these are logged as a warning.
    """
    settings = RunSettings.from_json(read_json(folder / SETTINGS))
    if not settings.system:
        raise ValueError(f"{folder} is not the output of `tripletune eval run`; repeat its evaluation to score it")
    scoring = _NewScoring(metrics, settings, gold)
    with lock_folder(folder, f"another process writes into {folder}: wait for it or stop it"):
        before = read_added_scores(folder)
        with new_file(folder / SCORES) as scratch, scratch.open("w", encoding="utf-8") as file:
            for row in read_rows_with_added_scores(folder, partial=True):
                line = scoring.add(row, before.get(row.id, AddedScores(row.id)))
                file.write(json_line(line.to_json()))
            # An error leaves the earlier file of scores as it is.
            scoring.check_gold(folder)
    if beyond := beyond_ranking(list(scoring.with_gold), scoring.longest):
        logger.warning(
            "%s: its longest ranking has %d passages, so %s only count these; --top-k sets how many a search finds",
            folder, scoring.longest, ", ".join(beyond),
        )  # fmt: skip
    for name, count in scoring.changed.items():
        logger.warning("%s: %s of %d questions has changed; the new score counts", folder, name, count)
    return NewScores(bootstrap_means(scoring.with_gold), scoring.failed)


class _NewScoring:
    """The new scores of one run, question by question.

    Args:
        metrics: The metrics to add, by name.
        settings: The settings of the run, with its task.
        gold: Gold links that replace those of the run; None keeps them.

    Attributes:
        values: Scores by metric.
        changed: Number of questions by metric whose stored score was another.
        failed: Number of failed questions.
        longest: Passages of the longest ranking.
    """

    def __init__(self, metrics: Mapping[str, Metric], settings: RunSettings, gold: GoldFile | None) -> None:
        self._metrics = metrics
        self._gold = gold
        # Where the gold passages are from.
        self._source = settings.gold or _LINKS_IN_RESULTS
        if gold is not None:
            self._source = gold.digest
        self._refusal = settings.task.refusal
        self._questions = 0
        # Passages that questions with links in `gold` have met, and passages of these links.
        self._met: set[str] = set()
        self._linked: set[str] = set()
        self.values: dict[str, list[float]] = {name: [] for name in metrics}
        self.changed: Counter[str] = Counter()
        self.failed = 0
        self.longest = 0

    @property
    def with_gold(self) -> dict[str, list[float]]:
        """`values` without metrics for which no question has gold."""
        return {name: scores for name, scores in self.values.items() if scores}

    def add(self, row: ResultRow, before: AddedScores) -> AddedScores:
        """Score a question, add its scores to `values`, and return its line of the file.

        The line keeps scores of other metrics from `before`. Scores that the question already had and that come out
        differently are counted in `changed`: another version of a metric must not replace a published figure unseen.
        """
        self._questions += 1
        supporting: Collection[str] = row.supporting
        if self._gold is not None:
            supporting = self._gold.passages.get(row.id, ())
            if supporting:
                self._met.update(final_ranking(row.trace), row.supporting)
                self._linked.update(supporting)
        scores = score_row(row, self._metrics, supporting, self._refusal)
        self.failed += bool(row.error)
        self.longest = max(self.longest, len(final_ranking(row.trace)))
        line = AddedScores(row.id, dict(before.scores), dict(before.links))
        for name in self._metrics:
            # Also a score that the question no longer has, since the gold links are others.
            line.scores.pop(name, None)
            line.links.pop(name, None)
        for name, score in scores.items():
            self.values[name].append(score)
            if row.scores.get(name, score) != score:
                self.changed[name] += 1
            line.scores[name] = score
            if self._metrics[name].reads == "supporting":
                line.links[name] = self._source
        return line

    def check_gold(self, folder: Path) -> None:
        """Raise an error if nothing could be scored, or if the gold links are those of another corpus.

        Links of another corpus would give every ranking the score 0, as if nothing had been found. Metrics without gold
        only give a warning as long as other metrics have scores.
        """
        if not self._questions:
            raise ValueError(f"{folder}: no question has a result yet: run the same command again")
        if self._met and self._met.isdisjoint(self._linked):
            raise ValueError(f"{folder}: --gold has no passage that the run found: give the links of its corpus")
        without_gold = [name for name, scores in self.values.items() if not scores]
        if without_gold:
            of_rankings = [name for name in without_gold if self._metrics[name].reads == "supporting"]
            of_answers = [name for name in without_gold if name not in of_rankings]
            sentences = []
            if of_rankings:
                sentences.append(
                    f"{', '.join(of_rankings)} need gold passages, but no question has any: give --gold FILE with the "
                    "links that `tripletune build corpus` writes"
                )
            if of_answers:
                sentences.append(f"{', '.join(of_answers)} need answers and gold answers, but no question has both")
            lacking = f"{folder}: {'; '.join(sentences)}"
            if len(without_gold) == len(self.values):
                raise ValueError(lacking)
            logger.warning("%s", lacking)


def score_row(
    row: ResultRow, metrics: Mapping[str, Metric], supporting: Collection[str], refusal: str | None = None
) -> dict[str, float]:
    """Score a stored question; a failed question scores 0.

    Rankings are scored only with gold passages, answers only with gold answers and where the system gave one.

    `supporting` has the ids of the gold passages; for `refusal` see `tripletune.eval.Task`.
    """
    of_answers = {name: metric for name, metric in metrics.items() if metric.reads != "supporting"}
    scores = {}
    if of_answers and row.answers and "answer" not in row.trace.unknown:
        scores = score_answer(row.prediction, row.answers, of_answers, row.short_answers, refusal)
    if supporting and "passages" not in row.trace.unknown:
        ranking = final_ranking(row.trace)
        for name, metric in metrics.items():
            if metric.reads == "supporting":
                scores[name] = metric.score(ranking, frozenset(supporting))
    if row.error:
        scores = dict.fromkeys(scores, 0.0)
    return {name: scores[name] for name in metrics if name in scores}


def final_ranking(trace: StoredTrace) -> list[str]:
    """Distinct ids of passages, best first: the final ranking of a system that has one, else round by round.

    A system without a ranking of its own has none over rounds; what it found first counts as best.
    """
    ranking = chain.from_iterable(trace.passage_rounds) if trace.ranking is None else trace.ranking
    return list(dict.fromkeys(ranking))
