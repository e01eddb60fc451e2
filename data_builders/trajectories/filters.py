"""Filters of a teacher's runs: by score, by what was retrieved, and by what went wrong in the run.

The paper names no filter, so each one is an option. The card counts what each one left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from tripletune.data_builders.trajectories.options import TrajectoryOptions, parse_score
from tripletune.rag.results import ResultRow as StoredRow
from tripletune.rag.results import kept_facts

ResultRow = dict[str, Any]


class RunFilter(NamedTuple):
    """A condition that a run must meet.

    Attributes:
        reason: Why a run is left out, as the card says it.
        keeps: Whether a run is kept, given its row of the results and the faults of its replies (`Chat.faults`; none
            for the runs of a Graph-LLM, which have no chats).
    """

    reason: str
    keeps: Callable[[ResultRow, Sequence[str]], bool]


def filters_of(options: TrajectoryOptions) -> list[RunFilter]:
    """The filters that the options set, in the order in which they are applied and counted.

    A run counts for the first filter that it fails, so that the numbers of the card add up.
    """
    filters = []
    for text in options.min_score:
        name, least = parse_score(text)
        filters.append(RunFilter(f"{name} below {least:g}", partial(_has_score, name, least)))
    if options.no_repairs:
        filters.append(RunFilter("a reply was repaired or recovered from", _has_no_faults))
    if options.no_repeated_query:
        filters.append(RunFilter("a query was repeated", _repeats_no_query))
    if options.answer_kept:
        filters.append(RunFilter("no kept fact names a gold answer", _keeps_answer))
    if options.min_recall is not None:
        reason = f"less than {options.min_recall:g} of the supporting passages retrieved"
        filters.append(RunFilter(reason, partial(_has_recall, options.min_recall)))
    return filters


def failed_filter(filters: Sequence[RunFilter], row: ResultRow, faults: Sequence[str] = ()) -> str | None:
    """The reason of the first filter that leaves a run out, or None if the run passes all filters."""
    for run_filter in filters:
        if not run_filter.keeps(row, faults):
            return run_filter.reason
    return None


def _has_score(name: str, least: float, row: ResultRow, faults: Sequence[str]) -> bool:
    """Whether a run reaches a score; without a gold answer it never does. An unknown score is an error."""
    scores = row["scores"]
    # A question without a gold answer has no scores.
    if not scores:
        return False
    if name not in scores:
        raise ValueError(f"the results have no score {name!r}; they have {', '.join(scores)}")
    return bool(scores[name] >= least)


def _has_no_faults(row: ResultRow, faults: Sequence[str]) -> bool:
    """Whether no reply of a run was repaired or recovered."""
    return not faults


def _repeats_no_query(row: ResultRow, faults: Sequence[str]) -> bool:
    """Whether a run did not end because its planner asked the same again."""
    return bool(row["trace"].get("stop_reason") != "repeated_subquery")


def _keeps_answer(row: ResultRow, faults: Sequence[str]) -> bool:
    """Whether a core triple names a gold answer; see `kept_facts`."""
    kept = kept_facts(StoredRow.from_json(row))
    return kept is not None and kept.name_answer


def _has_recall(least: float, row: ResultRow, faults: Sequence[str]) -> bool:
    """Whether a run found enough of the supporting passages.

    A run over a corpus without `--gold` does not know them; it would else lose all its questions without a word.
    """
    recall = row.get("supporting_recall")
    if recall is not None:
        return bool(recall >= least)
    if not row["trace"]["steps"]:
        # The run retrieved nothing, which is right if the question has no supporting passages.
        return not row.get("supporting")
    raise ValueError(
        f"question {row['id']!r}: the results don't say which supporting passages were retrieved: "
        "run eval with --gold (`tripletune build corpus` writes the file), or leave out --min-recall"
    )
