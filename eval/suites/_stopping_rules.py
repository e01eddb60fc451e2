"""When to stop searching: rules that choose, for each question, after how many searches a loop answers.

A loop is run with 0, 1, 2 … N searches, so that all rules are compared on the same answers (`tripletune eval
stopping`); `eval/suites/_stopping_figures.py` compares them.

The rules: the planner's own decision; fixed depths; counting steps and matching words, both fitted on training records;
and TASR (arXiv 2606.13814), which stops when the answer repeats and its calibrated margin is large.
"""

from __future__ import annotations

import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from tripletune.core.data.answers import normalize_answer
from tripletune.core.data.records import Action, Record
from tripletune.core.data.words import word_rules, words

# TASR's one threshold of the calibrated margin, for all models and corpora.
TASR_MARGIN = 0.25
TASR_FOLDS = 5


@dataclass(slots=True, kw_only=True)
class DepthAnswer:
    """The answer of a loop that was allowed a number of searches.

    Attributes:
        depth: The searches that were allowed; `searches` is how many were made.
        calls: Calls of models, the answer's among them.
        scores: By metric, from 0 to 1.
        margin: Mean difference between the two largest log-probabilities at the answer's tokens; None if not known.
        recall: Share of the supporting passages that was found; None if not known.
        hits: Searches whose facts share a word with their query; `last_hit` says it of the last search.
    """

    depth: int
    searches: int
    calls: int
    answer: str
    stop_reason: str
    scores: dict[str, float]
    margin: float | None = None
    recall: float | None = None
    hits: int = 0
    last_hit: bool = False


@dataclass(slots=True, kw_only=True)
class Ladder:
    """A question's answers by depth, the shallowest first, and the one after the planner's own decision to stop.

    Attributes:
        planner: None if the system has no such decision besides its depth.
    """

    id: str
    depths: list[DepthAnswer] = field(default_factory=list)
    planner: DepthAnswer | None = None

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Ladder:
        """Read the values of a row."""
        planner = values.get("planner")
        return cls(
            id=values["id"],
            depths=[DepthAnswer(**depth) for depth in values["depths"]],
            planner=None if planner is None else DepthAnswer(**planner),
        )

    def to_json(self) -> dict[str, Any]:
        """The answers as JSON values."""
        return asdict(self)


class Outcome(NamedTuple):
    """What a rule gets for a question, and what it pays; for `recall` see `DepthAnswer`."""

    searches: float
    calls: float
    scores: Mapping[str, float]
    recall: float | None = None


# Chooses what a question gets; None: nothing, since the question failed.
StoppingRule = Callable[[Ladder], Outcome]


class Hits(NamedTuple):
    """How many searches brought facts that share a word with their query, and whether the last one did."""

    searches: int
    is_last: bool


def count_hits(queries_and_facts: Iterable[tuple[str, str]], language: str) -> Hits:
    """Count the searches whose facts share a word with their query.

    The stop words of the language (`core.data.words.word_rules`) are shared by chance, so they do not count.
    """
    stop_words = word_rules(language).left_out
    hits = 0
    is_hit = False
    for query, facts in queries_and_facts:
        shared = set(words(query)).intersection(words(facts))
        is_hit = not shared <= stop_words
        hits += is_hit
    return Hits(hits, is_hit)


def hits_of_record(record: Record, language: str) -> Hits:
    """`count_hits` of a record's history; the text counts where a step has no triples."""
    searches = []
    for step in record.steps:
        facts = " ".join(f"{triple.subject} {triple.object}" for triple in step.triples)
        searches.append((step.query, facts or step.text))
    return count_hits(searches, language)


class CommonestAction:
    """Whether planners' labels mostly stop, by what a rule sees of the history; see `stops`.

    Args:
        plans: Planning records, such as those of training.
        see: What the rule sees of a record; of a tuple, nearer numbers are more alike.
    """

    def __init__(self, plans: Iterable[Record], see: Callable[[Record], tuple[float, ...]]) -> None:
        labels: dict[tuple[float, ...], Counter[bool]] = defaultdict(Counter)
        for record in plans:
            if record.task == "planning":
                labels[see(record)][record.action is not Action.SUBQ] += 1
        self._stops = {seen: counts.most_common(1)[0][0] for seen, counts in labels.items()}

    def stops(self, seen: tuple[float, ...]) -> bool:
        """Whether most labels after such a history stop; a history that no record has counts as the nearest one."""
        if not self._stops:
            return False

        def distance(history: tuple[float, ...]) -> tuple[float, tuple[float, ...]]:
            """The sum of the differences; among equals, the smaller history counts."""
            return sum(abs(number - own) for number, own in zip(history, seen, strict=True)), history

        return self._stops[min(self._stops, key=distance)]


def outcome_at_depth(ladder: Ladder, place: int, more_calls: int = 0) -> Outcome:
    """The outcome of a depth; a question that failed gets and pays nothing.

    Args:
        place: Index into `ladder.depths`, which is the number of searches only if the loop can answer without one.
        more_calls: Calls that the rule needs besides those of the depth.
    """
    if not ladder.depths:
        return Outcome(0, 0, {})
    chosen = ladder.depths[place]
    return Outcome(chosen.searches, chosen.calls + more_calls, chosen.scores, chosen.recall)


def first_depth_that_stops(ladder: Ladder, stops: Callable[[DepthAnswer], bool]) -> int:
    """The place of the first depth at which a rule stops; the last one if it never does."""
    for place, answered in enumerate(ladder.depths):
        if stops(answered):
            return place
    return len(ladder.depths) - 1


def counting_rule(plans: Sequence[Record]) -> StoppingRule:
    """Stop after as many searches as most labels of the records do."""
    labels = CommonestAction(plans, lambda record: (float(len(record.steps)),))
    return lambda ladder: outcome_at_depth(
        ladder, first_depth_that_stops(ladder, lambda depth: labels.stops((float(depth.searches),)))
    )


def words_rule(plans: Sequence[Record], language: str) -> StoppingRule:
    """Stop by the number of searches whose facts share a word with their query, and whether the last one did."""
    labels = CommonestAction(plans, lambda record: _seen_by_words_rule(hits_of_record(record, language)))

    def stops(answered: DepthAnswer) -> bool:
        """Whether most labels after such searches stop."""
        return labels.stops(_seen_by_words_rule(Hits(answered.hits, answered.last_hit)))

    return lambda ladder: outcome_at_depth(ladder, first_depth_that_stops(ladder, stops))


def _seen_by_words_rule(hits: Hits) -> tuple[float, ...]:
    """What `words_rule` sees of a history, for `CommonestAction`; that the last search hit weighs as one hit."""
    return float(hits.searches), float(hits.is_last)


class _CalibrationPoint(NamedTuple):
    """The margin and the score of an answer, and the fold of its question."""

    fold: int
    margin: float
    score: float


def tasr_rule(ladders: Sequence[Ladder], metric: str, least: float = TASR_MARGIN) -> StoppingRule | None:
    """TASR: stop when the answer repeats that of the search before, and its calibrated margin is above `least`.

    The margin is calibrated by isotonic regression, as in the paper: it becomes the share of right answers among
    answers with such a margin. That needs right answers, so a question is calibrated by the questions of other folds.
    The margin here is the mean over the answer's tokens, a choice of ours: of the paper only the abstract was read.
    Each round before the last costs one answer more than a fixed depth does. None if a margin is not known.
    """
    points: list[_CalibrationPoint] = []
    for ladder in ladders:
        for answered in ladder.depths:
            if not answered.depth or not answered.answer:
                continue
            if answered.margin is None:
                return None
            score = answered.scores.get(metric, 0.0)
            points.append(_CalibrationPoint(_calibration_fold(ladder.id), answered.margin, score))
    curves = {}
    for fold in range(TASR_FOLDS):
        curves[fold] = calibration_curve([(point.margin, point.score) for point in points if point.fold != fold])

    def rule(ladder: Ladder) -> Outcome:
        """Go from search to search; without a search there is no answer to repeat."""
        rounds = [place for place, answered in enumerate(ladder.depths) if answered.depth]
        curve = curves[_calibration_fold(ladder.id)]
        for number, (before, place) in enumerate(pairwise(rounds), 1):
            answered = ladder.depths[place]
            repeats = normalize_answer(answered.answer) == normalize_answer(ladder.depths[before].answer)
            if repeats and answered.margin is not None and curve(answered.margin) > least:
                return outcome_at_depth(ladder, place, number)
        return outcome_at_depth(ladder, -1, max(0, len(rounds) - 1))

    return rule


def _calibration_fold(question: str) -> int:
    """The fold of a question in TASR's calibration, from 0; a checksum of the id gives the same one in every run."""
    return zlib.crc32(question.encode()) % TASR_FOLDS


def calibration_curve(points: Sequence[tuple[float, float]]) -> Callable[[float], float]:
    """The share of right answers as a function of the margin that never falls, from (margin, score) of answers.

    Between two margins it is interpolated; without points it is 0.
    """
    from scipy.optimize import isotonic_regression

    if not points:
        return lambda margin: 0.0
    by_margin: dict[float, list[float]] = defaultdict(list)
    for margin, score in points:
        by_margin[margin].append(score)
    margins = np.array(sorted(by_margin))
    means = np.array([np.mean(by_margin[margin]) for margin in margins])
    weights = np.array([float(len(by_margin[margin])) for margin in margins])
    shares = isotonic_regression(means, weights=weights).x
    return lambda margin: float(np.interp(margin, margins, shares))


def best_depth_rule(metric: str) -> StoppingRule:
    """The bound of all rules: the depth with the best score, the shallowest among equals."""

    def rule(ladder: Ladder) -> Outcome:
        """Choose by the scores, which no other rule sees."""
        scores = [answered.scores.get(metric, 0.0) for answered in ladder.depths]
        return outcome_at_depth(ladder, scores.index(max(scores)) if scores else 0)

    return rule
